"""`MeasureSums`: the sums of all measures of a module, and the samples of windows that need them.

    columns of the shared ring     [sum w c] [sum w y] [sum w] [sum w p] ...    one per distinct term
                                   [sums of measures without terms] ...
    rings of their own             measures with many sums, such as AUC's histograms

Legend: T tasks, N samples of an update, K sums, W ranks, R rings, P parts: the rings and the samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.metrics.measure import Measure
from tilerec.metrics.rank_sums import RankSums
from tilerec.metrics.sample_window import SampleWindow
from tilerec.metrics.samples import Samples
from tilerec.metrics.step_sums import StepSums, latest_within
from tilerec.metrics.terms import Term


class Value(NamedTuple):
    """Values of one measure.

    measure: its name.
    scope: "lifetime", "window", or "lifetime_error": the maximum error of the lifetime's value.
    values_T: of all tasks, float64.
    undefined_T: whether the value is NaN because the samples do not define it, rather than because they hold NaN; bool.
    """

    measure: str
    scope: str
    values_T: Tensor
    undefined_T: Tensor


class _Columns(NamedTuple):
    """Where the sums of a measure are: a ring, and its columns there."""

    ring: int
    columns: list[int]


@final
class MeasureSums:
    """Sums of measures over lifetime and window.

    Args:
        tasks: names of the T tasks.
        measures: with distinct names.
        window: number of samples, over all ranks; 0 for none.
        entries: size of the shared ring.
    """

    def __init__(self, tasks: Sequence[str], measures: Sequence[Measure], window: int, entries: int) -> None:
        self.device = torch.device("cpu")
        self.window_samples = 0
        self._measures = list(measures)
        self._window = window
        self._tasks = len(tasks)
        self._terms: list[Term] = []
        self._listed: list[Measure] = []  # measures whose own sums follow the terms in the shared ring
        self._apart: list[Measure] = []  # measures with rings of their own, in the order of the rings
        self._places: dict[str, _Columns] = {}
        self._names: list[list[str]] = [[]]  # of each ring's columns, or of its measure
        self._rings = [StepSums(self._tasks, self._place(), window, entries, self.device)]
        for measure in self._apart:
            # A window's value that is computed from samples needs no sums of the window.
            of_sums = 0 if measure.keeps_samples else window
            self._rings.append(StepSums(self._tasks, measure.width(), of_sums, measure.entries, self.device))
        self._samples: SampleWindow | None = None
        exact = [measure for measure in measures if measure.keeps_samples]
        if window and exact:
            groups = any(measure.needs_groups for measure in exact)
            self._samples = SampleWindow(self._tasks, window, groups=groups)

    def to(self, device: torch.device) -> None:
        """Move all sums and samples."""
        self.device = device
        for part in self._parts():
            part.to(device)

    def add(self, samples: Samples, *, narrow: bool, drop: bool) -> None:
        """Add the samples of a step.

        Args:
            samples: of this rank.
            narrow: stored samples may be float32.
            drop: see `StepSums.open`.
        """
        count = samples.labels_TN.shape[1]
        if samples.groups_TN is None:
            for measure in self._measures:
                if measure.needs_groups:  # before anything is counted
                    raise InputError(
                        f"Measure {measure.name}: got no groups; expected one group per sample. Pass "
                        "update(groups=...)."
                    )
        sums_TK = self._rings[0].open(count, drop=drop)
        if self._terms:
            terms = torch.stack([term.of(samples) for term in self._terms], 1)
            (sums_TK[:, : len(self._terms)] if self._listed else sums_TK).add_(terms)
        for measure in self._listed:
            columns = self._places[measure.name].columns
            measure.accumulate(samples, sums_TK[:, columns[0] : columns[-1] + 1])
        for ring, measure in zip(self._rings[1:], self._apart, strict=True):
            if measure.has_lifetime:
                measure.accumulate(samples, ring.open(count, drop=drop))
        if self._samples is not None:
            self._samples.add(samples, narrow=narrow)

    def values(self, ranks: RankSums, extra: Tensor | None = None) -> list[Value]:
        """Return the values of all measures. Collective; one all-reduce if all ranks' windows have the same steps."""
        counts = [latest_within([ranks.size * n for n in part.samples], self._window) for part in self._parts()]
        sums, equal = self._reduced(ranks, counts, extra)
        if not equal:
            all_samples = self._samples_of_all(ranks)
            counts = [latest_within(samples, self._window) for samples in all_samples]
            sums, _ = self._reduced(ranks, counts, None)
        for part, count in zip(self._parts(), counts, strict=True):
            part.keep_latest(count)
        window = self._samples_in_window(ranks, counts)
        return [value for measure in self._measures for value in self._values_of(measure, sums, window)]

    def reset(self) -> None:
        """Set all sums to 0 and drop all samples."""
        self.window_samples = 0
        for part in self._parts():
            part.reset()

    def state(self) -> dict[str, Any]:
        """Return copies of all sums and samples."""
        state: dict[str, Any] = {"columns": [list(names) for names in self._names]}
        for index, ring in enumerate(self._rings):
            state[f"ring_{index}"] = ring.state()
        if self._samples is not None:
            state["latest"] = self._samples.state(self.device)
        return state

    def load(self, state: Mapping[str, Any], *, empty: bool) -> None:
        """Replace all sums and samples by those of a state; with `empty`, by zeros for the same steps."""
        if [list(names) for names in state["columns"]] != self._names:
            raise InputError(
                f"Metric state: got sums of {state['columns']}; expected {self._names}. Load it into metrics with the "
                "same measures."
            )
        for index, ring in enumerate(self._rings):
            ring.load(state[f"ring_{index}"], empty=empty)
        if self._samples is not None:
            if "latest" not in state:
                raise InputError(
                    "Metric state: got no samples of the window; expected them for measures with exact=True. Save it "
                    "from metrics with the same settings."
                )
            self._samples.load(state["latest"], self.device, empty=empty)

    def merged(self, ranks: RankSums) -> dict[str, Any]:
        """Return the state of all ranks together. Collective."""
        state = self.state()
        if ranks.size == 1:
            return state
        for part, samples in zip(self._parts(), self._samples_of_all(ranks), strict=True):
            if isinstance(part, StepSums):
                own = state[f"ring_{self._rings.index(part)}"]
                missing = len(samples) - len(part.steps)  # entries of ranks that made more updates
                steps = torch.tensor([[1] * missing + part.steps, samples], dtype=torch.int64)
                window_UTK = torch.cat([own["window"].new_zeros(missing, *own["window"].shape[1:]), own["window"]])
                own.update(
                    earlier=ranks.sum("metric sums", own["earlier"]),
                    window=ranks.sum("metric sums", window_UTK),
                    counts=steps,
                )
            else:
                state["latest"] = part.merged(ranks, samples, self.device)
        return state

    def _place(self) -> int:
        """Assign columns to all measures; return the width of the shared ring."""
        for measure in self._measures:
            if measure.entries:
                self._apart.append(measure)
                self._places[measure.name] = _Columns(len(self._apart), list(range(measure.width())))
                self._names.append([measure.name, str(measure.width())])
                continue
            for term in measure.terms:
                if term.name not in self._names[0]:
                    self._names[0].append(term.name)
                    self._terms.append(term)
            if measure.terms:
                columns = [self._names[0].index(term.name) for term in measure.terms]
                self._places[measure.name] = _Columns(0, columns)
        for measure in self._measures:
            if not measure.entries and not measure.terms:
                first = len(self._names[0])
                self._listed.append(measure)
                self._names[0] += [f"{measure.name} {index}" for index in range(measure.width())]
                self._places[measure.name] = _Columns(0, list(range(first, len(self._names[0]))))
        return len(self._names[0])

    def _parts(self) -> list[StepSums | SampleWindow]:
        return [*self._rings] if self._samples is None else [*self._rings, self._samples]

    def _reduced(self, ranks: RankSums, counts: Sequence[int], extra: Tensor | None) -> tuple[list[list[Tensor]], bool]:
        """Return the sums of all ranks, and whether their windows have the same steps. Collective.

        Returns:
            per ring the sums of the lifetime and, with a window, of the window, float64 [T, K] each; and the answer.
        """
        sums = [[ring.lifetime()] for ring in self._rings]
        if self._window:
            for of_ring, ring, count in zip(sums, self._rings, counts, strict=False):
                of_ring.append(ring.latest(count))
        latest = self._rings[0].samples
        numbers = [sum(latest[len(latest) - counts[0] :]), *counts, *(count * count for count in counts)]
        parts = [part for of_ring in sums for part in of_ring]
        parts.append(torch.tensor(numbers, dtype=torch.float64).to(self.device))
        if extra is not None:
            parts.append(extra.to(self.device))
        reduced = ranks.sum("metric sums", torch.cat([part.reshape(-1) for part in parts]))
        flat = iter(reduced.split([part.numel() for part in parts]))
        sums = [[next(flat).view_as(part) for part in of_ring] for of_ring in sums]
        if ranks.size > 1:
            numbers = [int(number) for number in next(flat).tolist()]
        if extra is not None:
            extra.copy_(reduced[-extra.numel() :])
        self.window_samples = numbers[0]
        # The mean square of the ranks' counts equals their squared mean only if all are equal (Cauchy-Schwarz).
        means, squares = numbers[1 : 1 + len(counts)], numbers[1 + len(counts) :]
        equal = all(ranks.size * s == m * m for m, s in zip(means, squares, strict=True))
        return sums, ranks.size == 1 or equal

    def _samples_of_all(self, ranks: RankSums) -> list[list[int]]:
        """Return the numbers of samples of all ranks per entry and part, aligned at the latest entry. Collective."""
        own = [part.samples for part in self._parts()]
        sizes_WP = torch.zeros(ranks.size, len(own), dtype=torch.int64)
        sizes_WP[ranks.rank] = torch.tensor([len(samples) for samples in own])
        most = ranks.sum("metric windows", sizes_WP.to(self.device)).amax(0).tolist()
        aligned = [n for size, samples in zip(most, own, strict=True) for n in [0] * (size - len(samples)) + samples]
        summed = ranks.sum("metric windows", torch.tensor(aligned, dtype=torch.int64).to(self.device))
        return [part.tolist() for part in summed.split(most)]

    def _samples_in_window(self, ranks: RankSums, counts: Sequence[int]) -> Samples | None:
        """Return the samples of the window of all ranks, if they are stored. Collective."""
        if self._samples is None:
            return None
        columns_3Tn, groups_Tn = self._samples.latest(counts[-1], self.device)
        p, y, w = ranks.concatenate("metric samples", columns_3Tn.double().movedim(2, 0)).movedim(0, 2)
        if groups_Tn is not None:
            groups_Tn = ranks.concatenate("metric groups", groups_Tn.T).T
        return Samples(p, y, w, groups_Tn)

    def _values_of(self, measure: Measure, sums: list[list[Tensor]], window: Samples | None) -> list[Value]:
        ring, columns = self._places[measure.name]
        found = []
        for scope, sums_TK in zip(("lifetime", "window"), sums[ring], strict=False):
            if scope == "lifetime" and not measure.has_lifetime:
                continue
            sums_KT = sums_TK.T if measure.entries else sums_TK.T[columns]
            if scope == "window" and measure.keeps_samples and window is not None:
                values_T, finite_T = measure.exact_of(window), window.finite()
            else:
                values_T, finite_T = measure.from_sums(sums_KT), sums_KT.isfinite().all(0)
            found.append(Value(measure.name, scope, values_T, values_T.isnan() & finite_T))
            bound_T = measure.error_bound(sums_KT) if scope == "lifetime" else None
            if bound_T is not None:
                found.append(Value(measure.name, "lifetime_error", bound_T, bound_T.isnan()))
        return found
