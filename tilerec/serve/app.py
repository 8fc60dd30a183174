"""`make_app`: the HTTP interface of a served model.

POST /v1/predict     a request (wire.py); 400 with the reason if it does not fit, 503 if too many wait
GET  /v1/model       the manifest's inputs, outputs and tables, and the version
GET  /healthz        200 while the process lives          GET /readyz    200 while it takes requests
GET  /metrics        for Prometheus
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tilerec.errors import InputError
from tilerec.serve.batcher import Batcher, Batching, Overloaded
from tilerec.serve.metrics import ServerMetrics
from tilerec.serve.served_model import ServedModel
from tilerec.serve.wire import answer, parse

if TYPE_CHECKING:
    from fastapi import FastAPI

MOST_BYTES = 1 << 26
"""Largest body of a request."""


def make_app(model: ServedModel, batching: Batching | None = None, metrics: ServerMetrics | None = None) -> FastAPI:
    """Return the application, for uvicorn or any other ASGI server. The model is closed when the server stops."""
    from fastapi import FastAPI, Request, Response

    numbers = metrics or ServerMetrics()

    def ran(samples: int, seconds: float) -> None:
        numbers.batch_samples.observe(samples)
        numbers.batch_seconds.observe(seconds)

    batcher = Batcher(batching or Batching(), ran)

    @asynccontextmanager
    async def life(_: Any) -> AsyncIterator[None]:
        yield
        batcher.close()
        model.close()

    app = FastAPI(title="tilerec", lifespan=life, docs_url=None, redoc_url=None)

    async def predict(request: Request) -> Response:
        began = time.perf_counter()
        response = await _predict(request)
        numbers.requests.labels(str(response.status_code)).inc()
        numbers.seconds.observe(time.perf_counter() - began)
        return response

    async def _predict(request: Request) -> Response:
        if int(request.headers.get("content-length", "0")) > MOST_BYTES:
            return _error(
                413, f"Request: got a body of more than {MOST_BYTES:,} bytes; expected less. Send it in parts."
            )
        version = model.version
        try:
            query = parse(await request.body(), request.headers.get("content-type", ""), version.manifest)
            outputs = await batcher.run(query, version)
            body, kind = answer(query, outputs, version.manifest, version.name)
        except InputError as error:
            return _error(400, str(error))
        except Overloaded:
            return _error(503, f"Server: got {batcher.waiting} waiting requests; expected fewer. Try again later.")
        return Response(body, 200, {"X-Model-Version": version.name}, kind)

    def _error(status: int, text: str) -> Response:
        return Response(json.dumps({"error": text}), status, media_type="application/json")

    async def about(_: Request) -> Response:
        manifest = model.version.manifest
        found = {
            "version": model.version.name,
            "loaded": model.version.loaded,
            "delta_sequence": model.sequence,
            "error": model.error,
            "inputs": [asdict(own) for own in manifest.signature.inputs],
            "outputs": [asdict(own) for own in manifest.outputs],
            "tables": [asdict(own) for own in manifest.tables],
        }
        return Response(json.dumps(found), media_type="application/json")

    async def ready(_: Request) -> Response:
        return Response(model.version.name, 503 if batcher.is_full else 200)

    async def text(_: Request) -> Response:
        numbers.sequence.set(model.sequence)
        body, kind = numbers.text()
        return Response(body, 200, {"content-type": kind})

    async def alive(_: Request) -> Response:
        return Response("alive", 200)

    # Routes of Starlette: FastAPI's own would parse and check each body once more.
    app.add_route("/v1/predict", predict, methods=["POST"])
    app.add_route("/v1/model", about)
    app.add_route("/healthz", alive)
    app.add_route("/readyz", ready)
    app.add_route("/metrics", text)
    return app
