"""Windows and lifetimes: equal to their formulas over all samples, for every division into batches and ranks."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tilerec.comms.group import Group
from tilerec.errors import ConfigError, InputError
from tilerec.metrics.auc import AUC, GroupedAUC
from tilerec.metrics.functional import auc, calibration, grouped_auc, log_loss, normalized_entropy
from tilerec.metrics.histogram import STORED
from tilerec.metrics.measure import Measure
from tilerec.metrics.module import MetricModule
from tilerec.testing.ranks import run_ranks
from tilerec.testing.virtual import run_virtual_ranks

EXACT = {"ne": normalized_entropy, "log_loss": log_loss, "auc": auc, "calibration": calibration}
EVERY = ["ne", "log_loss", "calibration", AUC(exact=True)]
SUMS = ["ne", "log_loss", "calibration"]


def _samples(tasks: int, count: int, draw: torch.Generator | None = None) -> tuple[Tensor, Tensor, Tensor]:
    p, of_label, w = torch.rand(3, tasks, count, dtype=torch.float64, generator=draw)
    return p, (of_label < p).double(), w


def _check(
    values: dict[str, Tensor], scope: str, samples: tuple[Tensor, ...], names: tuple[str, ...] = tuple(EXACT)
) -> None:
    """Compare all values of a scope with the functions of whole tensors, [T, N] each."""
    for task, name in enumerate(("click", "like")):
        for measure in names:
            want = EXACT[measure](*(part[task] for part in samples))
            atol = 1e-3 if measure == "auc" and scope == "lifetime" else 1e-12
            torch.testing.assert_close(values[f"{name}/{measure}/{scope}"], want, rtol=1e-10, atol=atol, equal_nan=True)


def _latest(sizes: list[int], window: int) -> int:
    """How many samples the latest whole steps hold that fit into the window; at least those of the last step."""
    held = 0
    for number, size in enumerate(reversed(sizes)):
        if number and held + size > window:
            break
        held += size
    return held


@pytest.mark.parametrize("cuts", [(0, 70), (0, 1, 2, 70), (0, 30, 30, 47, 70), (0, 13, 26, 39, 52, 70)])
@pytest.mark.parametrize("window", [1, 20, 39, 69, 70, 100])
def test_window_and_lifetime_equal_the_formulas_after_every_step(cuts: tuple[int, ...], window: int) -> None:
    p, y, w = _samples(2, 70)
    metrics = MetricModule(("click", "like"), EVERY, window=window)
    sizes: list[int] = []
    for start, stop in itertools.pairwise(cuts):
        metrics.update(p[:, start:stop], y[:, start:stop], w[:, start:stop])
        sizes.append(stop - start)
        values = metrics.compute()
        held = _latest(sizes, window)
        assert metrics.window_samples == held
        _check(values, "window", tuple(part[:, stop - held : stop] for part in (p, y, w)))
        _check(values, "lifetime", tuple(part[:, :stop] for part in (p, y, w)))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 120), st.sampled_from([2, 3, 8]))
def test_a_small_ring_merges_steps_and_loses_none(sizes: list[int], window: int, entries: int) -> None:
    """The window has the last steps of `window_samples` samples, whatever the ring; the lifetime has all."""
    total = sum(sizes)
    p, y, w = _samples(1, total)
    metrics = MetricModule(("click",), SUMS, window=window, entries=entries)
    at, starts = 0, {0}
    for size in sizes:
        metrics.update(*(part[0, at : at + size] for part in (p, y, w)))
        at += size
        starts.add(at)
    values = metrics.compute()
    held = metrics.window_samples
    assert total - held in starts
    last = next((size for size in reversed(sizes) if size), 0)
    assert held <= window or entries == 2 or held <= window + total or held == last
    for name in SUMS:
        for scope, part in (("window", slice(total - held, total)), ("lifetime", slice(0, total))):
            want = EXACT[name](p[0, part], y[0, part], w[0, part])
            torch.testing.assert_close(values[f"click/{name}/{scope}"], want, rtol=1e-9, atol=1e-12, equal_nan=True)


def test_a_window_of_more_steps_than_entries_keeps_its_length() -> None:
    """1,000 steps of one sample in 16 entries: the window's start is exact to 1/8 of its length."""
    metrics = MetricModule(("click",), ["ctr"], window=1000, entries=16)
    for step in range(3000):
        metrics.update(torch.tensor([0.5]), torch.tensor([float(step >= 1500)]))
        if step > 1000:
            metrics.compute()
            assert 1000 * 7 / 8 <= metrics.window_samples <= 1000
    assert metrics.compute()["click/ctr/window"] == 1.0
    assert metrics.compute()["click/ctr/lifetime"] == 0.5


def test_values_do_not_drift() -> None:
    """Windows that subtract what leaves keep the rounding of large values: here 1e16, far above the sums of 1."""
    metrics = MetricModule(("click",), ["ctr", "mae"], window=2)
    metrics.update(torch.tensor([0.1]), torch.tensor([0.0]), torch.tensor([1e16]))
    for _ in range(5):
        metrics.update(torch.tensor([0.25]), torch.tensor([1.0]))
    values = metrics.compute()
    assert values["click/mae/window"] == 0.75
    assert values["click/ctr/window"] == 1.0


def test_a_nan_prediction_leaves_the_window_with_its_step() -> None:
    metrics = MetricModule(("click",), ["ne", AUC(bins=64)], window=20)
    for bad in (True, False, False):
        p, y, _ = _samples(1, 10)
        metrics.update(torch.full_like(p[0], math.nan) if bad else p[0], y[0])
        if bad:
            assert metrics.compute()["click/ne/window"].isnan()
    values = metrics.compute()
    assert not values["click/ne/window"].isnan()
    assert not values["click/auc/window"].isnan()
    assert values["click/ne/lifetime"].isnan()


def test_lifetime_auc_has_an_error_bound_that_holds() -> None:
    p, y, w = _samples(1, 3000)
    metrics = MetricModule(measures=["auc"], window=0)
    metrics.update(p[0], y[0], w[0])
    values = metrics.compute()
    assert set(values) == {"click/auc/lifetime", "click/auc/lifetime_error"}
    bound = values["click/auc/lifetime_error"]
    assert (values["click/auc/lifetime"] - auc(p[0], y[0], w[0])).abs() <= bound + 1e-12
    assert bound < 1e-4


def test_auc_of_a_window_only() -> None:
    p, y, w = _samples(1, 30)
    metrics = MetricModule(measures=[AUC(exact=True, lifetime=False)], window=20)
    for at in (0, 10, 20):
        metrics.update(*(part[0, at : at + 10] for part in (p, y, w)))
    values = metrics.compute()
    assert set(values) == {"click/auc/window"}
    torch.testing.assert_close(values["click/auc/window"], auc(p[0, 10:], y[0, 10:], w[0, 10:]))
    with pytest.raises(ConfigError, match="lifetime=False without exact=True"):
        AUC(lifetime=False)


def test_exact_grouped_auc_joins_groups_of_several_steps() -> None:
    p, y, w = _samples(1, 60)
    g = torch.arange(60) % 7
    metrics = MetricModule(measures=[GroupedAUC(exact=True)], window=40)
    for step in range(6):
        part = slice(10 * step, 10 * step + 10)
        metrics.update(p[0, part], y[0, part], w[0, part], groups=g[part])
    torch.testing.assert_close(
        metrics.compute()["click/grouped_auc/window"], grouped_auc(p[0, 20:], y[0, 20:], g[20:], w[0, 20:])
    )


def test_update_reads_no_value_from_the_device() -> None:
    """On the meta device a tensor has no values: any read would fail here."""
    metrics = MetricModule(("click", "like"), [*SUMS, "auc", "accuracy", "grouped_auc"], window=10).to("meta")
    for count in (0, 4, 7, 23):
        given = (torch.empty(2, count, device="meta") for _ in range(3))
        metrics.update(*given, groups=torch.zeros(count, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_inputs_have_the_values_of_their_float64_copies(dtype: torch.dtype) -> None:
    p, y, w = (part.to(dtype) for part in _samples(1, 50))
    narrow, wide = MetricModule(measures=EVERY), MetricModule(measures=EVERY)
    narrow.update(p[0], y[0].long(), w[0])
    wide.update(p[0].double(), y[0].double(), w[0].double())
    assert narrow.compute() == wide.compute()


def test_empty_batches_and_no_batches_are_undefined_and_harmless() -> None:
    metrics = MetricModule(measures=[*EVERY, "mse", "accuracy"], window=5)
    assert all(value.isnan() for value in metrics.compute().values())
    for _ in range(20):
        metrics.update(torch.zeros(0), torch.zeros(0))
    assert all(value.isnan() for value in metrics.compute().values())
    p, y, w = _samples(1, 5)
    metrics.update(p[0], y[0], w[0])
    metrics.update(torch.zeros(0), torch.zeros(0))
    want = log_loss(p[0], y[0], w[0]).item()
    assert metrics.compute()["click/log_loss/window"] == pytest.approx(want, rel=1e-12)


def test_zero_weights_and_one_class_are_undefined() -> None:
    metrics = MetricModule(measures=["ne", "auc", "calibration", "ctr", "mse"], window=5)
    metrics.update(torch.rand(4), torch.zeros(4))
    values = metrics.compute()
    undefined = {name for name in ("ne", "auc", "calibration", "ctr", "mse") if values[f"click/{name}/window"].isnan()}
    assert undefined == {"ne", "auc", "calibration"}
    metrics.reset()
    metrics.update(torch.rand(4), torch.ones(4), torch.zeros(4))
    assert all(value.isnan() for value in metrics.compute().values())


def test_a_refused_update_counts_nothing() -> None:
    p, y, w = _samples(1, 10)
    metrics = MetricModule(measures=["mse", "grouped_auc"], window=10)
    metrics.update(p[0], y[0], w[0], groups=torch.zeros(10, dtype=torch.int64))
    before = metrics.compute()
    with pytest.raises(InputError, match=r"Measure grouped_auc: got no groups"):
        metrics.update(p[0], y[0], w[0])
    torch.testing.assert_close(metrics.compute(), before, rtol=0, atol=0)
    assert metrics.window_samples == 10


def test_copies_and_pickles_go_on_alone() -> None:
    p, y, w = _samples(1, 10)
    metrics = MetricModule(measures=[*EVERY, "recall"], window=10)
    metrics.update(p[0], y[0], w[0])
    for other in (copy.deepcopy(metrics), pickle.loads(pickle.dumps(metrics))):
        torch.testing.assert_close(other.compute(), metrics.compute(), rtol=0, atol=0)
        other.update(1 - p[0], y[0], w[0])
        assert other.compute()["click/ne/window"] != metrics.compute()["click/ne/window"]


def test_predictions_with_a_graph_leave_no_graph_behind() -> None:
    p = torch.rand(8, requires_grad=True)
    metrics = MetricModule(measures=EVERY)
    metrics.update(p.sigmoid(), torch.ones(8))
    assert not any(value.requires_grad for value in metrics.compute().values())


def test_updates_under_inference_mode_and_outside_mix() -> None:
    p, y, w = _samples(1, 20)
    metrics, plain = MetricModule(measures=EVERY), MetricModule(measures=EVERY)
    with torch.inference_mode():
        metrics.update(p[0, :10], y[0, :10], w[0, :10])
    metrics.update(p[0, 10:], y[0, 10:], w[0, 10:])
    plain.update(p[0], y[0], w[0])
    torch.testing.assert_close(metrics.compute(), plain.compute(), rtol=1e-12, atol=0)


def test_reset_forgets_everything() -> None:
    p, y, w = _samples(1, 50)
    metrics, fresh = MetricModule(measures=EVERY, window=8), MetricModule(measures=EVERY, window=8)
    metrics.update(p[0], y[0], w[0])
    metrics.reset()
    for module in (metrics, fresh):
        module.update(p[0, :5], y[0, :5], w[0, :5])
    torch.testing.assert_close(metrics.compute(), fresh.compute(), rtol=0, atol=0, equal_nan=True)


def test_a_saved_state_carries_lifetime_and_window_over() -> None:
    p, y, w = _samples(1, 60)
    metrics, other = (MetricModule(measures=EVERY, window=25, entries=8) for _ in range(2))
    for at in range(0, 40, 4):
        metrics.update(*(part[0, at : at + 4] for part in (p, y, w)))
    file = io.BytesIO()
    torch.save(torch.nn.ModuleDict({"metrics": metrics}).state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    metrics.update(p[0, 40:44], y[0, 40:44], w[0, 40:44])  # the saved state is a copy
    metrics.reset()
    torch.nn.ModuleDict({"metrics": other}).load_state_dict(state)
    for at in range(40, 60, 4):
        other.update(*(part[0, at : at + 4] for part in (p, y, w)))
    assert other.compute()["click/auc/window"] == pytest.approx(auc(p[0, 36:], y[0, 36:], w[0, 36:]).item())
    want = normalized_entropy(p[0], y[0], w[0]).item()
    assert other.compute()["click/ne/lifetime"] == pytest.approx(want, rel=1e-12)


def test_a_state_of_other_metrics_is_refused() -> None:
    state = MetricModule(("a",), ["ne"], window=5).state_dict()
    with pytest.raises(InputError, match=r"got tasks \['a'\]; expected \['b'\]"):
        MetricModule(("b",), ["ne"], window=5).load_state_dict(state)
    with pytest.raises(InputError, match="Load it into metrics with the same measures"):
        MetricModule(("a",), ["mse"], window=5).load_state_dict(state)
    with pytest.raises(InputError, match="got no samples of the window"):
        MetricModule(("a",), [AUC(exact=True)], window=5).load_state_dict(
            MetricModule(("a",), [AUC()], window=STORED + 1).state_dict()
        )


def test_a_state_fits_other_windows_and_rings() -> None:
    p, y, w = _samples(1, 40)
    metrics = MetricModule(measures=SUMS, window=40)
    for at in range(0, 40, 4):
        metrics.update(*(part[0, at : at + 4] for part in (p, y, w)))
    for window, entries in ((12, 8192), (12, 4), (0, 8), (400, 8)):
        other = MetricModule(measures=SUMS, window=window, entries=entries)
        other.load_state_dict(metrics.state_dict())
        values = other.compute()
        want = normalized_entropy(p[0], y[0], w[0]).item()
        assert values["click/ne/lifetime"] == pytest.approx(want, rel=1e-12)
        if window == 12:
            want = normalized_entropy(p[0, 28:], y[0, 28:], w[0, 28:]).item()
            assert values["click/ne/window"] == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(
    ("tasks", "shapes", "message"),
    [
        (
            ("a",),
            ((5,), (4,), (5,)),
            r"labels of shape \[4\] with predictions of shape \[5\]; expected all of shape \[N\]",
        ),
        (("a", "b"), ((5,), (5,), (5,)), r"expected all of shape \[2, N\]"),
        (("a", "b"), ((3, 5), (3, 5), (3, 5)), r"got predictions of shape \[3, 5\]; expected all of shape \[2, N\]"),
        (("a",), ((1, 5), (1, 5), (5,)), r"weights of shape \[5\]"),
    ],
)
def test_shapes_that_disagree_are_named(
    tasks: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], message: str
) -> None:
    metrics = MetricModule(tasks)
    with pytest.raises(InputError, match=message):
        metrics.update(*(torch.zeros(shape) for shape in shapes))


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="got measure 'ndgc'"):
        MetricModule(measures=["ndgc"])
    with pytest.raises(ConfigError, match="each once"):
        MetricModule(tasks=["a", "a"])
    with pytest.raises(ConfigError, match="each once"):
        MetricModule(tasks="click")
    with pytest.raises(ConfigError, match="window=-1"):
        MetricModule(window=-1)
    with pytest.raises(ConfigError, match="entries=1"):
        MetricModule(entries=1)
    with pytest.raises(ConfigError, match="got measures"):
        MetricModule(measures=["ne", "ne"])


class Largest(Measure):
    """A measure from outside of the package, with sums of its own: the mean of p squared."""

    name = "square"

    def sums(self, predictions_TN: Tensor, labels_TN: Tensor, weights_TN: Tensor) -> Tensor:
        return torch.stack([(weights_TN * predictions_TN.square()).sum(1), weights_TN.sum(1)])

    def from_sums(self, sums_KT: Tensor) -> Tensor:
        return sums_KT[0] / sums_KT[1]


def test_a_measure_from_outside_has_lifetime_and_window_beside_built_in_ones() -> None:
    p, y, w = _samples(2, 30)
    metrics = MetricModule(("click", "like"), ["ne", Largest(), "mse"], window=10)
    for at in (0, 10, 20):
        metrics.update(*(part[:, at : at + 10] for part in (p, y, w)))
    values = metrics.compute()
    mean = ((w * p.square()).sum(1) / w.sum(1))[1]
    torch.testing.assert_close(values["like/square/lifetime"], mean)
    late = ((w * p.square())[0, 20:].sum() / w[0, 20:].sum()).double()
    torch.testing.assert_close(values["click/square/window"], late)
    _check(values, "window", (p[:, 20:], y[:, 20:], w[:, 20:]), ("ne",))


# -------------------------------------------------------------------------------------------------------- ranks


def _run_on(group: Group, seed: int, sizes: list[list[int]], window: int, report_every: int) -> dict[str, float]:
    """Update with the steps' sizes per rank, from one stream of samples; return the values, and counts of calls."""
    samples = _stream(seed, sizes)
    metrics = MetricModule(("click", "like"), EVERY, window=window, group=group, entries=64)
    at = 0
    for step, of_ranks in enumerate(sizes):
        first = at + sum(of_ranks[: group.rank])
        metrics.update(*(part[:, first : first + of_ranks[group.rank]] for part in samples))
        at += sum(of_ranks)
        if step % report_every == report_every - 1:
            metrics.compute()
    group.traffic.reset()
    values = {name: value.item() for name, value in metrics.compute().items()}
    return {**values, "held": metrics.window_samples, "calls": group.traffic["metric sums"].calls}


def _stream(seed: int, sizes: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    return _samples(2, sum(map(sum, sizes)), torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("report_every", [3, 100])
def test_ranks_report_the_values_of_all_their_samples(ranks: int, even: bool, report_every: int) -> None:
    draw = torch.Generator().manual_seed(ranks)
    sizes = torch.randint(0, 6, (20, ranks), generator=draw).tolist()
    if even:
        sizes = [[5] * ranks for _ in sizes]
    window = 31
    samples = _stream(5, sizes)
    held = _latest([sum(step) for step in sizes], window)
    found = run_virtual_ranks(ranks, _run_on, 5, sizes, window, report_every)
    for values in found:
        assert values == found[0]
        assert values["held"] == held
        tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
        _check(tensors, "window", tuple(part[:, -held:] for part in samples))
        _check(tensors, "lifetime", samples)


def test_a_report_is_one_all_reduce() -> None:
    for values in run_virtual_ranks(2, _calls_of_a_report):
        assert values == {"metric sums": 1}


def _calls_of_a_report(group: Group) -> dict[str, int]:
    metrics = MetricModule(("click", "like"), ["ne", "calibration", "mse", "auc"], window=20, group=group)
    for _ in range(7):
        metrics.update(*_samples(2, 4, torch.Generator()))
    group.traffic.reset()
    metrics.compute()
    return {sent.name: sent.calls for sent in group.traffic}


def _save(group: Group, sizes: list[list[int]]) -> dict[str, Tensor]:
    samples = _stream(7, sizes)
    metrics = MetricModule(("click", "like"), EVERY, window=40, group=group)
    _continue(metrics, group, sizes, samples, 0, 8)
    before = metrics.compute()
    with metrics.synced():
        state = metrics.state_dict()
        with pytest.raises(InputError, match="under `synced`"):
            metrics.update(*(part[:, :2] for part in samples))
    torch.testing.assert_close(metrics.compute(), before, rtol=1e-13, atol=0)
    return state


def _continue(
    metrics: MetricModule,
    group: Group | None,
    sizes: list[list[int]],
    samples: tuple[Tensor, ...],
    start: int,
    stop: int,
) -> None:
    """Add steps; a step's samples are divided as `sizes` has it, or all on one rank."""
    at = sum(map(sum, sizes[:start]))
    for of_ranks in sizes[start:stop]:
        if group is None:
            first, count = at, sum(of_ranks)
        else:
            mine = torch.arange(sum(of_ranks)).tensor_split(group.size)
            first, count = at + sum(len(part) for part in mine[: group.rank]), len(mine[group.rank])
        metrics.update(*(part[:, first : first + count] for part in samples))
        at += sum(of_ranks)


def _resume(group: Group, state: dict[str, Tensor], sizes: list[list[int]]) -> dict[str, Tensor]:
    metrics = MetricModule(("click", "like"), EVERY, window=40, group=group)
    metrics.load_state_dict(state)
    _continue(metrics, group, sizes, _stream(7, sizes), 8, len(sizes))
    return metrics.compute()


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_states_survive_a_change_of_world_size(before: int, after: int) -> None:
    sizes = [[7], [5], [6], [9], [2], [8], [6], [7], [6], [8]]
    samples = _stream(7, sizes)
    states = run_virtual_ranks(before, _save, sizes)
    for values in run_virtual_ranks(after, _resume, states[0], sizes):
        held = _latest([sum(step) for step in sizes], 40)
        _check(values, "window", tuple(part[:, -held:] for part in samples))
        _check(values, "lifetime", samples)


def _load_another_ranks_state(group: Group) -> None:
    metrics = MetricModule(("click",), SUMS, group=group)
    state = metrics.state_dict()
    metrics.load_state_dict(state)  # its own
    state["_extra_state"]["rank"] = 1 - group.rank
    with pytest.raises(InputError, match=r"Save it under `with metrics\.synced"):
        metrics.load_state_dict(state)


def test_the_state_of_one_rank_is_refused_by_another() -> None:
    run_virtual_ranks(2, _load_another_ranks_state)


def _on_process_groups() -> dict[str, float]:
    torch.manual_seed(3)
    samples = _samples(2, 40)
    rank = torch.distributed.get_rank()
    metrics = MetricModule(["click", "like"], EVERY, window=30)
    metrics.update(*(part[:, rank:20:2] for part in samples))
    metrics.update(*(part[:, 20 : 40 if rank else 20] for part in samples))  # uneven: all on rank 1
    with metrics.synced():
        metrics.state_dict()
    return {name: float(value) for name, value in metrics.compute().items()}


def test_process_groups_of_torch_are_found() -> None:
    torch.manual_seed(3)
    samples = _samples(2, 40)
    first, second = run_ranks(2, _on_process_groups)
    assert first == second
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in first.items()}
    _check(tensors, "window", tuple(part[:, 20:] for part in samples))
    _check(tensors, "lifetime", samples)
