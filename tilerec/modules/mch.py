"""`MCHManagedCollisionModule`: TorchRec's managed collision hash, by name and arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.modules.buckets import DEFAULT_BUCKETS, Buckets, divisor_near
from tilerec.modules.evict import MCHEvictionPolicy
from tilerec.modules.managed_collision import ANY_ID, ManagedCollisionModule
from tilerec.modules.when_full import WhenFull, read_when_full
from tilerec.spec.without_effect import warn_without_effect


@final
class MCHManagedCollisionModule(ManagedCollisionModule):
    """Ids get rows; when a bucket is full, an eviction policy decides.

    Args:
        zch_size: rows; the table's `num_embeddings`. One row of each bucket is shared by ids that have none.
        device: see `HashZchManagedCollisionModule`.
        eviction_policy: `LFU_EvictionPolicy()`, `LRU_EvictionPolicy()` or `DistanceLFU_EvictionPolicy()`.
        eviction_interval: evictions happen in every so-many-th training step; in the others, new ids of full
            buckets share a row. Empty rows are taken at once, always.
        input_hash_func, input_hash_size: ids become `input_hash_func(ids, input_hash_size)` first.
        buckets: how many; None takes the most that divide `zch_size`, up to 768, and leave each at least 64 rows. Ranks
            hold whole buckets, so give a `zch_size` that is a multiple of 768 where many share the table.
        max_probe, when_full, admission_threshold: see `HashZchManagedCollisionModule`.
        output_segments, name: of TorchRec; without effect.
        mch_size, mch_hash_func, output_global_offset: of TorchRec; refused unless left at their defaults.

    Raises:
        ConfigError: rows that do not fill the buckets, arguments that contradict each other or that are refused.
    """

    def __init__(
        self,
        zch_size: int,
        device: torch.device | str | None,
        eviction_policy: MCHEvictionPolicy,
        eviction_interval: int,
        input_hash_size: int = ANY_ID,
        input_hash_func: Callable[[Tensor, int], Tensor] | None = None,
        mch_size: int | None = None,
        mch_hash_func: Callable[[Tensor, int], Tensor] | None = None,
        name: str | None = None,
        output_global_offset: int = 0,
        output_segments: list[int] | None = None,
        buckets: int | None = None,
        *,
        max_probe: int = 128,
        when_full: WhenFull | None = None,
        admission_threshold: int = 1,
    ) -> None:
        who = f"MCHManagedCollisionModule{f' {name!r}' if name else ''}"
        if not isinstance(eviction_policy, MCHEvictionPolicy):
            raise ConfigError(
                f"{who}: eviction_policy is a {type(eviction_policy).__name__}; wanted LFU_EvictionPolicy(), "
                "LRU_EvictionPolicy() or DistanceLFU_EvictionPolicy()."
            )
        if mch_size or mch_hash_func is not None:
            raise ConfigError(
                f"{who}: mch_size and mch_hash_func give ids without a row a hashed part of the table, and here each "
                "bucket keeps rows for them; leave both out, or use HashZchManagedCollisionModule with "
                "percent_reserved_slots."
            )
        if output_global_offset:
            raise ConfigError(
                f"{who}: output_global_offset={output_global_offset}; a table's rows begin at 0 on every rank, so "
                "leave it out."
            )
        reason = "rows are cut into equal buckets, whatever the ranks"
        warn_without_effect(who, {"output_segments": output_segments}, {"output_segments": reason}, 2)
        evicting, shares = read_when_full(who, when_full, eviction_policy.evicting, False, always=True)
        if buckets is None and isinstance(zch_size, int) and zch_size > 0:
            buckets = divisor_near(zch_size, DEFAULT_BUCKETS, 64)
        super().__init__(
            who, Buckets.of(who, zch_size, buckets or 1, shares=shares), device, evicting=evicting, shares=shares,
            max_probe=max_probe, interval=eviction_interval, threshold=admission_threshold,
            input_hash=input_hash_func, input_size=input_hash_size,
        )  # fmt: skip
