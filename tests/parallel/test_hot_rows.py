"""Copies of hot rows stay hidden: each way to read a model gives the bits of one without hot rows, and each way
to write one fills the copies. Tables that cannot have hot rows are refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tilerec.checkpoint import CheckpointManager, load, save
from tilerec.checkpoint.changes import Changes
from tilerec.checkpoint.contents import SavedContents
from tilerec.checkpoint.loading import load_from
from tilerec.checkpoint.memory_source import HeldMemory, MemorySource
from tilerec.checkpoint.running_save import save_ahead
from tilerec.checkpoint.step_memory import StepMemory
from tilerec.comms.group import Group
from tilerec.comms.process import ProcessGroupComms
from tilerec.delta import DeltaWriter
from tilerec.errors import ConfigError, InputError
from tilerec.export.whole_model import whole_model
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.check_replicas import check_replicas
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.shard import shard
from tilerec.sharding import tile_memory
from tilerec.sharding.table import ShardedTable
from tilerec.spec.cache import CacheParams
from tilerec.spec.hot_rows import HotRows
from tilerec.spec.optimizer import Adam, RowWiseAdagrad
from tilerec.spec.plan import ParameterSharding, ShardingPlan
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.spec.tile import Tiling
from tilerec.testing.batches import random_batch
from tilerec.testing.ranks import Ranks
from tilerec.testing.virtual import run_virtual_ranks
from tilerec.train.saved_model import weights_hash

Pool = Callable[[int], Ranks]
ROWS = {"rows": 30, "one": 20, "columns": 24}
HOT = {"rows": [2, 3, 17, 29], "one": [0, 5], "columns": [1, 8, 23]}
DIM = 8


def unattached(seed: int = 0) -> EmbeddingBagCollection:
    torch.manual_seed(seed)  # for `reset_parameters`
    model = EmbeddingBagCollection([EmbeddingBagConfig(n, DIM, t, feature_names=[t]) for t, n in ROWS.items()])
    draw = torch.Generator().manual_seed(seed)  # its own: virtual ranks are threads, which share torch's
    for weight in model.parameters():
        weight.data.uniform_(-0.3, 0.3, generator=draw)
    return model


def unsharded(seed: int = 0) -> EmbeddingBagCollection:
    model = unattached(seed)
    for name, spec in (("rows", RowWiseAdagrad(lr=0.1)), ("one", Adam(lr=0.1)), ("columns", Adam(lr=0.1))):
        apply_optimizer_in_backward(spec, [model.embedding_bags[name].weight])
    return model


def plan(hot: bool, world: int = 2, kernel: str | None = None) -> dict[str, ParameterSharding]:
    kinds: dict[str, Any] = {
        "rows": ("row_wise", None), "one": ("table_wise", [world - 1]), "columns": ("column_wise", [0, world - 1])
    }  # fmt: skip
    cache = None if kernel is None else CacheParams(load_factor=0.3)
    return {
        name: ParameterSharding(
            kind, kernel, ranks, cache_params=cache, hot=HotRows(np.array(HOT[name])) if hot else None
        )
        for name, (kind, ranks) in kinds.items()
    }


def sharded(group: Group, hot: bool, seed: int = 0, kernel: str | None = None) -> Any:
    return shard(unsharded(seed), plan(hot, group.size, kernel), group, exact=True)


def train(model: Any, rank: int, step: int) -> Tensor:
    out = model(random_batch(list(ROWS), list(ROWS.values()), 6, seed=10 * step + rank)).values()
    (out * out).sum().backward()
    return out.detach()


def parts(model: Any) -> dict[str, Any]:
    return {"model": model, "optimizer": model.fused_optimizer}


def state_of(model: Any) -> dict[str, Tensor]:
    """Weights and optimizer state, whole. Collective."""
    found = {name: value.clone() for name, value in full_state_dict(model).items()}
    for name, slots in model.fused_optimizer.full_state_dict()["state"].items():
        found.update({f"{name}/{slot}": value.clone() for slot, value in slots.items()})
    return found


def assert_alike(model: Any, want: Mapping[str, Tensor]) -> None:
    """The model has this state, and its copies are those of its rows."""
    got = state_of(model)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name
    for name, table in model._tables.items():
        assert isinstance(table, ShardedTable)
        for rows in table.tile_rows:
            if rows.names is None:
                continue
            assert torch.equal(rows.leaf, want[f"embedding_bags.{name}.weight"][rows.names]), name
            for slot, value in rows.state.items():
                whole = want[f"embedding_bags.{name}.weight/{slot}"]
                assert torch.equal(value, whole[rows.names] if whole.dim() else whole), (name, slot)


def pair(group: Group, kernel: str | None) -> tuple[Any, Any]:
    """A trained model with hot rows, and one without."""
    models = sharded(group, True, kernel=kernel), sharded(group, False, kernel=kernel)
    assert len(models[0].embedding_bags["rows"].tiles) == 2
    for step in range(2):
        out = [train(model, group.rank, step) for model in models]
        assert torch.equal(*out)
    return models


# ------------------------------------------------------------------------------------------------------------- reads


KERNELS = [None, "fused_uvm_caching"]


def read_everywhere(folder: str, kernel: str | None) -> None:
    group = ProcessGroupComms()
    model, plain = pair(group, kernel)
    assert_alike(model, state_of(plain))
    for name, value in plain.state_dict().items():
        own = model.state_dict()[name]
        assert own.shape == value.shape
        assert torch.equal(own.full_tensor(), value.full_tensor()), name
    for name, value in plain.fused_optimizer.state_dict()["state"].items():
        for slot, want in value.items():
            got = model.fused_optimizer.state_dict()["state"][name][slot]
            assert torch.equal(*[t.full_tensor() if hasattr(t, "full_tensor") else t for t in (got, want)]), slot
    assert weights_hash(model) == weights_hash(plain) or group.rank
    twin, want_twin = whole_model(model), whole_model(plain)
    if twin is not None and want_twin is not None:
        for name, value in want_twin.state_dict().items():
            assert torch.equal(twin.state_dict()[name], value)
        assert type(twin) is EmbeddingBagCollection
    assert_alike(copy.deepcopy(model), state_of(plain))
    check_replicas(model)
    # Files: whole, while training goes on, and changed rows only.
    digests: list[list[str]] = [[], []]
    for k, each in enumerate((model, plain)):
        save(f"{folder}/{k}-whole", parts(each))
        dcp.save({"model": each.state_dict()}, checkpoint_id=f"{folder}/{k}-dcp")
        writer = DeltaWriter(f"{folder}/{k}-deltas", each, base_every=None)
        writer.publish(0)
        saves = CheckpointManager(Path(folder) / f"{k}-changed", incremental=True, keep_last=0, asynchronous=False)
        saves.save(0, parts(each))
        running = save_ahead(f"{folder}/{k}-ahead", parts(each))
        train(each, group.rank, 2)
        running.wait()
        saves.save(1, parts(each))
        published = writer.publish(1)
        paths = [f"{folder}/{k}-{end}" for end in ("whole", "ahead", "changed/step-0", "changed/step-1")]
        found = [SavedContents(path) for path in [*paths, published.path]]
        assert found[3].manifest.base is not None
        digests[k] = [one.digest() for one in found] + [str(listed(one)) for one in found[3:]]
    assert digests[0] == digests[1], digests
    assert len(set(digests[0][:4])) == 2  # one moment, and a later one


def listed(saved: SavedContents) -> dict[str, int]:
    """Number of rows of each tensor of the tables "rows" and "one" in an incremental checkpoint; -1: all."""
    tensors = {name: own for name, own in saved.manifest.tensors.items() if ".columns." not in name}
    return {name: -1 if own.is_whole else sum(rows.count for rows in own.rows) for name, own in tensors.items()}


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_way_to_read_a_model_gives_the_bits_of_one_without_hot_rows(
    kernel: str | None, pool: Pool, tmp_path: Path
) -> None:
    pool(2).run(read_everywhere, str(tmp_path), kernel)


# ------------------------------------------------------------------------------------------------------------ writes


def write_everywhere(folder: str, kernel: str | None) -> None:
    group = ProcessGroupComms()
    model, plain = pair(group, kernel)
    want = state_of(plain)
    save(f"{folder}/own", parts(model))
    dcp.save(
        {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}, checkpoint_id=f"{folder}/dcp"
    )
    weights, state = full_state_dict(plain), plain.fused_optimizer.full_state_dict()
    if kernel is None:
        memory = StepMemory(parts(model))
        memory.keep(0, {})
        train(model, group.rank, 7)
        memory.write(Path(folder) / f"rank{group.rank}", {0: {}})
        memory.close()

    def from_whole(fresh: Any) -> None:
        fresh.load_state_dict(weights)
        fresh.fused_optimizer.load_state_dict(state)

    def from_tiles(fresh: Any) -> None:
        fresh.load_state_dict(plain.state_dict())
        fresh.fused_optimizer.load_state_dict(plain.fused_optimizer.state_dict())

    def from_checkpoint(fresh: Any) -> None:
        load(f"{folder}/own", parts(fresh))

    def from_torch(fresh: Any) -> None:
        held = {"model": fresh.state_dict(), "optimizer": fresh.fused_optimizer.state_dict()}
        dcp.load(held, checkpoint_id=f"{folder}/dcp")
        fresh.load_state_dict(held["model"])
        fresh.fused_optimizer.load_state_dict(held["optimizer"])

    def from_memory(fresh: Any) -> None:
        source = MemorySource.of(group, HeldMemory(Path(folder) / f"rank{group.rank}"))
        assert source is not None
        load_from(lambda _: source, parts(fresh), group, Changes())

    def by_copies(fresh: Any) -> None:
        for name, value in fresh.state_dict().items():
            value.copy_(weights[name])
        fresh.fused_optimizer.load_state_dict(state)

    ways = [from_whole, from_tiles, from_checkpoint, from_torch, from_memory, by_copies]
    if kernel is not None:
        ways.remove(from_memory)  # step memory refuses cached tables
    for way in ways:
        fresh = sharded(group, True, 3, kernel)
        train(fresh, group.rank, 5)
        way(fresh)
        assert_alike(fresh, want)
    twin = sharded(group, False, 3, kernel)
    from_whole(twin)
    for each in (fresh, twin):
        train(each, group.rank, 6)
    assert_alike(fresh, state_of(twin))
    for each in (fresh, twin):
        for table in each._tables.values():
            table.reset_parameters()
    assert_alike(fresh, state_of(twin))
    fresh.state_dict()["embedding_bags.one.weight"].zero_()
    assert not any(rows.leaf.any() for rows in fresh.embedding_bags["one"].tile_rows)
    for name, value in fresh.state_dict().items():  # also where torch's placements would describe the tiling
        assert type(value).__name__ == "TiledTensor", name


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_way_to_write_a_model_fills_the_copies(kernel: str | None, pool: Pool, tmp_path: Path) -> None:
    pool(2).run(write_everywhere, str(tmp_path), kernel)


def shard_from_meta() -> None:
    group = ProcessGroupComms()
    configs = [EmbeddingBagConfig(n, DIM, t, feature_names=[t]) for t, n in ROWS.items()]
    made = []
    for device, kernel in (("meta", None), ("meta", "fused_uvm_caching"), ("cpu", None)):
        torch.manual_seed(0)
        model = EmbeddingBagCollection(configs, device=torch.device(device))
        apply_optimizer_in_backward(Adam(lr=0.1), model.parameters())
        made.append(shard(model, plan(True, group.size, kernel), group))
    for model in made[:2]:
        assert_alike(model, state_of(made[2]))


def test_tables_on_meta_get_the_values_and_copies_of_the_others(pool: Pool) -> None:
    # In processes: virtual ranks are threads, which take their values from one generator in any order.
    pool(2).run(shard_from_meta)


# ----------------------------------------------------------------------------------------------------------- refusals


def refused(words: str, act: Callable[[Group], Any], ranks: int = 2) -> None:
    def live(group: Group) -> None:
        with pytest.raises(ConfigError, match=words):
            act(group)

    run_virtual_ranks(ranks, live)


def test_a_hot_id_outside_of_its_table_is_refused() -> None:
    own = {**plan(True), "one": ParameterSharding("table_wise", ranks=[0], hot=HotRows(np.array([20])))}
    refused("Table 'one': got the hot id 20", lambda group: shard(unsharded(), own, group))


def test_other_hot_rows_on_another_rank_are_refused() -> None:
    def act(group: Group) -> None:
        own = {**plan(True), "one": ParameterSharding("table_wise", ranks=[0], hot=HotRows(np.array([group.rank])))}
        shard(unsharded(), own, group)

    refused(r"one.hot.* is 0 on rank 0 and 1 on rank 1", act)


def test_hot_rows_beside_rows_on_every_rank_are_refused() -> None:
    tiling = Tiling.of("one", 20, DIM, [(0, 5, 0, DIM, (0, 1)), (5, 20, 0, DIM, 0)])
    own = {**plan(True), "one": ParameterSharding("explicit", tiling=tiling, hot=HotRows(np.array([7])))}
    refused("Table 'one': got hot rows beside a tiling with some rows", lambda group: shard(unsharded(), own, group))


def test_a_table_with_hot_rows_trains_only_with_an_attached_optimizer_and_is_read_without() -> None:
    def live(group: Group) -> None:
        model = unattached()
        own = shard(copy.deepcopy(model), plan(True, group.size), group)
        batch = random_batch(list(ROWS), list(ROWS.values()), 6, seed=group.rank)
        with pytest.raises(ConfigError, match="'rows': it has hot rows and no attached optimizer"):
            own(batch)
        with torch.no_grad():
            torch.testing.assert_close(own(batch).values(), model(batch).values())

    run_virtual_ranks(2, live)


def test_a_head_without_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> list[Tensor]:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(tile_memory, "flat_memory", full)
    refused("no memory for .* copies of 4 hot rows", lambda group: shard(unsharded(), plan(True), group))


# ------------------------------------------------------------------------------------------------- ahead and compiled


def routed_ahead(model: Any, rank: int, steps: int) -> list[Tensor]:
    batches = [random_batch(list(ROWS), list(ROWS.values()), 6, seed=10 * step + rank) for step in range(steps)]
    ready, seen = model.prefetch(batches[0]), []
    for following in [*batches[1:], None]:
        out = model(ready).values()
        ready = None if following is None else model.prefetch(following)
        (out * out).sum().backward()
        seen.append(out.detach())
    return seen


def test_batches_that_are_routed_ahead_have_the_same_bits() -> None:
    def live(group: Group) -> None:
        model, plain = sharded(group, True), sharded(group, False)
        for got, want in zip(routed_ahead(model, group.rank, 4), routed_ahead(plain, group.rank, 4), strict=True):
            assert torch.equal(got, want)
        assert_alike(model, state_of(plain))

    run_virtual_ranks(4, live)


def compiled_steps() -> None:
    group = ProcessGroupComms()
    model, plain = sharded(group, True), sharded(group, False)
    program = torch.compile(model, backend="aot_eager", fullgraph=True)
    for step in range(3):
        assert torch.equal(train(program, group.rank, step), train(plain, group.rank, step))
    assert_alike(model, state_of(plain))


def test_compiled_steps_have_the_same_bits(pool: Pool) -> None:
    pool(2).run(compiled_steps)


def test_a_bad_id_is_named_with_its_table_s_rows() -> None:
    def live(group: Group) -> None:
        model = sharded(group, True)
        batch = random_batch(list(ROWS), list(ROWS.values()), 6, seed=1)
        batch.values()[0] = 30 + group.rank
        with pytest.raises(InputError, match=f"id {30 + group.rank} .*30|[Rr]ank"):
            model(batch)
        train(model, group.rank, 0)

    run_virtual_ranks(2, live)


def test_the_file_of_a_plan_has_the_hot_rows(tmp_path: Path) -> None:
    def live(group: Group) -> ShardingPlan:
        found = sharded(group, True).plan
        assert isinstance(found, ShardingPlan)
        return found

    made = run_virtual_ranks(2, live)[0]
    made.save(tmp_path / "plan.json")
    again = ShardingPlan.load(tmp_path / "plan.json")
    assert [s.hot for _, _, s in again.tables()] == [HotRows(np.array(own)) for own in HOT.values()]

    def reloaded(group: Group) -> ShardingPlan:
        model = shard(unsharded(), str(tmp_path / "plan.json"), group)
        assert len(model.embedding_bags["rows"].tiles) == 2
        return model.plan  # type: ignore[no-any-return]

    assert run_virtual_ranks(2, reloaded)[0].dumps() == made.dumps()
