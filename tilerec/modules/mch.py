"""`MCHManagedCollisionModule`, with the name and arguments of TorchRec's managed collision hash."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.modules.buckets import DEFAULT_BUCKETS, Buckets, divisor_near
from tilerec.modules.evict import MCHEvictionPolicy
from tilerec.modules.full_bucket import WhenFull, read_when_full
from tilerec.modules.id_map_settings import ANY_ID, IdMapSettings
from tilerec.modules.managed_collision import ManagedCollisionModule
from tilerec.spec.ignored_settings import warn_ignored_settings


@final
class MCHManagedCollisionModule(ManagedCollisionModule):
    """An id map that assigns rows to ids, and evicts by a policy when a bucket is full.

    Args:
        zch_size: rows; the table's `num_embeddings`. One row of each bucket is shared by ids without their own.
        device: see `HashZchManagedCollisionModule`.
        eviction_policy: `LFU_EvictionPolicy()`, `LRU_EvictionPolicy()` or `DistanceLFU_EvictionPolicy()`.
        eviction_interval: number of training steps between evictions. In the other steps, new ids of full buckets
            share a row. Empty rows are assigned in every step.
        input_hash_func, input_hash_size: ids are replaced by `input_hash_func(ids, input_hash_size)` first.
        buckets: number of buckets. None takes the largest divisor of `zch_size`, at most 768, that leaves at least 64
            rows per bucket. Ranks hold whole buckets: if many ranks share the table, give a multiple of 768 rows.
        max_probe, when_full, admission_threshold: see `HashZchManagedCollisionModule`.
        output_segments, name: TorchRec's; `output_segments` has no effect and `name` appears in messages only.
        mch_size, mch_hash_func, output_global_offset: TorchRec's; any value but the default raises.

    Raises:
        ConfigError: the rows do not fill the buckets equally, arguments contradict each other, or an argument is
            unsupported.
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
                f"{who}: got a {type(eviction_policy).__name__} as eviction_policy; expected LFU_EvictionPolicy(), "
                "LRU_EvictionPolicy() or DistanceLFU_EvictionPolicy()."
            )
        if mch_size or mch_hash_func is not None:
            raise ConfigError(
                f"{who}: mch_size and mch_hash_func are not supported: each bucket keeps its own rows for ids without "
                "a row. Leave both out, or use HashZchManagedCollisionModule with percent_reserved_slots."
            )
        if output_global_offset:
            raise ConfigError(
                f"{who}: got output_global_offset={output_global_offset}; expected 0. Rows of a table begin at 0 on "
                "every rank, so leave it out."
            )
        reason = "rows are divided into equal buckets, independent of the ranks"
        warn_ignored_settings(who, {"output_segments": output_segments}, {"output_segments": reason}, 2)
        evicting, shares = read_when_full(who, when_full, eviction_policy.evicting, False, always=True)
        if buckets is None and isinstance(zch_size, int) and zch_size > 0:
            buckets = divisor_near(zch_size, DEFAULT_BUCKETS, 64)
        settings = IdMapSettings(
            evicting, shares, max_probe, eviction_interval, admission_threshold, input_hash=input_hash_func,
            input_size=input_hash_size,
        )  # fmt: skip
        own = Buckets.of(who, zch_size, buckets or 1, shares=shares)
        super().__init__(who, own, device, settings, admission=eviction_policy.admission(eviction_interval))
