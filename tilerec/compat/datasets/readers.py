"""Rows of text files as iterable pipes, and splits of pipes, with TorchRec's names.

The pipes are torch's `IterDataPipe`s, so their methods (`.shuffle()`, `.batch(64)`, `.map(f)`) work.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from torch.utils.data.datapipes.datapipe import IterDataPipe

from tilerec.errors import ConfigError

PATH_MANAGER_KEY = "torchrec"
"""The name of TorchRec's opener of paths; here paths are opened by `open`."""

T = TypeVar("T")


def safe_cast(val: Any, dest_type: Callable[[Any], T], default: T) -> T:
    """Return the value in another type, or the default if it has no such value."""
    try:
        return dest_type(val)
    except ValueError:
        return default


class Rows(IterDataPipe[Any]):
    """A pipe over an iterable that can be iterated again."""

    def __init__(self, source: Iterable[Any]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)


class TextRows:
    """Lines of delimited files, each mapped to a row.

    Args:
        paths: the files, in order.
        row_mapper: maps the list of a line's texts; None: the list.
        header: whether the first line of each file is left out.
        delimiter: separator of the texts.
        open_kw: arguments of `open`.
    """

    def __init__(
        self, paths: Sequence[str], row_mapper: Callable[[list[str]], Any] | None, *, delimiter: str = ",",
        header: bool = False, **open_kw: Any,
    ) -> None:  # fmt: skip
        self._paths, self._map, self._delimiter, self._header = list(paths), row_mapper, delimiter, header
        self._open_kw = {"newline": "", **open_kw}

    def __iter__(self) -> Iterator[Any]:
        for path in self._paths:
            with open(path, **self._open_kw) as lines:
                for texts in islice(csv.reader(lines, delimiter=self._delimiter), int(self._header), None):
                    yield texts if self._map is None else self._map(texts)


class LoadFiles(Rows):
    """Pairs of a path and the open file.

    Args:
        datapipe: the paths.
        mode, open_kw: arguments of `open`.
        length: number of files, if `len` is needed.
    """

    def __init__(
        self, datapipe: Iterable[str], mode: str = "b", length: int = -1, path_manager_key: str = PATH_MANAGER_KEY,
        **open_kw: Any,
    ) -> None:  # fmt: skip
        super().__init__(datapipe)
        self.length, self._open_kw = length, {"mode": f"r{mode}" if mode in ("b", "t") else mode, **open_kw}

    def __iter__(self) -> Iterator[Any]:
        for path in self.source:
            with open(path, **self._open_kw) as file:
                yield path, file

    def __len__(self) -> int:
        if self.length < 0:
            raise TypeError("LoadFiles: has no length; give one with length=.")
        return self.length


class ReadLinesFromCSV(Rows):
    """Lists of texts of the lines of open files.

    Args:
        datapipe: pairs of a path and the file.
        skip_first_line: whether the first line of each file is left out.
        kw: arguments of `csv.reader`.
    """

    def __init__(self, datapipe: Iterable[tuple[str, Any]], skip_first_line: bool = False, **kw: Any) -> None:
        super().__init__(datapipe)
        self._first, self._kw = int(skip_first_line), kw

    def __iter__(self) -> Iterator[list[str]]:
        for _, file in self.source:
            yield from islice(csv.reader(file, **self._kw), self._first, None)


class Limit(Rows):
    """The first items of a pipe."""

    def __init__(self, datapipe: Iterable[Any], limit: int) -> None:
        super().__init__(datapipe)
        self.limit = limit

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.source), self.limit)


class _Split(Rows):
    """The items whose number in the pipe is chosen."""

    def __init__(self, source: Iterable[Any], chosen: Callable[[], Callable[[int], bool]]) -> None:
        super().__init__(source)
        self._chosen = chosen

    def __iter__(self) -> Iterator[Any]:
        chosen = self._chosen()
        return (item for i, item in enumerate(self.source) if chosen(i))


def _check_share(train_perc: float) -> None:
    if not 0.0 < train_perc < 1.0:
        raise ConfigError(f"train_perc: got {train_perc}; expected a share between 0 and 1, such as 0.9. Pass one.")


def rand_split_train_val(datapipe: Iterable[Any], train_perc: float, random_seed: int = 0) -> tuple[Rows, Rows]:
    """Return two pipes over the items: each item is in the first with the given probability, else in the second."""
    _check_share(train_perc)

    def chosen(train: bool) -> Callable[[int], bool]:
        draw = random.Random(random_seed)
        return lambda _: (draw.random() < train_perc) is train

    return _Split(datapipe, lambda: chosen(True)), _Split(datapipe, lambda: chosen(False))


def idx_split_train_val(
    datapipe: Iterable[Any], train_perc: float, decimal_places: int = 2,
    key_fn: Callable[[int], int] | None = None,
) -> tuple[Rows, Rows]:  # fmt: skip
    """Return two pipes over the items, split by item number: with 0.7, the first 70 of each 100 are in the first.

    Args:
        decimal_places: the period is 10 to this power.
        key_fn: maps an item's number before the split, such as a hash; None: the number.
    """
    _check_share(train_perc)
    period = 10**decimal_places
    first = round(train_perc * period)

    def train(i: int) -> bool:
        return (i if key_fn is None else key_fn(i)) % period < first

    return _Split(datapipe, lambda: train), _Split(datapipe, lambda: lambda i: not train(i))
