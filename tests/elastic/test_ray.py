"""A worker of Ray Train that is killed: the run goes on from storage, and trains every sample once."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.agents import starts_of
from tests.elastic.ledger_job import job
from tests.elastic.test_restarts import check

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cluster" / "ray_train.py"

pytestmark = [
    pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="starts Ray: nightly"),
    pytest.mark.filterwarnings("default"),  # Ray's own
]


def killed_once(settings: dict[str, str]) -> Any:
    return job(settings["folder"], kill=(23, 1))


def test_a_killed_worker_of_ray_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_run: Callable[..., Path]
) -> None:
    import ray  # of tilerec[test-nightly]: without it, the nightly tests fail

    spec = importlib.util.spec_from_file_location("ray_train_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, example)
    spec.loader.exec_module(example)
    for name, value in {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "run"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        ray.cloudpickle.register_pickle_by_value(example)
        example.fit(killed_once, {"folder": str(folder)}, workers=2, storage=str(tmp_path / "ray"))
    finally:
        ray.shutdown()
    assert starts_of(tmp_path) == [2, 2]
    check(folder, whole_run(2))
