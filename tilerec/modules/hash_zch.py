"""`HashZchManagedCollisionModule`: TorchRec's zero-collision hash table, by name and arguments."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import final

import torch

from tilerec.errors import ConfigError
from tilerec.modules.buckets import DEFAULT_BUCKETS, Buckets
from tilerec.modules.evict import HashZchEvictionConfig, HashZchEvictionPolicyName, read_eviction
from tilerec.modules.managed_collision import ANY_ID, ManagedCollisionModule
from tilerec.modules.when_full import WhenFull, read_when_full
from tilerec.spec.without_effect import warn_without_effect


@final
class HashZchManagedCollisionModule(ManagedCollisionModule):
    """Ids get rows by hashing into buckets and probing there.

    Args:
        zch_size: rows; the table's `num_embeddings`. A whole number per bucket.
        device: of the state; "meta" allocates nothing until the model is sharded.
        total_num_buckets: B; ranks hold whole buckets, so up to B ranks can share the table. Give a bucket 64 rows or
            more: the number of ids in it varies, and of small ones some are full long before the table is.
        max_probe: slots that are looked at for an id, at most.
        is_inference: never change, in training mode either.
        eviction_policy_name, eviction_config: who goes when a bucket is full; None: nobody. Times to live are in hours,
            or in units of `clock`.
        start_bucket, end_bucket: hold these only.
        percent_reserved_slots: of each bucket's rows, shared by its ids that have none (at least one row is, unless
            such ids are dropped).
        disable_fallback: ids without a row are dropped from their bags, and share none.
        read_only_suffix: features whose names end so are looked up and never inserted.
        when_full: "evict" (the default with a policy; where nobody may go, as the next), "fallback" (the default
            without: the id shares a row), or "reject" (it is dropped).
        admission_threshold: an id gets a row when it comes for the k-th time (counted by a sketch per bucket, which
            may count too much and never too little).
        clock: () -> int, for times to live; the same on all ranks at a step is rank 0's.
        input_hash_size, output_segments, name, tb_logging_frequency, inference_dispatch_div_train_world_size,
            track_id_freq, enable_per_feature_lookups, no_bag, persist_hash_zch_bucket: of TorchRec; without effect.
        opt_in_prob, write_runtime_meta_dim: of TorchRec; refused unless left at their defaults.

    Raises:
        ConfigError: rows that do not fill the buckets, arguments that contradict each other or that are refused.
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
                f"{who}: opt_in_prob={opt_in_prob} admits ids by chance, which would differ from rank to rank; leave "
                "it out and use admission_threshold=k: an id gets a row when it comes for the k-th time."
            )
        if write_runtime_meta_dim:
            raise ConfigError(
                f"{who}: write_runtime_meta_dim={write_runtime_meta_dim} stores data of the caller beside the ids, "
                "which is not kept here; leave it out."
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
        warn_without_effect(who, given, _WITHOUT_EFFECT, 2)
        evicting = read_eviction(eviction_policy_name, eviction_config, who)
        evicting, shares = read_when_full(who, when_full, evicting, disable_fallback)
        buckets = Buckets.of(
            who, zch_size, total_num_buckets, first=start_bucket, last=end_bucket, shares=shares,
            percent_shared=percent_reserved_slots,
        )  # fmt: skip
        if total_num_buckets >= 64 and buckets.size < 8:
            warnings.warn(
                f"{who}: {total_num_buckets} buckets of {buckets.size} rows: so small ones overflow long before the "
                "table is full. Use fewer buckets (as many as there may be ranks are enough), of 64 rows or more.",
                stacklevel=2,
            )
        super().__init__(
            who, buckets, device, evicting=evicting, shares=shares, max_probe=max_probe,
            threshold=admission_threshold, read_only=is_inference, read_only_suffix=read_only_suffix, clock=clock,
        )  # fmt: skip


_WITHOUT_EFFECT = {
    "output_segments": "rows are cut into equal buckets, whatever the ranks",
    "input_hash_size": "ids are any int64, and are hashed into buckets",
    "tb_logging_frequency": "stats() tells, whenever asked",
    "inference_dispatch_div_train_world_size": "buckets do not depend on the world size",
    "track_id_freq": "uses of every id are always counted; see inspect()",
    "enable_per_feature_lookups": "every feature is looked up on its own already",
    "no_bag": "bags come and go as bags",
    "persist_hash_zch_bucket": "a state always says how its rows are cut",
}
