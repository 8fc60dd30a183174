"""Routing: each id reaches the rank that holds its row, in few bytes; a rank that refuses stops all of them.

Bytes are written out here and compared with what the group counted. What stays on a rank is not counted.

Legend: W ranks, F features, P present bags, N ids.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.harness import TILINGS, WORLDS
from tests.sharding.routed_batches import batch_of, rows, sharded
from tilerec.comms.group import Group
from tilerec.errors import InputError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.ops.runtime import upload
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.sharding.layout import ExchangeLayout, SlotRead, TableLayout, rectangles
from tilerec.sharding.route import Router
from tilerec.sharding.route import _counting as counting
from tilerec.sharding.shard_collection import shard_collection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.spec.table import DataType, EmbeddingBagConfig
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.testing.batches import random_batch
from tilerec.testing.virtual import run_virtual_ranks

# ---------------------------------------------------------------------------------------------------- where ids go


Arrival = tuple[int, int, int, int]  # home, feature, row, first column


def arrivals(group: Group, tiling: Tiling, batches: list[KeyedJaggedTensor], hosts: Any) -> list[Arrival]:
    """What reached this rank."""
    module = sharded(group, tiling, ("a", "b"), hosts=hosts)
    routed = module.route(batches[group.rank]).wait().routed
    layout, found = module.exchange.layout, []
    bag = part_at = 0
    for home, parts in enumerate(layout.received):
        for p in parts:
            part, count = layout.parts[p], routed.present[part_at]
            ids = routed.ids[routed.offsets[bag] : routed.offsets[bag + count]]
            bag, part_at = bag + count, part_at + 1
            assert group.rank in part.owners
            assert all(0 <= int(i) < part.r1 - part.r0 for i in ids), "ids are local to the part"
            found.extend((home, part.slot, int(i) + part.r0, unit.c0) for unit in part.units for i in ids)
    assert bag == routed.offsets.numel() - 1
    return found


@pytest.mark.parametrize("world", ["3", "2+2"])
@pytest.mark.parametrize("name", TILINGS)
def test_every_id_reaches_an_owner_of_its_row_once_for_all_columns(name: str, world: str) -> None:
    hosts = WORLDS[world]
    size = sum(map(len, hosts))
    tiling = TILINGS[name](17, 12, hosts, 1)
    batches = [random_batch(["a", "b"], 17, 5, seed=rank) for rank in range(size)]
    found = run_virtual_ranks(size, arrivals, tiling, batches, hosts)
    expected = [
        (home, slot, int(i), tile.c0)
        for home in range(size)
        for slot, key in enumerate(("a", "b"))
        for i in batches[home][key].values()
        for tile in rectangles(tiling)
        if tile.r0 <= int(i) < tile.r1
    ]
    assert sorted(item for own in found for item in own) == sorted(expected)


# ---------------------------------------------------------------------------------------------------- bytes


def test_the_header_has_a_static_size() -> None:
    """Per pair of ranks one flag and (bags, ids) of each part: 4 (1 + 2 F) bytes, whatever the batch holds."""

    def fn(group: Group) -> list[tuple[int, ...]]:
        module = sharded(group, rows(20, 4), ("a", "b", "c"))
        seen = []
        for size in (0, 1, 50):
            group.traffic.reset()
            module.route(random_batch(["a", "b", "c"], 20, size, seed=group.rank)).wait()
            assert group.traffic["header"].calls == 1
            assert group.traffic["ids"].calls == 1
            assert {sent.name for sent in group.traffic} == {"header", "ids"}
            seen.append(group.traffic["header"].bytes)
        return seen

    for rank, seen in enumerate(run_virtual_ranks(4, fn)):
        expected = tuple(0 if peer == rank else 4 * (1 + 2 * 3) for peer in range(4))
        assert seen == [expected] * 3


def test_a_header_to_a_proxy_also_holds_the_sizes_of_the_union_and_its_parts() -> None:
    """2 hosts x 2 ranks, row-wise: to the proxy on the other host 4 (1 + 2 + 1 + 2) bytes, to the others 4 (1 + 2)."""

    def fn(group: Group) -> tuple[int, ...]:
        module = sharded(group, rows(20, 4), hosts=[[0, 1], [2, 3]])
        module.route(random_batch(["a"], 20, 5, seed=group.rank)).wait()
        return group.traffic["header"].bytes

    assert run_virtual_ranks(4, fn) == [(0, 12, 24, 12), (12, 0, 12, 24), (24, 12, 0, 12), (12, 24, 12, 0)]


def test_bags_of_one_id_travel_as_four_bytes_each() -> None:
    """No lengths, no bag numbers: the owner needs neither."""
    ids = [[[r * 5 + k] for r in range(4) for k in range(3)]] * 4  # three for each rank

    def fn(group: Group) -> tuple[int, ...]:
        module = sharded(group, rows(20, 4))
        module.route(batch_of(ids[group.rank])).wait()
        return group.traffic["ids"].bytes

    for rank, sent in enumerate(run_virtual_ranks(4, fn)):
        assert sent == tuple(0 if peer == rank else 4 * 3 for peer in range(4))


def test_other_bags_add_the_lengths_of_those_that_are_present() -> None:
    """To rank 1: bags {10}, {10, 11}, {19} of five; N = 4 ids and P = 3 lengths, 4 bytes each."""
    ids = [[0, 10], [], [10, 1, 11], [2], [19]]

    def fn(group: Group) -> int:
        module = sharded(group, rows(20, 2))
        module.route(batch_of(ids if group.rank == 0 else [[]])).wait()
        return group.traffic["ids"].total

    assert run_virtual_ranks(2, fn) == [4 * (4 + 3), 0]


@pytest.mark.parametrize(("data_type", "size"), [(DataType.FP32, 4), (DataType.FP64, 8)])
def test_sample_weights_ride_along_in_the_precision_of_the_sums(data_type: DataType, size: int) -> None:
    def fn(group: Group) -> tuple[int, Tensor, torch.dtype]:
        module = sharded(group, rows(20, 2), weighted=True, data_type=data_type)
        features = KeyedJaggedTensor(
            ["a"], torch.tensor([12, 3, 15]), torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1, 1, 1])
        )
        routed = module.route(features).wait().routed
        assert routed.sample_weights is not None
        return group.traffic["ids"].total, routed.sample_weights, routed.sample_weights.dtype

    (first, own, dtype), (second, other, _) = run_virtual_ranks(2, fn)
    assert first == 2 * (4 + size)  # ids 12 and 15 to rank 1
    assert second == 1 * (4 + size)  # id 3 to rank 0
    wide = torch.tensor([0.1, 0.2, 0.3]).to(dtype)
    assert torch.equal(own, wide[[1, 1]])
    assert torch.equal(other, wide[[0, 2, 0, 2]])


def test_column_tiles_of_a_rank_share_one_copy_of_the_ids() -> None:
    """Columns [0, 2) and [4, 6) on rank 1, [2, 4) on rank 0: its ids go to rank 1 once, not twice."""
    tiling = Tiling.of("t", 10, 6, [(0, 10, 0, 2, 1), (0, 10, 2, 4, 0), (0, 10, 4, 6, 1)])

    def fn(group: Group) -> tuple[int, int]:
        module = sharded(group, tiling)
        module(batch_of([[1], [2], [3]]))
        return group.traffic["ids"].total, group.traffic["rows"].total

    assert run_virtual_ranks(2, fn) == [(3 * 4, 3 * 2 * 4), (3 * 4, 3 * 4 * 4)]


def test_replicas_next_door_cost_no_bytes() -> None:
    tiling = Tiling.of("t", 10, 4, [(0, 10, 0, 4, (0, 1, 2))])

    def fn(group: Group) -> int:
        module = sharded(group, tiling)
        module(batch_of([[1, 2], [3]]))
        return group.traffic["ids"].total + group.traffic["rows"].total

    assert run_virtual_ranks(3, fn) == [0, 0, 0]


# ---------------------------------------------------------------------------------------------------- one rank


@pytest.mark.parametrize("kind", ["pooled", "weighted", "sequence", "exact"])
@pytest.mark.parametrize("variable", [False, True])
def test_one_rank_with_whole_tables_routes_nothing_and_has_the_same_bits(kind: str, variable: bool) -> None:
    """The same batch with its keys in another order is routed."""
    weighted, sequence = kind == "weighted", kind == "sequence"

    def fn(group: Group, keys: tuple[str, ...]) -> tuple[list[Tensor], int, list[int]]:
        module = sharded(group, rows(20, 1), ("a", "b"), weighted=weighted, sequence=sequence, exact=kind == "exact")
        apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), module.parameters())
        left = []
        for size in (3, 0, 7):
            features = random_batch(["a", "b"], 20, size, seed=size, weighted=weighted, variable=variable)
            features = features.permute([["a", "b"].index(key) for key in keys])
            if weighted:
                features.weights().requires_grad_()
            out = module(features)
            values = [out[key].values() for key in ("a", "b")] if sequence else [out.values()]
            torch.cat([value.flatten() for value in values]).square().sum().backward()
            left += [value.detach() for value in values]
            if weighted:
                grads = features.weights().grad.split(features.length_per_key())
                left += [grads[keys.index(key)] for key in ("a", "b")]
        left += [tile.detach() for tile in module.parameters()]
        reads = module.exchange.all_stages()[0].router.reads
        return left, group.traffic["header"].calls, [*reads.ids(2), *reads.bags()]

    [(got, calls, read)] = run_virtual_ranks(1, fn, ("a", "b"))
    assert calls == 0
    [(want, calls, counted)] = run_virtual_ranks(1, fn, ("b", "a"))
    assert calls == 3
    assert read == counted
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("sequence", [False, True], ids=["pooled", "sequence"])
def test_one_rank_refuses_ids_outside_its_table_and_goes_on(sequence: bool) -> None:
    def fn(group: Group) -> None:
        module = sharded(group, rows(20, 1), sequence=sequence)
        with pytest.raises(InputError, match=r"Table 't': got id 20 of feature 'a' \(position 1 "):
            module(batch_of([[3], [20]]))
        module(batch_of([[3], [19]]))

    run_virtual_ranks(1, fn)


@pytest.mark.parametrize("sequence", [False, True], ids=["pooled", "sequence"])
def test_one_rank_refuses_a_batch_that_was_written_to_since_it_was_routed(sequence: bool) -> None:
    """It is read where it lies: what was written would be looked up, or updated, in silence."""

    def fn(group: Group) -> None:
        module = sharded(group, rows(20, 1), sequence=sequence)
        features = batch_of([[3], [19]])
        routed = module.route(features)
        out = module(routed)
        features.values()[0] = 4
        values = out["a"].values() if sequence else out.values()
        with pytest.raises(InputError, match="written to after it was routed"):
            values.sum().backward()
        with pytest.raises(InputError, match="written to after it was routed"):
            module(routed)
        module(features)

    run_virtual_ranks(1, fn)


def test_numbers_that_a_graph_makes_are_no_other_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there when it has run, and not before."""
    before = counting(3, torch.device("cpu"))
    monkeypatch.setattr(upload, "capturing", lambda: True)
    one, other = (counting(1 << 22, torch.device("cpu")) for _ in range(2))  # more than other tests have made
    assert one.data_ptr() != other.data_ptr()
    assert counting(4, torch.device("cpu")).data_ptr() == before.data_ptr(), "what was there before may be used"


def test_whatever_the_output_reads_of_a_batch_waits_for_the_stream_that_brought_it() -> None:
    """Inverse indices, too, whose memory would be another batch's while they are read."""
    waited: list[Any] = []

    def fn(group: Group) -> None:
        module = sharded(group, rows(20, 1), ("a", "b"))
        features = random_batch(["a", "b"], 20, 3, seed=0, variable=True)
        routed = replace(module.route(features), made=SimpleNamespace(wait=waited.extend))
        module(routed)
        for needed in (features.values(), features.offsets(), features.inverse_indices()[1]):
            assert any(tensor is needed for tensor in waited)

    run_virtual_ranks(1, fn)


# ---------------------------------------------------------------------------------------------------- large tables


def test_ids_travel_as_int32_unless_a_range_has_2_to_the_31_rows() -> None:
    def dtype(rows_: int, cut: int) -> torch.dtype:
        tiling = Tiling.of("t", rows_, 4, [(0, cut, 0, 4, 0), (cut, rows_, 0, 4, 1)])
        tables, slots = [TableLayout("t", tiling)], [SlotRead(0, "a")]

        def fn(group: Group) -> torch.dtype:
            layout = ExchangeLayout(tables, slots, Topology(2, "cpu"), group.rank)
            return Router(layout, group, weighted=False, each_id=False, wide=torch.float32).id_dtype

        (one, other) = run_virtual_ranks(2, fn)
        assert one is other
        return one

    assert dtype(2**32 - 2, 2**31 - 1) is torch.int32  # the table is larger, its ranges are not
    assert dtype(2**32 - 2, 2**31) is torch.int64


@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
def test_both_id_types_route_alike(id_type: torch.dtype) -> None:
    def fn(group: Group) -> Tensor:
        module = sharded(group, rows(20, 2))
        out: Tensor = module(batch_of([[3, 12], [], [19]], dtype=id_type)).values()
        return out.detach()

    one, other = run_virtual_ranks(2, fn)
    table = torch.arange(80).view(20, 4) % 97.0
    assert torch.equal(one, torch.stack([table[3] + table[12], torch.zeros(4), table[19]]))
    assert torch.equal(one, other)


def test_a_table_of_ten_billion_rows_routes_and_one_small_tile_of_it_has_its_values() -> None:
    """Rank 1 holds rows [7e9, 7e9 + 5); what the others hold stays on meta. Ids above 2^31 arrive as they are."""
    size, first = 10**10, 7 * 10**9
    tiling = Tiling.of("t", size, 8, [(0, first, 0, 8, 0), (first, first + 5, 0, 8, 1), (first + 5, size, 0, 8, 2)])

    def fn(group: Group, whole: EmbeddingBagCollection) -> Any:
        module: Any = copy.deepcopy(whole)
        device = "cpu" if group.rank == 1 else "meta"
        shard_collection(module, {"t": tiling}, group, group.split("route"), Topology(3, "cpu"), device=device)
        weight = module.embedding_bags["t"].weight
        assert weight.device.type == device
        routed = module.route(batch_of([[first + 4, 2**31 + group.rank], [size - 1], [first]])).wait().routed
        return routed.ids, weight.detach() if group.rank == 1 else weight.shape

    whole = EmbeddingBagCollection([EmbeddingBagConfig(size, 8, "t", feature_names=["a"])], device="meta")
    (low, low_shape), (ids, tile), (high, high_shape) = run_virtual_ranks(3, fn, whole)
    assert low.tolist() == [2**31, 2**31 + 1, 2**31 + 2]
    assert ids.tolist() == [4, 0] * 3
    assert high.tolist() == [size - 1 - first - 5] * 3
    assert (*low_shape, *high_shape) == (first, 8, size - first - 5, 8)
    expected = torch.zeros(5, 8)
    key = whole.embedding_bags["t"].rows.place.key
    bound = size**-0.5
    torch.ops.tilerec.random_fill_(expected, key, first, 0, "uniform", -bound, bound)
    assert torch.equal(tile, expected)
    assert 0 < float(tile.abs().max()) <= bound


# ---------------------------------------------------------------------------------------------------- refusals


BAD = {
    "an id outside its table": lambda: batch_of([[3], [20]]),
    "a key that is missing": lambda: batch_of([[3], [4]], keys=("b",)),
    "no batch at all": lambda: "features",
    "ids that are floats": lambda: KeyedJaggedTensor(["a"], torch.ones(2), lengths=torch.ones(2, dtype=torch.int64)),
}


@pytest.mark.parametrize("sequence", [False, True], ids=["pooled", "sequence"])
@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("hosts", [None, [[0, 1], [2, 3]]], ids=["one host", "two hosts"])
def test_a_rank_that_refuses_stops_every_rank_and_the_next_step_works(what: str, sequence: bool, hosts: Any) -> None:
    good = [[1, 11], [6, 16]]

    def fn(group: Group) -> tuple[str, Any]:
        module = sharded(group, rows(20, 4), hosts=hosts, sequence=sequence)
        features: Any = BAD[what]() if group.rank == 2 else batch_of(good)
        with pytest.raises(InputError) as caught:
            module(features)
        out = module(batch_of(good))
        return str(caught.value), out["a"].values().detach() if sequence else out.values().detach()

    results = run_virtual_ranks(4, fn)
    for rank, (message, out) in enumerate(results):
        assert torch.equal(out, results[0][1])
        if rank == 2:
            assert "refused" not in message
        else:
            assert message.startswith("Rank 2 refused its batch")


def test_a_batch_without_the_weights_that_a_module_wants_stops_every_rank() -> None:
    def fn(group: Group) -> str:
        module = sharded(group, rows(20, 2), weighted=True)
        with pytest.raises(ValueError) as caught:
            module(batch_of([[1, 12]]))
        return str(caught.value)

    assert all("weights" in message for message in run_virtual_ranks(2, fn))


def test_two_ranks_that_refuse_each_say_why() -> None:
    def fn(group: Group) -> str:
        module = sharded(group, rows(20, 4))
        with pytest.raises(InputError) as caught:
            module.route(batch_of([[20 + group.rank]]) if group.rank in (1, 3) else batch_of([[3]]))
        return str(caught.value)

    messages = run_virtual_ranks(4, fn)
    assert "21" in messages[1]
    assert "23" in messages[3]
    assert messages[0].startswith("Rank 1 refused")
    assert messages[2].startswith("Rank 1 refused")


# ---------------------------------------------------------------------------------------------------- ahead of time


def test_the_next_batch_may_be_routed_before_the_last_one_is_looked_up() -> None:
    """Two routed batches are alive at once, and neither sees the other."""

    def fn(group: Group) -> list[Tensor]:
        module = sharded(group, rows(20, 2))
        first = module.route(batch_of([[1, 12]]))
        second = module.route(batch_of([[13], [4]]))
        return [module(second).values().detach(), module(first).values().detach()]

    table = torch.arange(80).view(20, 4) % 97.0
    for second, first in run_virtual_ranks(2, fn):
        assert torch.equal(first, (table[1] + table[12])[None])
        assert torch.equal(second, table[[13, 4]])


@pytest.mark.parametrize("hosts", [None, [[0, 1], [2, 3]]], ids=["one host", "two hosts"])
def test_routing_waits_for_its_header_and_for_nothing_else(hosts: Any) -> None:
    """The payload is on its way when `route` returns: sizes are all that a rank must know before it goes on."""

    class Noting:
        def __init__(self, handle: Any, note: list[str], name: str) -> None:
            self.handle, self.note, self.name = handle, note, name

        def wait(self) -> Tensor:
            self.note.append(self.name)
            out: Tensor = self.handle.wait()
            return out

    def fn(group: Group) -> tuple[list[str], list[str]]:
        module = sharded(group, rows(20, 4), hosts=hosts)
        route_group, note = module.exchange.route_group, []
        real = route_group.all_to_all
        route_group.all_to_all = lambda name, *args: Noting(real(name, *args), note, name)
        routed = module.route(batch_of([[1, 11], [6, 16]]))
        before = list(note)
        routed.wait()
        routed.wait()
        return before, note

    assert run_virtual_ranks(4, fn) == [(["header"], ["header", "ids"])] * 4


def test_ids_that_have_arrived_are_unpacked_and_others_are_not_waited_for() -> None:
    class Late:
        """A call that counts as ended from the moment when `ended` has its name."""

        def __init__(self, handle: Any, name: str, ended: set[str], waits: list[str]) -> None:
            self.handle, self.name, self.ended, self.waits = handle, name, ended, waits

        def is_done(self) -> bool:
            return self.name in self.ended

        def wait(self) -> Tensor:
            self.waits.append(self.name)
            out: Tensor = self.handle.wait()
            return out

    def fn(group: Group) -> tuple[list[int], list[int], int, list[str]]:
        module = sharded(group, rows(20, 4))
        route_group, ended, waits = module.exchange.route_group, set[str](), list[str]()
        real = route_group.all_to_all
        route_group.all_to_all = lambda name, *args: Late(real(name, *args), name, ended, waits)
        routed = module.route(batch_of([[1, 11], [6, 16]]))
        sizes = []
        for name in ("", "ids"):
            ended.add(name)
            routed.receive()
            sizes.append(list(routed.routed.ids.shape))
        routed.receive()
        messages = routed.routed.pending is None and routed.routed.handle is None
        return sizes[0], sizes[1], int(messages), waits

    assert run_virtual_ranks(4, fn) == [([0], [4], 1, ["header", "ids"])] * 4


def test_nothing_travels_in_a_world_of_one() -> None:
    def fn(group: Group) -> int:
        module = sharded(group, rows(20, 1))
        module(batch_of([[1, 12], []]))
        return group.traffic.total()

    assert run_virtual_ranks(1, fn) == [0]
