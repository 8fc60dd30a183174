"""Runs without interruptions, to compare others with."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.elastic.agents import PATIENCE, Agent, free_port, starts_of
from tests.elastic.ledger_job import job
from tilerec.train import run


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`whole_run(2, 1)`: the folder of a run without interruption, by torchrun on hosts of 2 and 1 ranks.

    `whole_run()`: that of a run in this process.
    """

    @functools.cache
    def of(*hosts: int) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        if not hosts:
            run(job(folder / "run"))
            return folder / "run"
        port = free_port() if len(hosts) > 1 else 0
        with contextlib.ExitStack() as stack:
            agents = [
                stack.enter_context(Agent(folder, nproc, port=port, host=index == 0, patience=PATIENCE))
                for index, nproc in enumerate(hosts)
            ]
            assert [agent.process.wait() for agent in agents] == [0] * len(hosts), (folder / "errors.txt").read_text()
        assert starts_of(folder) == [sum(hosts)]
        return folder / "run"

    return of
