"""`HashZchManagedCollisionModule`, with the name and arguments of TorchRec's zero-collision hash table."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import final

import torch

from tilerec.errors import ConfigError
from tilerec.modules.buckets import DEFAULT_BUCKETS, Buckets
from tilerec.modules.evict import HashZchEvictionConfig, HashZchEvictionPolicyName, read_eviction
from tilerec.modules.full_bucket import WhenFull, read_when_full
from tilerec.modules.id_map_settings import ANY_ID, IdMapSettings
from tilerec.modules.managed_collision import ManagedCollisionModule
from tilerec.spec.ignored_settings import warn_ignored_settings


@final
class HashZchManagedCollisionModule(ManagedCollisionModule):
    """An id map that hashes ids into buckets and assigns a row by probing within the bucket.

    Args:
        zch_size: rows; the table's `num_embeddings`. Must be a multiple of `total_num_buckets`.
        device: of the state; "meta" allocates nothing until the model is sharded.
        total_num_buckets: B. Ranks hold whole buckets, so at most B ranks can share the table. Use at least 64 rows per
            bucket: bucket occupancy varies, and some small buckets fill up long before the table does.
        max_probe: most slots that a lookup of one id reads.
        is_inference: the map never changes, even in training mode.
        eviction_policy_name, eviction_config: which row is evicted when a bucket is full; None disables eviction. Times
            to live are in hours, or in units of `clock`.
        start_bucket, end_bucket: hold only the buckets [start_bucket, end_bucket).
        percent_reserved_slots: percentage of each bucket's rows that ids without their own row share. At least one row
            is reserved, unless such ids are dropped.
        disable_fallback: drop ids without a row from their bags instead of sharing a row.
        read_only_suffix: ids of features whose names end with it are looked up, and never inserted.
        when_full: "evict" (the default with a policy; if no row can be evicted, as without a policy), "fallback" (the
            default without a policy: the id shares a row), or "reject" (the id is dropped).
        admission_threshold: an id gets a row at its k-th occurrence. A sketch per bucket counts occurrences; it may
            overestimate and never underestimates.
        clock: () -> int, for times to live. All ranks use rank 0's time in a step.
        input_hash_size, output_segments, tb_logging_frequency, inference_dispatch_div_train_world_size, track_id_freq,
            enable_per_feature_lookups, no_bag, persist_hash_zch_bucket: TorchRec's; no effect.
        name: TorchRec's; appears in messages only.
        opt_in_prob, write_runtime_meta_dim: TorchRec's; any value but the default raises.

    Raises:
        ConfigError: the rows do not fill the buckets equally, arguments contradict each other, or an argument is
            unsupported.
    """

    def __init__(
        self,
        zch_size: int,
        device: torch.device | str | None = None,
        total_num_buckets: int = DEFAULT_BUCKETS,
        max_probe: int = 128,
        input_hash_size: int = 0,
        output_segments: list[int] | None = None,
        is_inference: bool = False,
        name: str | None = None,
        tb_logging_frequency: int = 0,
        eviction_policy_name: HashZchEvictionPolicyName | str | None = None,
        eviction_config: HashZchEvictionConfig | None = None,
        inference_dispatch_div_train_world_size: bool = False,
        start_bucket: int = 0,
        end_bucket: int | None = None,
        opt_in_prob: int = -1,
        percent_reserved_slots: float = 0,
        disable_fallback: bool = False,
        track_id_freq: bool = False,
        read_only_suffix: str = "_readonly",
        enable_per_feature_lookups: bool = False,
        no_bag: bool = False,
        write_runtime_meta_dim: int = 0,
        persist_hash_zch_bucket: bool = True,
        *,
        when_full: WhenFull | None = None,
        admission_threshold: int = 1,
        clock: Callable[[], int] | None = None,
    ) -> None:
        who = f"HashZchManagedCollisionModule{f' {name!r}' if name else ''}"
        if opt_in_prob != -1:
            raise ConfigError(
                f"{who}: got opt_in_prob={opt_in_prob}; expected -1, because random admission would differ between "
                "ranks. Use admission_threshold=k instead: an id gets a row at its k-th occurrence."
            )
        if write_runtime_meta_dim:
            raise ConfigError(
                f"{who}: got write_runtime_meta_dim={write_runtime_meta_dim}; expected 0, because the map stores no "
                "metadata of the caller. Leave it out."
            )
        given: dict[str, object] = {
            "output_segments": output_segments,
            "input_hash_size": input_hash_size not in (0, ANY_ID),
            "tb_logging_frequency": tb_logging_frequency or None,
            "inference_dispatch_div_train_world_size": inference_dispatch_div_train_world_size,
            "track_id_freq": track_id_freq,
            "enable_per_feature_lookups": enable_per_feature_lookups,
            "no_bag": no_bag,
            "persist_hash_zch_bucket": not persist_hash_zch_bucket,
        }
        warn_ignored_settings(who, given, _WITHOUT_EFFECT, 2)
        evicting = read_eviction(eviction_policy_name, eviction_config, who)
        evicting, shares = read_when_full(who, when_full, evicting, disable_fallback)
        buckets = Buckets.of(
            who, zch_size, total_num_buckets, first=start_bucket, last=end_bucket, shares=shares,
            percent_shared=percent_reserved_slots,
        )  # fmt: skip
        if total_num_buckets >= 64 and buckets.size < 8:
            warnings.warn(
                f"{who}: got {total_num_buckets} buckets of {buckets.size} rows; buckets this small overflow long "
                "before the table is full. Use fewer buckets of at least 64 rows; one bucket per rank is enough.",
                stacklevel=2,
            )
        settings = IdMapSettings(
            evicting, shares, max_probe, threshold=admission_threshold, read_only_suffix=read_only_suffix
        )
        super().__init__(who, buckets, device, settings, read_only=is_inference, clock=clock)


_WITHOUT_EFFECT = {
    "output_segments": "rows are divided into equal buckets, independent of the ranks",
    "input_hash_size": "ids are any int64, and are hashed into buckets",
    "tb_logging_frequency": "stats() returns the counts at any time",
    "inference_dispatch_div_train_world_size": "buckets do not depend on the world size",
    "track_id_freq": "uses of every id are always counted; see inspect()",
    "enable_per_feature_lookups": "every feature is always looked up separately",
    "no_bag": "bags always stay bags",
    "persist_hash_zch_bucket": "a state always records its bucket layout",
}
