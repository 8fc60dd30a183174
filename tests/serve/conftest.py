"""A small model behind the interface of a package, without its compiler: a compilation takes half a minute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tilerec.errors import ConfigError
from tilerec.export import Package
from tilerec.export.exporting import PreparedExport, prepared
from tilerec.export.whole_model import whole_model
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig

KEYS = ("user", "item")
GOOD = b"a package"


class Small(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tables = EmbeddingBagCollection([EmbeddingBagConfig(20, 4, key, feature_names=[key]) for key in KEYS])
        self.over = nn.Linear(8 + 3, 1)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.over(torch.cat([dense, self.tables(sparse).values()], 1))
        return logits[:, 0]


def batch(lengths: list[list[int]], ids: list[int]) -> tuple[Tensor, KeyedJaggedTensor]:
    samples = len(lengths[0])
    dense = torch.arange(3.0 * samples).view(samples, 3)
    flat = torch.tensor([length for row in lengths for length in row], dtype=torch.int32)
    return dense, KeyedJaggedTensor.from_lengths_sync(list(KEYS), torch.tensor(ids, dtype=torch.int64), flat)


class Runner:
    """Runs the program of a package that was not compiled, on the package's weights."""

    def __init__(self, model: nn.Module, out_spec: str) -> None:
        self._model, self._out_spec = model, out_spec

    def get_call_spec(self) -> list[str]:
        return ["", self._out_spec]

    def boxed_run(self, tensors: list[Tensor]) -> list[Tensor]:
        return [self._model(*tensors)]


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
    _, spec = pytree.tree_flatten(torch.zeros(1))

    def open_it(path: Path) -> Package:
        if path.read_bytes() != GOOD:
            raise ConfigError(f"Package {path}: got other bytes; expected a package.")
        module: Any = made.program.module()
        weights = {name: value.detach() for name, value in module.state_dict().items()}
        return Package(made.manifest, weights, Runner(module, pytree.treespec_dumps(spec)))

    return open_it


@pytest.fixture
def served_path(tmp_path: Path) -> Path:
    """A file that a test may replace."""
    path = tmp_path / "model.pt2"
    path.write_bytes(GOOD)
    return path
