"""`hot_ids`: ids of some keys are replaced by the rows of their copies, by every backend alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from tilerec.errors import ConfigError, InputError
from tilerec.ops import backends as backends
from tilerec.ops.exchange.definition import ID_BIT, LAST_FAULT, raise_fault
from tilerec.ops.hot.definition import finder_of
from tilerec.ops.runtime.library import LIBRARY

OPS = torch.ops.tilerec
HOT = torch.tensor([3, 7])


def replaced(ids: Tensor, *arguments: Any, reference: bool = False) -> Tensor:
    found: Tensor = (LIBRARY.references["hot_ids"] if reference else OPS.hot_ids)(ids, *arguments)
    return found


def one_map(offsets: list[int], rows: int = 10, hot: Tensor = HOT) -> tuple[Any, ...]:
    bags = len(offsets) - 2
    return (torch.tensor(offsets), [1], [1, bags], [hot], [finder_of(hot.numpy())], [rows], "f@t")


@pytest.mark.parametrize("reference", [False, True])
def test_it_gives_the_worked_example(reference: bool) -> None:
    ids = torch.tensor([7, 3, 7, 0, 3, 9])
    assert replaced(ids, *one_map([0, 2, 6]), reference=reference).tolist() == [7, 3, 11, 0, 10, 9]
    assert ids.tolist() == [7, 3, 7, 0, 3, 9]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [0, 1, 9, 500])
@pytest.mark.parametrize("size", [0, 40, 40_000])
def test_any_number_of_ids_and_hot_ids_has_the_reference_s_result(size: int, count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size + count)
    rows = [1000, 700, 1000]
    ids = torch.randint(0, 700, (3 * size,), generator=generator, dtype=dtype)
    hot = [torch.randperm(n, generator=generator)[:count].sort()[0] for n in rows]
    arguments = (
        torch.arange(4) * size, [2, 0, 1], [1, 1, 1], hot, [finder_of(own.numpy()) for own in hot], rows, "a@a,b@b,c@c"
    )  # fmt: skip
    got = replaced(ids, *arguments)
    assert torch.equal(got, replaced(ids, *arguments, reference=True))
    assert got.dtype == dtype
    for key, own, n in zip([2, 0, 1], hot, rows, strict=True):
        place = {id: n + k for k, id in enumerate(own.tolist())}
        mine = slice(key * size, (key + 1) * size)
        assert got[mine].tolist() == [place.get(id, id) for id in ids[mine].tolist()]


def test_a_finder_finds_ids_that_meet_at_one_slot() -> None:
    ids = np.arange(0, 1 << 40, 1 << 30, dtype=np.int64)
    hot = torch.from_numpy(ids)
    got = replaced(hot.flip(0), torch.tensor([0, 0, len(ids)]), [1], [1, 1], [hot], [finder_of(ids)], [1 << 41], "f@t")
    assert got.tolist() == [(1 << 41) + k for k in range(len(ids))][::-1]


def test_int32_ids_become_int64_where_rows_need_it() -> None:
    ids = torch.tensor([3, 4], dtype=torch.int32)
    for reference in (False, True):
        got = replaced(ids, *one_map([0, 0, 2], rows=1 << 31), reference=reference)
        assert got.tolist() == [1 << 31, 4]


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("bad", [-1, 10, 11])
def test_a_bad_id_is_named(bad: int, reference: bool) -> None:
    with pytest.raises(InputError, match=rf"id {bad} of feature 'f'.* expected ids in \[0, 10\)"):
        replaced(torch.tensor([50, 1, bad]), *one_map([0, 1, 3]), reference=reference)


@pytest.mark.parametrize("offsets", [[0, 2, 900], [0, 5, 1], [0, -4, 6], [0]])
def test_offsets_that_routing_refuses_are_left_to_it(offsets: list[int]) -> None:
    ids = torch.tensor([7, 3, 7, 0, 3, 9])
    replaced(ids, torch.tensor(offsets), [1], [1, 1], [HOT], [finder_of(HOT.numpy())], [10], "f@t")


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hot_ids: got ids torch\.float32"):
        replaced(torch.tensor([1.0]), *one_map([0, 0, 1]))
    with pytest.raises(ConfigError, match="finder_of"):
        OPS.hot_ids(
            torch.tensor([1]), torch.tensor([0, 1]), [0], [1], [HOT], [torch.zeros(3, dtype=torch.int32)], [10], "f@t"
        )
    with pytest.raises(ConfigError, match="one of each per map"):
        OPS.hot_ids(torch.tensor([1]), torch.tensor([0, 1]), [0], [1], [], [], [], "")


def test_it_passes_torch_s_checks() -> None:
    opcheck(OPS.hot_ids.default, (torch.tensor([7, 3, 7, 0, 3, 9]), *one_map([0, 2, 6])))


def test_a_fault_on_a_device_names_the_id_and_the_rows_without_the_copies() -> None:
    """There `hot_ids` raises nothing: an id that is too large comes out larger by the number of hot ids."""
    fault = LAST_FAULT - (ID_BIT | 2)  # route 0, an id, at position 2
    for bad, made in ((11, 13), (-1, -1)):
        with pytest.raises(InputError, match=rf"id {bad} of feature 'f'.* expected ids in \[0, 10\)"):
            raise_fault(fault, torch.tensor([50, 1, made]), torch.tensor([0, 1, 3]), [0, 5, 12], [2], "f@t", [2])
