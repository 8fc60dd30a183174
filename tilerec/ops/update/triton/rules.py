"""Row rules on the GPU: `tilerec/ops/update/rules.py`, each as jitted functions passed to one kernel.

Nouns
  bundle   a rule's two jitted functions, `terms` and `apply`, and the functions that compute its numbers on the host
  numbers  h[0] … h[7]: computed from `hyper` once per step, in float64, then rounded to fp32 as PyTorch rounds a Python
           number in an operation with a tensor
  paces    e[0], e[1]: numbers that depend on a table's update count (bias corrections, decayed learning rate)
  rates    h[0], the learning rate, and h[7], which a rule derives from it once per step (1 - lr * weight decay,
           lr * trust): all numbers that a schedule changes
  mode     the rule's variant, a compile-time constant

All functions take the same arguments, so the kernel is independent of the rule:

  terms(PHASE, g, w, s, z, dim, h, e, MODE, WD, ROW_STEP) -> (x0, x1)
      the terms to sum over the row in this phase; x1 is 0.0 if the phase has one sum
  apply(g, w, s, z, dim, h, e, MODE, WD, ROW_STEP) -> (w, s)

s, z, h and e are tuples: 3 slots, 3 row sums, 8 numbers, 2 paces. g, w and element slots are fp32 [R, C]; row slots,
the sums z and dim are [R, 1]. Slots and sums that a rule does not have are 0.0. WD: there is a weight decay. ROW_STEP:
rows count their own updates in s[2].

The arithmetic is the reference's, operation by operation, each rounded once and correctly: division and square root are
the exact ones, and the kernels are compiled without fusing multiply and add. Differences may come from the order of row
sums, and from operations that PyTorch does not round correctly (its square root on some CPUs, a number divided by a
tensor). These kernels are bound by memory, not by arithmetic.

Example, "sgd" with lr 0.1: g 0.5, w 1 -> 0.95.
"""

# ruff: noqa: RET505, SIM102 - the compiler evaluates these branches of kernels

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from tilerec.ops.update.checks import slot_kinds
from tilerec.ops.update.rules import Rule, is_registered, make_rule


@triton.jit
def whole_power(base, t):
    """Return `base ** t` in float64 for integer t (int64) in [0, 2^31), by squaring.

    `squared_power` computes the same bits on the host.
    """
    result = base * 0.0 + 1.0
    for bit in tl.static_range(31):
        result = tl.where(((t >> bit) & 1) != 0, result * base, result)
        base = base * base
    return result


@triton.jit
def power(high, low, t_R1):
    """Return `(high + low) ** t` in float64 for integer t (fp32) in [0, 2^31)."""
    zero = t_R1 * 0.0  # fp32, like high and low
    return whole_power((zero + high).to(tl.float64) + (zero + low).to(tl.float64), t_R1.to(tl.int64))


@triton.jit
def no_paces(t, lr, c0, c1, c2, ROW_STEP: tl.constexpr):
    """Return e0, e1, h7 of tables at update count t, in float64, as `Bundle.paces` and `Bundle.of_rate` do.

    c0, c1, c2: `Bundle.constants`.
    """
    return lr * 0.0, lr * 0.0, lr * 0.0


@triton.jit
def adagrad_paces(t, lr, c0, c1, c2, ROW_STEP: tl.constexpr):
    """Return e0, e1, h7 of Adagrad: the decayed learning rate, 0, 0. c0: lr_decay."""
    return lr / (1.0 + (t - 1).to(tl.float64) * c0), lr * 0.0, lr * 0.0


@triton.jit
def decayed_paces(t, lr, c0, c1, c2, ROW_STEP: tl.constexpr):
    """Return e0, e1, h7 of rules with weight decay: 0, 0, 1 - lr * weight decay. c0: weight decay."""
    return lr * 0.0, lr * 0.0, 1.0 - lr * c0


@triton.jit
def scaled_paces(t, lr, c0, c1, c2, ROW_STEP: tl.constexpr):
    """Return e0, e1, h7 of LARS: 0, 0, lr * trust. c0: trust."""
    return lr * 0.0, lr * 0.0, lr * c0


@triton.jit
def corrected_paces(t, lr, c0, c1, c2, ROW_STEP: tl.constexpr):
    """Return e0, e1, h7 of rules with bias correction. c0, c1, c2: weight decay, beta1, beta2.

    With ROW_STEP e0 and e1 are the rounding errors of beta1 and beta2 in fp32.
    """
    if ROW_STEP:
        return (
            c1 - c1.to(tl.float32).to(tl.float64),
            c2 - c2.to(tl.float32).to(tl.float64),
            1.0 - lr * c0,
        )
    else:
        return 1.0 - whole_power(c1, t), 1.0 - whole_power(c2, t), 1.0 - lr * c0


@triton.jit
def adam_paces(t, lr, c0, c1, c2, ROW_STEP: tl.constexpr):
    """Return e0, e1, h7 of Adam. c0, c1, c2: weight decay, beta1, beta2."""
    e0, e1, h7 = corrected_paces(t, lr, c0, c1, c2, ROW_STEP)
    if ROW_STEP:
        return e0, e1, h7
    else:
        return lr / e0, tl.sqrt(e1), h7


@triton.jit
def no_terms(PHASE: tl.constexpr, g, w, s, z, dim, h, e, MODE: tl.constexpr, WD: tl.constexpr, ROW_STEP: tl.constexpr):
    return g, 0.0


@triton.jit
def store_apply(g, w, s, z, dim, h, e, MODE: tl.constexpr, WD: tl.constexpr, ROW_STEP: tl.constexpr):
    """Set w = g."""
    return g, s


@triton.jit
def sgd_apply(g, w, s, z, dim, h, e, MODE: tl.constexpr, WD: tl.constexpr, ROW_STEP: tl.constexpr):
    """Apply SGD. h: lr, weight decay, momentum. MODE 0 none, 1 momentum, 2 Nesterov's."""
    if WD:
        g = g + h[1] * w
    if MODE == 0:
        return w - h[0] * g, s
    else:
        m = h[2] * s[0] + g
        if MODE == 2:
            return w - h[0] * (g + h[2] * m), (m, s[1], s[2])
        else:
            return w - h[0] * m, (m, s[1], s[2])


@triton.jit
def adagrad_apply(g, w, s, z, dim, h, e, MODE: tl.constexpr, WD: tl.constexpr, ROW_STEP: tl.constexpr):
    """Apply Adagrad. h: -, weight decay, eps; e[0]: the decayed lr."""
    if WD:
        g = g + h[1] * w
    total = s[0] + g * g
    return w - e[0] * tl.div_rn(g, tl.sqrt_rn(total) + h[2]), (total, s[1], s[2])


@triton.jit
def _row_wise_moved(g, w, s, z, dim, h, MODE: tl.constexpr):
    total = s[0] + tl.div_rn(z[0], dim)
    k = tl.div_rn(tl.zeros_like(total) + h[0], tl.sqrt_rn(total) + h[2])
    if MODE == 1:
        w = (1.0 - k * h[1]) * w
    elif MODE == 2:
        w = h[7] * w
    return w - k * g, (total, s[1], s[2])


@triton.jit
def row_wise_adagrad_terms(
    PHASE: tl.constexpr, g, w, s, z, dim, h, e, MODE: tl.constexpr, WD: tl.constexpr, ROW_STEP: tl.constexpr
):
    """Return in phase 0 g'^2 (g' = g with L2 decay); in phase 1 (max_norm) the squares of the updated row."""
    if PHASE == 0:
        if MODE == 1:
            g = g + h[1] * w
        return g * g, 0.0
    else:
        moved, _ = _row_wise_moved(g, w, s, z, dim, h, MODE)
        return moved * moved, 0.0


@triton.jit
def row_wise_adagrad_apply(g, w, s, z, dim, h, e, MODE: tl.constexpr, WD: tl.constexpr, ROW_STEP: tl.constexpr):
    """Apply row-wise Adagrad. h: lr, weight decay, eps; h[7]: 1 - lr * weight decay. MODE: decay mode."""
    return _row_wise_moved(g, w, s, z, dim, h, MODE)


@triton.jit
def row_wise_adagrad_bounded_apply(g, w, s, z, dim, h, e, MODE: tl.constexpr, WD: tl.constexpr, ROW_STEP: tl.constexpr):
    """Apply row-wise Adagrad, then scale rows longer than h[3] to that norm. Other numbers as above."""
    moved, slots = _row_wise_moved(g, w, s, z, dim, h, MODE)
    norm = tl.sqrt_rn(z[1])
    long = norm > h[3]
    factor = tl.div_rn(tl.zeros_like(norm) + h[3], tl.where(long, norm, 1.0))
    return tl.where(long, moved * factor, moved), slots


@triton.jit
def adam_apply(g, w, s, z, dim, h, e, MODE: tl.constexpr, WD: tl.constexpr, ROW_STEP: tl.constexpr):
    """Apply Adam.

    h: lr, weight decay, eps, beta1, 1 - beta1, beta2, 1 - beta2, 1 - lr * weight decay. e: lr / (1 - beta1^t), sqrt(1 -
    beta2^t); with ROW_STEP the rounding errors of beta1 and beta2 in fp32. MODE 1: AdamW's decay.
    """
    if WD:
        if MODE == 0:
            g = g + h[1] * w
    m = h[3] * s[0] + h[4] * g
    v = h[5] * s[1] + h[6] * (g * g)
    if WD:
        if MODE == 1:
            w = w * h[7]
    if ROW_STEP:
        count = s[2] + 1.0
        c1 = (1.0 - power(h[3], e[0], count)).to(tl.float32)
        c2 = (1.0 - power(h[5], e[1], count)).to(tl.float32)
        rate = tl.div_rn(tl.zeros_like(c1) + h[0], c1)
        root = tl.sqrt_rn(c2)
        return w - rate * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + h[2]), (m, v, count)
    else:
        return w - e[0] * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), e[1]) + h[2]), (m, v, s[2])


@triton.jit
def _update_of_moments(g, w, s, z, dim, h, e, ROW_WISE: tl.constexpr, ROW_STEP: tl.constexpr):
    """Return u = m^ / (sqrt(v^) + eps) + wd w, and the new slots: the moments and the row's count."""
    m = h[3] * s[0] + h[4] * g
    if ROW_WISE:
        v = h[5] * s[1] + h[6] * tl.div_rn(z[0], dim)
    else:
        v = h[5] * s[1] + h[6] * (g * g)
    count = s[2]
    if ROW_STEP:
        count = count + 1.0
        c1 = (1.0 - power(h[3], e[0], count)).to(tl.float32)
        c2 = (1.0 - power(h[5], e[1], count)).to(tl.float32)
        u = tl.div_rn(tl.div_rn(m, c1), tl.sqrt_rn(tl.div_rn(v, c2)) + h[2])
    else:
        u = tl.div_rn(tl.div_rn(m, e[0]), tl.sqrt_rn(tl.div_rn(v, e[1])) + h[2])
    return u + h[1] * w, (m, v, count)


@triton.jit
def square_terms(
    PHASE: tl.constexpr, g, w, s, z, dim, h, e, MODE: tl.constexpr, WD: tl.constexpr, ROW_STEP: tl.constexpr
):
    return g * g, 0.0


@triton.jit
def partial_row_wise_adam_apply(g, w, s, z, dim, h, e, MODE: tl.constexpr, WD: tl.constexpr, ROW_STEP: tl.constexpr):
    """Apply partially row-wise Adam. h as in `adam_apply`; e: 1 - beta1^t, 1 - beta2^t."""
    u, slots = _update_of_moments(g, w, s, z, dim, h, e, True, ROW_STEP)
    return w - h[0] * u, slots


@triton.jit
def lamb_terms(
    PHASE: tl.constexpr, g, w, s, z, dim, h, e, MODE: tl.constexpr, WD: tl.constexpr, ROW_STEP: tl.constexpr
):
    """Return the terms of LAMB. MODE 0: w^2 and u^2. MODE 1 (one second moment per row): g^2, then w^2 and u^2."""
    if MODE == 1 and PHASE == 0:
        return g * g, 0.0
    else:
        u, _ = _update_of_moments(g, w, s, z, dim, h, e, MODE == 1, ROW_STEP)
        return w * w, u * u


@triton.jit
def lamb_apply(g, w, s, z, dim, h, e, MODE: tl.constexpr, WD: tl.constexpr, ROW_STEP: tl.constexpr):
    u, slots = _update_of_moments(g, w, s, z, dim, h, e, MODE == 1, ROW_STEP)
    if MODE == 1:
        w_norm, u_norm = tl.sqrt_rn(z[1]), tl.sqrt_rn(z[2])
    else:
        w_norm, u_norm = tl.sqrt_rn(z[0]), tl.sqrt_rn(z[1])
    both = (w_norm > 0) & (u_norm > 0)
    ratio = tl.where(both, tl.div_rn(w_norm, tl.where(both, u_norm, 1.0)), 1.0)
    return w - (h[0] * ratio) * u, slots


@triton.jit
def lars_terms(
    PHASE: tl.constexpr, g, w, s, z, dim, h, e, MODE: tl.constexpr, WD: tl.constexpr, ROW_STEP: tl.constexpr
):
    return w * w, g * g


@triton.jit
def lars_apply(g, w, s, z, dim, h, e, MODE: tl.constexpr, WD: tl.constexpr, ROW_STEP: tl.constexpr):
    """Apply LARS. h: lr, weight decay, momentum; h[7]: lr * trust."""
    w_norm = tl.sqrt_rn(z[0])
    g_norm = tl.sqrt_rn(z[1])
    both = (w_norm > 0) & (g_norm > 0)
    local = tl.div_rn(h[7] * w_norm, tl.where(both, g_norm + h[1] * w_norm, 1.0))
    a = tl.where(both, local, h[0])
    m = h[2] * s[0] + a * (g + h[1] * w)
    return w - m, (m, s[1], s[2])


Numbers = dict[str, float]


@dataclass(frozen=True)
class Bundle:
    """Functions of a rule, and the functions that compute its numbers from `hyper`."""

    terms: Any
    apply: Any
    numbers: Callable[[Numbers], list[float]]  # from h0 on
    mode: Callable[[Numbers], int] = lambda h: 0
    paces: Callable[[Numbers, int], tuple[float, float]] = lambda h, t: (0.0, 0.0)
    keeps: bool = True  # skip rows whose gradient is not finite
    of_rate: Callable[[Numbers], float] = lambda h: 0.0  # h7
    on_device: Any = no_paces  # jitted: `paces` and `of_rate` from counts and a learning rate on the device
    constants: Callable[[Numbers], list[float]] = lambda h: []  # of `on_device`: up to three, in float64


@dataclass(frozen=True)
class PreparedRule:
    """A rule with the numbers of one step, as kernel arguments."""

    bundle: Bundle
    rule: Rule
    numbers: tuple[float, ...]  # 8
    kinds: tuple[int, int, int]  # per slot: 0 none, 1 one number per element, 2 one per row
    sums: tuple[int, int]  # row sums of the two phases
    mode: int
    decays: bool
    row_step: bool
    slots: str  # per slot "e" (one number per element) or "r" (one per row)
    constants: tuple[int, ...]  # bits of float64: lr, and the three constants of `on_device`

    def paces(self, t: int) -> tuple[float, float]:
        """Return e0 and e1 of a table at update count `t`."""
        return self.bundle.paces(self.rule.h, t)


def has_kernels(name: str) -> bool:
    """Return False for a user's rule, which runs as the reference."""
    return not is_registered(name)


def prepare_rule(name: str, hyper: Sequence[float]) -> PreparedRule:
    """Return the bundle of a rule with its numbers; raise the errors of `make_rule`."""
    return _ready(name, tuple(hyper))


@functools.lru_cache(maxsize=64)
def _ready(name: str, hyper: tuple[float, ...]) -> PreparedRule:
    rule = make_rule(name, hyper)
    h, bundle = rule.h, _BUNDLES[name]
    if name == "rowwise_adagrad" and rule.phases == 2:
        bundle = _BOUNDED
    numbers = bundle.numbers(h)
    constants = [h["lr"], *bundle.constants(h)]
    kinds = [1 if kind == "element" else 2 for kind in rule.slot_kinds] + [0, 0, 0]
    sums = [rule.sums(phase) for phase in range(rule.phases)] + [0, 0]
    return PreparedRule(
        bundle, rule, (*numbers, *[0.0] * (7 - len(numbers)), bundle.of_rate(h)), (kinds[0], kinds[1], kinds[2]),
        (sums[0], sums[1]), bundle.mode(h), bool(h["weight_decay"]), bool(h.get("row_step", 0.0)),
        slot_kinds(rule), struct.unpack("4q", struct.pack("4d", *constants, *[0.0] * (4 - len(constants)))),
    )  # fmt: skip


def squared_power(base: float, t: int) -> float:
    """Return `base ** t` by squaring, with the bits of `whole_power`. Example: 0.5, 3 -> 0.125."""
    result = 1.0
    while t:
        if t & 1:
            result *= base
        base *= base
        t >>= 1
    return result


def _moments(h: Numbers) -> list[float]:
    b1, b2 = h["beta1"], h["beta2"]
    return [h["lr"], h["weight_decay"], h["eps"], b1, 1 - b1, b2, 1 - b2]


def _left_by_fp32(x: float) -> float:
    """Return the error of `x` rounded to fp32: x - fp32(x)."""
    return x - float(struct.unpack("f", struct.pack("f", x))[0])


def _corrected(h: Numbers, t: int) -> tuple[float, float]:
    if h["row_step"]:
        return _left_by_fp32(h["beta1"]), _left_by_fp32(h["beta2"])
    return 1 - squared_power(h["beta1"], t), 1 - squared_power(h["beta2"], t)


def _adam_paces(h: Numbers, t: int) -> tuple[float, float]:
    c1, c2 = _corrected(h, t)
    return (c1, c2) if h["row_step"] else (h["lr"] / c1, math.sqrt(c2))


def _decayed(h: Numbers) -> float:
    return 1 - h["lr"] * h["weight_decay"]


def _decay_and_betas(h: Numbers) -> list[float]:
    return [h["weight_decay"], h["beta1"], h["beta2"]]


def _row_wise(terms: Any, apply: Any) -> Bundle:
    return Bundle(
        terms,
        apply,
        lambda h: [h["lr"], h["weight_decay"], h["eps"], h["max_norm"]],
        lambda h: int(h["decay_mode"]),
        of_rate=_decayed,
        on_device=decayed_paces,
        constants=lambda h: [h["weight_decay"]],
    )


def _of_moments(terms: Any, apply: Any, mode: Callable[[Numbers], int] = lambda h: 0) -> Bundle:
    return Bundle(
        terms, apply, _moments, mode, _corrected, of_rate=_decayed, on_device=corrected_paces,
        constants=_decay_and_betas,
    )  # fmt: skip


_BOUNDED = _row_wise(row_wise_adagrad_terms, row_wise_adagrad_bounded_apply)
_BUNDLES = {
    "store": Bundle(no_terms, store_apply, lambda h: [], keeps=False),
    "sgd": Bundle(
        no_terms,
        sgd_apply,
        lambda h: [h["lr"], h["weight_decay"], h["momentum"]],
        lambda h: 0 if not h["momentum"] else 2 if h["nesterov"] else 1,
    ),
    "adagrad": Bundle(
        no_terms,
        adagrad_apply,
        lambda h: [0.0, h["weight_decay"], h["eps"]],
        paces=lambda h, t: (h["lr"] / (1 + (t - 1) * h["lr_decay"]), 0.0),
        on_device=adagrad_paces,
        constants=lambda h: [h["lr_decay"]],
    ),
    "rowwise_adagrad": _row_wise(row_wise_adagrad_terms, row_wise_adagrad_apply),
    "adam": Bundle(
        no_terms,
        adam_apply,
        _moments,
        lambda h: int(bool(h["decoupled"])),
        _adam_paces,
        of_rate=_decayed,
        on_device=adam_paces,
        constants=_decay_and_betas,
    ),
    "partial_rowwise_adam": _of_moments(square_terms, partial_row_wise_adam_apply),
    "lamb": _of_moments(lamb_terms, lamb_apply),
    "partial_rowwise_lamb": _of_moments(lamb_terms, lamb_apply, lambda h: 1),
    "lars_sgd": Bundle(
        lars_terms,
        lars_apply,
        lambda h: [h["lr"], h["weight_decay"], h["momentum"]],
        of_rate=lambda h: h["lr"] * h["trust"],
        on_device=scaled_paces,
        constants=lambda h: [h["trust"]],
    ),
}
