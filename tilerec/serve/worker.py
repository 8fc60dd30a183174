"""`serve_in_worker`: a worker process, which serves the versions that its parent sends.

parent  ->  worker    a descriptor of a `PackageCopy`; or the reason why a changed file does not serve
worker  ->  parent    `READY` once it takes requests; or the reason why it cannot
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from typing import final

from tilerec.errors import ConfigError, TilerecError
from tilerec.export.array_package import ArrayPackage
from tilerec.export.torch_library import set_threads
from tilerec.serve.metrics import ServerMetrics
from tilerec.serve.package_copy import PackageCopy
from tilerec.serve.served_model import ServedModel
from tilerec.serve.server_options import ServerOptions

MOST_BYTES = 1 << 14
"""Largest message between parent and worker."""
READY = "ready"
_PR_SET_PDEATHSIG = 1


@final
class WorkerSource:
    """The version that a worker starts with, and those that its parent sends.

    Args:
        copy: of the first version.
        channel: of `new_channel`.
    """

    def __init__(self, copy: PackageCopy, channel: socket.socket) -> None:
        self.name = copy.name
        self._first: PackageCopy | None = copy
        self._channel = channel

    def take(self) -> ArrayPackage | None:
        """Return the version of the next message; raise `ConfigError` for one with a reason."""
        copy, self._first = self._first, None
        if copy is None:
            copy = self._received()
        if copy is None:
            return None
        try:
            return copy.load()
        finally:
            copy.close()

    def _received(self) -> PackageCopy | None:
        try:
            text, fds, _, _ = socket.recv_fds(self._channel, MOST_BYTES, 1)
        except BlockingIOError:
            return None
        if fds:
            return PackageCopy(fds[0], self.name)
        if text:
            raise ConfigError(text.decode(errors="replace"))
        return None  # the parent has ended


def new_channel() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a channel of messages. Neither end blocks: `BlockingIOError` if there is no message."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
    return ends


def send_copy(channel: socket.socket, copy: PackageCopy) -> None:
    """Send a version to a worker. Raises `OSError` if the worker has ended or does not read."""
    socket.send_fds(channel, [b"version"], [copy.fd])


def send_text(channel: socket.socket, text: str) -> None:
    """Send a reason, or `READY`. Raises `OSError` as `send_copy`."""
    channel.send(text.encode()[:MOST_BYTES])


def serve_in_worker(
    options: ServerOptions, listener: socket.socket, copy: PackageCopy, channel: socket.socket, parent: int
) -> None:
    """Serve until SIGTERM; the whole life of a worker process."""
    follow_parent(parent)
    set_threads(options.threads)
    import uvicorn

    from tilerec.serve.app import make_app

    metrics = ServerMetrics()
    try:
        model = ServedModel(
            WorkerSource(copy, channel), deltas=options.deltas or None, every=options.every,
            rows_per_second=options.rows_per_second or None,
            noted=lambda event: metrics.events.labels(event).inc(),
        )  # fmt: skip
    except TilerecError as error:
        send_text(channel, str(error))
        sys.exit(1)
    config = uvicorn.Config(
        make_app(model, options.batching, metrics, options.log), log_level="warning",
        timeout_graceful_shutdown=options.grace, access_log=False, lifespan="on",
    )  # fmt: skip
    send_text(channel, READY)
    uvicorn.Server(config).run(sockets=[listener])


def follow_parent(parent: int) -> None:
    """Reset the signals of a forked process, and let the system end it when its parent ends, even by SIGKILL."""
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before the call
            os.kill(os.getpid(), signal.SIGTERM)
