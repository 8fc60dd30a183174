"""`KeyValueParams`: where the rows of a table lie that is larger than host memory, kernel `key_value`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from tilerec.errors import ConfigError
from tilerec.spec.ignored_settings import warn_ignored_settings

_STORE = "rows are in plain files, not in a store with settings of its own"
_WITHOUT_EFFECT = {
    "ssd_rocksdb_write_buffer_size": _STORE,
    "ssd_rocksdb_shards": _STORE,
    "gather_ssd_cache_stats": "caches always keep statistics: module.cache_stats()",
    "stats_reporter_config": "caches always keep statistics: module.cache_stats()",
    "use_passed_in_path": "files are in the folder that is given",
    "l2_cache_size": "the system's page cache takes the memory that is free",
    "max_l1_cache_size": "cache_params= sets the number of cache lines",
    "enable_async_update": "rows that leave the cache are written at once",
    "bulk_init_chunk_size": "initial rows are written in blocks of 32 MiB",
    "lazy_bulk_init_enabled": "initial rows are written when the table is made",
}


@dataclass(frozen=True, init=False)
class KeyValueParams:
    """Folder of a table whose rows and optimizer's state are in files, behind a cache.

    Args:
        ssd_storage_directory: an existing folder on a local disk. Each rank makes its files there, without names: they
            end with the process.
        others: further settings of TorchRec's class; dropped, with a warning that gives the reason.

    Raises:
        ConfigError: no folder, or an unknown setting.
    """

    ssd_storage_directory: str

    def __init__(self, ssd_storage_directory: str | PathLike[str] | None = None, **others: Any) -> None:
        unknown = sorted(set(others) - set(_WITHOUT_EFFECT))
        if unknown:
            raise ConfigError(
                f"KeyValueParams: got {', '.join(unknown)}; expected ssd_storage_directory. Leave out the others."
            )
        warn_ignored_settings("KeyValueParams", others, _WITHOUT_EFFECT, 2)
        folder = ssd_storage_directory
        if not isinstance(folder, (str, PathLike)) or not str(fspath(folder)):
            raise ConfigError(
                f"KeyValueParams: got ssd_storage_directory={folder!r:.200}; expected a folder on a local disk. Name "
                "one."
            )
        object.__setattr__(self, "ssd_storage_directory", str(fspath(folder)))

    def to_json(self) -> dict[str, Any]:
        """Return a dict of JSON values."""
        return {"ssd_storage_directory": self.ssd_storage_directory}

    @staticmethod
    def of(given: Any) -> KeyValueParams:
        """Read a `KeyValueParams`, a dict of its fields, or another library's record with a folder."""
        if isinstance(given, KeyValueParams):
            return given
        if isinstance(given, Mapping):
            return KeyValueParams(**{str(name): value for name, value in given.items()})
        if not hasattr(given, "ssd_storage_directory"):
            raise ConfigError(
                f"key_value_params: got {given!r:.200}; expected a KeyValueParams, or a dict of its fields. Pass "
                "one of them."
            )
        return KeyValueParams(given.ssd_storage_directory)
