"""The server's answers are the model's, in every form of request; wrong requests get the reason."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")

from fastapi.testclient import TestClient
from safetensors.torch import load, save
from typer.testing import CliRunner

from tests.serve.conftest import GOOD, Small, batch
from tilerec.cli import app
from tilerec.delta import DeltaWriter
from tilerec.errors import ConfigError, InputError
from tilerec.export import Package, export
from tilerec.export import load as load_package
from tilerec.serve import endpoints, served_model
from tilerec.serve.app import make_app
from tilerec.serve.batcher import Batcher, Batching, Overloaded
from tilerec.serve.joined import joined, parted
from tilerec.serve.load import Load, offer_load
from tilerec.serve.request_log import LogOptions, RequestLog
from tilerec.serve.served_model import ServedModel, Version, mark_of
from tilerec.serve.server import ServerOptions
from tilerec.serve.wire import Query, answer, parse

NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="compiles a package: nightly")
Opened = Callable[[Path], Package]
INSTANCES = [
    {"dense": [0.0, 1.0, 2.0], "sparse": {"user": [1], "item": [4]}},
    {"dense": [3.0, 4.0, 5.0], "sparse": {"user": [2, 3]}},
    {"dense": [6.0, 7.0, 8.0], "sparse": {"item": [5], "user": []}},
]
LENGTHS, IDS = [[1, 2, 0], [1, 0, 1]], [1, 2, 3, 4, 5]


@pytest.fixture
def client(served_path: Path, opened: Opened) -> Iterator[TestClient]:
    with TestClient(make_app(ServedModel(served_path, every=0, opened=opened))) as client:
        yield client


def want(small: Small) -> list[float]:
    with torch.no_grad():
        return small(*batch(LENGTHS, IDS)).tolist()


def predict(client: TestClient, body: Any) -> Any:
    return client.post("/v1/predict", content=body if isinstance(body, bytes) else json.dumps(body))


def test_samples_get_their_predictions(client: TestClient, small: Small) -> None:
    found = predict(client, {"instances": INSTANCES})
    assert found.status_code == 200
    assert [list(one.values()) for one in found.json()["predictions"]] == [[value] for value in want(small)]
    assert found.headers["x-model-version"] == found.json()["version"]


def test_columns_and_tensors_get_the_same(client: TestClient, small: Small) -> None:
    dense, sparse = batch(LENGTHS, IDS)
    columns = {"dense": dense.tolist(), "sparse": {"values": IDS, "lengths": LENGTHS}}
    found = predict(client, {"inputs": columns}).json()["outputs"]
    assert list(found.values()) == [want(small)]
    tensors = {
        "dense": dense, "sparse.values": sparse.values(), "sparse.lengths": sparse.lengths().view(2, 3)
    }  # fmt: skip
    raw = client.post("/v1/predict", content=save(tensors), headers={"content-type": "application/octet-stream"})
    (values,) = load(raw.content).values()
    assert values.tolist() == want(small)


def test_no_samples_are_a_request_too(client: TestClient) -> None:
    assert predict(client, {"instances": []}).json()["predictions"] == []


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "got a body that is no JSON"),
        ([], "got list; expected an object with 'instances' or 'inputs'"),
        ({"instances": 3}, "got int as 'instances'"),
        ({"instances": [{"sparse": {}}]}, "Input 'dense': got a sample without it"),
        ({"instances": [{"dense": [1, 2, 3], "spare": {}}]}, r"got the unknown \['spare'\] in a sample"),
        ({"instances": [{"dense": [1, 2, 3], "sparse": {"shop": [1]}}]}, r"got the unknown \['shop'\]"),
        ({"instances": [{"dense": [1, 2], "sparse": {}}]}, "Input 'dense': got shape"),
        ({"instances": [{"dense": [1, 2, 3], "sparse": {"user": [1.5]}}]}, "Input 'sparse.values': got"),
        ({"instances": [{"dense": [1, 2, 3], "sparse": {"user": ["a"]}}]}, "Input 'sparse.values': got"),
        ({"instances": [{"dense": [1, 2, 3], "sparse": {"user": [20]}}]}, "20"),
        ({"instances": [{"dense": [1, 2, 3], "sparse": {"user": 7}}]}, "got int as the ids of 'user'"),
        ({"inputs": {"dense": [[1, 2, 3]]}}, r"got no \['sparse'\] in the inputs"),
        (
            {"inputs": {"dense": [[1, 2, 3]], "sparse": {"values": [1], "lengths": [[2], [0]]}}},
            "got lengths with the sum 2 for 1 ids",
        ),
    ],
)  # fmt: skip
def test_a_wrong_request_gets_its_reason(client: TestClient, body: Any, reason: str) -> None:
    found = predict(client, body)
    assert found.status_code == 400
    assert re.search(reason, found.json()["error"]), found.json()["error"]
    assert predict(client, {"instances": INSTANCES}).status_code == 200


def test_the_other_addresses(client: TestClient) -> None:
    predict(client, {"instances": INSTANCES})
    predict(client, {"instances": 3})
    assert client.get("/healthz").text == "alive"
    assert client.get("/readyz").status_code == 200
    about = client.get("/v1/model").json()
    assert [table["rows"] for table in about["tables"]] == [20, 20]
    text = client.get("/metrics").text
    assert 'tilerec_requests_total{status="200"} 1.0' in text
    assert 'tilerec_requests_total{status="400"} 1.0' in text


# -- batches ---------------------------------------------------------------------------------------------------


def query(package: Any, samples: list[Any]) -> Query:
    return parse(json.dumps({"instances": samples}).encode(), "application/json", package.manifest)


def test_joined_queries_have_the_outputs_of_each(served_path: Path, opened: Opened) -> None:
    package = opened(served_path)
    queries = [query(package, INSTANCES[:2]), query(package, []), query(package, INSTANCES)]
    each = [package.run(one.tensors) for one in queries]
    together = parted(package.run(joined(queries, package.manifest)), queries)
    for one, other in zip(each, together, strict=True):
        assert [a.tolist() for a in one] == [b.tolist() for b in other]


def test_requests_that_wait_together_run_together_and_a_wrong_one_spoils_no_other(
    served_path: Path, opened: Opened
) -> None:
    version = Version(opened(served_path), "v")
    sizes: list[int] = []
    wrong = [{**INSTANCES[0], "sparse": {"user": [99]}}]

    async def all_at_once() -> list[Any]:
        batcher = Batcher(Batching(max_samples=8), lambda samples, _: sizes.append(samples))
        queries = [query(version.package, one) for one in (INSTANCES, INSTANCES[:1], wrong, INSTANCES, INSTANCES)]
        found = await asyncio.gather(*(batcher.run(one, version) for one in queries), return_exceptions=True)
        batcher.close()
        return found

    found = asyncio.run(all_at_once())
    assert isinstance(found[2], InputError)
    own = version.package.run(query(version.package, INSTANCES).tensors)[0].tolist()
    assert [one[0].tolist() for one in (found[0], found[3], found[4])] == [own] * 3
    assert max(sizes) == 8


def test_too_many_waiting_requests_are_refused(served_path: Path, opened: Opened) -> None:
    version = Version(opened(served_path), "v")

    async def all_at_once() -> list[Any]:
        batcher = Batcher(Batching(max_waiting=2))
        one = query(version.package, INSTANCES)
        return await asyncio.gather(*(batcher.run(one, version) for _ in range(4)), return_exceptions=True)

    found = asyncio.run(all_at_once())
    assert sum(isinstance(one, Overloaded) for one in found) == 2


# -- versions --------------------------------------------------------------------------------------------------


def test_a_replaced_file_serves_and_a_bad_one_does_not(served_path: Path, small: Small, opened: Opened) -> None:
    events: list[str] = []
    model = ServedModel(served_path, every=0, opened=opened, noted=events.append)
    with TestClient(make_app(model)) as client:
        for bad in (b"", b"a pack"):
            served_path.with_suffix(".new").write_bytes(bad)
            served_path.with_suffix(".new").replace(served_path)
            model.look()
            assert model.error
            found = predict(client, {"instances": INSTANCES})
            assert [next(iter(one.values())) for one in found.json()["predictions"]] == want(small)
        served_path.with_suffix(".new").write_bytes(GOOD)
        served_path.with_suffix(".new").replace(served_path)
        model.look()
        assert (model.error, events[-1]) == ("", "loaded")
        served_path.unlink()
        model.look()
        assert predict(client, {"instances": INSTANCES}).status_code == 200


def test_the_weights_follow_a_log(served_path: Path, tmp_path: Path, small: Small, opened: Opened) -> None:
    trained = Small()
    trained.load_state_dict(small.state_dict())
    writer = DeltaWriter(tmp_path / "deltas", trained, base_every=99)
    writer.publish(0)
    model = ServedModel(served_path, deltas=tmp_path / "deltas", every=0, opened=opened)
    with TestClient(make_app(model)) as client:
        with torch.no_grad():
            trained.tables.embedding_bags["user"].weight[2] += 1
            trained.over.bias += 1
        writer.publish(1)
        model.look()
        assert model.sequence == 1
        found = predict(client, {"instances": INSTANCES}).json()["predictions"]
        assert [next(iter(one.values())) for one in found] == want(trained)  # type: ignore[arg-type]
        writer.publish(2)
        writer.publish(3)
        shutil.rmtree(tmp_path / "deltas" / "delta-2")
        model.look()
        assert "got number 3; expected 2 before it" in model.error
        assert predict(client, {"instances": INSTANCES}).status_code == 200


def test_a_new_version_serves_once_it_has_the_newest_rows(
    served_path: Path, tmp_path: Path, small: Small, opened: Opened
) -> None:
    """A replaced file has older rows than the log. They never serve: neither at the swap nor if the log is unusable."""
    trained = Small()
    trained.load_state_dict(small.state_dict())
    writer = DeltaWriter(tmp_path / "deltas", trained, base_every=99)
    writer.publish(0)
    served: list[list[float]] = []

    def open_and_note(path: Path) -> Package:
        package = opened(path)
        if model:
            served.append(model[0].version.package.weights["over.bias"].tolist())
        return package

    model: list[ServedModel] = []
    model.append(ServedModel(served_path, deltas=tmp_path / "deltas", every=0, opened=open_and_note))
    with torch.no_grad():
        trained.over.bias += 1
    writer.publish(1)
    model[0].look()
    first = model[0].version
    (tmp_path / "deltas").rename(tmp_path / "away")
    served_path.with_suffix(".new").write_bytes(GOOD)
    served_path.with_suffix(".new").replace(served_path)
    model[0].look()
    assert model[0].version is first
    assert model[0].error
    (tmp_path / "away").rename(tmp_path / "deltas")
    model[0].look()
    assert model[0].version is not first
    assert (model[0].sequence, model[0].error) == (1, "")
    assert model[0].version.package.weights["over.bias"].tolist() == trained.over.bias.tolist()
    assert served == [trained.over.bias.tolist()]


def test_an_error_that_lasts_is_counted_once(served_path: Path, tmp_path: Path, opened: Opened) -> None:
    events: list[str] = []
    model = ServedModel(served_path, deltas=tmp_path / "none", every=0, opened=opened, noted=events.append)
    model.look()
    model.look()
    assert events == ["refused"]


def test_a_file_that_the_caller_has_checked_is_not_read_again(
    served_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[bool] = []

    def stand_in(path: Path, *, verify: bool = True) -> Package:
        checks.append(verify)
        return opened(path)

    monkeypatch.setattr(served_model, "load", stand_in)
    model = ServedModel(served_path, every=0, opened=stand_in, checked=mark_of(served_path))
    ServedModel(served_path, every=0, opened=stand_in, checked=(1, 2, 3))
    served_path.with_suffix(".new").write_bytes(GOOD)
    served_path.with_suffix(".new").replace(served_path)
    model.look()
    assert checks == [False, True, True]


# -- bodies and failures ---------------------------------------------------------------------------------------


def test_a_body_above_the_limit_is_refused_before_it_is_read_whole(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "MOST_BYTES", 100)
    sent: list[int] = []

    def parts() -> Iterator[bytes]:
        for number in range(100):
            sent.append(number)
            yield b" " * 40

    assert client.post("/v1/predict", content=b" " * 101).status_code == 413
    assert client.post("/v1/predict", content=parts()).status_code == 413
    assert predict(client, b" " * 100).status_code == 400


def test_a_large_body_is_parsed_in_a_thread(client: TestClient, small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def noted(*args: Any) -> Query:
        names.append(threading.current_thread().name)
        return parse(*args)

    monkeypatch.setattr(endpoints, "parse", noted)
    for padding in (0, endpoints.LARGE_BYTES):
        body = json.dumps({"instances": INSTANCES}).encode() + b" " * padding
        assert [list(one.values()) for one in predict(client, body).json()["predictions"]] == [[v] for v in want(small)]
    assert names[0] != names[1]
    assert names[1].startswith("asyncio")


def test_an_error_of_the_model_is_an_answer(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> list[Any]:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(Version, "run", fails)
        found = predict(client, {"instances": INSTANCES})
        assert found.status_code == 500
        assert "got an error of the model" in found.json()["error"]
    assert predict(client, {"instances": INSTANCES}).status_code == 200


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v2/model", 404), ("GET", "/v1/predict", 405)])
def test_an_unknown_address_gets_the_known_ones(client: TestClient, method: str, path: str, status: int) -> None:
    found = client.request(method, path)
    assert found.status_code == status
    assert "expected POST /v1/predict" in found.json()["error"]


def test_numbers_are_exact_in_both_directions(served_path: Path, opened: Opened) -> None:
    manifest = opened(served_path).manifest
    large = [2**53 + 1, -(2**63), 2**63 - 1]
    body = {"inputs": {"dense": [[0.1] * 3], "sparse": {"values": large, "lengths": [[3], [0]]}}}
    found = parse(json.dumps(body).encode(), "application/json", manifest)
    assert found.tensors[1].tolist() == large
    numbers = torch.tensor([0.1, float("nan"), -float("inf"), 1e-45, 3.4e38])
    text, _ = answer(found, [numbers], manifest, "v")
    (values,) = json.loads(text, parse_constant=lambda word: pytest.fail(word))["outputs"].values()
    assert values[1:3] == [None, None]
    assert torch.equal(torch.tensor([v for v in values if v is not None]), numbers[numbers.isfinite()])
    with pytest.raises(InputError, match="true or false"):
        parse(json.dumps({"instances": [{"dense": [1, 2, 3], "sparse": {"user": [True]}}]}).encode(), "", manifest)


# -- the request log -------------------------------------------------------------------------------------------


def test_logged_requests_are_read_back_and_the_oldest_are_replaced(tmp_path: Path) -> None:
    log = RequestLog(LogOptions(str(tmp_path / "log"), every=2, keep=2))
    for number in range(8):
        log.add(str(number).encode(), "safetensors" if number == 6 else "json")
    log.close()
    found = {path.name.rpartition("-")[2]: path.read_bytes() for path in (tmp_path / "log").iterdir()}
    assert found == {"0.json": b"4", "1.safetensors": b"6"}


def test_answered_requests_are_logged_and_others_are_not(served_path: Path, opened: Opened, tmp_path: Path) -> None:
    options = LogOptions(str(tmp_path / "log"), every=1)
    with TestClient(make_app(ServedModel(served_path, every=0, opened=opened), log=options)) as client:
        predict(client, {"instances": 3})
        predict(client, {"instances": INSTANCES})
    (one,) = (tmp_path / "log").iterdir()
    assert json.loads(one.read_bytes()) == {"instances": INSTANCES}


def test_a_log_that_cannot_be_written_fails_no_request(served_path: Path, opened: Opened, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"a file, not a folder")
    options = LogOptions(str(tmp_path / "log"), every=1)
    with TestClient(make_app(ServedModel(served_path, every=0, opened=opened), log=options)) as client:
        for _ in range(3):
            assert predict(client, {"instances": INSTANCES}).status_code == 200


# -- processes -------------------------------------------------------------------------------------------------


def started(path: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tilerec", "serve", str(path), "--port", "0", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@NIGHTLY
def test_workers_share_a_socket_and_are_replaced(tmp_path: Path, small: Small) -> None:
    path = tmp_path / "model.pt2"
    export(small, batch(LENGTHS, IDS), path)
    with started(path, "--workers", "2") as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().rsplit(" ", 1)[-1].strip()
            manifest = load_package(path).manifest
            assert not offer_load(address, manifest, Load(rate=200, seconds=0.2, pairs=(1, 8))).failed
            children = workers(server)
            assert len(children) == 2
            os.kill(int(children[0]), signal.SIGKILL)
            while len(workers(server)) < 2 or children[0] in workers(server):
                pass
            found = offer_load(address, manifest, Load(rate=200, seconds=0.2, pairs=(1, 8), form="json"))
            assert (len(found.latency_ms), found.failed) == (40, {})
            assert found.percentile(99) > 0
        finally:
            server.send_signal(signal.SIGTERM)
    assert server.returncode == 0
    with started(path, "--workers", "2") as server:
        assert server.stdout is not None
        server.stdout.readline()
        children = workers(server)
        server.kill()
        server.wait()
        while any(Path(f"/proc/{child}").exists() for child in children):  # the test's time limit ends this
            pass
    ended = CliRunner().invoke(app, ["bench-serve", str(path), "--rate", "50", "--seconds", "0.5", "--pairs", "1:9"])
    assert ended.exit_code == 0
    assert "p99.9" in ended.output


def workers(server: subprocess.Popen[str]) -> list[str]:
    return Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()


def test_settings_out_of_range_and_files_that_are_no_package_are_refused(served_path: Path) -> None:
    for wrong in ({"workers": 0}, {"port": 70000}):
        with pytest.raises(ConfigError, match="serve: got"):
            ServerOptions(str(served_path), **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Load: got"):
        Load(rate=0)
    ended = CliRunner().invoke(app, ["serve", str(served_path)])
    assert ended.exit_code == 1
    assert "Package" in ended.output
