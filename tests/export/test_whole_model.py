"""The whole copy of a model: the same package under every plan, and a model that stays as it was."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.export.export_models import DIM, EveryKind, every_batch, every_kind
from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.export.exporting import export, prepared
from tilerec.export.whole_model import whole_model
from tilerec.modules.cached_tables import cache_tables
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.model_parallel import DistributedModelParallel
from tilerec.parallel.shard import shard
from tilerec.parallel.two_d.dmp_collection import DMPCollection
from tilerec.planner.helpers import column_wise, data_parallel, row_wise, table_wise
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.testing.virtual import run_virtual_ranks

PLANS: dict[str, Callable[[], Any]] = {
    "rows": row_wise,
    "one rank": lambda: table_wise(rank=0),
    "last rank": lambda: table_wise(rank=1),
    "columns": lambda: column_wise(ranks=[1, 0]),
    "copies": data_parallel,
    "mixed": lambda: {
        "pooled": {"user": row_wise(), "item": column_wise(ranks=[0, 1])},
        "rows": {"seen": table_wise(rank=1)},
        "weighted._embedding_bag_collection": {"place": row_wise()},
        "managed._embedding_module": {"raw": row_wise()},
    },
}
CASES = [(2, name) for name in PLANS] + [(1, "rows"), (3, "rows"), (4, "rows"), (3, "copies")]
DAILY = [(2, "mixed"), (2, "copies"), (4, "rows")]


def _whole(world: int, plan: str) -> nn.Module:
    source = every_kind().state_dict()

    def on_rank(group: Group) -> nn.Module | None:
        torch.manual_seed(group.rank)
        model = EveryKind()
        model.load_state_dict(source)
        return whole_model(shard(model, PLANS[plan](), group))

    first, *others = run_virtual_ranks(world, on_rank)
    assert others == [None] * (world - 1)
    return first


def test_the_manifest_is_the_same_under_every_plan_and_world_size() -> None:
    assert set(DAILY) < set(CASES)
    wanted = prepared(whole_model(every_kind()), every_batch(3).args()).manifest.to_json()
    for world, plan in CASES if os.environ.get("TILEREC_NIGHTLY") == "1" else DAILY:
        model = _whole(world, plan)
        got = prepared(model, every_batch(3).args()).manifest.to_json()
        assert got == wanted, (world, plan)


def test_the_copy_of_a_sharded_model_returns_the_unsharded_model_s_bits() -> None:
    model, wanted = _whole(2, "mixed"), every_kind()
    for samples in (0, 1, 5):
        batch = every_batch(samples, samples).args()
        with torch.no_grad():
            for name, value in wanted(*batch).items():
                assert torch.equal(model(*batch)[name], value)


def test_the_copy_shares_weights_and_leaves_the_model_trainable() -> None:
    model = EveryKind()
    apply_optimizer_in_backward(torch.optim.SGD, model.pooled.parameters(), {"lr": 1.0})
    copy = whole_model(model)
    assert copy is not None
    assert copy.top.weight.data_ptr() == model.top.weight.data_ptr()
    assert copy.pooled.embedding_bags["user"].weight.data_ptr() == model.pooled.embedding_bags["user"].weight.data_ptr()
    before = model.pooled.embedding_bags["user"].weight.detach().clone()
    model(*every_batch(4).args())["logits"].sum().backward()
    assert model.training
    assert model.top.weight.grad is not None
    assert not torch.equal(model.pooled.embedding_bags["user"].weight, before)


def test_tied_tables_have_one_weight() -> None:
    config = EmbeddingBagConfig(8, DIM, "t", feature_names=["f"])
    both = nn.ModuleList([EmbeddingBagCollection([config]), EmbeddingBagCollection([config])])
    both[1].embedding_bags["t"].weight = both[0].embedding_bags["t"].weight  # type: ignore[union-attr,index]

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = both

        def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
            return torch.cat([ebc(features).values() for ebc in self.both], dim=1)

    batch = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1, 2]), torch.tensor([1, 1, 0]))
    manifest = prepared(whole_model(Tied()), batch).manifest
    assert [table.name for table in manifest.tables] == ["both.0.embedding_bags.t", "both.1.embedding_bags.t"]
    assert len({table.weight for table in manifest.tables}) == 1
    assert len([weight for weight in manifest.weights if "embedding_bags" in weight.name]) == 1


def test_a_wrapped_model_is_exported_without_its_wrapper() -> None:
    def on_rank(group: Group) -> list[str]:
        model = DistributedModelParallel(every_kind(), env=group, init_data_parallel=False)
        copy = whole_model(model)
        return [] if copy is None else sorted(copy.state_dict())

    assert run_virtual_ranks(2, on_rank)[0] == sorted(every_kind().state_dict())


def test_one_rank_of_2d_parallelism_has_the_copy() -> None:
    def on_rank(group: Group) -> nn.Module | None:
        module = EmbeddingBagCollection([EmbeddingBagConfig(8, DIM, "t", feature_names=["f"])])
        plan = {"t": row_wise()}
        return whole_model(DMPCollection(module, None, plan, 4, 2, group, init_data_parallel=False))

    first, *others = run_virtual_ranks(4, on_rank)
    assert tuple(first.embedding_bags["t"].weight.shape) == (8, DIM)
    assert others == [None] * 3


def test_an_export_that_fails_raises_on_every_rank(tmp_path: Path) -> None:
    def on_rank(group: Group) -> str:
        model = shard(every_kind(), row_wise(), group)
        with pytest.raises(ConfigError) as error:
            export(model, every_batch(2).args(), tmp_path / "missing" / "model.pt2")
        return str(error.value)

    first, second = run_virtual_ranks(2, on_rank)
    assert first.endswith("missing/model.pt2; expected a file in an existing folder. Name a file.")
    assert second.startswith("The export: its file failed on rank 0 with ConfigError: export: got ")


def test_a_compiled_model_is_exported_as_the_model() -> None:
    model = EmbeddingBagCollection([EmbeddingBagConfig(20, DIM, "t", feature_names=["f"])])
    assert type(whole_model(torch.compile(model))) is EmbeddingBagCollection


def test_a_cached_table_is_exported_with_the_rows_of_its_cache() -> None:
    model = EmbeddingBagCollection([EmbeddingBagConfig(20, DIM, "t", feature_names=["f"])])
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})
    cache_tables(model, 0.5)
    batch = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1, 2]), torch.tensor([1, 1]))
    model(batch).values().sum().backward()
    found = prepared(whole_model(model), batch)
    assert torch.equal(found.weights["embedding_bags.t.weight"], model.embedding_bags["t"].weight)
    assert found.manifest.output_keys == {"output": ["f"]}


def test_a_model_without_memory_is_refused() -> None:
    model = EmbeddingBagCollection([EmbeddingBagConfig(8, DIM, "t", feature_names=["f"])], device="meta")
    with pytest.raises(ConfigError, match=r"Table 't': got no memory \(it is on meta\); expected its rows"):
        whole_model(model)
