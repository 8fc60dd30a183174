"""Cache settings of a table in a plan: cache lines in device memory per row, and the eviction policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, unique
from typing import Any

from tilerec.errors import ConfigError
from tilerec.spec.ignored_settings import warn_ignored_settings

DEFAULT_LOAD_FACTOR = 0.2


@unique
class CacheAlgorithm(Enum):
    """Policy that picks the row to evict from a full cache set."""

    LRU = "lru"  # evict the row that batches have not used for the longest time
    LFU = "lfu"  # evict the row that the fewest batches have used; a row used by still fewer is not admitted


_WITHOUT_EFFECT = {
    "precision": "cache lines have the table's data type, so results do not depend on the cache",
    "prefetch_pipeline": "module.prefetch() is optional with every cache",
    "stats": "the planner does not place tables in host memory by itself",
    "multipass_prefetch_config": "rows are prefetched in one pass",
}


@dataclass(frozen=True, init=False)
class CacheParams:
    """Cache settings of one table.

    Args:
        algorithm: a `CacheAlgorithm`, or its value. None: LRU.
        load_factor: cache lines in device memory per row of the table, in (0, 1]. None: 0.2.
        reserved_memory: bytes of device memory to keep free; the cache gets fewer lines if it would use them. No
            effect if the cache is in host memory.
        precision, prefetch_pipeline, stats, multipass_prefetch_config: TorchRec's; dropped, with a warning that gives
            the reason.

    Raises:
        ConfigError: a number outside its range, or an unknown algorithm.
    """

    algorithm: CacheAlgorithm
    load_factor: float
    reserved_memory: float

    def __init__(
        self, algorithm: CacheAlgorithm | str | None = None, load_factor: float | None = None,
        reserved_memory: float | None = None, precision: Any = None, prefetch_pipeline: bool | None = None,
        stats: Any = None, multipass_prefetch_config: Any = None,
    ) -> None:  # fmt: skip
        idle = {
            "precision": precision,
            "prefetch_pipeline": prefetch_pipeline,
            "stats": stats,
            "multipass_prefetch_config": multipass_prefetch_config,
        }
        warn_ignored_settings("CacheParams", idle, _WITHOUT_EFFECT, 2)
        factor = DEFAULT_LOAD_FACTOR if load_factor is None else load_factor
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor <= 1:
            raise ConfigError(
                f"CacheParams: got load_factor={load_factor!r}; expected cache lines per row of the table, above 0 and "
                "at most 1. For host rows without a cache pass compute_kernel='fused_uvm'."
            )
        reserved = 0.0 if reserved_memory is None else reserved_memory
        if isinstance(reserved, bool) or not isinstance(reserved, (int, float)) or not reserved >= 0:
            raise ConfigError(
                f"CacheParams: got reserved_memory={reserved!r}; expected a number of bytes from 0. Leave it out to "
                "reserve nothing."
            )
        object.__setattr__(self, "algorithm", _algorithm(algorithm))
        object.__setattr__(self, "load_factor", float(factor))
        object.__setattr__(self, "reserved_memory", float(reserved))

    def to_json(self) -> dict[str, Any]:
        """Return a dict of JSON values; a `reserved_memory` of 0 is omitted."""
        out: dict[str, Any] = {"algorithm": self.algorithm.value, "load_factor": self.load_factor}
        if self.reserved_memory:
            out["reserved_memory"] = self.reserved_memory
        return out

    @staticmethod
    def from_json(data: Any) -> CacheParams:
        """Build from a dict that `to_json` returned."""
        known = {"algorithm", "load_factor", "reserved_memory"}
        if not isinstance(data, Mapping) or set(data) - known:
            raise ConfigError(
                f"cache_params: got {data!r:.200}; expected an object with some of {sorted(known)}. Remove other keys."
            )
        return CacheParams(**data)


def _algorithm(given: Any) -> CacheAlgorithm:
    if given is None:
        return CacheAlgorithm.LRU
    # Accept another library's enum with these names; its values may be numbers.
    for word in (given, getattr(given, "name", None), getattr(given, "value", None)):
        if isinstance(word, str) and word.lower() in ("lru", "lfu"):
            return CacheAlgorithm(word.lower())
    raise ConfigError(
        f"CacheParams: got algorithm={given!r}; expected CacheAlgorithm.LRU or CacheAlgorithm.LFU. Pass one of them."
    )
