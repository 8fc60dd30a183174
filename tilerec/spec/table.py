"""What a user says about a table.

Nouns
  table    `num_embeddings` rows by `embedding_dim` columns of one data type, under a name
  feature  a column of the input batch whose ids are row numbers of one table; several features may share a table
  pooling  how the rows of one bag become one vector: sum, mean, or none (sequence)

Configs are frozen: sharding, planning and training never write into them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum, unique
from typing import Any, TypeVar

import torch

from tilerec.errors import ConfigError
from tilerec.spec.without_effect import warn_without_effect


@unique
class PoolingType(Enum):
    """How a bag's rows are combined."""

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


@unique
class DataType(Enum):
    """Element type of a table. The integer types are for serving; training takes the floating ones.

    FP8 is e4m3fn without scales: 3 bits of fraction, from 2⁻⁹ to 448. Smaller numbers round to zero, so give tables of
    many rows a `weight_init_max`; rows that are updated are rounded at random.
    """

    FP64 = "FP64"
    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"
    FP8 = "FP8"
    INT64 = "INT64"
    INT32 = "INT32"
    INT8 = "INT8"
    UINT8 = "UINT8"


_TORCH_DTYPES: dict[DataType, torch.dtype] = {
    DataType.FP64: torch.float64,
    DataType.FP32: torch.float32,
    DataType.FP16: torch.float16,
    DataType.BF16: torch.bfloat16,
    DataType.FP8: torch.float8_e4m3fn,
    DataType.INT64: torch.int64,
    DataType.INT32: torch.int32,
    DataType.INT8: torch.int8,
    DataType.UINT8: torch.uint8,
}
_DATA_TYPES = {dtype: data_type for data_type, dtype in _TORCH_DTYPES.items()}


def data_type_to_dtype(data_type: DataType) -> torch.dtype:
    """`DataType.BF16` -> `torch.bfloat16`."""
    return _TORCH_DTYPES[data_type]


def dtype_to_data_type(dtype: torch.dtype) -> DataType:
    """`torch.bfloat16` -> `DataType.BF16`."""
    if dtype not in _DATA_TYPES:
        raise ConfigError(f"dtype {dtype} has no DataType; use one of {[str(d) for d in _DATA_TYPES]}.")
    return _DATA_TYPES[dtype]


def pooling_type_to_str(pooling: PoolingType) -> str:
    """`PoolingType.MEAN` -> `"mean"`, the word `torch.nn.EmbeddingBag` uses."""
    return pooling.value.lower()


_WITHOUT_EFFECT = {
    "num_embeddings_post_pruning": "it sizes a pruned table for serving; num_embeddings rows are trained",
    "need_pos": "weights by position are PositionWeightedModule's, in a FeatureProcessedEmbeddingBagCollection",
    "input_dim": "ids are row numbers below num_embeddings; nothing maps them from a larger space",
    "total_num_buckets": "say in the plan that rows come in buckets: row_wise(num_buckets=...)",
    "virtual_table_eviction_policy": "every row of a table exists, and none is evicted",
    "enable_embedding_update": "it is of serving; training writes rows in the backward pass",
    "stash_weights": "tables stay in the memory of their device",
}
"""Arguments of TorchRec's configs, and why they say nothing here."""

_MOST = (1 << 60) - 1
"""Numbers of a table, at most: their bytes, up to 8 each, are counted in 63 bits."""

_TRAINABLE = (DataType.FP64, DataType.FP32, DataType.FP16, DataType.BF16, DataType.FP8)
_E = TypeVar("_E", bound=Enum)


def _enum(kind: type[_E], value: object, what: str) -> _E:
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value.upper() in kind.__members__:
        return kind[value.upper()]
    raise ConfigError(f"{what} got {value!r}, wanted {kind.__name__} or one of {list(kind.__members__)}.")


def _data_type(value: object, what: str) -> DataType:
    return dtype_to_data_type(value) if isinstance(value, torch.dtype) else _enum(DataType, value, what)


@dataclass(frozen=True)
class _TableConfig:
    """Fields that pooled and sequence tables share; see `EmbeddingBagConfig` for their meaning."""

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: DataType | torch.dtype | str = DataType.FP32
    feature_names: Sequence[str] = ()
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    init_fn: Callable[..., Any] | None = field(default=None, kw_only=True)
    # An argument only: `data_type` is the field, and `dtype` reads it (see below).
    dtype: InitVar[DataType | torch.dtype | str | None] = field(default=None, kw_only=True)
    # TorchRec's, and arguments only: what they ask for is not here, as `_WITHOUT_EFFECT` says.
    num_embeddings_post_pruning: InitVar[int | None] = field(default=None, kw_only=True)
    need_pos: InitVar[bool] = field(default=False, kw_only=True)
    input_dim: InitVar[int | None] = field(default=None, kw_only=True)
    total_num_buckets: InitVar[int | None] = field(default=None, kw_only=True)
    use_virtual_table: InitVar[bool] = field(default=False, kw_only=True)
    virtual_table_eviction_policy: InitVar[Any] = field(default=None, kw_only=True)
    enable_embedding_update: InitVar[bool] = field(default=False, kw_only=True)
    stash_weights: InitVar[bool] = field(default=False, kw_only=True)

    def __post_init__(
        self,
        dtype: DataType | torch.dtype | str | None,
        num_embeddings_post_pruning: int | None,
        need_pos: bool,
        input_dim: int | None,
        total_num_buckets: int | None,
        use_virtual_table: bool,
        virtual_table_eviction_policy: Any,
        enable_embedding_update: bool,
        stash_weights: bool,
    ) -> None:
        what = f"Table '{self.name}'"
        if use_virtual_table:
            raise ConfigError(
                f"{what}: use_virtual_table=True asks for rows that come to be when an id is first seen; here all "
                f"{self.num_embeddings} rows have memory from the start. Leave it out, set num_embeddings to the rows "
                "there is memory for, and map ids to [0, num_embeddings) in the input."
            )
        for field_name in ("num_embeddings", "embedding_dim"):
            value = getattr(self, field_name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"{what}: {field_name} is {value!r}; it must be a whole number of at least 1."
                )
        if self.num_embeddings * self.embedding_dim > _MOST:
            raise ConfigError(
                f"{what}: got num_embeddings={self.num_embeddings} rows of {self.embedding_dim}; expected at most "
                f"{_MOST} numbers in all, which 64 bits address. Map ids into fewer rows."
            )
        data_type = _data_type(self.data_type, f"{what}: data_type")
        if dtype is not None:
            if data_type not in (DataType.FP32, _data_type(dtype, f"{what}: dtype")):
                raise ConfigError(
                    f"{what}: data_type={self.data_type} and dtype={dtype} differ; give one of them."
                )
            data_type = _data_type(dtype, f"{what}: dtype")
        if data_type not in _TRAINABLE:
            raise ConfigError(
                f"{what}: data_type {data_type.value} cannot be trained; use FP32, BF16, FP16, FP8 or FP64."
            )
        if isinstance(self.feature_names, str):
            raise ConfigError(
                f"{what}: feature_names is the string {self.feature_names!r}; pass a list of names."
            )
        names = tuple(self.feature_names) or ((self.name,) if self.name else ())
        if len(set(names)) != len(names):
            raise ConfigError(f"{what}: feature_names {list(names)} repeats a feature; name each once.")
        low, high = self.weight_init_min, self.weight_init_max
        if low is not None and high is not None and not low <= high:
            raise ConfigError(f"{what}: weight_init_min {low} is above weight_init_max {high}; swap them.")
        if self.init_fn is not None and (low is not None or high is not None):
            raise ConfigError(f"{what}: both init_fn and initial bounds are given; keep one of them.")
        object.__setattr__(self, "data_type", data_type)
        object.__setattr__(self, "feature_names", names)
        # Sizes that are the table's own ask for nothing.
        pruned = None if num_embeddings_post_pruning == self.num_embeddings else num_embeddings_post_pruning
        given = {
            "num_embeddings_post_pruning": pruned,
            "need_pos": need_pos,
            "input_dim": None if input_dim == self.num_embeddings else input_dim,
            "total_num_buckets": total_num_buckets,
            "virtual_table_eviction_policy": virtual_table_eviction_policy,
            "enable_embedding_update": enable_embedding_update,
            "stash_weights": stash_weights,
        }
        # __post_init__, the generated __init__, and of pooled tables a __post_init__ more.
        warn_without_effect(what, given, _WITHOUT_EFFECT, 3 + isinstance(self, EmbeddingBagConfig))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The element type as torch names it."""
        assert isinstance(self.data_type, DataType)
        return data_type_to_dtype(self.data_type)

    def get_weight_init_max(self) -> float:
        """Upper bound of the uniform initial values; `sqrt(1 / num_embeddings)` unless given."""
        return math.sqrt(1 / self.num_embeddings) if self.weight_init_max is None else self.weight_init_max

    def get_weight_init_min(self) -> float:
        """Lower bound of the uniform initial values; `-sqrt(1 / num_embeddings)` unless given."""
        return -math.sqrt(1 / self.num_embeddings) if self.weight_init_min is None else self.weight_init_min

    def num_features(self) -> int:
        """How many features read this table."""
        return len(self.feature_names)


_TableConfig.dtype = property(lambda self: self.torch_dtype, doc="The element type as torch names it.")  # type: ignore


@dataclass(frozen=True)
class EmbeddingConfig(_TableConfig):
    """A table whose rows are returned one by one (`EmbeddingCollection`).

    Args:
        num_embeddings: rows; ids of its features lie in `[0, num_embeddings)`.
        embedding_dim: columns; any number from 1 up.
        name: of the table; parameters are `embeddings.<name>.weight`.
        data_type: `DataType`, `torch.dtype` or the string ("BF16"); `dtype=` is the same field under torch's word.
        feature_names: features that read the table; the table's own name if none is given.
        weight_init_max, weight_init_min: bounds of the uniform initial values, `±sqrt(1/num_embeddings)`
            unless given.
        init_fn: called as `init_fn(rows)` (or `init_fn(rows, row_offset=…)` where it takes one) on full-width
            blocks of rows, 2^20 at most, which it fills in place (they are zero before) or returns, instead of the
            uniform values. What it draws from torch's default generators does not depend on plan, ranks or order: they
            are seeded for each block by the collection's seed, the table's name and the block, and are afterwards as
            they were. What it draws elsewhere (numpy, a `torch.Generator` of its own) is its own affair: on tables
            that are cut from `meta`, ranks then hold different numbers.
        num_embeddings_post_pruning, need_pos, input_dim, total_num_buckets, virtual_table_eviction_policy,
            enable_embedding_update, stash_weights: of TorchRec's configs; not kept, with a warning that says why.
        use_virtual_table: not here: refused unless False.

    Raises:
        ConfigError: a size below 1, a type that cannot be trained, repeated features, contradictory bounds, a virtual
            table.
    """


@dataclass(frozen=True)
class EmbeddingBagConfig(_TableConfig):
    """A table whose rows are pooled per bag (`EmbeddingBagCollection`); `EmbeddingConfig` plus `pooling`.

    Args:
        pooling: `PoolingType.SUM` (default) or `MEAN`; the string is accepted too. A mean divides the
            (weighted) sum by the number of ids in the bag.
    """

    pooling: PoolingType | str = field(default=PoolingType.SUM, kw_only=True)

    def __post_init__(self, *arguments: Any) -> None:
        super().__post_init__(*arguments)
        pooling = _enum(PoolingType, self.pooling, f"Table '{self.name}': pooling")
        if pooling is PoolingType.NONE:
            raise ConfigError(
                f"Table '{self.name}': pooling NONE returns rows one by one; use EmbeddingConfig for that."
            )
        object.__setattr__(self, "pooling", pooling)


AnyTableConfig = EmbeddingBagConfig | EmbeddingConfig
