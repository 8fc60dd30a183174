"""Text to Parquet: every row, in row groups of one size, with statistics, and nothing half-written."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from typer.testing import CliRunner

from tilerec.cli import app
from tilerec.data.convert import convert
from tilerec.data.text_files import ListColumn
from tilerec.errors import ConfigError, FileError, InputError


def _text(rows: int, first: int = 0) -> str:
    lines = [
        f"{n},{n / 4 if n % 10 else ''},u{n % 7},{';'.join(map(str, range(n % 3)))}" for n in range(first, first + rows)
    ]
    return "\n".join(["n,x,user,tags", *lines]) + "\n"


def test_files_become_one_parquet_file_with_row_groups_of_one_size(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text(_text(30))
    (tmp_path / "2.csv.gz").write_bytes(gzip.compress(_text(25, first=30).encode()))
    seen: list[tuple[int, int, int]] = []
    out = tmp_path / "out.parquet"
    result = convert(
        [tmp_path / "1.csv", tmp_path / "2.csv.gz"],
        out,
        lists=[ListColumn("tags", ";")],
        rows_per_group=20,
        report=lambda *progress: seen.append(progress),
    )
    file = parquet.ParquetFile(out)
    assert [file.metadata.row_group(group).num_rows for group in range(3)] == [20, 20, 15]
    table = file.read()
    assert table.schema.types == [pa.int64(), pa.float64(), pa.string(), pa.list_(pa.int64())]
    assert table.column("n").to_pylist() == list(range(55))
    assert table.column("x").to_pylist() == [n / 4 if n % 10 else None for n in range(55)]
    assert table.column("tags").to_pylist() == [list(range(n % 3)) for n in range(55)]
    assert seen[-1][1:] == (sum((tmp_path / name).stat().st_size for name in ("1.csv", "2.csv.gz")), 55)
    n, x, user, tags = result.columns
    assert (n.low, n.high, n.missing, n.distinct) == (0, 54, 0, 55)
    assert (x.missing, x.values) == (6, 49)
    assert (user.distinct, user.low) == (7, None)
    assert (tags.values, tags.distinct) == (18 + 2 * 18, 2)


def test_bad_lines_stop_the_conversion_or_are_counted(tmp_path: Path) -> None:
    path, out = tmp_path / "a.csv", tmp_path / "out.parquet"
    path.write_text(_text(5))
    convert(path, out)
    earlier = out.read_bytes()
    path.write_text(_text(5) + "1,2\n" + "6,1.5,u1,\n")
    with pytest.raises(InputError, match=r"a.csv:7: got .* where column 'user' is missing"):
        convert(path, out)
    assert out.read_bytes() == earlier
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.csv", "out.parquet"]
    result = convert(path, out, on_bad_row="skip")
    assert (result.rows, result.skipped) == (6, 1)
    assert "a.csv:7" in result.examples[0]


def test_text_in_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes("n,name\n1,Zoë\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"a.csv, from line 2: got text that is not UTF-8"):
        convert(path, tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(_text(5))
    with pytest.raises(FileError, match=r"convert: .* cannot be written"):
        convert(tmp_path / "a.csv", tmp_path / "nowhere" / "out.parquet")
    with pytest.raises(ConfigError, match="rows_per_group: got 0"):
        convert(tmp_path / "a.csv", tmp_path / "out.parquet", rows_per_group=0)


def test_the_command_prints_statistics(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("1\tx;y\n0\t\n")
    out = tmp_path / "out.parquet"
    arguments = ["data", "convert", str(tmp_path / "a.tsv"), "--out", str(out), "--delimiter", "tab"]
    result = CliRunner().invoke(app, [*arguments, "--names", "click,tags", "--list", "tags=;"])
    assert result.exit_code == 0, result.output
    assert "2 rows" in result.output
    assert parquet.read_table(out).to_pylist() == [{"click": 1, "tags": ["x", "y"]}, {"click": 0, "tags": []}]
    failed = CliRunner().invoke(app, [*arguments, "--list", "tags"])
    assert failed.exit_code == 1


def test_quotes_booleans_and_long_integers_keep_their_values(tmp_path: Path) -> None:
    ids = [2**64 - 1, 2**64 - 2, 7]
    lines = [f'"a, ""{n}""",{n != 7},{n},{n / 4}' for n in ids]
    (tmp_path / "a.csv").write_text("\n".join(['"name",ok,id,x', *lines, ",,,"]) + "\n")
    found = convert(tmp_path / "a.csv", tmp_path / "a.parquet")
    assert parquet.read_table(tmp_path / "a.parquet").to_pydict() == {
        "name": [*(f'a, "{n}"' for n in ids), None],
        "ok": [True, True, False, None],
        "id": [*map(str, ids), None],
        "x": [*(n / 4 for n in ids), None],
    }
    assert [(one.kind, one.missing, one.distinct) for one in found.columns[:3]] == [
        ("binary", 1, 3), ("bool", 1, 2), ("binary", 1, 3),
    ]  # fmt: skip


@pytest.mark.parametrize("delimiter", ["||", "é", '"', "\n"])
def test_a_delimiter_is_one_character_that_ends_no_line(delimiter: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match=r"delimiter: got .*; expected one ASCII character"):
        convert(tmp_path / "a.csv", tmp_path / "a.parquet", delimiter=delimiter)


def test_a_url_is_refused(tmp_path: Path) -> None:
    import fsspec

    fsspec.filesystem("memory").pipe("/convert/a.csv", b"a,b\n1,2\n")
    with pytest.raises(ConfigError, match=r"files: got the URL memory:///convert/a.csv; expected local files"):
        convert("memory://convert/a.csv", tmp_path / "a.parquet")
