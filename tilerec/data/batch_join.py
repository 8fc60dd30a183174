"""Parts of a batch joined to a `Batch`, feature by feature; bags of one session shared.

With sessions, samples of one session are consecutive. A sample whose bag of a feature equals the bag of the sample
before it, in the same session, shares that bag: it is stored, sent and looked up once, and inverse indices map samples
to bags (Zhao et al., RecD, arXiv 2211.05239). The features and their gradients are the same as without.

    session 7 7 7 9, bags of "f": [1 2] [1 2] [3] [3]    ->    bags [1 2] [3] [3], inverse indices 0 0 1 2

Legend: B samples, F features, N ids, S stored bags of a feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tilerec.data.batch import Batch
from tilerec.data.batch_part import BatchPart
from tilerec.data.fields import BagIds, Floats, Ints
from tilerec.data.part_ids import PartIds, join_ids
from tilerec.data.pooled_memory import joined
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


@dataclass
class SessionSavings:
    """Ids before and after bags of sessions were shared, summed over batches.

    Attributes:
        samples: number of samples.
        ids: ids with one bag for each sample, 8 bytes each.
        stored_ids: ids with shared bags: those that are sent and looked up.
        bags, stored_bags: numbers of bags without and with sharing.
    """

    samples: int = 0
    ids: int = 0
    stored_ids: int = 0
    bags: int = 0
    stored_bags: int = 0

    @property
    def lookups_saved(self) -> float:
        """Share of the lookups that are left out, in [0, 1)."""
        return 1 - self.stored_ids / self.ids if self.ids else 0.0

    @property
    def bytes_saved(self) -> int:
        """Bytes of ids (8 each) and lengths of bags (4 each) left out, less those of the inverse indices (4 each)."""
        return 8 * (self.ids - self.stored_ids) + 4 * (self.bags - self.stored_bags) - 4 * self.bags


def join_parts(parts: Sequence[BatchPart], features: Sequence[str], savings: SessionSavings | None = None) -> Batch:
    """Return the batch of the parts' rows. A single part shares its memory with the batch.

    Args:
        parts: at least one.
        features: names, in the order of the keys.
        savings: with it, bags of sessions are shared, and the numbers are added to it.
    """
    labels = _stacked([part.labels for part in parts])
    weights = [part.weights for part in parts if part.weights is not None]
    ids = join_ids([part.ids for part in parts])
    if savings is None:
        sparse = _plain(ids, features, len(labels))
    else:
        sessions = np.concatenate([part.sessions for part in parts if part.sessions is not None])
        sparse = _shared(ids, features, sessions, savings)
    return Batch(
        dense_features=torch.from_numpy(_stacked([part.dense for part in parts])),
        sparse_features=sparse,
        labels=torch.from_numpy(labels[:, 0] if labels.shape[1] == 1 else labels),
        weights=torch.from_numpy(joined(weights)) if weights else None,
    )


def _stacked(arrays: list[Floats]) -> Floats:
    """Return matrices of one width, one below the other."""
    if len(arrays) == 1:
        return arrays[0]
    rows = sum(map(len, arrays))
    return joined([array.reshape(-1) for array in arrays]).reshape(rows, arrays[0].shape[1])


def _plain(ids: PartIds, features: Sequence[str], samples: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        list(features),
        torch.from_numpy(ids.values),
        None if ids.weights is None else torch.from_numpy(ids.weights),
        lengths=torch.from_numpy(ids.lengths_Fb.reshape(-1)),
        stride=samples,
        length_per_key=ids.counts,
    )


def _shared(ids: PartIds, features: Sequence[str], session_of_B: Ints, savings: SessionSavings) -> KeyedJaggedTensor:
    samples = len(session_of_B)
    same_B = np.zeros(samples, np.bool_)
    same_B[1:] = session_of_B[1:] == session_of_B[:-1]
    index_FB = np.empty((len(features), samples), np.int32)
    values, weights, lengths = [], [], []
    for place in range(len(features)):
        one, lengths_B = ids.feature(place), ids.lengths_Fb[place]
        kept_B = ~_equal_to_previous(one, lengths_B, same_B)
        index_FB[place] = np.cumsum(kept_B) - 1
        kept_N = np.repeat(kept_B, lengths_B)
        values.append(one.values[kept_N])
        if one.weights is not None:
            weights.append(one.weights[kept_N])
        lengths.append(lengths_B[kept_B])
        savings.ids += len(one.values)
        savings.stored_ids += len(values[-1])
        savings.stored_bags += len(lengths[-1])
    savings.samples += samples
    savings.bags += samples * len(features)
    return KeyedJaggedTensor(
        list(features),
        torch.from_numpy(np.concatenate(values) if values else np.zeros(0, np.int64)),
        torch.from_numpy(np.concatenate(weights)) if weights else None,
        lengths=torch.from_numpy(np.concatenate(lengths) if lengths else np.zeros(0, np.int32)),
        stride_per_key_per_rank=[[len(one)] for one in lengths],
        length_per_key=[len(one) for one in values],
        inverse_indices=(list(features), torch.from_numpy(index_FB)),
    )


def _equal_to_previous(
    bags: BagIds, lengths_B: npt.NDArray[np.int32], same_B: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Return True for each sample whose bag equals that of the sample before it, among samples of one session."""
    equal_B = same_B.copy()
    equal_B[1:] &= lengths_B[1:] == lengths_B[:-1]
    # Bags of one length that follow each other: id i of the second has the place of id i of the first plus the length.
    candidate_N = np.repeat(equal_B, lengths_B)
    at_N = np.flatnonzero(candidate_N)
    if len(at_N):
        before_N = at_N - np.repeat(lengths_B, lengths_B)[at_N]
        differs_N = bags.values[at_N] != bags.values[before_N]
        if bags.weights is not None:
            differs_N |= bags.weights[at_N] != bags.weights[before_N]
        sample_N = np.repeat(np.arange(len(lengths_B)), lengths_B)[at_N[differs_N]]
        equal_B[sample_N] = False
    return equal_B
