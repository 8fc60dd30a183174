"""Tables in files of a sharded model: the same bits as in memory under every tiling, and through every move."""

from __future__ import annotations

import copy
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.parallel.test_cached import KINDS, Model, assert_same, everything, kernels, plan, train
from tests.parallel.test_model_parallel import Pool
from tilerec import (
    CacheParams,
    ConfigError,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyValueParams,
    apply_optimizer_in_backward,
    cache_tables,
    reshard,
    shard,
)
from tilerec.checkpoint import load, save, save_ahead
from tilerec.comms.group import Group
from tilerec.errors import CommsError, FileError
from tilerec.export.whole_model import whole_model
from tilerec.optim.fused import FusedOptimizer
from tilerec.parallel.plan_of import plan_of
from tilerec.parallel.two_d.settings import GroupConfig, ReplicaSettings
from tilerec.parallel.two_d.shard_2d import shard_2d
from tilerec.sharding import tile_memory
from tilerec.spec.optimizer import LAMB, Adam, OptimizerSpec, PartialRowWiseLAMB, RowWiseAdagrad
from tilerec.spec.plan import ParameterSharding, ShardingPlan
from tilerec.storage.file_rows import FileRows
from tilerec.storage.row_file import failed_file, file_of
from tilerec.testing.virtual import run_virtual_ranks

CACHE = CacheParams(load_factor=0.3)


def in_files(kind: str, folder: Path, ranks: list[int] | None = None) -> dict[str, Any]:
    def of() -> ParameterSharding:
        own = ranks or ([1] if kind == "table_wise" else None)
        files = KeyValueParams(folder)
        return ParameterSharding(kind, "key_value", own, cache_params=CACHE, key_value_params=files)

    return {"ebc": {"a": of(), "b": of()}, "ec": {"c": of()}}


def files_of(model: nn.Module) -> list[bool]:
    return [file_of(leaf) is not None for leaf in model.parameters() if leaf.numel()]


def both(
    base: Model, group: Group, spec: OptimizerSpec, kind: str, folder: Path, **options: Any
) -> tuple[nn.Module, nn.Module]:
    """The same model, sharded in memory and in files."""
    models = []
    for own in (plan(kind), in_files(kind, folder)):
        model = copy.deepcopy(base)
        apply_optimizer_in_backward(spec, model.parameters())
        models.append(shard(model, own, mesh=group, **options))
    return models[0], models[1]


@pytest.mark.parametrize("spec", [Adam(0.1), PartialRowWiseLAMB(0.1)], ids=lambda spec: type(spec).__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_every_sharding_is_the_same_bits(tmp_path: Path, kind: str, spec: OptimizerSpec) -> None:
    base = Model()

    def run(group: Group) -> None:
        plain, other = both(base, group, spec, kind, tmp_path, exact=True)
        assert all(files_of(other))
        assert bool(files_of(other)) == (kind != "table_wise" or group.rank == 1)
        assert_same(train(plain, group, range(4)), train(other, group, range(4), ahead=True))
        assert_same(everything(plain), everything(other))
        assert kernels(other) == dict.fromkeys("abc", "key_value")
        assert os.listdir(tmp_path) == []

    run_virtual_ranks(2, run)


@pytest.mark.parametrize("init_fn", [None, nn.init.normal_])
def test_a_model_on_meta_gets_its_initial_values_in_files(tmp_path: Path, init_fn: Any) -> None:
    tables = [EmbeddingBagConfig(150, 8, "a", feature_names=["f"], init_fn=init_fn)]
    base = EmbeddingBagCollection(tables, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad(0.1, initial_accumulator_value=0.5), base.parameters())
    files = {"compute_kernel": "key_value", "key_value_params": {"ssd_storage_directory": str(tmp_path)}}

    def run(group: Group) -> None:
        first, second = (
            shard(copy.deepcopy(base), {"a": ParameterSharding("row_wise", **own)}, mesh=group) for own in ({}, files)
        )
        assert all(files_of(second))
        assert files_of(second)
        for one, other in zip(host_of(first), host_of(second), strict=True):
            assert torch.equal(one, other)

    run_virtual_ranks(2, run)


def host_of(ebc: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = ebc.embedding_bags["a"].rows.host()
    return found


@pytest.mark.parametrize(("before", "after"), [("row_wise", "column_wise"), ("table_wise", "row_wise")])
def test_a_reshard_moves_rows_from_file_to_file(tmp_path: Path, before: str, after: str) -> None:
    base = Model()

    def run(group: Group) -> None:
        plain, other = both(base, group, Adam(0.1), before, tmp_path, exact=True)
        train(plain, group, range(2)), train(other, group, range(2))
        for model in (plain, other):
            moved = {
                path: {name: ParameterSharding(after) for name in tables}
                for path, tables in {"ebc": ("a", "b"), "ec": ("c",)}.items()
            }
            reshard(model, moved)
        assert all(files_of(other))
        assert files_of(other)
        assert kernels(other) == dict.fromkeys("abc", "key_value")
        assert_same(train(plain, group, range(2, 4)), train(other, group, range(2, 4)))
        assert_same(everything(plain), everything(other))

    run_virtual_ranks(2, run)


def test_a_reshard_cannot_move_rows_out_of_files(tmp_path: Path) -> None:
    base = Model()

    def run(group: Group) -> None:
        _, other = both(base, group, Adam(0.1), "row_wise", tmp_path)
        with pytest.raises(
            ConfigError, match=r"got 'fused' \(no cache\); expected CacheParams.*, files in .*Leave comp"
        ):
            reshard(other, plan("column_wise"))

    run_virtual_ranks(2, run)


def test_unsharded_tables_in_files_stay_there(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = Model()
    apply_optimizer_in_backward(Adam(0.1), base.parameters())

    def run(group: Group) -> None:
        plain = shard(copy.deepcopy(base), plan("row_wise"), mesh=group, exact=True)
        other = copy.deepcopy(base)
        cache_tables(other, 0.3, folder=tmp_path)
        own = {
            "ebc": {name: ParameterSharding("row_wise") for name in "ab"},
            "ec": {"c": ParameterSharding("row_wise")},
        }
        shard(other, own, mesh=group, exact=True)
        assert kernels(other) == dict.fromkeys("abc", "key_value")
        assert all(files_of(other))
        assert_same(train(plain, group, range(3)), train(other, group, range(3)))
        assert_same(everything(plain), everything(other))

    run_virtual_ranks(2, run)


@pytest.mark.parametrize("sync", ["exact", "average"])
def test_replicas_of_2d_parallelism_are_the_same_bits(tmp_path: Path, sync: str) -> None:
    base = Model()

    def run(group: Group) -> None:
        seen = []
        for own in (plan("row_wise"), in_files("row_wise", tmp_path)):
            model = copy.deepcopy(base)
            apply_optimizer_in_backward(Adam(0.1), model.parameters())
            configs = [GroupConfig(own, 2)]
            two = shard_2d(model, lambda configs=configs: (configs, {}), group, ReplicaSettings(sync, 1000))
            seen.append(train(model, group, range(3)))
            if sync == "average":
                two.sync()
            seen[-1] += train(model, group, range(3, 5))
        assert_same(*seen)

    run_virtual_ranks(4, run)


def test_an_export_gathers_the_rows_in_a_file(tmp_path: Path) -> None:
    base = Model()

    def run(group: Group) -> None:
        plain, other = both(base, group, Adam(0.1), "column_wise", tmp_path, exact=True)
        train(plain, group, range(2))
        train(other, group, range(2))
        first, second = whole_model(plain), whole_model(other)
        if group.rank:
            assert second is None
            return
        assert first is not None
        assert second is not None
        assert all(files_of(second))
        for one, two in zip(first.parameters(), second.parameters(), strict=True):
            assert torch.equal(one, two)

    run_virtual_ranks(2, run)


def test_an_export_of_an_unsharded_table_copies_its_rows_into_a_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = Model()
    apply_optimizer_in_backward(Adam(0.1), base.parameters())
    other = copy.deepcopy(base)
    cache_tables(other, 0.3, folder=tmp_path)
    whole = whole_model(other)
    assert whole is not None
    assert all(files_of(whole))
    for one, two in zip(base.parameters(), whole.parameters(), strict=True):
        assert two.is_contiguous()
        assert torch.equal(one, two)


def saved_by_one(kind: str, filed: bool, folder: str, path: str, ahead: bool) -> list[torch.Tensor]:
    import torch.distributed as dist

    from tilerec.comms.mesh import group_of

    group = group_of(dist.group.WORLD)
    torch.manual_seed(0)
    base = Model()
    plain, other = both(base, group, Adam(0.1), kind, Path(folder), exact=True)
    model = other if filed else plain
    train(model, group, range(3))
    want = [tensor.clone() for tensor in everything(model)]
    parts = {"model": model, "ebc": FusedOptimizer(model.ebc), "ec": FusedOptimizer(model.ec)}
    if ahead:
        running = save_ahead(path, parts)
        train(model, group, range(3, 6))
        running.wait()
    else:
        save(path, parts)
    return want


def loaded_by_one(kind: str, filed: bool, folder: str, path: str) -> list[torch.Tensor]:
    import torch.distributed as dist

    from tilerec.comms.mesh import group_of

    group = group_of(dist.group.WORLD)
    torch.manual_seed(0)
    base = Model()
    plain, other = both(base, group, Adam(0.1), kind, Path(folder), exact=True)
    model = other if filed else plain
    train(model, group, range(7, 9))
    load(path, {"model": model, "ebc": FusedOptimizer(model.ebc), "ec": FusedOptimizer(model.ec)})
    assert not filed or all(files_of(model))
    return everything(model)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("to_files", [False, True])
def test_a_checkpoint_goes_into_and_out_of_files_under_another_tiling(
    pool: Pool, tmp_path: Path, to_files: bool, ahead: bool
) -> None:
    (tmp_path / "rows").mkdir()
    folder, path = str(tmp_path / "rows"), str(tmp_path / "saved")
    want = pool(2).run(saved_by_one, "row_wise", not to_files, folder, path, ahead)
    found = pool(2).run(loaded_by_one, "column_wise", to_files, folder, path)
    assert_same(want[0], found[0])
    assert os.listdir(folder) == []


def test_a_disk_that_is_full_on_one_rank_changes_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = Model()
    full: set[int] = set()
    made = tile_memory.rows_in_file

    def failing(*args: Any) -> Any:
        if threading.get_ident() in full:
            raise failed_file(OSError(28, "No space left on device"), str(tmp_path), "a", 4800)
        return made(*args)

    monkeypatch.setattr(tile_memory, "rows_in_file", failing)

    def run(group: Group) -> None:
        if group.rank == 1:
            full.add(threading.get_ident())
        model = copy.deepcopy(base)
        apply_optimizer_in_backward(Adam(0.1), model.parameters())
        expected = "No space left on device.*4,800 bytes of rows" if group.rank else "rank 1"
        with pytest.raises(ConfigError, match=expected):
            shard(model, in_files("row_wise", tmp_path), mesh=group)
        assert type(model.ebc) is EmbeddingBagCollection
        shard(model, plan("row_wise"), mesh=group)
        train(model, group, range(1))

    run_virtual_ranks(2, run)


def test_a_write_that_fails_on_one_rank_hangs_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = Model()
    full: set[int] = set()
    seen: dict[int, type[BaseException]] = {}
    write = FileRows.write_from

    def failing(self: FileRows, *args: Any) -> None:
        if threading.get_ident() in full:
            raise failed_file(OSError(28, "No space left on device"), str(tmp_path), "a", 4800)
        write(self, *args)

    monkeypatch.setattr(FileRows, "write_from", failing)

    def run(group: Group) -> None:
        _, other = both(base, group, Adam(0.1), "row_wise", tmp_path)
        if group.rank == 1:
            full.add(threading.get_ident())
        try:
            train(other, group, range(50))
        except Exception as error:
            seen[group.rank] = type(error)
            raise

    with pytest.raises(FileError, match=r"Table 'a': got 'No space left on device' for 4,800 bytes of rows"):
        run_virtual_ranks(2, run)
    assert seen == {0: CommsError, 1: FileError}


def test_a_key_value_table_needs_a_folder_and_an_optimizer(tmp_path: Path) -> None:
    def run(group: Group) -> None:
        model = Model()
        with pytest.raises(ConfigError, match=r"is planned for host memory or files .* and has no optimizer"):
            shard(model, in_files("row_wise", tmp_path), mesh=group)
        apply_optimizer_in_backward(Adam(0.1), model.parameters())
        with pytest.raises(
            ConfigError, match="got compute_kernel 'key_value' without key_value_params; expected the fol"
        ):
            shard(model, plan("row_wise", "key_value"), mesh=group)

    run_virtual_ranks(1, run)


def test_a_plan_with_files_is_written_and_read(tmp_path: Path) -> None:
    base = Model()

    def run(group: Group) -> None:
        _, other = both(base, group, Adam(0.1), "row_wise", tmp_path)
        text = plan_of(other).to_json()
        again = ShardingPlan.from_json(text)
        assert again == plan_of(other)
        files = again.plan["ebc"]["a"].key_value_params
        assert files == KeyValueParams(tmp_path)

    run_virtual_ranks(1, run)


def test_large_sums_over_rows_in_files(tmp_path: Path) -> None:
    """LAMB needs sums over whole rows, whose columns are in files of two ranks."""
    base = Model()

    def run(group: Group) -> None:
        plain, other = both(base, group, LAMB(0.1), "column_wise", tmp_path, exact=True)
        assert_same(train(plain, group, range(3)), train(other, group, range(3)))

    run_virtual_ranks(2, run)
