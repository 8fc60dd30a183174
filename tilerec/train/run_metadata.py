"""`RunMetadata`: what a checkpoint states about its run, beside the state: the run file, its plan, and its settings.

run_file    text of the run file: a copied checkpoint is evaluated by it
changes     those that the run was loaded with, see `Changes.note`
plan        of the tables, with the settings that it depends on, `parallel`; for a run that continues on the same ranks
settings    that decide which samples a position in the data stands for
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, final

import torch
from torch import nn

from tilerec.checkpoint.tree import Json
from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import ConfigError
from tilerec.json_document import JsonValue
from tilerec.parallel.hosts import launched_topology
from tilerec.spec.plan import ShardingPlan
from tilerec.train.config import RunConfig
from tilerec.train.override import settings
from tilerec.train.run_file import text_of_run
from tilerec.train.run_plan import plan_in

FOLDER = "checkpoints"
"""Folder of the checkpoints in a log folder."""
RUN_FILE_KEY = "run_file"
"""Name of the run file's text in the metadata of a checkpoint."""
_PLACES = ("path", "base", "read_ahead_mb")
"""Settings of data that do not change the samples or their order."""
_TABLE_ROWS = re.compile(r"(data\.columns\.tables\[[0-9]+\])\.rows")
_ADDED = re.compile(r"data\.columns\.ids\[[0-9]+\]\.type")
"""Settings that checkpoints of earlier versions lack."""
_OWN_ROWS = ("rows", "vocabulary")
"""Kinds of ids that have the same row in a table of more rows."""


@final
class RunMetadata:
    """The metadata of a run's checkpoints.

    Args:
        config: of the run.
        ranks: number of ranks.
    """

    def __init__(self, config: RunConfig, ranks: int) -> None:
        self._config = config
        self._fixed: dict[str, Json] = {"run": config.name, "ranks": ranks, **config.checkpoint.changes.note}
        with suppress(ConfigError):  # a class of a notebook or a function has no name for a file
            # Without the log folder, which may move.
            self._fixed[RUN_FILE_KEY] = text_of_run(replace(config, log_dir=""))

    def of(self, model: nn.Module) -> dict[str, Json]:
        """Return the metadata of a checkpoint of this model."""
        plan = plan_in(model)
        if plan is None or self._config.parallel.group_size:  # with replicas, it is no plan for `shard`
            return self._fixed
        return {**self._fixed, "plan": plan.to_json(), "parallel": self._sharding()}

    def saved_plan(
        self, metadata: Mapping[str, Json], path: str, group: ProcessGroupComms, compute_device: str
    ) -> ShardingPlan | None:
        """Return the plan of a checkpoint if this run has the same tables, settings of sharding, ranks and hosts.

        Args:
            metadata: of the checkpoint. path: of it, for errors.
        """
        parallel = self._config.parallel
        saved, before = metadata.get("plan"), metadata.get("parallel")
        if parallel.plan or parallel.group_size or saved is None or not isinstance(before, dict):
            return None
        now = self._sharding()
        # Earlier versions have saved fewer settings.
        if any(now.get(name) != value for name, value in before.items()):
            return None
        plan = ShardingPlan.from_json(JsonValue.of(saved, f"Checkpoint {path}: plan"))
        hosts = launched_topology(group, compute_device).hosts
        return plan if (plan.world_size, plan.hosts) == (group.size, hosts) else None

    def _sharding(self) -> dict[str, Json]:
        """Return the settings that a plan depends on."""
        config = self._config
        tables = {
            name: str(value)
            for name, value in settings(config).items()
            if name.startswith(("model.", "train.embedding_optimizer"))
        }
        parallel = {"sharding": config.parallel.sharding, "exact": config.parallel.exact}
        return {**parallel, "model": type(config.model).__qualname__, **tables}

    def settings(self) -> dict[str, str]:
        """Return the settings that decide which samples a position stands for."""
        return {
            name: str(value)
            for name, value in settings(self._config).items()
            if (name.startswith("data.") and name.rsplit(".", 1)[-1] not in _PLACES) or name == "train.batch_size"
        }

    def check(self, path: str, state: Mapping[str, Any], dense: torch.optim.Optimizer | None) -> None:
        """Raise `ConfigError` for a checkpoint of other samples, or with a state that the optimizer cannot take.

        Args:
            path: of the checkpoint. state: of its parts.
            dense: the optimizer of the parameters outside of tables; None for a model without them.
        """
        before, now = state["settings"], self.settings()
        for name in sorted({*before, *now}):
            if name not in before and _ADDED.fullmatch(name):
                continue
            if before.get(name) != now.get(name) and not self._is_resized(name, now):
                raise ConfigError(
                    f"Checkpoint {path}: got {name} = {now.get(name, 'nothing')}; expected "
                    f"{before.get(name, 'nothing')}, with which it was trained. Set it, or train in another log_dir."
                )
        if dense is not None:
            _check_dense(path, dense, state["dense"])

    def _is_resized(self, name: str, now: Mapping[str, str]) -> bool:
        """Return True for the size of a table that may change, as the run states; shapes are compared after that."""
        table = _TABLE_ROWS.fullmatch(name)
        resizes = bool(self._config.checkpoint.changes.resize)
        return resizes and table is not None and now.get(f"{table[1]}.ids") in _OWN_ROWS


def _check_dense(path: str, dense: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for state of another optimizer of torch, or of other parameters; these have no names."""
    here, saved = dense.state_dict()["param_groups"], state["param_groups"]
    names, saved_names = ({name for group in groups for name in group} for groups in (here, saved))
    got = ""
    if names - saved_names and saved_names - names:  # another version of torch has more settings, or fewer
        got = f"the settings {', '.join(sorted(saved_names - names))}"
    elif [len(group["params"]) for group in saved] != [len(group["params"]) for group in here]:
        got = f"state of {sum(len(group['params']) for group in saved)} parameters"
    else:
        parameters = [parameter for group in dense.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            for name, value in state["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape:
                    got = got or f"{name} {list(value.shape)} for a parameter {list(parameter.shape)}"
    if got:
        raise ConfigError(
            f"Checkpoint {path}: got {got} in the state of the dense optimizer; expected that of this model and "
            f'optimizer, {type(dense).__name__}. Set checkpoint.changes.drop = ["dense.*"] to begin it anew, or use '
            "the settings that saved it."
        )
