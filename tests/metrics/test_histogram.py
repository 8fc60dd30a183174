"""Histograms of the logit: bins, windows of both forms, and states of one form in modules of the other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tilerec.comms.group import Group
from tilerec.errors import InputError
from tilerec.metrics import histogram
from tilerec.metrics.auc import AUC, GroupedAUC
from tilerec.metrics.functional import auc
from tilerec.metrics.module import MetricModule
from tilerec.metrics.samples import Samples
from tilerec.testing.virtual import run_virtual_ranks


def _clicks(count: int, tasks: int = 1, mean: float = -2.0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    p = (torch.randn(tasks, count, generator=draw, dtype=torch.float64) + mean).sigmoid()
    y, w = torch.rand(2, tasks, count, generator=draw, dtype=torch.float64)
    return p, (y < p).double(), w


@pytest.fixture
def _entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of any length are kept as entries."""
    monkeypatch.setattr(histogram, "STORED", 0)


@pytest.fixture(params=["samples", "entries"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The form of windows."""
    monkeypatch.setattr(histogram, "STORED", 10**9 if request.param == "samples" else 0)
    return str(request.param)


# --------------------------------------------------------------------------------------------------------- bins


@pytest.mark.parametrize("bins", [2, 17, 4096, 3 << 16])
def test_bins_ascend_and_most_of_them_are_in_the_inner_half(bins: int) -> None:
    measure = AUC(bins=bins, reach=16.0)
    bin_N = measure._bin_of(torch.linspace(-20, 20, 4001, dtype=torch.float64))
    assert bin_N[0] == 0
    assert bin_N[-1] == bins - 1
    assert (bin_N.diff() >= 0).all()
    inner = measure._bin_of(torch.tensor([-8.0, 8.0], dtype=torch.float64)).diff().item()
    assert inner == pytest.approx(bins * 7 / 8, abs=1)


def test_logits_of_edges_are_the_inverse_of_bins() -> None:
    measure = AUC(bins=480)
    edges = torch.arange(481)
    logits = measure._logit_of(edges)
    assert logits[[0, -1]].tolist() == [-16.0, 16.0]
    middle = (logits[1:] + logits[:-1]) / 2
    assert torch.equal(measure._bin_of(middle), edges[:-1])


@pytest.mark.parametrize("bins", [7, 4096, 9000, 3 << 16])
def test_an_entry_has_the_sums_of_the_bins_that_it_joins(bins: int) -> None:
    measure = AUC(bins=bins)
    p, y, w = _clicks(1000, 2)
    fine_TK, entry_TK = torch.zeros(2, 2 * bins, dtype=torch.float64), torch.zeros(2, measure.window_width())
    measure.accumulate(Samples(p, y, w), fine_TK)
    measure.accumulate_window(Samples(p, y, w), entry_TK)
    assert measure.window_width() <= 2 * histogram.ENTRY_BINS
    fold = -(-2 * bins // measure.window_width())
    for fine_TB, entry_TV in zip(fine_TK.chunk(2, 1), entry_TK.chunk(2, 1), strict=True):
        padded = torch.nn.functional.pad(fine_TB, (0, entry_TV.shape[1] * fold - bins))
        torch.testing.assert_close(padded.view(2, -1, fold).sum(2), entry_TV.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bins", [7, 9000, 3 << 16])
def test_samples_of_an_entry_have_its_sums(bins: int) -> None:
    measure = AUC(bins=bins)
    p, y, w = _clicks(500, 2)
    y[:, :50] = 0.3
    entry_TK, again_TK = torch.zeros(2, 2, measure.window_width())
    measure.accumulate_window(Samples(p, y, w), entry_TK)
    found = measure.as_samples(entry_TK)
    assert found.shape[2] < 1000
    measure.accumulate_window(Samples(*found), again_TK)
    torch.testing.assert_close(again_TK, entry_TK)


def test_samples_of_an_entry_with_nan_make_its_task_nan_and_no_other() -> None:
    measure = AUC()
    p, y, w = _clicks(50, 2)
    p[0, 7] = float("nan")
    entry_TK = torch.zeros(2, measure.window_width())
    measure.accumulate_window(Samples(p, y, w), entry_TK)
    p, y, w = measure.as_samples(entry_TK)
    assert measure.from_sums(measure.sums(p, y, w)).isnan().tolist() == [True, False]


# ------------------------------------------------------------------------------------------------------ windows


@pytest.mark.usefixtures("_entries")
@pytest.mark.parametrize(("steps", "batch"), [(205, 1), (401, 7), (700, 1)])
def test_the_start_of_a_window_is_exact_to_1_percent_of_its_length(steps: int, batch: int) -> None:
    """However many steps it has; with at most 200 it is exact."""
    window = steps * batch
    metrics = MetricModule(measures=[AUC(bins=64)], window=window)
    ring = metrics._sums._rings[2]
    for step in range(3 * steps):
        metrics.update(*(part[0] for part in _clicks(batch, seed=step)))
        seen = (step + 1) * batch
        if step < 200:
            assert sum(ring.samples) == min(seen, window)
        if step % 17 == 16:
            metrics.compute()
            held = sum(ring.samples)
            assert 0.99 * min(seen, window) <= held <= window
            assert ring.latest(len(ring.samples)).sum() > 0


def test_a_window_of_stored_samples_is_exact_for_any_number_of_steps() -> None:
    p, y, w = _clicks(3000)
    metrics = MetricModule(measures=["auc"], window=1000)
    for at in range(3000):
        metrics.update(*(part[0, at : at + 1] for part in (p, y, w)))
    values = metrics.compute()
    assert metrics.window_samples == 1000
    want = auc(p[0, 2000:], y[0, 2000:], w[0, 2000:]).item()
    assert values["click/auc/window"].item() == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("window", [50_000, 600_000])
def test_memory_of_a_window_is_bounded(window: int) -> None:
    metrics = MetricModule(["a", "b"], ["auc"], window=window)
    for step in range(20):
        p, y, w = (part.float() for part in _clicks(5000, 2, seed=step))
        metrics.update(p, y, w)
    sums = metrics._sums
    window_bytes = sum(ring.tensor_ETK.numel() * ring.tensor_ETK.element_size() for ring in sums._rings[1:])
    if sums._samples is not None:
        window_bytes += sums._samples._columns_3TC.numel() * 4
    per_task = window_bytes / 2
    assert per_task <= (12 * window if window <= histogram.STORED else 200 * 2 * histogram.ENTRY_BINS * 4)
    assert per_task < 6.6e6


@pytest.mark.parametrize("mean", [-6.0, -3.0, 0.0])
def test_long_windows_are_within_1e_4_of_the_exact_auc(mean: float) -> None:
    window = histogram.STORED + 4096
    metrics = MetricModule(measures=["auc"], window=window)
    steps = [_clicks(1 << 15, mean=mean, seed=step) for step in range(18)]
    for step in steps:
        metrics.update(*(part[0] for part in step))
    values = metrics.compute()
    kept = [torch.cat([step[part][0] for step in steps[-16:]]) for part in range(3)]
    assert metrics.window_samples == kept[0].numel() == 1 << 19
    assert values["click/auc/window"].item() == pytest.approx(auc(*kept).item(), abs=1e-4)


def test_a_nan_leaves_the_window_with_its_step(form: str) -> None:
    metrics = MetricModule(measures=["auc"], window=20)
    found = []
    for bad in (False, True, False, False):
        p, y, w = _clicks(10, mean=0.0)
        metrics.update(p[0].fill_(float("nan")) if bad else p[0], y[0], w[0])
        found.append(bool(metrics.compute()["click/auc/window"].isnan()))
    assert found == [False, True, True, False], form


# -------------------------------------------------------------------------------------------------------- ranks


def _on_rank(group: Group, window: int) -> dict[str, float]:
    p, y, w = _clicks(600, 2)
    metrics = MetricModule(["a", "b"], ["auc"], window=window, group=group)
    for at in range(0, 600, 60):
        mine = torch.arange(at, at + 60).tensor_split([20])[group.rank]  # 20 and 40 samples
        metrics.update(p[:, mine], y[:, mine], w[:, mine])
        if at == 300:
            with metrics.synced():
                state = copy.deepcopy(metrics.state_dict())
            metrics.reset()
            metrics.load_state_dict(state)
    group.traffic.reset()
    values = {name: value.item() for name, value in metrics.compute().items()}
    return {**values, "held": metrics.window_samples, "calls": sum(sent.calls for sent in group.traffic)}


def test_ranks_report_the_window_of_all_their_samples(form: str) -> None:
    p, y, w = _clicks(600, 2)
    first, second = run_virtual_ranks(2, _on_rank, 250)
    assert first == second
    assert first["held"] == 240
    for task, name in enumerate("ab"):
        want = auc(*(part[task, 360:] for part in (p, y, w))).item()
        assert first[f"{name}/auc/window"] == pytest.approx(want, abs=1e-4 if form == "samples" else 5e-3)
        assert first[f"{name}/auc/lifetime"] == pytest.approx(auc(p[task], y[task], w[task]).item(), abs=1e-4)


# ------------------------------------------------------------------------------------------------------- states


def _updated(metrics: MetricModule, start: int, stop: int) -> MetricModule:
    p, y, w = _clicks(400, 2)
    for at in range(start, stop, 20):
        metrics.update(*(part[:, at : at + 20] for part in (p, y, w)))
    return metrics


@pytest.mark.parametrize("before", ["samples", "entries"])
@pytest.mark.parametrize("after", ["samples", "entries", "none"])
def test_a_state_of_one_form_continues_in_the_other(before: str, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p, y, w = _clicks(400, 2)
    monkeypatch.setattr(histogram, "STORED", 10**9 if before == "samples" else 0)
    state = _updated(MetricModule(["a", "b"], ["ne", "auc"], window=200), 0, 300).state_dict()
    monkeypatch.setattr(histogram, "STORED", 10**9 if after == "samples" else 0)
    other = MetricModule(["a", "b"], ["ne", "auc"], window=0 if after == "none" else 160)
    other.load_state_dict(state)
    for stop in (300, 400):
        _updated(other, 300, stop)
        values = other.compute()
        for task, name in enumerate("ab"):
            want = auc(*(part[task, :stop] for part in (p, y, w))).item()
            assert values[f"{name}/auc/lifetime"].item() == pytest.approx(want, abs=1e-4)
            if after == "none":
                assert f"{name}/auc/window" not in values
                continue
            assert other.window_samples == 160
            want = auc(*(part[task, stop - 160 : stop] for part in (p, y, w))).item()
            assert values[f"{name}/auc/window"].item() == pytest.approx(want, abs=5e-3)


def _older_state(bins: int, window: int, exact: bool = False) -> dict[str, Any]:
    """A state as the first version saved it: bins of equal width, a ring of 16 entries; one step of 20 each."""
    metrics = MetricModule(["a", "b"], ["ne", AUC(exact=True)], window=window)
    state = _updated(metrics, 0, 300).get_extra_state()
    p, y, w = _clicks(400, 2)
    steps = []
    for at in range(0, 300, 20):
        part = [one[:, at : at + 20] for one in (p, y, w)]
        place = (part[0].logit() * bins / 32 + bins / 2).clamp(0, bins - 1).long()
        sums = torch.zeros(2, 2 * bins, dtype=torch.float64)
        sums.scatter_add_(1, place, part[2] * part[1])
        steps.append(sums.scatter_add_(1, place + bins, part[2] * (1 - part[1])))
    counts = state["ring_0"]["counts"]
    inside = 0 if exact else counts.shape[1]
    earlier = sum(steps[: len(steps) - inside], torch.zeros_like(steps[0]))
    entries = torch.stack(steps)[len(steps) - inside :]
    state["columns"] = [state["columns"][0], ["auc", str(2 * bins)]]
    state["ring_1"] = {
        "earlier": earlier,
        "window": entries,
        "counts": counts if inside else counts[:, :0],
        "steps_per_entry": torch.tensor(1),
    }
    if exact:
        del state["latest"]["columns"]
    else:
        del state["latest"]
    return {"_extra_state": state}


@pytest.mark.parametrize("bins", [1 << 16, 5000])
def test_a_state_of_equal_bins_continues(bins: int, form: str) -> None:
    p, y, w = _clicks(400, 2)
    metrics = MetricModule(["a", "b"], ["ne", "auc"], window=200)
    metrics.load_state_dict(_older_state(bins, 200))
    for stop in (300, 400):
        _updated(metrics, 300, stop)
        values = metrics.compute()
        for task, name in enumerate("ab"):
            want = auc(*(part[task, :stop] for part in (p, y, w))).item()
            assert values[f"{name}/auc/lifetime"].item() == pytest.approx(want, abs=1e-4 if bins > 5000 else 2e-3)
            want = auc(*(part[task, stop - 200 : stop] for part in (p, y, w))).item()
            assert values[f"{name}/auc/window"].item() == pytest.approx(want, abs=5e-3)


def test_an_older_state_of_an_exact_window_continues() -> None:
    p, y, w = _clicks(400, 2)
    metrics = MetricModule(["a", "b"], ["ne", AUC(exact=True)], window=200)
    metrics.load_state_dict(_older_state(1 << 16, 200, exact=True))
    values = _updated(metrics, 300, 400).compute()
    want = auc(*(part[1, 200:] for part in (p, y, w))).item()
    assert values["b/auc/window"].item() == pytest.approx(want, abs=1e-12)
    want = auc(p[1], y[1], w[1]).item()
    assert values["b/auc/lifetime"].item() == pytest.approx(want, abs=1e-4)


@pytest.mark.usefixtures("_entries")
def test_states_that_do_not_fit_are_refused() -> None:
    state = MetricModule(measures=["auc"], window=5).state_dict()
    with pytest.raises(InputError, match="got no samples of the window; expected them for measures with exact=True"):
        MetricModule(measures=[AUC(exact=True)], window=5).load_state_dict(state)
    with pytest.raises(InputError, match="Load it into metrics with the same measures"):
        MetricModule(measures=[AUC(bins=100)], window=5).load_state_dict(state)
    with pytest.raises(InputError, match="Load it into metrics with the same measures"):
        MetricModule(measures=[AUC(reach=8.0)], window=5).load_state_dict(state)
    with pytest.raises(InputError, match="Load it into metrics with the same measures"):
        MetricModule(measures=["auc", GroupedAUC()], window=5).load_state_dict(state)
