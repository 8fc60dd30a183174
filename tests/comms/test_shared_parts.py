"""All-to-alls whose large parts stay in their sender's memory: results of sockets, and memory that is released."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tilerec.comms.process import ProcessGroupComms
from tilerec.comms.shared_parts import SharedHandle
from tilerec.errors import CommsError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.shard import shard
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD
from tilerec.spec.plan import ParameterSharding
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.spec.topology import Topology
from tilerec.testing.ranks import Ranks

LEAST = 64
NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="starts three ranks: nightly")


Pool = Callable[[int], Ranks]


def group_of(least: int = LEAST) -> ProcessGroupComms:
    """A process group of its own, whose ranks have agreed."""
    group = ProcessGroupComms(dist.new_group())
    group.split("channel")  # stays open: a rank that closes it at once cuts off peers that still connect
    group._shared.least_bytes = least
    return group


def sent(group: ProcessGroupComms, sizes: list[list[int]], dtype: torch.dtype) -> tuple[Tensor, list[int], list[int]]:
    """Return this rank's input, and its sizes to and from each rank: `sizes[sender][receiver]`."""
    out = sizes[group.rank]
    into = [row[group.rank] for row in sizes]
    parts = [torch.arange(n) % 50 + 10 * group.rank + p for p, n in enumerate(out)]
    return torch.cat(parts).to(dtype), out, into


def expected(group: ProcessGroupComms, sizes: list[list[int]], dtype: torch.dtype) -> Tensor:
    parts = [torch.arange(row[group.rank]) % 50 + 10 * rank + group.rank for rank, row in enumerate(sizes)]
    return torch.cat(parts).to(dtype)


SIZES = {
    2: [
        [[500, 400], [3, 0]],  # of the rank itself, shared, in the message, empty
        [[0, 700], [700, 0]],
        [[0, 1], [3, 0]],
    ],
    3: [[[500, 400, 0], [300, 0, 3], [0, 200, 100]], [[0, 700, 0], [0, 0, 700], [700, 0, 0]]],
}


def _all_sizes() -> list[str]:
    """Return the calls with another result than expected, or another kind of handle."""
    group = group_of()
    wrong: list[str] = []
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64):
        for sizes in SIZES[group.size]:
            input, out, into = sent(group, sizes, dtype)
            for output in (torch.empty(sum(into), dtype=dtype), None):
                handle = group.all_to_all("parts", output, input.clone(), into, out)
                received = handle.wait()
                if not torch.equal(received, expected(group, sizes, dtype)) or handle.wait() is not received:
                    wrong.append(f"{dtype} {sizes}")
                if isinstance(handle, SharedHandle) != (max(out + into) > 3):
                    wrong.append(f"{dtype} {sizes}: {type(handle).__name__}")
    return wrong


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=NIGHTLY)])
def test_parts_of_any_size_and_dtype_arrive_unchanged(pool: Pool, ranks: int) -> None:
    assert pool(ranks).run(_all_sizes) == [[]] * ranks


def _two_ways() -> tuple[list[int], bool]:
    group = group_of()
    peer = 1 - group.rank
    sizes = [1000 * (rank == peer) for rank in range(2)]
    addresses = []
    for turn in range(4):
        buffer = group.send_buffer(4000) if turn else torch.empty(4000, dtype=torch.uint8)
        assert buffer is not None
        input = buffer.view(torch.float32).fill_(turn + group.rank)
        received = group.all_to_all("turns", None, input, sizes, sizes).wait()
        assert torch.equal(received, torch.full((1000,), float(turn + peer)))
        addresses.append(input.data_ptr())
        del buffer, input, received
        group.barrier()  # the peer has released its part
    dropped = group.all_to_all("dropped", None, torch.zeros(1000), sizes, sizes)
    while not dropped.is_done():
        pass
    del dropped
    group.all_to_all("next", None, torch.zeros(1000), sizes, sizes).wait()
    group.barrier()
    arena = group._shared._arena
    assert arena is not None
    return addresses[1:], all(arena._is_free(block) for own in arena._blocks.values() for block in own)


def test_steps_reuse_one_block_and_dropped_results_release_theirs(pool: Pool) -> None:
    for addresses, all_free in pool(2).run(_two_ways):
        assert len(set(addresses)) == 1
        assert all_free


def _switched_off() -> tuple[bool, bool]:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setenv("TILEREC_SHARED_MEMORY", "0")
        group = group_of()
    sizes = [500, 500]
    received = group.all_to_all("numbers", None, torch.full((1000,), float(group.rank)), sizes, sizes).wait()
    assert torch.equal(received, torch.tensor([0.0, 1.0]).repeat_interleave(500))
    return group.send_buffer(4000) is None, group._shared._arena is None


def test_ranks_use_sockets_if_one_of_them_has_switched_shared_memory_off(pool: Pool) -> None:
    assert pool(2).run(_switched_off) == [(True, False), (True, True)]


def _steps(least: int) -> list[Tensor]:
    names = ["a", "b", "c"]
    module = EmbeddingBagCollection([EmbeddingBagConfig(40, 16, name, feature_names=[name]) for name in names])
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    apply_optimizer_in_backward(SGD, module.parameters(), {"lr": 0.1})
    kinds = {"a": "row_wise", "b": "table_wise", "c": "data_parallel"}
    plan = {name: ParameterSharding(kind, ranks=[1] if kind == "table_wise" else None) for name, kind in kinds.items()}
    group = group_of(least)
    sharded = shard(module, plan={"": plan}, topology=Topology(2, "cpu"), mesh=group)
    outputs = []
    for step in range(3):
        generator.manual_seed(10 * step + group.rank)
        ids = torch.randint(40, (3 * 30 * 4,), generator=generator)
        batch = KeyedJaggedTensor(names, ids, lengths=torch.full((90,), 4, dtype=torch.int32))
        values = sharded(batch).values()
        (values * torch.randn(values.shape, generator=generator)).sum().backward()
        outputs.append(values.detach())
    return [*outputs, *(leaf.detach() for leaf in sharded.parameters())]


def _both() -> bool:
    shared, sockets = _steps(LEAST), _steps(1 << 40)
    return all(torch.equal(a, b) for a, b in zip(shared, sockets, strict=True))


def test_sharded_steps_have_the_bits_of_messages_through_sockets(pool: Pool) -> None:
    assert pool(2).run(_both) == [True, True]


def _unequal_sizes() -> str:
    group = group_of()
    into, out = ([0, 400], [0, 300]) if group.rank == 0 else ([400, 0], [400, 0])
    handle = group.all_to_all("parts", None, torch.zeros(sum(out)), into, out)
    try:
        handle.wait()
    except CommsError as error:
        return str(error)
    return "received"


def test_parts_of_another_size_than_their_receiver_expects_are_an_error(pool: Pool) -> None:
    received, refused = pool(2).run(_unequal_sizes)
    assert received == "received"
    assert "got a part of 1200 bytes; expected 1600. A rank makes other calls" in refused
