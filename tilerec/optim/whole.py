"""Rules that look at a parameter as a whole, and what they make of tables in tiles.

Adam            element by element    tiles move as the table would
Muon, LAMB      norms, products       each tile has its own: another plan, other weights
Adafactor       numbers per column    likewise; and it divides by the number of elements, which may be none
LBFGS           one direction for all parameters of a rank: ranks differ
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import Tensor
from torch.optim import Optimizer

from tilerec.optim.tiled import tiled_table_of, waits_for_step

# By name, in lower case: those of torch, and what other libraries call theirs.
_WHOLE = frozenset({"adafactor", "lamb", "lars", "lbfgs", "muon", "novograd", "shampoo", "soap"})


def _named(optimizer: Optimizer, names: frozenset[str]) -> str | None:
    return next((base.__name__ for base in type(optimizer).__mro__ if base.__name__.lower() in names), None)


def needs_rows(optimizer: Optimizer) -> bool:
    """Whether it cannot step a parameter of no elements."""
    return _named(optimizer, frozenset({"adafactor"})) is not None


def warn_of_parts(optimizer: Optimizer, params: Mapping[str, Tensor]) -> None:
    """Warn, once, if the rule looks at wholes and this rank's leaves are parts of their tables."""
    rule = _named(optimizer, _WHOLE)
    if rule is None:
        return
    parts = [name for name, p in params.items() if _is_part(name, p, everything=rule.lower() == "lbfgs")]
    if parts:
        more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
        warnings.warn(
            f"KeyedOptimizerWrapper: {rule} does not work element by element. It steps this rank's tiles of "
            f"{', '.join(parts[:3])}{more}, not the tables, so that results depend on the plan; attach an optimizer to "
            "these tables (apply_optimizer_in_backward), have them on one rank each, uncut, or use a rule like Adam.",
            stacklevel=3,
        )


def _is_part(name: str, parameter: Tensor, everything: bool) -> bool:
    table = tiled_table_of(parameter)
    if table is None or not waits_for_step(parameter):
        return False
    return everything or (
        bool(parameter.numel()) and table.shape_of(table.leaves(), name) != tuple(parameter.shape)
    )
