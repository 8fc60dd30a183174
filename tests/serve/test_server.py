"""A server of worker processes and a compiled package: it answers, whatever happens to its file and its workers."""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from typer.testing import CliRunner

from tests.serve.conftest import IDS, INSTANCES, LENGTHS, Small, batch, package_bytes
from tilerec.cli import app
from tilerec.errors import ConfigError, InputError
from tilerec.export import load
from tilerec.export.archive import WEIGHTS, WEIGHTS_AT
from tilerec.export.exporting import PreparedExport
from tilerec.export.package_file import open_package
from tilerec.serve.batching import Batching
from tilerec.serve.load import Load, offer_load
from tilerec.serve.package_source import FileSource
from tilerec.serve.served_model import ServedModel
from tilerec.serve.server import listen
from tilerec.serve.server_options import ServerOptions
from tilerec.serve.wire import MOST_SAMPLES

BODY = json.dumps({"instances": INSTANCES}).encode()
SOON_S = 60.0
"""Seconds until a test gives up; on a quiet machine all happens within two."""


class Built(NamedTuple):
    """A package's bytes, the version that its answers name, and its outputs for `INSTANCES`."""

    data: bytes
    version: str
    outputs: list[float]


@pytest.fixture(scope="module")
def first(made: PreparedExport, compiled: Path, small: Small, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return built(package_bytes(made, compiled), small, tmp_path_factory)


@pytest.fixture(scope="module")
def second(made: PreparedExport, compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The same program on other weights."""
    other = Small(1).eval()
    state: dict[str, Tensor] = other.state_dict()
    weights = {name: state.get(name, weight) for name, weight in made.weights.items()}
    return built(package_bytes(made, compiled, weights), other, tmp_path_factory)


def built(data: bytes, model: Small, folders: pytest.TempPathFactory) -> Built:
    path = folders.mktemp("built") / "model.pt2"
    path.write_bytes(data)
    with torch.no_grad():
        outputs = model(*batch(LENGTHS, IDS)).tolist()
    return Built(data, open_package(path).manifest.base[:12], outputs)


class Server:
    """`tilerec serve` of a file."""

    def __init__(self, path: Path, *words: str) -> None:
        command = [sys.executable, "-m", "tilerec", "serve", str(path), "--port", "0", "--every", "0.05", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().rsplit(" ", 1)[-1].strip()

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.address}{path}", timeout=SOON_S) as found:
            return str(found.read().decode())

    def predict(self) -> tuple[str, list[float]]:
        """Return the version and the outputs of an answer from a new connection, so of any worker."""
        with urllib.request.urlopen(f"{self.address}/v1/predict", BODY, timeout=SOON_S) as found:
            return version_and_outputs(found.read())

    def workers(self) -> list[int]:
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children if "defunct" not in command_of(child)]

    def has_compared_digests(self) -> bool:
        """Return True once a child has ended: the system has page faults of such children then, and none before."""
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[8] != "0"

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=SOON_S)


def command_of(pid: str) -> str:
    with suppress(OSError):
        return "defunct" if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z" else ""
    return "defunct"


def version_and_outputs(body: bytes) -> tuple[str, list[float]]:
    found = json.loads(body)
    return found["version"], [next(iter(one.values())) for one in found["predictions"]]


def until(condition: Any, what: str) -> Any:
    end = time.monotonic() + SOON_S
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
    raise AssertionError(f"it did not happen: {what}")


@contextmanager
def load_on(server: Server, connections: int = 3) -> Iterator[list[tuple[str, list[float]]]]:
    """Send requests without a pause; yield the list that answers are added to. A failed request fails the test."""
    answers: list[tuple[str, list[float]]] = []
    wrong: list[BaseException | str] = []
    stops = threading.Event()

    def ask() -> None:
        link = http.client.HTTPConnection(server.address.removeprefix("http://"), timeout=SOON_S)
        try:
            while not stops.is_set():
                link.request("POST", "/v1/predict", BODY)
                found = link.getresponse()
                body = found.read()
                if found.status != 200:
                    wrong.append(body.decode())
                else:
                    answers.append(version_and_outputs(body))
        except (OSError, http.client.HTTPException) as error:
            wrong.append(error)
        finally:
            link.close()

    threads = [threading.Thread(target=ask) for _ in range(connections)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        stops.set()
        for thread in threads:
            thread.join()
    assert not wrong


def more(answers: list[Any], count: int = 50) -> None:
    """Wait for further answers."""
    wanted = len(answers) + count
    until(lambda: len(answers) >= wanted, f"{count} more answers")


@pytest.fixture(scope="module")
def served(first: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server with two workers, for all tests that leave it with `first`."""
    path = tmp_path_factory.mktemp("served") / "model.pt2"
    path.write_bytes(first.data)
    server = Server(path, "--workers", "2")
    until(server.has_compared_digests, "the end of the process that compares the digests of the first version")
    yield server, path
    server.close()
    assert server.process.returncode == 0


def serve_again(server: Server, path: Path, version: Built) -> None:
    """Rename a version over the file; wait until all workers serve it."""
    path.with_suffix(".new").write_bytes(version.data)
    path.with_suffix(".new").replace(path)
    wait_for(server, version)


def wait_for(server: Server, version: Built) -> None:
    """Wait until many new connections in a row get a version: until both workers serve it."""
    until(lambda: all(server.predict()[0] == version.version for _ in range(20)), f"version {version.version}")


def assert_of(answers: list[tuple[str, list[float]]], *versions: Built) -> None:
    """Each answer has the outputs of the version that it names. Joined batches may round the last bits otherwise."""
    known = {version.version: pytest.approx(version.outputs, rel=1e-5) for version in versions}
    for version, outputs in answers:
        assert outputs == known[version]


def count_of(text: str, sample: str) -> float:
    found = re.search(rf"^{re.escape(sample)} (\S+)$", text, flags=re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_metrics_of_two_workers_are_added_up(served: tuple[Server, Path]) -> None:
    server, _ = served
    sample = 'tilerec_requests_total{status="200"}'
    before = count_of(server.get("/metrics"), sample)
    with load_on(server) as answers:
        more(answers)
    texts = [server.get("/metrics") for _ in range(8)]  # of either worker
    assert [count_of(text, sample) for text in texts] == [before + len(answers)] * 8
    assert "tilerec_request_seconds_bucket" in texts[0]
    until(lambda: len(server.workers()) == 2, "the end of the process that compares digests")


def test_a_file_that_is_overwritten_in_place_is_served_once_it_is_whole(
    served: tuple[Server, Path], first: Built, second: Built
) -> None:
    server, path = served
    half = len(second.data) // 2
    with load_on(server) as answers:
        with path.open("wb") as file:  # as cp does
            file.write(second.data[:half])
            file.flush()
            more(answers)
            until(lambda: "part of a package" in server.get("/v1/model"), "the reason of the half file")
            assert {version for version, _ in answers} == {first.version}
            file.write(second.data[half:])
        wait_for(server, second)
        more(answers)
    assert answers[0][0] == first.version
    assert answers[-1][0] == second.version
    assert_of(answers, first, second)
    assert json.loads(server.get("/v1/model"))["error"] == ""
    serve_again(server, path, first)


def test_a_truncated_file_ends_nothing_and_killed_workers_come_back(
    served: tuple[Server, Path], first: Built, second: Built
) -> None:
    server, path = served
    before = server.workers()
    with load_on(server) as answers:
        os.truncate(path, 0)
        until(lambda: "got no archive" in server.get("/v1/model"), "the reason of the empty file")
        more(answers)
    assert_of(answers, first)
    assert server.workers() == before
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    until(lambda: len(server.workers()) == 2 and not set(server.workers()) & set(before), "two new workers")
    assert_of([server.predict() for _ in range(20)], first)
    until(lambda: "got no archive" in server.get("/v1/model"), "the reason, from a new worker")
    path.unlink()
    serve_again(server, path, second)
    assert_of([server.predict()], second)
    serve_again(server, path, first)


def test_a_file_that_is_replaced_under_load_loses_no_request(
    served: tuple[Server, Path], first: Built, second: Built
) -> None:
    server, path = served
    with load_on(server) as answers:
        serve_again(server, path, second)
        serve_again(server, path, first)
    assert_of(answers, first, second)


@pytest.mark.parametrize(
    ("request_text", "answer"),
    [
        (b"POST /v1/predict HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n", b"413"),
        (b"POST /v1/predict HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"POST /v1/predict HTTP/1.1\r\nHost: a\r\nContent-Length: 90\r\n\r\n{", b""),
        (b"POST /v1/predict HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
        (b"\x16\x03\x01" * 99, b"400"),
    ],
)
def test_broken_requests_end_no_worker(
    served: tuple[Server, Path], first: Built, request_text: bytes, answer: bytes
) -> None:
    server, _ = served
    before = server.workers()
    host, port = server.address.removeprefix("http://").split(":")
    with load_on(server) as answers:
        with socket.create_connection((host, int(port)), timeout=SOON_S) as link:
            link.sendall(request_text)
            link.shutdown(socket.SHUT_WR)
            assert answer in link.makefile("rb").readline()
        more(answers, 5)
    assert_of(answers, first)
    assert server.workers() == before


@pytest.mark.filterwarnings("ignore:Sending a large body")
def test_the_load_generator_measures_the_server(served: tuple[Server, Path], first: Built) -> None:
    server, path = served
    for form in ("safetensors", "json"):
        found = offer_load(server.address, Load(rate=200, seconds=0.1, pairs=(1, 8), form=form))
        assert (len(found.latency_ms), found.failed) == (20, {})
        assert found.percentile(99) > 0
    words = ["bench-serve", "--address", f"{server.address}/", "--rate", "100", "--seconds", "0.1", "--pairs", "1:9"]
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 0
    assert "p99.9" in ended.output
    for more, got in (([str(path)], "both"), (["--address", ""], "neither")):
        ended = CliRunner().invoke(app, [*words, *more])
        assert (ended.exit_code, f"got {got} of PACKAGE and --address" in ended.output) == (2, True)
    with pytest.raises(InputError, match=r"got no answer to 2 requests \(2 of 400\)"):
        offer_load(server.address, Load(rate=20, seconds=0.1, pairs=(MOST_SAMPLES + 1, MOST_SAMPLES + 1)))


@pytest.mark.parametrize(("command", "needs"), [("bench-serve", "aiohttp"), ("serve", "starlette, uvicorn and prom")])
def test_a_command_names_the_packages_that_it_lacks(command: str, needs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilerec.run_cli.serve.find_spec", lambda name: None)
    ended = CliRunner().invoke(app, [command, "model.pt2"])
    assert ended.exit_code == 1
    assert f"tilerec {command}: needs {needs}" in ended.output
    assert "Install tilerec[serve]." in ended.output


def test_a_server_ends_without_freeing_its_modules(first: Built, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(first.data)
    code = "import atexit; atexit.register(print, 'freed', flush=True); from tilerec.cli import app; app()"
    command = [sys.executable, "-c", code, "serve", str(path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert " on http" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=SOON_S)[0] == ""
    assert process.returncode == 0


def test_every_weight_that_is_written_is_served(first: Built, second: Built, tmp_path: Path) -> None:
    """The compiler makes numbers in its code of small weights, if it may: the bias of the logit, the temperature."""
    packages = []
    for own in (first, second):
        path = tmp_path / f"{own.version}.pt2"
        path.write_bytes(own.data)
        packages.append(load(path))
    for name, weight in packages[1].weights.items():
        packages[0].weights[name].copy_(weight)
    args = batch(LENGTHS, IDS)
    assert packages[0](*args).tolist() == packages[1](*args).tolist() == pytest.approx(second.outputs, rel=1e-5)


def test_one_process_serves_a_file_that_is_overwritten(first: Built, second: Built, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(first.data)
    model = ServedModel(FileSource(path), every=0)
    with path.open("r+b") as file:
        for data in (second.data[:5000], second.data[5000:]):
            file.write(data)
            file.flush()
            version = model.version
            assert version.base == first.version
            weights = version.package.weights["over.bias"]
            assert weights.tolist() == list(Small(0).over.bias.tolist())
            model.look()
    model.look()
    assert (model.version.base, model.error) == (second.version, "")
    os.truncate(path, 100)
    model.look()
    model.look()
    assert model.version.base == second.version
    assert str(path) in model.error


def test_connections_send_each_answer_at_once() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()) as client:
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert connection.getpeername() == client.getsockname()


def test_a_server_that_cannot_start_ends_with_the_reason(first: Built, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(first.data[:5000])
    ended = CliRunner().invoke(app, ["serve", str(path), "--port", "0"])
    assert ended.exit_code == 1
    assert "got a part of a package" in ended.output


def with_other_weights(data: bytes) -> bytes:
    """Change the last byte of the weights, and the archive's checksums of them; the manifest states the old digest."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        part = archive.getinfo(WEIGHTS)
    end = WEIGHTS_AT + part.file_size
    changed = data[: end - 1] + bytes([data[end - 1] ^ 1]) + data[end:]
    sums = [struct.pack("<I", crc) for crc in (part.CRC, zlib.crc32(changed[WEIGHTS_AT:end]))]
    assert changed.count(sums[0]) >= 2
    return changed.replace(*sums)


def test_a_first_version_whose_weights_are_not_those_of_its_manifest_ends_the_server(
    first: Built, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(with_other_weights(first.data))
    ended = CliRunner().invoke(app, ["serve", str(path), "--port", "0"])
    assert ended.exit_code == 1
    assert "has other bytes than the manifest states" in " ".join(ended.output.split())


@pytest.mark.parametrize(("kills", "reason"), [(2, "other bytes than the manifest states"), (3, "got code -9")])
def test_a_killed_process_that_compares_digests_is_started_again_twice(
    first: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int, reason: str
) -> None:
    def killed_at_first(threads: int) -> None:
        (tmp_path / str(os.getpid())).touch()
        if len(list(tmp_path.glob("[0-9]*"))) <= kills:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr("tilerec.serve.trial.set_threads", killed_at_first)
    path = tmp_path / "model.pt2"
    path.write_bytes(with_other_weights(first.data))
    ended = CliRunner().invoke(app, ["serve", str(path), "--port", "0"])
    assert ended.exit_code == 1
    assert reason in " ".join(ended.output.split())
    assert len(list(tmp_path.glob("[0-9]*"))) == 3


def test_a_later_version_whose_weights_are_not_those_of_its_manifest_never_serves(
    served: tuple[Server, Path], first: Built, second: Built
) -> None:
    server, path = served
    with load_on(server) as answers:
        path.write_bytes(with_other_weights(second.data))
        until(lambda: "other bytes than the manifest" in server.get("/v1/model"), "the reason")
        more(answers)
    assert_of(answers, first)
    serve_again(server, path, first)


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "127.0.0.1:1", "nonsense", "http://["])
def test_a_load_on_no_server_is_an_error(address: str) -> None:
    ended = CliRunner().invoke(app, ["bench-serve", "--address", address])
    assert ended.exit_code == 1
    assert "expected a running server, http://HOST:PORT" in " ".join(ended.output.split())
    assert "nan" not in ended.output


def test_settings_out_of_range_are_refused(tmp_path: Path) -> None:
    nan = float("nan")
    for wrong in ({"workers": 0}, {"port": 70000}, {"rows_per_second": 49}, {"rows_per_second": -1}, {"every": nan}):
        with pytest.raises(ConfigError, match="serve: got"):
            ServerOptions(str(tmp_path), **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"serve: got host=''; expected an address"):
        ServerOptions(str(tmp_path), host="")
    for wrong_load in ({"rate": 0}, {"rate": float("inf")}, {"seconds": float("inf")}, {"rate": nan}):
        with pytest.raises(ConfigError, match="Load: got"):
            Load(**wrong_load)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Batching: got"):
        Batching(wait_ms=nan)
    ended = CliRunner().invoke(app, ["bench-serve", str(tmp_path), "--pairs", "1:\u00b2"])
    assert (ended.exit_code, "expected two numbers such as 100:700" in ended.output) == (2, True)
