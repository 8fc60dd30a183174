"""TorchRec's interfaces of embedding modules, and small functions about modules and dictionaries of tensors."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.quantized.embedding import QuantEmbeddingCollection
from tilerec.quantized.embedding_bag import QuantEmbeddingBagCollection
from tilerec.sharding.embedding import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.sparse.keyed_tensor import KeyedTensor
from tilerec.spec.table import AnyTableConfig

T = TypeVar("T")


class EmbeddingBagCollectionInterface(nn.Module, metaclass=ABCMeta):
    """Base of modules with the methods of an `EmbeddingBagCollection`; tilerec's collections count as instances."""

    @abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return pooled embeddings."""

    @abstractmethod
    def embedding_bag_configs(self) -> Sequence[Any]:
        """Return the configs of the tables."""

    @abstractmethod
    def is_weighted(self) -> bool:
        """Return whether ids have weights."""


class EmbeddingCollectionInterface(nn.Module, metaclass=ABCMeta):
    """Base of modules with the methods of an `EmbeddingCollection`; tilerec's collections count as instances."""

    @abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> dict[str, Any]:
        """Return the embeddings of each id."""

    @abstractmethod
    def embedding_configs(self) -> Sequence[Any]:
        """Return the configs of the tables."""

    @abstractmethod
    def embedding_dim(self) -> int:
        """Return the number of columns."""

    @abstractmethod
    def embedding_names_by_table(self) -> list[list[str]]:
        """Return the names of the outputs of each table."""


for _pooled in (EmbeddingBagCollection, ShardedEmbeddingBagCollection, QuantEmbeddingBagCollection):
    EmbeddingBagCollectionInterface.register(_pooled)
for _unpooled in (EmbeddingCollection, ShardedEmbeddingCollection, QuantEmbeddingCollection):
    EmbeddingCollectionInterface.register(_unpooled)


def get_embedding_names_by_table(tables: Sequence[AnyTableConfig]) -> list[list[str]]:
    """Return the output names of each table: the feature, or `feature@table` if several tables read the feature."""
    readers = Counter(feature for table in tables for feature in table.feature_names)
    return [
        [feature if readers[feature] == 1 else f"{feature}@{table.name}" for feature in table.feature_names]
        for table in tables
    ]


def maybe_td_to_kjt(features: Any, keys: Sequence[str] | None = None) -> KeyedJaggedTensor:
    """Return a batch as it is, or a dictionary of features (such as a `TensorDict`) as a batch.

    Args:
        features: a batch; or key -> nested tensor of bags, `JaggedTensor`, or a matrix of one bag per row.
        keys: the keys to take, in order; None: all.
    """
    if isinstance(features, KeyedJaggedTensor):
        return features
    names = list(features.keys()) if keys is None else list(keys)
    values, lengths = [], []
    for name in names:
        own = features[name]
        if isinstance(own, Tensor) and own.is_nested:
            values.append(own.values())
            lengths.append(own.offsets().diff())  # type: ignore[attr-defined]
        elif isinstance(own, Tensor) and own.dim() == 2:
            values.append(own.reshape(-1))
            lengths.append(torch.full((len(own),), own.shape[1], device=own.device))
        elif hasattr(own, "lengths"):
            values.append(own.values())
            lengths.append(own.lengths())
        else:
            raise ConfigError(
                f"maybe_td_to_kjt: {name}: got a {type(own).__name__}; expected a nested tensor, a JaggedTensor or a "
                "matrix of ids. Convert it."
            )
    return KeyedJaggedTensor.from_lengths_sync(names, torch.cat(values), torch.cat(lengths))


def regroup_kts(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[Tensor]:
    """Return the columns of each group of keys, concatenated; see `KeyedTensor.regroup`."""
    return KeyedTensor.regroup(keyed_tensors, groups)


def none_throws(optional: T | None, message: str = "got None; expected a value") -> T:
    """Return the value; raise an AssertionError for None."""
    if optional is None:
        raise AssertionError(message)
    return optional


def append_prefix(prefix: str, name: str) -> str:
    """Return `prefix.name`, or the name if the prefix is empty."""
    return f"{prefix}.{name}" if prefix else name


def filter_state_dict(state_dict: Mapping[str, Any], name: str) -> OrderedDict[str, Any]:
    """Return the items below a path, without it."""
    start = f"{name}."
    return OrderedDict((key[len(start) :], value) for key, value in state_dict.items() if key.startswith(start))


def add_prefix_to_state_dict(state_dict: dict[str, Any], prefix: str) -> None:
    """Rename all keys, in place."""
    for key in list(state_dict):
        state_dict[prefix + key] = state_dict.pop(key)


def prod(iterable: Iterable[int]) -> int:
    """Return the product."""
    out = 1
    for number in iterable:
        out *= number
    return out


def bytes_to_gb(num_bytes: int) -> float:
    """Return GiB."""
    return float(num_bytes / 2**30)


def bytes_to_mb(num_bytes: float) -> float:
    """Return MiB."""
    return float(num_bytes / 2**20)


def gb_to_bytes(gb: float) -> int:
    """Return bytes of GiB."""
    return int(gb * 2**30)


def sharder_name(t: type) -> str:
    """Return the name of a type of modules, with its module."""
    return f"{t.__module__}.{t.__name__}"


def placement(compute_device: str, rank: int, local_size: int) -> str:
    """Return `rank:9/cuda:1`: a rank and its device on a host of `local_size` ranks."""
    return f"rank:{rank}/" + ("cpu" if compute_device == "cpu" else f"{compute_device}:{rank % local_size}")
