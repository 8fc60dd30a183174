"""Rank 0's values count: what differs is seen, and only that travels."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from tilerec.comms.group import Group
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.broadcast_init import broadcast_from_rank_0
from tilerec.sharding import broadcast
from tilerec.sharding.broadcast import broadcast_tensor
from tilerec.spec.optimizer import Adagrad
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.testing.virtual import run_virtual_ranks


def tables() -> EmbeddingBagCollection:
    torch.manual_seed(0)
    configs = [EmbeddingBagConfig(9, 5, name, feature_names=[name]) for name in ("one", "other")]
    made = EmbeddingBagCollection(configs)
    apply_optimizer_in_backward(Adagrad(lr=0.1), list(made.parameters()))
    return made


@pytest.mark.parametrize("block", [2, 1 << 20])
@pytest.mark.parametrize("what", ["a cell", "two rows exchanged", "two columns exchanged", "state", "the update count"])
def test_any_difference_is_seen_and_only_its_tensors_travel(
    what: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "BLOCK_ROWS", block)
    base = tables()

    def run(group: Group) -> tuple[list[Tensor], int]:
        own = copy.deepcopy(base)
        table = own.embedding_bags["other"]
        if group.rank == 1:
            with torch.no_grad():
                if what == "a cell":
                    table.weight[8, 4] += 1.0
                elif what == "two rows exchanged":
                    table.weight[[0, 7]] = table.weight[[7, 0]]
                elif what == "two columns exchanged":
                    table.weight[2, [0, 3]] = table.weight[2, [3, 0]]
                elif what == "state":
                    table.rows.state["sum"][3, 3] = 1.0
                else:
                    table.rows.state["step"].fill_(3)
        broadcast_from_rank_0(group, {"": own}, list(own._tables.values()))
        state = table.rows.state
        return [table.weight.detach(), state["sum"], state["step"]], group.traffic["initial values"].total

    (want, sent), (got, _) = run_virtual_ranks(2, run)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert torch.equal(got[0], base.embedding_bags["other"].weight)
    assert sent == 2 * 9 * 5 * 4 + 8


@pytest.mark.parametrize("chunk", [1, 16, 1 << 24])
def test_values_travel_in_chunks_and_into_any_strides(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "CHUNK", chunk)

    def run(group: Group) -> None:
        for shape in ((), (0, 3), (4, 3)):
            tensor = torch.full(shape, float(group.rank + 1))
            broadcast_tensor(group, tensor)
            assert bool((tensor == 1.0).all())
        across = torch.full((3, 4), float(group.rank + 1)).T
        broadcast_tensor(group, across)
        assert bool((across == 1.0).all())

    run_virtual_ranks(3, run)
