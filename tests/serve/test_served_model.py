"""Versions and published states: the old one serves until the new one can, and each answer names its weights."""

from __future__ import annotations

import json
import mmap
import os
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("starlette")
pytest.importorskip("httpx2")

from starlette.testclient import TestClient

from tests.serve.conftest import GOOD, IDS, INSTANCES, LENGTHS, Small, StandInSource, batch
from tilerec.delta import DeltaLog, DeltaWriter, follower
from tilerec.errors import FileError
from tilerec.export.array_package import ArrayPackage as Package
from tilerec.serve import served_model
from tilerec.serve.app import make_app
from tilerec.serve.served_model import ServedModel, map_pages

Opened = Callable[[Path], Package]


def predictions(client: TestClient) -> tuple[str, list[float]]:
    """Return the version and the outputs for `INSTANCES`."""
    found = client.post("/v1/predict", content=json.dumps({"instances": INSTANCES}))
    assert found.status_code == 200
    assert found.json()["version"] == found.headers["x-model-version"]
    return found.json()["version"], [next(iter(one.values())) for one in found.json()["predictions"]]


def want(small: Small) -> list[float]:
    with torch.no_grad():
        return small(*batch(LENGTHS, IDS)).tolist()


def replace(path: Path, data: bytes, model: ServedModel) -> None:
    """Rename a new file over a path, and look twice: a file that changes between two looks is still being written."""
    path.with_suffix(".new").write_bytes(data)
    path.with_suffix(".new").replace(path)
    model.look()
    model.look()


class Log:
    """A log of published states of a model that begins as `small`."""

    def __init__(self, folder: Path, small: Small) -> None:
        self.model = Small()
        self.model.load_state_dict(small.state_dict())
        self.writer = DeltaWriter(folder, self.model, base_every=99)
        self.step = 0
        self.writer.publish(0)

    def publish(self, change: float = 0.0) -> None:
        with torch.no_grad():
            self.model.tables.embedding_bags["user"].weight[2] += change
            self.model.over.bias += change
        self.step += 1
        self.writer.publish(10 * self.step)


@pytest.fixture
def log(tmp_path: Path, small: Small) -> Log:
    return Log(tmp_path / "deltas", small)


def test_a_replaced_file_serves_and_a_bad_one_does_not(served_path: Path, small: Small, opened: Opened) -> None:
    events: list[str] = []
    model = ServedModel(StandInSource(served_path, opened), every=0, noted=events.append)
    with TestClient(make_app(model)) as client:
        for bad in (b"", b"a pack"):
            replace(served_path, bad, model)
            assert model.error
            assert predictions(client)[1] == want(small)
        replace(served_path, GOOD, model)
        assert (model.error, events[-1]) == ("", "loaded")
        served_path.unlink()
        model.look()
        model.look()
        assert predictions(client)[1] == want(small)


def test_an_answer_names_the_state_of_the_weights_that_made_it(
    served_path: Path, tmp_path: Path, small: Small, opened: Opened, log: Log
) -> None:
    model = ServedModel(StandInSource(served_path, opened), deltas=tmp_path / "deltas", every=0)
    base = model.version.manifest.base[:12]
    with TestClient(make_app(model)) as client:
        assert predictions(client) == (f"{base}@0", want(small))
        log.publish(1.0)
        model.look()
        assert predictions(client) == (f"{base}@1", want(log.model))
        about = client.get("/v1/model").json()
        assert [about[name] for name in ("version", "delta_sequence", "delta_step")] == [f"{base}@1", 1, 10]
        assert about["delta_state"] == model._follower.record.state  # type: ignore[union-attr]
        assert client.get("/readyz").text == f"{base}@1"
        log.publish()
        log.publish()
        shutil.rmtree(tmp_path / "deltas" / "delta-2")
        model.look()
        assert "got number 3; expected 2 before it" in model.error
        assert predictions(client) == (f"{base}@1", want(log.model))


def test_requests_find_the_pages_of_the_weights_mapped(opened: Opened, served_path: Path) -> None:
    size = 1 << 24
    fd = os.memfd_create("weights")
    os.truncate(fd, size)
    memory = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
    os.close(fd)
    package = opened(served_path)
    package.weights["large"] = np.frombuffer(memory, np.float32)
    map_pages(package)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    assert package.weights["large"].sum() == 0
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < size / mmap.PAGESIZE / 100


def test_the_first_version_s_pages_are_mapped_beside_requests_and_later_ones_before(
    served_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Package, bool]] = []
    monkeypatch.setattr(
        served_model, "map_pages", lambda own: seen.append((own, threading.current_thread() is threading.main_thread()))
    )
    model = ServedModel(StandInSource(served_path, opened), every=0)
    first = model.version.package
    assert not seen  # the first answer does not wait for it
    model.map_pages()
    model.close()
    replace(served_path, GOOD, model)
    assert seen == [(first, False), (model.version.package, True)]
    assert model.version.package is not first


def test_weights_without_a_log_are_those_of_the_package(served_path: Path, opened: Opened) -> None:
    model = ServedModel(StandInSource(served_path, opened), every=0)
    with TestClient(make_app(model)) as client:
        assert predictions(client)[0] == model.version.manifest.base[:12]
        about = client.get("/v1/model").json()
    assert [about[name] for name in ("delta_sequence", "delta_step", "delta_state")] == [-1, -1, ""]


class NotingLock:
    """A lock that notes the name of the weights whenever a follower takes it: a batch could run just before."""

    def __init__(self, lock: Any, note: Callable[[], object]) -> None:
        self._lock, self._note = lock, note

    def __enter__(self) -> None:
        self._note()
        self._lock.__enter__()

    def __exit__(self, *_: object) -> None:
        self._lock.__exit__()


def test_rows_of_two_states_are_named_as_such(served_path: Path, tmp_path: Path, opened: Opened, log: Log) -> None:
    model = ServedModel(StandInSource(served_path, opened), deltas=tmp_path / "deltas", every=0)
    version = model.version
    seen: list[tuple[str, bool]] = []
    bias = version.package.weights["over.bias"]

    def note() -> None:
        seen.append((version.name.removeprefix(version.base), bool(bias == log.model.over.bias.detach().numpy())))

    version.lock = NotingLock(version.lock, note)  # type: ignore[assignment]
    assert model._follower is not None
    model._follower._lock = version.lock
    log.publish(1.0)
    model.look()
    note()
    names = [name for name, _ in seen]
    assert names[0] == "@0"
    assert set(names[1:-1]) == {"@0..1"}
    assert names[-1] == "@1"
    assert not seen[0][1]  # no byte of the new state under the old name
    assert seen[-1][1]


def test_rows_are_limited_while_requests_run_and_no_longer_after_the_close(
    served_path: Path, tmp_path: Path, opened: Opened, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float | None] = []
    apply = follower.Follower.apply

    def noted(self: Any, name: Any) -> Any:
        limits.append(self.rows_per_second)
        return apply(self, name)

    monkeypatch.setattr(follower.Follower, "apply", noted)
    log.publish(1.0)
    source = StandInSource(served_path, opened)
    model = ServedModel(source, deltas=tmp_path / "deltas", every=0, rows_per_second=1000)
    log.publish(2.0)
    model.look()
    log.publish(3.0)
    model.close()
    model.look()
    assert limits == [None, pytest.approx(1000), None]


def test_a_base_that_is_half_loaded_leaves_no_clean_name(
    served_path: Path, tmp_path: Path, opened: Opened, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.publish(1.0)
    write = follower.Follower._write_base

    def fails_at_tables(self: Any, chain: Any, name: str, piece: Any) -> None:
        if "tables" in name:
            raise OSError(5, "the disk is gone")
        write(self, chain, name, piece)

    with monkeypatch.context() as patch:
        patch.setattr(follower.Follower, "_write_base", fails_at_tables)
        model = ServedModel(StandInSource(served_path, opened), deltas=tmp_path / "deltas", every=0)
        assert "the disk is gone" in model.error
        assert model.version.name == f"{model.version.base}@..0"
    model.look()
    assert (model.version.name, model.error) == (f"{model.version.base}@1", "")


def test_a_new_version_serves_once_it_has_the_newest_rows(
    served_path: Path, tmp_path: Path, opened: Opened, log: Log
) -> None:
    """A replaced file has older rows than the log. They never serve: neither at the swap nor if the log is unusable."""
    served: list[list[float]] = []

    def open_and_note(path: Path) -> Package:
        package = opened(path)
        if model:
            served.append(model[0].version.package.weights["over.bias"].tolist())
        return package

    model: list[ServedModel] = []
    model.append(ServedModel(StandInSource(served_path, open_and_note), deltas=tmp_path / "deltas", every=0))
    log.publish(1.0)
    model[0].look()
    first = model[0].version
    (tmp_path / "deltas").rename(tmp_path / "away")
    replace(served_path, GOOD, model[0])
    assert model[0].version is first
    assert model[0].error
    (tmp_path / "away").rename(tmp_path / "deltas")
    model[0].look()
    assert model[0].version is not first
    assert (model[0].sequence, model[0].error) == (1, "")
    assert model[0].version.package.weights["over.bias"].tolist() == log.model.over.bias.tolist()
    assert served == [log.model.over.bias.tolist()]


def test_an_error_that_lasts_is_counted_once(served_path: Path, tmp_path: Path, opened: Opened) -> None:
    events: list[str] = []
    model = ServedModel(StandInSource(served_path, opened), deltas=tmp_path / "none", every=0, noted=events.append)
    model.look()
    model.look()
    assert events == ["refused"]


def test_an_error_of_the_file_outlives_deltas_and_one_of_the_log_ends_with_it(
    served_path: Path, tmp_path: Path, opened: Opened, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ServedModel(StandInSource(served_path, opened), deltas=tmp_path / "deltas", every=0)
    replace(served_path, b"", model)
    log.publish(1.0)
    model.look()
    assert (model.sequence, "got other bytes" in model.error) == (1, True)
    replace(served_path, GOOD, model)
    assert model.error == ""

    def gone(_: DeltaLog) -> None:
        raise FileError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(DeltaLog, "names", gone)
        model.look()
    assert model.error == "the disk is gone"
    model.look()
    assert model.error == ""
