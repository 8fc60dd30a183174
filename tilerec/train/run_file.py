"""A run as one TOML file: the same frozen dataclasses as in Python, by their type hints.

    name = "clicks"                        RunConfig(
                                               name="clicks",
    [data]                                     data=CriteoData(
    kind = "criteo"
    path = "train.txt"                             path="train.txt",
                                               ),
    [model]
    kind = "dlrm"                              model=DLRMConfig(
    embedding_dim = 16                             embedding_dim=16,
                                               ),
    [train]                                    train=TrainConfig(
    batch_size = 4096                              batch_size=4096,
    dense_optimizer.kind = "Adam"                  dense_optimizer=Adam(),
                                               ),
                                           )

A table that selects one of several classes has a `kind` (`kinds.py`). Absent settings have the defaults of the
dataclass. Relative paths begin at the folder of the file (fields with the hint `FilePath`).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from tilerec.atomic_file import write_file
from tilerec.data.file_list import FilePath
from tilerec.errors import ConfigError, FileError, TilerecError
from tilerec.train.config import RunConfig
from tilerec.train.kinds import has_kinds, kind_of
from tilerec.train.toml_text import toml_text
from tilerec.train.values import fit_record, record_fields

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RUN_FILE = "run.toml"
_MOST_BYTES = 1 << 24


def read_run_file(path: str | Path) -> RunConfig:
    """Read a run from a TOML file.

    Raises:
        FileError: the file cannot be read.
        ConfigError: it is no TOML, or a setting is unknown, missing or invalid; the message has the file and the
            setting's dotted name.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise FileError(
            f"Run file {path}: got '{error.strerror or error}'; expected a readable TOML file. Check the path.",
            error.errno,
        ) from error
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"Run file {path}: got more than {_MOST_BYTES:,} bytes; expected a TOML file.")
    try:
        run = run_of_toml(data.decode(), default_name=Path(path).stem)
    except UnicodeDecodeError as error:
        raise ConfigError(f"Run file {path}: got bytes that are not UTF-8; expected a TOML file.") from error
    except TilerecError as error:
        raise ConfigError(f"{path}: {error}") from error
    folder = os.path.dirname(str(path))
    return with_paths(run, lambda one: os.path.join(folder, one) if folder else one)


def run_of_toml(text: str, default_name: str = "run") -> RunConfig:
    """Return the run that a TOML document describes; paths stay as they are."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"got text that is not TOML: {error}. Correct this line.") from error
    except RecursionError as error:
        raise ConfigError("got values nested too deeply; expected a run. Correct the file.") from error
    run: RunConfig = fit_record(RunConfig, document, "", defaults={"name": default_name})
    return run


def toml_of_run(run: RunConfig) -> str:
    """Return a run as a TOML document with every setting; `run_of_toml` returns an equal run.

    Raises:
        ConfigError: a class of the run cannot be imported by its name, so no file can name it.
    """
    return toml_text(plain_record(run))


def text_of_run(run: RunConfig) -> str:
    """Return a run as a TOML document with absolute paths, for a file in any folder. Raises as `toml_of_run`."""
    return toml_of_run(with_paths(run, os.path.abspath))


def write_run_file(path: str | Path, run: RunConfig) -> None:
    """Write a run to a TOML file, with absolute paths; replaces the file as a whole or not at all."""
    write_file(path, text_of_run(run), "Run file")


def plain_record(record: Any) -> dict[str, Any]:
    """Return a record as a table: plain values by name, without the fields that are None."""
    out: dict[str, Any] = {}
    if has_kinds(type(record)):
        kind = kind_of(record)
        if "<locals>" in kind or kind.startswith("__main__:"):
            raise ConfigError(
                f"Run file: got class {kind!r}; expected a class at the top level of a module. Move it to a module."
            )
        out["kind"] = kind
    for name, item in record_fields(type(record)).items():
        value = getattr(record, name)
        if value is None and item.default is None:
            continue
        out[name] = _plain(value)
    return out


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return plain_record(value)
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return "none" if value is None else value


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def with_paths(record: Any, convert: Callable[[str], str]) -> Any:
    """Return a record with every local path in it converted; URLs and empty paths stay."""
    return _with_locations(record, lambda one: one if not one or _URL.match(one) else convert(one))


def path_settings(record: Any) -> list[str]:
    """Return the paths and URLs in a record, such as those of a run's data."""
    found: list[str] = []

    def noted(one: str) -> str:
        found.append(one)
        return one

    _with_locations(record, noted)
    return [one for one in found if one]


def _with_locations(record: Any, convert: Callable[[str], str]) -> Any:
    """Return a record with every value of a field with the hint `FilePath` converted."""
    changes: dict[str, Any] = {}
    hints = get_type_hints(type(record), include_extras=True)
    for name in record_fields(type(record)):
        value, hint = getattr(record, name), hints[name]
        new = value
        if is_dataclass(value):
            new = _with_locations(value, convert)
        elif hint == FilePath:
            new = convert(value)
        elif isinstance(value, tuple) and FilePath in get_args(hint):
            new = tuple(convert(one) for one in value)
        elif isinstance(value, tuple) and any(is_dataclass(one) for one in value):
            new = tuple(_with_locations(one, convert) if is_dataclass(one) else one for one in value)
        if new != value:
            changes[name] = new
    return replace(record, **changes) if changes else record
