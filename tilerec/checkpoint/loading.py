"""`load`: reads a checkpoint into the parts of a job, under any plan and any number of ranks.

    manifest  ->  state of every part here  ->  checks of names, shapes and dtypes  ->  this rank's boxes, read in place
        ->  `load_state_dict` of every part

Each rank reads the rows of its own boxes, whichever ranks wrote them. Memory beyond the job's own: `SCRATCH_BYTES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tilerec.checkpoint.chain import Chain, Wanted, open_chain, unreadable
from tilerec.checkpoint.changes import Changes, matches
from tilerec.checkpoint.folder import folder_at
from tilerec.checkpoint.job_tables import announce_write_to
from tilerec.checkpoint.manifest import SavedTensor
from tilerec.checkpoint.parts import has_fixed_names, ranks_of_job, states_of
from tilerec.checkpoint.pieces import check_tensor, pieces_of
from tilerec.checkpoint.tree import flatten, unflatten
from tilerec.comms.agreement import agreeing, errors_of_ranks, on_all_ranks
from tilerec.comms.group import Group
from tilerec.errors import ConfigError, InputError, TilerecError
from tilerec.json_document import JsonValue

_NAMED = 6  # names in an error


class _Reading(NamedTuple):
    """Tensors to read, by their names here, and the values to give to each part."""

    wanted: list[Wanted]
    values: dict[str, Any]


class Source(Protocol):
    """A saved state to load: a `Chain` on disk, or the memory of ranks.

    path: for errors. tensors: by their saved names. state: the tree of all parts (tree.py).
    """

    @property
    def path(self) -> str: ...

    @property
    def tensors(self) -> Mapping[str, SavedTensor]: ...

    @property
    def state(self) -> JsonValue: ...

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fill the pieces. Raises as `Chain.read`."""


def load(
    path: str | Path,
    parts: Mapping[str, Any],
    *,
    group: Group | dist.ProcessGroup | None = None,
    changes: Changes | None = None,
    check: Callable[[str, dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into the parts of a job. Collective: all ranks call it with the same parts.

    The plan, the number of ranks and the 2D layout may differ from those that saved it. Tensors are read in place; then
    each part gets its state with `load_state_dict`. All names, shapes and dtypes are checked before the first byte is
    read, and every byte against its checksum.

    Args:
        path: of the checkpoint: a folder that all ranks see, or a URL of fsspec.
        parts: by name, as for `save`; parts of the checkpoint that are not named here are not read.
        group: the ranks, as for `save`.
        changes: what differs between the checkpoint and the job; None: nothing.
        check: called with the path and the states of the parts before tensors are read; it may raise.

    Returns:
        The state of each part, as it was saved. Use it for parts that are plain values.

    Raises:
        FileError: there is no checkpoint, or it cannot be read.
        InputError: it is damaged. Parts may hold loaded and earlier values then: load an earlier checkpoint.
        ConfigError: it does not fit the parts, which keep their values.
    """

    def opened(found: dict[str, object]) -> Chain:
        chain = open_chain(folder_at(path))
        found["manifests"] = [link.manifest.checksum for link in chain.links]
        return chain

    return load_from(opened, parts, ranks_of_job(group), changes or Changes(), check)


@torch.no_grad()
def load_from(
    opened: Callable[[dict[str, object]], Source],
    parts: Mapping[str, Any],
    ranks: Group,
    changes: Changes,
    check: Callable[[str, dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Load the state of a source into the parts of a job; see `load`. Collective.

    Args:
        opened: returns the source, and puts what must be equal on all ranks into the dict.
    """
    with agreeing(ranks, "the checkpoint") as found:
        source = opened(found)
        reading = _plan(source, parts, states_of(parts), changes)
        if check is not None:
            check(source.path, reading.values)
    failure: TilerecError | None = None
    try:
        announce_write_to(piece.memory for piece, _ in reading.wanted)
        source.read(reading.wanted)
    except InputError as error:
        failure = error
    except OSError as error:
        failure = unreadable(folder_at(source.path), error)
    for rank, text in errors_of_ranks(ranks, failure).items():
        raise failure or InputError(f"Rank {rank}: {text}")
    with on_all_ranks(ranks, "the checkpoint", "its state"):
        for name, part in parts.items():
            if hasattr(part, "load_state_dict"):
                part.load_state_dict(reading.values[name])
    return reading.values


def _plan(source: Source, parts: Mapping[str, Any], states: Mapping[str, Any], changes: Changes) -> _Reading:
    """Return the tensors to read and the values of the parts.

    Raises:
        ConfigError: the checkpoint does not fit.
    """
    path, tensors = source.path, source.tensors
    saved_parts = source.state.members()["dict"].members()
    lacking = [name for name in parts if name not in saved_parts]
    if lacking:
        raise ConfigError(
            f"Checkpoint {path}: got the parts {', '.join(saved_parts)}; expected {', '.join(lacking)} among them. "
            "Leave them out of parts=, or load another checkpoint."
        )
    _, here = flatten(states)
    names: dict[str, str] = {}  # name here -> saved name
    for saved in tensors:
        name = changes.name_here(saved)
        if name is not None and name.split(".", 1)[0] in parts:
            names[name] = saved
    fixed = {name for name, part in parts.items() if has_fixed_names(part)}
    missing = [name for name in here if name not in names and not matches(name, changes.keep)]
    unknown = [name for name in names if name not in here and name.split(".", 1)[0] in fixed]
    if missing or unknown:
        got = [f"a checkpoint without {_some(missing)}"] if missing else []
        got += [f"the unknown {_some(unknown)}"] if unknown else []
        raise ConfigError(
            f"Checkpoint {path}: got {' and '.join(got)}; expected the tensors of this job. State what changed: "
            "Changes(rename=, keep=, drop=)."
        )
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
        value = unflatten(_renamed(saved_parts[name], name, changes), tensor_of)
        values[name] = {**value, **_kept(states[name], name, names)} if name in fixed else value
    return _Reading(wanted, values)


def _kept(state: Mapping[str, Any], part: str, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the tensors of a module that the checkpoint lacks."""
    return {key: value for key, value in state.items() if isinstance(value, Tensor) and f"{part}.{key}" not in names}


def _renamed(node: JsonValue, path: str, changes: Changes) -> JsonValue:
    """Return a tree with renamed keys and without dropped tensors."""
    if not (changes.rename or changes.drop):
        return node
    return JsonValue.of(_renamed_value(node.value, path, path, changes), node.where)


def _renamed_value(value: Any, saved: str, here: str, changes: Changes) -> Any:
    if isinstance(value, dict) and isinstance(value.get("dict"), dict):
        out = {}
        for key, item in value["dict"].items():
            path = f"{saved}.{key}"
            name = changes.name_here(path)
            if name is None:
                continue
            new = name[len(here) + 1 :] if name.startswith(f"{here}.") else key
            out[new] = _renamed_value(item, path, f"{here}.{new}", changes)
        return {"dict": out}
    return value


def _wanted(source: Source, name: str, tensor: Tensor, saved_name: str, changes: Changes) -> list[Wanted]:
    """Return what to read into this rank's pieces of a tensor; raise `ConfigError` if shape or dtype differ."""
    check_tensor(name, tensor)
    saved = source.tensors[saved_name]
    resized = matches(name, changes.resize) and len(saved.shape) == tensor.dim()
    if tensor.dtype != saved.dtype or (tuple(tensor.shape) != saved.shape and not resized):
        ids = "._managed_collision_modules." in name
        move = "Load within saved_id_sizes()" if ids else "State it in Changes(resize=[...])"
        raise ConfigError(
            f"Checkpoint {source.path}: got {name} {saved.dtype} {list(saved.shape)}; expected {tensor.dtype} "
            f"{list(tensor.shape)}. {move}, or use the settings that saved it."
        )
    return [Wanted(piece, saved_name) for piece in pieces_of(name, tensor)]


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
