"""Optimizers of users: a registered one has the results of a built-in one, and bad ones are refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.registries import restored_registries
from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.ops.update.rules import PartialRowWiseAdamRule, Rule, UpdateCount
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.optim.registration import register_optimizer
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.shard import shard
from tilerec.planner.helpers import column_wise, data_parallel, explicit, row_wise, table_wise
from tilerec.spec.optimizer import SGD, OptimizerSpec, PartialRowWiseAdam, Slot
from tilerec.spec.table import DataType, EmbeddingBagConfig
from tilerec.testing.batches import random_batch
from tilerec.testing.virtual import run_virtual_ranks


class TwinRule(PartialRowWiseAdamRule):
    """The rule of a built-in optimizer under a name of its own: one phase, slots per element and per row."""


Twin = dataclass(frozen=True)(type("Twin", (PartialRowWiseAdam,), {"rule": "twin_for_tests"}))
CUTS = {
    "columns": column_wise(),
    "rows": row_wise(),
    "copies": data_parallel(),
    "cached": table_wise(0, compute_kernel="fused_uvm_caching"),
    "bf16": explicit([(0, 20, 0, 4, 0), (0, 20, 4, 12, 1), (20, 50, 0, 12, (0, 1))]),
}


@pytest.fixture(autouse=True, scope="module")
def _twin_is_registered() -> Iterator[None]:
    with restored_registries():
        register_optimizer(Twin, TwinRule)
        yield


def trained(spec: OptimizerSpec) -> list[dict[str, Tensor]]:
    """State after two steps on two ranks, with a row whose gradient is not finite in the second."""
    torch.manual_seed(0)
    types = {"bf16": DataType.BF16}
    tables = [EmbeddingBagConfig(50, 12, name, types.get(name, DataType.FP32), ["f"]) for name in CUTS]
    whole = EmbeddingBagCollection(tables)
    apply_optimizer_in_backward(spec, whole.parameters())

    def fn(group: Group) -> dict[str, Tensor]:
        made = shard(copy.deepcopy(whole), CUTS, group)
        for step in range(2):
            out = made(random_batch(["f"], 50, 6, seed=10 * step + group.rank)).values()
            weight = torch.linspace(-1, 1, out.numel()).view_as(out)
            if step:
                weight[0, :4] = torch.inf
            (out * weight).sum().backward()
        return {name: value.clone() for name, value in full_state_dict(made).items()}

    return run_virtual_ranks(2, fn)


def test_a_registered_rule_equals_the_built_in_one_under_every_cut() -> None:
    settings = {"lr": 0.1, "weight_decay": 0.01, "grad_scale": 2.0, "non_finite": "skip", "row_step": True}
    expected, found = trained(PartialRowWiseAdam(**settings)), trained(Twin(**settings))
    for one, other in zip(found, expected, strict=True):
        for name in one:
            rtol = 2**-7 if one[name].dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(one[name], other[name], rtol=rtol, atol=1e-7)


@dataclass(frozen=True)
class Plain(OptimizerSpec):
    """w -= lr g."""

    lr: float = 0.1
    rule = "plain_for_tests"

    @property
    def slots(self) -> tuple[Slot, ...]:
        return ()

    def _tail(self) -> list[float]:
        return []

    def _check(self) -> None:
        pass


class PlainRule(Rule):
    def apply(self, step: UpdateCount) -> tuple[Tensor, list[Tensor]]:
        return step.w_UW - self.lr * step.g_UW, []


def _spec(name: str, **changes: Any) -> Any:
    return dataclass(frozen=True)(type(name, (Plain,), changes))


@pytest.mark.parametrize(
    ("spec", "rule", "message"),
    [
        (SGD, PlainRule, "name is taken"),
        (_spec("Adam"), PlainRule, "name is taken"),
        (SGD(), PlainRule, "derives from OptimizerSpec"),
        (torch.optim.SGD, PlainRule, "derives from OptimizerSpec"),
        (Plain, Plain, "derives from tilerec.optim.Rule"),
        (_spec("Taken", rule="adam"), PlainRule, "'adam' exists already"),
        (_spec("Nameless", rule=3), PlainRule, "class attribute"),
        (_spec("Slotted", slots=(Slot("m", "row"),)), PlainRule, "states slots and sums"),
        (_spec("Phased", partials=(1,)), PlainRule, "states slots and sums"),
        (_spec("Longer", _tail=lambda self: [1.0]), PlainRule, "got 5 numbers; expected 4"),
    ],
)
def test_optimizers_that_are_refused(spec: Any, rule: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        register_optimizer(spec, rule)


def test_a_registered_optimizer_has_a_name_and_is_refused_a_second_time() -> None:
    spec = Twin(lr=0.5)
    assert OptimizerSpec.from_json(spec.to_json()) == spec
    assert isinstance(OptimizerSpec.from_json({"optimizer": "SGD"}), SGD)
    with pytest.raises(ConfigError, match="name is taken"):
        register_optimizer(Twin, TwinRule)
