"""`MeasureSums`: the sums of all measures of a module, and the samples of windows that need them.

    columns of the shared ring     [sum w c] [sum w y] [sum w] [sum w p] ...    one per distinct term
                                   [sums of measures without terms] ...
    rings of their own             measures with many sums; a histogram has one for its lifetime and one for its window,
                                   or the window's samples

Legend: T tasks, N samples of an update, K sums, W ranks, R rings, P parts: the rings and the samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.metrics.histogram import Histogram
from tilerec.metrics.measure import Measure
from tilerec.metrics.rank_sums import RankSums
from tilerec.metrics.sample_window import SampleWindow
from tilerec.metrics.samples import Samples
from tilerec.metrics.saved_sums import SavedSums
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


_Sums = dict[tuple[str, int], Tensor]
"""Sums float64 [T, K] by scope, "lifetime" or "window", and ring; -1 - r for the samples of the histogram of ring r."""


class _Place(NamedTuple):
    """Where the sums of a measure are: a ring, its columns there, and the ring of its window.

    The window's ring is None if its sums are those of its samples.
    """

    ring: int
    columns: list[int]
    window_ring: int | None


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
        self._apart: list[Measure] = []  # measures with rings of their own
        self._places: dict[str, _Place] = {}
        self._names: list[list[str]] = [[]]  # of each ring's columns, or of its measure
        self._rings: list[StepSums] = []
        self._scratch: dict[str, Tensor] = {}
        self._place(entries)
        self._samples: SampleWindow | None = None
        self._exact = [measure for measure in measures if measure.keeps_samples]
        if window and (self._exact or any(place.window_ring is None for place in self._places.values())):
            groups = any(measure.needs_groups for measure in self._exact)
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
        for measure in self._apart:
            place = self._places[measure.name]
            if measure.has_lifetime:
                measure.accumulate(samples, self._rings[place.ring].open(count, drop=drop))
            if isinstance(measure, Histogram) and place.window_ring is not None:
                measure.accumulate_window(samples, self._rings[place.window_ring].open(count, drop=drop))
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
            state["latest"] = self._samples.state()
        return state

    def load(self, state: Mapping[str, Any], *, empty: bool) -> None:
        """Replace all sums and samples by those of a state; with `empty`, by zeros for the same steps."""
        saved = SavedSums(state, self._names[0], self._apart)
        self._rings[0].load(saved.shared, empty=empty)
        for measure in self._apart:
            place = self._places[measure.name]
            self._rings[place.ring].load(saved.lifetime(measure), empty=empty)
            if isinstance(measure, Histogram) and place.window_ring is not None:
                self._rings[place.window_ring].load(saved.window(measure, self._window), empty=empty)
        if self._samples is not None:
            self._samples.load(saved.samples(self._exact), self.device, empty=empty)

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

    def _place(self, entries: int) -> None:
        """Assign columns to all measures, and make the rings."""
        for measure in self._measures:
            if measure.entries:
                self._apart.append(measure)
                continue
            for term in measure.terms:
                if term.name not in self._names[0]:
                    self._names[0].append(term.name)
                    self._terms.append(term)
            if measure.terms:
                columns = [self._names[0].index(term.name) for term in measure.terms]
                self._places[measure.name] = _Place(0, columns, 0)
        for measure in self._measures:
            if not measure.entries and not measure.terms:
                first = len(self._names[0])
                self._listed.append(measure)
                self._names[0] += [f"{measure.name} {index}" for index in range(measure.width())]
                self._places[measure.name] = _Place(0, list(range(first, len(self._names[0]))), 0)
        self._rings.append(StepSums(self._tasks, len(self._names[0]), self._window, entries, self.device))
        for measure in self._apart:
            self._places[measure.name] = self._place_apart(measure)

    def _place_apart(self, measure: Measure) -> _Place:
        """Make the rings of a measure with many sums."""
        ring, width, window = len(self._rings), measure.width(), self._window
        if not isinstance(measure, Histogram):
            # A window's value that is computed from samples needs no sums of the window.
            of_sums = 0 if measure.keeps_samples else window
            self._rings.append(StepSums(self._tasks, width, of_sums, measure.entries, self.device))
            self._names.append([measure.name, str(width)])
            return _Place(ring, list(range(width)), ring)
        self._rings.append(StepSums(self._tasks, width, 0, measure.entries, self.device))
        self._names.append([measure.name, str(width), measure.layout])
        if not window or measure.stores_samples(window):
            return _Place(ring, list(range(width)), None)
        width = measure.window_width()
        entries = StepSums(
            self._tasks, width, window, measure.entries, self.device, dtype=torch.float32, lifetime=False
        )
        self._rings.append(entries)
        self._names.append([f"{measure.name} window", str(width), measure.layout])
        return _Place(ring, list(range(width)), ring + 1)

    def _parts(self) -> list[StepSums | SampleWindow]:
        return [*self._rings] if self._samples is None else [*self._rings, self._samples]

    def _reduced(self, ranks: RankSums, counts: Sequence[int], extra: Tensor | None) -> tuple[_Sums, bool]:
        """Return the sums of all ranks, and whether their windows have the same steps. Collective."""
        found = self._own_sums(counts)
        latest = self._rings[0].samples
        numbers = [sum(latest[len(latest) - counts[0] :]), *counts, *(count * count for count in counts)]
        if ranks.size == 1:
            self.window_samples = numbers[0]
            return found, True
        parts = [*found.values(), torch.tensor(numbers, dtype=torch.float64).to(self.device)]
        if extra is not None:
            parts.append(extra.to(self.device))
        reduced = ranks.sum("metric sums", torch.cat([part.reshape(-1) for part in parts]))
        flat = iter(reduced.split([part.numel() for part in parts]))
        sums = {key: next(flat).view_as(part) for key, part in found.items()}
        numbers = [int(number) for number in next(flat).tolist()]
        if extra is not None:
            extra.copy_(reduced[-extra.numel() :])
        self.window_samples = numbers[0]
        # The mean square of the ranks' counts equals their squared mean only if all are equal (Cauchy-Schwarz).
        means, squares = numbers[1 : 1 + len(counts)], numbers[1 + len(counts) :]
        return sums, all(ranks.size * s == m * m for m, s in zip(means, squares, strict=True))

    def _own_sums(self, counts: Sequence[int]) -> _Sums:
        """Return this rank's sums, by scope and place: a ring, or the samples counted by a histogram."""
        sums: _Sums = {}
        for index, (ring, count) in enumerate(zip(self._rings, counts, strict=False)):
            if ring.has_lifetime:
                sums["lifetime", index] = ring.lifetime()
            if ring.has_window:
                sums["window", index] = ring.latest(count)
        for measure in self._apart:
            # Measures with `keeps_samples` get them as they are.
            place = self._places[measure.name]
            if place.window_ring is None and not measure.keeps_samples and self._samples is not None:
                sums["window", -1 - place.ring] = sums_TK = self._counted(measure)
                for p, y, w in self._samples.chunks(counts[-1]):
                    measure.accumulate(Samples(p.double(), y.double(), w.double()), sums_TK)
        return sums

    def _counted(self, measure: Measure) -> Tensor:
        """Return zeros for the sums of the window's samples. Kept memory: random writes to new pages take 5 ms."""
        sums_TK = self._scratch.get(measure.name)
        if sums_TK is None or sums_TK.device != self.device:
            with torch.inference_mode(False):
                sums_TK = torch.zeros(self._tasks, measure.width(), dtype=torch.float64, device=self.device)
            self._scratch[measure.name] = sums_TK
        return sums_TK.zero_()

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
        if self._samples is None or not self._exact:
            return None
        columns_3Tn, groups_Tn = self._samples.latest(counts[-1])
        p, y, w = ranks.concatenate("metric samples", columns_3Tn.double().movedim(2, 0)).movedim(0, 2)
        if groups_Tn is not None:
            groups_Tn = ranks.concatenate("metric groups", groups_Tn.T).T
        return Samples(p, y, w, groups_Tn)

    def _values_of(self, measure: Measure, sums: _Sums, window: Samples | None) -> list[Value]:
        place = self._places[measure.name]
        found = []
        if measure.has_lifetime:
            sums_KT = _of_measure(measure, place, sums["lifetime", place.ring])
            values_T = measure.from_sums(sums_KT)
            found.append(Value(measure.name, "lifetime", values_T, values_T.isnan() & sums_KT.sum(0).isfinite()))
            bound_T = measure.error_bound(sums_KT)
            if bound_T is not None:
                found.append(Value(measure.name, "lifetime_error", bound_T, bound_T.isnan()))
        if measure.keeps_samples and window is not None:
            values_T = measure.exact_of(window)
            found.append(Value(measure.name, "window", values_T, values_T.isnan() & window.finite()))
        elif self._window:
            ring = -1 - place.ring if place.window_ring is None else place.window_ring
            sums_KT = _of_measure(measure, place, sums["window", ring])
            values_T = measure.from_sums(sums_KT)
            found.append(Value(measure.name, "window", values_T, values_T.isnan() & sums_KT.sum(0).isfinite()))
        return found


def _of_measure(measure: Measure, place: _Place, sums_TK: Tensor) -> Tensor:
    """Return the sums of a measure, [K, T], of those of its ring."""
    return sums_TK.T if measure.entries else sums_TK.T[place.columns]
