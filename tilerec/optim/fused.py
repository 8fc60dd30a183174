"""The `torch.optim.Optimizer` face over updates that run at the end of the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tilerec.optim.keyed import KeyedOptimizer
from tilerec.storage.table_rows import HyperGroup, TableRows


def attached_rows(module: nn.Module) -> Iterator[tuple[str, TableRows]]:
    """Parameter names and rows of the tables under `module` that have an optimizer attached; a tied table once."""
    for name, parameter in module.named_parameters():
        rows = getattr(parameter, "_tilerec_rows", None)
        if rows is not None and rows.spec is not None:
            yield name, rows


class FusedOptimizer(KeyedOptimizer):
    """What attached tables look like to training code.

    `step()` and `zero_grad()` do nothing: the backward pass has updated the rows. A value written to `param_groups[i]["lr"]`
    holds from the next backward on, so torch's learning-rate schedulers work. The state is that of the tables, not a copy:
    per parameter its slots by name and `step`, the number of its updates (int64, 0-d). Tables attached by one call share
    a group.
    """

    def __init__(self, module: nn.Module) -> None:
        self._rows = dict(attached_rows(module))
        params: dict[str, Tensor] = {}
        state: dict[Tensor, Any] = {}
        groups: dict[int, HyperGroup] = {}
        for name, rows in self._rows.items():
            leaf = rows.leaf
            params[name] = leaf
            state[leaf] = self._state_of(rows)
            assert rows.group is not None
            group = groups.setdefault(id(rows.group), rows.group)
            if id(group) not in {id(g) for g in groups.values() if "params" in g} or "params" not in group:
                group["params"] = []
        for group in groups.values():
            group["params"] = []
        for rows in self._rows.values():
            assert rows.group is not None
            rows.group["params"].append(rows.leaf)
        super().__init__(params, state, list(groups.values()))
        self.param_groups = list(groups.values())

    @staticmethod
    def _state_of(rows: TableRows) -> dict[str, Tensor]:
        assert rows.spec is not None
        slots = {slot.name: tensor for slot, tensor in zip(rows.spec.slots, rows.slots, strict=True)}
        return {**slots, "step": torch.tensor(rows.updates)} if "step" not in slots else slots
