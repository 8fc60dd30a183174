"""Logistic regression: sums of weights, gradients, and the optimum of plain torch."""

from __future__ import annotations

import pytest
import torch

from tests.models.click_models import BOTH, ONE_DENSE, ONE_SPARSE, Features
from tilerec.errors import ConfigError, InputError
from tilerec.models.linear import LogisticRegression


@pytest.mark.parametrize("size", [0, 1, 5])
@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.parametrize("features", [BOTH, ONE_DENSE, ONE_SPARSE], ids=["both", "dense", "ids"])
def test_logits_and_gradients_are_sums_of_weights(features: Features, tasks: int, size: int) -> None:
    model = LogisticRegression(features.bags(dim=tasks), features.dense, num_tasks=tasks).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    dense, sparse = features.batch(size, torch.float64)
    state = {name: value.detach().clone().requires_grad_() for name, value in model.state_dict().items()}
    rows = []
    for sample in range(size):
        logits_T = state["bias"] + state["dense_weights"] @ dense[sample]
        for table, _, pooling, names in features.tables:
            for name in names:
                found = state[f"embedding_bag_collection.embedding_bags.{table}.weight"][
                    sparse[name].to_dense()[sample]
                ]
                logits_T = logits_T + (found.sum(0) / max(len(found), 1) if pooling == "mean" else found.sum(0))
        rows.append(logits_T)
    wanted = torch.stack(rows) if rows else torch.zeros(0, tasks, dtype=torch.float64)
    logits = model(dense, sparse)
    torch.testing.assert_close(logits, wanted)
    if size:
        logits.square().sum().backward()
        wanted.square().sum().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, state[name].grad, msg=name)


def test_the_dense_part_begins_at_zero() -> None:
    model = LogisticRegression(None, 3, num_tasks=2)
    assert not model(*Features((), 3).batch(4)).any()


def test_it_compiles_in_one_graph() -> None:
    model = LogisticRegression(BOTH.bags(dim=2), BOTH.dense, num_tasks=2)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (4, 7):
        inputs = BOTH.batch(size)
        torch.testing.assert_close(compiled(*inputs), model(*inputs))


def test_features_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match=r"tables of embedding_dim 3 for 2 tasks; expected 2"):
        LogisticRegression(BOTH.bags(dim=3), 4, num_tasks=2)
    with pytest.raises(ConfigError, match="LogisticRegression: got no features"):
        LogisticRegression(None, 0)
    with pytest.raises(InputError, match=r"LogisticRegression: got input of shape \[4, 1\]"):
        LogisticRegression(None, 2)(*ONE_DENSE.batch(4))
