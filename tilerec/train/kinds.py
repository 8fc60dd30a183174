"""Kinds of a run's parts: the names that `kind = "..."` has in a run file.

A kind is a short name for a class, or `module:Class` for a class of the user's own. Classes are imported when a run
names them.
"""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from tilerec.errors import ConfigError
from tilerec.spec.optimizer import SPECS, OptimizerSpec
from tilerec.train.config import DataConfig, ModelConfig, TaskConfig

DATA_KINDS = {
    "files": "tilerec.recipes.files:FilesData",
    "synthetic": "tilerec.recipes.data:SyntheticData",
    "movielens": "tilerec.recipes.data:MovieLensData",
    "movielens_table": "tilerec.recipes.movielens:MovieLensTableData",
    "criteo": "tilerec.recipes.data:CriteoData",
    "interactions": "tilerec.recipes.interactions:InteractionsData",
}
TASK_KINDS = {
    "click": "tilerec.train.config:ClickConfig",
    "retrieval": "tilerec.retrieval.two_tower_task:RetrievalConfig",
    "next_item": "tilerec.retrieval.next_item_task:NextItemConfig",
}
MODEL_KINDS = {
    "dlrm": "tilerec.recipes.model.dlrm:DLRMConfig",
    "dlrm_dcn": "tilerec.recipes.model.dlrm:DLRMDCNConfig",
    "dlrm_projection": "tilerec.recipes.model.dlrm:DLRMProjectionConfig",
    "dcn": "tilerec.recipes.model.dcn:DCNConfig",
    "mlp": "tilerec.recipes.model.mlp:MLPConfig",
    "dot": "tilerec.recipes.model.dot:DotConfig",
    "linear": "tilerec.recipes.model.linear:LinearConfig",
    "shared_bottom": "tilerec.recipes.model.multi_task:SharedBottomConfig",
    "mmoe": "tilerec.recipes.model.multi_task:MMoEConfig",
    "ple": "tilerec.recipes.model.multi_task:PLEConfig",
    "two_tower": "tilerec.recipes.retrieval_model:TwoTowerConfig",
    "sasrec": "tilerec.recipes.retrieval_model:SASRecConfig",
}


def has_kinds(cls: Any) -> bool:
    """Return True if a table of a run file selects a subclass of this class by its `kind`."""
    return isinstance(cls, type) and issubclass(cls, (DataConfig, ModelConfig, TaskConfig, OptimizerSpec))


def kinds_of(cls: type) -> dict[str, str]:
    """Return the short names of a base class's kinds, with the `module:Class` of each."""
    if issubclass(cls, OptimizerSpec):
        return {name: f"{spec.__module__}:{spec.__qualname__}" for name, spec in SPECS.items()}
    if issubclass(cls, TaskConfig):
        return TASK_KINDS
    return DATA_KINDS if issubclass(cls, DataConfig) else MODEL_KINDS


def class_of_kind(base: type, kind: Any, place: str) -> type:
    """Return the class of a `kind`, imported.

    Args:
        base: the class that it must extend.
        kind: a short name or `module:Class`.
        place: dotted name of the table, for errors.

    Raises:
        ConfigError: there is no such kind, module or class, or the class does not extend `base`.
    """
    known = kinds_of(base)
    example = f'{place}.kind = "{next(iter(known))}"'
    if not isinstance(kind, str):
        got = "nothing" if kind is None else repr(kind)
        raise ConfigError(
            f"{place}.kind: got {got}; expected one of {', '.join(known)}, or module:Class of your own. Add it, for "
            f"example {example}."
        )
    module_name, colon, name = known.get(kind, kind).partition(":")
    if not colon:
        near = difflib.get_close_matches(kind, known, 1)
        lowered = {one.lower(): one for one in known}
        near = near or [lowered[one] for one in difflib.get_close_matches(kind.lower(), lowered, 1)]
        move = f"Did you mean {near[0]!r}?" if near else "Use one of them, or module:Class of your own."
        raise ConfigError(f"{place}.kind: got {kind!r}; expected one of {', '.join(known)}. {move}")
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{place}.kind: got {kind!r}: {error}; expected module:Class. Is its folder on PYTHONPATH?"
        ) from error
    except AttributeError as error:
        raise ConfigError(
            f"{place}.kind: got {kind!r}; expected a class of module {module_name!r}. {error}."
        ) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"{place}.kind: got {kind!r}; expected a class that extends {base.__name__}. Correct the name."
        )
    return found


def kind_of(value: Any) -> str:
    """Return the kind of a part of a run: its short name, or `module:Class`."""
    path = f"{type(value).__module__}:{type(value).__qualname__}"
    base = next(one for one in (DataConfig, ModelConfig, TaskConfig, OptimizerSpec) if isinstance(value, one))
    return next((name for name, known in kinds_of(base).items() if known == path), path)
