"""A small model behind the interface of a package, without its compiler; and compiled, once in a test process."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.export.array_package import ArrayPackage as Package
from tilerec.export.arrays import Array, check_array
from tilerec.export.exporting import PreparedExport, prepared
from tilerec.export.manifest import Manifest, base_hash
from tilerec.export.package_writing import weight_places, write_package
from tilerec.export.whole_model import whole_model
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.serve.package_source import FileWatch
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.torch_private import compile_package

KEYS = ("user", "item")
GOOD = b"a package"
INSTANCES = [
    {"dense": [0.0, 1.0, 2.0], "sparse": {"user": [1], "item": [4]}},
    {"dense": [3.0, 4.0, 5.0], "sparse": {"user": [2, 3]}},
    {"dense": [6.0, 7.0, 8.0], "sparse": {"item": [5], "user": []}},
]
LENGTHS, IDS = [[1, 2, 0], [1, 0, 1]], [1, 2, 3, 4, 5]


class Small(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tables = EmbeddingBagCollection([EmbeddingBagConfig(20, 4, key, feature_names=[key]) for key in KEYS])
        self.over = nn.Linear(8 + 3, 1)
        self.temperature = nn.Parameter(torch.full((1,), 0.1 * seed))

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.over(torch.cat([dense, self.tables(sparse).values()], 1))
        return logits[:, 0] * self.temperature.exp()


def batch(lengths: list[list[int]], ids: list[int]) -> tuple[Tensor, KeyedJaggedTensor]:
    samples = len(lengths[0])
    dense = torch.arange(3.0 * samples).view(samples, 3)
    flat = torch.tensor([length for row in lengths for length in row], dtype=torch.int32)
    return dense, KeyedJaggedTensor.from_lengths_sync(list(KEYS), torch.tensor(ids, dtype=torch.int64), flat)


class StandInPackage:
    """Runs the program of a package that was not compiled, on the package's weights."""

    def __init__(self, manifest: Manifest, model: nn.Module) -> None:
        self.manifest = manifest
        self._tensors = {name: value.detach().clone() for name, value in model.state_dict().items()}
        self._model = model
        self.weights = {name: tensor.numpy() for name, tensor in self._tensors.items()}

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        sizes: dict[str, int] = {}
        for spec, array in zip(self.manifest.signature.specs(), arrays, strict=True):
            check_array(spec, array, sizes)
        tensors = tuple(torch.tensor(array) for array in arrays)
        with torch.no_grad():
            return [torch.func.functional_call(self._model, self._tensors, tensors).numpy()]


@pytest.fixture(scope="session")
def small() -> Small:
    return Small().eval()


@pytest.fixture(scope="session")
def made(small: Small) -> PreparedExport:
    whole = whole_model(small)
    assert whole is not None
    return prepared(whole, batch([[1, 2, 0], [1, 0, 1]], [1, 2, 3, 4, 5]))


@pytest.fixture(scope="session")
def opened(made: PreparedExport) -> Callable[[Path], Package]:
    """Loads a file with the bytes `GOOD`."""

    def open_it(path: Path) -> Package:
        if path.read_bytes() != GOOD:
            raise ConfigError(f"Package {path}: got other bytes; expected a package.")
        return cast(Package, StandInPackage(made.manifest, made.program.module()))

    return open_it


class StandInSource:
    """The versions of a file that `opened` loads, as `FileSource` has them of a package."""

    def __init__(self, path: Path, opened: Callable[[Path], Package]) -> None:
        self.name = str(path)
        self._path, self._opened = path, opened
        self._watch: FileWatch | None = None

    def take(self) -> Package | None:
        if self._watch is None:
            self._watch = FileWatch(self._path)
        elif not self._watch.changed():
            return None
        return self._opened(self._path)


@pytest.fixture
def served_path(tmp_path: Path) -> Path:
    """A file that a test may replace."""
    path = tmp_path / "model.pt2"
    path.write_bytes(GOOD)
    return path


def package_bytes(made: PreparedExport, compiled: Path, weights: dict[str, Tensor] | None = None) -> bytes:
    """Return a package with the program of `made`, and its weights or others."""
    weights = made.weights if weights is None else weights
    places = weight_places(weights)
    file = io.BytesIO()
    write_package(file, compiled, replace(made.manifest, base=base_hash(places), weights=tuple(places)), weights)
    return file.getvalue()


@pytest.fixture(scope="session")
def compiled(made: PreparedExport, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program's compiled part. The compiler works for ten seconds, so all tests of a process share it."""
    path = tmp_path_factory.mktemp("compiled") / "model.pt2"
    compile_package(made.program, str(path))
    return path
