"""Wire formats of an exchange's rows, table by table.

    one format for all tables   the wire is one tensor of that format
    several                     the wire is bytes: each segment's rows in its table's format, in the segments' order

Rows that stay on their rank are encoded and decoded as well, so that values do not depend on the ranks of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from tilerec.comms.codec import codec


@final
class RowWire:
    """Encoder and decoder of the rows of some segments.

    Args:
        names: codec of each segment's table, in the segments' order.
        every: codecs of all tables of the module; decides, equally on every rank, if formats are mixed.
        dtype: dtype of the rows.
    """

    def __init__(self, names: Sequence[str], every: Sequence[str], dtype: torch.dtype) -> None:
        kinds = dict.fromkeys(every)
        self.plain = list(kinds) in ([], ["fp32"])
        self._dtype = dtype
        self._mixed = len(kinds) > 1
        self._codecs = [codec(name) for name in names]
        self._all = codec(next(iter(kinds), "fp32"))
        self._members = {name: [i for i, own in enumerate(names) if own == name] for name in dict.fromkeys(names)}

    @property
    def wire_dtype(self) -> torch.dtype:
        """Dtype of the tensor that is sent."""
        return torch.uint8 if self._mixed else self._all.wire_dtype or self._dtype

    def sizes(self, counts: Sequence[int], widths: Sequence[int]) -> list[int]:
        """Return the wire elements of each segment, which has `counts[i]` rows of `widths[i]` elements."""
        if self._mixed:
            return [c * own.row_bytes(w, self._dtype) for c, w, own in zip(counts, widths, self._codecs, strict=True)]
        if self.plain:
            return [c * w for c, w in zip(counts, widths, strict=True)]
        return [c * self._all.row_elements(w) for c, w in zip(counts, widths, strict=True)]

    def encode(self, rows: Tensor, counts: Sequence[int], widths: Sequence[int]) -> Tensor:
        """Return the wire of rows that are stored segment after segment."""
        if not self._mixed:
            return self._all.encode(rows, list(zip(counts, widths, strict=True)))
        pieces = list(rows.split([c * w for c, w in zip(counts, widths, strict=True)]))
        for name, members in self._members.items():
            segments = [(counts[i], widths[i]) for i in members]
            wire = codec(name).encode(torch.cat([pieces[i] for i in members]), segments).view(torch.uint8)
            sizes = [c * codec(name).row_bytes(w, self._dtype) for c, w in segments]
            for i, piece in zip(members, wire.split(sizes), strict=True):
                pieces[i] = piece
        return torch.cat(pieces) if pieces else rows.new_empty(0, dtype=torch.uint8)

    def decode(self, wire: Tensor, counts: Sequence[int], widths: Sequence[int]) -> Tensor:
        """Return the rows of a wire, segment after segment."""
        if not self._mixed:
            return self._all.decode(wire, list(zip(counts, widths, strict=True))).to(self._dtype)
        pieces = list(wire.split(self.sizes(counts, widths)))
        for name, members in self._members.items():
            own = codec(name)
            segments = [(counts[i], widths[i]) for i in members]
            # Copy: elements must be aligned to a multiple of their size.
            own_wire = torch.cat([pieces[i] for i in members]).view(own.wire_dtype or self._dtype)
            rows = own.decode(own_wire, segments).to(self._dtype)
            for i, piece in zip(members, rows.split([c * w for c, w in segments]), strict=True):
                pieces[i] = piece
        return torch.cat(pieces) if pieces else wire.new_empty(0, dtype=self._dtype)
