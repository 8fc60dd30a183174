"""`offer_load`: requests at given times, whether or not the server keeps up, and the latency of each.

Requests come by a Poisson process. A request's latency begins at its time in that process, so waiting for a slow server
counts. Each has a number of user-item pairs, as in MLPerf's server scenario of DLRM (100 to 700 pairs).
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilerec.errors import ConfigError, InputError
from tilerec.export.arguments import torch_dtype
from tilerec.export.manifest import TableEntry, read_input, read_table
from tilerec.export.signature import InputSpec
from tilerec.json_document import MOST_BYTES, parse_json
from tilerec.serve.wire import ALIVE, SAFETENSORS

BOUNDS_MS = {"MLPerf DLRM v1": 30.0, "MLPerf DLRM-v2": 60.0}
"""Bounds of p99 in MLPerf inference's server scenario, milliseconds."""
CONNECT_S = 30.0
"""Seconds that a server has to answer before the load begins."""


@dataclass(frozen=True)
class Load:
    """What is offered.

    Attributes:
        rate: requests per second, on average.
        seconds: of the whole load.
        pairs: least and most samples of a request; drawn uniformly.
        ids: ids of each feature and sample.
        form: "safetensors" or "json" (by columns).
        seed: of all draws.
    """

    rate: float = 50.0
    seconds: float = 10.0
    pairs: tuple[int, int] = (100, 700)
    ids: int = 1
    form: str = "safetensors"
    seed: int = 0

    def __post_init__(self) -> None:
        low, high = self.pairs
        if not (0 < self.rate < math.inf and 0 < self.seconds < math.inf and 0 < low <= high and self.ids >= 0):
            raise ConfigError(
                f"Load: got {self}; expected a finite rate and finite seconds above 0, 0 < pairs[0] <= pairs[1], ids "
                "from 0. Correct it."
            )
        if self.form not in ("safetensors", "json"):
            raise ConfigError(f"Load: got the form {self.form!r}; expected 'safetensors' or 'json'. Correct it.")


@dataclass(frozen=True)
class LoadReport:
    """What was measured.

    Attributes:
        latency_ms: of each answered request, from the time at which it was due.
        pairs: samples of all answered requests.
        failed: requests that were not answered with status 200, by status or error.
        seconds: from the first request to the last answer.
    """

    latency_ms: Sequence[float]
    pairs: int
    failed: Mapping[str, int]
    seconds: float

    def percentile(self, percent: float) -> float:
        """Return a percentile of the latency in milliseconds; nan without answers."""
        return float(np.percentile(self.latency_ms, percent)) if self.latency_ms else float("nan")


class ServedInputs(NamedTuple):
    """Inputs of a served model, and the tables that its ids belong to."""

    inputs: Sequence[InputSpec]
    tables: Sequence[TableEntry]


def sample_inputs(served: ServedInputs, samples: int, ids: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return random inputs that a model takes, by the names of its tensors; ids are below their tables' rows."""
    rows = {feature: table.rows for table in reversed(served.tables) for feature in table.features}
    made: dict[str, Tensor] = {}
    for own in served.inputs:
        keys = own.keys or (own.name,)
        for spec in own.tensors:
            dtype = torch_dtype(spec.dtype)
            part = spec.name.rpartition(".")[2] if own.kind != "Tensor" else ""
            count = len(keys) * samples * ids
            if part == "values":
                parts = [torch.randint(0, rows.get(key, 1), (samples * ids,), generator=generator) for key in keys]
                value = torch.cat(parts) if not spec.shape[1:] else torch.zeros(count, *map(int, spec.shape[1:]))
            elif part == "lengths":
                value = torch.full((len(keys), samples) if own.keys else (samples,), ids)
            elif part == "weights":
                value = torch.rand(count, generator=generator)
            else:
                sizes = [size if isinstance(size, int) else samples for size in spec.shape]
                value = torch.rand(sizes, generator=generator)
            made[spec.name] = value.to(dtype)
    return made


def body_of(served: ServedInputs, tensors: Mapping[str, Tensor], form: str) -> tuple[bytes, str]:
    """Return a request's body and its content type."""
    if form == "safetensors":
        from safetensors.torch import save

        return save(dict(tensors)), SAFETENSORS
    inputs: dict[str, Any] = {}
    for own in served.inputs:
        lists = {spec.name.rpartition(".")[2]: tensors[spec.name].tolist() for spec in own.tensors}
        inputs[own.name] = tensors[own.name].tolist() if own.kind == "Tensor" else lists
    return json.dumps({"inputs": inputs}).encode(), "application/json"


def offer_load(address: str, load: Load) -> LoadReport:
    """Send requests that fit the model of a server, and return what was measured.

    Args:
        address: `http://127.0.0.1:8000`.

    Raises:
        InputError, ConfigError: there is no server at the address, or it answered no request.
    """
    address = address.rstrip("/")
    served = served_inputs(address)
    dice, generator = np.random.default_rng(load.seed), torch.Generator().manual_seed(load.seed)
    count = max(1, int(load.rate * load.seconds))
    times = np.cumsum(dice.exponential(1 / load.rate, count))
    sizes = dice.integers(load.pairs[0], load.pairs[1] + 1, count)
    # A few bodies of each size class are sent again and again: making them takes longer than serving them.
    bodies = {
        int(size): body_of(served, sample_inputs(served, int(size), load.ids, generator), load.form)
        for size in {int(size) for size in sizes}
    }
    found = asyncio.run(
        _send(address, [(float(at), *bodies[int(size)], int(size)) for at, size in zip(times, sizes, strict=True)])
    )
    if not found.latency_ms:
        failed = ", ".join(f"{count} of {status}" for status, count in found.failed.items())
        raise InputError(
            f"Load on {address}: got no answer to {count} requests ({failed}); expected answers. See the server's log."
        )
    return found


def served_inputs(address: str) -> ServedInputs:
    """Return the inputs of the model at an address.

    Raises:
        InputError: no server of `tilerec serve` answers there. ConfigError: its description cannot be read.
    """
    found = _got(address, "/healthz")
    if found != ALIVE.encode():
        got = found[:100].decode(errors="replace")
        raise InputError(
            f"Load on {address}: got '{got}' from /healthz; expected a running server, http://HOST:PORT. Start one "
            "with tilerec serve, or correct the address."
        )
    about = parse_json(_got(address, "/v1/model"), f"Load on {address}: /v1/model")
    parts = about.record(list(about.members()), ("inputs", "tables"), "Correct the address.")
    return ServedInputs(
        [read_input(own) for own in parts["inputs"].items()], [read_table(own) for own in parts["tables"].items()]
    )


def _got(address: str, path: str) -> bytes:
    """Return the body of an answer, or the text of an error."""
    try:
        with urllib.request.urlopen(f"{address}{path}", timeout=CONNECT_S) as found:
            return bytes(found.read(MOST_BYTES))
    except (OSError, ValueError, HTTPException) as error:  # urllib's own errors are OSErrors
        return str(getattr(error, "reason", error)).encode()


async def _send(address: str, requests: Sequence[tuple[float, bytes, str, int]]) -> LoadReport:
    import aiohttp

    latency, failed, pairs = list[float](), dict[str, int](), 0
    begin = time.perf_counter() + 0.05

    async def one(at: float, body: bytes, kind: str, size: int) -> None:
        nonlocal pairs
        await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
        try:
            async with session.post(f"{address}/v1/predict", data=body, headers={"content-type": kind}) as found:
                await found.read()
                status = "" if found.status == 200 else str(found.status)
        except (aiohttp.ClientError, OSError) as error:
            status = type(error).__name__
        if status:
            failed[status] = failed.get(status, 0) + 1
        else:
            latency.append(1e3 * (time.perf_counter() - begin - at))
            pairs += size

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(one(*request) for request in requests))
    return LoadReport(latency, pairs, failed, time.perf_counter() - begin)
