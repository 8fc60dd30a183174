"""`SampleWindow`: the samples of the latest steps of one rank, for values that sums cannot give.

One ring of columns holds the samples of all steps, however small they are. It grows with the window: 12 bytes per
sample and task, 24 for float64 predictions, and 8 per sample and task for groups.

    columns   | step 8 | step 9 | free ...... | step 6 | step 7 |
                                  next sample   oldest

Legend: S steps in the window, T tasks, N samples of one step, n of all steps, C columns of the ring, W ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, final

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.metrics.rank_sums import RankSums
from tilerec.metrics.samples import Samples
from tilerec.metrics.step_sums import latest_within

CHUNK = 1 << 14
"""Columns of a view of `chunks`, small enough for temporary tensors to stay in the cache."""


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
        self._clear(torch.device("cpu"))

    def _clear(self, device: torch.device) -> None:
        self._columns_3TC = torch.zeros(3, self._tasks, 0, device=device)
        self._groups_TC = torch.zeros(self._tasks, 0, dtype=torch.int64, device=device)
        self._first = 0  # column of the oldest sample
        self._stored: deque[int] = deque()  # columns per step
        self._counts: deque[int] = deque()  # samples per step; one column may stand for several after a `load`
        self._columns = self._held = 0  # columns and samples of all steps

    @property
    def samples(self) -> list[int]:
        """Number of samples of this rank, per step."""
        return list(self._counts)

    def to(self, device: torch.device) -> None:
        """Move the samples."""
        self._columns_3TC, self._groups_TC = self._columns_3TC.to(device), self._groups_TC.to(device)

    def add(self, samples: Samples, *, narrow: bool) -> None:
        """Append a step, and drop steps that left the window even if all its samples are of this rank.

        Args:
            samples: of this rank.
            narrow: store float32, which loses nothing of predictions with at most 32 bits.
        """
        batch_3TN = torch.stack([samples.predictions_TN, samples.labels_TN, samples.weights_TN])
        count = batch_3TN.shape[2]
        while self._counts and self._held + count > self._window:
            self._drop_oldest()
        self._append(batch_3TN, samples.groups_TN, [count], [count], narrow=narrow)

    def _append(
        self, batch_3TN: Tensor, groups_TN: Tensor | None, stored: list[int], counts: list[int], *, narrow: bool
    ) -> None:
        """Append the columns of some steps."""
        size = batch_3TN.shape[2]
        dtype = self._columns_3TC.dtype if narrow else torch.float64
        if self._columns + size > self._columns_3TC.shape[2] or dtype != self._columns_3TC.dtype:
            self._grow(self._columns + size, dtype)
        capacity = self._columns_3TC.shape[2]
        at = 0
        while at < size:
            begin = (self._first + self._columns + at) % capacity
            part = min(size - at, capacity - begin)
            self._columns_3TC[:, :, begin : begin + part] = batch_3TN[:, :, at : at + part]
            if self._has_groups and groups_TN is not None:
                self._groups_TC[:, begin : begin + part] = groups_TN[:, at : at + part]
            at += part
        self._stored.extend(stored)
        self._counts.extend(counts)
        self._columns += size
        self._held += sum(counts)

    def _grow(self, needed: int, dtype: torch.dtype) -> None:
        """Make place for `needed` columns: twice as many as before, up to the length of the window."""
        columns_3Tn, groups_Tn = self._latest_columns(self._columns)
        capacity = max(needed, min(2 * self._columns_3TC.shape[2], self._window))
        with torch.inference_mode(False):  # training may add to a ring that an evaluation created
            self._columns_3TC = torch.zeros(3, self._tasks, capacity, dtype=dtype, device=columns_3Tn.device)
            if self._has_groups:
                self._groups_TC = torch.zeros(self._tasks, capacity, dtype=torch.int64, device=columns_3Tn.device)
        self._columns_3TC[:, :, : self._columns] = columns_3Tn
        if self._has_groups:
            self._groups_TC[:, : self._columns] = groups_Tn
        self._first = 0

    def keep_latest(self, count: int) -> None:
        """Drop all but the latest `count` steps."""
        while len(self._counts) > count:
            self._drop_oldest()

    def latest(self, count: int) -> tuple[Tensor, Tensor | None]:
        """Return the samples of the latest `count` steps, [3, T, n], and their groups, [T, n]."""
        columns_3Tn, groups_Tn = self._latest_columns(sum(islice(reversed(self._stored), count)))
        return columns_3Tn, groups_Tn if self._has_groups else None

    def chunks(self, count: int) -> Iterator[Tensor]:
        """Yield views of the samples of the latest `count` steps, [3, T, at most CHUNK], oldest first."""
        for columns in self._slices(sum(islice(reversed(self._stored), count))):
            if columns.stop > columns.start:
                yield from self._columns_3TC[:, :, columns].split(CHUNK, 2)

    def _latest_columns(self, count: int) -> tuple[Tensor, Tensor]:
        """Return copies of the latest `count` columns and of their groups, oldest first."""
        slices = self._slices(count)
        groups_Tn = torch.cat([self._groups_TC[:, columns] for columns in slices], 1)
        return torch.cat([self._columns_3TC[:, :, columns] for columns in slices], 2), groups_Tn

    def _slices(self, count: int) -> tuple[slice, slice]:
        """Return the places of the latest `count` columns, oldest first."""
        capacity = self._columns_3TC.shape[2]
        begin = (self._first + self._columns - count) % max(capacity, 1)
        end = begin + count
        return slice(begin, min(end, capacity)), slice(0, max(end - capacity, 0))

    def steps(self) -> list[tuple[int, Tensor]]:
        """Return the number of samples and the columns [3, T, n] of each step, oldest first."""
        columns_3Tn, _ = self.latest(len(self._counts))
        return list(zip(self._counts, columns_3Tn.split(list(self._stored), 2), strict=True))

    def reset(self) -> None:
        """Drop all samples."""
        self._clear(self._columns_3TC.device)

    def state(self) -> dict[str, Tensor]:
        """Return the samples, and the numbers of samples and of stored columns per step."""
        columns_3Tn, groups_Tn = self.latest(len(self._counts))
        counts, stored = (torch.tensor(list(part), dtype=torch.int64) for part in (self._counts, self._stored))
        state = {"samples": columns_3Tn, "counts": counts, "columns": stored}
        return state if groups_Tn is None else {**state, "groups": groups_Tn}

    def merged(self, ranks: RankSums, samples: list[int], device: torch.device) -> dict[str, Tensor]:
        """Return the state of all ranks together: samples step by step, in a step in the order of ranks. Collective.

        Args:
            samples: number of samples of all ranks, per step.
        """
        stored_WS = torch.zeros(ranks.size, len(samples), dtype=torch.int64)
        stored_WS[ranks.rank, len(samples) - len(self._stored) :] = torch.tensor(list(self._stored), dtype=torch.int64)
        stored_WS = ranks.sum("metric steps", stored_WS.to(device))
        step_WS = torch.arange(len(samples), device=device).expand(ranks.size, -1)
        step_n = step_WS.reshape(-1).repeat_interleave(stored_WS.reshape(-1))
        order_n = step_n.argsort(stable=True)
        columns_3Tn, groups_Tn = self.latest(len(self._stored))
        all_n3T = ranks.concatenate("metric samples", columns_3Tn.double().movedim(2, 0))
        state = {
            "samples": all_n3T[order_n].movedim(0, 2),
            "counts": torch.tensor(samples),
            "columns": stored_WS.sum(0).cpu(),
        }
        if groups_Tn is not None:
            state["groups"] = ranks.concatenate("metric groups", groups_Tn.T)[order_n].T
        return state

    def load(self, state: Mapping[str, Any], device: torch.device, *, empty: bool) -> None:
        """Replace all samples; with `empty`, take over the steps only, without samples of this rank.

        Args:
            state: from `state`. Without "columns", every sample has a column.
        """
        columns_3Tn, groups_Tn = state["samples"], state.get("groups")
        if columns_3Tn.shape[1] != self._tasks:
            raise InputError(
                f"Metric state: got samples of {columns_3Tn.shape[1]} tasks; expected {self._tasks}. Load it into "
                "metrics with the same tasks."
            )
        if self._has_groups and groups_Tn is None:
            raise InputError(
                "Metric state: got samples without groups; expected those of measures with groups and exact=True. Save "
                "it from metrics with the same settings."
            )
        counts = state["counts"].tolist()
        stored = state["columns"].tolist() if "columns" in state else counts
        if empty:
            counts, stored, columns_3Tn = [0] * len(counts), [0] * len(counts), columns_3Tn[:, :, :0]
            groups_Tn = None if groups_Tn is None else groups_Tn[:, :0]
        kept = latest_within(counts, self._window)
        columns = sum(stored[len(stored) - kept :])
        columns_3Tn = columns_3Tn[:, :, columns_3Tn.shape[2] - columns :]
        self._clear(device)
        self._append(
            columns_3Tn.to(device),
            None if groups_Tn is None else groups_Tn[:, groups_Tn.shape[1] - columns :].to(device),
            stored[len(stored) - kept :],
            counts[len(counts) - kept :],
            # States of several ranks are float64, whatever the predictions were.
            narrow=torch.equal(columns_3Tn.nan_to_num(0.0), columns_3Tn.float().to(columns_3Tn.dtype).nan_to_num(0.0)),
        )

    def _drop_oldest(self) -> None:
        columns = self._stored.popleft()
        self._held -= self._counts.popleft()
        self._columns -= columns
        self._first = (self._first + columns) % max(self._columns_3TC.shape[2], 1)
