"""The newest model of a run, by its run file or its log folder.

clicks.toml                                 a run file
runs/clicks/20260301-120000/run.toml        the run as it was trained
runs/clicks/20260301-120000/model.safetensors
runs/clicks/20260301-120000/vocabulary/      values of features with a vocabulary
runs/clicks/20260301-120000/checkpoints/step-100   the model at another step, with the run and its vocabularies
copy-of-step-100                             the same: nothing beside it is needed
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from tilerec.checkpoint.chain import open_manifest
from tilerec.checkpoint.folder import folder_at
from tilerec.checkpoint.loading import load as load_checkpoint
from tilerec.checkpoint.manifest import MANIFEST
from tilerec.data.dataset import Dataset
from tilerec.errors import ConfigError, TilerecError
from tilerec.output_path import Inputs
from tilerec.train.config import RunConfig
from tilerec.train.override import override_all
from tilerec.train.quantized_model import load_quantized, row_types_in
from tilerec.train.run_file import RUN_FILE, path_settings, read_run_file, run_of_toml
from tilerec.train.run_metadata import RUN_FILE_KEY
from tilerec.train.saved_model import MODEL_FILE, load_model
from tilerec.train.vocabulary_files import VOCABULARY_FOLDER, VOCABULARY_PART
from tilerec.train.world import World


@dataclass(frozen=True)
class TrainedRun:
    """A run with a model.

    Attributes:
        config: the run as it was trained.
        folder: its log folder; of a checkpoint elsewhere, the checkpoint.
        checkpoint: the checkpoint with the model; None: the model file.
        vocabulary: the folder or the checkpoint with its vocabularies, if the run has some.
        run_file: the run file outside of the folder that led to it; None if another path did.
    """

    config: RunConfig
    folder: Path
    checkpoint: Path | None
    vocabulary: Path
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
        return {"RUN": [*own, self.folder / RUN_FILE, model, self.vocabulary]}

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
        path: a log folder; a checkpoint of a run, wherever it is; or a run file: the model beside it, in its `log_dir`,
            or the newest of the runs of its name in `runs/<name>` and `runs`.

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
    own, named = folder.glob(f"*/{MODEL_FILE}"), folder.parent.glob(f"*/{MODEL_FILE}")
    models = [*own, *(file for file in named if _trained_as(file.parent) == config.name)]
    found = sorted((file.stat().st_mtime_ns, file.parent) for file in models)
    if not found:
        raise ConfigError(
            f"{given}: got no trained model in {folder} or {folder.parent}; expected at least one. Run `tilerec train "
            f"{given}`. If a run was trained with --log-dir FOLDER, pass FOLDER in place of {given.name}."
        )
    return replace(_trained(found[-1][1]), run_file=given)


def _trained_as(folder: Path) -> str:
    """Return the name of the run in a log folder; "" if `quantize` has written the folder, or its files are damaged."""
    try:
        return "" if row_types_in(folder / MODEL_FILE) else read_run_file(folder / RUN_FILE).name
    except TilerecError:
        return ""


def _trained(folder: Path) -> TrainedRun:
    missing = [name for name in (RUN_FILE, MODEL_FILE) if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{folder}: got a folder without {' and '.join(missing)}; expected the log folder of a finished run. Train "
            "the run to its end, or pass another folder."
        )
    return _in_folder(folder, None)


def _of_checkpoint(checkpoint: Path) -> TrainedRun:
    """Return the run that a checkpoint holds; for one of an earlier version, that of the log folder around it."""
    folder = checkpoint.absolute().parent.parent
    in_logs = (folder / RUN_FILE).is_file()
    manifest = open_manifest(folder_at(checkpoint))
    text = manifest.metadata.get(RUN_FILE_KEY)
    if not isinstance(text, str):
        if in_logs:
            return _in_folder(folder, checkpoint)
        raise ConfigError(
            f"{checkpoint}: got a checkpoint without a run file, and no {RUN_FILE} two folders above; expected one "
            "that `tilerec train` has saved. Pass another one, or load it in Python: tilerec.checkpoint.load."
        )
    try:
        config = run_of_toml(text)
    except TilerecError as error:
        raise ConfigError(f"{checkpoint}: its run file: {error}") from error
    has_vocabulary = VOCABULARY_PART in manifest.state.members()["dict"].members()
    vocabulary = checkpoint.absolute() if has_vocabulary else folder / VOCABULARY_FOLDER
    return _with_vocabulary(config, folder if in_logs else checkpoint, checkpoint, vocabulary)


def _in_folder(folder: Path, checkpoint: Path | None) -> TrainedRun:
    return _with_vocabulary(read_run_file(folder / RUN_FILE), folder, checkpoint, folder / VOCABULARY_FOLDER)


def _with_vocabulary(config: RunConfig, folder: Path, checkpoint: Path | None, vocabulary: Path) -> TrainedRun:
    data = config.data.with_vocabulary(vocabulary)
    return TrainedRun(replace(config, data=data), folder, checkpoint, vocabulary)
