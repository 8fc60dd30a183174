"""Optimizer specs of tables: frozen records of hyper-parameters, no tensors, JSON round trip.

Glossary
    rule    the name of a *row rule*: the formula that updates one table row `w` from its summed gradient `g`
            (`ops/update/definition.py`).
    slot    one named tensor of optimizer state. `per="row"`: one number per table row, shape [rows];
            `per="element"`: one per weight, shape [rows, dim]. float32 (float64 for float64 tables).
    hyper   the hyper-parameters as a flat list of floats: [lr, grad_scale, weight_decay, stochastic_rounding],
            followed by the rule's own in the order that `_tail` of each class states.
    phase   one sum over a whole row that the rule needs before it can update the row (row-wise Adagrad: the sum
            of g^2). On a column-split table each phase is one small reduction over the column owners.
    t       number of updates of the table, this one included; with `row_step=True`, number of updates of the row.

Only rows that the batch looked up are updated. Weights, moments and momentum of all other rows stay unchanged, and
these rows do not decay.

Defaults are those of `torch.optim` where torch has the optimizer. Otherwise `lr`, `eps`, `betas`, `momentum` and
`trust_coefficient` are the defaults of FBGEMM's fused embeddings, which are also the defaults for TorchRec users. The
one exception is `RowWiseAdagrad.eps`: it has the default of TorchRec's `RowWiseAdagrad`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, ClassVar, Literal, TypeVar, final

from tilerec.errors import ConfigError
from tilerec.json_document import JsonValue, shown

NonFinite = Literal["error", "skip"]
_Spec = TypeVar("_Spec", bound="OptimizerSpec")
WeightDecayMode = Literal["none", "l2", "decoupled"]

_DECAY_MODES: tuple[str, ...] = ("none", "l2", "decoupled")


@final
@dataclass(frozen=True)
class Slot:
    """One named tensor of optimizer state, and its initial value."""

    name: str
    per: Literal["row", "element"]
    init: float = 0.0

    def shape(self, rows: int, dim: int) -> tuple[int, ...]:
        """Return the slot's shape for a table of `rows` x `dim`: `(rows,)` or `(rows, dim)`."""
        return (rows,) if self.per == "row" else (rows, dim)


@dataclass(frozen=True)
class OptimizerSpec(ABC):
    """Optimizer of a table. Use one of the final classes below.

    Fields of every optimizer:
        lr: learning rate, >= 0. A scheduler's value replaces it per step: `hyper(lr=...)`.
        weight_decay: strength of the decay, >= 0; the formula of each class shows how it is applied.
        stochastic_rounding: round fp16/bf16 tables up or down at random, so small steps are not lost on average. No
            effect on fp32 tables.
        grad_scale: the loss scale, > 0; summed gradients are divided by it before the rule.
        non_finite: for a row whose summed gradient is not finite: "error" raises, "skip" leaves its weights and state
            unchanged.
        capturable: updates read learning rate and update count from tensors on the table's device, so each replay of a
            captured CUDA graph advances them. Results do not change.
    """

    lr: float
    _: KW_ONLY
    weight_decay: float = 0.0
    stochastic_rounding: bool = True
    grad_scale: float = 1.0
    non_finite: NonFinite = "error"
    capturable: bool = False

    def __new__(cls: type[_Spec], *args: object, **settings: object) -> _Spec:
        if args and isinstance(args[0], Iterable):
            raise ConfigError(
                f"{cls.__name__}: got parameters; expected settings, such as {cls.__name__}(lr=0.1). It describes an "
                f"optimizer: apply_optimizer_in_backward({cls.__name__}, params, {{'lr': 0.1}}) attaches it to tables. "
                "Optimizers of torch.optim take parameters."
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._number("lr", low=0.0)
        self._number("weight_decay", low=0.0)
        self._number("grad_scale", low=0.0, open_low=True)
        self._flag("stochastic_rounding")
        self._choice("non_finite", ("error", "skip"))
        self._flag("capturable")
        self._check()

    @property
    @abstractmethod
    def rule(self) -> str:
        """Name of the row rule, an argument of `torch.ops.tilerec.update_rows_`."""

    @property
    @abstractmethod
    def slots(self) -> tuple[Slot, ...]:
        """Slots of the optimizer state, in the order of the update op's arguments."""

    @property
    def partials(self) -> tuple[int, ...]:
        """Number of scalars per row that each phase reduces; empty for element-wise rules."""
        return ()

    @property
    def phases(self) -> int:
        """Number of row reductions that the rule needs: `len(partials)`."""
        return len(self.partials)

    @abstractmethod
    def _tail(self) -> list[float]:
        """Return the rule's own hyper-parameters, which follow the four shared ones."""

    @abstractmethod
    def _check(self) -> None:
        """Raise `ConfigError` for an invalid field of this class."""

    def hyper(self, lr: float | None = None) -> list[float]:
        """Return the hyper-parameters: [lr, grad_scale, weight_decay, stochastic_rounding, ...the rule's own].

        `lr`: the learning rate of this step, from a scheduler; None: the field `lr`.
        """
        rate = self.lr if lr is None else float(lr)
        return [rate, self.grad_scale, self.weight_decay, float(self.stochastic_rounding), *self._tail()]

    def to_json(self) -> dict[str, Any]:
        """Return a dict of JSON values with all fields: `{"optimizer": "SGD", "lr": 0.1, ...}`."""
        out: dict[str, Any] = {"optimizer": type(self).__name__}
        for field in fields(self):
            value = getattr(self, field.name)
            out[field.name] = list(value) if isinstance(value, tuple) else value
        return out

    @staticmethod
    def from_json(data: Mapping[str, Any] | JsonValue) -> OptimizerSpec:
        """Build from a dict that `to_json` returned. Missing fields get defaults; unknown ones raise `ConfigError`."""
        value = JsonValue.of(data, "Optimizer JSON")
        found = value.members('an object such as {"optimizer": "SGD"}')
        kwargs = {key: each.value for key, each in found.items() if key != "optimizer"}
        name = found["optimizer"].value if "optimizer" in found else None
        if not isinstance(name, str) or name not in SPECS:
            raise ConfigError(
                f"{value.where}: got optimizer={shown(name)}; expected one of {sorted(SPECS)}. Use one of these."
            )
        cls = SPECS[name]
        raise_for_unknown_settings(name, cls, kwargs, f"{value.where} of {name}")
        try:
            return cls(**kwargs)
        except (ConfigError, TypeError) as error:
            raise value.refused(error) from error

    # Checks shared by the classes. Numbers are stored as float, so a spec with ints equals the same spec with floats.

    def _number(
        self,
        name: str,
        *,
        low: float,
        high: float = math.inf,
        open_low: bool = False,
        open_high: bool = False,
    ) -> None:
        value = _as_float(getattr(self, name))
        inside = (
            value is not None
            and math.isfinite(value)
            and (value > low if open_low else value >= low)
            and (value < high if open_high else value <= high)
        )
        if not inside:
            span = f"a finite number {'>' if open_low else '>='} {low:g}"
            if high != math.inf:
                span += f" and {'<' if open_high else '<='} {high:g}"
            raise ConfigError(
                f"{type(self).__name__}: got {name}={getattr(self, name)!r}; expected {span}. Pass {name}=..."
            )
        object.__setattr__(self, name, value)

    def _flag(self, name: str) -> None:
        if not isinstance(getattr(self, name), bool):
            raise ConfigError(
                f"{type(self).__name__}: got {name}={getattr(self, name)!r}; expected True or False. Pass {name}=..."
            )

    def _choice(self, name: str, allowed: tuple[str, ...]) -> None:
        if getattr(self, name) not in allowed:
            raise ConfigError(
                f"{type(self).__name__}: got {name}={getattr(self, name)!r}; "
                f"expected one of {', '.join(allowed)}. "
                f"Pass {name}={allowed[0]!r} or another of them."
            )

    def _betas(self, name: str = "betas") -> None:
        value = getattr(self, name)
        pair = tuple(_as_float(beta) for beta in value) if isinstance(value, (tuple, list)) and len(value) == 2 else ()
        if not pair or any(beta is None or not 0.0 <= beta < 1.0 for beta in pair):
            raise ConfigError(
                f"{type(self).__name__}: got {name}={value!r}; expected two numbers in [0, 1). "
                f"Pass e.g. {name}=(0.9, 0.999)."
            )
        object.__setattr__(self, name, pair)


@final
@dataclass(frozen=True)
class SGD(OptimizerSpec):
    """Stochastic gradient descent with optional (Nesterov) momentum: `torch.optim.SGD` on the looked-up rows.

    `g += weight_decay*w; m = momentum*m + g; d = g + momentum*m if nesterov else m; w -= lr*d`.
    """

    lr: float = 1e-3
    _: KW_ONLY
    momentum: float = 0.0
    nesterov: bool = False

    rule = "sgd"

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("momentum_buffer", "element"),) if self.momentum > 0 else ()

    def _tail(self) -> list[float]:
        """[momentum, nesterov]"""
        return [self.momentum, float(self.nesterov)]

    def _check(self) -> None:
        self._number("momentum", low=0.0)
        self._flag("nesterov")
        if self.nesterov and self.momentum == 0:
            raise ConfigError(
                "SGD: got nesterov=True with momentum=0; expected a momentum > 0. Pass one, or nesterov=False."
            )


@final
@dataclass(frozen=True)
class Adagrad(OptimizerSpec):
    """Adagrad (Duchi et al., 2011): `torch.optim.Adagrad` on the looked-up rows.

    `g += weight_decay*w; sum += g^2; w -= lr/(1 + (t-1)*lr_decay) * g/(sqrt(sum) + eps)`.
    """

    lr: float = 1e-2
    _: KW_ONLY
    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    rule = "adagrad"

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("sum", "element", self.initial_accumulator_value),)

    def _tail(self) -> list[float]:
        """[eps, lr_decay]"""
        return [self.eps, self.lr_decay]

    def _check(self) -> None:
        for name in ("lr_decay", "initial_accumulator_value", "eps"):
            self._number(name, low=0.0)


@final
@dataclass(frozen=True)
class RowWiseAdagrad(OptimizerSpec):
    """Adagrad with one accumulator per row: the usual optimizer of large tables, 4 bytes of state per row.

    `sum += mean(g'^2); k = lr/(sqrt(sum) + eps); w = c*w - k*g`, where weight_decay_mode
    - "l2" (the decay of torch) means `g' = g + weight_decay*w` and `c = 1 - k*weight_decay`,
    - "decoupled" means `g' = g` and `c = 1 - lr*weight_decay`.
    If max_norm > 0, a row with a larger norm is then scaled down to max_norm.

    `weight_decay_mode="none"` with a weight_decay above 0 raises `ConfigError` (FBGEMM ignores the decay there).
    """

    lr: float = 1e-2
    _: KW_ONLY
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    weight_decay_mode: WeightDecayMode = "l2"
    max_norm: float = 0.0

    rule = "rowwise_adagrad"

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("sum", "row", self.initial_accumulator_value),)

    @property
    def partials(self) -> tuple[int, ...]:
        return (1, 1) if self.max_norm > 0 else (1,)

    def _tail(self) -> list[float]:
        """[eps, decay mode (0 none, 1 l2, 2 decoupled), max_norm (0 is off)]"""
        mode = _DECAY_MODES.index(self.weight_decay_mode) if self.weight_decay > 0 else 0
        return [self.eps, float(mode), self.max_norm]

    def _check(self) -> None:
        for name in ("initial_accumulator_value", "eps", "max_norm"):
            self._number(name, low=0.0)
        self._choice("weight_decay_mode", _DECAY_MODES)
        if self.weight_decay > 0 and self.weight_decay_mode == "none":
            raise ConfigError(
                f"RowWiseAdagrad: got weight_decay={self.weight_decay:g} with weight_decay_mode='none'; expected a "
                "mode that applies the decay. Pass weight_decay_mode='l2' or 'decoupled', or weight_decay=0."
            )


@dataclass(frozen=True)
class _AdamSpec(OptimizerSpec):
    """Fields that Adam and its relatives share.

    row_step: count t per row (in state slot `step`) instead of per table.
    """

    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    row_step: bool = False

    _second_moment: ClassVar[Literal["row", "element"]] = "element"
    _decoupled: ClassVar[tuple[float, ...]] = ()

    @property
    def slots(self) -> tuple[Slot, ...]:
        slots = (Slot("exp_avg", "element"), Slot("exp_avg_sq", self._second_moment))
        return (*slots, Slot("step", "row")) if self.row_step else slots

    def _tail(self) -> list[float]:
        """[eps, beta1, beta2, row_step]; for Adam and AdamW [eps, beta1, beta2, decoupled, row_step]"""
        return [self.eps, *self.betas, *self._decoupled, float(self.row_step)]

    def _check(self) -> None:
        self._betas()
        self._number("eps", low=0.0)
        self._flag("row_step")


@final
@dataclass(frozen=True)
class Adam(_AdamSpec):
    """Adam (Kingma & Ba, 2015) with L2 decay: `torch.optim.Adam` on the looked-up rows.

    `g += weight_decay*w; m = b1*m + (1-b1)*g; v = b2*v + (1-b2)*g^2;
    w -= lr/(1-b1^t) * m/(sqrt(v)/sqrt(1-b2^t) + eps)`.

    row_step: count t per row (in state slot `step`) instead of per table.
    """

    lr: float = 1e-3

    rule = "adam"
    _decoupled = (0.0,)


@final
@dataclass(frozen=True)
class AdamW(_AdamSpec):
    """Adam with decoupled decay (Loshchilov & Hutter, 2019): `torch.optim.AdamW` on the looked-up rows.

    As `Adam`, but the decay does not enter the gradient: `w *= 1 - lr*weight_decay` before the step. FBGEMM's fused
    "Adam" with a weight_decay is this optimizer.
    """

    lr: float = 1e-3
    _: KW_ONLY
    weight_decay: float = 1e-2

    rule = "adam"
    _decoupled = (1.0,)


@final
@dataclass(frozen=True)
class PartialRowWiseAdam(_AdamSpec):
    """Adam whose second moment is one number per row: `v = b2*v + (1-b2)*mean(g^2)`.

    `u = m/(1-b1^t) / (sqrt(v/(1-b2^t)) + eps) + weight_decay*w; w -= lr*u` (the decay is decoupled).
    State per row of dim D: 4*(D + 1) bytes instead of Adam's 8*D.
    """

    lr: float = 1e-2

    rule = "partial_rowwise_adam"
    partials = (1,)
    _second_moment = "row"


@final
@dataclass(frozen=True)
class LAMB(_AdamSpec):
    """LAMB (You et al., 2020), one trust ratio per row.

    `u = m/(1-b1^t) / (sqrt(v/(1-b2^t)) + eps) + weight_decay*w; w -= lr * ||w||/||u|| * u`; the ratio is 1 if
    either norm is 0 (FBGEMM has no guard there).
    """

    lr: float = 1e-2

    rule = "lamb"
    partials = (2,)


@final
@dataclass(frozen=True)
class PartialRowWiseLAMB(_AdamSpec):
    """`LAMB` whose second moment is one number per row: `v = b2*v + (1-b2)*mean(g^2)`."""

    lr: float = 1e-2

    rule = "partial_rowwise_lamb"
    partials = (1, 2)
    _second_moment = "row"


@final
@dataclass(frozen=True)
class LarsSGD(OptimizerSpec):
    """LARS (You et al., 2017), one layer-wise rate per row.

    `a = lr*trust_coefficient*||w||/(||g|| + weight_decay*||w||)`, or `lr` if ||w|| or ||g|| is 0;
    `m = momentum*m + a*(g + weight_decay*w); w -= m`. `trust_coefficient` is FBGEMM's `eta`.
    """

    lr: float = 1e-2
    _: KW_ONLY
    momentum: float = 0.9
    trust_coefficient: float = 1e-3

    rule = "lars_sgd"
    partials = (2,)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("momentum_buffer", "element"),)

    def _tail(self) -> list[float]:
        """[momentum, trust_coefficient]"""
        return [self.momentum, self.trust_coefficient]

    def _check(self) -> None:
        self._number("momentum", low=0.0)
        self._number("trust_coefficient", low=0.0)


def _as_float(value: Any) -> float | None:
    """Convert a number or a one-element tensor (torch accepts them as lr and betas) to float; else return None."""
    if isinstance(value, (bool, str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def raise_for_unknown_settings(name: str, cls: type[OptimizerSpec], kwargs: Mapping[str, Any], where: str) -> None:
    """Raise `ConfigError` for a setting that `cls` does not have."""
    known = {field.name for field in fields(cls)}
    for key in kwargs:
        if key not in known:
            raise ConfigError(
                f"{where}: got {key}={kwargs[key]!r}, but {name} has no setting {key!r}; "
                f"expected some of {', '.join(sorted(known))}. Leave it out."
            )


SPECS: dict[str, type[OptimizerSpec]] = {
    cls.__name__: cls
    for cls in (
        SGD,
        Adagrad,
        RowWiseAdagrad,
        Adam,
        AdamW,
        PartialRowWiseAdam,
        LAMB,
        PartialRowWiseLAMB,
        LarsSGD,
    )
}
"""Name -> spec class."""
