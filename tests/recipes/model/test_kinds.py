"""Each kind of model: from a run file to predictions, with two tasks and managed ids, on one process and on two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tilerec.cli import app
from tilerec.comms.process import ProcessGroupComms
from tilerec.testing import run_ranks
from tilerec.train.config import ModelConfig, ParallelConfig
from tilerec.train.evaluate import Scores
from tilerec.train.kinds import MODEL_KINDS, class_of_kind
from tilerec.train.loop import train
from tilerec.train.run_file import read_run_file, run_of_toml, toml_of_run

ROWS = 490  # 441 to train on: the last of 12 batches has one sample, so a rank has none
OWN = "tilerec.recipes.model"
KINDS = {
    "dlrm": "dense_arch = [5]\nover_arch = [8]",
    "dlrm_dcn": "dense_arch = [5]\nover_arch = [8]\ncross_layers = 2\nlow_rank = 3",
    "dlrm_projection": "over_arch = [8]\nbranch1 = [6]\nvectors1 = 2\nvectors2 = 3",
    "dcn": "layers = [8]\nlow_rank = 3\nexperts = 2\nstructure = 'parallel'",
    "mlp": "layers = [8]",
    "linear": "",
    "shared_bottom": "bottom = [8]\ntower = [4]",
    "mmoe": "experts = 2\nexpert = [8]\ntower = [4]",
    "ple": "levels = 2\ntask_experts = 1\nshared_experts = 1\nexpert = [8]\ntower = []",
}

RUN = """
log_dir = "log-{kind}"
[data]
kind = "files"
path = ["clicks.parquet"]
[data.columns]
labels = [{{column = "click"}}, {{column = "buy"}}]
dense = [{{column = "price"}}]
ids = [{{column = "user"}}, {{column = "item"}}, {{column = "tags", kind = "list", missing = "empty"}}]
tables = [
    {{name = "user", rows = 90, ids = "managed"}},
    {{name = "item", rows = 30}},
    {{name = "tags", rows = 40, ids = "managed"}},
]
[model]
kind = "{kind}"
{settings}
{dim}
managed = {{buckets = 3}}
[train]
batch_size = 40
epochs = 5
embedding_optimizer = {{kind = "Adagrad", lr = 0.2}}
dense_optimizer = {{kind = "Adam", lr = 0.01}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a run file per kind."""
    place = tmp_path_factory.mktemp("kinds")
    draw = np.random.default_rng(0)
    names = draw.integers(-(2**62), 2**62, 20)  # fewer than rows, so that no order of arrival decides who gets one
    user, item = draw.integers(0, 20, ROWS), draw.integers(0, 15, ROWS)
    likes = draw.normal(size=20)[user] + draw.normal(size=15)[item]
    table = pa.table(
        {
            "user": names[user],
            "item": [f"i{i}" for i in item],
            "tags": [[int(i) for i in draw.integers(0, 9, count)] for count in draw.integers(0, 4, ROWS)],
            "price": draw.normal(size=ROWS),
            "click": (likes > 0).astype(int),
            "buy": (likes > 1).astype(int),
        }
    )
    parquet.write_table(table, place / "clicks.parquet")
    parquet.write_table(table.slice(0, 100).drop_columns(["click", "buy"]), place / "new.parquet")
    for kind, settings in KINDS.items():
        dim = "" if kind == "linear" else "embedding_dim = 4"
        (place / f"{kind}.toml").write_text(RUN.format(kind=kind, settings=settings, dim=dim))
    return place


def _invoke(*arguments: object) -> str:
    runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
    result = runner.invoke(app, [str(one) for one in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_every_kind_of_the_library_is_here() -> None:
    assert {kind for kind, path in MODEL_KINDS.items() if path.startswith(OWN)} == {*KINDS, "dot"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_file_is_read_back_as_it_was_written(kind: str, folder: Path) -> None:
    run = read_run_file(folder / f"{kind}.toml")
    assert isinstance(run.model, class_of_kind(ModelConfig, kind, "model"))
    assert run_of_toml(toml_of_run(run)) == run


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_line_trains_evaluates_and_predicts(kind: str, folder: Path) -> None:
    text = _invoke("train", folder / f"{kind}.toml")
    assert "49 held-out samples" in text
    assert "click" in text
    log, out = folder / f"log-{kind}", folder / f"{kind}.parquet"
    assert "490 samples of" in _invoke("eval", log, folder / "clicks.parquet")
    _invoke("predict", log, folder / "new.parquet", "--out", out, "--batch-size", "7")
    found = parquet.read_table(out)
    assert found.column_names == ["user", "item", "score_click", "score_buy"]
    assert found["user"] == parquet.read_table(folder / "new.parquet")["user"]
    labels = parquet.read_table(folder / "clicks.parquet").slice(0, 100)["click"].to_numpy()
    scores = found["score_click"].to_numpy()
    assert scores[labels == 1].mean() > scores[labels == 0].mean() + 0.1  # ids kept their rows


def _trained(folder: str, kind: str, group: ProcessGroupComms | None) -> Scores:
    run = read_run_file(Path(folder) / f"{kind}.toml")
    log_dir = str(Path(folder) / (f"two-{kind}" if group else f"one-{kind}"))
    parallel = ParallelConfig(sharding="row_wise") if group else ParallelConfig()
    options = replace(run.train, epochs=1)
    return train(replace(run, log_dir=log_dir, parallel=parallel, train=options), group=group).held_out


def _all_of_rank(folder: str) -> list[Scores]:
    return [_trained(folder, kind, ProcessGroupComms()) for kind in KINDS]


def test_two_ranks_train_and_save_the_model_of_one(folder: Path) -> None:
    one = [_trained(str(folder), kind, None) for kind in KINDS]
    for rank in run_ranks(2, _all_of_rank, str(folder), timeout_s=200.0):
        for wanted, found in zip(one, rank, strict=True):
            assert found.log_loss == pytest.approx(wanted.log_loss, abs=1e-5)
    for kind in KINDS:
        alone = load_file(folder / f"one-{kind}" / "model.safetensors")
        shared = load_file(folder / f"two-{kind}" / "model.safetensors")
        assert alone.keys() == shared.keys()
        for name, value in alone.items():
            if value.is_floating_point():
                torch.testing.assert_close(shared[name], value, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
            elif name.endswith("ids"):
                assert torch.equal(shared[name], value), name
