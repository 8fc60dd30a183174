"""`IdClamp`: clamps ids into their tables. A feature that reads tables of several sizes has several clamped forms."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, get_args

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.modules.feature_reads import FeatureRead
from tilerec.ops.runtime.upload import constants, upload
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import AnyTableConfig

OnBadId = Literal["error", "clamp"]


class IdClamp:
    """Sizes of the tables that each feature reads.

    Args:
        kind: class of the collection, for errors.
        on_bad_id: "error": ids stay as they are, in one form.

    Attributes:
        forms: per read, the index of its table's size among its feature's sizes; ids are clamped to that size.
    """

    def __init__(
        self, kind: str, on_bad_id: OnBadId, configs: Sequence[AnyTableConfig], reads: Sequence[FeatureRead]
    ) -> None:
        if on_bad_id not in get_args(OnBadId):
            raise ConfigError(f"{kind}: got on_bad_id={on_bad_id!r}; expected one of {list(get_args(OnBadId))}.")
        self.active = on_bad_id == "clamp"
        rows = {config.name: config.num_embeddings for config in configs}
        sizes: dict[str, set[int]] = {}
        for read in reads:
            sizes.setdefault(read.feature, set()).add(rows[read.table])
        # By feature, the distinct sizes of the tables that read it, ascending.
        self._sizes = {feature: sorted(several) for feature, several in sizes.items()}
        self._most = max((len(several) for several in self._sizes.values()), default=1)
        self.forms = tuple(self._sizes[read.feature].index(rows[read.table]) if self.active else 0 for read in reads)

    def __call__(self, features: KeyedJaggedTensor) -> list[Tensor]:
        """Return the batch's ids in all forms, from that of the smallest tables."""
        ids = features.values()
        if not self.active:
            return [ids]
        key_N = torch.ops.tilerec.segment_ids(key_starts(features), ids.shape[0])
        return [self._clamped(ids, features.keys(), key_N, form) for form in range(self._most)]

    def _clamped(self, ids: Tensor, keys: Sequence[str], key_N: Tensor, form: int) -> Tensor:
        """Return the ids in one form; keys that no table reads keep theirs."""
        info = torch.iinfo(ids.dtype)
        own = [self._sizes.get(key) for key in keys]
        rows = [None if sizes is None else sizes[min(form, len(sizes) - 1)] for sizes in own]
        last_K = constants([info.max if n is None else n - 1 for n in rows], ids.device)
        first_K = constants([info.min if n is None else 0 for n in rows], ids.device)
        return torch.minimum(torch.maximum(ids, first_K[key_N].to(ids.dtype)), last_K[key_N].to(ids.dtype))


def key_starts(features: KeyedJaggedTensor) -> Tensor:
    """Return the start of each key's values, and the end of the last: int64 [K + 1]."""
    offsets = features.offsets()
    if features.variable_stride_per_key():
        bags = upload(list(accumulate(features.stride_per_key(), initial=0)), offsets.device)
    else:
        bags = torch.arange(len(features.keys()) + 1, device=offsets.device) * features.stride()
    return offsets[bags]
