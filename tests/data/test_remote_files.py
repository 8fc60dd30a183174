"""Files on S3, from a local server that fails now and then: retries give the same rows, lasting errors are named."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from tilerec.data import file_list
from tilerec.data.columns import Columns, IdColumn, LabelColumn, TableRows
from tilerec.data.parquet_files import ParquetGroups
from tilerec.data.table_dataset import TableDataset
from tilerec.errors import InputError

pytest.importorskip("s3fs")
server_module = pytest.importorskip("moto.server")

COLUMNS = Columns((LabelColumn("y"),), ids=(IdColumn("c"),), tables=(TableRows("c", 10_000, "rows"),))


class Faults:
    """A WSGI application in front of another that fails chosen requests for objects.

    Attributes:
        kinds: what the next reads of an object meet: "503" (the server is busy) or "short" (the body breaks off).
    """

    def __init__(self, application: Any) -> None:
        self._application = application
        self._lock = threading.Lock()
        self.kinds: list[str] = []
        self.met = 0

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        reads = environ["REQUEST_METHOD"] == "GET" and environ["PATH_INFO"].endswith(".parquet")
        with self._lock:
            kind = self.kinds.pop(0) if reads and self.kinds else ""
            self.met += bool(kind)
        if kind == "503":
            start_response("503 Slow Down", [("Content-Type", "text/plain"), ("Content-Length", "0")])
            return [b""]
        body = self._application(environ, start_response)
        if kind == "short":  # fewer bytes than Content-Length: the connection closes early
            data = b"".join(body)
            return [data[: len(data) // 2]]
        return body


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Faults]]:
    """The URL of a folder with two files, and the faults of the server."""
    import fsspec
    from werkzeug.serving import make_server

    monkeypatch.setattr(file_list, "FIRST_DELAY", 0.0)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    faults = Faults(server_module.DomainDispatcherApplication(server_module.create_backend_app))
    server = make_server("127.0.0.1", 0, faults, threaded=True)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        files = fsspec.filesystem("s3", skip_instance_cache=True)
        files.makedirs("clicks", exist_ok=True)  # the server's buckets outlive it
        if files.exists("clicks/day"):
            files.rm("clicks/day", recursive=True)
        for number in range(2):
            table = pa.table({"y": [1.0] * 50, "c": list(range(50 * number, 50 * number + 50))})
            content = io.BytesIO()
            parquet.write_table(table, content, row_group_size=20)
            files.pipe(f"clicks/day/{number}.parquet", content.getvalue())
        yield "s3://clicks/day", faults
    finally:
        server.shutdown()
        thread.join()
        fsspec.filesystem("s3").clear_instance_cache()


def _ids(url: str) -> list[int]:
    data = TableDataset(ParquetGroups(url), COLUMNS)
    return sorted(int(c) for batch in data.train(16) for c in batch.sparse_features.values())


def test_folders_patterns_and_files_on_s3(bucket: tuple[str, Faults]) -> None:
    url, _ = bucket
    assert _ids(url) == list(range(100))
    assert _ids(f"{url}/1*.parquet") == list(range(50, 100))
    assert _ids(f"{url}/0.parquet") == list(range(50))


@pytest.mark.parametrize("kind", ["503", "short"])
def test_a_server_that_fails_now_and_then_gives_the_same_rows(bucket: tuple[str, Faults], kind: str) -> None:
    url, faults = bucket
    faults.kinds = [kind, "", kind, "", "", kind]
    assert _ids(url) == list(range(100))
    assert faults.met == 3


def test_a_place_without_files_is_named(bucket: tuple[str, Faults]) -> None:
    url, _ = bucket
    with pytest.raises(InputError, match=r"s3://clicks/night: got no files that end with .parquet"):
        ParquetGroups("s3://clicks/night")
    assert url


def test_a_truncated_object_is_named(bucket: tuple[str, Faults]) -> None:
    import fsspec

    url, _ = bucket
    files = fsspec.filesystem("s3")
    files.pipe("clicks/day/2.parquet", files.cat("clicks/day/1.parquet")[:300])
    with pytest.raises(InputError, match=r"s3://clicks/day/2.parquet: got a file that cannot be read as Parquet"):
        ParquetGroups(url)
