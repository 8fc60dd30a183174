"""Checkpoints on S3, from a local server that fails: nothing half is taken for whole, and leftovers are removed."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.chaos.fault_counts import FAULTS, HALF, Counts
from tilerec.checkpoint import CheckpointManager, latest, load, save
from tilerec.checkpoint.folder import folder_at
from tilerec.errors import FileError, InputError, TilerecError
from tilerec.testing.ranks import Ranks

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

from tests.s3_server import FaultyServer, Request, serving  # needs both

NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="minutes: nightly")
URL = "s3://jobs/run/checkpoints"
PART = 5 << 20  # bytes of a part of an upload, the least of S3


def parts(step: int) -> dict[str, Any]:
    return {"rows": torch.full((20, 3), float(step)), "more": torch.arange(7) + step, "run": {"steps": step}}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """An empty bucket; the client gives up after the second attempt, and does not wait before it."""
    import fsspec

    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 2)
    monkeypatch.setattr("botocore.retryhandler.delay_exponential", lambda *_, **__: 0)
    monkeypatch.setitem(fsspec.config.conf, "s3", {"default_block_size": PART, "config_kwargs": {"read_timeout": 5}})
    with serving(monkeypatch) as server:
        files = fsspec.filesystem("s3", skip_instance_cache=True)
        files.makedirs("jobs", exist_ok=True)  # the server's buckets outlive it
        if files.exists("jobs/run"):
            files.rm("jobs/run", recursive=True)
        server.fails = lambda _: ""
        yield server


def objects() -> set[str]:
    """Return the paths of all objects of the run, in `URL`."""
    import fsspec

    files = fsspec.filesystem("s3", skip_instance_cache=True)
    return {path.removeprefix("jobs/run/checkpoints/") for path in files.find("jobs/run")}


def uploads() -> list[Any]:
    """Return the uploads whose parts the server keeps."""
    import fsspec

    files = fsspec.filesystem("s3", skip_instance_cache=True)
    return list(files.call_s3("list_multipart_uploads", Bucket="jobs").get("Uploads", []))


def stated(step: int) -> set[str]:
    """Return the objects that the manifest of a step names, and itself."""
    from tilerec.checkpoint.chain import open_manifest

    manifest = open_manifest(folder_at(f"{URL}/step-{step}"))
    return {f"step-{step}/{name}" for name in (*manifest.files, "manifest.json")}


def accepted(counts: Counts, value: Callable[[int], dict[str, Any]] = parts) -> int:
    """Return the step of the newest checkpoint that loads; count it if it is not as it was saved."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = CheckpointManager(URL).resume(dict.fromkeys(value(0)))
    assert found is not None
    step, values = found
    as_saved = repr(values) == repr(value(step))
    counts[HALF] += not as_saved
    assert as_saved
    return step


def requests_of(server: FaultyServer, action: Callable[[], object]) -> list[Request]:
    """Return the requests of an action without faults."""
    server.fails = lambda _: ""
    action()
    return list(server.requests)


def prepared() -> CheckpointManager:
    """Return the manager of a run with a checkpoint of step 1, on an empty bucket."""
    import fsspec

    files = fsspec.filesystem("s3", skip_instance_cache=True)
    if files.exists("jobs/run"):
        files.rm("jobs/run", recursive=True)
    manager = CheckpointManager(URL, keep_last=2)
    manager.save(1, parts(1))
    return manager


def outages(server: FaultyServer, counts: Counts, kind: str, step: int) -> None:
    """Save step 2 with a server that fails at each `step`-th request and after it; then the run goes on."""
    manager = prepared()
    total = len(requests_of(server, lambda: manager.save(2, parts(2))))
    assert total > 5
    for at in range(0, total, step):
        manager = prepared()
        server.fails = lambda request, at=at: kind if request.number >= at else ""
        failure: Exception | None = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                manager.save(2, parts(2))
        except TilerecError as error:
            failure = error
        server.fails = lambda _: ""
        counts[FAULTS] += 1
        newest = accepted(counts)
        assert newest == 2 or failure is not None
        if failure is not None:
            assert "Checkpoint" in str(failure)
        # The same step again, and the next ones: nothing of the stopped save stays.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            again = CheckpointManager(URL, keep_last=2)
            assert again.resume(dict.fromkeys(parts(0))) is not None
            for step_now in (2, 3):
                again.save(step_now, parts(step_now))
        assert accepted(counts) == 3
        assert objects() == stated(2) | stated(3)


def test_an_outage_at_some_requests_of_a_save_leaves_whole_checkpoints(server: FaultyServer, counts: Counts) -> None:
    outages(server, counts, "500", 12)


@NIGHTLY
@pytest.mark.parametrize("kind", ["500", "503", "lost", "short"])
def test_outages_of_all_kinds_at_requests_of_a_save_leaves_whole_checkpoints(
    server: FaultyServer, counts: Counts, kind: str
) -> None:
    outages(server, counts, kind, 4)


@NIGHTLY
@pytest.mark.parametrize("kind", ["500", "503", "lost", "short", "slow"])
def test_one_fault_in_a_save_or_load_changes_nothing(server: FaultyServer, counts: Counts, kind: str) -> None:
    manager = prepared()
    saves = len(requests_of(server, lambda: manager.save(2, parts(2))))
    for at in range(0, saves, 3):
        manager = prepared()
        server.fails = lambda request, at=at: kind if request.number == at else ""
        try:
            manager.save(2, parts(2))
        except TilerecError:
            # The first attempt of the manifest arrived, and its second one met it: the save is whole.
            assert kind in ("lost", "short")
        server.fails = lambda _: ""
        counts[FAULTS] += 1
        assert accepted(counts) == 2
    loads = len(requests_of(server, lambda: accepted(counts)))
    for at in range(0, loads, 2):
        server.fails = lambda request, at=at: kind if request.number == at else ""
        counts[FAULTS] += 1
        assert accepted(counts) in (1, 2)


def test_a_store_that_is_down_is_an_error_with_the_name_of_the_checkpoint(server: FaultyServer, counts: Counts) -> None:
    prepared()
    path = f"{URL}/step-1"
    for kind, method in (("500", "GET"), ("short", "GET"), ("500", "HEAD")):
        server.fails = lambda request, kind=kind, method=method: kind if request.method == method else ""
        counts[FAULTS] += 1
        with pytest.raises((FileError, InputError), match="step-1"):
            load(path, dict.fromkeys(parts(0)))
    server.fails = lambda _: ""
    assert accepted(counts) == 1


@pytest.mark.parametrize("kind", ["500", "lost"])
def test_a_manifest_whose_upload_fails_leaves_no_objects(server: FaultyServer, counts: Counts, kind: str) -> None:
    manager = prepared()
    server.fails = lambda request: (
        kind if request.method == "PUT" and request.path.endswith("step-2/manifest.json") else ""
    )
    counts[FAULTS] += 1
    with pytest.raises(FileError, match="earlier checkpoints are unchanged"):
        manager.save(2, parts(2))
    assert server.met >= 1
    server.fails = lambda _: ""
    assert accepted(counts) == 1
    assert objects() == stated(1)


def large(step: int) -> dict[str, Any]:
    return {"rows": torch.full((3 * PART // 8,), float(step))}


def test_a_part_whose_upload_fails_leaves_no_parts(server: FaultyServer, counts: Counts) -> None:
    save(f"{URL}/step-1", large(1))
    assert any("partNumber=" in request.query for request in server.requests)
    for part in ("partNumber=", "uploadId"):  # a part; the end of the upload
        server.fails = lambda request, part=part: (
            "500" if part in request.query and request.method == ("PUT" if part != "uploadId" else "POST") else ""
        )
        counts[FAULTS] += 1
        with pytest.raises(FileError, match="step-2"):
            save(f"{URL}/step-2", large(2))
        server.fails = lambda _: ""
        assert accepted(counts, large) == 1
        assert objects() == stated(1)
        assert not uploads()


def test_lists_that_lag_behind_name_an_earlier_checkpoint_and_remove_none_too_many(
    server: FaultyServer, counts: Counts
) -> None:
    manager = CheckpointManager(URL, keep_last=2)
    manager.save(1, parts(1))
    assert latest(URL) is not None
    server.fails = lambda request: "old" if "list-type" in request.query else ""
    for step in (2, 3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            manager.save(step, parts(step))
        counts[FAULTS] += 1
        assert accepted(counts) <= step
    assert server.met
    server.fails = lambda _: ""
    assert accepted(counts) == 3
    manager.save(4, parts(4))
    assert objects() == stated(3) | stated(4)


def test_objects_of_others_in_the_folder_stay(server: FaultyServer) -> None:
    """A save removes the parts of stopped saves of its own path, and nothing else there."""
    import fsspec

    files = fsspec.filesystem("s3", skip_instance_cache=True)
    for name in ("notes.txt", "step-1/0123456789abcdef-rank0-0.safetensors", "step-1/own.safetensors"):
        files.pipe(f"jobs/run/checkpoints/{name}", b"bytes")
    files.pipe("jobs/run/checkpoints/0123456789abcdef-rank1-0.safetensors", b"bytes")
    save(URL, parts(1))
    assert "0123456789abcdef-rank1-0.safetensors" not in objects()
    assert {"notes.txt", "step-1/0123456789abcdef-rank0-0.safetensors", "step-1/own.safetensors"} < objects()


def _save_and_load(step: int) -> str:
    """On every rank: resume, then save a step."""
    manager = CheckpointManager(URL, keep_last=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            manager.resume(dict.fromkeys(parts(0)))
            manager.save(step, parts(step))
        except TilerecError as error:
            return str(error)
    return ""


@NIGHTLY
def test_two_ranks_save_to_a_store_that_fails_now_and_then(server: FaultyServer, counts: Counts) -> None:
    with Ranks(2) as ranks:
        for step in range(1, 16):
            kind = ["500", "short", "503"][step % 3]
            server.fails = functools.partial(
                lambda request, kind, step: kind if request.number % 7 == step % 7 else "", kind=kind, step=step
            )
            ranks.run(_save_and_load, step)
            counts[FAULTS] += server.met
            server.met = 0
            server.fails = lambda _: ""
            if objects():
                accepted(counts)
        assert ranks.run(_save_and_load, 16) == ["", ""]
    assert accepted(counts) == 16
