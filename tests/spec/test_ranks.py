"""Ranks as text and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilerec.errors import ConfigError
from tilerec.spec.ranks import (
    owners_to_text,
    placement_to_rank,
    ranks_to_text,
    text_to_owners,
    text_to_ranks,
)

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
    assert text_to_owners(owners_to_text(owners), "owners") == tuple(owners)


def test_lists_and_single_ranks_are_read_too() -> None:
    assert text_to_ranks([3, 1], "ranks") == (3, 1)
    assert text_to_ranks(3, "ranks") == (3,)
    assert text_to_ranks(" 0 - 2 , 7 ", "ranks") == (0, 1, 2, 7)
    assert text_to_owners([0, [1, 2]], "owners") == ((0,), (1, 2))


@pytest.mark.parametrize("text", ["x", "0,,1", "3-1", "-1", None, True, [0, -1], [0, "1"], {"a": 1}, 1.5])
def test_what_is_no_list_of_ranks_is_refused_with_an_example(text: object) -> None:
    with pytest.raises(ConfigError, match=r"Table 't': ranks got .* wanted ranks such as \"0-7,12\""):
        text_to_ranks(text, "Table 't': ranks")


def test_an_open_brace_is_refused() -> None:
    with pytest.raises(ConfigError, match="a brace is not closed"):
        text_to_owners("0,{1,2", "ranks")


def test_a_placement_names_its_rank() -> None:
    assert placement_to_rank("rank:3/cuda:1") == 3
    with pytest.raises(ConfigError, match="'cuda:1' names no rank"):
        placement_to_rank("cuda:1")
