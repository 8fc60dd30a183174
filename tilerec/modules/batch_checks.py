"""Checks of a batch against its tables, before managed collision assigns a row to any id."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from tilerec.errors import InputError
from tilerec.modules.collection import TableCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.feature_reads import key_positions
from tilerec.modules.inverse_indices import check_samples
from tilerec.ops.lookup.definition import raise_bad_id
from tilerec.ops.runtime.fetch import host_readable
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


def check_batch(tables: TableCollection, managed: Collection[str], features: KeyedJaggedTensor) -> None:
    """Raise if the tables' forward would reject the batch, for any rows that its ids get.

    Ids of tables without managed collision are row numbers. They are checked on the CPU only, because the check would
    wait for a device.

    Args:
        managed: names of the tables whose ids are mapped.

    Raises:
        InputError: a feature, the weights, or the inverse indices of a variable batch are missing, or an id is outside
            its table.
    """
    who = type(tables).__name__
    if not isinstance(features, KeyedJaggedTensor):
        raise InputError(f"{who}: got a {type(features).__name__}; expected a KeyedJaggedTensor.")
    keys = features.keys()
    key_positions(who, tables._reads, keys)
    if getattr(tables, "_is_weighted", False):
        features.weights()
    if features.variable_stride_per_key() and isinstance(tables, EmbeddingBagCollection):
        check_samples(who, [read.feature for read in tables._reads], features)
    own = {config.name: config.num_embeddings for config in tables._configs if config.name not in managed}
    if own and not tables._id_clamp.active and host_readable(features.values()):
        starts = dict(zip(keys, features.offset_per_key(), strict=False))
        sizes = dict(zip(keys, features.length_per_key(), strict=True))
        for read in tables._reads:
            if read.table in own and sizes[read.feature]:
                start = starts[read.feature]
                ids_N = features.values()[start : start + sizes[read.feature]]
                _check_rows(ids_N, start, own[read.table], f"{read.feature}@{read.table}")


def _check_rows(ids_N: Tensor, start: int, rows: int, name: str) -> None:
    outside = ((ids_N < 0) | (ids_N >= rows)).nonzero()
    if outside.numel():
        at = int(outside[0])
        raise_bad_id(name, 0, start + at, int(ids_N[at]), rows)
