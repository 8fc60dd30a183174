"""A local S3 server whose requests can fail.

with serving(monkeypatch) as server:       s3:// URLs lead to it
    server.fails = lambda request: "500" if request.method == "PUT" else ""
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

SLOW_S = 0.3


class Request(NamedTuple):
    """A request. number: from 0, since `fails` was set."""

    number: int
    method: str
    path: str
    query: str


class FaultyServer:
    """A WSGI application in front of another.

    Attributes:
        fails: returns the fault of a request: "500" or "503" (refused), "lost" (done, and answered with an error),
            "short" (the body of the answer breaks off), "slow" (an answer after `SLOW_S`), "old" (the answer that the
            same request got the last time without this fault), or "" for none.
        met: number of faults so far. requests: the requests since `fails` was set.
    """

    def __init__(self, application: Any) -> None:
        self._application = application
        self._lock = threading.Lock()
        self.met = 0
        self.requests: list[Request] = []
        self._fails: Callable[[Request], str] = lambda _: ""
        self._lists: dict[tuple[str, str], tuple[Any, list[bytes]]] = {}  # lists of objects, by path and query

    @property
    def fails(self) -> Callable[[Request], str]:
        return self._fails

    @fails.setter
    def fails(self, fails: Callable[[Request], str]) -> None:
        self._fails, self.requests = fails, []

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        with self._lock:
            request = Request(
                len(self.requests), environ["REQUEST_METHOD"], environ["PATH_INFO"], environ["QUERY_STRING"]
            )
            self.requests.append(request)
            kind = self._fails(request)
            self.met += bool(kind)
        if kind in ("500", "503"):
            start_response(
                {"500": "500 Internal Server Error", "503": "503 Slow Down"}[kind],
                [("Content-Type", "text/plain"), ("Content-Length", "0")],
            )
            return [b""]
        if kind == "slow":
            time.sleep(SLOW_S)
        if kind == "lost":
            list(self._application(environ, lambda *_: None))
            start_response("500 Internal Server Error", [("Content-Type", "text/plain"), ("Content-Length", "0")])
            return [b""]
        key = request.path, request.query
        if kind == "old" and key in self._lists:
            start, body = self._lists[key]
            start_response(*start)
            return body
        if request.method == "GET" and "list-type" in request.query and kind != "old":
            start = []
            body = list(self._application(environ, lambda *args: start.extend(args)))
            self._lists[key] = start, body
            start_response(*start)
            return body
        body = self._application(environ, start_response)
        if kind == "short":  # fewer bytes than Content-Length: the connection closes early
            data = b"".join(body)
            return [data[: len(data) // 2]]
        return body


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """Run a server in a thread; fsspec's s3:// URLs lead to it meanwhile. Its buckets outlive it."""
    import fsspec
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    faults = FaultyServer(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, faults, threaded=True)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    fsspec.filesystem("s3").clear_instance_cache()
    try:
        yield faults
    finally:
        server.shutdown()
        thread.join()
        fsspec.filesystem("s3").clear_instance_cache()
