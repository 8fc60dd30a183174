"""The ring of a window's samples: equal to a list of the latest steps, whatever their sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tilerec.errors import InputError
from tilerec.metrics.sample_window import CHUNK, SampleWindow
from tilerec.metrics.samples import Samples


def _step(size: int, seed: int, tasks: int = 2) -> Samples:
    columns = torch.rand(3, tasks, size, generator=torch.Generator().manual_seed(seed)).double()
    return Samples(*columns, torch.full((tasks, size), seed))


def _joined(steps: list[Samples]) -> Tensor:
    columns = [torch.stack([step.predictions_TN, step.labels_TN, step.weights_TN]) for step in steps]
    return torch.cat([torch.zeros(3, 2, 0), *columns], 2)


def _kept(steps: list[Samples], window: int) -> list[Samples]:
    """The latest whole steps of at most `window` samples; at least one."""
    kept: list[Samples] = []
    for step in reversed(steps):
        if kept and sum(one.labels_TN.shape[1] for one in kept) + step.labels_TN.shape[1] > window:
            break
        kept.insert(0, step)
    return kept


@given(
    st.lists(st.tuples(st.integers(0, 7), st.sampled_from(["add", "add", "keep", "save"])), max_size=40),
    st.integers(1, 20),
)
def test_the_ring_holds_the_latest_steps_in_order(actions: list[tuple[int, str]], window: int) -> None:
    ring, steps = SampleWindow(2, window, groups=True), list[Samples]()
    for number, (size, action) in enumerate(actions):
        if action == "add":
            ring.add(_step(size, number), narrow=False)
            steps = _kept([*steps, _step(size, number)], window)
        elif action == "keep":
            ring.keep_latest(size)
            steps = steps[max(len(steps) - size, 0) :]
        else:
            other = SampleWindow(2, window, groups=True)
            other.load(ring.state(), torch.device("cpu"), empty=False)
            ring = other
        assert ring.samples == [step.labels_TN.shape[1] for step in steps]
        for count in (len(steps), len(steps) // 2):
            columns, groups = ring.latest(count)
            want = steps[len(steps) - count :]
            assert torch.equal(columns, _joined(want).to(columns))
            assert torch.equal(groups, torch.cat([torch.zeros(2, 0).long(), *(step.groups_TN for step in want)], 1))
            assert torch.equal(torch.cat([columns[:, :, :0], *ring.chunks(count)], 2), columns)
        for step, (count, columns) in zip(steps, ring.steps(), strict=True):
            assert count == step.labels_TN.shape[1]
            assert torch.equal(columns, _joined([step]).to(columns))


def test_memory_is_that_of_the_window_however_small_the_steps() -> None:
    window = 1000
    ring = SampleWindow(1, window, groups=False)
    for number in range(5000):
        ring.add(_step(1, number, tasks=1), narrow=True)
    assert ring._columns_3TC.numel() * ring._columns_3TC.element_size() == 12 * window
    assert sum(ring.samples) == window


def test_wide_samples_keep_their_bits_and_narrow_ones_take_half_the_memory() -> None:
    ring = SampleWindow(2, 100, groups=False)
    narrow, wide = _step(10, 1), _step(10, 2)
    ring.add(narrow, narrow=True)
    assert ring.latest(1)[0].dtype == torch.float32
    ring.add(Samples(wide.predictions_TN / 3, wide.labels_TN, wide.weights_TN), narrow=False)
    columns, _ = ring.latest(2)
    assert torch.equal(columns[0], torch.cat([narrow.predictions_TN, wide.predictions_TN / 3], 1))


def test_a_float64_state_of_float32_samples_takes_the_memory_of_float32() -> None:
    """As ranks save it together."""
    ring, other = SampleWindow(2, 100, groups=False), SampleWindow(2, 100, groups=False)
    ring.add(_step(10, 1), narrow=True)
    state = ring.state()
    other.load({**state, "samples": state["samples"].double()}, torch.device("cpu"), empty=False)
    assert other.latest(1)[0].dtype == torch.float32
    assert torch.equal(other.latest(1)[0], state["samples"])


def test_columns_may_stand_for_more_samples_than_one() -> None:
    """As those of a histogram's bins do: the window counts samples."""
    ring = SampleWindow(1, 100, groups=False)
    state = {
        "samples": torch.arange(3.0).expand(3, 1, 3),
        "counts": torch.tensor([50, 40]),
        "columns": torch.tensor([1, 2]),
    }
    ring.load(state, torch.device("cpu"), empty=False)
    assert ring.samples == [50, 40]
    ring.add(_step(20, 1, tasks=1), narrow=True)
    assert ring.samples == [40, 20]
    assert ring.latest(2)[0][0, 0, :2].tolist() == [1.0, 2.0]


def test_a_state_without_groups_is_refused_where_they_are_needed() -> None:
    ring = SampleWindow(2, 100, groups=False)
    ring.add(_step(3, 0), narrow=True)
    with pytest.raises(InputError, match="got samples without groups"):
        SampleWindow(2, 100, groups=True).load(ring.state(), torch.device("cpu"), empty=False)


def test_chunks_are_small() -> None:
    ring = SampleWindow(1, 3 * CHUNK, groups=False)
    ring.add(_step(2 * CHUNK + 5, 0, tasks=1), narrow=True)
    assert [chunk.shape[2] for chunk in ring.chunks(1)] == [CHUNK, CHUNK, 5]
