"""TorchRec's `apply_optimizer_in_backward`: settings that a program leaves out have FBGEMM's defaults for tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import SGD, Adagrad, Adam

from tilerec.compat.row_rules import row_rule_of
from tilerec.optim import attach
from tilerec.optim.rowwise_adagrad import RowWiseAdagrad
from tilerec.spec import optimizer as spec
from tilerec.storage.table_rows import rows_of

_DEFAULTS: dict[Any, dict[str, float]] = {
    SGD: {"lr": 0.01},
    Adam: {"lr": 0.01, "eps": 1e-8},
    Adagrad: {"lr": 0.01, "eps": 1e-8},
    RowWiseAdagrad: {"lr": 0.01, "eps": 1e-8},
    spec.Adagrad: {"lr": 0.01, "eps": 1e-8},
    spec.RowWiseAdagrad: {"lr": 0.01, "eps": 1e-8},
    spec.Adam: {"lr": 0.01, "eps": 1e-8},
    spec.PartialRowWiseAdam: {"lr": 0.01, "eps": 1e-8},
    spec.LAMB: {"lr": 0.01, "eps": 1e-8},
    spec.PartialRowWiseLAMB: {"lr": 0.01, "eps": 1e-8},
}
"""FBGEMM's defaults. Those of the classes may differ: torch's and tilerec's Adagrad have an eps of 1e-10."""


def apply_optimizer_in_backward(
    optimizer_class: Any, params: Iterable[nn.Parameter], optimizer_kwargs: Mapping[str, Any],
    register_hook: bool = True,
) -> None:  # fmt: skip
    """Attach an optimizer to parameters; see `tilerec.apply_optimizer_in_backward`. Adadelta and RMSprop work, too.

    Args:
        optimizer_kwargs: settings. For tables, a missing `lr` is 0.01 and a missing `eps` is 1e-8.
    """
    given = list(params)
    tables = [parameter for parameter in given if rows_of(parameter) is not None]
    others = [parameter for parameter in given if rows_of(parameter) is None]
    if tables:
        settings = {
            **_DEFAULTS.get(optimizer_class if isinstance(optimizer_class, type) else None, {}),
            **optimizer_kwargs,
        }
        described = row_rule_of(optimizer_class, settings)
        if described is not None:
            attach.apply_optimizer_in_backward(described, tables, None, register_hook)
        else:
            attach.apply_optimizer_in_backward(optimizer_class, tables, settings, register_hook)
    if others:
        attach.apply_optimizer_in_backward(optimizer_class, others, dict(optimizer_kwargs), register_hook)
