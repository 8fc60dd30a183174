"""Resizing of an unsharded collection's table: rows that move keep their optimizer state.

Legend: E old rows, E' new rows, M rows that move, D columns.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.modules.initial_values import fill_initial
from tilerec.modules.table import Table


@torch.no_grad()
def resize_table(
    collection: TableCollection, name: str, num_embeddings: int, old_rows_M: Tensor, new_rows_M: Tensor
) -> None:
    """Resize a table in place: row `new_rows_M[m]` is the old row `old_rows_M[m]`; all others get initial values.

    The table's parameter is replaced by a new one. An attached optimizer follows it.
    """
    table = collection._tables[name]
    check_resizable(table)
    config = replace(table.config, num_embeddings=num_embeddings)
    old, rows = table.weight, table.rows
    state, spec, group = dict(rows.state), rows.spec, rows.group
    memory = old.new_empty((num_embeddings, old.shape[1]))
    if not memory.is_meta:
        fill_initial(memory, config, rows.place.key, 0, 0)
        memory[new_rows_M.to(old.device)] = old[old_rows_M.to(old.device)]
    leaf = nn.Parameter(memory, requires_grad=old.requires_grad)
    table.config = config
    table._parameters["weight"] = leaf
    rows.about_to_write()
    rows.refuse_earlier(
        f"Table '{name}': it was resized between a lookup and its backward, so the gradient refers to old row "
        "numbers. Resize between two steps, after the backward. No row of the table was updated."
    )
    # `attach` allocates fresh state of the new size. The state of rows that move is then copied into it.
    rows.spec = None
    rows.bind(leaf)
    if spec is not None and group is not None:
        rows.attach(spec, group)
        for slot, value in rows.state.items():
            before = state[slot]
            if before.dim() == 0:
                value.copy_(before)
            elif not value.is_meta:
                value[new_rows_M.to(value.device)] = before[old_rows_M.to(value.device)]
    collection._replace_config(config)
    collection._renew_sinks()
    collection._lay_flat()


def check_not_in_files(table: Table) -> None:
    """Raise a `ConfigError` if a table is in files, whose rows a resize would hold in memory."""
    if table.cache is not None and table.cache.folder is not None:
        raise ConfigError(
            f"Table '{table.config.name}': its rows are in files of {table.cache.folder}, where a table cannot be "
            "resized; expected one in memory. Save the model, build it with the new size, and load."
        )


def check_resizable(table: Table) -> None:
    """Raise a `ConfigError` if a table is sharded or tied; warn if an optimizer will not follow the new parameter."""
    name = table.config.name
    if type(table) is not Table:
        raise ConfigError(
            f"Table '{name}': got a sharded table; expected an unsharded one. Resize before sharding, or save the "
            "model, load it unsharded, resize, and shard again."
        )
    check_not_in_files(table)
    if len(table.rows.holders) > 1:
        raise ConfigError(
            f"Table '{name}': it is tied to another collection's table, which would keep the old rows. Resize before "
            "tying."
        )
    if table.rows.spec is None and table.weight.requires_grad:
        warnings.warn(
            f"Table '{name}': the resize replaces its weight parameter. Create the optimizer that steps it again, or "
            "attach one (apply_optimizer_in_backward), which follows the new parameter.",
            stacklevel=4,
        )
