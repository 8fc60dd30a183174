"""Lookups in quantized rows in Triton against the reference: bits, layouts, hostile input."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.ops.triton.interpreter import quick
from tilerec.errors import InputError
from tilerec.ops.quantized.row_format import BITS, quantize_rows
from tilerec.ops.runtime.library import LIBRARY

pytest.importorskip("triton")

from tilerec.ops.quantized.triton import backend
from tilerec.ops.runtime.triton import library

pytestmark = pytest.mark.skipif(not library.status().interpreted, reason="kernels are compiled here: tests/cuda")

KERNELS = LIBRARY.taking_arguments(backend.KERNELS)
POOLED, SEQUENCE = (KERNELS[f"quantized_{kind}_lookup"] for kind in ("pooled", "sequence"))
NAMES = "a@a,b@b,c@c,d@d,a@b"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(backend, "_STEPS", 2)
    with quick():
        yield


def tables(dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dim)
    floats = torch.randn(4, 20, dim, generator=generator) * 0.3
    return [*(quantize_rows(rows, bits) for rows, bits in zip(floats, BITS, strict=False)), floats[3].half()]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 20, (31,), generator=generator), torch.tensor([0, 3, 3, 7, 12, 14, 15, 21, 31])


@pytest.mark.parametrize("dim", [1, 5, 64, 130])
@pytest.mark.parametrize(
    ("batches", "weighted", "index"), [([2], False, torch.int64), ([2, 2, 1, 3], True, torch.int32)]
)
def test_pooled_rows_have_the_references_bits(dim: int, batches: list[int], weighted: bool, index: torch.dtype) -> None:
    ids, offsets = batch()
    weights = torch.rand(31) if weighted else None
    call = (
        tables(dim), [dim] * 4, [*BITS, 0], ids.to(index), offsets, weights, [0, 1, 2, 3, 1], [0, 1, 2, 3, 0],
        [0, 1, 0, 1, 0], batches, torch.float32, NAMES,
    )  # fmt: skip
    want = LIBRARY.references["quantized_pooled_lookup"](*call)
    assert torch.equal(POOLED(*call), want)


@pytest.mark.parametrize("dim", [3, 64, 130])
def test_rows_of_sequences_have_the_references_bits(dim: int) -> None:
    ids, _ = batch()
    for starts in (torch.tensor([0, 9, 9, 20, 31]), torch.tensor([0, 31, 31, 31, 31])):
        call = (tables(dim), [dim] * 4, [*BITS, 0], ids, starts, [0, 3, 1, 2], torch.float16, "a@a,d@d,b@b,c@c")
        assert torch.equal(SEQUENCE(*call), LIBRARY.references["quantized_sequence_lookup"](*call))


def test_bad_ids_and_offsets_are_named() -> None:
    ids, offsets = batch()
    ids[13] = 20
    layout = ([0, 1], [0, 2], [0, 0], [2], torch.float32, "a@a,b@b")
    rest = (tables(5), [5] * 4, [*BITS, 0])
    with pytest.raises(InputError, match=r"Table 'b': got id 20 of feature 'b' \(position 13"):
        POOLED(*rest, ids, offsets, None, *layout)
    with pytest.raises(InputError, match=r"Table 'b': got id 20 of feature 'b' \(position 13"):
        SEQUENCE(*rest, ids, torch.tensor([0, 10, 31]), [0, 1], torch.float32, "a@a,b@b")
    offsets[5] = 40
    with pytest.raises(InputError, match=r"Feature 'b': offsets\[5\] is 40"):
        POOLED(*rest, ids.clamp(max=19), offsets, None, *layout)
    with pytest.raises(InputError, match="the lengths sum to 31, but there are 32 values"):
        POOLED(*rest, torch.zeros(32, dtype=torch.int64), batch()[1], None, *layout)


def test_rows_of_another_format_are_refused() -> None:
    ids, offsets = batch()
    with pytest.raises(InputError, match=r"expected uint8 \[rows, 8\]"):
        POOLED(tables(5)[:1], [5], [4], ids, offsets, None, [0], [0], [0], [8], torch.float32, "a@a")


def test_rows_at_odd_addresses_are_read_by_the_reference() -> None:
    rows = quantize_rows(torch.randn(4, 8), 8)
    odd = torch.zeros(rows.numel() + 1, dtype=torch.uint8)[1:].view(rows.shape).copy_(rows)
    ids, offsets = torch.tensor([1, 3]), torch.tensor([0, 2])
    results = [
        POOLED([each], [8], [8], ids, offsets, None, [0], [0], [0], [1], torch.float32, "f@t") for each in (rows, odd)
    ]
    assert torch.equal(*results)


def test_nothing_to_look_up_gives_empty_outputs() -> None:
    none, starts = torch.zeros(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    out = POOLED(tables(5)[:1], [5], [8], none, starts, None, [0], [0], [0], [1], torch.float32, "a@a")
    assert torch.equal(out, torch.zeros(1, 5))
    assert SEQUENCE(tables(5)[:1], [5], [8], none, starts, [0], torch.float32, "a@a").shape == (0, 5)
