"""`GradientRecord`: the row gradients of one lookup, before they are summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from tilerec.ops.update.calls import Features, Gradients


@dataclass(frozen=True)
class GradientRecord:
    """One lookup's row gradients; per-feature tuples are parallel to `sinks`.

    The record keeps `grad` and `ids` alive until the pass ends, since the sums read them then.
    """

    serial: int  # order of the lookups' forwards
    grad: Tensor
    ids: Tensor
    offsets: Tensor | None
    sample_weights: Tensor | None
    sinks: tuple[int, ...]  # handle per feature
    dims: tuple[int, ...]
    starts: tuple[int, ...]
    bags: tuple[int, ...]
    grad_starts: tuple[int, ...]
    grad_strides: tuple[int, ...]
    means: tuple[int, ...]
    # Position of each feature in the sum over all ranks, if the record is one of several ranks'; empty: 0, 1, 2 …
    order: tuple[int, ...] = ()
    # Per feature, True if no row is in two of its bags, each of which has one id; empty: not known.
    distinct: tuple[bool, ...] = ()
    agreed: bool = False  # contains the gradients of all ranks with copies of these rows

    def gradients(self, tables: Sequence[int]) -> Gradients:
        """Return the record as update ops take it; `tables`: of the call, per feature."""
        features = Features(tables, self.starts, self.bags, self.grad_starts, self.grad_strides, self.means)
        return Gradients(self.grad, self.ids, self.offsets, self.sample_weights, features)

    def only(self, features: Sequence[int]) -> GradientRecord:
        """Return the record restricted to some of its features."""
        if len(features) == len(self.sinks):
            return self
        names = ["sinks", "dims", "starts", "bags", "grad_starts", "grad_strides", "means"]
        names += [name for name in ("order", "distinct") if getattr(self, name)]
        some: dict[str, Any] = {
            name: tuple([values[f] for f in features]) for name in names for values in [getattr(self, name)]
        }
        return replace(self, **some)

    def grads_of(self, feature: int) -> Tensor:
        """Return the gradients of a feature's bags, a view [bags, dim]."""
        at = self.grad.storage_offset() + self.grad_starts[feature]
        size, strides = (self.bags[feature], self.dims[feature]), (self.grad_strides[feature], 1)
        return self.grad.as_strided(size, strides, at)
