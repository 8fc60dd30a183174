"""`--config FILE`: values of a file are defaults, options on the command line win, and mistakes name the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from tilerec.cli import app as tilerec_app
from tilerec.option_file import with_config


def _app() -> typer.Typer:
    app = typer.Typer(add_completion=False)

    def place(
        source: Annotated[str, typer.Argument()],
        ranks_per_host: Annotated[int, typer.Option(min=1)] = 1,
        set_: Annotated[list[str] | None, typer.Option("--set")] = None,
        what_ifs: Annotated[bool, typer.Option("--what-ifs/--no-what-ifs")] = True,
        share: Annotated[float, typer.Option()] = 0.0,
        out: Annotated[Path, typer.Option()] = Path("plan.json"),
    ) -> None:
        values = (source, ranks_per_host, set_, what_ifs, share, str(out))
        typer.echo(json.dumps(values))

    app.command()(with_config(place))
    return app


def _run(path: Path, text: str, *arguments: str) -> tuple[int, str]:
    path.write_text(text)
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(
        _app(), ["tables.json", "--config", str(path), *arguments]
    )
    return result.exit_code, result.output


_ALL = 'ranks-per-host = 8\nset = ["a=1", "b=2"]\nwhat-ifs = false\nshare = 0.5\nout = "deep/plan.json"\n'


def test_values_of_the_file_are_the_defaults(tmp_path: Path) -> None:
    code, text = _run(tmp_path / "place.toml", _ALL)
    assert (code, json.loads(text)) == (0, ["tables.json", 8, ["a=1", "b=2"], False, 0.5, "deep/plan.json"])


def test_options_of_the_command_line_win_and_replace_a_whole_array(tmp_path: Path) -> None:
    code, text = _run(tmp_path / "place.toml", _ALL, "--ranks-per-host", "2", "--set", "c=3", "--what-ifs")
    assert (code, json.loads(text)) == (0, ["tables.json", 2, ["c=3"], True, 0.5, "deep/plan.json"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "ranks_per_host = 8",
            "got the key 'ranks_per_host'; expected options of this command. The nearest key is 'rank",
        ),
        ("rank-per-hosts = 8", "The nearest key is 'ranks-per-host'."),
        ("zzz = 8", "Keys are out, ranks-per-host, set, share, what-ifs."),
        ('config = "other.toml"', "got the key 'config'; expected options"),
        ('source = "other.json"', "got the key 'source'; expected options"),
        ("ranks-per-host = 0", "Invalid value for '--ranks-per-host'"),
        ("ranks-per-host = 1.5", "Invalid value for '--ranks-per-host'"),
        ("ranks-per-host = true", "Invalid value for '--ranks-per-host'"),
        ('set = "a=1"', "set: got 'a=1'; expected an array."),
        ("share = [0.5]", "share: got [0.5]; expected a string, a number, true or false."),
        ('what-ifs = "no"', "what-ifs: got 'no'; expected true or false."),
        ("[make]\nshare = 0.5", "got the key 'make'"),
        ("share = ", "expected a TOML file of options."),
    ],
)
def test_mistakes_of_the_file_are_named(tmp_path: Path, text: str, message: str) -> None:
    code, printed = _run(tmp_path / "place.toml", text)
    assert code != 0
    assert message in printed
    assert "Traceback" not in printed


def test_a_missing_file_and_one_that_is_no_text_are_named(tmp_path: Path) -> None:
    runner = CliRunner()
    missing = runner.invoke(_app(), ["tables.json", "--config", str(tmp_path / "none.toml")])
    assert (missing.exit_code, "expected a readable TOML file" in missing.output) == (1, True)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    binary = runner.invoke(_app(), ["tables.json", "--config", str(tmp_path / "bytes.toml")])
    assert (binary.exit_code, "expected a TOML file of options" in binary.output) == (1, True)


def test_an_output_cannot_replace_the_file(tmp_path: Path) -> None:
    path = tmp_path / "place.toml"
    code, text = _run(path, "share = 0.5", "--out", str(path))
    assert code == 1
    assert "--out: got " in text
    assert "which is --config" in text


def test_every_command_with_several_options_has_it() -> None:
    """Commands of four or more options besides it; `whatif` and the others of plans among them."""
    missing = []

    def visit(command: object, path: str) -> None:
        for name, one in getattr(command, "commands", {}).items():
            visit(one, f"{path} {name}")
        names = {text for param in getattr(command, "params", []) for text in param.opts if text.startswith("--")}
        if not hasattr(command, "commands") and len(names - {"--config"}) >= 4 and "--config" not in names:
            missing.append(path)

    visit(typer.main.get_command(tilerec_app), "tilerec")
    assert missing == []


def test_a_command_reads_required_options_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "clicks.csv").write_text("user,click\n1,0\n2,1\n")
    (tmp_path / "convert.toml").write_text(f"out = '{tmp_path / 'clicks.parquet'}'\ntext = 'user'\n")
    result = CliRunner().invoke(
        tilerec_app, ["data", "convert", str(tmp_path / "clicks.csv"), "--config", str(tmp_path / "convert.toml")]
    )
    assert result.exit_code == 0, result.output
    assert (tmp_path / "clicks.parquet").exists()
