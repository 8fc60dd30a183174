"""Row types of a model's published tables, by the names of their tensors."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from tilerec.checkpoint.row_encoding import RowEncoding
from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.quantized.row_type import AnyRowType
from tilerec.quantized.row_type import row_type as row_type_of

PART = "model"
"""Name of the model among the parts of an entry."""


def encodings_of(
    model: nn.Module, row_type: AnyRowType | None, per_table: Mapping[str, AnyRowType]
) -> dict[str, RowEncoding]:
    """Return the encodings of the tables that are published in another type than their own.

    Raises:
        ConfigError: a table is unknown.
    """
    found: dict[str, RowEncoding] = {}
    names: set[str] = set()
    for path, part in model.named_modules():
        for config in part._configs if isinstance(part, TableCollection) else ():
            names.add(config.name)
            wanted = per_table.get(config.name, row_type)
            if wanted is not None:
                holder = ".".join(filter(None, (PART, path, part._holder, config.name)))
                own = row_type_of(wanted, f"DeltaWriter: table '{config.name}'")
                found[f"{holder}.weight"] = RowEncoding(config.name, config.embedding_dim, own)
    unknown = sorted(set(per_table) - names)
    if unknown:
        raise ConfigError(
            f"DeltaWriter: got per_table of the unknown tables {unknown[:4]}; expected some of {sorted(names)[:40]}."
        )
    return found
