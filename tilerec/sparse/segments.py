"""How a run of values falls into segments: given as lengths, as offsets, or both; the other is derived when asked for.

Shapes
    lengths_S  int32 or int64   items per segment
    offsets_S1 int32 or int64   where segments begin, with the end of the last:
                                offsets[s + 1] = offsets[s] + lengths[s]
    lengths_FB int32 or int64   lengths as a table of F rows of B segments, S = F * B

Offsets derived from lengths are int64. Lengths derived from offsets keep the dtype of the offsets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.ops.jagged.definition import offsets_from_lengths
from tilerec.sparse.items import check_tensor

_INTEGER = (torch.int64, torch.int32)


@final
class Segments:
    """What was given never changes; what was derived is remembered, but not while a graph is being traced.

    A compiled graph reads only what was given: if it read what an earlier call happened to derive, two batches of the
    same kind would look different to the compiler and each state would cost a compilation.
    """

    __slots__ = ("_derived_lengths", "_derived_offsets", "_row", "given_lengths", "given_offsets")

    def __init__(
        self,
        given_lengths: Tensor | None,
        given_offsets: Tensor | None,
        row: tuple[Tensor, int] | None = None,
    ) -> None:
        """`given_lengths`: [S], or a table [F, B] in one piece of memory.

        A table stays one: its second size is the batch size, which an exporter cannot tell from S = F * B.

        `row`: offsets that stand in row number `row[1]` of a table, computed with those of the other keys.

        It is sliced when asked for: a thousand keys are a thousand views that most readers never look at.
        """
        self.given_lengths = given_lengths
        self.given_offsets = given_offsets
        self._derived_lengths: Tensor | None = None
        self._derived_offsets: Tensor | None = None
        self._row = row

    def lengths(self) -> Tensor:
        """Items per segment [S]."""
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
        """Where segments begin [S + 1]."""
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
        """Lengths if they are at hand without work."""
        if self.given_lengths is not None:
            return self.lengths()
        return None if torch.compiler.is_compiling() else self._derived_lengths

    def offsets_or_none(self) -> Tensor | None:
        """Offsets if they are at hand without work."""
        if self.given_offsets is not None or torch.compiler.is_compiling():
            return self.given_offsets
        return self._derived_offsets if self._row is None else self.offsets()

    def begin(self) -> int:
        """Where the first segment begins: 0, unless offsets say otherwise, which waits for the device."""
        return 0 if self.given_offsets is None else int(self.given_offsets[0].item())

    def count(self) -> int:
        """How many segments; read from a shape, so it costs no wait and stays symbolic in a graph."""
        if self.given_lengths is not None:
            return self.given_lengths.numel()
        assert self.given_offsets is not None, "segments hold lengths or offsets"
        return self.given_offsets.shape[0] - 1

    def map(self, function: Callable[[Tensor], Tensor]) -> Segments:
        """The given tensors moved or copied; derived ones are cheaper derived again than moved."""
        lengths_S, offsets_S1 = self.given_lengths, self.given_offsets
        return Segments(
            None if lengths_S is None else function(lengths_S),
            None if offsets_S1 is None else function(offsets_S1),
        )

    def copy_(self, source: Segments, non_blocking: bool = False) -> None:
        """Overwrite the given tensors with `source`'s and forget what was derived from the old ones."""
        if self.given_lengths is not None:
            self.given_lengths.view(-1).copy_(source.lengths(), non_blocking=non_blocking)
        if self.given_offsets is not None:
            self.given_offsets.copy_(source.offsets(), non_blocking=non_blocking)
        self._derived_lengths = None
        self._derived_offsets = None
        self._row = None

    def tensors(self) -> list[Tensor]:
        """Every tensor held, given or derived."""
        # Lengths derived from a table are the table's own memory.
        derived_lengths = self._derived_lengths if self.given_lengths is None else None
        held = (self.given_lengths, self.given_offsets, derived_lengths, self._derived_offsets)
        return [tensor for tensor in held if tensor is not None]


def checked_segments(
    owner: str, lengths: Tensor | None, offsets: Tensor | None, rows: int | None = None
) -> Segments:
    """Segments from a caller's tensors; `owner` is the word for the errors.

    Lengths of more dimensions are flattened, but a table of `rows` rows stays one. Shapes and dtypes are checked here,
    contents in `sparse/validate.py`, because reading contents waits for the device.
    """
    if lengths is None and offsets is None:
        raise InputError(f"{owner}: got neither lengths nor offsets; give one of them.")
    for name, tensor in (("lengths", lengths), ("offsets", offsets)):
        if tensor is None:
            continue
        check_tensor(owner, name, tensor)
        if tensor.dtype in _INTEGER:
            continue
        if name == "offsets" or tensor.numel() > 0:
            raise InputError(
                f"{owner}: {name} have dtype {tensor.dtype}; wanted torch.int32 or torch.int64; "
                f"write {name}.to(torch.int64)."
            )
        lengths = tensor.long()  # torch.tensor([]) is a float tensor
    if lengths is not None and lengths.dim() != 1:
        if lengths.dim() == 0:
            raise InputError(
                f"{owner}: lengths have no dimension; wanted one length per bag; write lengths.reshape(1)."
            )
        is_table = offsets is None and lengths.dim() == 2 and lengths.shape[0] == rows
        lengths = lengths.contiguous() if is_table else lengths.reshape(-1)
    if offsets is not None:
        if offsets.dim() != 1 or offsets.shape[0] == 0:
            raise InputError(
                f"{owner}: offsets have shape {list(offsets.shape)}; wanted one dimension with one entry "
                f"more than there "
                f"are bags, [0] for none."
            )
        if lengths is not None and lengths.shape[0] + 1 != offsets.shape[0]:
            raise InputError(
                f"{owner}: {lengths.shape[0]} lengths and {offsets.shape[0]} offsets disagree; wanted one offset more "
                f"than lengths; give only one of them."
            )
    return Segments(lengths, offsets)
