"""Outputs of a command, apart from its inputs: no command replaces a file that it reads, or adds one to its input.

    predict run.toml new.parquet --out new.parquet        refused: the output is DATA
    predict run.toml new/ --out new/scores.parquet        refused: it lies in DATA, and the next run would read it
    predict run.toml 'new/*.parquet' --out new/s.parquet  refused: it matches DATA
    predict run.toml new/a.parquet --out new/s.parquet    accepted

Symbolic links are followed, hard links are compared, and URLs of local files are paths.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tilerec.errors import ConfigError
from tilerec.file_kind import FileKind, check_kind

Inputs = Mapping[str, Iterable[str | Path]]
"""Files, folders, patterns and URLs by their role, the name under which the user gave them, such as "DATA"."""

_TABLES = (".parquet", ".parq", ".pq", ".csv", ".tsv", ".txt", ".dat", ".data")
_DATA_ENDINGS = (*_TABLES, *(f"{ending}.gz" for ending in _TABLES))
"""Endings of the files that readers list in a folder."""
_RESULT_ENDINGS = (".toml", ".json", ".yaml", ".html", ".pt2", ".safetensors")
"""Endings of files that commands write beside data, and no reader of data lists."""
_NOTHING: Inputs = {}
_LOST = "Choose another path: the input would be lost."
_READ = "Choose another folder: the next run would read the output as data."


def check_output_file(
    option: str, out: str | Path, kind: FileKind | None, inputs: Inputs = _NOTHING, *, shared: Inputs = _NOTHING
) -> None:
    """Raise before any work unless a file can be written to `out` without harm to an input or to another file.

    Args:
        option: name of the output, such as "--out".
        out: a local path. Relative paths begin at the current folder, those of inputs too.
        kind: of the file, which replaces an earlier one of its kind; None: it replaces none.
        inputs, shared: see `check_output`.

    Raises:
        ConfigError: `out` is a folder or in none; or see `check_output` and `check_kind`.
    """
    path = Path(out)
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{option}: got {out}; expected a file in an existing folder. Create {path.parent} first.")
    if path.is_dir():
        raise ConfigError(f"{option}: got the folder {out}; expected a file. Name a file in it.")
    check_output(option, out, inputs, shared=shared)
    check_kind(option, out, kind)


def check_output(option: str, out: str | Path, inputs: Inputs = _NOTHING, *, shared: Inputs = _NOTHING) -> None:
    """Raise unless an output is apart from every input.

    Args:
        option: name of the output, such as "--out".
        out: a file or a folder, or a URL.
        inputs: no output may be one of them, lie in one, match one, or contain one.
        shared: inputs whose folders may have other files, such as the run file beside the data. An output in such a
            folder is refused if it is one of the data, or its name ends as those of data files do.

    Raises:
        ConfigError: the message has the input, the relation and the next move.
    """
    for role, given, strict in (*_each(inputs, strict=True), *_each(shared, strict=False)):
        found = _relation(str(out), str(given), strict=strict)
        if found is None:
            continue
        relation, move = found
        name = role if str(given) in ("", str(out)) else f"{role} {given}"
        raise ConfigError(
            f"{option}: got {out}, which {relation} {name}; expected a path apart from the inputs. {move}"
        )


def _each(inputs: Inputs, *, strict: bool) -> Iterator[tuple[str, str | Path, bool]]:
    for role, paths in inputs.items():
        for path in paths:
            if str(path):
                yield role, path, strict


def _relation(out: str, given: str, *, strict: bool) -> tuple[str, str] | None:
    """Return the verb that relates an output to an input, and the next move; None if they are apart."""
    here, there = _local_path(out), _local_path(given)
    if here is None or there is None:
        return _remote_relation(out, given) if here is there is None else None
    if _same(here, there):
        return ("is" if os.path.abspath(here) == os.path.abspath(there) else "is the same file as"), _LOST
    if _lies_in(there, here):
        return "contains", _LOST
    if os.path.isdir(there):
        if os.path.exists(here) and any(_same(here, file) for file in _files(there, strict=strict)):
            return "is a file of", _LOST
        if _lies_in(here, there) and (strict or here.endswith(_DATA_ENDINGS)):
            return "lies in", _READ
    elif not os.path.exists(there) and glob.has_magic(there):
        if os.path.exists(here) and any(_same(here, file) for file in glob.iglob(there, recursive=True)):
            return "is a file of", _LOST
        if _matches_pattern(here, there):
            return "matches", _READ
    return None


def _local_path(path: str) -> str | None:
    """Return the path of a local file, folder or pattern, without its protocol; None for other URLs."""
    # Of chained URLs the last one names the storage: "simplecache::file:///a.parquet", "zip://a.csv::b.zip".
    last = path.rpartition("::")[2] if "://" in path else path
    protocol, found, rest = last.partition("://")
    if not found:
        return os.path.expanduser(last)
    return os.path.expanduser(rest) if protocol in ("file", "local") else None


def _same(first: str, second: str) -> bool:
    if os.path.realpath(first) == os.path.realpath(second):
        return True
    try:
        return os.path.samefile(first, second)
    except OSError:
        return False


def _lies_in(path: str, folder: str) -> bool:
    return Path(os.path.realpath(folder)) in Path(os.path.realpath(path)).parents


def _files(folder: str, *, strict: bool) -> Iterator[str]:
    """Yield the files below a folder; results of commands only if `strict`."""
    for place, _, names in os.walk(folder):
        yield from (os.path.join(place, name) for name in names if strict or not name.endswith(_RESULT_ENDINGS))


def _matches_pattern(path: str, pattern: str) -> bool:
    """Return True if a path, which need not exist, is one that `glob` finds for a pattern."""
    whole = os.path.abspath(pattern)
    head = whole[: re.search(r"[*?[]", whole).start()].rpartition(os.sep)[0]  # type: ignore[union-attr] # it has magic
    resolved = os.path.realpath(head) + whole[len(head) :]
    return _matches(Path(os.path.abspath(path)).parts, Path(whole).parts) or _matches(
        Path(os.path.realpath(path)).parts, Path(resolved).parts
    )


def _matches(parts: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":  # any number of folders
        return any(_matches(parts[skipped:], pattern[1:]) for skipped in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _remote_relation(out: str, given: str) -> tuple[str, str] | None:
    here, there = _normal_url(out), _normal_url(given)
    if here == there:
        return "is", _LOST
    if there.startswith(f"{here}/"):
        return "contains", _LOST
    if glob.has_magic(there):
        return ("matches", _READ) if _matches(tuple(here.split("/")), tuple(there.split("/"))) else None
    return ("lies in", _READ) if here.startswith(f"{there}/") else None


def _normal_url(url: str) -> str:
    """Return a URL in the one form that its file system gives it, without a slash at the end."""
    from fsspec.core import url_to_fs

    last = url.rpartition("::")[2]
    try:
        filesystem, path = url_to_fs(last)
        last = filesystem.unstrip_protocol(path)
    except (ImportError, ValueError, OSError):  # the command names what is missing, or wrong with the URL
        pass
    protocol, _, rest = last.partition("://")
    return f"{protocol}://{posixpath.normpath(rest)}"
