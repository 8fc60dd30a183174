"""`--config FILE`: options of a command from a TOML file.

    # plan.toml, for `tilerec plan tables.json --config plan.toml`
    hosts = 4
    ranks-per-host = 8
    what-ifs = false

A key is the long name of an option without its dashes. A value is read as on the command line; an option that may be
repeated takes an array. An option on the command line replaces the value of the file.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from tilerec.errors import ConfigError, FileError, TilerecError
from tilerec.output_path import check_output
from tilerec.terminal import print_error

_NOT_IN_FILES = ("config", "help")


def with_config(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the option `--config`, for functions that typer makes a command of."""

    @functools.wraps(function)
    def command(*args: Any, config: str | None = None, **kwargs: Any) -> None:
        paths = {name: value for name, value in kwargs.items() if isinstance(value, str | Path) and value}
        with _exit_on_error():
            for name, value in paths.items() if config else ():
                check_output(f"--{name.replace('_', '-')}", value, {"--config": [config or ""]})
        function(*args, **kwargs)

    own = inspect.signature(function, eval_str=True)
    option = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_Config)
    command.__signature__ = own.replace(parameters=[*own.parameters.values(), option])  # type: ignore[attr-defined]
    command.__annotations__ = {**function.__annotations__, "config": _Config}
    return command


@contextmanager
def _exit_on_error() -> Iterator[None]:
    try:
        yield
    except TilerecError as error:
        print_error(str(error))
        raise typer.Exit(1) from None


def _use_file(ctx: typer.Context, path: str | None) -> str | None:
    """Make the values of the file the defaults of the other options."""
    if path is not None and not ctx.resilient_parsing:
        with _exit_on_error():
            ctx.default_map = option_values(Path(path), _options(ctx.command))
    return path


_Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=_use_file,
        help="TOML file of options: its values are defaults, options given here win.",
    ),
]


def _options(command: Any) -> dict[str, Any]:
    """Return the options of a command by their keys in a file."""
    options = [param for param in command.params if param.param_type_name == "option"]
    found = {text[2:]: option for option in options for text in option.opts if text.startswith("--")}
    return {key: option for key, option in found.items() if key not in _NOT_IN_FILES}


def option_values(path: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a file by the names of their parameters.

    Args:
        options: of the command, by key.

    Raises:
        FileError: the file cannot be read.
        ConfigError: it is no TOML, a key is unknown, or a value has another form than its option.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    where = f"--config {path}"
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(
            f"{where}: got '{error.strerror or error}'; expected a readable TOML file. Check the path.", error.errno
        ) from error
    except ValueError as error:  # of TOML, and of UTF-8
        raise ConfigError(f"{where}: got '{error}'; expected a TOML file of options. Correct it.") from error
    unknown = next((key for key in document if key not in options), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown.replace("_", "-"), options, n=1)
        move = f"The nearest key is '{near[0]}'." if near else f"Keys are {', '.join(sorted(options))}."
        raise ConfigError(f"{where}: got the key '{unknown}'; expected options of this command. {move}")
    return {options[key].name: _value(f"{where}: {key}", value, options[key]) for key, value in document.items()}


def _value(where: str, value: object, option: Any) -> str | list[str]:
    """Return a value as words of a command line."""
    if option.multiple:
        if not isinstance(value, list):
            raise ConfigError(f"{where}: got {value!r}; expected an array. Write [{value!r}].")
        return [_word(where, one) for one in value]
    if option.is_flag and not isinstance(value, bool):
        raise ConfigError(f"{where}: got {value!r}; expected true or false. Correct it.")
    return _word(where, value)


def _word(where: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | int | float):
        raise ConfigError(f"{where}: got {value!r}; expected a string, a number, true or false. Correct it.")
    return str(value)
