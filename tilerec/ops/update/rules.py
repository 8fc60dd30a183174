"""Row rules: update of one row of a table by its summed gradient. The plain-PyTorch reference.

Terms
  rule     an optimizer's arithmetic for a row, in phases
  slot     state of a rule, one value per row (`[rows]`) or per element (`[rows, dim]`)
  scalar   a sum over a whole row that the rule needs (for example the mean of g^2). A column part of a row has only a
           share of it. So a rule first returns `terms`, which are summed over the row, phase by phase; then `apply`
           uses the sums

  G = summed gradient of the row       g = G / grad_scale      w = the row in fp32      t = the table's update count

Row sums are computed per aligned block of 8 global columns, `((x0+x1)+(x2+x3))+((x4+x5)+(x6+x7))`, and blocks are added
in ascending order. So the sums can have the same bits for any split of a row into columns.

Legend: U distinct rows of the step, W columns of the part, P scalars of the phases so far.

Sources: Adagrad, Duchi et al. 2011; Adam, arXiv 1412.6980; AdamW, arXiv 1711.05101; LambRule, arXiv 1904.00962;
LARS, arXiv 1708.03888; row-wise Adagrad keeps the mean of g^2 over a row instead of one accumulator per element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.ops.runtime.square_root import square_root

BLOCK = 8


class UpdateCount(NamedTuple):
    """Inputs of a rule in one step: gathered rows, in fp32 (fp64 for fp64 tables)."""

    g_UW: Tensor
    w_UW: Tensor
    slots: list[Tensor]  # per slot [U, W] or [U]
    scalars_PU: Tensor  # row sums of the phases so far
    dim: int  # columns of the whole row
    t: int  # the table's update count, this update included


class Rule:
    """One optimizer's arithmetic. `hyper` always begins with lr, grad_scale, weight_decay, stochastic_rounding."""

    phases: int = 0
    slot_kinds: tuple[str, ...] = ()
    keeps: ClassVar[bool] = True  # rows whose gradient is not finite stay unchanged
    names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, hyper: Sequence[float]) -> None:
        wanted = ("lr", "grad_scale", "weight_decay", "stochastic_rounding", *self.names)
        if len(hyper) != len(wanted):
            raise ConfigError(
                f"row rule {type(self).__name__}: got {len(hyper)} numbers; expected {len(wanted)}: "
                f"{', '.join(wanted)}."
            )
        self.h = dict(zip(wanted, hyper, strict=True))
        self.lr, self.wd = self.h["lr"], self.h["weight_decay"]

    def sums(self, phase: int) -> int:
        """Return the number of row sums of the phase, equal to its number of `terms`."""
        return 1

    def terms(self, phase: int, step: UpdateCount) -> list[Tensor]:
        """Return the elementwise terms `[U, W]` whose row sums this phase needs."""
        raise AssertionError(f"{type(self).__name__} has no phase {phase}")

    def apply(self, step: UpdateCount) -> tuple[Tensor, list[Tensor]]:
        """Return new row values `[U, W]` and new slots."""
        raise AssertionError


class StoreRule(Rule):
    """w = G: stores the summed gradient itself, including infinities and NaNs; produces a dense `.grad`."""

    keeps = False

    def __init__(self, hyper: Sequence[float]) -> None:
        super().__init__(tuple(hyper) or (0.0, 1.0, 0.0, 0.0))

    def apply(self, step: UpdateCount) -> tuple[Tensor, list[Tensor]]:
        return step.g_UW, []


class SgdRule(Rule):
    """g += wd w;  m = mu m + g;  w -= lr (g + mu m if nesterov else m). Example: w 1, g 0.5, lr 0.1 -> 0.95."""

    names = ("momentum", "nesterov")

    def __init__(self, hyper: Sequence[float]) -> None:
        super().__init__(hyper)
        self.slot_kinds = ("element",) if self.h["momentum"] else ()

    def apply(self, step: UpdateCount) -> tuple[Tensor, list[Tensor]]:
        g = step.g_UW + self.wd * step.w_UW if self.wd else step.g_UW
        if not step.slots:
            return step.w_UW - self.lr * g, []
        mu = self.h["momentum"]
        m = mu * step.slots[0] + g
        return step.w_UW - self.lr * (g + mu * m if self.h["nesterov"] else m), [m]


class AdagradRule(Rule):
    """g += wd w;  s += g^2;  w -= lr / (1 + (t-1) lr_decay) g / (sqrt(s) + eps)."""

    names = ("eps", "lr_decay")
    slot_kinds = ("element",)

    def apply(self, step: UpdateCount) -> tuple[Tensor, list[Tensor]]:
        g = step.g_UW + self.wd * step.w_UW if self.wd else step.g_UW
        s = step.slots[0] + g * g
        lr = self.lr / (1 + (step.t - 1) * self.h["lr_decay"])
        return step.w_UW - lr * (g / (square_root(s) + self.h["eps"])), [s]


class RowWiseAdagradRule(Rule):
    """s += mean(g'^2);  k = lr / (sqrt(s) + eps);  w = c w - k g.

    L2 decay: g' = g + wd w and c = 1 - k wd. Decoupled decay: g' = g and c = 1 - lr wd. Otherwise g' = g and c = 1.
    With max_norm > 0 a longer new row is scaled back to that norm. Example: g (3, 4), s 0, lr 1, eps 0 -> s 12.5,
    k 0.2828.
    """

    names = ("eps", "decay_mode", "max_norm")
    slot_kinds = ("row",)

    def __init__(self, hyper: Sequence[float]) -> None:
        super().__init__(hyper)
        self.phases = 2 if self.h["max_norm"] > 0 else 1

    def _moved(self, step: UpdateCount) -> tuple[Tensor, Tensor]:
        s = step.slots[0] + step.scalars_PU[0] / step.dim
        k = self.lr / (square_root(s) + self.h["eps"])
        mode = int(self.h["decay_mode"])
        w = step.w_UW
        if mode == 1:
            w = (1 - k * self.wd)[:, None] * w
        elif mode == 2:
            w = (1 - self.lr * self.wd) * w
        return w - k[:, None] * step.g_UW, s

    def terms(self, phase: int, step: UpdateCount) -> list[Tensor]:
        if phase == 0:
            g = step.g_UW + self.wd * step.w_UW if int(self.h["decay_mode"]) == 1 else step.g_UW
            return [g * g]
        moved, _ = self._moved(step)
        return [moved * moved]

    def apply(self, step: UpdateCount) -> tuple[Tensor, list[Tensor]]:
        w, s = self._moved(step)
        if self.phases == 2:
            norm = square_root(step.scalars_PU[1])
            limit = self.h["max_norm"]
            w = torch.where((norm > limit)[:, None], w * (limit / norm)[:, None], w)
        return w, [s]


class _Moments(Rule):
    """First and second moments with bias correction; `row_step` counts a row's own updates in a last slot."""

    row_wise_second: ClassVar[bool] = False

    def __init__(self, hyper: Sequence[float]) -> None:
        super().__init__(hyper)
        self.slot_kinds = ("element", "row" if self.row_wise_second else "element")
        if self.h["row_step"]:
            self.slot_kinds += ("row",)

    def _moments(self, step: UpdateCount, g: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return m [U, W], v broadcastable to [U, W], and the new slots."""
        b1, b2 = self.h["beta1"], self.h["beta2"]
        m = b1 * step.slots[0] + (1 - b1) * g
        if self.row_wise_second:
            v_U = b2 * step.slots[1] + (1 - b2) * (step.scalars_PU[0] / step.dim)
            slots, v = [m, v_U], v_U[:, None]
        else:
            v = b2 * step.slots[1] + (1 - b2) * (g * g)
            slots = [m, v]
        if self.h["row_step"]:
            slots.append(step.slots[2] + 1)
        return m, v, slots

    def _corrections(self, step: UpdateCount, slots: list[Tensor]) -> tuple[Tensor | float, Tensor | float]:
        """Return 1 - beta1^t and 1 - beta2^t, computed in double."""
        if self.h["row_step"]:
            t = slots[2].double()[:, None]
            c1, c2 = 1 - torch.pow(self.h["beta1"], t), 1 - torch.pow(self.h["beta2"], t)
            return c1.to(step.w_UW.dtype), c2.to(step.w_UW.dtype)
        return 1 - self.h["beta1"] ** step.t, 1 - self.h["beta2"] ** step.t

    def _update(self, step: UpdateCount) -> tuple[Tensor, list[Tensor]]:
        """Return u = m^ / (sqrt(v^) + eps) + wd w, before any learning rate, and the new slots."""
        m, v, slots = self._moments(step, step.g_UW)
        c1, c2 = self._corrections(step, slots)
        return (m / c1) / (square_root(v / c2) + self.h["eps"]) + self.wd * step.w_UW, slots


class AdamRule(_Moments):
    """m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  w -= lr / (1-b1^t) m / (sqrt(v) / sqrt(1-b2^t) + eps).

    L2 decay adds wd w to g; decoupled decay (AdamW) multiplies w by 1 - lr wd first.
    """

    names = ("eps", "beta1", "beta2", "decoupled", "row_step")

    def apply(self, step: UpdateCount) -> tuple[Tensor, list[Tensor]]:
        w, g = step.w_UW, step.g_UW
        if self.wd and not self.h["decoupled"]:
            g = g + self.wd * w
        m, v, slots = self._moments(step, g)
        c1, c2 = self._corrections(step, slots)
        root = square_root(c2) if isinstance(c2, Tensor) else math.sqrt(c2)
        if self.wd and self.h["decoupled"]:
            w = w * (1 - self.lr * self.wd)
        return w - (self.lr / c1) * (m / (square_root(v) / root + self.h["eps"])), slots


class PartialRowWiseAdamRule(_Moments):
    """Adam with one second moment per row: v = b2 v + (1-b2) mean(g^2); decay decoupled inside the step."""

    names = ("eps", "beta1", "beta2", "row_step")
    phases = 1
    row_wise_second = True

    def terms(self, phase: int, step: UpdateCount) -> list[Tensor]:
        return [step.g_UW * step.g_UW]

    def apply(self, step: UpdateCount) -> tuple[Tensor, list[Tensor]]:
        u, slots = self._update(step)
        return step.w_UW - self.lr * u, slots


class LambRule(_Moments):
    """u = m^ / (sqrt(v^) + eps) + wd w;  w -= lr |w| / |u| u, with ratio 1 if either norm is 0."""

    names = ("eps", "beta1", "beta2", "row_step")
    phases = 1

    def sums(self, phase: int) -> int:
        return 1 if phase == 0 and self.row_wise_second else 2

    def terms(self, phase: int, step: UpdateCount) -> list[Tensor]:
        if phase == 0 and self.row_wise_second:
            return [step.g_UW * step.g_UW]
        u, _ = self._update(step)
        return [step.w_UW * step.w_UW, u * u]

    def apply(self, step: UpdateCount) -> tuple[Tensor, list[Tensor]]:
        u, slots = self._update(step)
        w_norm, u_norm = square_root(step.scalars_PU[-2]), square_root(step.scalars_PU[-1])
        ratio = torch.where((w_norm > 0) & (u_norm > 0), w_norm / u_norm, torch.ones_like(w_norm))
        return step.w_UW - (self.lr * ratio)[:, None] * u, slots


class PartialRowWiseLambRule(LambRule):
    """LambRule with one second moment per row; two reductions."""

    phases = 2
    row_wise_second = True


class LarsSgdRule(Rule):
    """a = lr eta |w| / (|g| + wd |w|), or lr if either norm is 0;  m = mu m + a (g + wd w);  w -= m."""

    names = ("momentum", "trust")
    phases = 1
    slot_kinds = ("element",)

    def sums(self, phase: int) -> int:
        return 2

    def terms(self, phase: int, step: UpdateCount) -> list[Tensor]:
        return [step.w_UW * step.w_UW, step.g_UW * step.g_UW]

    def apply(self, step: UpdateCount) -> tuple[Tensor, list[Tensor]]:
        w_norm, g_norm = square_root(step.scalars_PU[0]), square_root(step.scalars_PU[1])
        local = self.lr * self.h["trust"] * w_norm / (g_norm + self.wd * w_norm)
        a = torch.where((w_norm > 0) & (g_norm > 0), local, torch.full_like(local, self.lr))
        m = self.h["momentum"] * step.slots[0] + a[:, None] * (step.g_UW + self.wd * step.w_UW)
        return step.w_UW - m, [m]


RULES: dict[str, type[Rule]] = {
    "store": StoreRule,
    "sgd": SgdRule,
    "adagrad": AdagradRule,
    "rowwise_adagrad": RowWiseAdagradRule,
    "adam": AdamRule,
    "partial_rowwise_adam": PartialRowWiseAdamRule,
    "lamb": LambRule,
    "partial_rowwise_lamb": PartialRowWiseLambRule,
    "lars_sgd": LarsSgdRule,
}
"""Rules by name. The native library has the same names (`native/rules.h`), and so has `triton/rules.py`."""


_REGISTERED: set[str] = set()


def register_rule(name: str, rule: type[Rule]) -> None:
    """Add a user's row rule under a new name. `tilerec.optim.register_optimizer` calls this function."""
    if name in RULES:
        raise ConfigError(f"row rule {name!r} exists already; expected none of {sorted(RULES)}. Rename the rule.")
    RULES[name] = rule
    _REGISTERED.add(name)


def is_registered(name: str) -> bool:
    """Return True if a user registered the rule: backends have no kernel for it and run the reference."""
    return name in _REGISTERED


def make_rule(name: str, hyper: Sequence[float]) -> Rule:
    """Return the rule with this name and these numbers."""
    if name not in RULES:
        raise ConfigError(f"row rule {name!r} is unknown; expected one of {sorted(RULES)}.")
    return RULES[name](hyper)


def block_sums(terms_UW: Tensor, column_offset: int) -> Tensor:
    """Return sums `[U, blocks]` over the aligned blocks of 8 global columns that the columns touch.

    Example: columns 5 to 10 of ones (column_offset 5, width 6) -> blocks 5 to 7 and 8 to 10 -> (3, 3).
    """
    before = column_offset % BLOCK
    after = -(before + terms_UW.shape[1]) % BLOCK
    padded = torch.nn.functional.pad(terms_UW, (before, after))
    x = padded.reshape(terms_UW.shape[0], padded.shape[1] // BLOCK, BLOCK)  # no -1: U may be 0
    pairs = x[..., 0::2] + x[..., 1::2]
    quads = pairs[..., 0::2] + pairs[..., 1::2]
    return quads[..., 0] + quads[..., 1]


def add_blocks(sums_UB: Tensor) -> Tensor:
    """Add blocks in ascending order: `[U]`."""
    total = sums_UB.new_zeros(sums_UB.shape[0])
    for block in sums_UB.unbind(dim=1):
        total = total + block
    return total
