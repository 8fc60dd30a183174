"""Files on S3, from a local server that fails now and then: retries give the same rows, lasting errors are named."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from tests.s3_server import FaultyServer, Request, serving
from tilerec.data import file_list
from tilerec.data.columns import Columns, IdColumn, LabelColumn, TableRows
from tilerec.data.parquet_files import ParquetGroups
from tilerec.data.table_dataset import TableDataset
from tilerec.errors import InputError

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

COLUMNS = Columns((LabelColumn("y"),), ids=(IdColumn("c"),), tables=(TableRows("c", 10_000, "rows"),))


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, FaultyServer]]:
    """The URL of a folder with two files, and the server."""
    import fsspec

    monkeypatch.setattr(file_list, "FIRST_DELAY", 0.0)
    with serving(monkeypatch) as server:
        files = fsspec.filesystem("s3", skip_instance_cache=True)
        files.makedirs("clicks", exist_ok=True)  # the server's buckets outlive it
        if files.exists("clicks/day"):
            files.rm("clicks/day", recursive=True)
        for number in range(2):
            table = pa.table({"y": [1.0] * 50, "c": list(range(50 * number, 50 * number + 50))})
            content = io.BytesIO()
            parquet.write_table(table, content, row_group_size=20)
            files.pipe(f"clicks/day/{number}.parquet", content.getvalue())
        yield "s3://clicks/day", server


def _ids(url: str) -> list[int]:
    data = TableDataset(ParquetGroups(url), COLUMNS)
    return sorted(int(c) for batch in data.train(16) for c in batch.sparse_features.values())


def test_folders_patterns_and_files_on_s3(bucket: tuple[str, FaultyServer]) -> None:
    url, _ = bucket
    assert _ids(url) == list(range(100))
    assert _ids(f"{url}/1*.parquet") == list(range(50, 100))
    assert _ids(f"{url}/0.parquet") == list(range(50))


@pytest.mark.parametrize("kind", ["503", "short"])
def test_a_server_that_fails_now_and_then_gives_the_same_rows(bucket: tuple[str, FaultyServer], kind: str) -> None:
    url, server = bucket
    kinds = [kind, "", kind, "", "", kind]

    def fault(request: Request) -> str:
        reads = request.method == "GET" and request.path.endswith(".parquet")
        return kinds.pop(0) if reads and kinds else ""

    server.fails = fault
    assert _ids(url) == list(range(100))
    assert server.met == 3


def test_a_place_without_files_is_named(bucket: tuple[str, FaultyServer]) -> None:
    url, _ = bucket
    with pytest.raises(InputError, match=r"s3://clicks/night: got no files that end with .parquet"):
        ParquetGroups("s3://clicks/night")
    assert url


def test_a_truncated_object_is_named(bucket: tuple[str, FaultyServer]) -> None:
    import fsspec

    url, _ = bucket
    files = fsspec.filesystem("s3")
    files.pipe("clicks/day/2.parquet", files.cat("clicks/day/1.parquet")[:300])
    with pytest.raises(InputError, match=r"s3://clicks/day/2.parquet: got a file that cannot be read as Parquet"):
        ParquetGroups(url)
