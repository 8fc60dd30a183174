"""The tables of a plan: of a recipe's model, or of a JSON or YAML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from tilerec.errors import ConfigError
from tilerec.json_document import JsonValue, read_json, read_text
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.table_list import read_tables
from tilerec.planner.tables import PlannedTable, tables_of
from tilerec.spec.optimizer import OptimizerSpec
from tilerec.spec.topology import Topology

TABLE_FILES = (".json", ".yaml", ".yml")
_MOST_YAML_BYTES = 2**22


@dataclass(frozen=True)
class Source:
    """Tables to plan. `module` is the model that holds them; None for a list of tables."""

    tables: Sequence[PlannedTable]
    batch_size: int | None
    constraints: dict[str, ParameterConstraints]
    module: nn.Module | None = None


def recipe_source(name: str, data: str | None, optimizer: str | None, world: Topology) -> Source:
    """Build a recipe's model with tables on the meta device; return its tables, optimizer and batch size."""
    if optimizer is not None:
        raise ConfigError(
            f"--optimizer: got {optimizer} with a recipe; expected it only with a list of tables. Leave it out: a "
            "recipe has its own optimizer (tilerec train --show)."
        )
    from tilerec.recipes.registry import make_run
    from tilerec.train.optimizers import attach

    run = make_run(name, data)
    model = run.model.build(run.data.open(), torch.device("cpu"), torch.device("meta"))
    attach(model, run.train.embedding_optimizer)
    return Source(tables_of(model), max(1, run.train.batch_size // world.world_size), {}, model)


def file_source(path: Path, optimizer: str | None) -> Source:
    content = _read(path)
    batch_size = None
    if isinstance(content.value, dict):
        found = content.record(("tables", "batch_size"), ("tables",))
        content = found["tables"]
        batch_size = found["batch_size"].whole(1) if "batch_size" in found else None
    tables, constraints = read_tables(content)
    if optimizer is not None:
        spec = OptimizerSpec.from_json({"optimizer": optimizer})
        tables = [t if t.optimizer is not None else replace(t, optimizer=spec) for t in tables]
    return Source(tables, batch_size, constraints)


def _read(path: Path) -> JsonValue:
    if path.suffix == ".json":
        return read_json(path, "Tables")
    try:
        import yaml  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise ConfigError(
            f"{path}: got YAML without the package pyyaml; expected JSON, or pyyaml. Install tilerec[yaml], or write "
            "JSON."
        ) from error
    text = read_text(path, "Tables", _MOST_YAML_BYTES)
    try:
        # A few lines with nested aliases may expand to a billion items.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise ConfigError(f"Tables: {path}: got an alias (*name); expected none. Write the value out.")
        nodes = [yaml.compose(text, yaml.SafeLoader)]
        for node in nodes:
            if isinstance(node, yaml.MappingNode):
                keys = [key.value for key, _ in node.value]
                twice = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
                if twice is not None:
                    raise ConfigError(
                        f"Tables: {path}: got the key {twice!r} twice in one mapping; expected it once. Remove one."
                    )
                nodes += [value for _, value in node.value]
            elif isinstance(node, yaml.SequenceNode):
                nodes += node.value
        return JsonValue.of(yaml.safe_load(text), f"Tables: {path}")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"Tables: {path}: got {error!s:.500}; expected valid YAML. Correct the file.") from error


def with_statistics(source: Source, path: Path) -> dict[str, ParameterConstraints]:
    """Return the constraints of a source with the statistics of a file."""
    from tilerec.data.statistics import Statistics

    tables = [_StatisticsTable(t.key, t.rows, t.features) for t in source.tables]
    return Statistics.load(path).constraints(tables, like=source.constraints)


@dataclass(frozen=True)
class _StatisticsTable:
    """Table record that `Statistics.constraints` reads."""

    name: str
    num_embeddings: int
    feature_names: Sequence[str]
