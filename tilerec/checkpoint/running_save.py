"""`save_ahead`: a checkpoint that another thread writes while training goes on (`row_snapshot.py`).

The plan is made while the job stands still, and takes copies of all but the rows of tables. The thread writes the
files, on a channel of its own between the ranks.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist

from tilerec.checkpoint.parts import ranks_of_job
from tilerec.checkpoint.saving import Planned, Saved, plan
from tilerec.checkpoint.tree import Json
from tilerec.comms.group import Group

_PRIORITY = 10  # of a thread that writes while training goes on: a tenth of the time of a busy core


def save_ahead(
    path: str | Path,
    parts: Mapping[str, Any],
    *,
    group: Group | dist.ProcessGroup | None = None,
    metadata: Mapping[str, Json] | None = None,
) -> RunningSave:
    """Begin a checkpoint of the present state, and return while it is written. Collective.

        running = save_ahead("run/step-100", {"model": model, "optimizer": optimizer})
        ...                                       # further steps
        running.wait()

    The checkpoint has the bits of this moment. Rows of tables with an attached optimizer are copied when a step is
    about to write them; all other state is copied at once. Call `announce_write(module)` before you write rows by hand:
    otherwise the save fails, or, for writes through `weight.data` and to cached tables, does not notice them.

    Args:
        path, parts, group, metadata: as for `save`.

    Raises:
        ConfigError: as `save`. Errors of the files are raised by `RunningSave.wait`.
    """
    ranks = ranks_of_job(group)
    channel = ranks.split("checkpoint")
    return RunningSave(plan(path, parts, ranks, metadata or {}, ahead=True), channel)


@final
class RunningSave:
    """A save that another thread completes. The process does not end before it.

    Args:
        channel: of the ranks, for this save alone.
        then: called by the thread once the checkpoint is complete.
    """

    def __init__(self, planned: Planned, channel: Group, then: Callable[[], None] = lambda: None) -> None:
        self._planned, self._channel, self._then = planned, channel, then
        self._saved: Saved | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint")
        try:
            self._thread.start()
        except BaseException:
            planned.close()
            raise

    @torch.no_grad()
    def _run(self) -> None:
        _give_way()
        try:
            self._saved = self._planned.write(self._channel)
            self._then()
        except BaseException as error:
            self._error = error
            if not threading.main_thread().is_alive():  # no code is left that could wait
                print(f"{type(error).__name__}: {error}", file=sys.stderr)

    @property
    def copied_bytes(self) -> int:
        """Bytes of the rows that training has copied."""
        return self._planned.copied_bytes

    @property
    def done(self) -> bool:
        """True if this rank's thread has ended."""
        return not self._thread.is_alive()

    def wait(self) -> Saved:
        """Wait until the checkpoint is complete. Raises as `save`, on every rank."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._saved is not None
        return self._saved


def _give_way() -> None:
    """Lower the priority of this thread, and of those that it starts, so that training gets the cores. Linux only."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _PRIORITY)
