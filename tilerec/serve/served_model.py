"""`ServedModel`: the version of a package that serves now; the next one takes its place between two batches.

file replaced  ->  another thread loads and tries the new one, and brings it to the newest published state
               ->  new requests go to it; running ones end on the old one
                   not usable, or its log is not: the old one goes on with its own log, the error is kept
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from tilerec.delta.follower import Follower
from tilerec.errors import TilerecError
from tilerec.export.loading import Package, load
from tilerec.export.manifest import Manifest
from tilerec.export.signature import BATCH, dtype_of_name

_LOG = logging.getLogger("tilerec.serve")


Mark = tuple[int, int, int]
"""Inode, time of modification and size of a file."""


def mark_of(path: str | Path) -> Mark | None:
    """Return the mark of a file; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


@dataclass(frozen=True)
class Version:
    """A loaded package.

    Attributes:
        name: the first digits of its weights' digest.
        lock: held by a batch, and by a follower for a few rows at a time, so no batch reads a row that is half new.
    """

    package: Package
    name: str
    loaded: float = field(default_factory=time.time)
    lock: threading.Lock = field(default_factory=threading.Lock, compare=False)

    @property
    def manifest(self) -> Manifest:
        return self.package.manifest

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of the outputs, as `Package.run`."""
        with self.lock:
            return self.package.run(tensors)


@final
class ServedModel:
    """The package of a file, and of those that replace it.

    Args:
        path: of the package. Replace it as a whole (`mv`), as `tilerec export` does.
        deltas: folder of a log of published states (tilerec/delta) that the weights follow; None for none.
        every: seconds between two looks at the file and the log; 0 for none.
        opened: loads a package; `tilerec.export.load`, with all of its checks.
        checked: mark of the file whose weights the caller has checked: they are not read once more. None: none.
        noted: called with "loaded", "failed", "delta" or "refused" for each such event.

    Raises:
        FileError, ConfigError: as `tilerec.export.load`.
    """

    def __init__(
        self, path: str | Path, *, deltas: str | Path | None = None, every: float = 1.0,
        opened: Callable[[Path], Package] = load, checked: Mark | None = None,
        noted: Callable[[str], object] = lambda _: None,
    ) -> None:  # fmt: skip
        self._path, self._deltas, self._every, self._opened = Path(path), deltas, every, opened
        self._noted = noted
        self._follower: Follower | None = None
        self._waiting: Version | None = None  # for its log
        self._stop = threading.Event()
        self.error = ""
        self._seen = mark_of(self._path)
        if checked is not None and self._seen == checked and opened is load:
            self.version = self._loaded(functools.partial(load, verify=False))
        else:
            self.version = self._loaded(opened)
        self._follow()
        self._thread = threading.Thread(target=self._watch, name="versions", daemon=True)
        if every:
            self._thread.start()

    def close(self) -> None:
        """Stop looking at the file."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def sequence(self) -> int:
        """Number of the published state that the weights have; -1 without a log."""
        return -1 if self._follower is None else self._follower.sequence

    def look(self) -> None:
        """Load the file if it was replaced, and apply the deltas that have come. The thread calls this."""
        mark = mark_of(self._path)
        if mark != self._seen and mark is not None:
            self._seen = mark
            try:
                self._waiting = self._loaded(self._opened)
            except (TilerecError, OSError) as error:
                self._waiting = None
                self._keep(error, "failed")
        if self._waiting is not None:
            self._replace(self._waiting)
        self._follow()

    def _replace(self, version: Version) -> None:
        """Let a version serve once it has the newest published state: rows never go back to an older one."""
        follower = None
        if self._deltas is not None:
            try:
                follower = self._follower_of(version)
                follower.poll()
            except (TilerecError, OSError) as error:
                self._keep(error, "refused")
                return
        self.version, self._follower, self._waiting, self.error = version, follower, None, ""
        self._noted("loaded")
        _LOG.info("%s: version %s serves", self._path, version.name)

    def _watch(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self.look()
            except Exception as error:  # the thread outlives whatever a file holds
                self._keep(error, "failed")

    def _keep(self, error: BaseException, event: str) -> None:
        if str(error) == self.error:  # every look finds it again
            return
        self.error = str(error)
        self._noted(event)
        _LOG.error("%s. Version %s goes on.", error, self.version.name)

    def _loaded(self, opened: Callable[[Path], Package]) -> Version:
        package = opened(self._path)
        package.run(_nothing(package.manifest))  # what the first call prepares, no request waits for
        return Version(package, package.manifest.base[:12])

    def _follower_of(self, version: Version) -> Follower:
        return Follower(self._deltas or "", version.package.weights, lock=version.lock, partial=True)

    def _follow(self) -> None:
        if self._deltas is None:
            return
        try:
            if self._follower is None:
                self._follower = self._follower_of(self.version)
            for _ in self._follower.poll():
                self._noted("delta")
                self.error = "" if self._waiting is None else self.error
        except (TilerecError, OSError) as error:
            self._keep(error, "refused")


def _nothing(manifest: Manifest) -> list[Tensor]:
    """Return the inputs of a batch of one sample without ids."""
    return [
        torch.zeros(
            [1 if size == BATCH else size if isinstance(size, int) else 0 for size in spec.shape],
            dtype=dtype_of_name(spec.dtype),
        )
        for spec in manifest.signature.specs()
    ]
