"""What a group promises, over processes and over threads alike: one table of claims, world sizes 1 to 4.

A claim is `claim_<what holds>(group)`; it runs on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tilerec.comms.group import Group
from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import ConfigError
from tilerec.testing.ranks import Ranks
from tilerec.testing.virtual import run_virtual_ranks

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def sent(source: int, target: int, count: int, dtype: torch.dtype) -> Tensor:
    """What a rank sends another: different for every pair, exact in every dtype."""
    numbers = torch.arange(count) + 5 * source + 17 * target + 1
    return (numbers % 2 if dtype is torch.bool else numbers % 100).to(dtype)


def all_to_all(
    group: Group, counts: Callable[[int, int], int], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """The output of an exchange of `counts(source, target)` elements, and what it should be."""
    rank, ranks = group.rank, range(group.size)
    output_splits = [counts(peer, rank) for peer in ranks]
    input_splits = [counts(rank, peer) for peer in ranks]
    given = torch.cat([sent(rank, peer, counts(rank, peer), dtype) for peer in ranks])
    output = torch.zeros(sum(output_splits), dtype=dtype)
    got = group.all_to_all("parts", output, given, output_splits, input_splits).wait()
    assert got is output
    return output, torch.cat([sent(peer, rank, counts(peer, rank), dtype) for peer in ranks])


def claim_all_to_all_moves_uneven_and_empty_parts_of_every_dtype(group: Group) -> None:
    for dtype in DTYPES:
        for counts in (
            lambda source, target: (source * 3 + target * 5) % 4,
            lambda source, target: 3,
            lambda source, target: int(source == target) * 7,
            lambda source, target: int(source == 0 and target == group.size - 1) * 257,
            lambda source, target: 0,
        ):
            output, expected = all_to_all(group, counts, dtype)
            assert torch.equal(output, expected), (dtype, output, expected)


def claim_an_all_to_all_without_an_output_chooses_one(group: Group) -> None:
    splits = [3] * group.size
    given = torch.cat([sent(group.rank, peer, 3, torch.float32) for peer in range(group.size)])
    got = group.all_to_all("parts", None, given, splits, splits).wait()
    assert torch.equal(got, torch.cat([sent(peer, group.rank, 3, torch.float32) for peer in range(group.size)]))


def claim_calls_overlap_and_end_in_any_order(group: Group) -> None:
    splits = [2] * group.size
    handles = []
    for call in range(5):
        given = torch.full((2 * group.size,), 10 * call + group.rank)
        handles.append(group.all_to_all(f"call {call}", torch.zeros_like(given), given, splits, splits))
        # Handles keep what they read and write alive.
        del given
    total = group.all_reduce_("sum", torch.ones(3) * group.rank)
    for call in (4, 0, 3, 1, 2, 4):
        expected = torch.arange(group.size).repeat_interleave(2) + 10 * call
        assert torch.equal(handles[call].wait(), expected)
    assert total.wait().tolist() == [sum(range(group.size))] * 3
    assert total.wait() is total.wait()


def claim_an_all_reduce_sums_in_place_with_the_same_bits_everywhere(group: Group) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32):
        for shape in ((), (0,), (1,), (257,), (3, 5, 7)):
            generator = torch.Generator().manual_seed(group.rank)
            values = torch.randint(-50, 50, shape, generator=generator).to(dtype)
            tensor = values.clone()
            assert group.all_reduce_("x", tensor).wait() is tensor
            everyone = group.all_gather_object(values)
            # Whole numbers below 2**8: no order rounds.
            assert torch.equal(tensor, torch.stack(everyone).sum(0).to(dtype))  # type: ignore[arg-type]
    tensor = torch.randn(100, generator=torch.Generator().manual_seed(group.rank))
    group.all_reduce_("x", tensor).wait()
    assert all(torch.equal(tensor, other) for other in group.all_gather_object(tensor))  # type: ignore[arg-type]


def claim_an_exchange_is_between_the_named_peers_only(group: Group) -> None:
    last = group.size - 1
    if group.rank in (0, last):
        peer = last - group.rank
        got = torch.zeros(5, dtype=torch.bfloat16)
        group.exchange("ends", {peer: got}, {peer: sent(group.rank, peer, 5, torch.bfloat16)}).wait()
        assert torch.equal(got, sent(peer, group.rank, 5, torch.bfloat16))
    # The others were never asked, and their next call is everybody's next call.
    output, expected = all_to_all(group, lambda source, target: 1)
    assert torch.equal(output, expected)


def claim_an_exchange_goes_round_a_ring_with_sizes_of_its_own(group: Group) -> None:
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for width in (0, 1, 3):
        given = sent(group.rank, after, group.rank * width, torch.int64)
        got = torch.zeros(before * width, dtype=torch.int64)
        pending = group.exchange("ring", {before: got}, {after: given})
        pending.wait()
        pending.wait()
        assert torch.equal(got, sent(before, group.rank, before * width, torch.int64))


def claim_a_swap_is_an_exchange_that_everyone_joins(group: Group) -> None:
    others = [rank for rank in range(group.size) if rank != group.rank]
    for width in (0, 2):  # nothing at all; then something from all but rank 0
        given = {peer: sent(group.rank, peer, group.rank * width, torch.int32) for peer in others}
        got = {peer: torch.zeros(peer * width, dtype=torch.int32) for peer in others}
        pending = group.swap("everyone", got, given)
        pending.wait()
        pending.wait()
        for peer, tensor in got.items():
            assert torch.equal(tensor, sent(peer, group.rank, peer * width, torch.int32))
    group.swap("nobody", {}, {}).wait()


def claim_messages_of_one_name_keep_their_order(group: Group) -> None:
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    got = [torch.zeros(2) for _ in range(4)]
    pending = [
        group.exchange("ring", {before: got[call]}, {after: torch.full((2,), 10.0 * call + group.rank)})
        for call in range(4)
    ]
    for handle in reversed(pending):
        handle.wait()
    assert [tensor.tolist() for tensor in got] == [[10.0 * call + before] * 2 for call in range(4)]


def claim_an_exchange_with_nobody_ends_at_once(group: Group) -> None:
    group.exchange("nobody", {}, {}).wait()


def claim_objects_come_in_the_order_of_the_ranks(group: Group) -> None:
    mine = {"rank": group.rank, "text": "ä" * group.rank * 100}
    everyone = group.all_gather_object(mine)
    assert everyone == [{"rank": rank, "text": "ä" * rank * 100} for rank in range(group.size)]


def claim_a_second_channel_knows_nothing_of_the_first(group: Group) -> None:
    route = group.split("route")
    assert (route.rank, route.size) == (group.rank, group.size)
    splits = [1] * group.size
    for _ in range(3):
        # Each rank begins the two calls in another order; on one channel they would be taken for each other.
        channels = [group, route] if group.rank % 2 else [route, group]
        handles = {}
        for channel in channels:
            given = torch.full((group.size,), 100 * (channel is route) + group.rank)
            handles[channel] = channel.all_to_all("x", torch.zeros_like(given), given, splits, splits)
        assert handles[group].wait().tolist() == list(range(group.size))
        assert handles[route].wait().tolist() == [100 + rank for rank in range(group.size)]
    route.close()
    route.close()
    output, expected = all_to_all(group, lambda source, target: 2)
    assert torch.equal(output, expected)


def claim_a_partition_numbers_its_ranks_anew(group: Group) -> None:
    parts = [[rank for rank in range(group.size) if rank % 2 == odd] for odd in (0, 1)]
    parts = [part for part in parts if part]
    mine = parts[group.rank % 2]
    part = group.partition("parity", parts)
    assert (part.rank, part.size) == (mine.index(group.rank), len(mine))
    assert part.all_gather_object(group.rank) == mine
    # A part has parts.
    alone = part.partition("alone", [[rank] for rank in range(part.size)])
    assert alone.all_gather_object(group.rank) == [group.rank]
    total = torch.tensor([group.rank])
    part.all_reduce_("x", total).wait()
    assert total.item() == sum(mine)


def claim_traffic_counts_what_leaves_the_rank(group: Group) -> None:
    group.traffic.reset()
    all_to_all(group, lambda source, target: 10 * source + target + 1, torch.bfloat16)
    all_to_all(group, lambda source, target: 10 * source + target + 1, torch.bfloat16)
    channel = group.split("other")
    after = (group.rank + 1) % group.size
    sums = torch.zeros(after + 1)
    if group.size > 1:
        before = (group.rank - 1) % group.size
        channel.exchange("ring", {before: torch.zeros(group.rank + 1)}, {after: sums}).wait()
        assert group.traffic["ring"].bytes[after] == 4 * (after + 1)
    parts = group.traffic["parts"]
    assert parts.calls == 2
    assert parts.bytes == tuple(
        0 if peer == group.rank else 2 * 2 * (10 * group.rank + peer + 1) for peer in range(group.size)
    )
    group.all_reduce_("sum", torch.zeros(7)).wait()
    everyone = sum(group.all_gather_object(group.traffic["sum"].total))  # type: ignore[arg-type]
    assert everyone == 2 * (group.size - 1) * 7 * 4
    assert group.traffic["barrier"].calls == 0


def claim_what_does_not_fit_is_refused_before_anything_is_sent(group: Group) -> None:
    splits = [1] * group.size
    flat = torch.zeros(group.size)
    with pytest.raises(ConfigError, match=r"all_to_all 'x' on rank \d: input_splits \[2"):
        group.all_to_all("x", flat.clone(), flat, splits, [2] * group.size)
    with pytest.raises(ConfigError, match="output_splits"):
        group.all_to_all("x", flat.clone(), flat, [*splits, 0], splits)
    if group.size > 1:
        negative = [group.size + 1, *[0] * (group.size - 2), -1]
        with pytest.raises(ConfigError, match="none negative"):
            group.all_to_all("x", flat.clone(), flat, splits, negative)
    with pytest.raises(ConfigError, match="1-D contiguous"):
        group.all_to_all("x", torch.zeros(group.size + 1, 2)[:, 0], flat, splits, splits)
    with pytest.raises(ConfigError, match="one dtype and device"):
        group.all_to_all("x", flat.clone().half(), flat, splits, splits)
    with pytest.raises(ConfigError, match="has ranks 0 to"):
        group.exchange("x", {}, {group.size: flat})
    with pytest.raises(ConfigError, match="to itself"):
        group.exchange("x", {group.rank: flat}, {group.rank: flat[1:]})
    with pytest.raises(ConfigError, match="not contiguous"):
        group.all_reduce_("x", torch.zeros(3, 4).t())
    with pytest.raises(ConfigError, match="in one part, ascending"):
        group.partition("x", [list(range(group.size)), [0]])
    assert group.traffic["x"].calls == 0
    output, expected = all_to_all(group, lambda source, target: 1)
    assert torch.equal(output, expected)


CLAIMS = {name.removeprefix("claim_"): claim for name, claim in list(globals().items()) if name.startswith("claim_")}


def _claim_on_this_process(name: str) -> None:
    CLAIMS[name](ProcessGroupComms())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CLAIMS)
def test_on_processes(name: str, world_size: int, pool: Callable[[int], Ranks]) -> None:
    pool(world_size).run(_claim_on_this_process, name)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("name", CLAIMS)
def test_on_threads(name: str, world_size: int) -> None:
    run_virtual_ranks(world_size, CLAIMS[name])


def _meet(group: Group, folder: Path) -> int:
    (folder / str(group.rank)).touch()
    group.barrier()
    return len(list(folder.iterdir()))


def _meet_on_this_process(folder: Path) -> int:
    return _meet(ProcessGroupComms(), folder)


def test_nobody_passes_a_barrier_before_all_have_come(tmp_path: Path, pool: Callable[[int], Ranks]) -> None:
    for name in ("threads", "processes"):
        (tmp_path / name).mkdir()
    assert run_virtual_ranks(4, _meet, tmp_path / "threads") == [4] * 4
    assert pool(4).run(_meet_on_this_process, tmp_path / "processes") == [4] * 4
