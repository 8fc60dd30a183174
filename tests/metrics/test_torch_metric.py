"""Metrics of torchmetrics beside measures: per task, over ranks, in the state dict."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.classification import BinaryAUROC, BinaryF1Score
from torchmetrics.retrieval import RetrievalMRR, RetrievalNormalizedDCG, RetrievalRecall

from tilerec.errors import ConfigError, InputError
from tilerec.metrics.functional import auc
from tilerec.metrics.module import MetricModule
from tilerec.metrics.torch_metric import TorchMetric
from tilerec.testing.ranks import run_ranks


def _samples(count: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    p, of_label = torch.rand(2, 2, count, generator=draw)
    return p, (of_label < p).float(), torch.arange(count) // 5


def test_ranking_metrics_of_groups_are_computed_per_task() -> None:
    p = torch.tensor([[0.9, 0.5, 0.1, 0.2, 0.8], [0.1, 0.5, 0.9, 0.8, 0.2]])
    y = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0]).expand(2, -1)
    groups = torch.tensor([0, 0, 0, 1, 1])
    metrics = MetricModule(
        ("first", "second"),
        [
            "ctr",
            TorchMetric("mrr", RetrievalMRR(), groups="indexes"),
            TorchMetric("recall_1", RetrievalRecall(top_k=1), groups="indexes"),
            TorchMetric("ndcg", RetrievalNormalizedDCG(top_k=2), groups="indexes"),
        ],
    )
    metrics.update(p, y, groups=groups)
    values = metrics.compute()
    # First: the positives have ranks 2 and 1. Second: ranks 2 and 2.
    assert values["first/mrr/lifetime"] == pytest.approx(0.75)
    assert values["second/mrr/lifetime"] == pytest.approx(0.5)
    assert values["first/recall_1/lifetime"] == pytest.approx(0.5)
    assert values["first/ndcg/lifetime"] == pytest.approx((1 + 1 / math.log2(3)) / 2)
    assert values["first/ctr/lifetime"] == pytest.approx(0.4)


def test_classification_metrics_have_integer_labels_and_weights_have_a_name() -> None:
    class Weighted(MeanSquaredError):
        def update(self, preds: Tensor, target: Tensor, weight: Tensor | None = None) -> None:
            assert weight is not None
            super().update(preds * weight, target * weight)

    p, y, _ = _samples(40)
    metrics = MetricModule(
        ("a", "b"),
        [
            TorchMetric("auroc", BinaryAUROC()),
            TorchMetric("soft", Weighted(), weights="weight", integer_labels=False),
        ],
    )
    metrics.update(p, y, torch.full_like(p, 2.0))
    values = metrics.compute()
    assert values["a/auroc/lifetime"] == pytest.approx(auc(p[0], y[0]).item(), abs=1e-6)
    assert values["b/soft/lifetime"] == pytest.approx(4 * (p[1] - y[1]).square().mean().item(), rel=1e-5)


def test_empty_batches_and_no_batches_are_undefined() -> None:
    metrics = MetricModule(measures=[TorchMetric("f1", BinaryF1Score())])
    assert metrics.compute()["click/f1/lifetime"].isnan()
    metrics.update(torch.zeros(0), torch.zeros(0))
    assert metrics.compute()["click/f1/lifetime"].isnan()


def test_missing_groups_and_collections_are_refused() -> None:
    metrics = MetricModule(measures=[TorchMetric("mrr", RetrievalMRR(), groups="indexes")])
    with pytest.raises(InputError, match=r"Metric mrr: got no groups"):
        metrics.update(torch.rand(3), torch.ones(3))
    with pytest.raises(ConfigError, match="TorchMetric 'all': got a MetricCollection"):
        TorchMetric("all", MetricCollection([BinaryF1Score()]))  # type: ignore[arg-type]


def _module() -> MetricModule:
    return MetricModule(
        ("a", "b"),
        [
            "ctr",
            TorchMetric("mse", MeanSquaredError(), integer_labels=False),
            TorchMetric("mrr", RetrievalMRR(), groups="indexes"),
        ],
    )


def _share(rank: int, ranks: int, part: slice) -> tuple[Any, Tensor]:
    p, y, groups = _samples(80)
    mine = torch.arange(80)[part].tensor_split(ranks)[rank]
    return (p[:, mine], y[:, mine]), groups[mine]


def _save_and_go_on() -> tuple[dict[str, float], dict[str, Any]]:
    rank = torch.distributed.get_rank()
    metrics = _module()
    samples, groups = _share(rank, 2, slice(0, 40))
    metrics.update(*samples, groups=groups)
    with metrics.synced():
        state = metrics.state_dict()
    other = _module()
    other.load_state_dict(state)
    for module in (metrics, other):
        samples, groups = _share(rank, 2, slice(40, 80))
        module.update(*samples, groups=groups)
    values, again = ({name: float(value) for name, value in module.compute().items()} for module in (metrics, other))
    assert again == pytest.approx(values)
    return values, state


def _only_rank_1_has_samples() -> dict[str, float]:
    metrics = _module()
    for count in (3, 4):
        samples, groups = _share(0, 1, slice(0, count * torch.distributed.get_rank()))
        metrics.update(*samples, groups=groups)
    return {name: float(value) for name, value in metrics.compute().items()}


def test_ranks_without_samples_do_not_hang() -> None:
    first, second = run_ranks(2, _only_rank_1_has_samples)
    assert first == second
    assert not any(math.isnan(value) for value in first.values())


def test_ranks_add_their_states_and_resume_from_a_common_one() -> None:
    whole = _module()
    samples, groups = _share(0, 1, slice(0, 80))
    whole.update(*samples, groups=groups)
    want = {name: float(value) for name, value in whole.compute().items()}
    (first, state), (second, _) = run_ranks(2, _save_and_go_on)
    assert first == second == pytest.approx(want, rel=1e-6)

    alone = _module()
    alone.load_state_dict(state)
    samples, groups = _share(0, 1, slice(40, 80))
    alone.update(*samples, groups=groups)
    assert {name: float(value) for name, value in alone.compute().items()} == pytest.approx(want, rel=1e-6)
