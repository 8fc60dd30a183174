"""`torch.fx.symbolic_trace` of models with tables, and the refusal of TorchScript."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.export.export_models import every_batch, every_kind, kjt
from tilerec.errors import ConfigError
from tilerec.models.dlrm import DLRM
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig

KEYS = ("user", "item")


def bags() -> EmbeddingBagCollection:
    return EmbeddingBagCollection([EmbeddingBagConfig(24, 4, name, feature_names=[name]) for name in KEYS])


def rows() -> EmbeddingCollection:
    return EmbeddingCollection([EmbeddingConfig(24, 4, name, feature_names=[name]) for name in KEYS])


def test_a_traced_dlrm_returns_the_model_s_bits_and_has_its_names() -> None:
    model = DLRM(bags(), 3, [5, 4], [6, 1])
    traced = torch.fx.symbolic_trace(model)
    calls = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert "sparse_arch.embedding_bag_collection" in calls
    for samples in (1, 5):
        batch = every_batch(samples, samples)
        assert torch.equal(traced(batch.dense, batch.pooled), model(batch.dense, batch.pooled))
    assert sorted(traced.state_dict()) == sorted(model.state_dict())


@pytest.mark.parametrize("make", [bags, rows])
def test_a_collection_that_is_traced_itself_is_a_child_of_the_trace(make: Callable[[], nn.Module]) -> None:
    module = make()
    traced = torch.fx.symbolic_trace(module)
    batch = kjt(KEYS, 3, torch.Generator().manual_seed(0))
    assert traced.itself is module
    assert torch.equal(traced(batch)["user"] if make is bags else traced(batch)["user"].values(),
                       module(batch)["user"] if make is bags else module(batch)["user"].values())  # fmt: skip


def test_a_collection_with_position_weights_is_traced() -> None:
    module = every_kind().weighted
    traced = torch.fx.symbolic_trace(module)
    batch = every_batch(4, 4).pooled
    assert torch.equal(traced(batch).values(), module(batch).values())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("make", [bags, lambda: DLRM(bags(), 3, [5, 4], [6, 1])])
def test_torchscript_is_refused_with_the_way_to_export(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ConfigError, match=r"Write the model with tilerec\.export\.export\(model, example, path\)"):
        torch.jit.script(make())
