"""`torch.optim.Optimizer` over the attached optimizers of sharded tables: one entry per table, state of logical shape.

names   `<path>.<table>.weight`, as in the unsharded model, on every rank
state   slots by name, in the forms that `state_dict()` uses for weights (plain, DTensor, `TiledTensor`), and the update
        count
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, final

from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.optim.fused import RUN_SETTINGS, ParamGroupView, attached_rows
from tilerec.optim.keyed import KeyedOptimizer
from tilerec.optim.loading_plan import same_keys
from tilerec.optim.sharded_state import TiledTable
from tilerec.sharding.state import load, shown
from tilerec.sharding.table import ShardedTable
from tilerec.storage.shared_param_group import SharedParamGroup
from tilerec.torch_private import optimizer_hooks


@final
class TableState(MutableMapping[str, Any]):
    """Optimizer state of one sharded table, by slot. Each read returns a logical tensor over the slot's memory."""

    def __init__(self, table: ShardedTable) -> None:
        self.table = table

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.table.rows.state:
            raise KeyError(name)
        return shown(self.table.state_of(name))

    def __setitem__(self, name: str, value: Tensor) -> None:
        load(self.table.state_of(name), value)

    def __delitem__(self, name: str) -> None:
        raise ConfigError(f"Table '{self.table.config.name}': its state '{name}' belongs to the attached optimizer.")

    def __iter__(self) -> Iterator[str]:
        return iter(self.table.rows.state)

    def __len__(self) -> int:
        return len(self.table.rows.state)


@final
class ShardedFusedOptimizer(KeyedOptimizer):
    """The attached optimizers of a sharded model, as one optimizer for training code.

    As in `FusedOptimizer`, `step()` does nothing, and a new `lr` takes effect at the next backward (write it on every
    rank). State dicts have every table on every rank. Loading accepts whole tensors, DTensors and tensors of other
    tilings. Unsharded tables are included.
    """

    _of_this_run = RUN_SETTINGS

    def __init__(self, module: nn.Module) -> None:
        tables = sharded_tables(module)
        groups: dict[int, SharedParamGroup] = {}
        members: dict[int, list[nn.Parameter]] = {}
        params: dict[str, Tensor] = {}
        state: dict[Tensor, Any] = {}
        for name, rows in attached_rows(module):
            table = tables.get(id(rows))
            if table is not None and table.rows is not rows:
                continue  # only the first tile of a table is listed
            assert rows.group is not None
            groups[id(rows.group)] = rows.group
            members.setdefault(id(rows.group), []).append(rows.leaf)
            params[name] = rows.leaf
            state[rows.leaf] = rows.state if table is None else TableState(table)
        super().__init__(params, state, [ParamGroupView(group, members[mark]) for mark, group in groups.items()])
        self.defaults = dict(next(iter(groups.values()), {}))

    def add_param_group(self, param_group: Any) -> None:
        """Raise a `ConfigError`: tables get an optimizer from `apply_optimizer_in_backward`."""
        raise ConfigError(
            "ShardedFusedOptimizer: add_param_group would add a parameter that no backward pass updates; attach an "
            "optimizer to it with apply_optimizer_in_backward(cls, [parameter], kwargs) and read fused_optimizer "
            "again."
        )

    def full_state_dict(self) -> dict[str, Any]:
        """Return `state_dict()` with whole plain tensors, on every rank. Collective."""
        for before in optimizer_hooks(self, "state_dict_pre").values():
            before(self)
        whole: dict[str, Any] = {"state": {}}
        for name, leaf in self.params.items():
            state = self.state[leaf]
            if isinstance(state, TableState):
                whole["state"][name] = {slot: state.table.state_of(slot).full() for slot in state}
            else:
                whole["state"][name] = dict(state)
        return whole

    def _tables(self) -> dict[str, TiledTable]:
        return {}  # `TableState` covers all tiles of a table

    def _plan_load(self, given: Mapping[str, Any], plan: list[Callable[[], None]]) -> None:
        who = type(self).__name__
        loaded = given.get("state")
        if not isinstance(loaded, Mapping):
            raise ConfigError(f"{who}: the state dict has no 'state' (it has {sorted(given)}); pass a state_dict().")
        same_keys(f"{who}: state", set(self.params), loaded)
        unsharded: dict[str, Any] = {}
        for name in self.params:
            state = self.state[self.params[name]]
            if not isinstance(state, TableState):
                unsharded[name] = loaded[name]
                continue
            where = f"{who}: state of '{name}'"
            if not isinstance(loaded[name], Mapping):
                raise ConfigError(f"{where}: got {type(loaded[name]).__name__}; expected a dict with {sorted(state)}.")
            same_keys(where, set(state), loaded[name])
            for slot in sorted(state):
                logical = state.table.state_of(slot)
                value = _tensor_of(loaded[name][slot], logical.cover.shape, logical.like, f"{where} / '{slot}'")
                plan.append(functools.partial(load, logical, value))
        groups = {key: value for key, value in given.items() if key != "state"}
        self._plan_unsharded(unsharded, groups, plan)

    def _plan_unsharded(
        self, loaded: Mapping[str, Any], groups: Mapping[str, Any], plan: list[Callable[[], None]]
    ) -> None:
        """Plan the load of the unsharded tables and of the groups as `KeyedOptimizer` does."""
        params, state = self.params, self.state
        own = {name: params[name] for name in loaded}
        rest = KeyedOptimizer(own, {p: state[p] for p in own.values()}, [])
        rest._plan_load({"state": loaded}, plan)
        if self._save_groups:
            if "param_groups" not in groups:
                raise ConfigError(
                    f"{type(self).__name__}: save_param_groups(True) is set, but the state dict has no 'param_groups'; "
                    "save it with them, or call save_param_groups(False) before loading."
                )
            self._plan_groups(groups["param_groups"], plan)


def _tensor_of(value: Any, shape: tuple[int, ...], like: Tensor, where: str) -> Tensor:
    """Return a loaded value as a tensor of `shape`, or raise a `ConfigError`."""
    if isinstance(value, (int, float)) and not shape:
        return like.new_tensor(value)
    if isinstance(value, Tensor) and shape and tuple(value.shape) == (*shape, 1) and type(value) is Tensor:
        value = value.squeeze(-1)  # state per row kept as a column, as TorchRec's row-wise Adagrad does
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
        raise ConfigError(f"{where}: got {got}; expected a tensor of shape {shape}.")
    return value


def sharded_tables(module: nn.Module) -> dict[int, ShardedTable]:
    """Return the sharded tables below a module, by the `id` of each of their `tile_rows`."""
    return {
        id(rows): table for table in module.modules() if isinstance(table, ShardedTable) for rows in table.tile_rows
    }
