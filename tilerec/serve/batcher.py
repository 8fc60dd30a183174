"""`Batcher`: requests that wait at the same time become one batch.

    requests   a    b c d        e
    batches    [a  ][b c d     ][e ]        while one runs, the next is collected

A lone request runs at once. Waiting on purpose (`wait_ms`) makes larger batches at low load, at the cost of latency.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, final

from tilerec.errors import InputError
from tilerec.serve.batching import Batching
from tilerec.serve.joined import can_join, check, joined, parted
from tilerec.serve.served_model import Answer, Version
from tilerec.serve.wire import Query


class Overloaded(Exception):
    """More requests wait than are allowed."""


class _Waiting(NamedTuple):
    query: Query
    version: Version
    answer: asyncio.Future[Answer]


@final
class Batcher:
    """Runs queries in batches, one batch at a time, in a thread. Made and used in one event loop.

    Args:
        ran: called with the samples and the seconds of each batch.
    """

    def __init__(self, batching: Batching, ran: Callable[[int, float], object] = lambda samples, seconds: None) -> None:
        self._batching, self._ran = batching, ran
        self._waiting: list[_Waiting] = []
        self._thread = ThreadPoolExecutor(1, "batches")
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Number of requests that wait for their batch."""
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """True if no further request may wait."""
        return len(self._waiting) >= self._batching.max_waiting

    async def run(self, query: Query, version: Version) -> Answer:
        """Return the outputs of a query, and the state of the weights that made them.

        Raises:
            InputError: it does not fit the model. Overloaded: too many requests wait.
        """
        check(query, version.manifest)
        if self.is_full:
            raise Overloaded
        one = _Waiting(query, version, asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        return await one.answer

    def close(self) -> None:
        """Wait for the running batch."""
        self._thread.shutdown()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                if (
                    self._batching.wait_ms
                    and sum(one.query.samples for one in self._waiting) < self._batching.max_samples
                ):
                    await asyncio.sleep(self._batching.wait_ms / 1000)
                batch = self._take()
                found = await loop.run_in_executor(self._thread, self._run, batch)
                for one, answer in zip(batch, found, strict=True):
                    if one.answer.cancelled():
                        continue
                    if isinstance(answer, BaseException):
                        one.answer.set_exception(answer)
                    else:
                        one.answer.set_result(answer)
        finally:
            self._task = None

    def _take(self) -> list[_Waiting]:
        """Remove the next batch from those that wait: of one version, oldest first."""
        version = self._waiting[0].version
        joins = can_join(version.manifest)
        batch: list[_Waiting] = []
        samples = 0
        for one in self._waiting:
            samples += one.query.samples
            if batch and (not joins or one.version is not version or samples > self._batching.max_samples):
                break
            batch.append(one)
        self._waiting = self._waiting[len(batch) :]
        return batch

    def _run(self, batch: list[_Waiting]) -> list[Answer | BaseException]:
        version, queries = batch[0].version, [one.query for one in batch]
        began = time.perf_counter()
        try:
            outputs, state = version.run(joined(queries, version.manifest))
            return [Answer(own, state) for own in parted(outputs, queries)]
        except InputError as error:
            if len(batch) == 1:
                return [error]
            return [self._run([one])[0] for one in batch]  # the others are not at fault
        except BaseException as error:
            return [error] * len(batch)
        finally:
            self._ran(sum(query.samples for query in queries), time.perf_counter() - began)
