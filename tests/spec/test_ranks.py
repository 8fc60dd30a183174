"""Ranks as text and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilerec import json_document
from tilerec.errors import ConfigError
from tilerec.json_document import JsonValue
from tilerec.spec.ranks import (
    MOST_RANKS,
    owners_to_text,
    placement_to_rank,
    ranks_to_text,
    read_owners,
    read_ranks,
    text_to_ranks,
)


def owners_of(text: object) -> tuple[tuple[int, ...], ...]:
    return read_owners(JsonValue.of(text, "ranks"))


RANKS = st.lists(st.integers(0, 2000), max_size=20)


def test_a_thousand_ranks_fit_on_a_line() -> None:
    assert ranks_to_text(range(1000)) == "0-999"
    assert ranks_to_text([0, 1, 2, 5, 4]) == "0-2,5,4"
    assert owners_to_text([(0,), (1,), (2, 6)]) == "0-1,{2,6}"


@given(RANKS)
def test_a_tuple_reads_like_a_list(ranks: list[int]) -> None:
    assert ranks_to_text(tuple(ranks)) == ranks_to_text(ranks)
    assert owners_to_text([(rank,) for rank in ranks]) == ranks_to_text(ranks)


@given(RANKS)
def test_text_keeps_ranks_and_their_order(ranks: list[int]) -> None:
    assert text_to_ranks(ranks_to_text(ranks), "ranks") == tuple(ranks)


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=4).map(tuple), max_size=8))
def test_text_keeps_owners(owners: list[tuple[int, ...]]) -> None:
    assert owners_of(owners_to_text(owners)) == tuple(owners)


def test_lists_and_single_ranks_are_read_too() -> None:
    assert text_to_ranks([3, 1], "ranks") == (3, 1)
    assert text_to_ranks(3, "ranks") == (3,)
    assert text_to_ranks(" 0 - 2 , 7 ", "ranks") == (0, 1, 2, 7)
    assert owners_of([0, [1, 2]]) == ((0,), (1, 2))


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "0,,1",
        "3-1",
        "-1",
        None,
        True,
        [0, -1],
        [0, "1"],
        {"a": 1},
        1.5,
        "0-99999999999",
        "9" * 5000,
        2**20,
        [2**20],
        "0-1048576",
        "0-1048575,0",
        "²",
        "٣",
    ],
)
def test_what_is_no_list_of_ranks_is_refused_with_an_example(text: object) -> None:
    with pytest.raises(ConfigError, match=r"Table 't': ranks: got .*; expected ranks such as \"0-7,12\""):
        text_to_ranks(text, "Table 't': ranks")


def test_an_open_brace_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ranks: got .0,\{1,2.; expected .*replicas in braces"):
        owners_of("0,{1,2")


def test_a_placement_names_its_rank() -> None:
    assert placement_to_rank("rank:3/cuda:1") == 3
    with pytest.raises(ConfigError, match="got 'cuda:1'; expected a rank"):
        placement_to_rank("cuda:1")


def test_the_most_ranks_are_read() -> None:
    assert len(text_to_ranks(f"0-{MOST_RANKS - 1}", "ranks")) == MOST_RANKS


def test_a_text_of_ranks_is_expanded_once_in_a_document_and_all_of_them_to_a_bounded_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json_document, "MOST_PIECES", 2 * MOST_RANKS)
    same = JsonValue.of([f"0-{MOST_RANKS - 1}"] * 1000, "Plan").items()
    first = read_ranks(same[0])
    assert all(read_ranks(value) is first for value in same)
    one_by_one = [f"{n}-{MOST_RANKS - 1}" for n in range(4)]
    with pytest.raises(
        ConfigError,
        match=r"Plan: \[\d+\]: got .* at most 2,097,152 ranks and row ranges in all. Name fewer ranks",
    ):
        list(map(read_ranks, JsonValue.of(one_by_one, "Plan").items()))
