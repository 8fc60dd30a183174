"""Checks of every torch optimizer of the process at its first step, with torch's hook of all optimizers.

    over attached tables     its step changes nothing: raise or warn
    over tiles of tables     record it as a stepper; raise if a table has moved without it (`tile_steppers.py`)

The checks run again after an optimizer was attached, or a table was sharded or moved. All other steps cost one
dictionary lookup, and are counted for tables that are updated more often (`storage/update_watch.py`).
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tilerec.errors import ConfigError
from tilerec.optim.keyed import KeyedOptimizer
from tilerec.optim.tile_steppers import record_steppers
from tilerec.storage.table_rows import rows_of
from tilerec.storage.update_watch import count_step

_changes = 0
"""Number of calls of `check_optimizers_at_next_step`."""


def check_optimizers_at_next_step() -> None:
    """Check every optimizer at its next step; called after a table was attached to an optimizer, sharded or moved."""
    global _changes
    _changes += 1
    _watch()


@functools.lru_cache(maxsize=1)
def _watch() -> None:
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling() and not isinstance(optimizer, KeyedOptimizer):
        count_step()
    changes = _changes
    if optimizer.__dict__.get("_tilerec_changes") == changes:
        return
    record_steppers(optimizer)
    if not isinstance(optimizer, KeyedOptimizer):
        _check_idle(optimizer)
    optimizer.__dict__["_tilerec_changes"] = changes


def _check_idle(optimizer: Optimizer) -> None:
    """Raise or warn if the backward pass updates parameters of the optimizer."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    found = [(p, rows) for p in params if (rows := rows_of(p)) is not None and rows.spec is not None]
    kind = type(optimizer).__name__
    fix = "Leave them out: in_backward_optimizer_filter(model.named_parameters()) yields the others"
    names = ", ".join(f"'{rows.name}'" for _, rows in found[:8])
    if found and len(found) == len(params):
        raise ConfigError(
            f"{kind}: got only tables {names}, which have attached optimizers; expected parameters that no backward "
            f"pass updates, as step() does not change these. {fix}."
        )
    # A table may have a `.grad` to step, from another part of the loss.
    idle = [rows for p, rows in found if p.grad is None and not rows.named_idle]
    if idle:
        for rows in idle:
            rows.named_idle = True
        warnings.warn(
            f"{kind}: got tables {names} among its parameters, which have attached optimizers: the backward pass "
            f"updates them, and step() does not change them. {fix}.",
            stacklevel=5,
        )
