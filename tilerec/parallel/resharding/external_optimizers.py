"""The user's own torch optimizers: move their parameters and state when the tables that they step are resharded.

Nouns
  stepper  a torch optimizer that has leaves of an unattached table among its parameters, and its state for them

A table's first leaf stays the same object under every tiling. Further leaves are added to, and removed from, the param
group of the first leaf. A `KeyedOptimizer` around a stepper also keeps the leaves by name.

State moves like the weights: tensors of a tile's shape, and numbers per row if each tile holds whole rows. Counts are
equal on every tile.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tilerec.errors import ConfigError
from tilerec.optim.combined import CombinedOptimizer
from tilerec.optim.fused import FusedOptimizer
from tilerec.optim.keyed import KeyedOptimizer
from tilerec.optim.sharded_state import empty_tile_leaves
from tilerec.optim.step_checks import check_optimizers_at_next_step
from tilerec.optim.tile_steppers import own_parameters, steppers_of
from tilerec.optim.wrapper import KeyedOptimizerWrapper, OptimizerWrapper
from tilerec.parallel.model_tables import table_word
from tilerec.sharding.embedding import ShardedCollection
from tilerec.sharding.fused_optimizer import ShardedFusedOptimizer
from tilerec.sharding.table import ShardedTable, leaf_name


class StepperState(NamedTuple):
    """State of a stepper for a table's tiles on this rank, by name.

    Args:
        cells: per tile, a tensor of the tile's shape.
        rows: per tile, a tensor with one number per row.
        numbers: one value for all tiles: a tensor of no dimensions, or no tensor at all.
    """

    cells: dict[str, list[Tensor]]
    rows: dict[str, list[Tensor]]
    numbers: dict[str, Any]


def unwrap_optimizers(given: Iterable[Optimizer]) -> list[Optimizer]:
    """Return the optimizers that hold parameters: those inside combinations and wrappers, and `KeyedOptimizerWrapper`s.

    Attached optimizers are left out.

    Raises:
        ConfigError: an object is not an optimizer.
    """
    found: list[Optimizer] = []
    for optimizer in given:
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"reshard: optimizers: got a {type(optimizer).__name__}; expected torch optimizers or KeyedOptimizers."
            )
        if isinstance(optimizer, (FusedOptimizer, ShardedFusedOptimizer)):
            continue
        if isinstance(optimizer, CombinedOptimizer):
            found += unwrap_optimizers(inner for _, inner in optimizer.optimizers)
        elif isinstance(optimizer, OptimizerWrapper):
            found += unwrap_optimizers([optimizer._optimizer])
        elif isinstance(optimizer, KeyedOptimizerWrapper):
            found += [optimizer, *unwrap_optimizers([optimizer._optimizer])]
        else:
            found.append(optimizer)
    unique: dict[int, Optimizer] = {id(optimizer): optimizer for optimizer in found}
    return list(unique.values())


def unattached_tables(collections: Mapping[str, ShardedCollection]) -> dict[str, ShardedTable]:
    """Return the tables without an attached optimizer, by their names in messages."""
    return {
        table_word((path, name)): cast(ShardedTable, table)
        for path, part in collections.items()
        for name, table in part._tables.items()
        if table.rows.spec is None
    }


def check_given(
    tables: Mapping[str, ShardedTable], given: Sequence[Optimizer] | None, caller: str = "reshard"
) -> list[Optimizer]:
    """Return the given optimizers without combinations and wrappers, in the given order.

    Warns if the list lacks a known stepper of a table: its next step will raise.

    Args:
        tables: name in messages -> table.
        caller: name of the public function, for errors.

    Raises:
        ConfigError: an object is not an optimizer; or `given` is None, and optimizers are known to step the tables.
    """
    found = unwrap_optimizers(given or ())
    known = {id(optimizer) for optimizer in found}
    missing = {
        (type(optimizer).__name__, name)
        for name, table in tables.items()
        for optimizer in steppers_of(table).known()
        if id(optimizer) not in known
    }
    if not missing:
        return found
    kinds = ", ".join(sorted({kind for kind, _ in missing}))
    if given is None:
        raise ConfigError(
            f"{caller}: optimizers: got None, but {kinds} steps table {min(name for _, name in missing)}; expected the "
            "optimizers whose parameters and state move along. Pass optimizers=[...], in the same order on every rank."
        )
    warnings.warn(
        f"{caller}: {kinds} has stepped tiles of tables that move and is not in optimizers=. It will keep parameters "
        "and state of tiles that no longer exist, so its next step raises. Pass it too, or delete it.",
        stacklevel=5,
    )
    return found


class ExternalOptimizers:
    """The optimizers that step the moving tables, in the same order on every rank.

    Args:
        tables: name in messages -> table.
        given: the optimizers in the user's order. None: none steps the tables.

    Raises:
        ConfigError: as `check_given`; or an optimizer lacks leaves of a table.
    """

    def __init__(self, tables: Mapping[str, ShardedTable], given: Sequence[Optimizer] | None) -> None:
        self._tables = dict(tables)
        own = {id(leaf): name for name, table in tables.items() for leaf in table.leaves()}
        named = [
            (tuple(sorted({own[id(p)] for p in own_parameters(optimizer) if id(p) in own})), optimizer)
            for optimizer in check_given(tables, given)
        ]
        self._members = [members for members, _ in named if members]
        self._optimizers = [optimizer for members, optimizer in named if members]
        for number, optimizer in enumerate(self._optimizers):
            self._check_leaves(number, optimizer)

    def described(self) -> list[Any]:
        """Return a description of the optimizers that must be equal on every rank."""
        return [
            {"optimizer": type(optimizer).__name__, "tables": list(members)}
            for optimizer, members in zip(self._optimizers, self._members, strict=True)
        ]

    def of(self, name: str) -> list[int]:
        """Return the numbers of the optimizers that hold a table's leaves."""
        return [n for n, members in enumerate(self._members) if name in members]

    def word(self, number: int) -> str:
        """Return an optimizer's type name, for messages."""
        return type(self._optimizers[number]).__name__

    def _check_leaves(self, number: int, optimizer: Optimizer) -> None:
        for name in self._members[number]:
            leaves = self._tables[name].leaves()
            here = {id(p) for p in own_parameters(optimizer)}
            if not all(id(leaf) in here for leaf in leaves):
                raise ConfigError(
                    f"reshard: {self.word(number)}: got some of the {len(leaves)} tiles of table {name}; expected all. "
                    "Give it all parameters of the table (module.named_parameters())."
                )
            if not isinstance(optimizer, KeyedOptimizer):
                groups = {self._group_of(optimizer, leaf) for leaf in leaves}
                if len(groups) > 1:
                    raise ConfigError(
                        f"reshard: {self.word(number)}: got the tiles of table {name} in {len(groups)} param groups; "
                        "expected one, which new tiles will join. Put them into one group."
                    )

    @staticmethod
    def _group_of(optimizer: Optimizer, leaf: Tensor) -> int:
        return next(g for g, group in enumerate(optimizer.param_groups) if any(p is leaf for p in group["params"]))

    # ------------------------------------------------------------------------------------------------------- state

    def held(self, number: int, name: str) -> StepperState:
        """Return the state that one optimizer keeps for a table's tiles on this rank.

        Raises:
            ConfigError: some state belongs neither to cells, nor to rows, nor to the whole table.
        """
        optimizer, table = self._optimizers[number], self._tables[name]
        own_state = vars(optimizer).get("state")
        found = StepperState({}, {}, {})
        if own_state is None or not table.tiles:
            return found
        leaves = table.leaves()
        states = [cast("Mapping[str, Any]", own_state.get(leaf) or {}) for leaf in leaves]
        if any(set(state) != set(states[0]) for state in states):
            raise ConfigError(
                f"reshard: {self.word(number)}: got state of some tiles of table {name} only; expected all or none. "
                "Take a step, or call init_state()."
            )
        for key in states[0]:
            values = [state[key] for state in states]
            where = f"reshard: the state '{key}' that {self.word(number)} keeps of table {name}"
            self._classify(found, key, values, leaves, where)
        return found

    def initial(self, number: int, name: str, key: str) -> float:
        """Return a state's value for cells without a step so far."""
        optimizer = self._optimizers[number]
        group = optimizer.param_groups[self._group_of(optimizer, self._tables[name].leaves()[0])]
        options = {"sum": "initial_accumulator_value", "step_size": "lr"}  # Adagrad's, Rprop's
        return float(group.get(options.get(key, ""), 0.0))

    @staticmethod
    def _classify(found: StepperState, key: str, values: list[Any], leaves: Sequence[Tensor], where: str) -> None:
        if not any(isinstance(value, Tensor) for value in values):
            if any(isinstance(value, (Mapping, list, tuple, set)) for value in values):
                raise ConfigError(
                    f"{where}: got a {type(values[0]).__name__}; expected tensors or numbers. Nothing else can move."
                )
            found.numbers[key] = values[0]
        elif all(isinstance(value, Tensor) and value.dim() == 0 for value in values):
            found.numbers[key] = values[0]
        elif all(value.layout is not torch.strided for value in values):
            raise ConfigError(f"{where}: got a sparse tensor, which cannot move; expected a dense one.")
        elif all(value.shape == leaf.shape for value, leaf in zip(values, leaves, strict=True)):
            found.cells[key] = values
        elif all(
            value.shape in ((leaf.shape[0],), (leaf.shape[0], 1)) for value, leaf in zip(values, leaves, strict=True)
        ):
            found.rows[key] = values
        else:
            raise ConfigError(
                f"{where}: got shape {tuple(values[0].shape)} for a tile of shape {tuple(leaves[0].shape)}; expected "
                "the tile's shape, a number per row, or one number. Other state cannot move with the table's cells. "
                "Attach an optimizer (apply_optimizer_in_backward), use one that works element by element, or leave "
                "the table where it is."
            )

    # ------------------------------------------------------------------------------------------------------- change

    def follow(
        self, name: str, before: Sequence[nn.Parameter], after: Sequence[nn.Parameter],
        states: Mapping[int, Sequence[dict[str, Any]]],
    ) -> None:  # fmt: skip
        """Replace a table's leaves in the param groups, names and state of its optimizers.

        Args:
            states: new state by optimizer number, one dict per leaf.
        """
        table = self._tables.get(name)
        if table is not None:
            steppers_of(table).follow(self._optimizers[number] for number in self.of(name))
            check_optimizers_at_next_step()
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
        """Update the empty leaves that `KeyedOptimizerWrapper`s keep a list of."""
        for optimizer in self._optimizers:
            if isinstance(optimizer, KeyedOptimizerWrapper):
                optimizer._bystanders = empty_tile_leaves(optimizer.params.values())


def _replace(optimizer: Optimizer, before: Sequence[nn.Parameter], after: Sequence[nn.Parameter]) -> None:
    """Replace the leaves of a table in its param group, in place: torch and schedulers keep references to the list."""
    first = before[0]
    for group in optimizer.param_groups:
        params = group["params"]
        at = next((i for i, p in enumerate(params) if p is first), None)
        if at is None:
            continue
        # Remove new leaves too: if two optimizers share the group, the first one has already inserted them.
        old = {id(leaf) for leaf in (*before, *after)}
        kept = [id(p) not in old for p in params]
        place = sum(kept[:at])
        names = group.get("param_names")
        if names is not None:
            rest_of_names = list(itertools.compress(names, kept))
            own = [_leaf_of(names[at], i) for i in range(len(after))]
            names[:] = [*rest_of_names[:place], *own, *rest_of_names[place:]]
        rest = list(itertools.compress(params, kept))
        changed = [*rest[:place], *after, *rest[place:]]
        if isinstance(params, list):
            params[:] = changed
        else:
            group["params"] = changed


def _rename(optimizer: KeyedOptimizer, before: Sequence[nn.Parameter], after: Sequence[nn.Parameter]) -> None:
    """Replace the leaves of a table in `params`, at the position of the first leaf."""
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
    """Return the name of leaf i from the name of the first leaf: `ebc.t.weight` -> `ebc.t.weight.1`."""
    return (
        first[: -len(leaf_name(0))] + leaf_name(i)
        if first.endswith(leaf_name(0))
        else f"{first}.{i}" * bool(i) or first
    )


def number_like(value: Any, leaf: Tensor) -> Any:
    """Return a copy of a value that all tiles share, for one tile: on its device, but counts on the CPU stay there."""
    if isinstance(value, Tensor):
        return value.clone() if value.device.type == "cpu" else value.to(leaf.device, copy=True)
    return copy.deepcopy(value)
