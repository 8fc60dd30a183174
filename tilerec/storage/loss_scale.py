"""The scale of the loss: what `torch.amp.GradScaler` multiplies it by, an attached optimizer must divide by.

A scaler divides the `.grad`s of the optimizers that it steps. Tables with attached optimizers have none, so the scale
is written into their `param_groups`. If it was never written, and a scaler in use is found at the first update, the
update is refused: it would move rows 65,536 times too far.
"""

from __future__ import annotations

import gc
import sys

from torch.amp.grad_scaler import GradScaler

from tilerec.errors import ConfigError
from tilerec.storage.hyper_group import HyperGroup


def check_scale(table: str, group: HyperGroup) -> None:
    """Raise a `ConfigError` if a loss scale is in use and nothing was written to the group's `grad_scale`.

    Looked for once per group, at its first update. An instance holds a reference to its class, so a process without
    scalers is known by the class's count of references, and nothing is searched.
    """
    scales = [
        scaler.get_scale() for scaler in _scalers() if scaler.is_enabled() and scaler._scale is not None
    ]
    foreign = next((scale for scale in scales if scale != group["grad_scale"]), None)
    if foreign is not None:
        raise ConfigError(
            f"Table '{table}': got grad_scale={group['grad_scale']}, but a GradScaler multiplies losses by {foreign}; "
            "expected its scale, by which the attached optimizer divides. Before each backward write "
            "group['grad_scale'] = scaler.get_scale() for group in fused_optimizer.param_groups (1.0 where the "
            "scaler is for another model)."
        )
    group.scale_known = True


def _scalers() -> list[GradScaler]:
    classes: list[type] = [GradScaler]
    for kind in classes:
        classes += kind.__subclasses__()
    counts = tuple(map(sys.getrefcount, classes))
    if counts == _idle[0]:
        return []
    found = _living(classes)
    if found:
        found.clear()
        gc.collect()  # those that wait for the collector do not count
        found = _living(classes)
    _idle[0] = () if found else counts
    return found


def _living(classes: list[type]) -> list[GradScaler]:
    return [thing for thing in gc.get_referrers(*classes) if isinstance(thing, GradScaler)]


_idle: list[tuple[int, ...]] = [()]
"""References of the classes when no instance lived; empty while one does."""
