"""What is printed cannot steer the terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from tilerec.cli import app
from tilerec.terminal import SafeConsole, printable

STEERING = "user\x1b]0;title\x07\x1b[2J\x9b1m\r\u202eresu"


def test_steering_characters_are_shown_as_escapes_and_text_stays() -> None:
    assert printable("a\tb\nc é 日本 …") == "a\tb\nc é 日本 …"
    assert printable("\x1b[31m\x00\x9b\u202e\x7f\r") == r"\x1b[31m\x00\x9b\u202e\x7f\r"
    assert printable(printable(STEERING)) == printable(STEERING)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_console_shows_steering_characters_in_texts_and_tables_and_keeps_its_own_colours(
    terminal: bool,
) -> None:
    file = io.StringIO()
    console = SafeConsole(file=file, force_terminal=terminal, color_system="standard" if terminal else None, width=200)
    table = Table("name")
    table.add_row(Text(STEERING, "red"))
    console.print(table)
    console.print(Text(STEERING, "red"), soft_wrap=True)
    console.print(STEERING, markup=False)
    printed = file.getvalue()
    assert "\\x1b]0;title" in printed
    assert ("\x1b[31m" in printed) is terminal
    assert not any(bad in printed for bad in ("\x1b]", "\x1b[2J", "\x07", "\x9b", "\r", "\u202e"))


def test_names_of_tables_reach_no_terminal_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tables.json").write_text(json.dumps([{"name": STEERING, "num_embeddings": 100, "embedding_dim": 8}]))
    Path("bad.json").write_text(json.dumps([{"name": STEERING, "num_embeddings": 0, "embedding_dim": 8}]))
    Path("twice.json").write_text(json.dumps([{"name": STEERING, "num_embeddings": 9, "embedding_dim": 8}] * 2))
    Path("data.csv").write_text("a,b\n" + STEERING.replace("\r", "") + ",1\n")
    runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
    for arguments, code in (
        (["plan", "tables.json", "--ranks-per-host", "2"], 0),
        (["plan", "show", "--tables"], 0),
        (["plan", "explain", STEERING], 0),
        (["plan", "explain", STEERING + "\x1b"], 1),
        (["plan", "diff", "plan.json", "plan.json"], 0),
        (["plan", "bad.json", "--ranks-per-host", "2"], 1),
        (["plan", "twice.json", "--ranks-per-host", "2"], 1),
        (["plan", STEERING, "--ranks-per-host", "2"], 1),
        (["stats", "data.csv", "--features", "a", "--out", "s.json"], 0),
        (["stats", STEERING], 1),
        (["train", STEERING], 1),
    ):
        result = runner.invoke(app, arguments)
        assert result.exit_code == code, result.output
        assert not any(bad in result.output for bad in ("\x1b", "\x07", "\x9b", "\r", "\u202e")), arguments
