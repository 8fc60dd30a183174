"""Hot ids of a batch: replaced by the rows of their copies, which every rank holds below the rows of the table.

Terms
  hot     ids of a table, ascending
  finder  a hash table in open addressing that finds an id's position in `hot`; 0: empty, else position + 1. The home
          slot of an id is the high bits of id * 0x9E3779B97F4A7C15

    rows of the table 10, hot [3, 7]:   ids [7, 0, 3, 9]  ->  [11, 0, 10, 9]

Legend: N ids, M maps, H hot ids, S slots of a finder.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.ops.gradient.definition import bag_starts
from tilerec.ops.hot import copies as copies
from tilerec.ops.lookup.definition import raise_bad_id
from tilerec.ops.runtime.library import LIBRARY

_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def finder_of(hot_H: npt.NDArray[np.int64]) -> Tensor:
    """Return the finder of some ids, int32 [S], at most a sixteenth full.

    In a fuller one more ids need a second look, which the processor cannot predict: 26 x 2,048 ids take 0.75 ms with a
    quarter, and 0.52 ms with a sixteenth (AMD EPYC, 200 hot ids).
    """
    bits = max(4, (16 * len(hot_H) - 1).bit_length())
    found = np.zeros(1 << bits, dtype=np.int32)
    waiting = np.arange(len(hot_H))
    slots = ((hot_H.astype(np.uint64) * _FACTOR) >> np.uint64(64 - bits)).astype(np.int64)
    while len(waiting):  # one of those that meet at an empty slot takes it, the others go on to the next slot
        empty = found[slots] == 0
        found[slots[empty]] = waiting[empty] + 1
        left = found[slots] != waiting + 1
        waiting, slots = waiting[left], (slots[left] + 1) & ((1 << bits) - 1)
    return torch.from_numpy(found)


def _check(
    ids_N: Tensor, offsets: Tensor, keys: Sequence[int], batches: Sequence[int], hot: Sequence[Tensor],
    finders: Sequence[Tensor], rows: Sequence[int], names: str,
) -> None:  # fmt: skip
    if ids_N.dtype not in (torch.int32, torch.int64) or ids_N.dim() != 1:
        raise ConfigError(
            f"hot_ids: got ids {ids_N.dtype} {list(ids_N.shape)}; expected int32 or int64 [N]. Convert them."
        )
    if not len(keys) == len(hot) == len(finders) == len(rows):
        raise ConfigError(
            f"hot_ids: got {len(keys)} keys, {len(hot)} lists of hot ids, {len(finders)} finders and {len(rows)} "
            "numbers of rows; expected one of each per map. Pass one of each."
        )
    for own, finder in zip(hot, finders, strict=True):
        count = finder.numel()
        if own.dtype != torch.int64 or finder.dtype != torch.int32 or count < 2 * own.numel() or count & (count - 1):
            raise ConfigError(
                f"hot_ids: got hot ids {own.dtype} {list(own.shape)} with a finder {finder.dtype} "
                f"{list(finder.shape)}; expected int64 [H] and the result of finder_of. Make it with finder_of."
            )


def result_type(ids_N: Tensor, hot: Sequence[Tensor], rows: Sequence[int]) -> torch.dtype:
    """Return the dtype of the result: that of the ids, or int64 if int32 cannot hold all rows."""
    most = max((count + own.numel() for own, count in zip(hot, rows, strict=True)), default=0)
    return torch.int64 if most > 1 << 31 else ids_N.dtype


@LIBRARY.op(
    "hot_ids(Tensor ids_N, Tensor offsets, int[] keys, SymInt[] batches, Tensor[] hot, Tensor[] finders, int[] rows, "
    "str names) -> Tensor",
    lambda ids_N, offsets, keys, batches, hot, finders, rows, names: torch.empty_like(
        ids_N, dtype=result_type(ids_N, hot, rows)
    ),
    check=_check,
    check_fake=True,
)
def hot_ids_reference(
    ids_N: Tensor, offsets: Tensor, keys: Sequence[int], batches: Sequence[int], hot: Sequence[Tensor],
    finders: Sequence[Tensor], rows: Sequence[int], names: str,
) -> Tensor:  # fmt: skip
    """Return the ids with every hot id of some keys replaced: `hot[m][k]` by `rows[m] + k`.

    Args:
        ids_N, offsets, batches: of the jagged batch, as in `pooled_lookup`.
        keys: per map, the key whose ids it replaces, each key once. Ids of other keys stay.
        hot, finders: per map, int64 [H] ascending and its finder.
        rows: per map, the rows of the table.
        names: "feature@table" per map, joined by ",", for messages.

    Raises:
        InputError: an id outside of its table. On a GPU nothing raises here: such an id becomes one outside of
            `[0, rows + H)`, by H larger if it is too large.

    rows 10, hot [3, 7], key 1, batches [1], offsets [0, 2, 6]: ids [7, 3, 7, 0, 3, 9] -> [7, 3, 11, 0, 10, 9].
    """
    out_N = ids_N.to(result_type(ids_N, hot, rows), copy=True)
    place_N = torch.arange(ids_N.numel(), device=ids_N.device)
    for m, (first, count) in enumerate(zip(*bag_starts(keys, batches), strict=True)):
        own_H = hot[m].to(ids_N.device)
        if not own_H.numel() or first + count >= offsets.numel():
            continue  # offsets that are too few are refused where ids are routed
        mine_N = (place_N >= offsets[first]) & (place_N < offsets[first + count])
        wide_N = ids_N.long()
        bad_N = mine_N & ((wide_N < 0) | (wide_N >= rows[m]))
        if ids_N.device.type == "cpu" and bool(bad_N.any()):
            at = int(bad_N.nonzero()[0])
            raise_bad_id(names, m, at, int(ids_N[at]), rows[m])
        at_N = torch.searchsorted(own_H, wide_N).clamp(max=own_H.numel() - 1)
        out_N = torch.where(mine_N & (own_H[at_N] == wide_N), (rows[m] + at_N).to(out_N.dtype), out_N)
        out_N = torch.where(mine_N & (wide_N >= rows[m]), out_N + own_H.numel(), out_N)
    return out_N
