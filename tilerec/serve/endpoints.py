"""`Endpoints`: the answers to the requests of the HTTP interface (app.py)."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import asdict
from typing import final

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tilerec.errors import InputError
from tilerec.serve.batcher import Batcher, Overloaded
from tilerec.serve.metrics import ServerMetrics
from tilerec.serve.request_log import RequestLog
from tilerec.serve.served_model import ServedModel
from tilerec.serve.wire import ALIVE, AnswerError, answer, parse

_LOG = logging.getLogger("tilerec.serve")
MOST_BYTES = 1 << 26
"""Largest body of a request."""
LARGE_BYTES = 1 << 16
"""Larger bodies are parsed in a thread: 1 MB of JSON would keep other requests waiting for 20 ms."""


@final
class Endpoints:
    """The served model, its batches, counters and log, behind one method for each address."""

    def __init__(self, model: ServedModel, batcher: Batcher, metrics: ServerMetrics, log: RequestLog) -> None:
        self._model, self._batcher, self._metrics, self._log = model, batcher, metrics, log

    async def predict(self, request: Request) -> Response:
        """Answer POST /v1/predict."""
        began = time.perf_counter()
        try:
            response = await self._predicted(request)
        except InputError as error:
            response = _error(400, str(error))
        except Overloaded:
            waiting = self._batcher.waiting
            response = _error(503, f"Server: got {waiting} waiting requests; expected fewer. Try again later.")
        except AnswerError as error:
            response = _error(500, str(error))
        except ClientDisconnect:
            response = _error(400, "Request: got a closed connection; expected the whole body. Send it again.")
        except Exception:
            _LOG.exception("a request failed")
            response = _error(500, "Server: got an error of the model; expected an answer. See the server's log.")
        self._metrics.requests.labels(str(response.status_code)).inc()
        self._metrics.seconds.observe(time.perf_counter() - began)
        return response

    async def _predicted(self, request: Request) -> Response:
        body = await _body(request)
        if body is None:
            return _error(
                413, f"Request: got a body of more than {MOST_BYTES:,} bytes; expected less. Send it in parts."
            )
        version = self._model.version
        kind = request.headers.get("content-type", "")
        if len(body) > LARGE_BYTES:
            loop = asyncio.get_running_loop()
            query = await loop.run_in_executor(None, parse, body, kind, version.manifest)
        else:
            query = parse(body, kind, version.manifest)
        outputs, state = await self._batcher.run(query, version)
        text, kind = answer(query, outputs, version.manifest, state)
        self._log.add(body, "safetensors" if query.form == "safetensors" else "json")
        return Response(text, 200, {"X-Model-Version": state}, kind)

    async def about(self, _: Request) -> Response:
        """Answer GET /v1/model."""
        model = self._model
        version = model.version
        manifest, record = version.manifest, version.record
        found = {
            "version": version.name,
            "loaded": version.loaded,
            "delta_sequence": model.sequence,
            "delta_step": -1 if record is None else record.step,
            "delta_state": "" if record is None else record.state,
            "error": model.error,
            "inputs": [asdict(own) for own in manifest.signature.inputs],
            "outputs": [asdict(own) for own in manifest.outputs],
            "tables": [asdict(own) for own in manifest.tables],
        }
        return Response(json.dumps(found), media_type="application/json")

    async def ready(self, _: Request) -> Response:
        """Answer GET /readyz."""
        return Response(self._model.version.name, 503 if self._batcher.is_full else 200)

    async def alive(self, _: Request) -> Response:
        """Answer GET /healthz."""
        return Response(ALIVE, 200)

    async def metrics(self, _: Request) -> Response:
        """Answer GET /metrics."""
        self._metrics.sequence.set(self._model.sequence)
        body, kind = self._metrics.text()
        return Response(body, 200, {"content-type": kind})

    async def unknown(self, request: Request, error: Exception) -> Response:
        """Answer a request to another address, or with another method."""
        return _error(
            error.status_code if isinstance(error, HTTPException) else 500,
            f"Server: got {request.method} {request.url.path}; expected POST /v1/predict, or GET /v1/model, /healthz, "
            "/readyz or /metrics. See docs/serving.md.",
        )


async def _body(request: Request) -> bytes | None:
    """Return the body; None if it is too large, without reading the rest."""
    stated = request.headers.get("content-length", "")
    if stated.isdigit() and int(stated) > MOST_BYTES:
        return None
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MOST_BYTES:
            return None
        parts.append(part)
    return b"".join(parts)


def _error(status: int, text: str) -> Response:
    return Response(json.dumps({"error": text}), status, media_type="application/json")
