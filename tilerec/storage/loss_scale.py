"""Check of the loss scale: an attached optimizer must divide gradients by the scale of `torch.amp.GradScaler`.

A scaler divides the `.grad`s of the optimizers that it steps. Tables with attached optimizers have no `.grad`, so the
scale is written into their `param_groups`. If it was never written and a scaler is in use, the update raises: its
steps would be 65,536 times too large.
"""

from __future__ import annotations

import gc
import sys
import weakref
from dataclasses import dataclass, field

from torch.amp.grad_scaler import GradScaler

from tilerec.errors import ConfigError
from tilerec.storage.shared_param_group import SharedParamGroup
from tilerec.torch_private import scale_of


def check_scale(table: str, group: SharedParamGroup) -> None:
    """Raise a `ConfigError` if a loss scale is in use and nothing was written to the group's `grad_scale`."""
    foreign = _other_scale(group)
    if foreign is not None:
        gc.collect()  # an unreachable scaler does not count
        foreign = _other_scale(group)
    if foreign is not None:
        raise ConfigError(
            f"Table '{table}': got grad_scale={group['grad_scale']}, but a GradScaler multiplies losses by {foreign}; "
            "expected its scale, by which the attached optimizer divides. Before each backward write "
            "group['grad_scale'] = scaler.get_scale() for group in fused_optimizer.param_groups (1.0 where the "
            "scaler is for another model)."
        )


def _other_scale(group: SharedParamGroup) -> float | None:
    for scaler in _scalers():
        if scaler.is_enabled() and scale_of(scaler) is not None and scaler.get_scale() != group["grad_scale"]:
            return float(scaler.get_scale())
    return None


@dataclass
class _LastSearch:
    """The scalers that the last search of the process found.

    Each instance references its class. While the reference counts of the classes are unchanged, no scaler was created
    or deleted, and no search is needed.
    """

    counts: tuple[int, ...] = ()
    scalers: list[weakref.ref[GradScaler]] = field(default_factory=list)


def _scalers() -> list[GradScaler]:
    classes: list[type] = [GradScaler]
    for kind in classes:
        classes += kind.__subclasses__()
    if tuple(map(sys.getrefcount, classes)) != _LAST_SEARCH.counts:
        _LAST_SEARCH.scalers = _living(classes)
        _LAST_SEARCH.counts = tuple(map(sys.getrefcount, classes))
    found = (reference() for reference in _LAST_SEARCH.scalers)
    return [scaler for scaler in found if scaler is not None]


def _living(classes: list[type]) -> list[weakref.ref[GradScaler]]:
    return [weakref.ref(thing) for thing in gc.get_referrers(*classes) if isinstance(thing, GradScaler)]


_LAST_SEARCH = _LastSearch()
