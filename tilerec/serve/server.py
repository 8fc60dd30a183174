"""`run_server`: worker processes that serve a package on one socket.

    parent   loads torch's C++ libraries, binds the socket, reads the package, and watches the file (workers.py)
      |  fork, so a worker starts in a fraction of a second and shares the parent's pages
    workers  each maps that memory, takes connections from the socket, and batches its own requests (worker.py)

A worker that dies is started again. Workers end with their parent. SIGTERM and SIGINT end the server once the running
requests are answered.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tilerec.gc_paused import gc_paused
from tilerec.phase import phase
from tilerec.serve.metrics import worker_metrics
from tilerec.serve.server_options import ServerOptions

if TYPE_CHECKING:
    from rich.console import Console

_LIBRARIES = ("numpy", "ssl", "hashlib", "resource", "asyncio", "multiprocessing.connection", "safetensors")
"""Modules with libraries of their own. They are imported before a thread loads torch's: the system loads one library at
a time, and an import that waits for another thread's keeps Python's global lock."""
_IMPORTS = ("prometheus_client", "tilerec.serve.app", "tilerec.serve.endpoints", "tilerec.serve.workers", "uvicorn")
"""Modules of the workers. The parent imports them while threads read the package and load torch's libraries, and
workers share them. torch's modules are not among them: they took most of the time of a start."""
_IMPORTS_OF_DELTAS = ("tilerec.delta.follower",)
"""Imports torch."""


def run_server(
    options: ServerOptions, ready: Callable[[str], object] = lambda address: None, console: Console | None = None
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        ready: called with the address, `http://127.0.0.1:8000`, once the server takes requests.
        console: for the times of the phases before that; None prints none.

    Raises:
        FileError, ConfigError: the package cannot be served. OSError: the port is in use.
    """
    with listen(options.host, options.port) as listener:
        host, port = listener.getsockname()[:2]
        # Without the pause, collections take 0.18 s of the start.
        with phase("load the package", console), gc_paused(), ThreadPoolExecutor(2, "start") as threads:
            from tilerec.export.torch_library import load_torch, ops_library
            from tilerec.serve.package_copy import copy_package
            from tilerec.serve.package_source import FileWatch

            watch = FileWatch(options.path)
            copying = threads.submit(copy_package, options.path)
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy multiplies no matrices here
            _import(_LIBRARIES)
            loading = threads.submit(load_torch)
            _import(_IMPORTS + (_IMPORTS_OF_DELTAS if options.deltas else ()))
            loading.result()
            ops_library()
            copy = copying.result()
        from tilerec.serve.workers import Workers

        with worker_metrics():
            Workers(options, listener, copy, watch).run(lambda: ready(f"http://{host}:{port}"), console)


def _import(names: Sequence[str]) -> None:
    for name in names:
        importlib.import_module(name)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that takes connections, which send each answer at once.

    Without TCP_NODELAY a small answer of two writes waits 40 ms for the client's acknowledgement. asyncio sets the
    option only for sockets whose protocol is given by number; on Linux a connection has that of its listener.

    Raises:
        OSError: the port is in use.
    """
    listener = socket.create_server((host, port), backlog=2048)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
