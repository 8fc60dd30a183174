"""Items in a chosen order: the same from the op, the reference and every instruction set; bad orders are refused."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from tilerec.errors import ConfigError, InputError
from tilerec.ops import backends as backends
from tilerec.ops.hash.cpu import kernels
from tilerec.ops.hash.definition import hash_rows, take_items_
from tilerec.ops.runtime.cpu.library import library
from tilerec.ops.runtime.library import LIBRARY

NATIVE = library()
LARGE = 2**63 - 1
Kernel = Callable[..., None]


def _native(level: int) -> Kernel:
    assert NATIVE is not None
    NATIVE.tr_isa_choose(level)
    return LIBRARY.taking_arguments(kernels(NATIVE))["take_items_"]


@pytest.fixture(params=["reference", "op", 0, 1, 2])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """The reference, the op, and the native kernel for each instruction set."""
    if request.param == "reference":
        yield LIBRARY.references["take_items_"]
    elif request.param == "op":
        yield torch.ops.tilerec.take_items_.default
    else:
        if not isinstance(NATIVE, ctypes.CDLL):
            pytest.skip("the native CPU library is not built")
        before = NATIVE.tr_isa()
        yield _native(request.param)
        NATIVE.tr_isa_choose(before)


def _taken(kernel: Kernel, items_n: Tensor, order_M: Tensor, counts: Sequence[int], rows: int, first: int) -> Tensor:
    """Return the items of all parts, each part between two guards that must stay."""
    guard = torch.ones(2, dtype=items_n.dtype)
    outs = [torch.cat((guard, items_n.new_zeros(count), guard)) for count in counts]
    kernel(items_n, order_M, counts, outs, [2] * len(counts), rows, first)
    assert all(bool((torch.cat((out[:2], out[-2:])) == 1).all()) for out in outs)
    return torch.cat([out[2:-2] for out in outs]) if outs else items_n.new_zeros(0)


def test_parts_get_the_worked_example(kernel: Kernel) -> None:
    outs = [torch.zeros(1), torch.full((3,), 7.0)]
    kernel(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2, 0, 2]), [1, 2], outs, [0, 1], 0, 0)
    assert [out.tolist() for out in outs] == [[3.0], [7.0, 1.0, 3.0]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.int32, torch.float64])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_items_are_copied_for_all_sizes_of_parts(kernel: Kernel, dtype: torch.dtype, index: torch.dtype) -> None:
    items_n = torch.arange(1000).to(dtype)
    for counts in ([], [0], [1], [0, 1, 0], [511, 512, 513], [2000, 3]):
        order_M = torch.randint(1000, (sum(counts),), generator=torch.Generator().manual_seed(3), dtype=index)
        assert torch.equal(_taken(kernel, items_n, order_M, counts, 0, 0), items_n[order_M])


@pytest.mark.parametrize(
    ("rows", "first"), [(1, 0), (2, 1), (1000, 0), (2**31 + 5, 1), (2**32, 0), (LARGE, 0), (LARGE, 5)]
)
def test_ids_become_the_rows_of_their_hashes(kernel: Kernel, rows: int, first: int) -> None:
    draws_n = torch.randint(-(2**63), LARGE, (700,), generator=torch.Generator().manual_seed(5))
    ids_n = torch.cat((torch.tensor([-(2**63), -1, 0, 1, LARGE]), draws_n))
    order_M = torch.randperm(705, generator=torch.Generator().manual_seed(7)).repeat(2).to(torch.int32)
    for counts in ([1410], [1, 7, 890, 512, 0]):
        expected = torch.empty_like(ids_n[order_M])
        hash_rows(ids_n[order_M], rows, first, expected)
        assert torch.equal(_taken(kernel, ids_n, order_M, counts, rows, first), expected)


def test_items_may_be_strided(kernel: Kernel) -> None:
    items_n, order_M = torch.arange(30).view(10, 3)[:, 1], torch.arange(9, -1, -1).repeat_interleave(2)[::2]
    assert torch.equal(_taken(kernel, items_n, order_M, [4, 6], 0, 0), items_n.flip(0))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("bad", [-1, 5, -(2**31), 2**31 - 1])
def test_an_order_beyond_the_items_is_refused(kernel: Kernel, bad: int, index: torch.dtype) -> None:
    order_M = torch.zeros(1500, dtype=index)
    order_M[1203] = bad
    with pytest.raises(InputError, match=rf"got {bad} in order\[1203\]; expected numbers of items in \[0, 5\)"):
        _taken(kernel, torch.arange(5), order_M, [700, 800], 0, 0)
    with pytest.raises(InputError, match=r"got 0 in order\[0\]; expected numbers of items in \[0, 0\)"):
        _taken(kernel, torch.zeros(0), order_M[:1], [1], 0, 0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"order_M": torch.zeros(3)}, InputError, "order .* expected a flat list of integers"),
        ({"counts": [1, 1]}, InputError, "sum of 2; expected 3"),
        ({"counts": [4, -1]}, InputError, "-1 items"),
        ({"starts": [0, 4]}, InputError, "got 2 items from 4 on for out of 5"),
        ({"starts": [-1, 0]}, InputError, "got 1 items from -1 on"),
        ({"starts": [0]}, InputError, "2 counts, 2 outs and 1 starts"),
        ({"outs": [torch.zeros(5), torch.zeros(5)]}, InputError, "of torch.float32; expected contiguous flat memory"),
        ({"outs": [torch.arange(5), torch.arange(10)[::2]]}, InputError, "expected contiguous flat memory"),
        ({"items_n": torch.zeros(4, dtype=torch.int16)}, InputError, "expected a flat list of 4 or 8 bytes each"),
        ({"items_n": torch.zeros(4), "rows": 9}, InputError, r"ids are torch\.float32"),
        ({"rows": 3, "first_row": 3}, ConfigError, "rows is 3; expected 4"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, object], error: type[Exception], message: str) -> None:
    given: dict[str, object] = {
        "items_n": torch.arange(4), "order_M": torch.tensor([3, 2, 1]), "counts": [1, 2],
        "outs": [torch.arange(5), torch.arange(5)], "starts": [0, 3],
    }  # fmt: skip
    with pytest.raises(error, match=message):
        take_items_(**{**given, **change})  # type: ignore[arg-type]
