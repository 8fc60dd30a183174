"""TorchRec's quantized collections: tilerec's, made from a module with an attribute `qconfig`."""

from __future__ import annotations

from typing import Any, cast

import torch

from tilerec.errors import ConfigError
from tilerec.quantized import embedding, embedding_bag


def _types(module: Any) -> tuple[list[Any], torch.dtype]:
    """Return the type of each table's rows, and that of the results."""
    config = getattr(module, "qconfig", None)
    if config is None:
        raise ConfigError(
            f"from_float: got a {type(module).__name__} without qconfig; expected a QuantConfig. Set module.qconfig, "
            "or use tilerec.quantized."
        )
    weight, activation = (_dtype(getattr(config, name)) for name in ("weight", "activation"))
    own = getattr(config, "per_table_weight_dtype", None) or {}
    tables = getattr(module, "embedding_bag_configs", None) or module.embedding_configs
    return [own.get(table.name, weight) for table in tables()], activation


def _dtype(observer: Any) -> torch.dtype:
    dtype = getattr(observer, "dtype", None)
    found: Any = observer().dtype if dtype is None and callable(observer) else dtype
    return cast(torch.dtype, found)


class _SeesNative(type):
    """Metaclass of a class whose instances are those of the native class that it extends."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.__mro__[1])


class EmbeddingBagCollection(embedding_bag.QuantEmbeddingBagCollection, metaclass=_SeesNative):
    """`tilerec.quantized.QuantEmbeddingBagCollection` whose `from_float` reads `module.qconfig`."""

    @classmethod
    def from_float(  # type: ignore[override]
        cls, module: Any, use_precomputed_fake_quant: bool = False
    ) -> embedding_bag.QuantEmbeddingBagCollection:
        """Quantize the tables of a float collection, which stays as it is."""
        types, output = _types(module)
        return embedding_bag.QuantEmbeddingBagCollection.from_float(module, types, output_dtype=output)


class EmbeddingCollection(embedding.QuantEmbeddingCollection, metaclass=_SeesNative):
    """`tilerec.quantized.QuantEmbeddingCollection` whose `from_float` reads `module.qconfig`."""

    @classmethod
    def from_float(  # type: ignore[override]
        cls, module: Any, use_precomputed_fake_quant: bool = False
    ) -> embedding.QuantEmbeddingCollection:
        """Quantize the tables of a float collection, which stays as it is."""
        types, output = _types(module)
        return embedding.QuantEmbeddingCollection.from_float(module, types, output_dtype=output)
