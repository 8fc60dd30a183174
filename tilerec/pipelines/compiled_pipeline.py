"""`TrainPipelinePT2`: TorchRec's pipeline for compiled models.

steps 0 … k - 1    eager
step k             the model is compiled; batch i + 1 is copied to the device while step i runs
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from tilerec.parallel.compiled_model import compile_model
from tilerec.pipelines.train_pipelines import TrainPipeline


@dataclass(frozen=True)
class TorchCompileConfig:
    """Arguments of `torch.compile`, and the step that compiles.

    Attributes:
        fullgraph: raise at a graph break.
        dynamic: None: one graph for all batch sizes; False: a graph for each size.
        backend: name of a backend, or the backend.
        compile_on_iter: number of eager steps before the model is compiled. All ranks have the same.
    """

    fullgraph: bool = False
    dynamic: bool | None = None
    backend: Any = "inductor"
    compile_on_iter: int = 3


@final
class TrainPipelinePT2(TrainPipeline):
    """Pipeline that compiles the model, and copies batch i + 1 to the device while step i runs.

    Args:
        model, optimizer, device: see `TrainPipeline`.
        input_transformer: called with each batch on the device, before its forward; the model gets its result.
        pre_compile_fn: called with the model once, before it is compiled.
        compile_configs: None: the model stays eager.
        options: see `TrainPipeline`.
    """

    _depth = 2
    _route_ahead = False

    def __init__(
        self, model: nn.Module, optimizer: Any, device: torch.device | str,
        input_transformer: Callable[[Any], Any] | None = None,
        pre_compile_fn: Callable[[nn.Module], Any] | None = None,
        compile_configs: TorchCompileConfig | None = TorchCompileConfig(),
        **options: Any,
    ) -> None:  # fmt: skip
        self._transform, self._before, self._configs = input_transformer, pre_compile_fn, compile_configs
        self._steps = 0
        self._compiled: Callable[[Any], Any] | None = None
        super().__init__(model, optimizer, device, self._run, **options)

    def _run(self, batch: Any) -> tuple[Tensor, Any]:
        batch = batch if self._transform is None else self._transform(batch)
        configs = self._configs
        if self._compiled is None and configs is not None and self._steps >= configs.compile_on_iter:
            if self._before is not None:
                self._before(self._model)
            dynamic = True if configs.dynamic is None else configs.dynamic
            self._compiled = compile_model(
                self._model, fullgraph=configs.fullgraph, dynamic=dynamic, backend=configs.backend
            )
        self._steps += 1
        result: tuple[Tensor, Any] = (self._model if self._compiled is None else self._compiled)(batch)
        return result

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Use `model` from now on, or the same model again; another model is compiled at its own step."""
        if model is not None and model is not self._model:
            self._compiled, self._steps = None, 0
        super().attach(model, sparse_dist)
