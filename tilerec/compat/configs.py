"""TorchRec's table configs: tilerec's, with fields that a program may change before it builds a module."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from torch import dtype as torch_dtype

from tilerec.spec import table as native
from tilerec.spec.table import DataType, PoolingType

DATA_TYPE_NUM_BITS = {kind: int("".join(filter(str.isdigit, kind.value))) for kind in DataType}
"""Bits of an element."""


class FeatureNames(tuple[str, ...]):
    """Names of features: equal to a list of the same names, and added to lists."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, (list, tuple)) else NotImplemented

    def __add__(self, other: Any) -> Any:
        return [*self, *other]

    def __radd__(self, other: Any) -> Any:
        return [*other, *self]

    __hash__ = tuple.__hash__


class _Changeable:
    """Fields that can be set. A new value is checked together with the other fields."""

    def __setattr__(self, name: str, value: Any) -> None:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        if name not in fields:
            object.__setattr__(self, name, value)
            return
        checked = type(self)(**{**fields, name: value})
        object.__setattr__(self, name, getattr(checked, name))

    def __post_init__(self, *arguments: Any) -> None:
        super().__post_init__(*arguments)  # type: ignore[misc]
        object.__setattr__(self, "feature_names", FeatureNames(self.feature_names))  # type: ignore[attr-defined]


class EmbeddingBagConfig(_Changeable, native.EmbeddingBagConfig):
    """`tilerec.EmbeddingBagConfig` with fields that can be set until a module is built from it."""


class EmbeddingConfig(_Changeable, native.EmbeddingConfig):
    """`tilerec.EmbeddingConfig` with fields that can be set until a module is built from it."""


def pooling_type_to_str(pooling_type: PoolingType) -> str:
    """Convert `PoolingType.MEAN` to `"mean"`."""
    return native.pooling_type_to_str(pooling_type)


class QuantConfig(NamedTuple):
    """Types of quantized modules, as an attribute `qconfig` of the module to convert.

    Attributes:
        activation, weight: observers of torch (`PlaceholderObserver.with_args(dtype=...)`), or objects with a `dtype`.
        per_table_weight_dtype: dtype of single tables, by name.
    """

    activation: Any
    weight: Any
    per_table_weight_dtype: dict[str, torch_dtype] | None = None
