"""Feature names: checked and indexed once."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilerec.errors import InputError
from tilerec.sparse.keys import Keys, UnknownKeyError

NAMES = st.lists(st.text("abc", max_size=3), unique=True, max_size=8)


@given(NAMES)
def test_keys_are_a_list_with_positions(names: list[str]) -> None:
    keys = Keys(names)
    assert list(keys) == names
    assert len(keys) == len(names)
    assert keys.positions() == {name: position for position, name in enumerate(names)}
    assert all(keys[keys.position(name)] == name and name in keys for name in names)


def test_the_same_names_are_the_same_object() -> None:
    assert Keys.of(["a", "b"]) is Keys.of(("a", "b"))
    assert Keys.of(Keys.of(["a"])) is Keys.of(["a"])


def test_equality_and_hash_follow_the_names() -> None:
    assert Keys(["a", "b"]) == Keys(["a", "b"])
    assert hash(Keys(["a", "b"])) == hash(Keys(["a", "b"]))
    assert Keys(["a", "b"]) != Keys(["b", "a"])
    assert Keys(["a"]) != ["a"]


def test_a_repeated_name_is_refused_with_its_positions() -> None:
    with pytest.raises(InputError, match=r"got 'b' at positions \[1, 3\]"):
        Keys(["a", "b", "c", "b"])


@pytest.mark.parametrize("names", ["abc", [1, 2], ["a", None]])
def test_only_lists_of_strings_are_names(names: object) -> None:
    with pytest.raises(InputError, match="expected"):
        Keys.of(names)  # type: ignore[arg-type]


def test_three_close_names_are_suggested_and_no_more() -> None:
    names = tuple(f"user_{c}" for c in "abcd")
    with pytest.raises(UnknownKeyError, match=r"did you mean ('user_\w' or ){2}'user_\w'\?"):
        Keys.of(names).position("user_x")


def test_a_missing_name_is_both_errors_and_suggests_close_ones() -> None:
    keys = Keys(["user_id", "item_id"])
    with pytest.raises(UnknownKeyError, match=r"^Unknown key 'user_di': did you mean 'user_id'") as caught:
        keys.position("user_di")
    assert isinstance(caught.value, InputError)
    assert isinstance(caught.value, KeyError)
    with pytest.raises(UnknownKeyError, match=r"the keys are \['user_id', 'item_id'\]"):
        keys.position("x")


def test_selections_and_splits_are_remembered() -> None:
    keys = Keys.of(["a", "b", "c"])
    assert list(keys.select([2, 0])) == ["c", "a"]
    assert keys.select([2, 0]) is keys.select((2, 0))
    assert [list(part) for part in keys.split([1, 0, 2])] == [["a"], [], ["b", "c"]]
    assert keys.split([1, 0, 2]) is keys.split([1, 0, 2])


def test_memory_of_selections_is_bounded() -> None:
    keys = Keys([f"f{i}" for i in range(300)])
    for start in range(300):
        assert list(keys.select([start])) == [f"f{start}"]
        assert [len(part) for part in keys.split([start, 300 - start])] == [start, 300 - start]
    assert len(keys._selections) <= 64
    assert len(keys._splits) <= 64


@pytest.mark.parametrize("indices", [[3], [-1], [0, 7]])
def test_a_position_that_is_not_there_is_refused(indices: list[int]) -> None:
    with pytest.raises(InputError, match=r"expected one in \[0, 3\)"):
        Keys(["a", "b", "c"]).select(indices)


@pytest.mark.parametrize("segments", [[1], [1, 1], [4], [4, -1]])
def test_a_split_deals_all_keys(segments: list[int]) -> None:
    with pytest.raises(InputError, match="sum to the number of keys, 3"):
        Keys(["a", "b", "c"]).split(segments)


def test_keys_copy_and_pickle_as_their_names() -> None:
    keys = Keys.of(["a", "b"])
    assert copy.deepcopy(keys) is keys
    assert copy.copy(keys) is keys
    assert pickle.loads(pickle.dumps(keys)) == keys
    assert repr(keys) == "Keys(['a', 'b'])"


def test_copies_come_only_from_a_selection() -> None:
    copies = Keys.of(["a", "b"]).select([1, 0, 1])
    assert copies.names == ("b", "a", "b")
    assert copies.position("b") == 2
    assert copies is Keys.known(["b", "a", "b"])
    assert pickle.loads(pickle.dumps(copies)) == copies
    assert [part.names for part in copies.split([2, 1])] == [("b", "a"), ("b",)]
    assert [part.names for part in copies.select([0, 2]).split([2])] == [("b", "b")]
    for make in (Keys, Keys.of):
        with pytest.raises(InputError, match=r"got 'b' at positions \[0, 2\]"):
            make(copies.names)
    assert Keys.known(["a", "b"]) == Keys.of(["a", "b"])
