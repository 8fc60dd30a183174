"""Segments of a tensor of values, given as lengths, offsets, or both; the missing one is derived at its first use.

Shapes
    lengths_S  int32 or int64   items per segment
    offsets_S1 int32 or int64   start of each segment, and end of the last:
                                offsets[s + 1] = offsets[s] + lengths[s]
    lengths_FB int32 or int64   lengths as a table of F rows of B segments, S = F * B

Offsets derived from lengths are int64. Lengths derived from offsets keep the dtype of the offsets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor
from torch.compiler import is_exporting

from tilerec.errors import InputError
from tilerec.ops.jagged.definition import offsets_from_lengths, unbacked_rows
from tilerec.sparse.value_checks import check_tensor

_INTEGER = (torch.int64, torch.int32)


@final
class Segments:
    """Lengths and offsets of segments. Given tensors never change; derived tensors are cached, except during tracing.

    A compiled graph reads only the given tensors. If it also read tensors that an earlier call derived, batches of one
    kind would have different structures, and each structure would be compiled separately.
    """

    __slots__ = ("_derived_lengths", "_derived_offsets", "_row", "given_lengths", "given_offsets")

    def __init__(
        self,
        given_lengths: Tensor | None,
        given_offsets: Tensor | None,
        row: tuple[Tensor, int] | None = None,
    ) -> None:
        """Store the given tensors.

        `given_lengths`: [S], or a contiguous table [F, B]. A table is kept: its second size is the batch size, which an
        exporter cannot derive from S = F * B.

        `row`: (table, number): the offsets are this row of a table that was computed for all keys together. The row is
        sliced at its first use: slices of a thousand keys are a thousand views, and most are never read.
        """
        self.given_lengths = given_lengths
        self.given_offsets = given_offsets
        self._derived_lengths: Tensor | None = None
        self._derived_offsets: Tensor | None = None
        self._row = row

    def lengths(self) -> Tensor:
        """Return the number of items of each segment [S]."""
        lengths_S = self.given_lengths
        if lengths_S is not None and lengths_S.dim() == 1:
            return lengths_S
        if torch.compiler.is_compiling():
            return self._derive_lengths()
        if self._derived_lengths is None:
            self._derived_lengths = self._derive_lengths()
        return self._derived_lengths

    def _derive_lengths(self) -> Tensor:
        if self.given_lengths is not None:
            return self.given_lengths.reshape(-1)
        assert self.given_offsets is not None, "segments hold lengths or offsets"
        return self.given_offsets.diff()

    def offsets(self) -> Tensor:
        """Return the start of each segment, and the end of the last [S + 1]."""
        offsets_S1 = self.given_offsets
        if offsets_S1 is not None:
            return offsets_S1
        assert self.given_lengths is not None, "segments hold lengths or offsets"
        if torch.compiler.is_compiling():
            return offsets_from_lengths(self.lengths())
        if self._derived_offsets is None:
            if self._row is not None:
                self._derived_offsets = self._row[0][self._row[1]]
            else:
                self._derived_offsets = offsets_from_lengths(self.lengths())
        return self._derived_offsets

    def lengths_or_none(self) -> Tensor | None:
        """Return the lengths if they are given or derived, else None."""
        if self.given_lengths is not None:
            return self.lengths()
        return None if torch.compiler.is_compiling() else self._derived_lengths

    def offsets_or_none(self) -> Tensor | None:
        """Return the offsets if they are given or derived, else None."""
        if self.given_offsets is not None or torch.compiler.is_compiling():
            return self.given_offsets
        return self._derived_offsets if self._row is None else self.offsets()

    def begin(self) -> int:
        """Return the start of the first segment: 0 with lengths; with offsets the first one, after a device wait."""
        return 0 if self.given_offsets is None else int(self.given_offsets[0].item())

    def count(self) -> int:
        """Return the number of segments, from a shape: no wait for the device, and symbolic in a graph."""
        if self.given_lengths is not None:
            return self.given_lengths.numel()
        assert self.given_offsets is not None, "segments hold lengths or offsets"
        return self.given_offsets.shape[0] - 1

    def count_per_key(self, keys: int) -> int:
        """Return the number of segments of each of `keys` keys, the batch size B; read as `count`.

        An exporter that sees F * B // F adds guards, such as that it is not 1: torch spares only sizes of dimensions.
        So in an export the division is one of a size about which nothing is known. Its form matters as well: torch
        would replace a plain symbol by an equal size of a dense input, and demand the 2 samples that it takes for
        granted there.
        """
        if keys < 1:
            return 0
        given = self.given_offsets if self.given_lengths is None else self.given_lengths
        assert given is not None, "segments hold lengths or offsets"
        if keys == 1 or given.dim() == 2 or not is_exporting():
            return self.count() // keys
        rows = unbacked_rows(given, keys).shape[0]
        return (rows - 1 if self.given_lengths is None else rows) // keys

    def map(self, function: Callable[[Tensor], Tensor]) -> Segments:
        """Apply `function` to the given tensors. Derived tensors are dropped: deriving is cheaper than copying."""
        lengths_S, offsets_S1 = self.given_lengths, self.given_offsets
        return Segments(
            None if lengths_S is None else function(lengths_S),
            None if offsets_S1 is None else function(offsets_S1),
        )

    def copy_(self, source: Segments, non_blocking: bool = False) -> None:
        """Overwrite the given tensors with `source`'s, and drop the derived tensors."""
        if self.given_lengths is not None:
            self.given_lengths.view(-1).copy_(source.lengths(), non_blocking=non_blocking)
        if self.given_offsets is not None:
            self.given_offsets.copy_(source.offsets(), non_blocking=non_blocking)
        self._derived_lengths = None
        self._derived_offsets = None
        self._row = None

    def tensors(self) -> list[Tensor]:
        """Return all tensors, given or derived."""
        # Lengths derived from a table share its memory.
        derived_lengths = self._derived_lengths if self.given_lengths is None else None
        held = (self.given_lengths, self.given_offsets, derived_lengths, self._derived_offsets)
        return [tensor for tensor in held if tensor is not None]


def checked_segments(owner: str, lengths: Tensor | None, offsets: Tensor | None, rows: int | None = None) -> Segments:
    """Check a caller's tensors and return them as segments; error messages begin with `owner`.

    Lengths with more dimensions are flattened, but a table of `rows` rows is kept. This checks shapes and dtypes;
    `sparse/validate.py` checks contents, because reading them waits for the device.
    """
    if lengths is None and offsets is None:
        raise InputError(f"{owner}: got neither lengths nor offsets; expected one of them. Pass one.")
    for name, tensor in (("lengths", lengths), ("offsets", offsets)):
        if tensor is None:
            continue
        check_tensor(owner, name, tensor)
        if tensor.dtype in _INTEGER:
            continue
        if name == "offsets" or tensor.numel() > 0:
            raise InputError(
                f"{owner}: got {name} of {tensor.dtype}; expected torch.int32 or torch.int64. "
                f"Write {name}.to(torch.int64)."
            )
        lengths = tensor.long()  # torch.tensor([]) is a float tensor
    if lengths is not None and lengths.dim() != 1:
        if lengths.dim() == 0:
            raise InputError(
                f"{owner}: got lengths without a dimension; expected one length per bag. Write lengths.reshape(1)."
            )
        is_table = offsets is None and lengths.dim() == 2 and lengths.shape[0] == rows
        lengths = lengths.contiguous() if is_table else lengths.reshape(-1)
    if offsets is not None:
        if offsets.dim() != 1 or offsets.shape[0] == 0:
            raise InputError(
                f"{owner}: got offsets of shape {list(offsets.shape)}; expected [bags + 1]. Pass one offset more than "
                f"bags, [0] for no bags."
            )
        if lengths is not None and lengths.shape[0] + 1 != offsets.shape[0]:
            raise InputError(
                f"{owner}: got {lengths.shape[0]} lengths and {offsets.shape[0]} offsets; expected one offset more "
                f"than lengths. Pass only one of them."
            )
    return Segments(lengths, offsets)
