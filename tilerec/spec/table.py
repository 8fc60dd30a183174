"""Table configs: the size, name, data type, features and initial values of an embedding table.

Nouns
  table    `num_embeddings` rows by `embedding_dim` columns of one data type, under a name
  feature  a column of the input batch whose ids are row numbers of one table; several features may share a table
  pooling  reduction of the rows of one bag to one vector: sum, mean, or none (sequence)

Configs are frozen: sharding, planning and training never modify them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum, unique
from typing import Any, TypeVar

import torch

from tilerec.errors import ConfigError
from tilerec.spec.ignored_settings import warn_ignored_settings


@unique
class PoolingType(Enum):
    """Reduction of a bag's rows."""

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


@unique
class DataType(Enum):
    """Element type of a table. The integer types are for serving; training supports the floating types only.

    FP8 is e4m3fn without scales: 3 bits of fraction, from 2⁻⁹ to 448. Smaller numbers round to zero, so set
    `weight_init_max` for tables with many rows. Updated rows are rounded at random.
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
    INT4 = "INT4"
    INT2 = "INT2"


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
    # torch's names for packed rows of codes; no tensor has these dtypes here.
    DataType.INT4: torch.quint4x2,
    DataType.INT2: torch.quint2x4,
}
_DATA_TYPES = {dtype: data_type for data_type, dtype in _TORCH_DTYPES.items()}


def data_type_to_dtype(data_type: DataType) -> torch.dtype:
    """Convert `DataType.BF16` to `torch.bfloat16`."""
    return _TORCH_DTYPES[data_type]


def dtype_to_data_type(dtype: torch.dtype) -> DataType:
    """Convert `torch.bfloat16` to `DataType.BF16`."""
    if dtype not in _DATA_TYPES:
        raise ConfigError(
            f"dtype: got {dtype}, which has no DataType; expected one of {[str(d) for d in _DATA_TYPES]}. Use one of "
            "these."
        )
    return _DATA_TYPES[dtype]


def pooling_type_to_str(pooling: PoolingType) -> str:
    """Convert `PoolingType.MEAN` to `"mean"`, the name in `torch.nn.EmbeddingBag`."""
    return pooling.value.lower()


_WITHOUT_EFFECT = {
    "num_embeddings_post_pruning": "it is the size of a pruned table for serving; num_embeddings rows are trained",
    "need_pos": "for weights by position use PositionWeightedModule in a FeatureProcessedEmbeddingBagCollection",
    "input_dim": "ids are row numbers below num_embeddings; nothing maps them from a larger space",
    "total_num_buckets": "set buckets of rows in the plan: row_wise(num_buckets=...)",
    "virtual_table_eviction_policy": "every row of a table exists, and none is evicted",
    "enable_embedding_update": "it is for serving; training writes rows in the backward pass",
    "stash_weights": "tables stay in the memory of their device",
}
"""Arguments of TorchRec's configs that have no effect here -> the reason."""

_MAX_ELEMENTS = (1 << 60) - 1
"""Most elements of a table: their bytes, up to 8 each, must be below 2^63."""

_TRAINABLE = (DataType.FP64, DataType.FP32, DataType.FP16, DataType.BF16, DataType.FP8)
_E = TypeVar("_E", bound=Enum)


def _enum(kind: type[_E], value: object, what: str) -> _E:
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value.upper() in kind.__members__:
        return kind[value.upper()]
    raise ConfigError(
        f"{what}: got {value!r}; expected a {kind.__name__} or one of {list(kind.__members__)}. Use one of these."
    )


def _data_type(value: object, what: str) -> DataType:
    return dtype_to_data_type(value) if isinstance(value, torch.dtype) else _enum(DataType, value, what)


@dataclass(frozen=True)
class _TableConfig:
    """Fields shared by pooled and sequence tables; `EmbeddingConfig` documents them."""

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: DataType | torch.dtype | str = DataType.FP32
    feature_names: Sequence[str] = ()
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    init_fn: Callable[..., Any] | None = field(default=None, kw_only=True)
    # A constructor argument only: `data_type` is the field, and the property `dtype` below returns its torch dtype.
    dtype: InitVar[DataType | torch.dtype | str | None] = field(default=None, kw_only=True)
    # TorchRec's, constructor arguments only: `_WITHOUT_EFFECT` gives the reason why each has no effect.
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
                f"{what}: got use_virtual_table=True; expected False, as all {self.num_embeddings} rows have memory "
                "from the start. Leave it out, set num_embeddings to the number of rows that fit in memory, and map "
                "ids to [0, num_embeddings) in the input."
            )
        for field_name in ("num_embeddings", "embedding_dim"):
            value = getattr(self, field_name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"{what}: got {field_name}={value!r}; expected a whole number of at least 1. Pass one."
                )
        if self.num_embeddings * self.embedding_dim > _MAX_ELEMENTS:
            raise ConfigError(
                f"{what}: got num_embeddings={self.num_embeddings} rows of {self.embedding_dim}; expected at most "
                f"{_MAX_ELEMENTS} elements in all, which 64 bits can address. Map ids to fewer rows."
            )
        data_type = _data_type(self.data_type, f"{what}: data_type")
        if dtype is not None:
            if data_type not in (DataType.FP32, _data_type(dtype, f"{what}: dtype")):
                raise ConfigError(
                    f"{what}: got data_type={self.data_type} and dtype={dtype}; expected the same type. Give one of "
                    "them."
                )
            data_type = _data_type(dtype, f"{what}: dtype")
        if data_type not in _TRAINABLE:
            raise ConfigError(
                f"{what}: got data_type {data_type.value}; expected a type that can be trained. Use FP32, BF16, FP16, "
                "FP8 or FP64."
            )
        if isinstance(self.feature_names, str):
            raise ConfigError(
                f"{what}: got feature_names={self.feature_names!r}, a string; expected a list of names. Write "
                f"[{self.feature_names!r}]."
            )
        names = tuple(self.feature_names) or ((self.name,) if self.name else ())
        if len(set(names)) != len(names):
            raise ConfigError(f"{what}: got feature_names={list(names)}; expected each feature once. Remove repeats.")
        low, high = self.weight_init_min, self.weight_init_max
        if low is not None and high is not None and not low <= high:
            raise ConfigError(
                f"{what}: got weight_init_min={low} above weight_init_max={high}; expected at most the maximum. Swap "
                "them."
            )
        if self.init_fn is not None and (low is not None or high is not None):
            raise ConfigError(
                f"{what}: got both init_fn and weight_init_min or weight_init_max; expected one of them. Leave one out."
            )
        object.__setattr__(self, "data_type", data_type)
        object.__setattr__(self, "feature_names", names)
        # A size equal to num_embeddings needs no warning.
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
        # Stack depth: __post_init__, the generated __init__, and for pooled tables one more __post_init__.
        warn_ignored_settings(what, given, _WITHOUT_EFFECT, 3 + isinstance(self, EmbeddingBagConfig))

    @property
    def torch_dtype(self) -> torch.dtype:
        """Element type as a torch dtype."""
        assert isinstance(self.data_type, DataType)
        return data_type_to_dtype(self.data_type)

    def get_weight_init_max(self) -> float:
        """Return the upper bound of the uniform initial values; `sqrt(1 / num_embeddings)` by default."""
        return math.sqrt(1 / self.num_embeddings) if self.weight_init_max is None else self.weight_init_max

    def get_weight_init_min(self) -> float:
        """Return the lower bound of the uniform initial values; `-sqrt(1 / num_embeddings)` by default."""
        return -math.sqrt(1 / self.num_embeddings) if self.weight_init_min is None else self.weight_init_min

    def num_features(self) -> int:
        """Return the number of features that look up this table."""
        return len(self.feature_names)


_TableConfig.dtype = property(lambda self: self.torch_dtype, doc="Element type as a torch dtype.")  # type: ignore


@dataclass(frozen=True)
class EmbeddingConfig(_TableConfig):
    """Config of a table whose rows are returned one by one (`EmbeddingCollection`).

    Args:
        num_embeddings: number of rows; ids of its features are in `[0, num_embeddings)`.
        embedding_dim: number of columns, at least 1.
        name: name of the table; its parameter is `embeddings.<name>.weight`.
        data_type: `DataType`, `torch.dtype` or the string ("BF16"); `dtype=` is another name of this argument.
        feature_names: features that look up the table; the table's own name by default.
        weight_init_max, weight_init_min: bounds of the uniform initial values, `±sqrt(1/num_embeddings)`
            by default.
        init_fn: makes the initial values, instead of the uniform ones. Called as `init_fn(rows)`, or as
            `init_fn(rows, row_offset=…)` if it has that parameter, with a zeroed full-width block of at most 2^20
            rows. It fills the block in place, or returns one.
            Numbers from torch's default generators do not depend on plan, ranks or order: the generators are seeded
            for each block from the collection's seed, the table's name and the block, and restored afterwards. Numbers
            from other sources (numpy, an own `torch.Generator`) are not controlled: for tables sharded from `meta`,
            ranks then hold different numbers.
        num_embeddings_post_pruning, need_pos, input_dim, total_num_buckets, virtual_table_eviction_policy,
            enable_embedding_update, stash_weights: TorchRec's; dropped, with a warning that gives the reason.
        use_virtual_table: not supported; must be False.

    Raises:
        ConfigError: a size below 1, a type that cannot be trained, repeated features, contradictory bounds, a virtual
            table.
    """


@dataclass(frozen=True)
class EmbeddingBagConfig(_TableConfig):
    """Config of a table whose rows are pooled per bag (`EmbeddingBagCollection`): `EmbeddingConfig` plus `pooling`.

    Args:
        pooling: `PoolingType.SUM` (default), `MEAN`, or the string. A mean is the (weighted) sum divided by the number
            of ids in the bag.
    """

    pooling: PoolingType | str = field(default=PoolingType.SUM, kw_only=True)

    def __post_init__(self, *arguments: Any) -> None:
        super().__post_init__(*arguments)
        pooling = _enum(PoolingType, self.pooling, f"Table '{self.name}': pooling")
        if pooling is PoolingType.NONE:
            raise ConfigError(
                f"Table '{self.name}': got pooling NONE; expected SUM or MEAN. Use EmbeddingConfig to return rows one "
                "by one."
            )
        object.__setattr__(self, "pooling", pooling)


AnyTableConfig = EmbeddingBagConfig | EmbeddingConfig
