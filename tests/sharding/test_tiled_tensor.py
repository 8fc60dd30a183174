"""Plain DTensors are loaded in place where they are cut over the same ranks in their order; else gathered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tilerec.comms.process import ProcessGroupComms
from tilerec.sharding.state import Cover, LogicalTensor, Piece, load
from tilerec.spec.tile import Tile

ROWS, DIM = 4, 3
WHOLE = torch.arange(float(ROWS * DIM)).view(ROWS, DIM)


@pytest.fixture
def group() -> Iterator[ProcessGroupComms]:
    """Rank 0 of two; rank 1 answers nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield ProcessGroupComms()
    dist.destroy_process_group()


def cut_rows(group: ProcessGroupComms) -> LogicalTensor:
    """Two rows on each rank, of which this one holds the first two."""
    tiles = [Tile(0, 2, 0, DIM, (0,)), Tile(2, ROWS, 0, DIM, (1,))]
    piece = Piece(0, torch.zeros(2, DIM))
    return LogicalTensor(Cover.of_cells((ROWS, DIM), tiles), (piece,), group, torch.zeros(0))


def shard_of(ranks: list[int], local: torch.Tensor) -> DTensor:
    mesh = DeviceMesh("cpu", ranks, _init_backend=False)
    return DTensor.from_local(local, mesh, (Shard(0),), run_check=False)


def test_rows_that_this_rank_has_are_taken_from_the_dtensor_without_a_message(
    group: ProcessGroupComms,
) -> None:
    target = cut_rows(group)
    load(target, shard_of([0, 1], WHOLE[:2].clone()))
    assert torch.equal(target.pieces[0].memory, WHOLE[:2])
    assert group.traffic.total() == 0


def test_a_dtensor_over_the_ranks_in_another_order_is_gathered(
    group: ProcessGroupComms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has its last rows there, so what it holds is not what the table wants here."""
    target = cut_rows(group)
    monkeypatch.setattr(DTensor, "full_tensor", lambda self: WHOLE)
    load(target, shard_of([1, 0], WHOLE[2:].clone()))
    assert torch.equal(target.pieces[0].memory, WHOLE[:2])
