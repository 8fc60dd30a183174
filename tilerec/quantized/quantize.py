"""`quantize_tables`: replaces the embedding collections of a trained model by quantized ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.feature_processed import FeatureProcessedEmbeddingBagCollection
from tilerec.modules.managed_embedding import ManagedCollisionEmbeddings
from tilerec.quantized.convert import TableConverter, check
from tilerec.quantized.embedding import QuantEmbeddingCollection
from tilerec.quantized.embedding_bag import QuantEmbeddingBagCollection
from tilerec.quantized.managed import QuantManagedCollisionEmbeddings
from tilerec.quantized.row_type import AnyRowType, RowType, row_type
from tilerec.torch_private import submodules

_Place = tuple[nn.Module, str]  # a parent, and the name of its child


def quantize_tables(
    module: nn.Module,
    dtype: AnyRowType = "int8",
    *,
    per_table: Mapping[str, AnyRowType] | None = None,
    processed_dtype: AnyRowType | None = None,
    output_dtype: torch.dtype = torch.float32,
    inplace: bool = False,
    device: torch.device | None = None,
) -> nn.Module:
    """Replace a model's embedding collections by quantized ones, for inference.

    Args:
        module: an unsharded model, or a collection.
        dtype: row type of all tables; see `row_type` for its names.
        per_table: row types of single tables, by table name.
        processed_dtype: row type of the tables behind feature processors; None: `dtype`.
        output_dtype: of the lookups.
        inplace: change this model, and free each table's float rows once it is converted. Peak memory stays that of the
            float model if its tables are the only owners of their storage; otherwise the result comes on top. False
            copies the dense part, and leaves this model as it is.
        device: of the quantized tables; None: that of the float ones. Rows of float tables on "meta" stay
            uninitialised: load a state dict.

    Returns:
        The model; for a collection, the quantized one.

    Raises:
        ConfigError: there is no collection, a table is sharded, or `per_table` names no table.
        InputError: a table has a NaN, or a number beyond the range of fp16. Nothing has changed then.
    """
    found = _collections(module)
    if not found:
        raise ConfigError(
            f"quantize_tables: got a {type(module).__name__} without embedding collections; expected a model that has "
            "some. Pass the float model."
        )
    per_table = dict(per_table or {})
    names = [name for collection in found for name in collection._tables]
    unknown = sorted(set(per_table) - set(names))
    if unknown:
        raise ConfigError(f"quantize_tables: got per_table for {unknown[:8]}; expected tables of {names[:20]}.")
    types = {
        collection: [
            row_type(per_table.get(name, (processed_dtype or dtype) if processed else dtype), f"Table '{name}'")
            for name in collection._tables
        ]
        for collection, processed in found.items()
    }
    for collection, row_types in types.items():
        check(collection, row_types)
    converter = TableConverter(types, inplace, device)
    made = {
        id(collection): _quantized(collection, row_types, output_dtype, converter)
        for collection, row_types in types.items()
    }
    return _replaced(module, made) if inplace else _copied(module, made)


def _collections(module: nn.Module) -> dict[TableCollection, bool]:
    """Return the collections of a model, and whether feature processors are in front of them."""
    processed = {
        id(child._embedding_bag_collection)
        for child in module.modules()
        if isinstance(child, FeatureProcessedEmbeddingBagCollection)
    }
    return {child: id(child) in processed for child in module.modules() if isinstance(child, TableCollection)}


def _quantized(
    collection: TableCollection, row_types: list[RowType], output_dtype: torch.dtype, converter: TableConverter
) -> nn.Module:
    if isinstance(collection, EmbeddingBagCollection):
        return QuantEmbeddingBagCollection.from_float(
            collection, row_types, output_dtype=output_dtype, converter=converter
        )
    assert isinstance(collection, EmbeddingCollection)
    return QuantEmbeddingCollection.from_float(collection, row_types, output_dtype=output_dtype, converter=converter)


def _managed(module: nn.Module) -> Iterator[ManagedCollisionEmbeddings]:
    return (child for child in module.modules() if isinstance(child, ManagedCollisionEmbeddings))


def _replaced(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """Put the new modules into the place of those with these ids."""
    for managed in _managed(module):
        tables = made[id(managed._embedding_module)]
        made[id(managed)] = _managed_quantized(managed, tables, managed._managed_collision_collection)
    return replace_modules(module, made)


def replace_modules(module: nn.Module, made: Mapping[int, nn.Module]) -> nn.Module:
    """Put modules into the place of those below `module` with these ids, and return it; for itself its replacement."""
    if id(module) in made:
        return made[id(module)]
    places: list[_Place] = [
        (parent, name) for parent in module.modules() for name, child in submodules(parent).items() if id(child) in made
    ]
    for parent, name in places:
        submodules(parent)[name] = made[id(submodules(parent)[name])]
    return module


def _copied(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """Return a deep copy of the model that has the new modules in the place of those with these ids."""
    memo: dict[int, Any] = dict(made)
    for managed in _managed(module):
        ids = copy.deepcopy(managed._managed_collision_collection, memo)
        memo[id(managed)] = _managed_quantized(managed, made[id(managed._embedding_module)], ids)
    copied: nn.Module = copy.deepcopy(module, memo)
    return copied


def _managed_quantized(managed: ManagedCollisionEmbeddings, tables: nn.Module, ids: Any) -> nn.Module:
    assert isinstance(tables, (QuantEmbeddingBagCollection, QuantEmbeddingCollection))
    return QuantManagedCollisionEmbeddings(tables, ids, managed._return_remapped_features)
