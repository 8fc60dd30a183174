"""What steps cost beside ids and rows is found from the steps' times, whatever it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tilerec.comms.group import Group
from tilerec.planner.cost import whole_steps as module
from tilerec.planner.cost.default_speeds import default_speeds
from tilerec.planner.cost.whole_steps import FITTED, SHAPES, fitted
from tilerec.spec.speeds import PER_WIDTH, Speeds
from tilerec.spec.topology import Topology
from tilerec.testing.virtual import run_virtual_ranks

TOPOLOGY = Topology(2, "cpu")
ALONE = default_speeds(TOPOLOGY)
TRUE = {"step": 1e-3, "part": 2e-5, "call": 5e-4, "replica": 1e-4, "row_sum": 2e-4}


class Pair:
    """As much of a group as a fit asks for, where nothing is timed."""

    size = 2


def fit(monkeypatch: pytest.MonkeyPatch, seconds: Any) -> Speeds:
    """From steps that take so long."""
    monkeypatch.setattr(module, "_timed", lambda *_: np.array([seconds(shape) for shape in SHAPES]))
    group: Any = Pair()
    return fitted(group, TOPOLOGY, ALONE, torch.device("cpu"), 1, 1)


def priced(speeds: Speeds, load: float) -> Any:
    def seconds(shape: Any) -> float:
        work, counts = shape.work(TOPOLOGY, speeds), shape.counts(TOPOLOGY, speeds)
        return load * work + sum(TRUE[name] * count for name, count in zip(FITTED, counts, strict=True))

    return seconds


def test_steps_that_follow_the_model_give_its_constants_back(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fit(monkeypatch, priced(ALONE, 1.5))

    assert {name: getattr(found, name) for name in FITTED} == pytest.approx(TRUE, rel=1e-6)
    for name in PER_WIDTH:
        assert getattr(found, name) == pytest.approx([1.5 * rate for rate in getattr(ALONE, name)], rel=1e-6)
    assert found.copy == pytest.approx(1.5 * ALONE.copy)
    assert found.cache == ALONE.cache


def test_the_cache_is_what_steps_show_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(ALONE, cache=ALONE.cache >> 3)
    assert fit(monkeypatch, priced(small, 1.0)).cache == small.cache


def test_no_constant_is_below_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    # Steps of many tables that take no longer than those of one: no room for a cost per part.
    found = fit(monkeypatch, lambda _: 2e-3)

    assert all(getattr(found, name) >= 0 for name in FITTED)
    assert all(rate > 0 for rate in found.lookup_far)


def test_shapes_run_and_all_ranks_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    small = tuple(replace(s, tables=1 + len(s.kinds) // 2, rows=50, bags=4) for s in SHAPES[::2])
    monkeypatch.setattr(module, "SHAPES", small)

    def run(group: Group) -> Speeds:
        return fitted(group, TOPOLOGY, ALONE, torch.device("cpu"), 1, 2)

    first, second = run_virtual_ranks(2, run)
    assert first == second
    assert first.call > 0 or first.step > 0
