"""`ServedModel`: the version of a package that serves now; the next one takes its place between two batches.

another version  ->  another thread loads and tries it, and brings it to the newest published state
                 ->  new requests go to it; running ones end on the old one
                     not usable, or its log is not: the old one goes on with its own log, the error is kept
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from tilerec.errors import TilerecError
from tilerec.export.array_package import ArrayPackage
from tilerec.export.arrays import ARRAY_DTYPES, Array
from tilerec.export.manifest import Manifest
from tilerec.export.signature import BATCH
from tilerec.serve.package_source import PackageSource

if TYPE_CHECKING:
    from tilerec.delta.follower import Follower
    from tilerec.delta.record import DeltaRecord
    from tilerec.delta.request_lock import RequestLock

_LOG = logging.getLogger("tilerec.serve")


class Answer(NamedTuple):
    """Outputs of a batch. version: `Version.name` while it ran."""

    outputs: list[Array]
    version: str


@final
class Version:
    """A loaded package, and the published state of its weights.

    Attributes:
        base: the first digits of the digest of the package's weights.
        name: of the weights as they are: `3f09a1c2b7d4`, those of the package; `3f09a1c2b7d4@17`, state 17 of the log;
            `3f09a1c2b7d4@16..17`, rows of both, while state 17 is written.
        record: of the published state; None: the package's own weights, or rows of several states.
        lock: held by a batch, and by a follower for a few rows at a time, so no batch reads a row that is half new.

    Args:
        follows: the weights will follow a log (`follow`). This imports torch.
    """

    def __init__(self, package: ArrayPackage, *, follows: bool = False) -> None:
        self.package = package
        self.base = self.name = package.manifest.base[:12]
        self.record: DeltaRecord | None = None
        self.loaded = time.time()
        self.lock: RequestLock | AbstractContextManager[object] = _request_lock() if follows else nullcontext()
        self._state = ""

    @property
    def manifest(self) -> Manifest:
        return self.package.manifest

    def run(self, tensors: Sequence[Array]) -> Answer:
        """Return the arrays of the outputs, as `ArrayPackage.run`, and the state of the weights that made them."""
        with self.lock:
            return Answer(self.package.run(tensors), self.name)

    def follow(self, deltas: str | Path) -> Follower:
        """Return a follower of these weights, at the newest base of a log. Raises as `Follower`."""
        from tilerec.delta.follower import Follower
        from tilerec.export.loading import as_tensors

        tensors = as_tensors(self.manifest, self.package.weights)
        return Follower(deltas, tensors, lock=self.lock, partial=True, noted=self._note)

    def _note(self, record: DeltaRecord, complete: bool) -> None:
        """Name the weights. Called while the lock is held."""
        self.record = record if complete else None
        if complete:
            self._state = str(record.sequence)
            self.name = f"{self.base}@{self._state}"
        else:
            self.name = f"{self.base}@{self._state}..{record.sequence}"


@final
class ServedModel:
    """The first version of a source, and those that replace it.

    Args:
        source: of the versions: `FileSource(path)` for a file.
        deltas: folder of a log of published states (tilerec/delta) that the weights follow; None for none.
        every: seconds between two looks at the source and the log; 0 for none.
        rows_per_second: most rows of published states that are written in a second beside requests; None for no limit.
        noted: called with "loaded", "failed", "delta" or "refused" for each such event.

    Raises:
        FileError, ConfigError: the first version cannot be loaded.
    """

    def __init__(
        self, source: PackageSource, *, deltas: str | Path | None = None, every: float = 1.0,
        rows_per_second: float | None = None, noted: Callable[[str], object] = lambda _: None,
    ) -> None:  # fmt: skip
        self._source, self._deltas, self._every, self._noted = source, deltas, every, noted
        self._rows_per_second = rows_per_second
        self._follower: Follower | None = None
        self._waiting: Version | None = None  # for its log
        self._stop = threading.Event()
        self._errors = {"source": "", "log": ""}
        first = source.take()
        assert first is not None
        self.version = self._tried(first)
        self._follow()
        self._pages = threading.Thread(target=map_pages, args=(first,), name="pages", daemon=True)
        self._thread = threading.Thread(target=self._watch, name="versions", daemon=True)
        if every:
            self._thread.start()

    def map_pages(self) -> None:
        """Map the pages of the first version in a thread. A server calls this once it takes requests."""
        self._pages.start()

    def close(self) -> None:
        """Stop looking for versions. A state that is being written is written to its end, without a limit."""
        self._stop.set()
        self._limit_rows()
        if self._pages.is_alive():
            self._pages.join()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def sequence(self) -> int:
        """Number of the published state that the weights have; -1 without a log."""
        return -1 if self._follower is None else self._follower.sequence

    @property
    def error(self) -> str:
        """Why the newest version or the newest published state does not serve; "" if both do."""
        return " ".join(filter(None, self._errors.values()))

    def look(self) -> None:
        """Load a version that has come, and apply the deltas that have come. The thread calls this."""
        self._limit_rows()
        try:
            package = self._source.take()
            if package is not None:
                self._waiting = self._tried(package)
                map_pages(package)
        except (TilerecError, OSError) as error:
            self._waiting = None
            self._keep("source", error, "failed")
        if self._waiting is not None:
            self._replace(self._waiting)
        self._follow()

    def _tried(self, package: ArrayPackage) -> Version:
        return tried(package, follows=self._deltas is not None)

    def _replace(self, version: Version) -> None:
        """Let a version serve once it has the newest published state: rows never go back to an older one."""
        follower = None
        if self._deltas is not None:
            try:
                follower = version.follow(self._deltas)
                follower.poll()
            except (TilerecError, OSError) as error:
                self._keep("log", error, "refused")
                return
        self.version, self._follower, self._waiting = version, follower, None
        self._errors = {"source": "", "log": ""}
        self._noted("loaded")
        _LOG.info("%s: version %s serves", self._source.name, version.name)

    def _limit_rows(self) -> None:
        """Limit the rows of the version that serves. It has caught up with its log before, without a limit."""
        if self._follower is not None:
            self._follower.rows_per_second = self._rows_per_second
            if self._stop.is_set():  # looked at last, so that no other thread's limit outlasts `close`
                self._follower.rows_per_second = None

    def _watch(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self.look()
            except Exception as error:  # the thread outlives whatever a file holds
                self._keep("source", error, "failed")

    def _keep(self, origin: str, error: BaseException, event: str) -> None:
        if str(error) == self._errors[origin]:  # every look finds it again
            return
        self._errors[origin] = str(error)
        self._noted(event)
        _LOG.error("%s Version %s goes on.", error, self.version.name)

    def _follow(self) -> None:
        if self._deltas is None:
            return
        try:
            if self._follower is None:
                self._follower = self.version.follow(self._deltas)
            for _ in self._follower.poll():
                self._noted("delta")
            if self._waiting is None:
                self._errors["log"] = ""
        except (TilerecError, OSError) as error:
            self._keep("log", error, "refused")


def _request_lock() -> RequestLock:
    from tilerec.delta.request_lock import RequestLock

    return RequestLock()


def tried(package: ArrayPackage, *, follows: bool = False) -> Version:
    """Return a package that has run one sample without ids: no request waits for what the first call prepares.

    Raises:
        TilerecError: it cannot run.
    """
    package.run(_nothing(package.manifest))
    return Version(package, follows=follows)


def map_pages(package: ArrayPackage) -> None:
    """Read a byte of each page of the weights.

    The first read of a page by a process maps it and its neighbours. 14,900 such reads took 74 ms of a worker's first
    request of 649 samples, whose own work takes 18 (1.04 GB, Intel Xeon). In order, 1 GB takes 0.1 s.
    """
    for weight in package.weights.values():
        weight.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE].sum()


def _nothing(manifest: Manifest) -> list[Array]:
    """Return the inputs of a batch of one sample without ids."""
    return [
        np.zeros(
            [1 if size == BATCH else size if isinstance(size, int) else 0 for size in spec.shape],
            ARRAY_DTYPES[spec.dtype],
        )
        for spec in manifest.signature.specs()
    ]
