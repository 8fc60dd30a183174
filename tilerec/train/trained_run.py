"""The newest model of a run, by its run file or its log folder.

clicks.toml                                 a run file
runs/clicks/20260301-120000/run.toml        the run as it was trained
runs/clicks/20260301-120000/model.safetensors
runs/clicks/20260301-120000/vocabulary/      values of features with a vocabulary
runs/clicks/20260301-120000/checkpoints/step-100   the model at another step
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from tilerec.checkpoint.loading import load as load_checkpoint
from tilerec.checkpoint.manifest import MANIFEST
from tilerec.data.dataset import Dataset
from tilerec.errors import ConfigError
from tilerec.output_path import Inputs
from tilerec.train.config import RunConfig
from tilerec.train.log_folder import VOCABULARY_FOLDER
from tilerec.train.override import override_all
from tilerec.train.quantized_model import load_quantized, row_types_in
from tilerec.train.run_file import RUN_FILE, path_settings, read_run_file
from tilerec.train.saved_model import MODEL_FILE, load_model
from tilerec.train.world import World


@dataclass(frozen=True)
class TrainedRun:
    """A run with a model.

    Attributes:
        config: the run as it was trained.
        folder: its log folder.
        checkpoint: the checkpoint with the model; None: the model file.
        run_file: the run file outside of the folder that led to it; None if another path did.
    """

    config: RunConfig
    folder: Path
    checkpoint: Path | None = None
    run_file: Path | None = None

    @property
    def model_file(self) -> Path:
        """The model's weights."""
        return self.folder / MODEL_FILE

    @property
    def inputs(self) -> Inputs:
        """Files of the run that commands read, for `check_output`."""
        own = [] if self.run_file is None else [self.run_file]
        model = self.checkpoint or self.model_file
        return {"RUN": [*own, self.folder / RUN_FILE, model, self.folder / VOCABULARY_FOLDER]}

    @property
    def data_inputs(self) -> Inputs:
        """Paths and URLs in the settings of the run's data, for `check_output`."""
        return {"the run's data": path_settings(self.config.data)}

    def with_settings(self, assignments: Iterable[str]) -> TrainedRun:
        """Return the run with some settings changed, as for `override`."""
        return replace(self, config=override_all(self.config, assignments))

    def load(self, dataset: Dataset, device: torch.device, world: World) -> nn.Module:
        """Return the model with its weights, in eval mode; with several ranks, sharded over them. Collective.

        Raises:
            ConfigError: several ranks, for a model with quantized tables.
        """
        torch.manual_seed(self.config.train.seed)
        row_types = None if self.checkpoint else row_types_in(self.model_file)
        if row_types is not None:
            if world.size > 1:
                raise ConfigError(
                    f"{self.folder}: got {world.size} processes for a model with quantized tables; expected one. Leave "
                    "--nproc out."
                )
            return load_quantized(self.model_file, row_types, self.config, dataset, device).eval()
        model = world.build(self.config, dataset, device)
        if self.checkpoint is None:
            load_model(self.model_file, model)
        else:
            load_checkpoint(self.checkpoint, {"model": model}, group=world.group)
        return model.eval()


def runs_folder(run_file: Path, name: str) -> Path:
    """Return the folder of the log folders of a run file: `runs/<name>` beside it."""
    # A name is any text, and must not lead out of the folder.
    plain = re.sub(r"[^\w.-]+", "_", name).lstrip(".") or "run"
    return run_file.parent / "runs" / plain


def find_trained(path: str | Path) -> TrainedRun:
    """Return the newest model of a run.

    Args:
        path: a log folder; a checkpoint in one; or a run file: the model beside it, in its `log_dir`, or the newest in
            `runs/<name>`.

    Raises:
        ConfigError: there is none; the message has the next move.
        FileError: a file cannot be read.
    """
    given = Path(path)
    if (given / MANIFEST).is_file():
        return _of_checkpoint(given)
    if given.is_dir():
        return _trained(given)
    if (given.parent / MODEL_FILE).is_file() and given.name == RUN_FILE:
        return _trained(given.parent)
    config = read_run_file(given)
    if config.log_dir:
        return replace(_trained(Path(config.log_dir)), run_file=given)
    folder = runs_folder(given, config.name)
    found = sorted((file.stat().st_mtime_ns, file.parent) for file in folder.glob(f"*/{MODEL_FILE}"))
    if not found:
        raise ConfigError(
            f"{given}: got no trained model in {folder}; expected at least one. Run `tilerec train {given}`, or pass "
            "the log folder of a run that used --log-dir."
        )
    return replace(_trained(found[-1][1]), run_file=given)


def _trained(folder: Path) -> TrainedRun:
    missing = [name for name in (RUN_FILE, MODEL_FILE) if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{folder}: got a folder without {' and '.join(missing)}; expected the log folder of a finished run. Train "
            "the run to its end, or pass another folder."
        )
    return _in_folder(folder, None)


def _of_checkpoint(checkpoint: Path) -> TrainedRun:
    folder = checkpoint.absolute().parent.parent
    if not (folder / RUN_FILE).is_file():
        raise ConfigError(
            f"{checkpoint}: got a checkpoint without {RUN_FILE} two folders above; expected one in the log folder of a "
            "run (checkpoints/step-…). Pass that one, or load it in Python: tilerec.checkpoint.load."
        )
    return _in_folder(folder, checkpoint)


def _in_folder(folder: Path, checkpoint: Path | None) -> TrainedRun:
    config = read_run_file(folder / RUN_FILE)
    data = config.data.with_vocabulary(folder / VOCABULARY_FOLDER)
    return TrainedRun(replace(config, data=data), folder, checkpoint)
