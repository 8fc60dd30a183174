"""`TritonPythonModel`: a package as a model of Triton Inference Server's Python backend.

The server imports the `model.py` of a model repository (triton_repository.py), which imports this class, and makes an
object of it in a process of its own for each instance. The processes map the weights of one file, so their pages are in
memory once.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGE = "model.pt2"
"""Name of the package in the folder of a version."""
THREADS = "threads"
"""Parameter of the model's config: threads of each instance."""


class TritonPythonModel:
    """A model of the Python backend: inputs and outputs are those of the package's manifest, by name."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the package. args: of the server, `model_repository`, `model_version` and `model_config` among them.

        Raises:
            FileError, ConfigError: the package cannot be loaded; the server then reports the model as unavailable.
        """
        import torch

        from tilerec.export.loading import load

        threads = json.loads(args["model_config"]).get("parameters", {}).get(THREADS, {}).get("string_value", "1")
        torch.set_num_threads(int(threads))
        # Only there while the server runs.
        self._server: Any = importlib.import_module("triton_python_backend_utils")
        self._package = load(Path(args["model_repository"]) / args["model_version"] / PACKAGE)
        self._inputs = self._package.manifest.signature.specs()
        self._outputs = self._package.manifest.outputs

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return a response per request. A request that does not fit gets an error and spoils no other."""
        return [self._response(request) for request in requests]

    def _response(self, request: Any) -> Any:
        import torch

        from tilerec.errors import InputError

        server = self._server
        try:
            tensors = []
            for spec in self._inputs:
                given = server.get_input_tensor_by_name(request, spec.name)
                if given is None:
                    raise InputError(f"Input '{spec.name}': got none; expected a tensor. Send all inputs.")
                tensor = torch.from_numpy(given.as_numpy())
                tensors.append(tensor if spec.shape else tensor.reshape(()))  # the server has no tensors without dims
            outputs = self._package.run(tensors)
        except InputError as error:
            return server.InferenceResponse(error=server.TritonError(str(error)))
        named = zip(self._outputs, outputs, strict=True)
        return server.InferenceResponse([server.Tensor(own.name, value.numpy()) for own, value in named])
