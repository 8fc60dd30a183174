"""`benchmarks/retrieval.py` on several processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.retrieval.retrieval_data import write_log
from tilerec.recipes.registry import make_run
from tilerec.train.loop import train
from tilerec.train.override import override_all

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "retrieval.py"


@pytest.mark.nightly
@pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="trains in three processes: nightly")
def test_processes_train_sharded_tables_to_the_scores_of_one(tmp_path: Path) -> None:
    pairs = [line.split() for line in write_log(tmp_path / "log.txt").read_text().splitlines()]
    lines = [f"{user[1:]},{item},5,{time}" for time, (user, item) in enumerate(pairs)]
    path = tmp_path / "ratings.csv"
    path.write_text("\n".join(["userId,movieId,rating,timestamp", *lines]))
    settings = ["train.epochs=1", "train.batch_size=16", "train.seed=0", "data.seed=0"]
    command = [sys.executable, str(BENCHMARK), "two_tower", "--data", str(path), "--nproc", "2", "--seeds", "1"]
    command += ["--no-baselines", "--set", "parallel.sharding=row_wise"]
    command += [word for setting in settings for word in ("--set", setting)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])["ranks"] == 2
    assert "row_wise" in done.stdout

    printed = [line.split() for line in done.stdout.splitlines() if " mean " in line]
    scores = {words[0]: float(words[2]) for words in printed if words[0] != "seconds"}
    single = train(override_all(make_run("two_tower", str(path)), settings)).held_out.numbers
    assert scores == pytest.approx(single, abs=1e-4)
