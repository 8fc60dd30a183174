"""Virtual ranks: disagreement is an error at once, on every rank, in words that name both sides."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from tilerec.comms.group import Group
from tilerec.comms.threads import ThreadWorld
from tilerec.errors import CommsError, ConfigError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.sharding.shard_collection import shard_collection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.testing.virtual import run_virtual_ranks


def said(world_size: int, act: Callable[[Group], object], timeout_s: float = 30.0) -> list[str]:
    """What each rank's `CommsError` says; "" for a rank that has none."""

    def live(group: Group) -> str:
        try:
            act(group)
        except CommsError as error:
            return str(error)
        return ""

    return run_virtual_ranks(world_size, live, timeout_s=timeout_s)


def all_to_all(group: Group, name: str, to: int = 1, dtype: torch.dtype = torch.float32, got: int = 1) -> None:
    """`to` elements to every rank, `got` from every rank."""
    size = group.size
    group.all_to_all(
        name,
        torch.zeros(got * size, dtype=dtype),
        torch.zeros(to * size, dtype=dtype),
        [got] * size,
        [to] * size,
    ).wait()


def test_another_call_is_named_with_both_ranks_and_its_number() -> None:
    def act(group: Group) -> None:
        all_to_all(group, "ids")
        if group.rank == 2:
            group.all_reduce_("x", torch.zeros(3)).wait()
        else:
            all_to_all(group, "rows")

    for rank, text in enumerate(said(3, act)):
        call = "all_reduce 'x'" if rank == 2 else "all_to_all 'rows'"
        assert text.startswith(f"{call} on rank {rank}: call 1 of channel 'main' differs: rank ")
        assert "rank 2 in all_reduce 'x'" in text or "rank 2 is in all_reduce 'x'" in text
        assert text.endswith("Every rank makes the same calls in the same order.")


def test_a_call_of_another_name_differs_too() -> None:
    texts = said(2, lambda group: all_to_all(group, f"rows {group.rank}"))
    assert all("all_to_all 'rows 0'" in text and "all_to_all 'rows 1'" in text for text in texts)


def test_sizes_that_disagree_are_named_with_both_ranks() -> None:
    texts = said(3, lambda group: all_to_all(group, "rows", to=5 if group.rank == 2 else 4, got=4))
    for rank, text in enumerate(texts):
        assert text == (
            f"all_to_all 'rows' on rank {rank}: all_to_all 'rows': rank 2 sends 5 float32 to rank 0, which expects 4 "
            f"float32."
        )


def test_dtypes_that_disagree_are_named() -> None:
    texts = said(2, lambda group: all_to_all(group, "x", dtype=(torch.int32, torch.int64)[group.rank]))
    assert all("rank 0 sends 1 int32 to rank 1, which expects 1 int64." in text for text in texts)
    texts = said(2, lambda group: group.all_reduce_("x", torch.zeros(2 + group.rank)).wait())
    assert all("rank 0 has 2 float32, rank 1 has 3 float32; expected tensors of one size and dtype" in t for t in texts)


def test_messages_of_other_sizes_are_refused_on_both_sides() -> None:
    def act(group: Group) -> None:
        peer = 1 - group.rank
        group.exchange("m", {peer: torch.zeros(3)}, {peer: torch.zeros(3 + group.rank)}).wait()

    assert all("rank 1 sends 4 float32 to rank 0, which expects 3 float32." in text for text in said(2, act))


def test_parts_that_disagree_are_refused() -> None:
    def act(group: Group) -> None:
        group.partition("p", [[0, 1], [2]] if group.rank else [[0], [1, 2]])

    assert all("pass the same parts." in text for text in said(3, act))


def test_a_rank_that_raises_is_named_with_its_error_on_every_other() -> None:
    texts: dict[int, str] = {}

    def act(group: Group) -> None:
        if group.rank == 1:
            raise ArithmeticError("0 divides nothing")
        with pytest.raises(CommsError) as caught:
            all_to_all(group, "ids")
        texts[group.rank] = str(caught.value)
        assert isinstance(caught.value.__cause__, ArithmeticError)
        with pytest.raises(CommsError, match="rank 1 failed"):
            group.exchange("m", {}, {}).wait()

    with pytest.raises(ArithmeticError, match="0 divides nothing"):
        run_virtual_ranks(3, act)
    assert texts == {
        rank: f"all_to_all 'ids' on rank {rank}: rank 1 failed with ArithmeticError: 0 divides nothing"
        for rank in (0, 2)
    }


@pytest.mark.parametrize("kind", ["all_to_all", "exchange"])
def test_a_rank_that_has_returned_is_missed_at_once(kind: str) -> None:
    def act(group: Group) -> None:
        all_to_all(group, "ids")
        if group.rank == 1:
            return
        if kind == "all_to_all":
            all_to_all(group, "rows")
        else:
            group.exchange("rows", {1: torch.zeros(1)}, {}).wait()

    texts = said(3, act, timeout_s=600.0)
    assert texts[1] == ""
    for rank in (0, 2):
        assert (
            "rank 1 has returned without this call; its last was all_to_all 'ids' (call 0 of channel 'main')"
            in texts[rank]
        )


def test_a_late_rank_is_named_at_the_time_out() -> None:
    done = threading.Event()

    def act(group: Group) -> None:
        if group.rank == 1:
            done.wait(20.0)
            return
        try:
            all_to_all(group, "rows")
        finally:
            done.set()

    texts = said(2, act, timeout_s=0.2)
    assert texts[0] == (
        "all_to_all 'rows' on rank 0: 1 of 2 ranks did not come within 0.2 s: rank 1 was last in nothing yet. Every "
        "rank makes the same calls in the same order; check those ranks."
    )


def test_a_part_speaks_of_ranks_by_their_numbers_in_the_world() -> None:
    def act(group: Group) -> None:
        part = group.partition("odd", [[0, 2], [1, 3]])
        if group.rank % 2:
            all_to_all(part, "rows", to=part.rank + 1, got=1)

    texts = said(4, act)
    assert "on rank 1: all_to_all 'rows': rank 3 sends 2 float32 to rank 1, which expects 1 float32." in texts[1]
    assert "on rank 3: " in texts[3]


def test_one_thread_may_play_all_ranks() -> None:
    world = ThreadWorld(3)
    handles = []
    for rank in range(3):
        given = torch.arange(3) + 10 * rank
        handles.append(world.group(rank).all_to_all("x", torch.zeros_like(given), given, [1] * 3, [1] * 3))
    assert [handle.wait().tolist() for handle in handles] == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]


def test_a_sum_is_taken_in_the_order_of_the_ranks() -> None:
    # In fp32, (1e8 + 1) + -1e8 = 0 and (1e8 + -1e8) + 1 = 1.
    def act(group: Group) -> float:
        tensor = torch.tensor([1e8, 1.0, -1e8][group.rank])
        return float(group.all_reduce_("x", tensor).wait())

    assert run_virtual_ranks(3, act) == [0.0] * 3


def test_a_world_needs_ranks_and_time() -> None:
    for size, timeout_s in ((0, 1.0), (2, 0.0), (2, float("nan"))):
        with pytest.raises(ConfigError, match=r"expected at least one rank and a positive time"):
            ThreadWorld(size, timeout_s)


def test_ranks_that_take_other_ways_through_a_sharded_step_are_told() -> None:
    tilings = {"t": Tiling.of("t", 8, 4, [(4 * rank, 4 * rank + 4, 0, 4, rank) for rank in range(2)])}

    def act(group: Group) -> None:
        module = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "t", feature_names=["x"])])
        shard_collection(module, tilings, group, group.split("route"), Topology(2, "cpu"))
        batch = KeyedJaggedTensor(["x"], torch.tensor([1, 6]), lengths=torch.tensor([1, 1]))
        out = module(batch).values()
        if group.rank == 0:
            out.sum().backward()
        else:
            group.all_reduce_("loss", out.detach().sum()).wait()

    for text in said(2, act):
        assert "all_to_all 'gradients'" in text
        assert "all_reduce 'loss'" in text


def test_ranks_that_wait_for_each_other_on_several_channels_raise_at_once() -> None:
    def act(group: Group) -> None:
        other = group.split("other")
        if group.rank:
            other.begin("reshard")
        else:
            all_to_all(group, "ids")

    for text in said(2, act, timeout_s=600.0):
        assert "rank 0 waits in all_to_all 'ids', which rank 1 has not called" in text
        assert "rank 1 waits in operation 'reshard', which rank 0 has not called" in text


def test_an_operation_that_a_rank_leaves_out_is_named() -> None:
    def act(group: Group) -> None:
        if group.rank != 1:
            group.begin("reshard")
        all_to_all(group, "ids")

    for text in said(3, act):
        assert "operation 'reshard'" in text
        assert "all_to_all 'ids'" in text
