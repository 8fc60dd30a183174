"""Lookups in quantized rows on a GPU: the CPU's bits, and errors that come later."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.ops.quantized.row_format import BITS, quantize_rows
from tilerec.ops.runtime.library import LIBRARY

pytest.importorskip("triton")

from tilerec.ops.runtime.triton import reports

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = torch.device("cuda", 0)
ops = torch.ops.tilerec


def tables(dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dim)
    floats = torch.randn(4, 50, dim, generator=generator) * 0.3
    return [*(quantize_rows(rows, bits) for rows, bits in zip(floats, BITS, strict=False)), floats[3].half()]


@pytest.mark.parametrize("dim", [1, 5, 64, 130])
@pytest.mark.parametrize(("batches", "weighted"), [([2], False), ([2, 2, 1, 3], True)])
def test_lookups_have_the_references_bits(dim: int, batches: list[int], weighted: bool) -> None:
    ids, offsets = torch.arange(60) % 50, torch.tensor([0, 3, 3, 10, 20, 25, 30, 41, 60])
    weights = torch.rand(60) if weighted else None
    rest = ([0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 0, 1], batches, torch.float32, "a@a,b@b,c@c,d@d")
    common = ([dim] * 4, [*BITS, 0])
    want = LIBRARY.references["quantized_pooled_lookup"](tables(dim), *common, ids, offsets, weights, *rest)
    there = [rows.to(DEVICE) for rows in tables(dim)]
    on_gpu = None if weights is None else weights.to(DEVICE)
    got = ops.quantized_pooled_lookup(there, *common, ids.to(DEVICE), offsets.to(DEVICE), on_gpu, *rest)
    assert torch.equal(got.cpu(), want)
    sequence = (torch.tensor([0, 20, 30, 41, 60]), [0, 1, 2, 3], torch.float16, "a@a,b@b,c@c,d@d")
    want = LIBRARY.references["quantized_sequence_lookup"](tables(dim), *common, ids, *sequence)
    assert torch.equal(ops.quantized_sequence_lookup(there, *common, ids.to(DEVICE), *sequence).cpu(), want)


@pytest.mark.parametrize("bits", BITS)
def test_quantized_rows_have_the_cpus_bytes(bits: int) -> None:
    rows = torch.randn(5000, 65) * 0.01
    assert torch.equal(quantize_rows(rows.to(DEVICE), bits).cpu(), quantize_rows(rows, bits))


def test_a_bad_id_is_named() -> None:
    rows = [quantize_rows(torch.randn(5, 8), 8).to(DEVICE)]
    ids, offsets = torch.tensor([0, 5], device=DEVICE), torch.tensor([0, 2], device=DEVICE)

    def lookup() -> None:
        ops.quantized_pooled_lookup(rows, [8], [8], ids, offsets, None, [0], [0], [0], [1], torch.float32, "f@t")
        torch.cuda.synchronize()
        reports.raise_due(DEVICE)

    with pytest.raises(InputError, match="Table 't': got id 5 of feature 'f'"):
        lookup()
