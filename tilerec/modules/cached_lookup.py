"""Checks of lookups of cached tables, which are eager: a compiled program has a graph break around them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tilerec.errors import ConfigError
from tilerec.ops.runtime.graph_break import graph_break
from tilerec.storage.table_rows import TableRows


def check_trained(rows: Sequence[TableRows], tables: Sequence[int]) -> None:
    """Check that every trained cached table has an attached optimizer.

    Raises:
        ConfigError: a table has none. Its dense `.grad` would have the size of the whole table, which a cache avoids.
    """
    for t in dict.fromkeys(tables):
        if rows[t].leaf.requires_grad and rows[t].spec is None:
            raise ConfigError(
                f"Table '{rows[t].name}': it is cached and has no attached optimizer, so its gradient would be a "
                "dense .grad of the whole table. Attach one with apply_optimizer_in_backward, freeze the table "
                "(requires_grad_(False)), or look it up under torch.no_grad()."
            )


@graph_break
def eager_forward(module: nn.Module, features: Any) -> Any:
    """Run a module's forward outside of a compiled program, which has a graph break around it.

    Raises:
        ConfigError: under `torch.export`, whose programs have no graph breaks.
    """
    if torch.compiler.is_exporting():
        raise ConfigError(
            f"{type(module).__name__}: torch.export cannot trace lookups of cached tables. Export a copy without "
            "caches: uncache_tables(copy.deepcopy(module))."
        )
    return type(module).forward(module, features)


def key_segments(sizes: Sequence[int], keys: Sequence[int]) -> list[tuple[int, int]]:
    """Return (begin, end) of the ids of each key. Example: sizes (2, 0, 3), keys (2, 0) -> (2, 5), (0, 2)."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return [(ends[k], ends[k + 1]) for k in keys]
