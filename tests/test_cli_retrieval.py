"""Retrieval and next-item runs on the command line: train, eval, predict, export; logs and files with lists."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from typer.testing import CliRunner

from tests.retrieval.retrieval_data import write_log
from tilerec.cli import app
from tilerec.models.two_tower import Tower, TwoTower
from tilerec.retrieval.item_index_file import load_item_index
from tilerec.train.saved_model import weights_hash
from tilerec.train.trained_run import find_trained
from tilerec.train.world import World


def _invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


LOG_RUN = """
[data]
kind = "interactions"
path = ["log.txt"]
names = ["user", "item"]
delimiter = "space"
max_length = 5
samples = "{samples}"

[model]
kind = "{model}"
{settings}

[train]
batch_size = 16
epochs = 3

[task]
kind = "{task}"
seen = "seen"
top_k = 3
"""

FILES_RUN = """
[data]
kind = "files"
path = ["clicks.parquet"]

[[data.columns.ids]]
column = "user"

[[data.columns.ids]]
column = "item"
table = "items"

[[data.columns.ids]]
column = "history"
kind = "sequence"
max_length = 5
missing = "empty"
table = "items"

[[data.columns.ids]]
column = "genres"
kind = "list"

[[data.columns.tables]]
name = "user"
rows = 100

[[data.columns.tables]]
name = "items"
rows = 1000

[[data.columns.tables]]
name = "genres"
rows = 10
ids = "rows"

{rest}

[train]
batch_size = 16
epochs = 2
"""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a log and two trained runs, `two_tower` and `sasrec`."""
    place = tmp_path_factory.mktemp("logs")
    write_log(place / "log.txt")
    for samples, model, settings, task in (
        ("interactions", "two_tower", 'query_features = ["user", "history"]\nlayers = [4]\nembedding_dim = 8',
         "retrieval"),
        ("users", "sasrec", "embedding_dim = 8\nmax_length = 5", "next_item"),
    ):  # fmt: skip
        text = LOG_RUN.format(samples=samples, model=model, settings=settings, task=task)
        (place / f"{model}.toml").write_text(text)
        code, output = _invoke("train", str(place / f"{model}.toml"), "--log-dir", str(place / model))
        assert code == 0, output
        assert "40 held-out samples" in output
        assert "ndcg@10" in output
        summary = json.loads((place / model / "summary.json").read_text())
        assert list(summary["held_out"]) == ["samples", "recall@10", "ndcg@10", "mrr"]
        assert summary["best"] is None
    return place


@pytest.mark.parametrize("model", ["two_tower", "sasrec"])
def test_eval_prints_the_scores_of_the_training(logs: Path, model: str) -> None:
    summary = json.loads((logs / model / "summary.json").read_text())
    code, text = _invoke("eval", str(logs / model), "--baselines")
    assert code == 0, text
    (line,) = [line for line in text.splitlines() if "ndcg@10" in line]
    assert f"{summary['held_out']['ndcg@10']:.4f}" in line
    assert all(name in text for name in ("popularity", "EASE", "markov"))
    code, text = _invoke("eval", str(logs / model), "--set", "task.cutoffs=1,2", "--set", "task.filter_seen=false")
    assert code == 0
    assert "recall@1" in text
    assert "ndcg@2" in text


@pytest.mark.parametrize("model", ["two_tower", "sasrec"])
def test_predict_writes_the_best_items_without_the_training_data(logs: Path, model: str, tmp_path: Path) -> None:
    run = tmp_path / "moved"
    shutil.copytree(logs / model, run)
    text = (run / "run.toml").read_text().replace(str(logs / "log.txt"), "/nowhere/log.txt")
    (run / "run.toml").write_text(text)
    (tmp_path / "new.txt").write_text("u1 3\nu1 6\nnew 3\nnew 4000\nu2 9\n")
    code, output = _invoke("predict", str(run), str(tmp_path / "new.txt"), "--out", str(tmp_path / "out.parquet"))
    assert code == 0, output
    assert "predictions for 3 samples" in output
    found = parquet.read_table(tmp_path / "out.parquet")
    assert found.column_names == ["user", "rank", "item", "score"]
    assert found["user"].to_pylist() == ["new"] * 3 + ["u1"] * 3 + ["u2"] * 3
    assert found["rank"].to_pylist() == [1, 2, 3] * 3
    best = {user: [] for user in ("u1", "new", "u2")}
    for row in found.to_pylist():
        best[row["user"]].append((row["item"], row["score"]))
    for user, seen in (("u1", {3, 6}), ("new", {3}), ("u2", {9})):
        items, scores = zip(*best[user], strict=True)
        assert not seen & set(items)
        assert list(scores) == sorted(scores, reverse=True)
    code, output = _invoke("eval", str(run), str(tmp_path / "new.txt"))
    assert code == 0, output
    code, output = _invoke("export-index", str(run), "--out", str(tmp_path / "index"))
    assert code == 0, output


@pytest.mark.parametrize("model", ["two_tower", "sasrec"])
def test_a_training_file_that_grows_leaves_the_rows_of_a_model_unchanged(
    logs: Path, model: str, tmp_path: Path
) -> None:
    """Users and items of new lines would shift the rows of all others, if the vocabulary were made anew."""
    shutil.copytree(logs / model, tmp_path / "run")
    (tmp_path / "log.txt").write_text("a0 0\na0 100\n" + (logs / "log.txt").read_text())
    text = (tmp_path / "run" / "run.toml").read_text().replace(str(logs / "log.txt"), str(tmp_path / "log.txt"))
    (tmp_path / "run" / "run.toml").write_text(text)
    files = []
    for run in (logs / model, tmp_path / "run"):
        out = tmp_path / f"{run.parent.name}.parquet"
        code, output = _invoke("predict", str(run), str(logs / "log.txt"), "--out", str(out))
        assert code == 0, output
        files.append(parquet.read_table(out))
    assert files[0] == files[1]
    code, output = _invoke("eval", str(tmp_path / "run"))
    assert code == 0, output
    assert "41 held-out samples" in output


@pytest.mark.parametrize("model", ["two_tower", "sasrec"])
def test_an_exported_index_gives_the_predictions(logs: Path, model: str, tmp_path: Path) -> None:
    log = str(logs / "log.txt")
    out = tmp_path / "index"
    code, text = _invoke("export-index", str(logs / model), "--out", str(out), "--queries", log)
    assert code == 0, text
    vectors, items = np.load(out / "vectors.npy", mmap_mode="r"), parquet.read_table(out / "items.parquet")
    queries = parquet.read_table(out / "queries.parquet")
    facts = json.loads((out / "index.json").read_text())
    assert (facts["items"], facts["dim"], facts["metric"]) == (*vectors.shape, "inner_product")
    assert facts["queries"] == queries.num_rows == 40
    assert sorted(one.name for one in out.iterdir()) == [
        "index.json", "items.parquet", "queries.parquet", "vectors.npy"
    ]  # fmt: skip
    assert [one.name for one in tmp_path.iterdir()] == ["index"]
    predicted = tmp_path / "out.parquet"
    code, text = _invoke("predict", str(logs / model), log, "--out", str(predicted), "--set", "task.filter_seen=false")
    assert code == 0, text
    scores = np.stack(queries["vector"].to_pylist()).astype(np.float32) @ vectors.T
    expected = parquet.read_table(predicted)
    values = items["item"].to_pylist()
    place = {user: q for q, user in enumerate(queries["user"].to_pylist())}
    for row in expected.to_pylist():
        assert scores[place[row["user"]], values.index(row["item"])] == pytest.approx(row["score"], rel=1e-5)
    best = [row["score"] for row in expected.to_pylist() if row["rank"] == 1]
    assert best == pytest.approx(scores.max(1).tolist(), rel=1e-5)


@pytest.mark.parametrize("model", ["two_tower", "sasrec"])
def test_two_ranks_predict_and_export_the_same(logs: Path, model: str, tmp_path: Path) -> None:
    log, run = str(logs / "log.txt"), str(logs / model)
    files = []
    for ranks in ("1", "2"):
        out, index = tmp_path / f"{ranks}.parquet", tmp_path / f"index{ranks}"
        code, text = _invoke("predict", run, log, "--out", str(out), "--nproc", ranks)
        assert code == 0, text
        code, text = _invoke(
            "export-index", run, "--out", str(index), "--nproc", ranks, "--queries", log, "--index", "exact"
        )
        assert code == 0, text
        files.append((parquet.read_table(out), np.load(index / "vectors.npy"), (index / "items.parquet").read_bytes()))
    (ours, vectors, items), (theirs, other, others) = files
    own, same = (load_item_index(tmp_path / f"index{ranks}" / "index.safetensors") for ranks in "12")
    assert own.tower == same.tower != ""
    assert own.ids.tolist() == same.ids.tolist() == parquet.read_table(index / "items.parquet")["item"].to_pylist()
    np.testing.assert_array_equal(own.rows.numpy(), vectors)
    trained = find_trained(run)
    loaded = trained.load(trained.config.data.open_catalog(), torch.device("cpu"), World(None))
    tower = Tower(loaded, "query") if isinstance(loaded, TwoTower) else loaded
    assert weights_hash(tower) == own.tower
    assert ours.drop_columns(["score"]) == theirs.drop_columns(["score"])
    np.testing.assert_allclose(ours["score"].to_numpy(), theirs["score"].to_numpy(), rtol=1e-5)
    np.testing.assert_allclose(vectors, other, rtol=1e-5, atol=1e-7)
    assert items == others


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_a_faiss_index_gives_the_same_neighbours(logs: Path, kind: str, tmp_path: Path) -> None:
    faiss = pytest.importorskip("faiss")
    out, log = tmp_path / "index", str(logs / "log.txt")
    code, text = _invoke("export-index", str(logs / "sasrec"), "--out", str(out), "--faiss", kind, "--queries", log)
    assert code == 0, text
    index = faiss.read_index(str(out / "index.faiss"))
    queries = np.stack(parquet.read_table(out / "queries.parquet")["vector"].to_pylist()).astype(np.float32)
    scores, places = index.search(queries, 5)
    exact = queries @ np.load(out / "vectors.npy").T
    expected = np.argsort(-exact, axis=1, kind="stable")[:, :5]
    np.testing.assert_allclose(scores, np.take_along_axis(exact, expected, 1), rtol=1e-4, atol=1e-5)
    assert (places == expected).mean() > 0.99  # two neighbours with almost equal scores may change places


def _write_clicks(folder: Path) -> None:
    draw = np.random.default_rng(0)
    rows = 120
    items = draw.integers(0, 20, rows)
    table = pa.table(
        {
            "user": draw.integers(0, 30, rows),
            "item": [f"i{i}" for i in items],
            "history": [[f"i{i}" for i in draw.integers(0, 20, count)] for count in draw.integers(0, 9, rows)],
            "genres": [[int(i) % 7] for i in items],
        }
    )
    parquet.write_table(table, folder / "clicks.parquet", row_group_size=50)


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        (
            "two_tower",
            '[model]\nkind = "two_tower"\nquery_features = ["user", "history"]\ncandidate_features = ["item", '
            '"genres"]\nembedding_dim = 4\nlayers = [4]\n[task]\nkind = "retrieval"\nitem_features = ["genres"]',
        ),
        (
            "sasrec",
            '[model]\nkind = "sasrec"\nembedding_dim = 4\nmax_length = 5\n[task]\nkind = "next_item"\n'
            'seen = "history"\nloss = "sampled"\nnegatives = 5',
        ),
    ],
)
def test_files_with_lists_train_and_predict_hashed_items_by_value(name: str, rest: str, tmp_path: Path) -> None:
    _write_clicks(tmp_path)
    (tmp_path / f"{name}.toml").write_text(FILES_RUN.format(rest=rest))
    code, text = _invoke("train", str(tmp_path / f"{name}.toml"))
    assert code == 0, text
    assert "12 held-out samples" in text
    data, out = str(tmp_path / "clicks.parquet"), tmp_path / "out.parquet"
    code, text = _invoke("predict", str(tmp_path / f"{name}.toml"), data, "--out", str(out), "--keys", "user")
    assert code == 0, text
    found = parquet.read_table(out)
    assert found.column_names == ["user", "rank", "item", "score"]
    assert set(found["item"].to_pylist()) <= {f"i{i}" for i in range(20)}
    assert found.num_rows == 1200
    code, text = _invoke(
        "export-index", str(tmp_path / f"{name}.toml"), "--out", str(tmp_path / "index"), "--index", "int8"
    )
    assert code == 0, text
    assert parquet.read_table(tmp_path / "index" / "items.parquet")["item"].to_pylist() == sorted(
        f"i{i}" for i in range(20)
    )
    assert "--index int8: recall@20 1.000 at 100.0% of the rows, for 20 vectors of items" in " ".join(text.split())
    facts = json.loads((tmp_path / "index" / "index.json").read_text())
    assert facts["recall"] == {"k": 20, "recall": 1.0, "rows": 1.0, "queries": 20}
    # Items that are no integers have their places.
    assert load_item_index(tmp_path / "index" / "index.safetensors").ids.tolist() == list(range(20))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "{run}", "--set", "task.cutof=3"], "Did you mean 'task.cutoffs'?"),
        (["eval", "{run}", "{log}", "--baselines"], "--baselines: got a run of another kind"),
        (["predict", "{run}", "{log}", "--out", "{out}/p.parquet", "--keys", "usr"], "--keys: got 'usr'"),
        (["export-index", "{run}", "--out", "{run}"], "which exists; expected a new folder"),
        (["export-index", "{run}", "--out", "{out}/no/x"], "expected a name in an existing folder"),
        (["export-index", "{run}", "--out", "{out}/x", "--faiss", "ivf"], "expected one of none, flat, hnsw"),
        (
            ["export-index", "{run}", "--out", "{out}/x", "--index", "pq"],
            "--index: got 'pq'; expected none or one of exact",
        ),
        (["train", "{log}.toml"], "got 'No such file or directory'"),
    ],
)
def test_mistakes_name_the_next_move(logs: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    words = {"run": str(logs / "sasrec"), "log": str(logs / "log.txt"), "out": str(tmp_path)}
    code, text = _invoke(*(one.format(**words) for one in arguments))
    assert code == 1
    assert message in " ".join(text.split())
    assert list(tmp_path.iterdir()) == []


def test_a_click_run_has_no_index(tmp_path: Path) -> None:
    code, text = _invoke(
        "train", "synthetic", "--set", "data.train_rows=500", "--set", "data.held_out_rows=50",
        "--log-dir", str(tmp_path / "run"),
    )  # fmt: skip
    assert code == 0, text
    code, text = _invoke("export-index", str(tmp_path / "run"), "--out", str(tmp_path / "index"))
    assert code == 1
    assert "got a run with task.kind = 'click'" in text


@pytest.mark.parametrize(
    ("model", "task", "message"),
    [
        ("two_tower", "", "data.columns.labels: got none; expected at least one with task.kind = 'click', the default"),
        ("two_tower", "next_item", "model: got TwoTower; expected a model with `candidates`"),
        ("sasrec", "retrieval", "model: got an output of type SASRecOutput; expected (query vectors, item vectors)"),
    ],
)
def test_a_task_and_a_model_that_do_not_fit_are_refused(tmp_path: Path, model: str, task: str, message: str) -> None:
    write_log(tmp_path / "log.txt")
    settings = "max_length = 5" if model == "sasrec" else ""
    text = LOG_RUN.format(samples="users", model=model, settings=settings, task=task)
    (tmp_path / "run.toml").write_text(text if task else text.split("[task]")[0])
    code, text = _invoke("train", str(tmp_path / "run.toml"), "--log-dir", "")
    assert code == 1
    assert message in " ".join(text.split())


def test_a_click_task_with_an_interaction_log_or_without_labels_is_refused(logs: Path, tmp_path: Path) -> None:
    _write_clicks(tmp_path)
    (tmp_path / "run.toml").write_text(FILES_RUN.format(rest='[model]\nkind = "mlp"'))
    code, text = _invoke("train", str(tmp_path / "run.toml"), "--log-dir", "")
    assert code == 1
    assert "data.columns.labels: got none" in text
    label = '[[data.columns.labels]]\ncolumn = "user"\nat_least = 3\n'
    (tmp_path / "run.toml").write_text(FILES_RUN.format(rest=label + '[model]\nkind = "two_tower"'))
    code, text = _invoke("train", str(tmp_path / "run.toml"), "--log-dir", "")
    assert code == 1
    assert "model: got an output of type tuple; expected logits with task.kind = 'click'" in " ".join(text.split())
