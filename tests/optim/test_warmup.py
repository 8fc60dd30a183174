"""WarmupOptimizer: the learning rate of every step, stage by stage, and across a checkpoint."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from tilerec.errors import ConfigError
from tilerec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from tilerec.optim.wrapper import KeyedOptimizerWrapper

P = WarmupPolicy
HALF = math.cos(math.pi / 4)


def _keyed(**kwargs: Any) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(
        {"p": nn.Parameter(torch.ones(2))}, lambda p: torch.optim.SGD(p, **{"lr": 99.0, **kwargs})
    )


def _rates(stages: list[WarmupStage], steps: int, lr: float = 1.0) -> list[float]:
    opt = WarmupOptimizer(_keyed(), stages, lr=lr)
    rates = []
    for _ in range(steps):
        rates.append(opt.param_groups[0]["lr"])
        opt.step()
    return rates


# Worked by hand from the formulas at the top of optim/warmup.py; a stage holds through i = max_iters.
@pytest.mark.parametrize(
    ("stages", "wanted"),
    [
        ([], [1.0, 1.0]),
        ([WarmupStage(P.NONE, 2, 0.3, lr_scale=0.5)], [0.5, 0.5, 0.5, 1.0]),
        ([WarmupStage(P.CONSTANT, 2, 0.3)], [0.3, 0.3, 0.3, 1.0]),
        ([WarmupStage(P.LINEAR, 4, 0.2)], [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]),
        ([WarmupStage(P.LINEAR, 4, 0.2, lr_scale=3.0)], [0.6, 1.2, 1.8, 2.4, 3.0, 1.0]),
        (
            [WarmupStage(P.LINEAR, 4, 0.1), WarmupStage(P.LINEAR, 8, 0.6)],
            [0.1, 0.325, 0.55, 0.775, 1.0, 0.85, 0.9, 0.95, 1.0, 1.0],
        ),
        ([WarmupStage()], [1.0, 1.0]),
        ([WarmupStage(P.POLY, 5, 2.0, decay_iters=5)], [1.0, 0.64, 0.36, 0.16, 0.04, 0.0, 1.0]),
        ([WarmupStage(P.POLY, 5, 2.0)], [1.0, 0.64, 0.36, 0.16, 0.04, 0.0, 1.0]),
        ([WarmupStage(P.POLY, 2, 2.0, decay_iters=4)], [1.0, 0.5625, 0.25, 1.0]),
        ([WarmupStage(P.POLY, 2, 1.0, decay_iters=0)], [1.0, 0.5, 0.0, 1.0]),
        ([WarmupStage(P.STEP, 2, 0.5, decay_iters=0)], [1.0, 0.5, 0.25, 1.0]),
        ([WarmupStage(P.STEP, 5, 0.5, decay_iters=2)], [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 1.0]),
        ([WarmupStage(P.STEP, 3, 0.5)], [1.0, 0.5, 0.25, 0.125, 1.0]),
        (
            [WarmupStage(P.CONSTANT, 2, 0.5), WarmupStage(P.INVSQRT, 5)],
            [0.5, 0.5, 0.5, 1 / math.sqrt(3), 0.5, 1 / math.sqrt(5), 1.0],
        ),
        ([WarmupStage(P.INVSQRT, 2)], [1.0, 1.0, 1 / math.sqrt(2), 1.0]),
        (
            [WarmupStage(P.COSINE_ANNEALING_WARM_RESTARTS, 6, 0.1, sgdr_period=4)],
            [1.0, 0.55 + 0.45 * HALF, 0.55, 0.55 - 0.45 * HALF, 1.0, 0.55 + 0.45 * HALF, 0.55, 1.0],
        ),
        ([WarmupStage(P.COSINE_ANNEALING_WARM_RESTARTS, 2, 0.1)], [1.0, 1.0, 1.0, 1.0]),
        (
            [
                WarmupStage(P.CONSTANT, 2, 0.5),
                WarmupStage(P.INTERPOLATE, 6, 0.2, start_interpolating_iters=2, end_value=1.8),
            ],
            [0.5, 0.5, 0.5, 0.6, 1.0, 1.4, 1.8, 1.0],
        ),
        (
            [WarmupStage(P.INTERPOLATE, 4, 0.2, start_interpolating_iters=2, end_value=1.0)],
            [0.2, 0.2, 0.2, 0.6, 1.0, 1.0],  # before its start it holds its first value
        ),
    ],
)
def test_the_learning_rate_of_every_step(stages: list[WarmupStage], wanted: list[float]) -> None:
    assert _rates(stages, len(wanted)) == pytest.approx(wanted)
    assert _rates(stages, len(wanted), lr=0.1) == pytest.approx([0.1 * rate for rate in wanted])


def test_every_policy_has_a_rate_at_every_step() -> None:
    for policy in P:
        stage = WarmupStage(policy, 7, 0.5, sgdr_period=3, start_interpolating_iters=3, end_value=1.0)
        assert all(math.isfinite(rate) and rate >= 0 for rate in _rates([stage], 10)), policy


def test_the_first_step_already_has_the_first_rate() -> None:
    inner = _keyed()
    opt = WarmupOptimizer(inner, [WarmupStage(P.CONSTANT, 3, 0.5)], lr=0.5)
    inner.params["p"].grad = torch.ones(2)
    opt.step()
    assert inner.params["p"].tolist() == [0.75, 0.75]


def test_a_policy_may_be_given_by_its_value() -> None:
    assert WarmupStage("inv_sqrt", 3).policy is P.INVSQRT  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"policy": "cubic"}, "got policy='cubic'; expected one of"),
        ({"max_iters": 0}, "got max_iters=0; expected at least 1"),
        (
            {"policy": P.POLY, "max_iters": 5, "decay_iters": 4},
            "got decay_iters=4 for POLY; expected at least",
        ),
        ({"sgdr_period": 0}, "got sgdr_period=0"),
        (
            {"policy": P.INTERPOLATE, "end_value": 1.0},
            "got start_interpolating_iters=None",
        ),
        ({"policy": P.INTERPOLATE, "start_interpolating_iters": 0}, "and end_value=None for INTERPOLATE"),
        (
            {"policy": P.INTERPOLATE, "start_interpolating_iters": 5, "end_value": 1.0, "max_iters": 5},
            "got start_interpolating_iters=5; expected less than max_iters, 5",
        ),
    ],
)
def test_a_stage_that_makes_no_sense_is_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WarmupStage(**kwargs)


def test_stages_must_end_one_after_the_other() -> None:
    with pytest.raises(ConfigError, match="expected max_iters above 4, that of the stage before"):
        WarmupOptimizer(_keyed(), [WarmupStage(max_iters=4), WarmupStage(max_iters=4)])


def test_the_position_is_saved_and_the_rate_is_right_after_loading() -> None:
    stages = [WarmupStage(P.LINEAR, 4, 0.2), WarmupStage(P.STEP, 9, 0.5, decay_iters=3)]
    opt = WarmupOptimizer(_keyed(momentum=0.9), stages, lr=0.5)
    opt.init_state()
    assert opt.state_dict()["state"]["__warmup"]["warmup"].tolist() == [0, 0]  # init_state takes no step
    for _ in range(6):
        opt.step()
    saved = copy.deepcopy(opt.state_dict())
    assert saved["state"]["__warmup"]["warmup"].tolist() == [6, 1]
    assert saved["state"]["__warmup"]["warmup"].dtype == torch.int64

    twin = WarmupOptimizer(_keyed(momentum=0.9), stages, lr=0.5)
    twin.init_state()
    twin.load_state_dict(saved)
    rates = []
    for _ in range(5):
        rates.append((opt.param_groups[0]["lr"], twin.param_groups[0]["lr"]))
        opt.step()
        twin.step()
    assert rates == [(rate, rate) for rate, _ in rates]
    assert rates[0][0] == 0.125
    assert rates[-1][0] == 0.5


def test_a_checkpoint_without_the_position_is_refused() -> None:
    opt = WarmupOptimizer(_keyed(), [WarmupStage(P.LINEAR, 4, 0.2)], param_name="__w")
    opt.step()
    with pytest.raises(ConfigError, match="got None as state of '__w'"):
        opt.load_state_dict({"state": {}})
    with pytest.raises(ConfigError, match="as state of '__w'; expected"):
        opt.load_state_dict({"state": {"__w": {"warmup": torch.zeros(3)}}})
    assert opt.state_dict()["state"]["__w"]["warmup"].tolist() == [1, 0]


def test_two_warmups_need_two_names() -> None:
    inner = WarmupOptimizer(_keyed(), [])
    with pytest.raises(ConfigError, match=r"got the name '__warmup' twice in the state; .* another param_name"):
        WarmupOptimizer(inner, []).state_dict()
    both = WarmupOptimizer(inner, [WarmupStage(P.LINEAR, 2, 0.0)], param_name="__outer")
    both.step()
    both.load_state_dict(both.state_dict())
    assert set(both.state_dict()["state"]) == {"__warmup", "__outer"}


def test_another_setting_can_be_warmed_up_and_a_tensor_is_written_in_place() -> None:
    rate = torch.tensor(5.0)
    params = {"p": nn.Parameter(torch.ones(2))}
    inner = KeyedOptimizerWrapper(params, lambda p: torch.optim.Adam(p, lr=rate, weight_decay=1.0))
    WarmupOptimizer(inner, [WarmupStage(P.CONSTANT, 4, 0.5)], lr=0.5, lr_param="weight_decay")
    assert inner.param_groups[0]["weight_decay"] == 0.25
    assert float(rate) == 5.0
    WarmupOptimizer(inner, [WarmupStage(P.CONSTANT, 4, 0.5)], lr=0.5)
    assert inner.param_groups[0]["lr"] is rate
    assert float(rate) == 0.25


def test_all_groups_get_the_rate_also_those_added_later() -> None:
    opt = WarmupOptimizer(_keyed(), [WarmupStage(P.LINEAR, 4, 0.2)], lr=1.0)
    opt.step()
    opt.add_param_group({"params": {"q": nn.Parameter(torch.ones(1))}, "lr": 7.0})
    assert [g["lr"] for g in opt.param_groups] == pytest.approx([0.4, 0.4])
    opt.set_optimizer_step(3)
    assert [g["lr"] for g in opt.param_groups] == pytest.approx([0.8, 0.8])
