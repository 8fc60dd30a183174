"""`FusedOptimizer`: the `torch.optim.Optimizer` interface of updates at the end of the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, final

from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.optim.keyed import KeyedOptimizer
from tilerec.storage.shared_param_group import SharedParamGroup
from tilerec.storage.table_rows import TableRows, rows_of


def attached_rows(module: nn.Module) -> Iterator[tuple[str, TableRows]]:
    """Iterate over (parameter name, rows) of tables in `module` with an attached optimizer; each tied table once."""
    for name, parameter in module.named_parameters():
        rows = rows_of(parameter)
        if rows is not None and rows.spec is not None:
            yield name, rows


@final
class CachedStateView(MutableMapping[str, Any]):
    """State of a table with a cache. Each access first settles pending writes, so slots hold the newest rows."""

    def __init__(self, rows: TableRows) -> None:
        self.rows = rows

    def __getitem__(self, name: str) -> Any:
        value = self.rows.state[name]
        if value.dim():
            self.rows.settle()
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        self.rows.settle()
        self.rows.about_to_write()
        self.rows.state[name] = value
        self.rows.bind(self.rows.leaf)  # a row in a file and its state are one record

    def __delitem__(self, name: str) -> None:
        raise ConfigError(
            f"Table '{self.rows.name}': got a deletion of state '{name}'; expected it to stay, as the attached "
            "optimizer uses it. Attach another optimizer with replace=True."
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows.state)

    def __len__(self) -> int:
        return len(self.rows.state)


@final
class ParamGroupView(MutableMapping[str, Any]):
    """Entry of `param_groups`: settings shared by several tables, and the tables of them in one `FusedOptimizer`."""

    def __init__(self, numbers: SharedParamGroup, params: list[nn.Parameter]) -> None:
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


RUN_SETTINGS = frozenset({"capturable"})
"""Settings of a process, not of its results; loading keeps them, so a captured graph still uses its own counts."""


class FusedOptimizer(KeyedOptimizer):
    """Optimizer interface of the tables in a module that have an attached optimizer.

    `step()` does nothing: the backward pass has already updated the rows. A value written to `param_groups[i]["lr"]`
    applies from the next backward pass on, so torch's learning-rate schedulers work. Tables attached by one call share
    a group, also across several `FusedOptimizer`s.

    The state is that of the tables, not a copy: per parameter its slots by name, and `step`, the table's update count
    (int64, 0-d; named `updates` if the rule has a slot `step`). `load_state_dict` writes to it. The setting
    `capturable` is not loaded: it decides the device of the counts in this process.
    """

    _of_this_run = RUN_SETTINGS

    def __init__(self, module: nn.Module) -> None:
        rows = dict(attached_rows(module))
        groups: dict[int, SharedParamGroup] = {}
        members: dict[int, list[nn.Parameter]] = {}
        params: dict[str, Tensor] = {}
        state: dict[Tensor, Any] = {}
        for name, own in rows.items():
            assert own.group is not None
            groups[id(own.group)] = own.group
            members.setdefault(id(own.group), []).append(own.leaf)
            params[name] = own.leaf
            state[own.leaf] = own.state if own.cache is None else CachedStateView(own)
        super().__init__(params, state, [ParamGroupView(group, members[mark]) for mark, group in groups.items()])
        self.defaults = dict(next(iter(groups.values()), {}))
        self._rows = list(rows.values())

    def _settle(self) -> None:
        """Settle pending writes of all tables. Tables may have got a cache after this optimizer was made."""
        for rows in self._rows:
            rows.settle()

    def _state_dict(self) -> dict[str, Any]:
        self._settle()
        return super()._state_dict()

    def _plan_load(self, given: Mapping[str, Any], plan: list[Callable[[], None]]) -> None:
        self._settle()
        for rows in self._rows:
            rows.about_to_write()
        super()._plan_load(given, plan)

    def add_param_group(self, param_group: Any) -> None:
        """Raise: `apply_optimizer_in_backward` attaches optimizers to tables."""
        raise ConfigError(
            "FusedOptimizer: got a param group; expected only parameters that the backward pass updates. Attach an "
            "optimizer with apply_optimizer_in_backward(cls, [parameter], kwargs) and get fused_optimizer again."
        )
