"""Groups over `torch.distributed`: what happens when a rank dies, fails, is late or makes another call; channels.

Faults here never wait for their own sake: a rank that must stay alive waits for a word of its peers in the store.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilerec.comms.group import Group
from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import CommsError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.sharding.shard_collection import shard_collection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.testing.ranks import RankError, Ranks

NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="restarts three ranks: nightly")


@pytest.fixture(scope="module")
def short() -> Iterator[Ranks]:
    """Two ranks whose calls end after two seconds; the rest of the pool's time is the others' to come in."""
    with Ranks(2, timeout_s=2.5, setup=_import_this) as ranks:
        yield ranks


def _import_this() -> None:
    """A pool's clock does not run while its processes load this module."""


def call(group: Group, kind: str) -> None:
    """One call of a kind, waited for."""
    size, rank = group.size, group.rank
    ones = [1] * size
    others = [peer for peer in range(size) if peer != rank]
    if kind == "all_to_all":
        group.all_to_all("ids", torch.zeros(size), torch.zeros(size), ones, ones).wait()
    elif kind == "all_reduce":
        group.all_reduce_("sums", torch.zeros(3)).wait()
    elif kind == "exchange":
        mine = torch.zeros(3)
        group.exchange("rows", {p: torch.zeros(3) for p in others}, dict.fromkeys(others, mine)).wait()
    elif kind == "all_gather_object":
        group.all_gather_object(rank)
    else:
        assert kind == "barrier"
        group.barrier()


def _fault(kind: str, fault: str) -> str:
    """Every rank but 1 makes a call; what it says there. Rank 1 has the fault."""
    group = ProcessGroupComms()
    store = dist.group.WORLD.get_group_store()
    call(group, kind)
    if group.rank == 1:
        if fault == "dies":
            os._exit(3)
        if fault == "raises":
            raise ArithmeticError("0 divides nothing")
        if fault == "gives up":
            # And lives on until the others have noticed.
            group.abort(ArithmeticError("0 divides nothing"))
        elif fault != "is late":
            call(group, fault)
        store.wait([f"told {rank}" for rank in range(group.size) if rank != 1])
        if fault == "gives up":
            raise ArithmeticError("0 divides nothing")
        return ""
    try:
        call(group, kind)
    except CommsError as error:
        said = str(error)
        # Every later call fails, too, whichever it is.
        for later in ("all_to_all", "exchange") if fault == "gives up" else ():
            with pytest.raises(CommsError, match="rank 1 failed with ArithmeticError"):
                call(group, later)
        store.set(f"told {group.rank}", "")
        return said
    raise AssertionError("the call ended")


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        ("all_to_all", 2),
        ("all_reduce", 3),
        ("exchange", 3),
        ("barrier", 3),
        pytest.param("all_to_all", 3, marks=NIGHTLY),
    ],
)
def test_a_rank_that_dies_is_an_error_on_the_others(kind: str, world_size: int, pool: Callable[[int], Ranks]) -> None:
    outcomes = pool(world_size).run(_fault, kind, "dies", return_exceptions=True)
    dead = outcomes.pop(1)
    assert isinstance(dead, RankError)
    assert "died in _fault(), exit code 3" in str(dead)
    for said in outcomes:
        assert isinstance(said, str), said
        assert "A peer has most likely died; look for the first error in the logs of global ranks" in said
        # Torch's source paths and its good luck are not ours to pass on.
        assert "third_party" not in said
        assert "GLHF" not in said


@pytest.mark.parametrize("kind", ["all_to_all", "exchange"])
def test_a_rank_that_raises_before_a_call_ends_it_for_the_others(kind: str, pool: Callable[[int], Ranks]) -> None:
    with pytest.raises(ArithmeticError, match="0 divides nothing") as caught:
        pool(3).run(_fault, kind, "raises")
    story = str(caught.value.__cause__)
    assert story.startswith("Rank 1 of 3: ArithmeticError: 0 divides nothing")
    outcomes = pool(3).run(_fault, kind, "raises", return_exceptions=True)
    assert isinstance(outcomes[1], ArithmeticError)
    assert all("most likely died" in said for said in (outcomes[0], outcomes[2]))


@pytest.mark.parametrize("kind", ["all_to_all", "all_reduce"])
def test_a_rank_that_gives_up_is_named_with_its_error(kind: str, pool: Callable[[int], Ranks]) -> None:
    outcomes = pool(3).run(_fault, kind, "gives up", return_exceptions=True)
    name = {"all_to_all": "all_to_all 'ids'", "all_reduce": "all_reduce 'sums'"}[kind]
    for rank in (0, 2):
        assert outcomes[rank] == (f"{name} on rank {rank} of 3: rank 1 failed with ArithmeticError: 0 divides nothing")


def _said(pool: Callable[[int], Ranks], ways: dict[int, list[str]]) -> list[str]:
    return [str(outcome) for outcome in pool(len(ways)).run(_several_channels, ways, return_exceptions=True)]


def _several_channels(ways: dict[int, list[str]]) -> str:
    """Each rank goes its way, of a first and a second channel and operations, until it ends or raises."""
    groups = {"first": ProcessGroupComms()}
    groups["second"] = groups["first"].split("second")
    try:
        for step in ways[groups["first"].rank]:
            if step in groups:
                call(groups[step], "all_to_all")
            elif step == "all_reduce":
                call(groups["first"], step)
            else:
                groups["first"].begin(step)
    finally:
        _until_all_are_here()
    return "passed"


def _until_all_are_here() -> None:
    """A process that ends closes its connections, which its peers may not have read yet."""
    store, size = dist.group.WORLD.get_group_store(), dist.get_world_size()
    if store.add("ended", 1) == size:
        store.set("all ended", "")
    store.wait(["all ended"])


CALL = "all_to_all 'ids'"


@pytest.mark.parametrize(
    ("ways", "waits"),
    [
        ({0: ["second"], 1: ["first"]}, {0: CALL, 1: CALL}),
        ({0: ["reshard", "second"], 1: ["second"]}, {0: "reshard", 1: CALL}),
        ({0: ["first", "first"], 1: ["first", "reshard"]}, {0: CALL, 1: "reshard"}),
    ],
    ids=["two channels", "an operation left out", "an operation too many"],
)
def test_ranks_that_wait_for_each_other_raise_on_all_of_them(
    ways: dict[int, list[str]], waits: dict[int, str], pool: Callable[[int], Ranks]
) -> None:
    for rank, text in enumerate(_said(pool, ways)):
        assert text.startswith(f"{waits[rank]} on rank {rank} of 2: rank ")
        for one, other in ((0, 1), (1, 0)):
            assert f"rank {one} waits in {waits[one]}, which rank {other} has not called" in text
        assert text.endswith("Every rank makes the same calls in the same order.")


def test_ranks_that_wait_in_different_calls_of_a_channel_raise(pool: Callable[[int], Ranks]) -> None:
    ways = {0: ["first", "first"], 1: ["first", "all_reduce"]}
    for text in _said(pool, ways):
        assert f"is in {CALL} and rank" in text or "is in all_reduce 'sums' and rank" in text


def test_ranks_that_begin_different_operations_raise(pool: Callable[[int], Ranks]) -> None:
    ways = {0: ["reshard"], 1: ["full_state_dict"], 2: ["reshard"]}
    for text in _said(pool, ways):
        assert "rank 1" in text
        assert "full_state_dict" in text
        assert "reshard" in text


def test_operations_that_all_ranks_begin_alike_end(pool: Callable[[int], Ranks]) -> None:
    ways = {key: ["reshard", "first", "second", "reshard", "load_of", "second"] for key in range(3)}
    assert _said(pool, ways) == ["passed"] * 3


END = "no end within the process group's time-out"


def test_a_call_that_another_rank_makes_too_late_ends_at_the_time_out(short: Ranks) -> None:
    first, late = short.run(_fault, "all_to_all", "is late", return_exceptions=True)
    assert END in first
    assert "every rank makes the same calls in the same order. Check global ranks 1; if one" in first
    assert late == ""


def test_ranks_in_different_calls_end_at_the_time_out(short: Ranks) -> None:
    exchange, other = short.run(_fault, "exchange", "all_to_all", return_exceptions=True)
    assert isinstance(other, CommsError)
    assert "exchange 'rows' on rank 0 of 2" in exchange
    assert "all_to_all" in str(other)
    # Both end at the same time; one may see first that the other has closed its connections.
    assert any(END in text and "every rank makes the same calls" in text for text in (exchange, str(other)))


# -- a step of a sharded collection ----------------------------------------------------------------------------


def _collection(group: Group) -> EmbeddingBagCollection:
    """Table "a" on rank 0, rows of "b" on all."""
    torch.manual_seed(0)
    module = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(8, 4, "a", feature_names=["x"]),
            EmbeddingBagConfig(8, 3, "b", feature_names=["y"]),
        ]
    )
    apply_optimizer_in_backward(SGD(lr=0.1), list(module.parameters()))
    size = group.size
    cuts = [8 * rank // size for rank in range(size + 1)]
    tilings = {
        "a": Tiling.of("a", 8, 4, [(0, 8, 0, 4, 0)]),
        "b": Tiling.of("b", 8, 3, [(cuts[rank], cuts[rank + 1], 0, 3, rank) for rank in range(size)]),
    }
    shard_collection(module, tilings, group, group.split("route"), Topology(size, "cpu"))
    return module


def _step(group: Group, module: EmbeddingBagCollection, fail: Callable[[str], object]) -> float:
    """One step; `fail` hears which place it has come to."""
    batch = KeyedJaggedTensor(["x", "y"], torch.arange(8) % 7, lengths=torch.tensor([1, 0, 3, 2, 2, 0]))
    fail("route")
    routed = module.route(batch)
    fail("lookup")
    looked = module.lookup(routed)
    fail("combine")
    out = module.combine(looked).values()
    fail("backward")
    out.sum().backward()
    return float(out.detach().sum())


PLACES = ["route", "lookup", "combine", "backward"]


def _step_with_a_fault(place: str | None, fault: str) -> tuple[float, str]:
    group = ProcessGroupComms()
    module = _collection(group)
    total = _step(group, module, lambda place: None)

    def fail(at: str) -> None:
        if group.rank == 1 and at == place:
            if fault == "dies":
                os._exit(3)
            raise ArithmeticError("0 divides nothing")

    try:
        _step(group, module, fail)
        # What a rank has sent may arrive after its death: then the next step misses it.
        _step(group, module, fail)
    except CommsError as error:
        return total, str(error)
    return total, ""


@pytest.mark.parametrize(
    ("place", "fault"), [*((place, "dies") for place in PLACES), ("route", "raises"), ("backward", "raises")]
)
def test_a_rank_lost_in_a_step_is_an_error_on_the_others(place: str, fault: str, pool: Callable[[int], Ranks]) -> None:
    outcomes = pool(3).run(_step_with_a_fault, place, fault, return_exceptions=True)
    assert isinstance(outcomes[1], RankError if fault == "dies" else ArithmeticError)
    for rank in (0, 2):
        assert not isinstance(outcomes[rank], BaseException), outcomes[rank]
        total, said = outcomes[rank]
        assert total != 0
        assert f"on rank {rank} of 3: " in said
        assert "A peer has most likely died" in said


def test_a_pool_is_whole_again_after_a_fault(pool: Callable[[int], Ranks]) -> None:
    with pytest.raises(ArithmeticError):
        pool(3).run(_step_with_a_fault, "backward", "raises")
    outcomes = pool(3).run(_step_with_a_fault, None, "")
    assert [said for _, said in outcomes] == ["", "", ""]


# -- channels and tensors ---------------------------------------------------------------------------------------


def _channels() -> dict[str, Any]:
    group = ProcessGroupComms()
    before = dist.distributed_c10d._world.pg_map.copy()
    route = group.split("route")
    again = group.split("route")
    assert isinstance(route, ProcessGroupComms)
    assert route.process_group is not group.process_group
    options = route.process_group._get_backend(torch.device("cpu")).options
    own = group.process_group._get_backend(torch.device("cpu")).options
    found = {
        "time-out kept": options._timeout == own._timeout,
        "opened": len(dist.distributed_c10d._world.pg_map),
    }
    found["opened"] -= len(before)
    group.barrier()
    for channel in (route, again):
        channel.close()
        channel.close()
    found["closed"] = dist.distributed_c10d._world.pg_map == before
    group.close()  # Not this object's to close.
    call(group, "all_to_all")
    return found


def test_channels_have_the_groups_time_out_and_are_given_back(pool: Callable[[int], Ranks]) -> None:
    assert pool(2).run(_channels) == [{"time-out kept": True, "opened": 2, "closed": True}] * 2


def _parts_of_a_part() -> list[object]:
    """Groups over some ranks open their own channels while all ranks of the world do the same."""
    world = ProcessGroupComms()
    half = world.partition("half", [[0, 2], [1, 3]])
    route = half.split("route")
    assert isinstance(route, ProcessGroupComms)
    return route.all_gather_object(world.rank)


def test_a_group_of_some_ranks_splits(pool: Callable[[int], Ranks]) -> None:
    assert pool(4).run(_parts_of_a_part) == [[0, 2], [1, 3], [0, 2], [1, 3]]


def _exchange_of_a_leaf() -> tuple[bool, int]:
    """Leaves and results of a graph travel, and autograd hears nothing of it."""
    group = ProcessGroupComms()
    leaf = nn.Parameter(torch.full((group.size,), float(group.rank)))
    made = leaf * 2
    version = leaf._version
    ones = [1] * group.size
    outputs: list[Tensor] = []
    for sent in (leaf, made, leaf.to(torch.complex64)):
        output = torch.zeros_like(sent, requires_grad=False)
        outputs.append(group.all_to_all("x", output, sent, ones, ones).wait())
    expected = torch.arange(group.size).float()
    assert torch.equal(outputs[0], expected)
    assert torch.equal(outputs[1], 2 * expected)
    assert torch.equal(outputs[2], expected.to(torch.complex64))
    received = torch.zeros(group.size)
    group.exchange("x", {group.rank: received}, {group.rank: leaf}).wait()
    assert torch.equal(received, leaf.detach())
    group.all_reduce_("x", leaf.detach()).wait()
    return received.requires_grad or any(output.requires_grad for output in outputs), leaf._version - version


def test_tensors_of_a_graph_travel_without_autograd(pool: Callable[[int], Ranks]) -> None:
    for grad, _ in pool(2).run(_exchange_of_a_leaf):
        assert not grad


def _host_memory_that_the_backend_does_not_send() -> None:
    """As under NCCL; "cpu:0" stands for the GPU: torch tells it from "cpu", and copies."""
    group = ProcessGroupComms()
    group._backends, group.device = {"cuda": "nccl"}, torch.device("cpu", 0)
    me, peer = group.rank, 1 - group.rank
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        mine, theirs = [me + 1.0] * 2, [peer + 1.0] * 2
        both, sent = torch.zeros(4, dtype=dtype), torch.tensor([*mine, *mine], dtype=dtype)
        handle: Any = group.all_to_all("rows", both, sent, [2, 2], [2, 2])
        assert handle.back is not None
        assert both.tolist() == [0.0] * 4
        assert handle.wait().tolist() == both.tolist() == [1.0, 1.0, 2.0, 2.0]
        heard = torch.zeros(2, dtype=dtype)
        letters: Any = group.exchange("rows", {peer: heard}, {peer: torch.tensor(mine, dtype=dtype)})
        assert [tensor is heard for tensor, _ in letters.staged] == [True]
        letters.wait()
        assert heard.tolist() == theirs
    total = torch.tensor([me + 1.0])
    reduced: Any = group.all_reduce_("sums", total)
    assert reduced.back is not None
    assert reduced.wait().item() == total.item() == 3.0


def test_rows_in_host_memory_travel_through_the_device_that_the_backend_sends_from(
    pool: Callable[[int], Ranks],
) -> None:
    pool(2).run(_host_memory_that_the_backend_does_not_send)
