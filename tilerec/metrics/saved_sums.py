"""`SavedSums`: a saved state of sums and samples, in the form that a module needs now.

                       saved as samples           saved as entries                 saved by an older version
    lifetime           as it is                   as it is                         in other bins, with the window's sums
    samples needed     as they are                a sample per bin of each entry   a sample per bin of each entry
    entries needed     a step's samples added up  as they are                      in other bins

Legend: U entries in use, T tasks, K sums, n samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.metrics.histogram import Histogram
from tilerec.metrics.measure import Measure
from tilerec.metrics.sample_window import SampleWindow
from tilerec.metrics.samples import Samples
from tilerec.metrics.step_sums import StepSums


@final
class SavedSums:
    """The parts of a state of `MeasureSums`.

    Args:
        state: from `MeasureSums.state`, of any window.
        shared: names of the columns of the shared ring.
        apart: measures with rings of their own.

    Raises:
        InputError: the state is of other measures.
    """

    def __init__(self, state: Mapping[str, Any], shared: Sequence[str], apart: Sequence[Measure]) -> None:
        names = [list(part) for part in state["columns"]]
        self._state = state
        self._apart = list(apart)
        self._rings = {part[0]: index for index, part in enumerate(names) if index}
        # The third name of a ring is its layout, which older states do not have.
        self._layouts = {part[0]: (part[2] if len(part) > 2 else None) for part in names[1:]}
        known = {f"{measure.name} window" for measure in apart if isinstance(measure, Histogram)}
        measures = [part[:2] for part in names[1:] if part[0] not in known]
        expected = [[measure.name, str(measure.width())] for measure in apart]
        fits = names[0] == list(shared) and [part[0] for part in measures] == [part[0] for part in expected]
        if not fits or not all(self._fits(measure, width) for measure, (_, width) in zip(apart, measures, strict=True)):
            raise InputError(
                f"Metric state: got sums of {[names[0], *measures]}; expected {[list(shared), *expected]}. Load it "
                "into metrics with the same measures."
            )

    def _fits(self, measure: Measure, width: str) -> bool:
        layout = self._layouts[measure.name]
        if isinstance(measure, Histogram) and layout is None:
            return (width == "0") == (measure.width() == 0)
        return width == str(measure.width()) and layout in (None, getattr(measure, "layout", None))

    @property
    def shared(self) -> Mapping[str, Any]:
        """The shared ring."""
        return self._ring(0)

    def lifetime(self, measure: Measure) -> Mapping[str, Any]:
        """Return the ring of a measure; of a histogram, with the sums of its lifetime and without a window."""
        ring = self._ring(self._rings[measure.name])
        if not isinstance(measure, Histogram):
            return ring
        earlier_TK, window_UTK = ring["earlier"], ring["window"]
        if self._is_older(measure):
            earlier_TK = measure.from_equal_bins(earlier_TK + window_UTK.sum(0), window=False)
        return _ring_of(earlier_TK, earlier_TK.new_zeros(0, *earlier_TK.shape), [], [], 1)

    def window(self, measure: Histogram, window: int) -> Mapping[str, Any]:
        """Return the ring of a histogram's window.

        Args:
            window: number of samples of the ring that will have it.
        """
        entries = self._entries(measure)
        if entries is not None:
            return entries
        latest = self._state["latest"]
        steps = SampleWindow(latest["samples"].shape[1], window, groups=False)
        steps.load(latest, latest["samples"].device, empty=False)
        tasks, device = latest["samples"].shape[1], latest["samples"].device
        ring = StepSums(
            tasks, measure.window_width(), window, measure.entries, device, dtype=torch.float32, lifetime=False
        )
        for count, columns_3Tn in steps.steps():
            p, y, w = columns_3Tn.double()
            measure.accumulate_window(Samples(p, y, w), ring.open(count, drop=False))
        return ring.state()

    def samples(self, exact: Sequence[Measure]) -> Mapping[str, Any]:
        """Return the samples of the window.

        Args:
            exact: measures that need the samples themselves.

        Raises:
            InputError: the state has none for them.
        """
        if "latest" in self._state:
            latest: Mapping[str, Any] = self._state["latest"]
            return latest
        of_entries = [measure for measure in self._apart if isinstance(measure, Histogram)]
        entries = None if exact or not of_entries else self._entries(of_entries[0])
        if entries is None:
            raise InputError(
                "Metric state: got no samples of the window; expected them for measures with exact=True. Save it "
                "from metrics with the same settings."
            )
        parts = [of_entries[0].as_samples(sums_TK) for sums_TK in entries["window"]]
        none = torch.zeros(3, entries["window"].shape[1], 0, dtype=torch.float64)
        return {
            "samples": torch.cat([none.to(entries["window"].device), *parts], 2),
            "counts": entries["counts"][1],
            "columns": torch.tensor([part.shape[2] for part in parts], dtype=torch.int64),
        }

    def _entries(self, measure: Histogram) -> Mapping[str, Any] | None:
        """Return the ring of a histogram's window; None if the state has samples."""
        if f"{measure.name} window" in self._rings:
            return self._ring(self._rings[f"{measure.name} window"])
        ring = self._ring(self._rings[measure.name])
        if "latest" in self._state and not len(ring["window"]):
            return None
        tasks = ring["earlier"].shape[0]
        window_UTK = ring["window"]
        if self._is_older(measure):
            window_UTK = measure.from_equal_bins(window_UTK, window=True)
        steps, samples = ring["counts"].tolist()
        if not self._is_older(measure):  # a module without a window has saved it
            window_UTK, steps, samples = window_UTK.new_zeros(0, tasks, measure.window_width()), [], []
        return _ring_of(window_UTK.new_zeros(tasks, 0), window_UTK, steps, samples, int(ring["steps_per_entry"]))

    def _is_older(self, measure: Histogram) -> bool:
        return self._layouts[measure.name] is None and measure.width() > 0

    def _ring(self, index: int) -> Mapping[str, Any]:
        ring: Mapping[str, Any] = self._state[f"ring_{index}"]
        return ring


def _ring_of(
    earlier_TK: Tensor, window_UTK: Tensor, steps: list[int], samples: list[int], steps_per_entry: int
) -> dict[str, Any]:
    """Return a state of `StepSums`."""
    return {
        "earlier": earlier_TK,
        "window": window_UTK,
        "counts": torch.tensor([steps, samples], dtype=torch.int64),
        "steps_per_entry": torch.tensor(steps_per_entry),
    }
