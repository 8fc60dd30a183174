"""The server's answers are the model's, in every form of request; wrong requests get the reason."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("starlette")
pytest.importorskip("httpx2")

from safetensors.torch import load, save
from starlette.testclient import TestClient

from tests.serve.conftest import IDS, INSTANCES, LENGTHS, Small, StandInSource, batch
from tilerec.errors import InputError
from tilerec.export.array_package import ArrayPackage as Package
from tilerec.serve import endpoints
from tilerec.serve.app import make_app
from tilerec.serve.batcher import Batcher, Overloaded
from tilerec.serve.batching import Batching
from tilerec.serve.joined import check, joined, parted
from tilerec.serve.request_log import LogOptions, RequestLog
from tilerec.serve.served_model import ServedModel, Version
from tilerec.serve.wire import AnswerError, Query, answer, parse

Opened = Callable[[Path], Package]


@pytest.fixture
def client(served_path: Path, opened: Opened) -> Iterator[TestClient]:
    with TestClient(make_app(served(served_path, opened))) as client:
        yield client


def served(path: Path, opened: Opened) -> ServedModel:
    return ServedModel(StandInSource(path, opened), every=0)


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


def columns(ids: list[int], lengths: list[list[int]]) -> dict[str, Any]:
    return {"inputs": {"dense": [[1, 2, 3]], "sparse": {"values": ids, "lengths": lengths}}}


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
        ({"instances": [{"dense": [1, 2, 3], "sparse": {"user": [1.5]}}]}, "Input 'sparse.user': got"),
        ({"instances": [{"dense": [1, 2, 3], "sparse": {"user": ["a"]}}]}, "Input 'sparse.user': got"),
        ({"instances": [{"dense": [1, 2, 3], "sparse": {"user": [20]}}]}, "20"),
        ({"instances": [{"dense": [1, 2, 3], "sparse": {"user": 7}}]}, "got int as the ids of 'user'"),
        ({"instances": [{"dense": [1, 2, 3], "sparse": {"user": 0}}]}, "got int as the ids of 'user'"),
        ({"instances": [{"dense": [1, 2, 3], "sparse": {"user": False}}]}, "Input 'sparse.user': got true or false"),
        ({"instances": [{"dense": [1, 2, 3], "sparse": []}]}, "got list as sparse; expected an object"),
        (
            {"instances": [{"dense": [1, 2, 3], "sparse": {"user": {"ids": [1], "weights": [0.5]}}}]},
            "Input 'sparse': got weights for the ids of 'user'; expected none",
        ),
        (
            {"inputs": {"dense": [[1, 2, 3]], "sparse": {"values": [], "weights": [], "lengths": [[0], [0]]}}},
            r"got the unknown \['weights'\] in input 'sparse'",
        ),
        (
            b'{"instances": [{"dense": [0, 1e400, 0]}]}',
            r"Input 'dense': got a number outside of the range of float32 at \[0, 1\]",
        ),
        ({"instances": [{"dense": [0, 0, 0]}, {"dense": [-1e39, 0, 0]}]}, r"Input 'dense': got .* at \[1, 0\]"),
        (
            {"inputs": {"dense": [[0, 0, 1e39]], "sparse": {"values": [], "lengths": [[0], [0]]}}},
            r"Input 'dense': got .* at \[0, 2\]",
        ),
        ({"instances": [{"dense": [0, float("nan"), 0]}]}, "got NaN in its JSON; expected finite numbers"),
        ({"instances": [{"dense": [0, -float("inf"), 0]}]}, "got -Infinity in its JSON"),
        (b'{"instances": [{"dense": [0, 0, 0], "sparse": {"user": [1e400]}}]}', "Input 'sparse.user': got"),
        ({"inputs": {"dense": [[1, 2, 3]]}}, r"got no \['sparse'\] in the inputs"),
        (
            {"inputs": {"dense": [[1, 2, 3]], "sparse": {"values": [1], "lengths": [[2], [0]]}}},
            "got lengths with the sum 2 for 1 ids",
        ),
        (columns([1], [[2**31 - 1], [2**31 - 1]]), "got lengths with the sum 4294967294 for 1 ids"),
        (columns([1], [[2], [-1]]), "got lengths with the sum 1 for 1 ids; expected lengths from 0 to 1"),
        (columns([1], [[2**32 + 1], [0]]), "Input 'sparse.lengths': got values that are no int32 tensor"),
        (columns([2**63], [[1], [0]]), "Input 'sparse.values': got values that are no int64 tensor"),
        (columns([1], [[1] * (1 << 16), [0]]), "Input 'sparse.lengths': got"),
        ({"instances": [{"dense": [0, 0, 0]}] * ((1 << 16) + 1)}, "got 65,537 samples; expected at most 65,536"),
        (
            {"inputs": {"dense": [[0, 0, 0]] * ((1 << 16) + 1), "sparse": {"values": [], "lengths": [[], []]}}},
            "got 65,537 samples; expected at most 65,536",
        ),
        (b'{"instances": [{"dense": [0, 0, ' + b"9" * 5000 + b"]}]}", "got a body that is no JSON"),
        (b'{"inputs": ' + b"[" * 5000 + b"]" * 5000 + b"}", "got"),
    ],
)  # fmt: skip
def test_a_wrong_request_gets_its_reason(client: TestClient, body: Any, reason: str) -> None:
    found = predict(client, body)
    assert found.status_code == 400
    assert re.search(reason, found.json()["error"]), found.json()["error"]
    assert predict(client, {"instances": INSTANCES}).status_code == 200


@pytest.mark.parametrize(
    ("bags", "reason"),
    [
        ([{"ids": [1], "weights": 3}], "got int as the weights of 'user'; expected a list"),
        ([{"ids": [1], "weights": None}], "got NoneType as the weights of 'user'"),
        ([0], "got int as sparse; expected an object"),
        (
            [{"ids": [1, 2], "weights": [0.5]}, {"ids": [3], "weights": [0.5, 0.5]}],
            "got 1 weights for the 2 ids of 'user' in a sample",
        ),
    ],
)
def test_wrong_weights_of_a_sample_are_named(
    served_path: Path, opened: Opened, bags: list[Any], reason: str
) -> None:  # fmt: skip
    manifest = opened(served_path).manifest
    dense, sparse = manifest.signature.inputs
    values, lengths = sparse.tensors
    weights = replace(values, name="sparse.weights", dtype="float32")
    weighted = replace(sparse, tensors=(values, weights, lengths))
    manifest = replace(manifest, signature=replace(manifest.signature, inputs=(dense, weighted)))

    def query_of(own: list[Any]) -> Query:
        samples = [{"dense": [0, 0, 0], "sparse": {"user": bag}} for bag in own]
        return parse(json.dumps({"instances": samples}).encode(), "application/json", manifest)

    with pytest.raises(InputError, match=reason):
        query_of(bags)
    found = query_of([{"ids": [7, 8], "weights": [0.5, 2]}, [], None])
    assert [tensor.tolist() for tensor in found.tensors[1:]] == [[7, 8], [0.5, 2], [[2, 0, 0], [0, 0, 0]]]


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
    version = Version(opened(served_path))
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
    own = version.run(query(version.package, INSTANCES).tensors).outputs[0].tolist()
    assert [one.outputs[0].tolist() for one in (found[0], found[3], found[4])] == [own] * 3
    assert {one.version for one in (found[0], found[1], found[3], found[4])} == {version.name}
    assert max(sizes) == 8


def test_lengths_whose_sum_overflows_spoil_no_other_request(served_path: Path, opened: Opened) -> None:
    package = opened(served_path)
    sparse = package.manifest.signature.inputs[1]
    lengths = replace(sparse.tensors[-1], dtype="int64")
    signature = replace(package.manifest.signature, inputs=(package.manifest.signature.inputs[0],
                        replace(sparse, tensors=(sparse.tensors[0], lengths))))  # fmt: skip
    most = 2**63 - 1
    tensors = [np.zeros((2, 3), np.float32), np.zeros(0, np.int64), np.array([[most, most], [1, 1]])]
    assert int(tensors[2].sum()) == 0
    with pytest.raises(InputError, match="got lengths with the sum 0 for 0 ids; expected lengths from 0 to 0"):
        check(Query(tensors, 2, "safetensors"), replace(package.manifest, signature=signature))


def test_too_many_waiting_requests_are_refused(served_path: Path, opened: Opened) -> None:
    version = Version(opened(served_path))

    async def all_at_once() -> list[Any]:
        batcher = Batcher(Batching(max_waiting=2))
        one = query(version.package, INSTANCES)
        return await asyncio.gather(*(batcher.run(one, version) for _ in range(4)), return_exceptions=True)

    found = asyncio.run(all_at_once())
    assert sum(isinstance(one, Overloaded) for one in found) == 2


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


def test_outputs_that_are_no_numbers_are_an_error(served_path: Path, opened: Opened) -> None:
    model = served(served_path, opened)
    with TestClient(make_app(model)) as client:
        model.version.package.weights["tables.embedding_bags.user.weight"][2] = float("nan")
        found = predict(client, {"instances": INSTANCES})
        assert found.status_code == 500
        assert "Output 'output': got nan at [1]" in found.json()["error"]
        assert predict(client, {"instances": INSTANCES[:1]}).status_code == 200


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
    numbers = np.array([0.1, np.inf, -np.inf, 1e-45, 3.4e38], np.float32)
    text, _ = answer(found, [numbers], manifest, "v")
    (values,) = json.loads(text, parse_constant=lambda word: pytest.fail(word))["outputs"].values()
    assert values[1:3] == [None, None]
    assert np.array_equal(np.float32([v for v in values if v is not None]), numbers[np.isfinite(numbers)])
    numbers[3] = float("nan")
    with pytest.raises(AnswerError, match=r"Output 'output': got nan at \[3\]; expected numbers"):
        answer(found, [numbers], manifest, "v")


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"instances": [{"dense": [1, 2, 3]}, {"dense": [1, 2, 3], "sparse": {"user": [True, 3]}}]}, "sparse.user.0"),
        ({"instances": [{"dense": [1, 2, 3], "sparse": {"user": [True]}}]}, "sparse.user.0"),
        ({"instances": [{"dense": [1, False, 3]}]}, "dense.1"),
        ({"instances": [{"dense": True}]}, "dense"),
        ({"inputs": {"dense": [[1, 2, 3]], "sparse": {"values": [3, True], "lengths": [[1], [1]]}}}, "sparse.values.1"),
        ({"inputs": {"dense": [[1, 2, 3]], "sparse": {"values": [3], "lengths": [[True], [0]]}}}, "sparse.lengths.0.0"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_true_and_false_are_no_numbers(client: TestClient, body: Any, place: str, encoding: str) -> None:
    found = predict(client, json.dumps(body).encode(encoding))
    assert found.status_code == 400
    assert found.json()["error"] == f"Input '{place}': got true or false; expected numbers. Correct it."


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
    with TestClient(make_app(served(served_path, opened), log=options)) as client:
        predict(client, {"instances": 3})
        predict(client, {"instances": INSTANCES})
    (one,) = (tmp_path / "log").iterdir()
    assert json.loads(one.read_bytes()) == {"instances": INSTANCES}


def test_a_log_that_cannot_be_written_fails_no_request(served_path: Path, opened: Opened, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"a file, not a folder")
    options = LogOptions(str(tmp_path / "log"), every=1)
    with TestClient(make_app(served(served_path, opened), log=options)) as client:
        for _ in range(3):
            assert predict(client, {"instances": INSTANCES}).status_code == 200
