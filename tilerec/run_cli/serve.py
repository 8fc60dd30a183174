"""`tilerec serve` and `tilerec bench-serve`: a package over HTTP, and its latency under load."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Annotated

import typer

from tilerec.errors import TilerecError
from tilerec.phase import timed
from tilerec.progress import LOADING, command_phase
from tilerec.terminal import SafeConsole, print_error, print_plain

_NEEDS = ("starlette", "uvicorn", "prometheus_client")
_INSTALL = "tilerec serve: needs starlette, uvicorn and prometheus-client. Install tilerec[serve]."


def serve(
    package: Annotated[
        str, typer.Argument(help="A package of `tilerec export`. Replace the file to serve another version.")
    ],
    deltas: Annotated[str, typer.Option(help="Folder of a log of published states that the weights follow.")] = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: a free one.")] = 8000,
    workers: Annotated[int, typer.Option(help="Worker processes; they share the package's weights.")] = 1,
    threads: Annotated[int, typer.Option(help="Threads of each worker.")] = 1,
    every: Annotated[float, typer.Option(help="Seconds between two looks at the file and the log.")] = 1.0,
    rows_per_second: Annotated[
        float, typer.Option(help="Most rows of published states that each worker writes in a second; 0: no limit.")
    ] = 2e6,
    max_samples: Annotated[int, typer.Option(help="Most samples of a batch of several requests.")] = 1024,
    wait_ms: Annotated[float, typer.Option(help="Milliseconds that a request waits for others.")] = 0.0,
    max_waiting: Annotated[int, typer.Option(help="Most requests that wait; more get status 503.")] = 1000,
    log: Annotated[str, typer.Option(help="Folder for bodies of requests, which `tilerec parity` reads.")] = "",
    log_every: Annotated[int, typer.Option(help="One of so many requests is written there.")] = 100,
    log_keep: Annotated[int, typer.Option(help="Files that each worker keeps there.")] = 1000,
) -> None:
    """Serve a package over HTTP: POST /v1/predict, GET /v1/model, /healthz, /readyz and /metrics."""
    if any(find_spec(name) is None for name in _NEEDS):
        print_error(_INSTALL)
        raise typer.Exit(1)
    from tilerec.serve.batching import Batching
    from tilerec.serve.request_log import LogOptions
    from tilerec.serve.server import run_server
    from tilerec.serve.server_options import ServerOptions

    try:
        batching = Batching(max_samples, wait_ms, max_waiting)
        logged = LogOptions(log, log_every, log_keep)
        options = ServerOptions(
            package, deltas, host, port, workers, threads, every, rows_per_second, batching=batching, log=logged
        )
        console = SafeConsole(stderr=True)
        run_server(options, lambda address: print_plain(f"serving {package} on {address}"), console)
    except TilerecError as error:
        print_error(str(error))
        raise typer.Exit(1) from None
    except OSError as error:
        print_error(
            f"serve: got '{error.strerror or error}' for {host}:{port}; expected an address of this machine and a free "
            "port. Choose another one."
        )
        raise typer.Exit(1) from None
    # All requests are answered and all workers have ended. Python would free every module and object now: 0.2 s of
    # processor time, and more than a second on a busy machine.
    sys.stdout.flush()
    os._exit(0)


def bench_serve(
    package: Annotated[
        str, typer.Argument(help="A package of `tilerec export`, which a server is started for.", show_default=False)
    ] = "",
    address: Annotated[str, typer.Option(help="Of a running server, in place of a package: http://HOST:PORT.")] = "",
    rate: Annotated[float, typer.Option(help="Requests per second.")] = 50.0,
    seconds: Annotated[float, typer.Option(help="Seconds of load.")] = 10.0,
    pairs: Annotated[str, typer.Option(help="Least and most samples of a request.")] = "100:700",
    ids: Annotated[int, typer.Option(help="Ids of each feature and sample.")] = 1,
    form: Annotated[str, typer.Option(help="safetensors or json.")] = "safetensors",
    workers: Annotated[int, typer.Option(help="Worker processes of the server that is started.")] = 1,
) -> None:
    """Offer requests at a given rate, whether or not the server keeps up, and print the latency."""
    from rich.table import Table

    if find_spec("aiohttp") is None:
        print_error("tilerec bench-serve: needs aiohttp. Install tilerec[serve].")
        raise typer.Exit(1)
    with command_phase(LOADING):
        from tilerec.serve.load import BOUNDS_MS, Load, offer_load

    try:
        low, _, high = pairs.partition(":")
        if not low.isdecimal() or not (high or low).isdecimal():
            print_error(f"bench-serve: got --pairs {pairs!r}; expected two numbers such as 100:700. Correct it.")
            raise typer.Exit(2)
        if bool(package) == bool(address):
            got = "both" if package else "neither"
            print_error(
                f"bench-serve: got {got} of PACKAGE and --address; expected one of them. Leave one out, or add it."
            )
            raise typer.Exit(2)
        load = Load(rate, seconds, (int(low), int(high or low)), ids, form)
        started = None if address else _start(package, workers)
        try:
            address = address or _address(started)
            with timed("offer the load", SafeConsole(stderr=True)):  # a spinner would take time from the server
                found = offer_load(address, load)
        finally:
            if started is not None:
                with started:  # closes its pipe
                    started.terminate()
    except TilerecError as error:
        print_error(str(error))
        raise typer.Exit(1) from None
    table = Table("", "", title=f"{rate:g} requests/s of {pairs} pairs, {ids} ids per feature, {form}")
    table.add_row("answered", f"{len(found.latency_ms):,} requests, {found.pairs / found.seconds:,.0f} pairs/s")
    table.add_row("failed", ", ".join(f"{count} {status}" for status, count in found.failed.items()) or "none")
    for percent in (50, 90, 99, 99.9):
        table.add_row(f"p{percent:g}", f"{found.percentile(percent):.2f} ms")
    for name, bound in BOUNDS_MS.items():
        table.add_row(f"p99 within {bound:g} ms ({name})", "yes" if found.percentile(99) <= bound else "no")
    SafeConsole().print(table)


def _start(package: str, workers: int) -> subprocess.Popen[str]:
    """Start a server on a free port."""
    command = [sys.executable, "-m", "tilerec", "serve", package, "--port", "0", "--workers", str(workers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _address(started: subprocess.Popen[str] | None) -> str:
    assert started is not None
    assert started.stdout is not None
    line = started.stdout.readline()
    if " on http" not in line:
        started.wait()
        print_error("bench-serve: the server did not start. See its error above.")
        raise typer.Exit(1)
    return line.rsplit(" ", 1)[-1].strip()
