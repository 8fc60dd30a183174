"""The `torch.optim.Optimizer` face over updates that run at the end of the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, final

from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.optim.keyed import KeyedOptimizer
from tilerec.storage.hyper_group import HyperGroup
from tilerec.storage.table_rows import TableRows, rows_of


def attached_rows(module: nn.Module) -> Iterator[tuple[str, TableRows]]:
    """Parameter names and rows of the tables under `module` that have an optimizer attached; a tied table once."""
    for name, parameter in module.named_parameters():
        rows = rows_of(parameter)
        if rows is not None and rows.spec is not None:
            yield name, rows


@final
class CachedState(MutableMapping[str, Any]):
    """The state of a cached table: slots are read and written where they are at home, with the newest rows."""

    def __init__(self, rows: TableRows) -> None:
        self.rows = rows

    def __getitem__(self, name: str) -> Any:
        value = self.rows.state[name]
        if value.dim():
            self.rows.settle()
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        self.rows.settle()
        self.rows.state[name] = value

    def __delitem__(self, name: str) -> None:
        raise ConfigError(f"Table '{self.rows.name}': its state '{name}' belongs to the attached optimizer.")

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows.state)

    def __len__(self) -> int:
        return len(self.rows.state)


@final
class FaceGroup(MutableMapping[str, Any]):
    """A `param_groups` entry: the numbers that tables share, and those of its tables that are under one face."""

    def __init__(self, numbers: HyperGroup, params: list[nn.Parameter]) -> None:
        self.numbers = numbers
        self.params = params

    def __getitem__(self, name: str) -> Any:
        return self.params if name == "params" else self.numbers[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "params":
            self.params = value
        else:
            self.numbers[name] = value

    def __delitem__(self, name: str) -> None:
        del self.numbers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(["params", *self.numbers])

    def __len__(self) -> int:
        return 1 + len(self.numbers)

    def __repr__(self) -> str:
        return repr(dict(self))


OF_THIS_RUN = frozenset({"capturable"})
"""Settings that say how a run goes, and not what it comes to: a captured graph goes on by its counts after a load."""


class FusedOptimizer(KeyedOptimizer):
    """What attached tables look like to training code.

    `step()` does nothing: the backward pass has updated the rows. A value written to `param_groups[i]["lr"]`
    holds from the next backward on, so torch's learning-rate schedulers work; tables attached by one call
    share a group, also where several faces show them. The state is that of the tables, not a copy: per parameter its
    slots by name and `step`, the table's update count (int64, 0-d; called `updates` where `step` is a slot of its own).
    `load_state_dict` writes into it. Whether it is `capturable` is not loaded: where counts lie is this run's choice.
    """

    _of_this_run = OF_THIS_RUN

    def __init__(self, module: nn.Module) -> None:
        rows = dict(attached_rows(module))
        groups: dict[int, HyperGroup] = {}
        members: dict[int, list[nn.Parameter]] = {}
        params: dict[str, Tensor] = {}
        state: dict[Tensor, Any] = {}
        for name, own in rows.items():
            assert own.group is not None
            groups[id(own.group)] = own.group
            members.setdefault(id(own.group), []).append(own.leaf)
            params[name] = own.leaf
            state[own.leaf] = own.state if own.cache is None else CachedState(own)
        super().__init__(params, state, [FaceGroup(group, members[mark]) for mark, group in groups.items()])
        self.defaults = dict(next(iter(groups.values()), {}))
        self._rows = list(rows.values())

    def _settle(self) -> None:
        """Tables may have got a cache since this face was made."""
        for rows in self._rows:
            rows.settle()

    def _state_dict(self) -> dict[str, Any]:
        self._settle()
        return super()._state_dict()

    def _plan_load(self, given: Mapping[str, Any], plan: list[Callable[[], None]]) -> None:
        self._settle()
        super()._plan_load(given, plan)

    def add_param_group(self, param_group: Any) -> None:
        """Refused: tables get an optimizer by `apply_optimizer_in_backward`."""
        raise ConfigError(
            "FusedOptimizer: add_param_group would name a parameter that no backward pass updates; attach an "
            "optimizer to it with apply_optimizer_in_backward(cls, [parameter], kwargs) and ask for "
            "fused_optimizer again."
        )
