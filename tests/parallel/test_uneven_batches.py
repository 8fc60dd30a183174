"""Ranks that run out of batches keep in step, and train as one process would on all samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tilerec.comms.group import Group
from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import CommsError, ConfigError, InputError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.shard import shard
from tilerec.parallel.uneven_batches import Turn, even_batches
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.spec.plan import ParameterSharding
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.testing import concat_batches, random_batch, run_ranks, run_virtual_ranks

KEYS = ["a", "b"]
EMPTY = random_batch(KEYS, 7, 0)


def _batches(rank: int) -> list[KeyedJaggedTensor]:
    """Ranks with 0, 1 and 5 batches, of several sizes, one of them empty."""
    count = (0, 1, 5)[rank]
    return [random_batch(KEYS, 7, (3, 1, 0, 4, 2)[k], seed=10 * rank + k) for k in range(count)]


def _collection() -> EmbeddingBagCollection:
    torch.manual_seed(0)
    collection = EmbeddingBagCollection([EmbeddingBagConfig(7, 5, "t", feature_names=KEYS)])
    apply_optimizer_in_backward(RowWiseAdagrad, list(collection.parameters()), {"lr": 0.1})
    return collection


def _loss(collection: torch.nn.Module, features: KeyedJaggedTensor) -> torch.Tensor:
    """Of each sample, summed."""
    return (collection(features).values() ** 2).sum()


# Sharded training ---------------------------------------------------------------------------------------------


def _rows(group: Group, collection: EmbeddingBagCollection) -> tuple[list[tuple[int, int]], torch.Tensor]:
    """The turns' samples, and the table after training on them."""
    shard(collection, plan={"t": ParameterSharding("row_wise")}, mesh=group)
    turns = []
    for turn in even_batches(_batches(group.rank), group, EMPTY):
        (_loss(collection, turn.batch) / max(turn.samples, 1) * turn.scale).backward()
        turns.append((turn.samples, turn.total))
    tiles = [leaf.detach().clone() for leaf in collection.parameters()]
    whole: list[Any] = group.all_gather_object(tiles)
    return turns, torch.cat([tile for part in whole for tile in part])


def _rows_of_process() -> tuple[list[tuple[int, int]], torch.Tensor]:
    collection = _collection()
    turns, rows = _rows(ProcessGroupComms(), collection)
    assert torch.equal(full_state_dict(collection)["embedding_bags.t.weight"], rows)
    return turns, rows


def _expected() -> tuple[list[list[tuple[int, int]]], torch.Tensor]:
    """What one process gets from the samples of all ranks, turn by turn."""
    collection = _collection()
    ranks = [_batches(rank) for rank in range(3)]
    turns: list[list[tuple[int, int]]] = [[], [], []]
    for step in range(5):
        batches = [own[step] if step < len(own) else EMPTY for own in ranks]
        whole = concat_batches(batches)
        (_loss(collection, whole) / max(whole.stride(), 1)).backward()
        for rank, batch in enumerate(batches):
            turns[rank].append((batch.stride(), whole.stride()))
    return turns, collection.embedding_bags["t"].weight.detach()


def test_virtual_ranks_with_0_1_and_5_batches_end_with_the_weights_of_one_process() -> None:
    collections = [_collection() for _ in range(3)]
    results = run_virtual_ranks(3, lambda group: _rows(group, collections[group.rank]))
    turns, rows = _expected()
    assert [result[0] for result in results] == turns
    for _, sharded in results:
        torch.testing.assert_close(sharded, rows, rtol=1e-6, atol=1e-6)


def test_processes_with_0_1_and_5_batches_end_with_the_weights_of_one_process() -> None:
    turns, rows = _expected()
    for rank, (own_turns, sharded) in enumerate(run_ranks(3, _rows_of_process)):
        assert own_turns == turns[rank]
        torch.testing.assert_close(sharded, rows, rtol=1e-6, atol=1e-6)


# Turns --------------------------------------------------------------------------------------------------------


def _sizes(group: Group, batches: list[list[int]], stop_after: int | None = None) -> list[tuple[int, int]]:
    seen = []
    for turn in even_batches(batches, group, [], len):
        seen.append((turn.samples, turn.total))
        if len(seen) == stop_after:
            break
    # The ranks are in step afterwards, too.
    group.barrier()
    return seen


@pytest.mark.parametrize("counts", [(0, 0, 0), (1, 1, 1), (0, 0, 2), (3, 0, 1)])
def test_all_ranks_take_as_many_turns_as_the_longest_has_batches(counts: tuple[int, ...]) -> None:
    results = run_virtual_ranks(3, lambda group: _sizes(group, [[0] * 2] * counts[group.rank]))
    for rank, turns in enumerate(results):
        assert [own for own, _ in turns] == [2] * counts[rank] + [0] * (max(counts) - counts[rank])
        assert [total for _, total in turns] == [2 * sum(n > k for n in counts) for k in range(max(counts))]


def test_a_world_of_one_sees_its_batches_and_nothing_else() -> None:
    assert run_virtual_ranks(1, lambda group: _sizes(group, [[1], [], [2, 3]])) == [[(1, 1), (0, 0), (2, 2)]]


def test_ranks_may_stop_early_together() -> None:
    results = run_virtual_ranks(2, lambda group: _sizes(group, [[1]] * 9, stop_after=3))
    assert results == [[(1, 2)] * 3] * 2


def _stop_early() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    group = ProcessGroupComms()
    return _sizes(group, [[1]] * 9, stop_after=3), _sizes(group, [[1]] * (1 + group.rank))


def test_processes_may_stop_early_and_go_through_batches_again() -> None:
    assert run_ranks(2, _stop_early) == [
        ([(1, 2)] * 3, [(1, 2), (0, 1)]),
        ([(1, 2)] * 3, [(1, 2), (1, 1)]),
    ]


def test_one_small_message_per_turn_is_all_that_travels() -> None:
    def sent(group: Group) -> int:
        # A second channel's traffic is counted in the first's.
        before = group.traffic.total()
        assert len(list(even_batches([[1]] * 4, group, [], len))) == 4
        return group.traffic.total() - before

    # 5 calls (the last says that there is no more), 8 bytes to the other rank each.
    assert run_virtual_ranks(2, sent) == [40, 40]


def test_a_turn_scales_a_mean_loss_by_its_part_of_the_samples() -> None:
    assert Turn([1], samples=1, total=4, world_size=2).scale == 0.5
    assert Turn([1] * 3, samples=3, total=4, world_size=2).scale == 1.5
    assert Turn([], samples=0, total=4, world_size=2).scale == 0.0
    assert Turn([], samples=0, total=0, world_size=2).scale == 0.0


# What goes wrong ----------------------------------------------------------------------------------------------


def _broken(group: Group) -> tuple[int, str]:
    def batches() -> Iterator[list[int]]:
        yield [1]
        yield [1]
        if group.rank == 1:
            raise InputError("line 3 is malformed")
        yield [1]
        yield [1]

    turns = 0
    try:
        for _ in even_batches(batches(), group, [], len):
            turns += 1
    except (InputError, CommsError) as error:
        group.barrier()  # nobody waits for anybody: the ranks may go on
        return turns, f"{type(error).__name__}: {error}"
    return turns, ""


def test_a_rank_that_cannot_read_is_named_and_all_stop_at_the_same_turn() -> None:
    results = run_virtual_ranks(3, _broken)
    assert [turns for turns, _ in results] == [2, 2, 2]
    assert results[1][1] == "InputError: line 3 is malformed"
    for rank in (0, 2):
        assert f"CommsError: even_batches on rank {rank} of 3: rank 1 could not read" in results[rank][1]


def test_an_empty_batch_with_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty: got a batch of 2 samples"):
        run_virtual_ranks(1, lambda group: even_batches([], group, [1, 2], len))


def test_a_batch_that_nobody_can_count_asks_for_a_function() -> None:
    with pytest.raises(ConfigError, match="got a list without batch_size and stride"):
        run_virtual_ranks(1, lambda group: even_batches([], group, [1, 2]))
