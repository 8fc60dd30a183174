"""TorchRec's bases of served models: `PredictModule` and `PredictFactory`. `tilerec serve` needs neither."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class BatchingMetadata:
    """How a server joins an input of several requests.

    Args:
        type: kind of the input, such as "dense" or "sparse".
        device: "cpu" or "cuda".
        pinned: suffixes of the tensors to copy to pinned memory; "" is the tensor itself.
    """

    type: str
    device: str
    pinned: list[str]


@dataclass
class QualNameMetadata:
    """Whether a method of a served model needs its inputs preprocessed."""

    need_preproc: bool


class PredictModule(nn.Module, ABC):
    """A model in evaluation mode with inputs and outputs by name. Subclasses define `predict_forward`.

    Args:
        module: the model; `predict_module` returns it.
        device: of the inputs. None: the current GPU if there is one, else the CPU.
    """

    def __init__(self, module: nn.Module, device: str | None = None) -> None:
        super().__init__()
        self._module = module.eval()
        self._device = None if device is None else torch.device(device)

    @property
    def predict_module(self) -> nn.Module:
        """The model."""
        return self._module

    @abstractmethod
    def predict_forward(self, batch: dict[str, Tensor]) -> Any:
        """Return the model's outputs for a batch of tensors by name."""

    def forward(self, batch: dict[str, Tensor]) -> Any:
        """Return `predict_forward` of the batch, in inference mode."""
        if self._device is None:
            gpu = torch.cuda.is_available()
            self._device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        with torch.inference_mode():
            return self.predict_forward(batch)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the model, without a prefix for this module."""
        return self._module.state_dict(*args, **kwargs)


class PredictFactory(ABC):
    """Makes a served model and describes it for a server."""

    @abstractmethod
    def create_predict_module(self) -> nn.Module:
        """Return the model with its weights."""

    @abstractmethod
    def batching_metadata(self) -> dict[str, BatchingMetadata]:
        """Return how inputs are joined, by name."""

    @abstractmethod
    def result_metadata(self) -> str:
        """Return the kind of the result."""

    @abstractmethod
    def run_weights_independent_tranformations(self, predict_module: nn.Module) -> nn.Module:
        """Return the model after changes that do not read its weights. The spelling is TorchRec's."""

    @abstractmethod
    def run_weights_dependent_transformations(self, predict_module: nn.Module) -> nn.Module:
        """Return the model after changes that read its weights."""

    def qualname_metadata(self) -> dict[str, QualNameMetadata]:
        """Return metadata of methods, by name."""
        return {}

    def model_inputs_data(self) -> dict[str, Any]:
        """Return data for inputs of a benchmark."""
        return {}

    def batching_metadata_json(self) -> str:
        """Return `batching_metadata` as JSON."""
        return _as_json(self.batching_metadata())

    def qualname_metadata_json(self) -> str:
        """Return `qualname_metadata` as JSON."""
        return _as_json(self.qualname_metadata())


def _as_json(entries: dict[str, Any]) -> str:
    return json.dumps({name: asdict(entry) for name, entry in entries.items()})
