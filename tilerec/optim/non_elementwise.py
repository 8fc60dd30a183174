"""Optimizers that are not element-wise, and their results on sharded tables.

Adam            element-wise          updates tiles like the whole table
Muon, LAMB      norms, products       computed per tile, so weights depend on the plan
Adafactor       numbers per column    as Muon; also divides by the number of elements, which may be 0
LBFGS           one direction for all parameters of a rank, so it differs between ranks
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import Tensor
from torch.optim import Optimizer

from tilerec.optim.sharded_state import stepped_by_optimizer, tiled_table_of

# Class names in lower case: optimizers of torch, and usual names in other libraries.
_NOT_ELEMENT_WISE = frozenset({"adafactor", "lamb", "lars", "lbfgs", "muon", "novograd", "shampoo", "soap"})


def _named(optimizer: Optimizer, names: frozenset[str]) -> str | None:
    return next((base.__name__ for base in type(optimizer).__mro__ if base.__name__.lower() in names), None)


def needs_elements(optimizer: Optimizer) -> bool:
    """Return True if the optimizer cannot step a parameter without elements."""
    return _named(optimizer, frozenset({"adafactor"})) is not None


def warn_of_tiled_params(optimizer: Optimizer, params: Mapping[str, Tensor]) -> None:
    """Issue one warning if the optimizer is not element-wise and this rank's leaves are parts of their tables."""
    rule = _named(optimizer, _NOT_ELEMENT_WISE)
    if rule is None:
        return
    parts = [name for name, p in params.items() if _is_part(name, p, everything=rule.lower() == "lbfgs")]
    if parts:
        more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
        warnings.warn(
            f"KeyedOptimizerWrapper: {rule} is not element-wise. It steps this rank's tiles of "
            f"{', '.join(parts[:3])}{more}, not the tables, so results depend on the plan. Attach an optimizer to "
            "these tables (apply_optimizer_in_backward), place each uncut on one rank, or use a rule like Adam.",
            stacklevel=3,
        )


def _is_part(name: str, parameter: Tensor, everything: bool) -> bool:
    table = tiled_table_of(parameter)
    if table is None or not stepped_by_optimizer(parameter):
        return False
    return everything or (bool(parameter.numel()) and table.shape_of(table.leaves(), name) != tuple(parameter.shape))
