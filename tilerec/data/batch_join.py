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

from tilerec.data.arena import Arena
from tilerec.data.batch import Batch
from tilerec.data.fields import BagIds, Floats, Ints
from tilerec.data.gather import BatchPart, join_bags
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


def join_parts(
    parts: Sequence[BatchPart], features: Sequence[str], arena: Arena, savings: SessionSavings | None = None
) -> Batch:
    """Return the batch of the parts' rows, as a copy.

    Args:
        parts: at least one.
        features: names, in the order of the keys.
        arena: memory of the batch.
        savings: with it, bags of sessions are shared, and the numbers are added to it.
    """
    labels = _stacked([part.labels for part in parts], arena)
    weights = None
    if parts[0].weights is not None:
        weights = torch.from_numpy(arena.joined([part.weights for part in parts if part.weights is not None]))
    if savings is not None:
        bags = {name: join_bags([part.ids[name] for part in parts], arena) for name in features}
        sessions = np.concatenate([part.sessions for part in parts if part.sessions is not None])
        sparse = _shared(bags, sessions, savings)
    else:
        sparse = _plain(parts, features, len(labels), arena)
    return Batch(
        dense_features=torch.from_numpy(_stacked([part.dense for part in parts], arena)),
        sparse_features=sparse,
        labels=torch.from_numpy(labels[:, 0] if labels.shape[1] == 1 else labels),
        weights=weights,
    )


def _stacked(arrays: list[Floats], arena: Arena) -> Floats:
    """Return matrices of one width, one below the other."""
    rows = sum(map(len, arrays))
    return arena.joined([array.reshape(-1) for array in arrays]).reshape(rows, arrays[0].shape[1])


def _plain(parts: Sequence[BatchPart], features: Sequence[str], samples: int, arena: Arena) -> KeyedJaggedTensor:
    lengths_FB = arena.empty(len(features) * samples, np.int32).reshape(len(features), samples)
    lengths_FB.fill(1)
    values: list[Ints] = []
    weights: list[Floats] = []
    counts: list[int] = []
    weighted = any(bags.weights is not None for bags in parts[0].ids.values())
    for place, name in enumerate(features):
        first = 0
        pieces = [part.ids[name] for part in parts]
        for part, bags in zip(parts, pieces, strict=True):
            if bags.lengths is not None:
                lengths_FB[place, first : first + part.rows] = bags.lengths
            first += part.rows
            if weighted:
                ones = np.ones(len(bags.values), np.float32)
                weights.append(ones if bags.weights is None else bags.weights)
        values += [bags.values for bags in pieces]
        counts.append(sum(len(bags.values) for bags in pieces))
    return KeyedJaggedTensor(
        list(features),
        torch.from_numpy(arena.joined(values)) if values else torch.zeros(0, dtype=torch.int64),
        torch.from_numpy(arena.joined(weights)) if weighted else None,
        lengths=torch.from_numpy(lengths_FB.reshape(-1)),
        stride=samples,
        length_per_key=counts,
    )


def _values(bags: dict[str, BagIds]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the ids of all features, and their weights if a feature has some (1 for those without)."""
    if not bags:
        return torch.zeros(0, dtype=torch.int64), None
    values = np.concatenate([one.values for one in bags.values()])
    if all(one.weights is None for one in bags.values()):
        return torch.from_numpy(values), None
    weights = [np.ones(len(one.values), np.float32) if one.weights is None else one.weights for one in bags.values()]
    return torch.from_numpy(values), torch.from_numpy(np.concatenate(weights))


def _shared(bags: dict[str, BagIds], session_of_B: Ints, savings: SessionSavings) -> KeyedJaggedTensor:
    samples = len(session_of_B)
    same_B = np.zeros(samples, np.bool_)
    same_B[1:] = session_of_B[1:] == session_of_B[:-1]
    stored: dict[str, BagIds] = {}
    index_FB = np.empty((len(bags), samples), np.int32)
    lengths = []
    for place, (name, one) in enumerate(bags.items()):
        lengths_B = np.ones(samples, np.int64) if one.lengths is None else one.lengths
        kept_B = ~_equal_to_previous(one, lengths_B, same_B)
        index_FB[place] = np.cumsum(kept_B) - 1
        kept_N = np.repeat(kept_B, lengths_B)
        weights_N = None if one.weights is None else one.weights[kept_N]
        stored[name] = BagIds(one.values[kept_N], lengths_B[kept_B], weights_N)
        lengths.append(lengths_B[kept_B].astype(np.int32))
        savings.ids += len(one.values)
        savings.stored_ids += len(stored[name].values)
        savings.stored_bags += len(lengths[-1])
    savings.samples += samples
    savings.bags += samples * len(bags)
    values, weights = _values(stored)
    return KeyedJaggedTensor(
        list(bags),
        values,
        weights,
        lengths=torch.from_numpy(np.concatenate(lengths) if lengths else np.zeros(0, np.int32)),
        stride_per_key_per_rank=[[len(one)] for one in lengths],
        length_per_key=[len(one.values) for one in stored.values()],
        inverse_indices=(list(bags), torch.from_numpy(index_FB)),
    )


def _equal_to_previous(bags: BagIds, lengths_B: Ints, same_B: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
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
