"""Managed collision: maps arbitrary int64 ids to rows of a table. Live ids never share a row.

Nouns
  id       any int64, including negative ones and -1
  bucket   `rows / buckets` neighbouring rows; an id never leaves its bucket, so its row does not depend on the world
  live     an id that has its own row
  missed   an id without its own row: not admitted yet, its bucket is full, or never seen (in evaluation). It reads a
           row that its bucket reserves for such ids (`shares`), or is dropped from its bag
  evicted  a row that a live id lost to another id
  step     a forward in training mode; rows that a step uses are not evicted in that step
  here     held by this rank

    training     found: a hit      not found: admitted -> empty slot -> evict by policy -> missed
    evaluation   found: its row    not found: missed                    and nothing changes

Rows are assigned sequentially: feature by feature in the order of the table's `feature_names`, and within a feature in
the order of the global batch. `ops/hash/definition.py` has the exact rules.

If the ids are on a GPU, the host never waits. Evicted rows are then an entry per id of the batch, -1 for none. Step and
time are device tensors, so a replayed CUDA graph keeps counting. If the ids are on the CPU, the host reads the results,
and evicted rows are a compact list.

Legend: N ids, E rows with own ids (places), B buckets held here, C admission counters, F features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.modules.buckets import Buckets
from tilerec.modules.evict import Admission
from tilerec.modules.evicted_rows import EvictedRows
from tilerec.modules.id_counts import KINDS, IdPlace, IdStats
from tilerec.modules.id_map import IdMap, Mapped, empty_id_state
from tilerec.modules.id_map_settings import IdMapSettings, hours, read_clock
from tilerec.modules.id_resize import Resized
from tilerec.modules.id_state import HASH_NAMES, BucketStateView, read_state
from tilerec.modules.remapped_bags import remapped_feature
from tilerec.ops.hash.definition import HashState, Policy
from tilerec.ops.runtime.fetch import host_readable
from tilerec.ops.runtime.upload import capturing
from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.torch_private import buffers


class ManagedCollisionModule(nn.Module):
    """Id map of one table (abstract; see `HashZchManagedCollisionModule` and `MCHManagedCollisionModule`).

    The state is ordered by bucket. Per row: `ids`, `used`, `since`, `last`, `hits` (and `expires`). Per bucket:
    `admission` and `counts`. Per table: `step`. A state dict has these names.
    """

    ids: Tensor
    counts: Tensor
    _reads_F2: Tensor
    _clock_2: Tensor

    def __init__(
        self, who: str, buckets: Buckets, device: torch.device | str | None, settings: IdMapSettings, *,
        read_only: bool = False, clock: Callable[[], int] | None = None, admission: Admission | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        settings.check(who)
        self._who = who
        self._buckets = buckets
        self.settings = settings
        self._read_only = read_only
        self._clock = clock or hours
        self._filter = admission
        self._features: tuple[str, ...] = ()
        self._view: BucketStateView | None = None
        self.evicted = EvictedRows()
        self.version = 0  # of the map: rows that were assigned before it was replaced are invalid
        # Always on the CPU. Valid only if the ids are on the CPU too; on a device `_clock_2` holds the step.
        self._step = torch.zeros((), dtype=torch.int64, device="cpu")
        self.become(buckets, empty_id_state(buckets, settings, device))
        self._put_counts(device)

    def _put_counts(self, device: torch.device | str | None) -> None:
        """Register zeroed counters, and the step and time, on the ids' device."""
        names = len(self._features)
        shapes = {
            "counts": (self._buckets.held, names * len(KINDS)),
            "_reads_F2": (names, 2),
            "_clock_2": (2,),
        }
        with torch.inference_mode(False):  # training adds to them, even if an evaluation runs first
            for name, shape in shapes.items():
                self.register_buffer(name, torch.zeros(shape, dtype=torch.int64, device=device), persistent=False)

    # ------------------------------------------------------------------------------------------------------ facts

    @property
    def device(self) -> torch.device:
        """Device of the state."""
        return self.ids.device

    @property
    def step(self) -> int:
        """Number of training steps so far. Reading it waits for the ids' device."""
        return int(self._step if self.host_looks or self.ids.is_meta else self._clock_2[0])

    @step.setter
    def step(self, step: int) -> None:
        self._step.fill_(step)
        self._clock_2[0].fill_(step)

    @property
    def host_looks(self) -> bool:
        """True if the host can read the state without waiting for a device, that is, if the ids are on the CPU."""
        return host_readable(self.ids)

    @property
    def id_map(self) -> IdMap:
        """The current tensors, buckets and settings; valid until the module moves or its buckets change."""
        own = buffers(self)
        state = HashState(*(own[name] for name in HASH_NAMES))  # type: ignore[arg-type]
        return IdMap(
            self._who, self.settings, self._buckets, self._features, state, self.counts, self._reads_F2,
            self.host_looks,
        )  # fmt: skip

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ManagedCollisionModule:
        step = self.step
        super()._apply(fn, recurse)
        self.step = step  # write the copy that the new device reads
        return self

    def output_size(self) -> int:
        """Return the number of rows of the table."""
        return self._buckets.rows

    def input_size(self) -> int:
        """Return the size argument of the user's `input_hash_func`; ids themselves may be any int64."""
        return self.settings.input_size

    def buckets(self) -> int:
        """Return the number of buckets of the table."""
        return self._buckets.count

    def open_slots(self) -> Tensor:
        """Return the number of rows held here that have no id yet, int64 [1]."""
        used_E = self.id_map.state.used_E
        return (used_E.numel() - used_E.sum()).view(1)

    def validate_state(self) -> None:
        """Check that a lookup would find every stored id.

        Raises:
            InputError: an id is in a wrong place: the state was written for other buckets, or is damaged.
        """
        self.id_map.check_places()

    # ------------------------------------------------------------------------------------------------------ mapping

    def bind(self, table: str, features: Sequence[str]) -> None:
        """Set the table's name and its features, in the order of row assignment. Later calls must repeat them."""
        if self._features:
            if self._features != tuple(features):
                raise ConfigError(
                    f"{self._who}: got features {list(features)}; expected {list(self._features)}, which the module "
                    "already maps. Give every table its own module."
                )
            return
        self._who = f"Table '{table}'"
        self._features = tuple(features)
        evicting = self.settings.evicting
        unknown = [name for name, _ in (evicting.ttl_of if evicting else ())]
        if unknown and sorted(unknown) != sorted(features):
            raise ConfigError(
                f"{self._who}: got per_feature_ttl of {unknown}; expected each of the features {list(features)} once."
            )
        step = self.step
        self._put_counts(self.device)
        self.step = step

    def now(self) -> int:
        """Return the clock's time, or 0 if nothing expires.

        Raises:
            ConfigError: the clock did not return an integer from -2**61 to 2**61.
        """
        if self.settings.policy is not Policy.TTL:
            return 0
        return read_clock(self._who, self._clock)

    @property
    def writes(self) -> bool:
        """True if the next batch may change the map."""
        return self.training and not self._read_only

    def reset_inference_mode(self) -> None:
        """Freeze the map, even in training mode. Call it on all ranks alike."""
        self._read_only = True

    def reset_training_mode(self) -> None:
        """Allow changes in training mode again."""
        self._read_only = False

    @torch.no_grad()
    def map(self, ids_N: Tensor, sizes: Sequence[int], now: int) -> Mapped:
        """Return the rows of a batch's ids; in training mode, assign rows to ids that have none.

        Args:
            ids_N: int64, concatenated in feature order; of buckets held here.
            sizes: number of ids of each feature.
            now: the clock's time.
        """
        own = self.id_map
        own.refuse_meta()
        if not self.writes:
            return own.read(ids_N, sizes)
        admitted_N = None if self._filter is None else self._filter(ids_N)
        return own.assign(ids_N, sizes, *self._count(now), admitted_N)

    def _count(self, now: int) -> tuple[int | Tensor, int | Tensor]:
        """Increment the step; return step and time, as device tensors if the ids are on a device, else as ints."""
        if self.host_looks:
            self._step += 1
            return int(self._step), now
        step, now_there = self._clock_2.unbind()
        step += 1
        if self.settings.policy is not Policy.TTL:
            return step, 0
        if not capturing():  # a captured graph reads the time that `tick` writes
            now_there.fill_(now)
        return step, now_there

    def tick(self) -> None:
        """Copy the current time to the device before a replay; a captured CUDA graph cannot read the host clock.

        No effect if nothing expires, or if the ids are on the CPU.
        """
        if not self.host_looks and self.settings.policy is Policy.TTL:
            self._clock_2[1].fill_(self.now())

    def forward(self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True) -> dict[str, JaggedTensor]:
        """Replace ids by rows; in training mode, assign rows to new ids. See `ManagedCollisionCollection.forward`.

        Args:
            features: all features of this table, in the same order in every call.
            mutate_miss_lengths: see `ManagedCollisionCollection.forward`.
        """
        return self._map_dict(features, mutate_miss_lengths, self.training)

    def remap(self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True) -> dict[str, JaggedTensor]:
        """Replace ids by rows as in evaluation mode; the map does not change."""
        return self._map_dict(features, mutate_miss_lengths, False)

    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Assign rows to ids, in training mode, and return the features unchanged."""
        self._map_dict(features, True, self.training)
        return features

    def preprocess(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Return the features with the user's `input_hash_func` applied to their ids."""
        if self.settings.input_hash is None:
            return features
        return {
            name: JaggedTensor(self.settings.hashed(self._who, part.values()), part.weights_or_none(), part.lengths())
            for name, part in features.items()
        }

    def _map_dict(self, features: dict[str, JaggedTensor], mutate: bool, training: bool) -> dict[str, JaggedTensor]:
        self.bind(self._who, list(features))
        self.id_map.check_lengths(mutate)
        before, self.training = self.training, training
        try:
            parts = [part.values().to(torch.int64) for part in features.values()]
            sizes = [part.numel() for part in parts]
            mapped = self.map(torch.cat(parts), sizes, self.now())
        finally:
            self.training = before
        self.keep_evicted(mapped.evicted_M)
        return {
            name: remapped_feature(part, rows, not self.settings.shares)
            for (name, part), rows in zip(features.items(), mapped.rows_N.split(sizes), strict=True)
        }

    def keep_evicted(self, rows_M: Tensor) -> None:
        """Store evicted rows (-1: none) for the next `evict`."""
        self.evicted.keep(rows_M, self._buckets.rows, compact=self.host_looks)

    def evict(self) -> Tensor | None:
        """Return the rows evicted since the last call (int64 [M]), or None if there are none. Waits for their device.

        They still hold the old ids' weights. Reset them and their optimizer state before the next read, as
        `ManagedCollisionEmbeddingBagCollection` does.
        """
        rows_M = self.evicted.take()
        if rows_M is None or self.host_looks:
            return rows_M
        rows_M = rows_M[rows_M >= 0]
        return rows_M if rows_M.numel() else None

    # -------------------------------------------------------------------------------------------------- statistics

    def stats(self) -> IdStats:
        """Return the counts of the buckets held here."""
        own = self.id_map
        return own.stats_of([own.summary()])

    @torch.no_grad()
    def inspect(self, feature: str, id_: int) -> IdPlace:
        """Return an id's row, insertion step, last use, and place in the order of eviction. Read-only."""
        return self.id_map.place_of(feature, id_, self.step, self.now)

    # ---------------------------------------------------------------------------------------------------- capacity

    @torch.no_grad()
    def resize(self, zch_size: int | None = None, total_num_buckets: int | None = None) -> Resized:
        """Change the number of rows, or of buckets, and keep the ids.

        Args:
            zch_size: the new number of rows; None keeps the rows per bucket.
            total_num_buckets: the new number of buckets, a multiple of the current number (each bucket splits) or a
                divisor of it (buckets merge). None keeps it.

        Ids that no longer fit (fewer rows, or a full probe window) are dropped in the policy's order of eviction. They
        count as evictions of the table's first feature. This method moves only ids; to move the table's rows with them,
        call `ManagedCollisionEmbeddingBagCollection.resize`.

        Raises:
            ConfigError: the rows do not fill the buckets equally, or neither bucket count divides the other. The map is
                then unchanged.
        """
        made = self.id_map.resize(zch_size, total_num_buckets, self.step)
        state = dict(zip(HASH_NAMES, made.state, strict=True))
        self.become(made.buckets, {**state, "counts": made.counts_BC})
        return made.moved

    def reset_parameters(self) -> None:
        """Clear all ids and counts."""
        for name in (*HASH_NAMES, "counts", "_reads_F2", "_clock_2"):
            tensor = getattr(self, name)
            if not tensor.is_meta:
                tensor.zero_()
        self._step.zero_()
        self.version += 1

    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: Sequence[int] | None = None,
        device: torch.device | None = None,
    ) -> ManagedCollisionModule:
        """Return an empty module of the same settings that holds only the buckets of these rows.

        Raises:
            ConfigError: the range splits a bucket.
        """
        twin, where = copy.deepcopy(self), device or self.device
        cut = self._buckets.cut_of_rows(self._who, output_id_range)
        twin.become(cut, empty_id_state(cut, twin.settings, where))
        twin._put_counts(where)
        twin.reset_parameters()
        return twin

    def become(self, buckets: Buckets, parts: Mapping[str, Tensor], view: BucketStateView | None = None) -> None:
        """Replace the buckets held here and their state by `buckets` and `parts`, without a copy."""
        for name, tensor in parts.items():
            self.register_buffer(name, tensor, persistent=False)
        self._buckets, self._view = buckets, view
        self.version += 1

    def hold(self, first: int, last: int, view: BucketStateView | None, device: torch.device | str | None) -> None:
        """Keep only the buckets `[first, last)`; other ranks hold the rest.

        Args:
            view: how the state of all buckets appears in a state dict; None if they are all held here.
            device: for a module on meta, whose buckets start empty.
        """
        new, step = self._buckets.cut(first, last), self.step
        if self.ids.is_meta:
            self.become(new, empty_id_state(new, self.settings, device or "cpu"), view)
            self._put_counts(device or "cpu")
            self.step = step
        else:
            self.become(new, self.id_map.copied_parts(first, last), view)

    # ------------------------------------------------------------------------------------------------------- state

    def numbers(self) -> dict[str, Tensor]:
        """Return the per-table state of a checkpoint: the step, and the bucket layout, which a load compares."""
        own = self._buckets
        cut = torch.tensor([own.count, own.size, own.shared, self.settings.max_probe], device="cpu")
        if not self.host_looks:
            self._step.fill_(self.step)
        return {"step": self._step, "geometry": cut}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, (tensor, per_bucket) in self.id_map.state_tensors().items():
            destination[prefix + name] = tensor if self._view is None else self._view.show(tensor, per_bucket)
        for name, number in self.numbers().items():
            destination[prefix + name] = number

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Load the table's whole state; if a tensor is missing or does not match, report it and load nothing."""
        wanted = self.id_map.state_tensors()
        names = [*wanted, *self.numbers()]
        found = read_state(state_dict, prefix, names, strict, missing_keys, unexpected_keys)
        if found is None:
            return
        refused = self.id_map.mismatch_error(found, self._view)
        if refused is not None:
            error_msgs.append(f"{prefix.removesuffix('.')}: {refused}")
            return
        for name, (tensor, per_bucket) in wanted.items():
            if self._view is None:
                tensor.copy_(found[name])
            else:
                self._view.take(tensor, per_bucket, found[name])
        self.step = int(found["step"])
        self.version += 1
        self.evicted.clear()

    def described(self) -> dict[str, Any]:
        """Return the settings that must be equal on all ranks, as plain values."""
        own = self._buckets
        return {
            "rows": own.rows,
            "buckets": own.count,
            "shared": own.shared,
            **self.settings.described(),
            "read only": [self._read_only, self.settings.read_only_suffix],
            "on meta": self.ids.is_meta,
        }

    def extra_repr(self) -> str:
        own = self._buckets
        here = "" if own.held == own.count else f", here: [{own.first}, {own.last})"
        policy = "no eviction" if self.settings.policy is None else self.settings.policy.name
        missed = "share a row" if self.settings.shares else "are dropped"
        return f"{own.rows} rows, {own.count} buckets{here}, {policy}, ids without a row {missed}"
