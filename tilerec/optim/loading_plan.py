"""Settings and state of optimizers as nested containers: copies, comparisons, and writes that are planned first.

`load_state_dict` appends its writes to a list (`plan`) while it checks, and runs them when all checks have passed.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.optim.sharded_state import TiledTable, is_stateful, write_parts


def write_setting(group: MutableMapping[str, Any], setting: str, value: Any) -> None:
    """Write a setting of a param group; a tensor is written in place, since captured graphs refer to it."""
    if isinstance(group.get(setting), Tensor) and not isinstance(value, Tensor):
        group[setting].fill_(value)
    else:
        group[setting] = value


def set_step(state: Any, step: int) -> None:
    """Write the step count of a parameter's state, if it has one."""
    if isinstance(state, MutableMapping) and "step" in state:
        write_setting(state, "step", step)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a param group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def copied(value: Any, shown: Callable[[Any], Any] = lambda item: item) -> Any:
    """Copy the containers, not the tensors and numbers; `shown` is applied to each of these."""
    if isinstance(value, Mapping):
        ordered = isinstance(value, OrderedDict)
        return (OrderedDict if ordered else dict)((key, copied(item, shown)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(copied(item, shown) for item in value)
    return shown(value)


def shown_object(value: Any) -> Any:
    """Return the state dict of an object that has one, other values unchanged."""
    return value.state_dict() if is_stateful(value) else value


def adopted(value: Any, parameter: Tensor) -> Any:
    """Clone loaded state for a parameter without state. A step count keeps its device (for torch the CPU)."""
    if isinstance(value, Mapping):
        return {
            key: item.detach().clone() if key == "step" and isinstance(item, Tensor) else adopted(item, parameter)
            for key, item in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(adopted(item, parameter) for item in value)
    return value.detach().to(parameter.device, copy=True) if isinstance(value, Tensor) else value


def plan_value(holder: Any, key: Any, loaded: Any, where: str, plan: list[Callable[[], None]]) -> None:
    """Plan to load `loaded` into `holder[key]`, tensors in place."""
    current = holder[key]
    if isinstance(current, Tensor):
        if isinstance(loaded, (int, float)) and current.dim() == 0:
            plan.append(lambda: _discard(current.fill_(loaded)))
            return
        if isinstance(loaded, Tensor) and current.dim() and loaded.shape == (*current.shape, 1):
            loaded = loaded.squeeze(-1)  # TorchRec's row-wise Adagrad stores state per row as a column
        if hasattr(loaded, "full_tensor"):
            raise ConfigError(
                f"{where}: got a {type(loaded).__name__}, whose parts are on several ranks; expected a whole tensor. "
                "Gather it with .full_tensor() on all ranks, or shard this model first."
            )
        if not isinstance(loaded, Tensor) or loaded.shape != current.shape:
            got = f"shape {tuple(loaded.shape)}" if isinstance(loaded, Tensor) else f"{loaded!r}"
            raise ConfigError(
                f"{where}: got {got}; expected a tensor of shape {tuple(current.shape)}. Load state of the same model."
            )
        plan.append(lambda: _discard(current.detach().copy_(loaded)))
    elif is_stateful(current):
        if not isinstance(loaded, Mapping):
            raise ConfigError(
                f"{where}: got {type(loaded).__name__}; expected the state dict of a {type(current).__name__}. Save it "
                "with state_dict() of this optimizer."
            )
        plan.append(lambda: _discard(current.load_state_dict(loaded)))
    elif isinstance(current, Mapping):
        if not isinstance(loaded, Mapping):
            raise ConfigError(
                f"{where}: got {type(loaded).__name__}; expected a dict with {sorted(map(str, current))}. Load state "
                "of the same optimizer."
            )
        same_keys(where, set(current), loaded)
        for name, value in loaded.items():
            plan_value(current, name, value, f"{where} / '{name}'", plan)
    elif isinstance(current, list):
        if not isinstance(loaded, (list, tuple)) or len(loaded) != len(current):
            raise ConfigError(
                f"{where}: got {loaded!r:.80}; expected a list of {len(current)}. Load state of the same optimizer."
            )
        for index, value in enumerate(loaded):
            plan_value(current, index, value, f"{where} / {index}", plan)
    else:
        plan.append(setter(holder, key, loaded.detach().clone() if isinstance(loaded, Tensor) else copied(loaded)))


def plan_parts(table: TiledTable, parts: list[Any], loaded: Any, where: str, plan: list[Callable[[], None]]) -> None:
    """Plan to load `loaded`, state of a whole table, into the state of its tiles."""
    if not isinstance(loaded, Mapping):
        raise ConfigError(
            f"{where}: got {type(loaded).__name__}; expected a dict with {sorted(map(str, parts[0]))}. Load state of "
            "the same optimizer."
        )
    same_keys(where, set(parts[0]), loaded)
    for name in sorted(loaded, key=str):
        value, beside, what = loaded[name], [part.get(name) for part in parts], f"{where} / '{name}'"
        if isinstance(beside[0], Mapping):
            plan_parts(table, beside, value, what, plan)
        elif isinstance(beside[0], Tensor):
            shape = table.shape_of(beside, what)
            if type(value) is Tensor and shape and tuple(value.shape) == (*shape, 1):
                value = value.squeeze(-1)  # as in `_plan_value`
            scalar = isinstance(value, (int, float)) and not shape
            if not scalar and (not isinstance(value, Tensor) or tuple(value.shape) != shape):
                got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
                raise ConfigError(
                    f"{what}: got {got}; expected a tensor of shape {shape}. Load state of the same model."
                )
            plan.append(functools.partial(write_parts, table, beside, value))
        elif isinstance(value, Tensor) and value.dim():
            raise ConfigError(
                f"{what}: got shape {tuple(value.shape)}; expected {beside[0]!r:.80}. Load state of the same optimizer."
            )
        else:
            number = value.item() if isinstance(value, Tensor) else value
            plan.extend(setter(part, name, copied(number)) for part in parts)


def setter(holder: Any, key: Any, value: Any) -> Callable[[], None]:
    """Return the write `holder[key] = value`."""

    def write() -> None:
        holder[key] = value

    return write


def _discard(_: object) -> None:
    return None


def same_keys(where: str, here: set[Any], loaded: Mapping[Any, Any], optional: set[Any] | None = None) -> None:
    """Raise a `ConfigError` unless the loaded keys are those in `here`, with or without those in `optional`."""
    missing, extra = here - set(loaded), set(loaded) - here - (optional or set())
    if missing or extra:
        raise ConfigError(
            f"{where}: the loaded one "
            + " and ".join(
                f"{verb} {sorted(map(str, names))}"
                for verb, names in (("lacks", missing), ("also has", extra))
                if names
            )
            + f"; expected {sorted(map(str, here))}. Load state of the same optimizer and model."
        )
