"""Initial values on a GPU: a tile has the bits of the whole table, and the caller's generators stay as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilerec.modules import initial_values as initial
from tilerec.modules.initial_values import fill_initial
from tilerec.spec.table import EmbeddingBagConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_the_cpu(rows: Tensor) -> Tensor:
    return torch.randn(rows.shape)


@pytest.mark.parametrize("init_fn", [nn.init.normal_, on_the_cpu])
def test_a_tile_has_the_bits_of_the_whole_table(init_fn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial, "INIT_BLOCK", 8)
    table = EmbeddingBagConfig(27, 5, "t", init_fn=init_fn)

    def tile(r0: int, r1: int, c0: int, c1: int) -> Tensor:
        out = torch.zeros(r1 - r0, c1 - c0, device="cuda")
        fill_initial(out, table, (5, 7), r0, c0)
        return out

    torch.manual_seed(3)
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    whole = tile(0, 27, 0, 5)
    assert whole.unique().numel() > 100
    for r0, r1, c0, c1 in ((0, 8, 0, 5), (7, 9, 2, 5), (8, 27, 0, 1)):
        assert torch.equal(tile(r0, r1, c0, c1), whole[r0:r1, c0:c1])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.cuda.get_rng_state(), states[1])
