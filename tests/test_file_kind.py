"""Kinds of files: commands replace their own results and no other files. Tests of the commands have further kinds."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from tilerec import file_kind
from tilerec.data.convert import convert
from tilerec.errors import ConfigError
from tilerec.file_kind import CONVERT, PREDICT, FileKind, check_kind

KINDS = [value for value in vars(file_kind).values() if isinstance(value, FileKind) and value != file_kind.ANY]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.command)
def test_a_file_of_another_program_is_no_result(kind: FileKind, tmp_path: Path) -> None:
    parquet.write_table(pa.table({"score": [1.0]}), tmp_path / "a")
    (tmp_path / "b").write_bytes(b"{}")
    (tmp_path / "c").write_bytes(b"PK\x03\x04" + bytes(100))
    (tmp_path / "d").write_bytes(b"PAR1")
    for name in "abcd":
        with pytest.raises(ConfigError, match=f"--out: got .*, which '{kind.command}' has not written; expected a new"):
            check_kind("--out", tmp_path / name, kind)


def test_a_parquet_file_of_another_command_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    for _ in range(2):  # the second time, the result is there already
        convert(tmp_path / "a.csv", tmp_path / "a.parquet")
    assert CONVERT.has(tmp_path / "a.parquet")
    assert not PREDICT.has(tmp_path / "a.parquet")


def test_new_and_empty_files_and_pipes_are_written(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for path in (tmp_path / "new", tmp_path / "empty", Path("/dev/null")):
        check_kind("--out", path, PREDICT)
    with pytest.raises(ConfigError, match="which exists; expected a new file"):
        check_kind("--out", tmp_path / "empty", None)
