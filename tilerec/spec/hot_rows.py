"""`HotRows`: the rows of a table that every rank holds a copy of, beside its tiling.

Nouns
  hot id   the number of such a row in the table. Ids and state keep it: only lookups and updates use the copies
  head     the block of copies on every rank, in the order of the ids: copy k of hot id `ids[k]`

    table of n rows  ->  rows [0, n), cut by the tiling, and the head as rows [n, n + h), on every rank
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch

from tilerec.errors import ConfigError
from tilerec.json_document import JsonValue

MOST_HOT_ROWS = 1 << 20
"""Most hot rows of a table: their ids are a part of the plan, which ranks compare and files hold as text."""


def distinct_ids(ids: Any, owner: str, move: str) -> npt.NDArray[np.int64]:
    """Return row numbers of a table as an array, in their order.

    Args:
        ids: as of `HotRows`.
        owner, move: begin and end of errors.

    Raises:
        ConfigError: as in `HotRows`.
    """
    try:
        own = ids.cpu() if isinstance(ids, torch.Tensor) else ids
        found: npt.NDArray[Any] = np.asarray([] if isinstance(own, Sequence) and not len(own) else own)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{owner}: got hot ids that make no array ({error}); expected whole numbers [h]. {move}"
        ) from error
    whole = found.dtype.kind in "iu" and np.can_cast(found.dtype, np.int64)
    if found.ndim != 1 or (len(found) and not whole):
        raise ConfigError(
            f"{owner}: got hot ids of type {found.dtype} and shape {list(found.shape)}; expected whole numbers [h]. "
            f"{move}"
        )
    if len(found) > MOST_HOT_ROWS:
        raise ConfigError(f"{owner}: got {len(found):,} hot ids; expected at most {MOST_HOT_ROWS:,}. {move}")
    ordered = np.sort(found)
    if len(ordered) and ordered[0] < 0:
        raise ConfigError(f"{owner}: got the hot id {ordered[0]}; expected row numbers from 0. {move}")
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice):
        raise ConfigError(f"{owner}: got the hot id {twice[0]} twice; expected each id once. {move}")
    return found.astype(np.int64)


@final
class HotRows:
    """Hot ids of a table.

    Args:
        ids: whole numbers `[h]`, distinct, from 0, in any order: a tensor of any device, an array or a list. None at
            all: no row is hot.

    Attributes:
        ids: int64, the same, ascending; must not be written.

    Raises:
        ConfigError: another type or shape, an id twice or below 0, or more than `MOST_HOT_ROWS`.
    """

    def __init__(self, ids: Any = ()) -> None:
        own = np.sort(distinct_ids(ids, "HotRows", "Correct them."))
        own.setflags(write=False)
        self.ids: npt.NDArray[np.int64] = own

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HotRows) and np.array_equal(self.ids, other.ids)

    def __hash__(self) -> int:
        return hash(self.ids.tobytes())

    def __repr__(self) -> str:
        some = ", ".join(map(str, self.ids[:4].tolist())) + (", …" if len(self) > 4 else "")
        return f"HotRows([{some}], {len(self):,} in all)" if len(self) > 4 else f"HotRows([{some}])"

    def to_json(self) -> list[int]:
        """Return the ids, ascending."""
        return list(self.ids.tolist())

    @staticmethod
    def from_json(value: JsonValue) -> HotRows:
        """Read the ids of `to_json`, in any order."""
        listed = value.wholes()
        if any(not isinstance(one, int) for one in listed):
            raise value.error("a list of row numbers")
        try:
            return HotRows(np.array(listed, dtype=np.int64))
        except ConfigError as error:
            raise value.refused(error) from error
