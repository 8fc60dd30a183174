"""`make_app`: the HTTP interface of a served model.

POST /v1/predict     a request (wire.py); 400 with the reason if it does not fit, 413 if it is too large,
                     503 if too many wait, 500 if the model fails
GET  /v1/model       the manifest's inputs, outputs and tables, and the version
GET  /healthz        200 while the process lives          GET /readyz    200 while it takes requests
GET  /metrics        for Prometheus
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from tilerec.serve.batcher import Batcher
from tilerec.serve.batching import Batching
from tilerec.serve.metrics import ServerMetrics
from tilerec.serve.request_log import LogOptions, RequestLog
from tilerec.serve.served_model import ServedModel

if TYPE_CHECKING:
    from starlette.applications import Starlette


def make_app(
    model: ServedModel, batching: Batching | None = None, metrics: ServerMetrics | None = None,
    log: LogOptions | None = None,
) -> Starlette:  # fmt: skip
    """Return the application, for uvicorn or any other ASGI server. The model is closed when the server stops."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.routing import Route

    from tilerec.serve.endpoints import Endpoints

    numbers = metrics or ServerMetrics()
    request_log = RequestLog(log or LogOptions(), numbers.logged.inc)

    def ran(samples: int, seconds: float) -> None:
        numbers.batch_samples.observe(samples)
        numbers.batch_seconds.observe(seconds)

    batcher = Batcher(batching or Batching(), ran)

    @asynccontextmanager
    async def life(_: Any) -> AsyncIterator[None]:
        model.map_pages()
        yield
        batcher.close()
        model.close()
        request_log.close()

    found = Endpoints(model, batcher, numbers, request_log)
    routes = [
        Route("/v1/predict", found.predict, methods=["POST"]),
        Route("/v1/model", found.about),
        Route("/healthz", found.alive),
        Route("/readyz", found.ready),
        Route("/metrics", found.metrics),
    ]
    return Starlette(routes=routes, lifespan=life, exception_handlers={HTTPException: found.unknown})
