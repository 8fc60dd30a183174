"""Bases of served models with TorchRec's names."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from tilerec.compat.inference import BatchingMetadata, PredictFactory, PredictModule, QualNameMetadata


class _Served(PredictModule):
    def predict_forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"score": self.predict_module(batch["x"])}


class _Factory(PredictFactory):
    def create_predict_module(self) -> nn.Module:
        return _Served(nn.Linear(2, 1), "cpu")

    def batching_metadata(self) -> dict[str, BatchingMetadata]:
        return {"x": BatchingMetadata("dense", "cpu", ["lengths"])}

    def result_metadata(self) -> str:
        return "dict_of_tensor"

    def run_weights_independent_tranformations(self, predict_module: nn.Module) -> nn.Module:
        return predict_module

    def run_weights_dependent_transformations(self, predict_module: nn.Module) -> nn.Module:
        return predict_module


def test_a_served_model_evaluates_without_gradients_and_has_the_state_of_its_model() -> None:
    model = nn.Sequential(nn.Dropout(0.9), nn.Linear(2, 1))
    served = _Served(model)
    found = served({"x": torch.ones(3, 2)})["score"]
    assert found.is_inference()
    assert torch.equal(found, model[1](torch.ones(3, 2)))
    assert not model.training
    assert list(served.state_dict()) == ["1.weight", "1.bias"]
    with pytest.raises(TypeError, match="abstract"):
        PredictModule(model)  # type: ignore[abstract]


def test_a_factory_describes_its_model_as_json() -> None:
    factory = _Factory()
    assert json.loads(factory.batching_metadata_json()) == {
        "x": {"type": "dense", "device": "cpu", "pinned": ["lengths"]}
    }
    assert (factory.qualname_metadata_json(), factory.model_inputs_data()) == ("{}", {})
    assert QualNameMetadata(True).need_preproc
    assert factory.create_predict_module()({"x": torch.ones(1, 2)})["score"].shape == (1, 1)
