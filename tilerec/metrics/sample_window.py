"""`SampleWindow`: the samples of the latest steps of one rank, for values that sums cannot give.

Batches are stored as they come and joined at the first use. Their memory is bounded by the window: 12 bytes per sample
and task, 24 for float64 predictions, and 8 per sample for groups.

Legend: S steps in the window, T tasks, N samples of one step, n of all steps, W ranks.
"""

from __future__ import annotations

from collections import deque
from typing import final

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.metrics.rank_sums import RankSums
from tilerec.metrics.samples import Samples
from tilerec.metrics.step_sums import latest_within


@final
class SampleWindow:
    """Samples of the latest steps, oldest first.

    Args:
        tasks: T.
        window: number of samples, over all ranks.
        groups: store the group of each sample too.
    """

    def __init__(self, tasks: int, window: int, *, groups: bool) -> None:
        self._has_groups = groups
        self._tasks = tasks
        self._window = window
        self._batches: deque[tuple[Tensor, Tensor | None]] = deque()  # [3, T, N], groups [T, N]
        self._held = 0  # samples

    @property
    def samples(self) -> list[int]:
        """Number of samples of this rank, per step."""
        return [batch.shape[2] for batch, _ in self._batches]

    def to(self, device: torch.device) -> None:
        """Move the samples."""
        self._batches = deque(
            (batch.to(device), None if groups is None else groups.to(device)) for batch, groups in self._batches
        )

    def add(self, samples: Samples, *, narrow: bool) -> None:
        """Append a step, and drop steps that left the window even if all its samples are of this rank.

        Args:
            samples: of this rank.
            narrow: store float32, which loses nothing of predictions with at most 32 bits.
        """
        batch_3TN = torch.stack([samples.predictions_TN, samples.labels_TN, samples.weights_TN])
        groups_TN = samples.groups_TN if self._has_groups else None
        if groups_TN is not None:
            groups_TN = groups_TN.clone()
        self._batches.append((batch_3TN.float() if narrow else batch_3TN, groups_TN))
        self._held += batch_3TN.shape[2]
        while self._held > self._window and len(self._batches) > 1:
            self._drop_oldest()

    def keep_latest(self, count: int) -> None:
        """Drop all but the latest `count` steps."""
        while len(self._batches) > count:
            self._drop_oldest()

    def latest(self, count: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Return the samples of the latest `count` steps, [3, T, n], and their groups, [T, n]."""
        kept = list(self._batches)[len(self._batches) - count :]
        # One float64 batch among float32 ones: `cat` promotes.
        columns_3Tn = torch.cat([torch.zeros(3, self._tasks, 0, device=device), *(batch for batch, _ in kept)], 2)
        if not self._has_groups:
            return columns_3Tn, None
        none = torch.zeros(self._tasks, 0, dtype=torch.int64, device=device)
        return columns_3Tn, torch.cat([none, *(part for _, part in kept if part is not None)], 1)

    def reset(self) -> None:
        """Drop all samples."""
        self.keep_latest(0)

    def state(self, device: torch.device) -> dict[str, Tensor]:
        """Return the samples and their number per step."""
        samples_3Tn, groups_Tn = self.latest(len(self._batches), device)
        state = {"samples": samples_3Tn, "counts": torch.tensor(self.samples, dtype=torch.int64)}
        return state if groups_Tn is None else {**state, "groups": groups_Tn}

    def merged(self, ranks: RankSums, samples: list[int], device: torch.device) -> dict[str, Tensor]:
        """Return the state of all ranks together: samples step by step, in a step in the order of ranks. Collective.

        Args:
            samples: number of samples of all ranks, per step.
        """
        counts_WS = torch.zeros(ranks.size, len(samples), dtype=torch.int64)
        counts_WS[ranks.rank, len(samples) - len(self._batches) :] = torch.tensor(self.samples)
        counts_WS = ranks.sum("metric steps", counts_WS.to(device))
        step_WS = torch.arange(len(samples), device=device).expand(ranks.size, -1)
        step_n = step_WS.reshape(-1).repeat_interleave(counts_WS.reshape(-1))
        order_n = step_n.argsort(stable=True)
        columns_3Tn, groups_Tn = self.latest(len(self._batches), device)
        all_n3T = ranks.concatenate("metric samples", columns_3Tn.double().movedim(2, 0))
        state = {"samples": all_n3T[order_n].movedim(0, 2), "counts": torch.tensor(samples)}
        if groups_Tn is not None:
            state["groups"] = ranks.concatenate("metric groups", groups_Tn.T)[order_n].T
        return state

    def load(self, state: dict[str, Tensor], device: torch.device, *, empty: bool) -> None:
        """Replace all samples; with `empty`, take over the steps only, without samples of this rank."""
        batch_3Tn, groups_Tn = state["samples"], state.get("groups")
        if batch_3Tn.shape[1] != self._tasks:
            raise InputError(
                f"Metric state: got samples of {batch_3Tn.shape[1]} tasks; expected {self._tasks}. Load it into "
                "metrics with the same tasks."
            )
        samples = state["counts"].tolist()
        if empty:
            samples = [0] * len(samples)
            batch_3Tn = batch_3Tn[:, :, :0]
            groups_Tn = None if groups_Tn is None else groups_Tn[:, :0]
        batches = batch_3Tn.to(device).split(samples, 2)
        groups = [None] * len(samples) if groups_Tn is None else groups_Tn.to(device).split(samples, 1)
        self._batches = deque((b.clone(), g) for b, g in zip(batches, groups, strict=True))
        self._held = sum(samples)
        self.keep_latest(latest_within(samples, self._window))

    def _drop_oldest(self) -> None:
        self._held -= self._batches.popleft()[0].shape[2]
