"""A ledger of trained samples: each rank appends the samples of every step to a file that outlives a SIGKILL.

    {"attempt": 3, "step": 7, "rows": [[448, 1234567890], ...]}      one line per rank and step

`attempt` numbers the processes that have continued the run. A row is the sample's position in its pass over the data,
and the CRC-32 of its values, which differ between passes. After kills, the last attempt of each step counts.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tilerec.data.dataset import Dataset
from tilerec.data.share import Share
from tilerec.train.click_task import ClickTask
from tilerec.train.config import ClickConfig, TrainConfig
from tilerec.train.world import World

Rows = list[tuple[int, int]]
Ledger = dict[int, dict[int, Rows]]
"""attempt -> step -> rows of all ranks, in order."""


class _LedgerTask(ClickTask):
    """A task that counts its steps, as part of its saved state, and writes the samples of each."""

    path = ""
    attempt = 0
    steps = 0

    def loss(self, model: nn.Module, share: Share) -> Tensor:
        self.steps += 1
        batch = share.batch
        values = zip(batch.dense_features.numpy(), batch.labels.numpy(), strict=True)
        rows = [[share.first + i, zlib.crc32(x.tobytes() + y.tobytes())] for i, (x, y) in enumerate(values)]
        line = json.dumps({"attempt": self.attempt, "step": self.steps, "rows": rows}) + "\n"
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)
        return super().loss(model, share)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


@dataclass(frozen=True)
class LedgerConfig(ClickConfig):
    """The click task with a ledger. folder: of the ledger's files. attempt: see the head of this file."""

    folder: str = ""
    attempt: int = 0

    def build(self, dataset: Dataset, options: TrainConfig, device: Any, world: World) -> ClickTask:
        task = _LedgerTask(dataset.tasks, (1.0,), options, device, world)
        task.path, task.attempt = f"{self.folder}/ledger-{world.rank}.jsonl", self.attempt
        return task


def read_ledger(folder: Path) -> Ledger:
    """Return all entries of a ledger. A line without its end belongs to a step that did not happen."""
    found: defaultdict[int, defaultdict[int, Rows]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.glob("ledger-*.jsonl")):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                entry = json.loads(line)
                found[entry["attempt"]][entry["step"]] += [tuple(row) for row in entry["rows"]]
    return {attempt: {step: sorted(rows) for step, rows in steps.items()} for attempt, steps in found.items()}


def check_ledger(ledger: Ledger, resumed: Mapping[int, int], want: dict[int, Rows]) -> None:
    """Raise unless the steps that count have each sample of an uninterrupted run once.

    Args:
        resumed: step of the checkpoint that each attempt continued from; 0 for none.
        want: rows of each step of the uninterrupted run.
    """
    counted: dict[int, Rows] = {}
    for attempt, steps in sorted(ledger.items()):
        first = resumed[attempt] + 1
        assert sorted(steps) == list(range(first, first + len(steps))), f"attempt {attempt}: {sorted(steps)}"
        # What a checkpoint holds is never trained again, and what it lacks is.
        assert set(range(1, first)) <= set(counted)
        counted = {step: rows for step, rows in counted.items() if step < first} | steps
    assert counted == want
    trained = [row for rows in counted.values() for row in rows]
    assert len(set(trained)) == len(trained)
