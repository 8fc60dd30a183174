"""Optimizer specs: slots, hyper vectors, JSON, validation, and what torch's and TorchRec's names map to."""

from __future__ import annotations

import enum
import json
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from tilerec.errors import ConfigError
from tilerec.spec.optimizer import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    LarsSGD,
    OptimizerSpec,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
    Slot,
)
from tilerec.spec.torch_optimizer import from_torch

ALL: list[type[OptimizerSpec]] = [
    SGD,
    Adagrad,
    RowWiseAdagrad,
    Adam,
    AdamW,
    PartialRowWiseAdam,
    LAMB,
    PartialRowWiseLAMB,
    LarsSGD,
]

HYPERS: list[tuple[OptimizerSpec, str, list[float], list[str], int]] = [
    (SGD(0.5), "sgd", [0.5, 1, 0, 1, 0, 0], [], 0),
    (
        SGD(0.5, momentum=0.9, nesterov=True, weight_decay=0.1, grad_scale=8, stochastic_rounding=False),
        "sgd",
        [0.5, 8, 0.1, 0, 0.9, 1],
        ["momentum_buffer:element"],
        0,
    ),
    (Adagrad(0.5, lr_decay=0.25, eps=1e-3), "adagrad", [0.5, 1, 0, 1, 1e-3, 0.25], ["sum:element"], 0),
    (RowWiseAdagrad(0.5, eps=1e-3), "rowwise_adagrad", [0.5, 1, 0, 1, 1e-3, 0, 0], ["sum:row"], 1),
    (
        RowWiseAdagrad(0.5, eps=0, weight_decay=0.1),
        "rowwise_adagrad",
        [0.5, 1, 0.1, 1, 0, 1, 0],
        ["sum:row"],
        1,
    ),
    (
        RowWiseAdagrad(0.5, eps=0, weight_decay=0.1, weight_decay_mode="decoupled", max_norm=2),
        "rowwise_adagrad",
        [0.5, 1, 0.1, 1, 0, 2, 2],
        ["sum:row"],
        2,
    ),
    (Adam(0.5), "adam", [0.5, 1, 0, 1, 1e-8, 0.9, 0.999, 0, 0], ["exp_avg:element", "exp_avg_sq:element"], 0),
    (
        AdamW(0.5, row_step=True),
        "adam",
        [0.5, 1, 0.01, 1, 1e-8, 0.9, 0.999, 1, 1],
        ["exp_avg:element", "exp_avg_sq:element", "step:row"],
        0,
    ),
    (
        PartialRowWiseAdam(0.5),
        "partial_rowwise_adam",
        [0.5, 1, 0, 1, 1e-8, 0.9, 0.999, 0],
        ["exp_avg:element", "exp_avg_sq:row"],
        1,
    ),
    (
        LAMB(0.5, betas=(0.5, 0.75)),
        "lamb",
        [0.5, 1, 0, 1, 1e-8, 0.5, 0.75, 0],
        ["exp_avg:element", "exp_avg_sq:element"],
        1,
    ),
    (
        PartialRowWiseLAMB(0.5, row_step=True),
        "partial_rowwise_lamb",
        [0.5, 1, 0, 1, 1e-8, 0.9, 0.999, 1],
        ["exp_avg:element", "exp_avg_sq:row", "step:row"],
        2,
    ),
    (LarsSGD(0.5), "lars_sgd", [0.5, 1, 0, 1, 0.9, 0.001], ["momentum_buffer:element"], 1),
]


@pytest.mark.parametrize(("spec", "rule", "hyper", "slots", "phases"), HYPERS)
def test_rule_hyper_slots_and_phases_are_those_of_the_update_op(
    spec: OptimizerSpec, rule: str, hyper: list[float], slots: list[str], phases: int
) -> None:
    assert spec.rule == rule
    assert spec.hyper() == hyper
    assert all(type(value) is float for value in spec.hyper())
    assert [f"{slot.name}:{slot.per}" for slot in spec.slots] == slots
    assert spec.phases == phases == len(spec.partials)


@pytest.mark.parametrize("cls", ALL)
def test_hyper_takes_the_learning_rate_of_the_step(cls: Any) -> None:
    spec = cls(0.5)
    assert spec.hyper(0.125) == [0.125, *spec.hyper()[1:]]
    assert spec.hyper(0)[0] == 0.0
    assert spec.lr == 0.5


def test_slot_shapes_and_initial_values() -> None:
    assert Slot("sum", "row").shape(7, 3) == (7,)
    assert Slot("exp_avg", "element").shape(7, 3) == (7, 3)
    assert [slot.init for slot in RowWiseAdagrad(initial_accumulator_value=0.5).slots] == [0.5]
    assert [slot.init for slot in Adagrad(initial_accumulator_value=0.25).slots] == [0.25]
    assert {slot.init for spec, *_ in HYPERS for slot in spec.slots} == {0.0}


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW])
def test_defaults_are_those_of_torch(cls: Any) -> None:
    theirs = cls([torch.zeros(1, requires_grad=True)]).defaults
    ours = from_torch(cls).to_json()
    shared = set(ours) & set(theirs)
    assert {"lr", "weight_decay"} <= shared
    for name in shared:
        want = theirs[name]
        assert ours[name] == (list(want) if isinstance(want, tuple) else want), name
    assert from_torch(cls, theirs) == from_torch(cls)  # a param group's own settings can be handed over whole


@pytest.mark.parametrize("spec", [entry[0] for entry in HYPERS] + [from_torch(cls) for cls in ALL])
def test_json_round_trip_is_exact(spec: OptimizerSpec) -> None:
    text = json.dumps(spec.to_json(), allow_nan=False)
    back = OptimizerSpec.from_json(json.loads(text))
    assert back == spec
    assert type(back) is type(spec)
    assert hash(back) == hash(spec)


def test_json_fields_left_out_take_defaults_and_unknown_ones_are_refused() -> None:
    assert OptimizerSpec.from_json({"optimizer": "Adam"}) == Adam()
    with pytest.raises(ConfigError, match=r"optimizer=\"Rprop\".*'Adagrad'"):
        OptimizerSpec.from_json({"optimizer": "Rprop"})
    with pytest.raises(ConfigError, match="optimizer=null"):
        OptimizerSpec.from_json({})
    with pytest.raises(ConfigError, match=r"SGD has no setting 'betas'.*momentum"):
        OptimizerSpec.from_json({"optimizer": "SGD", "betas": [0.9, 0.999]})


def test_specs_are_frozen_and_ints_equal_floats() -> None:
    spec = SGD(1, momentum=0)
    assert spec == SGD(1.0)
    assert type(spec.lr) is float
    with pytest.raises(FrozenInstanceError):
        spec.lr = 2.0  # type: ignore[misc]


def test_the_abstract_spec_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        OptimizerSpec(0.1)  # type: ignore[abstract]


@pytest.mark.parametrize(
    ("cls", "kwargs", "message"),
    [
        (SGD, {"lr": -1.0}, r"SGD: got lr=-1\.0; expected a finite number >= 0"),
        (SGD, {"lr": float("nan")}, "SGD: got lr=nan"),
        (SGD, {"lr": float("inf")}, "SGD: got lr=inf"),
        (SGD, {"lr": "0.1"}, "SGD: got lr='0.1'"),
        (SGD, {"lr": True}, "SGD: got lr=True"),
        (SGD, {"weight_decay": -0.1}, "SGD: got weight_decay=-0.1"),
        (SGD, {"momentum": -0.1}, "SGD: got momentum=-0.1"),
        (SGD, {"nesterov": True}, "nesterov=True with momentum=0"),
        (SGD, {"nesterov": 1, "momentum": 0.9}, "got nesterov=1; expected True or False"),
        (SGD, {"grad_scale": 0}, "got grad_scale=0; expected a finite number > 0"),
        (SGD, {"stochastic_rounding": 1}, "got stochastic_rounding=1"),
        (SGD, {"non_finite": "ignore"}, "got non_finite='ignore'; expected one of error, skip"),
        (Adagrad, {"eps": -1}, "Adagrad: got eps=-1"),
        (Adagrad, {"lr_decay": -1}, "Adagrad: got lr_decay=-1"),
        (Adagrad, {"initial_accumulator_value": -1}, "got initial_accumulator_value=-1"),
        (RowWiseAdagrad, {"max_norm": -1}, "got max_norm=-1"),
        (RowWiseAdagrad, {"weight_decay_mode": "L3"}, "got weight_decay_mode='L3'"),
        (
            RowWiseAdagrad,
            {"weight_decay": 0.1, "weight_decay_mode": "none"},
            "expected a mode that applies the decay",
        ),
        (Adam, {"betas": (0.9, 1.0)}, r"Adam: got betas=\(0.9, 1.0\); expected two numbers in \[0, 1\)"),
        (Adam, {"betas": 0.9}, "got betas=0.9"),
        (Adam, {"betas": (0.9,)}, r"got betas=\(0.9,\)"),
        (AdamW, {"row_step": None}, "got row_step=None"),
        (PartialRowWiseAdam, {"eps": -1}, "got eps=-1"),
        (LAMB, {"betas": (-0.1, 0.9)}, "got betas="),
        (PartialRowWiseLAMB, {"row_step": 1}, "got row_step=1"),
        (LarsSGD, {"trust_coefficient": -1}, "got trust_coefficient=-1"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(
    cls: type[OptimizerSpec], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        cls(**kwargs)


def test_from_torch_maps_the_four_torch_optimizers() -> None:
    assert from_torch(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}) == SGD(
        0.1, momentum=0.9, nesterov=True
    )
    assert from_torch(torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.5}) == Adagrad(0.1, lr_decay=0.5)
    assert from_torch(torch.optim.Adam, {"betas": [0.5, 0.75]}) == Adam(betas=(0.5, 0.75))
    assert from_torch(torch.optim.AdamW) == AdamW(weight_decay=0.01)
    assert from_torch(torch.optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}) == AdamW(
        weight_decay=0.1
    )
    assert from_torch(torch.optim.Adam, {"decoupled_weight_decay": True}) == AdamW(weight_decay=0.0)
    assert from_torch(torch.optim.Adam, {"decoupled_weight_decay": False}) == Adam()


def test_from_torch_takes_one_element_tensors_for_numbers() -> None:
    spec = from_torch(torch.optim.Adam, {"lr": torch.tensor(0.5), "betas": (torch.tensor(0.25), 0.5)})
    assert spec == Adam(0.5, betas=(0.25, 0.5))
    with pytest.raises(ConfigError, match="got lr=tensor"):
        from_torch(torch.optim.Adam, {"lr": torch.ones(2)})


def test_from_torch_takes_our_settings_along_with_torchs() -> None:
    spec = from_torch(torch.optim.Adam, {"lr": 0.1, "row_step": True, "grad_scale": 2, "non_finite": "skip"})
    assert spec == Adam(0.1, row_step=True, grad_scale=2, non_finite="skip")


def test_from_torch_drops_how_torch_runs_and_refuses_what_changes_numbers() -> None:
    kwargs: dict[str, Any] = {
        "lr": 0.1,
        "foreach": True,
        "fused": None,
        "capturable": True,
        "maximize": False,
    }
    assert from_torch(torch.optim.Adam, kwargs) == Adam(0.1, capturable=True)
    assert from_torch(torch.optim.SGD, {"lr": 0.1, "dampening": 0.0}) == SGD(0.1)
    for key, value in [("amsgrad", True), ("maximize", True), ("differentiable", True), ("dampening", 0.5)]:
        with pytest.raises(ConfigError, match=rf"torch\.optim.*got {key}={value}; expected .* \("):
            from_torch(torch.optim.Adam, {key: value})
    with pytest.raises(ConfigError, match=r"has no setting 'momentum'"):
        from_torch(torch.optim.Adam, {"momentum": 0.9})


def test_from_torch_does_not_change_the_callers_settings() -> None:
    kwargs = {"learning_rate": 0.5, "beta1": 0.25, "amsgrad": False}
    assert from_torch(torch.optim.Adam, kwargs) == Adam(0.5, betas=(0.25, 0.999))
    assert kwargs == {"learning_rate": 0.5, "beta1": 0.25, "amsgrad": False}


def test_from_torch_takes_specs_and_replaces_their_fields() -> None:
    assert from_torch(RowWiseAdagrad, {"lr": 0.5}) == RowWiseAdagrad(0.5)
    spec = LAMB(0.5, betas=(0.5, 0.75), weight_decay=0.1)
    assert from_torch(spec) == spec
    assert from_torch(spec, {"lr": 0.25, "beta2": 0.875}) == LAMB(0.25, betas=(0.5, 0.875), weight_decay=0.1)


def test_from_torch_takes_names_and_aliases_of_fused_configurations() -> None:
    class EmbOptimType(enum.Enum):
        EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
        LARS_SGD = "lars_sgd"
        ADAM = "adam"
        SHAMPOO = "shampoo"

    class WeightDecayMode(enum.IntEnum):
        NONE = 0
        L2 = 1
        DECOUPLE = 2

    assert from_torch("RowWiseAdagrad", {"lr": 0.5}) == RowWiseAdagrad(0.5)
    got = from_torch(
        EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        {"weight_decay": 0.5, "weight_decay_mode": WeightDecayMode.DECOUPLE},
    )
    assert got == RowWiseAdagrad(weight_decay=0.5, weight_decay_mode="decoupled")
    assert from_torch(RowWiseAdagrad, {"weight_decay_mode": WeightDecayMode.L2}) == RowWiseAdagrad()
    assert from_torch(EmbOptimType.LARS_SGD, {"eta": 0.5, "learning_rate": 0.25}) == LarsSGD(
        0.25, trust_coefficient=0.5
    )
    assert from_torch(EmbOptimType.ADAM, {"weight_decay": 0.5}) == AdamW(weight_decay=0.5)
    assert from_torch("EXACT_SGD") == SGD()
    with pytest.raises(ConfigError, match=r"SHAMPOO.*no row rule"):
        from_torch(EmbOptimType.SHAMPOO)


def test_from_torch_takes_torchrecs_classes_by_name() -> None:
    theirs = {
        name: type(name, (torch.optim.Optimizer,), {"__module__": "torchrec.optim.optimizers"})
        for name in ("Adam", "PartialRowWiseLAMB", "Shampoo")
    }
    assert from_torch(theirs["PartialRowWiseLAMB"], {"beta1": 0.5}) == PartialRowWiseLAMB(betas=(0.5, 0.999))
    assert from_torch(theirs["Adam"]) == Adam()
    assert from_torch(theirs["Adam"], {"weight_decay": 0.1}) == AdamW(weight_decay=0.1)
    with pytest.raises(ConfigError, match=r"torchrec\.optim\.optimizers\.Shampoo"):
        from_torch(theirs["Shampoo"])


def test_from_torch_reads_an_optimizers_own_declaration_but_not_a_subclasss_inherited_one() -> None:
    class Declared(torch.optim.Optimizer):
        optimizer_spec = RowWiseAdagrad

    class Changed(Declared):
        pass

    class Tweaked(torch.optim.Adam):
        pass

    assert from_torch(Declared, {"lr": 0.5, "lr_decay": 0.0}) == RowWiseAdagrad(0.5)
    with pytest.raises(ConfigError, match="lr_decay"):
        from_torch(Declared, {"lr_decay": 0.5})
    for cls in (Changed, Tweaked, torch.optim.RMSprop, torch.optim.Optimizer, int):
        with pytest.raises(ConfigError, match="has no row rule"):
            from_torch(cls, {"lr": 0.5})


@pytest.mark.parametrize("cls", [None, 3, "Rprop", ["SGD"]])
def test_from_torch_refuses_what_is_no_optimizer(cls: Any) -> None:
    with pytest.raises(ConfigError, match=r"has no row rule; expected one of torch\.optim\.SGD"):
        from_torch(cls)


def test_from_torch_refuses_one_setting_given_twice() -> None:
    with pytest.raises(ConfigError, match="both learning_rate and lr"):
        from_torch(SGD, {"lr": 0.1, "learning_rate": 0.1})
    with pytest.raises(ConfigError, match="both beta1/beta2 and betas"):
        from_torch(Adam, {"betas": (0.9, 0.999), "beta1": 0.9})


@pytest.mark.parametrize("given", [[torch.nn.Parameter(torch.zeros(1))], iter(())], ids=["list", "iterator"])
def test_a_description_refuses_parameters_and_names_what_takes_them(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"Adam: got parameters; expected settings, such as Adam\(lr=0.1\)"):
        Adam(given, lr=0.1)
