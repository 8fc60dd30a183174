"""`BatchPart`: some rows of a batch, before parts are joined.

Legend: b rows, I dense features, T tasks.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilerec.data.fields import Floats, Ints
from tilerec.data.part_ids import PartIds


@dataclass
class BatchPart:
    """Some rows of a batch.

    Attributes:
        dense: float32 [b, I].
        labels: float32 [b, T].
        ids: of all features.
        weights: float32 [b], or None.
        sessions: int64 [b], equal for samples of one session; None without sessions.
    """

    dense: Floats
    labels: Floats
    ids: PartIds
    weights: Floats | None = None
    sessions: Ints | None = None

    @property
    def rows(self) -> int:
        """b."""
        return len(self.labels)

    @property
    def bytes(self) -> int:
        """Bytes of memory."""
        arrays = [self.dense, self.labels, self.weights, self.sessions]
        return self.ids.bytes + sum(array.nbytes for array in arrays if array is not None)
