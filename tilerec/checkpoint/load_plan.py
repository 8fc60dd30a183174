"""`LoadPlan`: what a job reads from a saved state, planned and checked before anything is read.

tensors of the source by name  ->  names here (`Changes`)  ->  pieces of this rank to fill
tree of the source             ->  values of the parts, with the tensors that will be filled
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from tilerec.checkpoint.chain import Wanted
from tilerec.checkpoint.changes import Changes, matches
from tilerec.checkpoint.manifest import SavedTensor
from tilerec.checkpoint.parts import has_fixed_names
from tilerec.checkpoint.pieces import check_tensor, pieces_of
from tilerec.checkpoint.tree import Json, flatten, unflatten
from tilerec.errors import ConfigError
from tilerec.json_document import JsonValue

_NAMED = 6  # names in an error


class Source(Protocol):
    """A saved state to load: a `Chain` on disk, or the memory of ranks.

    path: for errors. tensors: by their saved names. state: the tree of all parts (tree.py). changes: those that the job
    that saved it had made, as in `Changes.note`; None for none.
    """

    @property
    def path(self) -> str: ...

    @property
    def tensors(self) -> Mapping[str, SavedTensor]: ...

    @property
    def state(self) -> JsonValue: ...

    @property
    def changes(self) -> Json: ...

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fill the pieces. Raises as `Chain.read`."""


class LoadPlan(NamedTuple):
    """What to read.

    Args:
        wanted: tensors to read, by their saved names.
        values: of each part, to give to it after the read.
        left: parts that are left as they are.
        changed: True if changes were needed.
    """

    wanted: list[Wanted]
    values: dict[str, Any]
    left: frozenset[str]
    changed: bool


def plan_load(source: Source, parts: Mapping[str, Any], states: Mapping[str, Any], changes: Changes) -> LoadPlan:
    """Return what to read into the parts of a job.

    Args:
        states: of the parts.
        changes: left out if the source notes them and fits without.

    Raises:
        ConfigError: the source does not fit.
    """
    if changes.note and source.changes == changes.note["changes"]:
        try:
            return _plan(source, parts, states, Changes())
        except ConfigError:  # the job has changed again
            pass
    return _plan(source, parts, states, changes)


def _plan(source: Source, parts: Mapping[str, Any], states: Mapping[str, Any], changes: Changes) -> LoadPlan:
    path, tensors = source.path, source.tensors
    saved_parts = source.state.members()["dict"].members()
    lacking = [name for name in parts if name not in saved_parts]
    if lacking:
        raise ConfigError(
            f"Checkpoint {path}: got the parts {', '.join(saved_parts)}; expected {', '.join(lacking)} among them. "
            "Leave them out of parts=, or load another checkpoint."
        )
    left = _dropped_parts(parts, tensors, changes)
    _, here = flatten({name: state for name, state in states.items() if name not in left})
    names: dict[str, str] = {}  # name here -> saved name
    for saved in tensors:
        name = changes.name_here(saved)
        if name is not None and name.split(".", 1)[0] in parts:
            names[name] = saved
    _check_names(path, parts, here, names, changes)
    wanted = [
        each
        for name, tensor in here.items()
        if name in names
        for each in _wanted(source, name, tensor, names[name], changes)
    ]
    made: dict[str, Tensor] = {}

    def tensor_of(saved: str, place: JsonValue) -> Tensor:
        name = changes.name_here(saved)
        if saved not in tensors:
            raise place.error("the name of a tensor of the checkpoint")
        if name in here:
            return here[name]
        if saved not in made:
            made[saved] = torch.empty(tensors[saved].shape, dtype=tensors[saved].dtype)
            wanted.extend(Wanted(piece, saved) for piece in pieces_of(saved, made[saved]))
        return made[saved]

    values: dict[str, Any] = {}
    for name in parts:
        if name in left:
            values[name] = states[name]
            continue
        value = unflatten(_renamed(saved_parts[name], name, changes), tensor_of)
        has_state = hasattr(parts[name], "load_state_dict")
        values[name] = _with_kept(value, states[name], name, names) if has_state else value
    return LoadPlan(wanted, values, frozenset(left), changes != Changes())


def _dropped_parts(parts: Mapping[str, Any], tensors: Mapping[str, SavedTensor], changes: Changes) -> set[str]:
    """Return the parts with a state of their own whose tensors are all dropped."""
    stays: dict[str, bool] = {}
    for saved in tensors:
        part = saved.split(".", 1)[0]
        stays[part] = stays.get(part, False) or changes.name_here(saved) is not None
    return {name for name, part in parts.items() if not stays.get(name, True) and hasattr(part, "load_state_dict")}


def _check_names(
    path: str, parts: Mapping[str, Any], here: Mapping[str, Tensor], names: Mapping[str, str], changes: Changes
) -> None:
    """Raise `ConfigError` for tensors that only one side has."""
    fixed = {name for name, part in parts.items() if has_fixed_names(part)}
    missing = [name for name in here if name not in names and not matches(name, changes.keep)]
    unknown = [name for name in names if name not in here and name.split(".", 1)[0] in fixed]
    if missing or unknown:
        got = [f"a checkpoint without {_some(missing)}"] if missing else []
        got += [f"the unknown {_some(unknown)}"] if unknown else []
        keys = ["keep"] * bool(missing) + ["drop"] * bool(unknown) + ["rename"]
        others = {name.split(".", 1)[0] for name in missing + unknown}
        anew = [f"'{name}.*'" for name in parts if name in others and not isinstance(parts[name], nn.Module)]
        raise ConfigError(
            f"Checkpoint {path}: got {' and '.join(got)}; expected the tensors of this job. State what changed: "
            f"Changes({', '.join(f'{key}=' for key in keys)}); in a run file, "
            f"{', '.join(f'checkpoint.changes.{key}' for key in keys)}."
            + (f" To begin an optimizer anew, drop all of its state: {', '.join(anew)}." if anew else "")
        )


def _with_kept(value: Any, state: Any, path: str, names: Mapping[str, str]) -> Any:
    """Return the loaded state of a part with its own tensors where the checkpoint lacks them."""
    if not (isinstance(value, Mapping) and isinstance(state, Mapping)):
        return value
    out = dict(value)
    for key, item in state.items():
        place = f"{path}.{key}"
        if isinstance(item, Tensor):
            if place not in names:
                out[key] = item
        elif isinstance(item, Mapping):
            inner = _with_kept(out.get(key, {}), item, place, names)
            if inner or key in out:
                out[key] = inner
    return out


def _renamed(node: JsonValue, path: str, changes: Changes) -> JsonValue:
    """Return a tree with renamed keys and without dropped tensors."""
    if not (changes.rename or changes.drop):
        return node
    return JsonValue.of(_renamed_value(node.value, path, path, changes), node.where)


def _renamed_value(value: Any, saved: str, here: str, changes: Changes) -> Any:
    inner = value.get("dict", value.get("pairs")) if isinstance(value, dict) else None
    pairs = list(inner.items()) if isinstance(inner, dict) else inner
    if not isinstance(pairs, list) or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        return value
    out = []
    for key, item in pairs:
        path = f"{saved}.{key}"
        name = changes.name_here(path)
        if name is None:
            continue
        text = name[len(here) + 1 :] if name.startswith(f"{here}.") else str(key)
        new = int(text) if type(key) is int and text.isdecimal() else key if text == str(key) else text
        out.append([new, _renamed_value(item, path, f"{here}.{text}", changes)])
    return {"dict": dict(out)} if isinstance(inner, dict) else {"pairs": out}


def _wanted(source: Source, name: str, tensor: Tensor, saved_name: str, changes: Changes) -> list[Wanted]:
    """Return what to read into this rank's pieces of a tensor; raise `ConfigError` if shape or dtype differ."""
    check_tensor(name, tensor)
    saved = source.tensors[saved_name]
    resized = matches(name, changes.resize) and len(saved.shape) == tensor.dim()
    if tensor.dtype != saved.dtype or (tuple(tensor.shape) != saved.shape and not resized):
        move = "State it in Changes(resize=[...]), in a run file checkpoint.changes.resize"
        if "._managed_collision_modules." in name:
            move = "Load within saved_id_sizes()"
        elif tensor.dtype != saved.dtype:
            move = "Begin it anew: name it in Changes(drop=, keep=), in a run file checkpoint.changes.drop and .keep"
        raise ConfigError(
            f"Checkpoint {source.path}: got {name} {saved.dtype} {list(saved.shape)}; expected {tensor.dtype} "
            f"{list(tensor.shape)}. {move}, or use the settings that saved it."
        )
    return [Wanted(piece, saved_name) for piece in pieces_of(name, tensor)]


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
