"""Delimited files: every line arrives once, bad ones are named by line and column, memory stays bounded."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tilerec.data.delimited import Block, BrokenRow, Column, ColumnKind, DelimitedFile, OnBadRow, RowCount
from tilerec.errors import ConfigError, InputError

COLUMNS = (
    Column("id", ColumnKind.INTEGER, low=0),
    Column("score", ColumnKind.NUMBER, low=-10, high=10),
    Column("count", ColumnKind.INTEGER, optional=True),
    Column("tag", ColumnKind.TEXT),
)
HEADER = "id,score,count,tag"
Row = tuple[int, int, float, int | None, bytes]


def _rows(blocks: list[Block]) -> list[Row]:
    """(line, id, score, count or None, tag) of every row."""
    rows: list[Row] = []
    for block in blocks:
        tags = block.texts["tag"].to_pylist()
        for index in range(len(block)):
            missing = bool(block.missing["count"][index])
            rows.append(
                (
                    int(block.lines[index]),
                    int(block.numbers["id"][index]),
                    float(block.numbers["score"][index]),
                    None if missing else int(block.numbers["count"][index]),
                    tags[index],
                )
            )
    return rows


def _read(path: Path, **options: object) -> list[Row]:
    return _rows(list(DelimitedFile(path, COLUMNS, **options).blocks()))  # type: ignore[arg-type]


def _file(folder: Path, *lines: str, end: str = "\n", last: str = "\n") -> Path:
    path = folder / "file.csv"
    path.write_bytes((end.join(lines) + last).encode())
    return path


GOOD = ["3,0.5,7,a", "4,-1e1,,bb", "5,10,-2,", "6,.25,0,né"]
GOOD_ROWS: list[Row] = [
    (2, 3, 0.5, 7, b"a"),
    (3, 4, -10.0, None, b"bb"),
    (4, 5, 10.0, -2, b""),
    (5, 6, 0.25, 0, "né".encode()),
]


@pytest.mark.parametrize("block_bytes", [1, 7, 20, 1 << 20])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", ["", "end"])
def test_every_row_arrives_once_whatever_the_block_size(tmp_path: Path, block_bytes: int, end: str, last: str) -> None:
    path = _file(tmp_path, HEADER, *GOOD, end=end, last=end if last else "")
    assert _read(path, block_bytes=block_bytes) == GOOD_ROWS


@pytest.mark.parametrize("last", ["\n", ""])
def test_good_rows_are_never_parsed_one_by_one(tmp_path: Path, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(*_: object) -> Block:
        raise AssertionError("a block of good rows took the slow way")

    monkeypatch.setattr(DelimitedFile, "_parse_lines", parse)
    assert _read(_file(tmp_path, HEADER, *GOOD, last=last)) == GOOD_ROWS


@pytest.mark.parametrize("block_bytes", [3, 1 << 20])
def test_gzip_is_recognised_by_its_content(tmp_path: Path, block_bytes: int) -> None:
    path = tmp_path / "file.csv"
    path.write_bytes(gzip.compress("\n".join([HEADER, *GOOD]).encode()))
    assert _read(path, block_bytes=block_bytes) == GOOD_ROWS


def test_a_byte_order_mark_is_not_part_of_the_first_name(tmp_path: Path) -> None:
    assert _read(_file(tmp_path, "\ufeff" + HEADER, *GOOD)) == GOOD_ROWS


def test_columns_are_found_by_name_among_others_in_any_order(tmp_path: Path) -> None:
    path = _file(tmp_path, "tag,more,count,id,more,score", "a,x,7,3,y,0.5")
    assert _read(path) == GOOD_ROWS[:1]


def test_a_file_without_header_has_all_columns_in_order(tmp_path: Path) -> None:
    path = _file(tmp_path, *(line.replace(",", "\t") for line in GOOD))
    rows = _read(path, header=False, delimiter="\t")
    assert rows == [(line - 1, *rest) for line, *rest in GOOD_ROWS]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**63 - 1),
            st.floats(-10, 10),
            st.none() | st.integers(-(2**63), 2**63 - 1),
            st.text(st.characters(blacklist_characters=",\n\r", blacklist_categories=["Cs"]), max_size=5),
        ),
        max_size=8,
    ),
    st.integers(1, 200),
)
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[int, float, int | None, str]],
    block_bytes: int,
) -> None:
    text = [f"{a},{b!r},{'' if c is None else c},{d}" for a, b, c, d in rows]
    path = _file(tmp_path_factory.mktemp("written"), HEADER, *text)
    wanted = [(index + 2, a, b, c, d.encode()) for index, (a, b, c, d) in enumerate(rows)]
    assert _read(path, block_bytes=block_bytes) == wanted


# One bad line among good ones, and what the error must say.
BAD = [
    ("3,0.5", r":3: got '3,0.5', where column 'count' is missing; expected 4 columns instead of 2"),
    ("", r":3: got '', where column 'score' is missing; expected 4 columns instead of 1"),
    ("3,0.5,7,a,b", r":3: got 'b' after the last column 'tag': the line has 5 columns; expected 4"),
    ("x,0.5,7,a", r":3: column 'id': got 'x'; expected an integer of at least 0"),
    ("-1,0.5,7,a", r":3: column 'id': got '-1'; expected an integer of at least 0"),
    (",0.5,7,a", r":3: column 'id': got ''; expected an integer of at least 0"),
    ("1.0,0.5,7,a", r":3: column 'id': got '1.0'; expected an integer"),
    ("0x1F,0.5,7,a", r":3: column 'id': got '0x1F'; expected an integer"),
    ("1_0,0.5,7,a", r":3: column 'id': got '1_0'; expected an integer"),
    ("9223372036854775808,0.5,7,a", r":3: column 'id': got '9223372036854775808'; expected an integer"),
    ("9" * 5000 + ",0.5,7,a", r":3: column 'id': got '9{80}' … \(5,000 bytes\); expected an integer"),
    ("3,11,7,a", r":3: column 'score': got '11'; expected a number in \[-10, 10\]"),
    ("3,nan,7,a", r":3: column 'score': got 'nan'; expected a number"),
    ("3,inf,7,a", r":3: column 'score': got 'inf'; expected a number"),
    ("3,1e999,7,a", r":3: column 'score': got '1e999'; expected a number"),
    ("3,abc,7,a", r":3: column 'score': got 'abc'; expected a number"),
    ("3,0.5,seven,a", r":3: column 'count': got 'seven'; expected an integer or nothing"),
    ('"3",0.5,7,a', r""":3: column 'id': got '"3"'; expected an integer"""),
    ("3\x00,0.5,7,a", r":3: column 'id': got '3\\x00'; expected an integer"),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=range(len(BAD)))
@pytest.mark.parametrize("block_bytes", [10, 1 << 20])
def test_a_bad_line_is_named_by_file_line_and_column(tmp_path: Path, line: str, message: str, block_bytes: int) -> None:
    path = _file(tmp_path, HEADER, GOOD[0], line, *GOOD[1:])
    with pytest.raises(InputError, match=r"file\.csv" + message):
        _read(path, block_bytes=block_bytes)


@pytest.mark.parametrize("block_bytes", [10, 1 << 20])
def test_bad_lines_can_be_left_out_and_counted(tmp_path: Path, block_bytes: int) -> None:
    path = _file(tmp_path, HEADER, GOOD[0], *(line for line, _ in BAD), *GOOD[1:])
    file = DelimitedFile(path, COLUMNS, on_bad_row="skip", block_bytes=block_bytes)
    count = RowCount()
    rows = _rows(list(file.blocks(count)))
    shift = len(BAD)
    assert rows == [GOOD_ROWS[0], *((line + shift, *rest) for line, *rest in GOOD_ROWS[1:])]
    assert (count.rows, count.skipped) == (4, len(BAD))
    assert len(count.examples) == 5
    assert "column 'count' is missing" in count.examples[0]


@pytest.mark.parametrize("cut", [0, 3, 9])
def test_a_last_line_cut_short_is_a_bad_line(tmp_path: Path, cut: int) -> None:
    whole = "7,0.125,99,tail"
    path = _file(tmp_path, HEADER, *GOOD, whole[: whole.index(",tail") - cut], last="")
    with pytest.raises(InputError, match=r"file\.csv:6: got .* where column '\w+' is missing"):
        _read(path)


@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.parametrize("kept", [0.5, 0.99])
def test_a_gzip_file_cut_short_is_an_error_that_names_the_line(tmp_path: Path, policy: str, kept: float) -> None:
    lines = [f"{index},0.5,{index * 7919 % 1000003},tag{index}" for index in range(20_000)]
    whole = gzip.compress("\n".join([HEADER, *lines]).encode())
    path = tmp_path / "file.csv"
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(InputError, match=r"file\.csv:\d+: got compressed data that breaks off") as caught:
        _read(path, on_bad_row=policy)
    line = int(str(caught.value).split(":")[1])
    assert 20_000 * (kept - 0.25) < line < 20_000 * min(kept + 0.25, 1)


def test_a_damaged_gzip_file_is_an_error(tmp_path: Path) -> None:
    whole = bytearray(gzip.compress("\n".join([HEADER, *GOOD * 1000]).encode()))
    whole[len(whole) // 2] ^= 0xFF
    path = tmp_path / "file.csv"
    path.write_bytes(bytes(whole))
    with pytest.raises(InputError, match=r"compressed data that breaks off or is damaged|column"):
        _read(path)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("block_bytes", [24, 1 << 20])
@pytest.mark.parametrize("at", [0, 2])
def test_an_empty_line_is_a_bad_line_where_there_are_columns(
    tmp_path: Path, end: str, block_bytes: int, at: int
) -> None:
    columns = (Column("name", ColumnKind.TEXT), Column("tag", ColumnKind.TEXT))
    lines = ["a,b", "c,d", "e,f"]
    path = _file(tmp_path, "name,tag", *lines[:at], "", *lines[at:], end=end, last=end)
    with pytest.raises(InputError, match=rf"file\.csv:{at + 2}: got .* where column 'tag' is missing"):
        list(DelimitedFile(path, columns, block_bytes=block_bytes).blocks())


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = _file(tmp_path, HEADER, "1" * 5000)
    with pytest.raises(InputError, match=r"file\.csv:2: got a line that is longer than 100 bytes"):
        _read(path, block_bytes=50, max_line_bytes=100)


@pytest.mark.parametrize("block_bytes", [7, 50, 333, 1 << 20])
@pytest.mark.parametrize("length", [100, 101, 3000])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("zipped", [False, True])
def test_a_line_is_too_long_wherever_in_a_block_it_stands(
    tmp_path: Path, block_bytes: int, length: int, end: str, zipped: bool
) -> None:
    line = "7,1.5,2,"
    path = _file(tmp_path, HEADER, *GOOD, line + "y" * (length - len(line)), *GOOD, end=end)
    if zipped:
        path.write_bytes(gzip.compress(path.read_bytes()))
    number = len(GOOD) + 2
    if length == 100:
        assert sum(len(b) for b in _blocks(path, block_bytes)) == 2 * len(GOOD) + 1
        return
    with pytest.raises(
        InputError, match=rf"csv:{number}: got a line that is longer than 100 bytes .*on_bad_row='skip'"
    ):
        list(_blocks(path, block_bytes))
    count = RowCount()
    kept = [line for block in _blocks(path, block_bytes, count, "skip") for line in block.lines.tolist()]
    assert kept == [n for n in range(2, 2 * len(GOOD) + 3) if n != number]
    assert count.skipped == 1


def _blocks(
    path: Path, block_bytes: int, count: RowCount | None = None, on_bad_row: OnBadRow = "error"
) -> Iterator[Block]:
    file = DelimitedFile(path, COLUMNS, block_bytes=block_bytes, max_line_bytes=100, on_bad_row=on_bad_row)
    return file.blocks(count)


def test_a_header_that_is_too_long_is_refused(tmp_path: Path) -> None:
    path = _file(tmp_path, HEADER + "," + "z" * 200, *GOOD)
    with pytest.raises(InputError, match=r"csv:1: got a line that is longer than 100 bytes"):
        list(_blocks(path, 1 << 20, None, "skip"))


def test_the_pattern_of_a_number_has_no_two_ways_to_match_a_digit() -> None:
    """With two of them, a field of n digits and a letter takes n² steps."""
    from tilerec.data.delimited import _NUMBER

    assert b"[0-9]+\\.?[0-9]*" not in _NUMBER.pattern
    for text, good in {
        b"1": True, b"1.": True, b".5": True, b"-1.5e-3 ": True, b"1.5.": False, b".": False, b"1e": False,
    }.items():  # fmt: skip
        assert bool(_NUMBER.fullmatch(text)) is good
    assert not _NUMBER.fullmatch(b"1" * 200_000 + b"x")


def test_no_block_holds_much_more_text_than_asked_for(tmp_path: Path) -> None:
    path = _file(tmp_path, HEADER, *(f"{index},0.5,1,x" for index in range(2000)))
    blocks = list(DelimitedFile(path, COLUMNS, block_bytes=200).blocks())
    assert max(len(block) for block in blocks) <= 2 * 200 / len("1,0.5,1,x\n")
    assert sum(len(block) for block in blocks) == 2000


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (
            "id,scores,count,tag",
            r"got header 'id,scores,count,tag'; expected a column 'score'. Did you mean 'scores'\?",
        ),
        ("id,score,count,count,tag", r":1: got column 'count' more than once in the header"),
        ("", r"expected a column 'id'"),
    ],
)
def test_a_header_that_does_not_fit_is_an_error_on_line_1(tmp_path: Path, header: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _read(_file(tmp_path, header, *GOOD))


def test_an_empty_file_is_an_error_and_a_header_alone_is_not(tmp_path: Path) -> None:
    empty = tmp_path / "empty.csv"
    empty.touch()
    with pytest.raises(InputError, match="got an empty file"):
        _read(empty)
    assert _read(_file(tmp_path, HEADER)) == []
    assert _read(_file(tmp_path, HEADER, last="")) == []


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.csv: got 'No such file.* on opening it"):
        _read(tmp_path / "nowhere.csv")


def test_a_missing_number_reads_as_zero_with_its_mark(tmp_path: Path) -> None:
    (block,) = DelimitedFile(_file(tmp_path, HEADER, *GOOD), COLUMNS).blocks()
    assert np.array_equal(block.numbers["count"], [7, 0, -2, 0])
    assert np.array_equal(block.missing["count"], [False, True, False, False])


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="on_bad_row: got 'ignore'"):
        DelimitedFile(tmp_path, COLUMNS, on_bad_row="ignore")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected at least 1"):
        DelimitedFile(tmp_path, COLUMNS, block_bytes=0)


@example([[b"", b'"']], False)
@given(
    st.lists(st.lists(st.text('a", \t1', max_size=5).map(str.encode), min_size=2, max_size=2), min_size=1, max_size=4),
    st.booleans(),
)
def test_fields_in_quotes_are_read_alike_by_both_parsers(rows: list[list[bytes]], all_quoted: bool) -> None:
    """Fields as `csv.writer` writes them, and raw ones."""
    columns = (Column("a", ColumnKind.TEXT), Column("b", ColumnKind.TEXT))
    written = io.StringIO(newline="")
    writer = csv.writer(written, quoting=csv.QUOTE_ALL if all_quoted else csv.QUOTE_MINIMAL, lineterminator="\n")
    writer.writerows([field.decode() for field in row] for row in rows)
    file = DelimitedFile("x.csv", columns, quotes=True)
    for text, exact in ((written.getvalue().encode(), True), (b"".join(b",".join(row) + b"\n" for row in rows), False)):
        fast = file._parse_fast(1, text, ("a", "b"))
        if fast is None:  # raw fields that make another number of columns, or a quote that does not end
            assert not exact
            continue
        slow = file._parse_lines(1, text, ("a", "b"), RowCount(), BrokenRow())
        assert [one.to_pylist() for one in fast.texts.values()] == [one.to_pylist() for one in slow.texts.values()]
        if exact:
            assert list(zip(*(one.to_pylist() for one in slow.texts.values()), strict=True)) == list(map(tuple, rows))


def test_a_quote_that_does_not_end_on_its_line_is_a_bad_line(tmp_path: Path) -> None:
    columns = (Column("a", ColumnKind.TEXT), Column("n", ColumnKind.INTEGER))
    path = tmp_path / "a.csv"
    path.write_bytes(b'"a",n\n"x, ""y""",1\n"two\nlines",2\n"z",3\n')
    with pytest.raises(InputError, match=r"a.csv:3: got '\"two', with a field in quotes that does not end on its line"):
        list(DelimitedFile(path, columns, quotes=True).blocks())


@pytest.mark.parametrize("block_bytes", [1, 8, 1 << 20])
def test_all_lines_of_a_row_that_is_broken_within_quotes_are_left_out(block_bytes: int, tmp_path: Path) -> None:
    columns = (Column("a", ColumnKind.TEXT), Column("n", ColumnKind.INTEGER))
    path = tmp_path / "a.csv"
    broken = b'"two\nwhole,7\nlines, ""here"", and\n""more""","3\nlast",2\n'  # its second line looks like a row
    path.write_bytes(b'"a",n\n"x, ""y""",1\n' + broken + b'"z",3\nw"",4\n"never\nu,5\n')
    count = RowCount()
    file = DelimitedFile(path, columns, quotes=True, on_bad_row="skip", block_bytes=block_bytes)
    for _ in range(2):  # the open quote at the end of a pass is not one of the next pass
        texts = [text for block in file.blocks(count) for text in block.texts["a"].to_pylist()]
        assert texts == [b'x, "y"', b"z", b'w""']
    assert count.skipped == 2 * 7
    assert "a.csv:4: got 'whole,7', inside of the quotes that begin on line 3; expected a line" in count.examples[1]


def test_a_stray_quote_costs_the_lines_of_the_longest_row(tmp_path: Path) -> None:
    columns = (Column("a", ColumnKind.TEXT), Column("n", ColumnKind.INTEGER))
    path = tmp_path / "a.csv"
    path.write_bytes(b'a,n\n"x,0\n' + b"".join(b"y,%d\n" % n for n in range(10, 60)))
    count = RowCount()
    (block,) = DelimitedFile(path, columns, quotes=True, on_bad_row="skip", max_line_bytes=40).blocks(count)
    assert block.numbers["n"].tolist() == list(range(17, 60))  # 4 + 7 * 5 bytes are within the limit
    assert count.skipped == 8


def test_booleans_are_those_of_arrow(tmp_path: Path) -> None:
    columns = (Column("a", ColumnKind.BOOLEAN, optional=True),)
    path = tmp_path / "a.csv"
    path.write_bytes(b"a\ntrue\nFalse\n1\n\nTRUE\n0\n")
    (block,) = DelimitedFile(path, columns).blocks()
    assert block.numbers["a"].tolist() == [True, False, True, False, True, False]
    assert block.missing["a"].tolist() == [False, False, False, True, False, False]
    slow = DelimitedFile(path, columns)._parse_lines(2, path.read_bytes()[2:], ("a",), RowCount(), BrokenRow())
    assert slow.numbers["a"].tolist() == block.numbers["a"].tolist()
    path.write_bytes(b"a\ntrue\nyes\n")
    with pytest.raises(InputError, match=r"a.csv:3: column 'a': got 'yes'; expected true or false or nothing"):
        list(DelimitedFile(path, columns).blocks())
