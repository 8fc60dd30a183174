"""What a plan says of a table's cache: how many of its rows have a line in device memory, and who goes first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, unique
from typing import Any

from tilerec.errors import ConfigError
from tilerec.spec.without_effect import warn_without_effect

DEFAULT_LOAD_FACTOR = 0.2


@unique
class CacheAlgorithm(Enum):
    """Which row leaves a full set."""

    LRU = "lru"  # the one that no batch has named for the longest time
    LFU = "lfu"  # the one that the fewest batches have named; a row that fewer still have named does not come in


_WITHOUT_EFFECT = {
    "precision": "lines have the table's own data type, so that no bit depends on the cache",
    "prefetch_pipeline": "module.prefetch() may be called, or not, with every cache",
    "stats": "the planner does not place tables in host memory by itself",
    "multipass_prefetch_config": "rows move in one pass",
}


@dataclass(frozen=True, init=False)
class CacheParams:
    """A table's cache.

    Args:
        algorithm: a `CacheAlgorithm`, or its value. None: LRU.
        load_factor: lines in device memory per row of the table, in (0, 1]. None: 0.2.
        reserved_memory: bytes of device memory to leave free: where the cache would not, it gets fewer lines. No
            effect where the cache lies in host memory.
        precision, prefetch_pipeline, stats, multipass_prefetch_config: TorchRec's; not kept, with a warning that says
            why.

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
        warn_without_effect("CacheParams", idle, _WITHOUT_EFFECT, 2)
        factor = DEFAULT_LOAD_FACTOR if load_factor is None else load_factor
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor <= 1:
            raise ConfigError(
                f"CacheParams: load_factor is {load_factor!r}, wanted lines per row of the table, more than 0 and at "
                "most 1. For host rows without a cache say compute_kernel 'fused_uvm'."
            )
        reserved = 0.0 if reserved_memory is None else reserved_memory
        if isinstance(reserved, bool) or not isinstance(reserved, (int, float)) or not reserved >= 0:
            raise ConfigError(f"CacheParams: reserved_memory is {reserved!r}, wanted bytes, from 0 up.")
        object.__setattr__(self, "algorithm", _algorithm(algorithm))
        object.__setattr__(self, "load_factor", float(factor))
        object.__setattr__(self, "reserved_memory", float(reserved))

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values; what is by default is left out."""
        out: dict[str, Any] = {"algorithm": self.algorithm.value, "load_factor": self.load_factor}
        if self.reserved_memory:
            out["reserved_memory"] = self.reserved_memory
        return out

    @staticmethod
    def from_json(data: Any) -> CacheParams:
        """The inverse of `to_json`."""
        known = {"algorithm", "load_factor", "reserved_memory"}
        if not isinstance(data, Mapping) or set(data) - known:
            raise ConfigError(
                f"cache_params is {data!r:.200}; wanted an object with some of {sorted(known)}."
            )
        return CacheParams(**data)


def _algorithm(given: Any) -> CacheAlgorithm:
    if given is None:
        return CacheAlgorithm.LRU
    # Another library's enum of these names is understood; its values may be numbers.
    for word in (given, getattr(given, "name", None), getattr(given, "value", None)):
        if isinstance(word, str) and word.lower() in ("lru", "lfu"):
            return CacheAlgorithm(word.lower())
    raise ConfigError(f"CacheParams: algorithm is {given!r}; use CacheAlgorithm.LRU or CacheAlgorithm.LFU.")
