"""`triton_python_backend_utils` as far as models use it: Triton Inference Server has it while it runs a model."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class StubTensor:
    name: str
    array: Any

    def as_numpy(self) -> Any:
        return self.array


@dataclass
class StubError:
    text: str


@dataclass
class StubResponse:
    output_tensors: Sequence[StubTensor] = field(default_factory=list)
    error: StubError | None = None


def triton_utils() -> types.ModuleType:
    module: Any = types.ModuleType("triton_python_backend_utils")
    module.Tensor, module.TritonError, module.InferenceResponse = StubTensor, StubError, StubResponse
    module.get_input_tensor_by_name = lambda request, name: request.get(name)
    return module  # type: ignore[no-any-return]


def request(arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, StubTensor]:
    return {name: StubTensor(name, array) for name, array in arrays.items()}
