"""`agree`: equal values pass, a difference is an error on every rank that says where it lies."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from tilerec.comms.agreement import agree, agreeing, on_all_ranks
from tilerec.comms.group import Group
from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import ConfigError
from tilerec.spec.plan import ParameterSharding, ShardingType, Wire
from tilerec.spec.topology import Topology
from tilerec.testing.ranks import Ranks
from tilerec.testing.virtual import run_virtual_ranks


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Part:
    name: str
    cuts: tuple[int, ...]


def texts(values: Sequence[object], what: str = "the plan") -> list[str]:
    """What `agree` says on each rank, given each rank's value; "" where it returns."""

    def ask(group: Group) -> str:
        try:
            agree(group, what, values[group.rank])
        except ConfigError as error:
            return str(error)
        return ""

    return run_virtual_ranks(len(values), ask)


def text(values: Sequence[object]) -> str:
    """The one thing that every rank says."""
    said = texts(values)
    assert len(set(said)) == 1
    return said[0]


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        float("nan"),
        "ä",
        [],
        {},
        Colour.RED,
        (1, [2.5, {"a": None}]),
        Part("x", (1, 2)),
        Topology(4, "cpu", hosts=[[0, 1], [2, 3]]),
        ParameterSharding(ShardingType.TABLE_WISE, ranks=[1], wire=Wire("bf16", "int8")),
    ],
    ids=repr,
)
def test_equal_values_pass(value: object) -> None:
    assert texts([value] * 3) == [""] * 3


def test_order_counts_in_sequences_and_not_in_mappings_and_sets() -> None:
    assert text([{"a": 1, "b": 2}, {"b": 2, "a": 1}]) == ""
    assert text([{3, 1, 2}, frozenset((2, 3, 1))]) == ""
    assert text([(1, 2), [1, 2]]) == ""
    assert "[0] is 1 on rank 0 and 2 on rank 1" in text([[1, 2], [2, 1]])


def test_a_difference_names_ranks_and_place_on_every_rank() -> None:
    plan = {"tables": {"user": Part("user", (0, 3, 9)), "item": Part("item", (0, 4))}}
    other = {"tables": {"user": Part("user", (0, 4, 9)), "item": Part("item", (0, 4))}}
    assert text([plan, plan, other, other, plan]) == (
        "The plan differs between ranks: tables.user.cuts[1] is 3 on ranks 0, 1, 4 and 4 on ranks 2, 3. "
        "Start every rank with the same configuration."
    )


def test_the_majority_is_right_and_of_equals_the_lowest_rank() -> None:
    assert "it is 7 on ranks 1, 2 and 5 on rank 0" in text([5, 7, 7])
    assert "it is 5 on rank 0 and 7 on rank 1" in text([5, 7])
    assert "it is 5 on rank 0 and 6 on rank 1; it is 5 on rank 0 and 7 on rank 2" in text([5, 6, 7])


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"a": 1}, {}, "a is there on rank 0 and missing on rank 1"),
        ({}, {"a": 1}, "a is missing on rank 0 and there on rank 1"),
        ([1, 2], [1], "it (length) is 2 on rank 0 and 1 on rank 1"),
        ({"k": [[1], [2, 3]]}, {"k": [[1], [2]]}, "k[1] (length) is 2 on rank 0 and 1 on rank 1"),
        (1, 1.0, "it is 1 on rank 0 and 1.0 on rank 1"),
        (1, True, "it is 1 on rank 0 and True on rank 1"),
        (1, "1", "it is 1 on rank 0 and '1' on rank 1"),
        (None, {"a": 1}, "it is None on rank 0 and {'a': 1} on rank 1"),
        (Colour.RED, Colour.BLUE, "it is 'red' on rank 0 and 'blue' on rank 1"),
        ({1, 2}, {1, 3}, "[1] is 2 on rank 0 and 3 on rank 1"),
    ],
    ids=repr,
)
def test_the_first_difference_is_told(one: object, other: object, expected: str) -> None:
    assert expected in text([one, other])


def test_a_long_value_is_cut_and_many_camps_are_not_all_listed() -> None:
    said = text(["x" * 5000, "y" * 5000])
    assert len(said) < 500
    assert "…" in said
    assert text([str(rank) for rank in range(20)]).count("on rank 0 and") == 4
    half = text([rank // 20 for rank in range(40)])
    assert "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, … and 1 on ranks 20, " in half


def test_what_has_no_comparable_form_is_refused() -> None:
    said = text([{"weight": torch.zeros(2)}] * 2)
    assert said.startswith("agree on the plan: got a value of type Tensor, which ranks cannot compare")
    assert "type bytes" in text([b"ab"] * 2)
    assert "type Part" not in text([Part("x", ())] * 2)


def test_one_rank_agrees_with_itself_without_a_call() -> None:
    assert texts([object()]) == [""]


def _ask_on_processes() -> str:
    group = ProcessGroupComms()
    agree(group, "the batch's keys", ["user", "item"])
    try:
        agree(group, "the batch's keys", ["user", "item" if group.rank < 2 else "shop"])
    except ConfigError as error:
        group.barrier()
        return str(error)
    return ""


def test_processes_agree_and_differ_as_threads_do(pool: Callable[[int], Ranks]) -> None:
    assert (
        pool(3).run(_ask_on_processes)
        == [
            "The batch's keys differs between ranks: [1] is 'item' on ranks 0, 1 and 'shop' on rank 2. Start "
            "every rank with the same configuration."
        ]
        * 3
    )


def test_a_block_that_raises_on_one_rank_raises_on_all_when_all_are_done() -> None:
    def run(group: Group, bad: Sequence[int]) -> tuple[str, str]:
        done = ""
        try:
            with on_all_ranks(group, "the model", "its tiles"):
                done = "done"
                if group.rank in bad:
                    raise KeyError("t")
        except (KeyError, ConfigError) as error:
            return done, f"{type(error).__name__}: {error}"
        return done, ""

    assert run_virtual_ranks(3, run, ()) == [("done", "")] * 3
    said = run_virtual_ranks(3, run, (0, 2))
    assert said[0] == said[2] == ("done", "KeyError: 't'")
    told = (
        "ConfigError: The model: its tiles failed on ranks 0, 2 with KeyError: 't'. All ranks stop; fix the cause "
        "there."
    )
    assert said[1] == ("done", told)
    assert run_virtual_ranks(1, run, (0,)) == [("done", "KeyError: 't'")]


def test_an_error_in_checks_raises_on_all_ranks_in_the_comparison_that_follows() -> None:
    def run(group: Group) -> str:
        try:
            with agreeing(group, "the model") as found:
                if group.rank == 1:
                    raise KeyError("t")
                found["size"] = 3
        except (KeyError, ConfigError) as error:
            return str(error)
        return ""

    first, second = run_virtual_ranks(2, run)
    assert second == "'t'"
    assert """checks is 'passed' on rank 0 and "KeyError: 't'" on rank 1""" in first


def test_values_that_checks_find_are_compared() -> None:
    def run(group: Group, sizes: Sequence[int]) -> str:
        try:
            with agreeing(group, "the model") as found:
                found["size"] = sizes[group.rank]
        except ConfigError as error:
            return str(error)
        return ""

    assert run_virtual_ranks(2, run, (3, 3)) == ["", ""]
    assert run_virtual_ranks(2, run, (3, 4))[0].startswith(
        "The model differs between ranks: size is 3 on rank 0 and 4 on rank 1"
    )


@pytest.mark.parametrize("protocol", ["agreeing", "on_all_ranks"])
def test_an_interrupt_of_one_rank_does_not_leave_the_others_waiting(protocol: str) -> None:
    def run(group: Group) -> str:
        block = agreeing(group, "the model") if protocol == "agreeing" else on_all_ranks(group, "the model", "it")
        try:
            with block:
                if group.rank == 1:
                    raise KeyboardInterrupt
        except ConfigError as error:
            return str(error)
        except KeyboardInterrupt:
            return "interrupted"
        return ""

    first, second = run_virtual_ranks(2, run)
    assert second == "interrupted"
    assert "KeyboardInterrupt" in first


def test_ranks_have_the_names_that_the_caller_gives_them() -> None:
    def run(group: Group) -> None:
        agree(group, "the hook", group.rank == 1, ranks=(4, 6))

    with pytest.raises(ConfigError, match="it is False on rank 4 and True on rank 6"):
        run_virtual_ranks(2, run)
