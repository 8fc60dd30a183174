"""`ServedModel`: the version of a package that serves now; the next one takes its place between two batches.

file replaced  ->  another thread loads and tries the new one  ->  new requests go to it; running ones end on the old
                                                           not usable: the old one goes on, the error is kept
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
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


@dataclass(frozen=True)
class Version:
    """A loaded package. name: the first digits of its weights' digest."""

    package: Package
    name: str
    loaded: float = field(default_factory=time.time)

    @property
    def manifest(self) -> Manifest:
        return self.package.manifest


@final
class ServedModel:
    """The package of a file, and of those that replace it.

    Args:
        path: of the package. Replace it as a whole (`mv`), as `tilerec export` does.
        deltas: folder of a log of published states (tilerec/delta) that the weights follow; None for none.
        every: seconds between two looks at the file and the log; 0 for none.
        opened: loads a package; `tilerec.export.load`, with its checks, unless the caller has made them.
        noted: called with "loaded", "failed", "delta" or "refused" for each such event.

    Raises:
        FileError, ConfigError: as `tilerec.export.load`.
    """

    def __init__(
        self, path: str | Path, *, deltas: str | Path | None = None, every: float = 1.0,
        opened: Callable[[Path], Package] = load, noted: Callable[[str], object] = lambda _: None,
    ) -> None:  # fmt: skip
        self._path, self._deltas, self._every, self._opened = Path(path), deltas, every, opened
        self._noted = noted
        self._follower: Follower | None = None
        self._stop = threading.Event()
        self.error = ""
        self._seen = self._mark()
        self.version = self._loaded()
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
        mark = self._mark()
        if mark != self._seen and mark is not None:
            self._seen = mark
            try:
                self.version, self.error = self._loaded(), ""
                self._follower = None
                self._noted("loaded")
                _LOG.info("%s: version %s serves", self._path, self.version.name)
            except (TilerecError, OSError) as error:
                self._keep(error, "failed")
        self._follow()

    def _watch(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self.look()
            except Exception as error:  # the thread outlives whatever a file holds
                self._keep(error, "failed")

    def _keep(self, error: BaseException, event: str) -> None:
        self.error = str(error)
        self._noted(event)
        _LOG.error("%s. Version %s goes on.", error, self.version.name)

    def _mark(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _loaded(self) -> Version:
        package = self._opened(self._path)
        package.run(_nothing(package.manifest))  # what the first call prepares, no request waits for
        return Version(package, package.manifest.base[:12])

    def _follow(self) -> None:
        if self._deltas is None:
            return
        try:
            if self._follower is None:
                self._follower = Follower(self._deltas, self.version.package.weights, partial=True)
            for _ in self._follower.poll():
                self._noted("delta")
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
