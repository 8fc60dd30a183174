"""Optimizers that step tiles of unattached tables, as a move of these tables meets them.

Nouns
  stepper  a torch optimizer with a table's leaves among its parameters, and state beside them
  namer    a `KeyedOptimizer` around one: it keeps the leaves by name

A table's first leaf stays the same object wherever its tiles go. Further leaves come and go: they are put into, and
taken out of, the param group that the first is in. State moves as the weights do: tensors of a tile's shape, and
numbers per row where whole rows lie together; counts are the same on every tile.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tilerec.errors import ConfigError
from tilerec.optim.combined import CombinedOptimizer
from tilerec.optim.fused import FusedOptimizer
from tilerec.optim.keyed import KeyedOptimizer
from tilerec.optim.tiled import empty_leaves
from tilerec.optim.wrapper import KeyedOptimizerWrapper, OptimizerWrapper
from tilerec.sharding.fused import ShardedFusedOptimizer
from tilerec.sharding.table import ShardedTable, leaf_name


class Held(NamedTuple):
    """What a stepper keeps beside the tiles of a table: tensors `[tiles]` by name, and what is no tensor or one number.

    cells: of the tile's shape. rows: one number per row.
    """

    cells: dict[str, list[Tensor]]
    rows: dict[str, list[Tensor]]
    numbers: dict[str, Any]


def optimizers_with(leaves: Iterable[nn.Parameter]) -> list[Optimizer]:
    """Every living optimizer of this process that has one of these parameters, or keeps state or names of them."""
    wanted = {id(leaf) for leaf in leaves}
    if wanted and _living(wanted):
        gc.collect()  # those that nobody uses any more do not count
        return _living(wanted)
    return []


def _living(wanted: set[int]) -> list[Optimizer]:
    """Optimizers with one of these parameters, those among them that wait for the collector."""
    classes: list[type] = [Optimizer]
    for kind in classes:
        classes += kind.__subclasses__()
    return [
        thing
        for thing in gc.get_referrers(*classes)  # instances refer to their class
        if issubclass(type(thing), Optimizer)
        and not isinstance(
            thing, (FusedOptimizer, ShardedFusedOptimizer, CombinedOptimizer, OptimizerWrapper)
        )
        and any(id(p) in wanted for p in _parameters(thing))
    ]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    if isinstance(optimizer, KeyedOptimizer):
        return list(optimizer.params.values())
    # One that another thread is still making has none yet.
    return [p for group in vars(optimizer).get("param_groups", ()) for p in group["params"]]


def unwrapped(given: Iterable[Optimizer]) -> list[Optimizer]:
    """Those that keep parameters of their own: what is inside of combined ones and wrappers, and the wrappers of names.

    Raises:
        ConfigError: something is no optimizer.
    """
    found: list[Optimizer] = []
    for optimizer in given:
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"reshard: optimizers has a {type(optimizer).__name__}; wanted torch's, or KeyedOptimizers."
            )
        if isinstance(optimizer, (FusedOptimizer, ShardedFusedOptimizer)):
            continue
        if isinstance(optimizer, CombinedOptimizer):
            found += unwrapped(inner for _, inner in optimizer.optimizers)
        elif isinstance(optimizer, OptimizerWrapper):
            found += unwrapped([optimizer._optimizer])
        elif isinstance(optimizer, KeyedOptimizerWrapper):
            found += [optimizer, *unwrapped([optimizer._optimizer])]
        else:
            found.append(optimizer)
    unique: dict[int, Optimizer] = {id(optimizer): optimizer for optimizer in found}
    return list(unique.values())


class Steppers:
    """All optimizers that have to do with the tables that move, in one order on every rank.

    Args:
        tables: name in messages -> table.
        given: in the user's order; None: those of this process that have the tables' leaves.

    Raises:
        ConfigError: two of them cannot be told apart; some leaves of a table are missing in one.
    """

    def __init__(self, tables: Mapping[str, ShardedTable], given: Sequence[Optimizer] | None) -> None:
        self._tables = dict(tables)
        leaves = [leaf for table in tables.values() for leaf in table.leaves()]
        found = optimizers_with(leaves)
        if given is not None:
            wanted = unwrapped(given)
            _warn_of_strangers(found, wanted)
            found = wanted
        own = {id(leaf): name for name, table in tables.items() for leaf in table.leaves()}
        named = [
            (type(opt).__name__, tuple(sorted({own[id(p)] for p in _parameters(opt) if id(p) in own})), opt)
            for opt in found
        ]
        named = [entry for entry in named if entry[1]]
        if given is None:
            named.sort(key=lambda entry: entry[:2])
            for (kind, members, _), (other, same, _) in pairwise(named):
                if (kind, members) == (other, same):
                    raise ConfigError(
                        f"reshard: two optimizers of type {kind} hold table {members[0]}, and there is no telling them "
                        "apart on all ranks; pass optimizers=[...], in one order on every rank."
                    )
        self._members = [entry[1] for entry in named]
        self._optimizers = [entry[2] for entry in named]
        for number, optimizer in enumerate(self._optimizers):
            self._check_leaves(number, optimizer)

    def described(self) -> list[Any]:
        """What must be the same on every rank."""
        return [
            {"optimizer": type(optimizer).__name__, "tables": list(members)}
            for optimizer, members in zip(self._optimizers, self._members, strict=True)
        ]

    def of(self, name: str) -> list[int]:
        """Numbers of those that have a table's leaves."""
        return [n for n, members in enumerate(self._members) if name in members]

    def word(self, number: int) -> str:
        """An optimizer's kind, for messages."""
        return type(self._optimizers[number]).__name__

    def _check_leaves(self, number: int, optimizer: Optimizer) -> None:
        for name in self._members[number]:
            leaves = self._tables[name].leaves()
            here = {id(p) for p in _parameters(optimizer)}
            if not all(id(leaf) in here for leaf in leaves):
                raise ConfigError(
                    f"reshard: {self.word(number)} has some of the {len(leaves)} tiles of table {name} and not all of "
                    "them; give it all parameters of the table (module.named_parameters())."
                )
            if not isinstance(optimizer, KeyedOptimizer):
                groups = {self._group_of(optimizer, leaf) for leaf in leaves}
                if len(groups) > 1:
                    raise ConfigError(
                        f"reshard: {self.word(number)} has the tiles of table {name} in {len(groups)} param groups, so "
                        "it is open which one new tiles belong to; put them into one."
                    )

    @staticmethod
    def _group_of(optimizer: Optimizer, leaf: Tensor) -> int:
        return next(
            g for g, group in enumerate(optimizer.param_groups) if any(p is leaf for p in group["params"])
        )

    # ------------------------------------------------------------------------------------------------------- state

    def held(self, number: int, name: str) -> Held:
        """What one keeps beside a table's tiles on this rank.

        Raises:
            ConfigError: state of which it is not known how it belongs to tiles.
        """
        optimizer, table = self._optimizers[number], self._tables[name]
        own_state = vars(optimizer).get("state")
        found = Held({}, {}, {})
        if own_state is None or not table.tiles:
            return found
        leaves = table.leaves()
        states = [cast("Mapping[str, Any]", own_state.get(leaf) or {}) for leaf in leaves]
        if any(set(state) != set(states[0]) for state in states):
            raise ConfigError(
                f"reshard: {self.word(number)} has state of some tiles of table {name} and not of others; take a step, "
                "or call init_state()."
            )
        for key in states[0]:
            values = [state[key] for state in states]
            what = f"reshard: the state '{key}' that {self.word(number)} keeps of table {name}"
            self._sort(found, key, values, leaves, what)
        return found

    def initial(self, number: int, name: str, key: str) -> float:
        """What a state has of cells that were never stepped."""
        optimizer = self._optimizers[number]
        group = optimizer.param_groups[self._group_of(optimizer, self._tables[name].leaves()[0])]
        options = {"sum": "initial_accumulator_value", "step_size": "lr"}  # Adagrad's, Rprop's
        return float(group.get(options.get(key, ""), 0.0))

    @staticmethod
    def _sort(found: Held, key: str, values: list[Any], leaves: Sequence[Tensor], what: str) -> None:
        if not any(isinstance(value, Tensor) for value in values):
            if any(isinstance(value, (Mapping, list, tuple, set)) for value in values):
                raise ConfigError(
                    f"{what} is a {type(values[0]).__name__}; only tensors and numbers can move."
                )
            found.numbers[key] = values[0]
        elif all(isinstance(value, Tensor) and value.dim() == 0 for value in values):
            found.numbers[key] = values[0]
        elif all(value.layout is not torch.strided for value in values):
            raise ConfigError(f"{what} is a sparse tensor, which cannot move; use a dense one.")
        elif all(value.shape == leaf.shape for value, leaf in zip(values, leaves, strict=True)):
            found.cells[key] = values
        elif all(
            value.shape in ((leaf.shape[0],), (leaf.shape[0], 1))
            for value, leaf in zip(values, leaves, strict=True)
        ):
            found.rows[key] = values
        else:
            raise ConfigError(
                f"{what} has shape {tuple(values[0].shape)} beside a tile of shape {tuple(leaves[0].shape)}: neither "
                "the tile's, nor a number per row, nor one number, so it cannot follow the table's cells elsewhere; "
                "attach an optimizer (apply_optimizer_in_backward), use one that works element by element, or leave "
                "the table where it is."
            )

    # ------------------------------------------------------------------------------------------------------- change

    def follow(
        self, name: str, before: Sequence[nn.Parameter], after: Sequence[nn.Parameter],
        states: Mapping[int, Sequence[dict[str, Any]]],
    ) -> None:  # fmt: skip
        """A table's leaves have changed: groups, names and state do so, too.

        Args:
            states: of each stepper that has any, one dict per leaf.
        """
        for number in self.of(name):
            optimizer = self._optimizers[number]
            if isinstance(optimizer, KeyedOptimizer):
                _rename(optimizer, before, after)
            if "param_groups" in vars(optimizer):
                _replace(optimizer, before, after)
            own_state = vars(optimizer).get("state")
            if own_state is None:
                continue
            for leaf in before:
                own_state.pop(leaf, None)
            for leaf, state in zip(after, states.get(number, ()), strict=False):
                own_state[leaf] = state

    def refresh(self) -> None:
        """Namers know which leaves are empty."""
        for optimizer in self._optimizers:
            if isinstance(optimizer, KeyedOptimizerWrapper):
                optimizer._bystanders = empty_leaves(optimizer.params.values())


def _warn_of_strangers(found: Sequence[Optimizer], given: Sequence[Optimizer]) -> None:
    known = {id(optimizer) for optimizer in given}
    strangers = sorted({type(optimizer).__name__ for optimizer in found if id(optimizer) not in known})
    if strangers:
        warnings.warn(
            f"reshard: {', '.join(strangers)} of this process holds tiles of tables that move and is not among "
            "optimizers=: its parameters and state will be those of tiles that are gone. Pass it too, or delete it.",
            stacklevel=5,
        )


def _replace(optimizer: Optimizer, before: Sequence[nn.Parameter], after: Sequence[nn.Parameter]) -> None:
    """The leaves of a table in its param group, in place: torch and schedulers hold on to the list."""
    first = before[0]
    for group in optimizer.param_groups:
        params = group["params"]
        at = next((i for i, p in enumerate(params) if p is first), None)
        if at is None:
            continue
        # New ones, too: optimizers may share their groups, and a second one finds them there.
        old = {id(leaf) for leaf in (*before, *after)}
        names = group.get("param_names")
        if names is not None:
            base = names[at]
            kept = [name for name, p in zip(names, params, strict=True) if id(p) not in old]
            place = sum(id(p) not in old for p in params[:at])
            names[:] = [*kept[:place], *(_leaf_of(base, i) for i in range(len(after))), *kept[place:]]
        place = sum(id(p) not in old for p in params[:at])
        rest = [p for p in params if id(p) not in old]
        changed = [*rest[:place], *after, *rest[place:]]
        if isinstance(params, list):
            params[:] = changed
        else:
            group["params"] = changed


def _rename(optimizer: KeyedOptimizer, before: Sequence[nn.Parameter], after: Sequence[nn.Parameter]) -> None:
    """The leaves of a table by name, in the place of its first."""
    if "params" not in vars(optimizer):
        return
    old = {id(leaf) for leaf in before}
    renamed: dict[str, Tensor] = {}
    for name, parameter in optimizer.params.items():
        if parameter is before[0]:
            renamed.update({_leaf_of(name, i): leaf for i, leaf in enumerate(after)})
        elif id(parameter) not in old:
            renamed[name] = parameter
    vars(optimizer)["params"] = renamed
    optimizer._stateless -= {id(leaf) for leaf in before}


def _leaf_of(first: str, i: int) -> str:
    """The name of leaf i, given that of the first: `ebc.t.weight` -> `ebc.t.weight.1`."""
    return (
        first[: -len(leaf_name(0))] + leaf_name(i)
        if first.endswith(leaf_name(0))
        else f"{first}.{i}" * bool(i) or first
    )


def number_like(value: Any, leaf: Tensor) -> Any:
    """A number that all tiles of a table share, for one of them: counts that lay on the CPU stay there."""
    if isinstance(value, Tensor):
        return value.clone() if value.device.type == "cpu" else value.to(leaf.device, copy=True)
    return copy.deepcopy(value)
