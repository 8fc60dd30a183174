"""Outputs apart from inputs: every way in which a path can name an input, and paths that are apart."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tilerec.errors import ConfigError
from tilerec.file_kind import ANY
from tilerec.output_path import check_output, check_output_file


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a.parquet, days/1.parquet and days/more/2.parquet, and other names of them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "days" / "more").mkdir(parents=True)
    for name in ("a.parquet", "days/1.parquet", "days/more/2.parquet"):
        (tmp_path / name).write_text(name)
    (tmp_path / "soft.parquet").symlink_to("a.parquet")
    (tmp_path / "soft_days").symlink_to("days")
    os.link("a.parquet", "hard.parquet")
    os.link("days/1.parquet", "hard_day.parquet")
    (tmp_path / "days" / "outside.parquet").symlink_to("../other.parquet")
    (tmp_path / "other.parquet").write_text("other")
    return tmp_path


@pytest.mark.parametrize(
    ("out", "given", "message"),
    [
        ("a.parquet", "a.parquet", "which is DATA; expected a path apart from the inputs. Choose another path: the in"),
        ("days/../a.parquet", "a.parquet", "which is DATA a.parquet; expected"),
        ("{here}/a.parquet", "a.parquet", "which is DATA a.parquet; expected"),
        ("soft.parquet", "a.parquet", "which is the same file as DATA a.parquet; expected"),
        ("a.parquet", "soft.parquet", "which is the same file as DATA soft.parquet; expected"),
        ("hard.parquet", "a.parquet", "which is the same file as DATA a.parquet; expected"),
        ("soft_days/1.parquet", "days/1.parquet", "which is the same file as DATA days/1.parquet; expected"),
        ("a.parquet", "file://{here}/a.parquet", "which is DATA file://"),
        ("a.parquet", "local://{here}/a.parquet", "which is DATA local://"),
        ("a.parquet", "simplecache::file://{here}/a.parquet", "which is DATA simplecache::"),
        ("a.parquet", "zip://b.csv::{here}/a.parquet", "which is DATA zip://"),
        ("days/1.parquet", "days", "which is a file of DATA days; expected"),
        ("hard_day.parquet", "days", "which is a file of DATA days; expected"),
        ("other.parquet", "days", "which is a file of DATA days; expected"),
        (
            "days/new.parquet",
            "days/",
            "which lies in DATA days/; expected a path apart from the inputs. Choose another f",
        ),
        ("days/more/new.parquet", "days", "which lies in DATA days; expected"),
        ("soft_days/new.parquet", "days", "which lies in DATA days; expected"),
        ("days/new.parquet", "file://{here}/soft_days", "which lies in DATA file://"),
        ("days", "days", "which is DATA; expected"),
        ("days", "days/more/2.parquet", "which contains DATA days/more/2.parquet; expected"),
        ("days/1.parquet", "days/*.parquet", "which is a file of DATA days/*.parquet; expected"),
        ("hard_day.parquet", "days/?.parquet", "which is a file of DATA days/?.parquet; expected"),
        ("days/new.parquet", "days/*.parquet", "which matches DATA days/*.parquet; expected"),
        ("soft_days/new.parquet", "days/*.parquet", "which matches DATA days/*.parquet; expected"),
        ("days/more/new.parquet", "**/*.parquet", "which matches DATA **/*.parquet; expected"),
        ("b.parquet", "**/*.parquet", "which matches DATA **/*.parquet; expected"),
        ("memory://x/a.parquet", "memory:///x//a.parquet", "which is DATA memory:///x//a.parquet; expected"),
        ("memory://x/step-1", "memory://x/", "which lies in DATA memory://x/; expected"),
        ("memory://x", "memory://x/a.parquet", "which contains DATA memory://x/a.parquet; expected"),
        ("memory://x/new.csv", "memory://x/*.csv", "which matches DATA memory://x/*.csv; expected"),
    ],
)
def test_every_name_of_an_input_is_refused(here: Path, out: str, given: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_output("--out", out.format(here=here), {"DATA": [given.format(here=here)]})
    assert str(error.value).startswith(f"--out: got {out.format(here=here)}, {message.format(here=here)}")


@pytest.mark.parametrize(
    ("out", "given"),
    [
        ("b.parquet", "a.parquet"),
        ("days_2/a.parquet", "days"),
        ("a.parquet", "days"),
        ("days/new.txt", "days/*.parquet"),
        ("days/more/new.parquet", "days/*.parquet"),
        ("a.parquet", "s3://bucket/a.parquet"),
        ("memory://x/b.parquet", "memory://x/a.parquet"),
        ("memory://x", "a.parquet"),
        ("a.parquet", "absent.parquet"),
        ("b.parquet", ""),
    ],
)
def test_paths_apart_are_accepted(here: Path, out: str, given: str) -> None:
    check_output("--out", out, {"DATA": [given]})


def test_an_input_in_the_home_folder_is_found(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    with pytest.raises(ConfigError, match=r"is DATA ~/a\.parquet"):
        check_output("--out", "a.parquet", {"DATA": ["~/a.parquet"]})


@pytest.mark.parametrize("check", [check_output, partial(check_output_file, kind=ANY)])
def test_a_shared_folder_has_room_for_results_but_not_for_data(here: Path, check: Callable[..., None]) -> None:
    (here / "days" / "old.json").write_text("{}")
    for out in ("days/run.toml", "days/old.json", "days/model.pt2"):
        check("--out", out, shared={"DATA": ["days"]})
    for out in ("days/new.parquet", "days/new.csv.gz", "days/1.parquet", "hard_day.parquet"):
        with pytest.raises(ConfigError, match="DATA days; expected a path apart"):
            check("--out", out, shared={"DATA": ["days"]})


def test_a_file_needs_a_folder_and_is_none(here: Path) -> None:
    check_output_file("--out", "days/new.parquet", None)
    check_output_file("--out", "new.parquet", None)
    with pytest.raises(
        ConfigError, match=r"--out: got absent/a\.parquet; expected a file in an existing folder\. Create absent f"
    ):
        check_output_file("--out", "absent/a.parquet", None)
    with pytest.raises(ConfigError, match="--out: got the folder days; expected a file"):
        check_output_file("--out", "days", None)
