"""`load`: reads a checkpoint into the parts of a job, under any plan and any number of ranks.

    manifest  ->  state of every part here  ->  checks of names, shapes and dtypes  ->  this rank's boxes, read in place
        ->  `load_state_dict` of every part

Each rank reads the rows of its own boxes, whichever ranks wrote them. Memory beyond the job's own: `memory_budget`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tilerec.checkpoint.chain import Chain, open_chain, unreadable
from tilerec.checkpoint.changes import Changes
from tilerec.checkpoint.folder import folder_at
from tilerec.checkpoint.job_tables import announce_write_to
from tilerec.checkpoint.load_plan import Source, plan_load
from tilerec.checkpoint.parts import ranks_of_job, states_of
from tilerec.checkpoint.scratch_memory import DEFAULT_BUDGET
from tilerec.comms.agreement import agreeing, errors_of_ranks, on_all_ranks
from tilerec.comms.group import Group
from tilerec.errors import InputError, TilerecError


class Loaded(NamedTuple):
    """The states of the parts, as they were saved. changed: True if changes were needed."""

    values: dict[str, Any]
    changed: bool


def load(
    path: str | Path,
    parts: Mapping[str, Any],
    *,
    group: Group | dist.ProcessGroup | None = None,
    changes: Changes | None = None,
    check: Callable[[str, dict[str, Any]], None] | None = None,
    memory_budget: int = DEFAULT_BUDGET,
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
        memory_budget: bytes of this rank's memory that it may take beside the tensors of the job, at least 24 MiB.
            Manifests, state that a part does not have yet, and buffers of a store's client are not counted.

    Returns:
        The state of each part, as it was saved. Use it for parts that are plain values.

    Raises:
        FileError: there is no checkpoint, or it cannot be read.
        InputError: it is damaged. Parts may hold loaded and earlier values then: load an earlier checkpoint.
        ConfigError: it does not fit the parts, which keep their values; or the budget is too small.
    """
    return load_chain(path, parts, ranks_of_job(group), changes or Changes(), check, memory_budget).values


def load_chain(
    path: str | Path,
    parts: Mapping[str, Any],
    ranks: Group,
    changes: Changes,
    check: Callable[[str, dict[str, Any]], None] | None,
    memory_budget: int,
) -> Loaded:
    """Load a checkpoint into the parts of a job; see `load`. Collective."""

    def opened(found: dict[str, object]) -> Chain:
        chain = open_chain(folder_at(path), memory_budget=memory_budget)
        found["manifests"] = [link.manifest.checksum for link in chain.links]
        return chain

    return load_from(opened, parts, ranks, changes, check)


@torch.no_grad()
def load_from(
    opened: Callable[[dict[str, object]], Source],
    parts: Mapping[str, Any],
    ranks: Group,
    changes: Changes,
    check: Callable[[str, dict[str, Any]], None] | None = None,
) -> Loaded:
    """Load the state of a source into the parts of a job; see `load`. Collective.

    Args:
        opened: returns the source, and puts what must be equal on all ranks into the dict.
    """
    with agreeing(ranks, "the checkpoint") as found:
        source = opened(found)
        planned = plan_load(source, parts, states_of(parts), changes)
        if check is not None:
            check(source.path, planned.values)
    failure: TilerecError | None = None
    try:
        announce_write_to(piece.memory for piece, _ in planned.wanted)
        source.read(planned.wanted)
    except InputError as error:
        failure = error
    except OSError as error:
        failure = unreadable(folder_at(source.path), error)
    for rank, text in errors_of_ranks(ranks, failure).items():
        raise failure or InputError(f"Rank {rank}: {text}")
    with on_all_ranks(ranks, "the checkpoint", "its state"):
        for name, part in parts.items():
            if hasattr(part, "load_state_dict") and name not in planned.left:
                part.load_state_dict(planned.values[name])
    return Loaded(planned.values, planned.changed)
