"""Models, tilings, optimizers, caches and scripts drawn at random: sharded equals unsharded, action by action.

`TILEREC_NIGHTLY=1` draws `TILEREC_FUZZ_EXAMPLES` of them (2,400 unless given), from `TILEREC_FUZZ_SEED` (a number; 0
unless given). A failing composition is shrunk and printed; `check(Composition(...))` runs it again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz import composition
from tests.fuzz.composition import (
    Action,
    BadId,
    Composition,
    Evaluate,
    FailedBackward,
    Part,
    Reshard,
    Train,
    check,
    table_kind,
)
from tests.parity.harness import OPTIMIZERS, TILINGS, Hosts, TableCase, adds_over_rows, aligned
from tilerec.spec.table import DataType

NIGHTLY = os.environ.get("TILEREC_NIGHTLY") == "1"
Draw = Callable[[st.SearchStrategy[Any]], Any]
SMOOTH = ("none", "sgd", "sgd_momentum", "adagrad", "rowwise_adagrad", "rowwise_adagrad_max_norm", "lars_sgd")
"""Rules whose steps are as small as their gradients' differences: Adam's amplify rounding where gradients cancel."""


def draw_tiling(draw: Draw, part: Part, table: TableCase, hosts: Hosts, cached: bool) -> Any:
    ranks = [rank for host in hosts for rank in host]
    if cached:
        kind = draw(st.sampled_from(["row_wise", "table_wise"]))
        first = draw(st.sampled_from(range(len(ranks))))
        return table_kind(kind, ranks[first:] + ranks[:first])
    made = TILINGS[draw(st.sampled_from(sorted(TILINGS)))](table.rows, table.dim, hosts, draw(st.integers(0, 3)))
    if adds_over_rows(OPTIMIZERS[part.optimizer]) and not aligned(made):
        made = TILINGS["two_tiles"](table.rows, table.dim, hosts, 0)
    return made


def draw_part(draw: Draw, name: str, optimizer: str) -> Part:
    pooled = draw(st.booleans())
    data_type = draw(st.sampled_from([DataType.FP32, DataType.FP32, DataType.FP64]))
    tables = []
    for i in range(draw(st.integers(1, 3))):
        features = draw(st.lists(st.sampled_from("fgh"), min_size=1, max_size=2, unique=True))
        tables.append(
            TableCase(
                f"{name}{i}", draw(st.integers(2, 15)), draw(st.sampled_from([1, 4, 8, 20])), tuple(features),
                data_type, pooled and draw(st.booleans()),
            )
        )  # fmt: skip
    loose = [t.name for t in tables if draw(st.integers(0, 4)) == 0]
    may_cache = OPTIMIZERS[optimizer] is not None and data_type is DataType.FP32
    cached = [t.name for t in tables if may_cache and t.name not in loose and draw(st.integers(0, 3)) == 0]
    weighted = pooled and draw(st.booleans())
    return Part(name, tuple(tables), optimizer, pooled, weighted, tuple(cached), tuple(loose))


def draw_action(draw: Draw, made: dict[str, Part], hosts: Hosts) -> Action:
    # Any few, or every collection twice in one backward.
    names = st.lists(st.sampled_from(sorted(made)), min_size=1, max_size=3).map(tuple) | st.just((*made, *made))
    kind = draw(st.sampled_from(["train"] * 5 + ["evaluate", "reshard", "reshard", "bad id", "failed backward"]))
    if kind == "train":
        return Train(draw(names), draw(st.booleans()))
    if kind == "evaluate":
        return Evaluate(draw(names))
    if kind == "reshard":
        plan: dict[str, dict[str, Any]] = {}
        for part in made.values():
            for table in part.tables:
                if draw(st.booleans()):
                    cached = table.name in part.cached
                    plan.setdefault(part.name, {})[table.name] = draw_tiling(draw, part, table, hosts, cached)
        return Reshard(plan)
    name = draw(st.sampled_from(sorted(made)))
    if kind == "bad id":
        return BadId(name, draw(st.sampled_from([rank for host in hosts for rank in host])))
    return FailedBackward(name)


@st.composite
def compositions(draw: Draw) -> Composition:
    size = draw(st.integers(1, 4))
    host_of = [draw(st.integers(0, 1)) for _ in range(size)]
    hosts = tuple(h for h in (tuple(r for r in range(size) if host_of[r] == n) for n in (0, 1)) if h)
    # Tables of one optimizer are updated together, whichever collection they are of: often all have the same.
    common, names = draw(st.sampled_from(SMOOTH)), "abc"[: draw(st.integers(1, 3))]
    parts = {
        name: draw_part(draw, name, common if draw(st.booleans()) else draw(st.sampled_from(SMOOTH))) for name in names
    }
    plan = {
        part.name: {t.name: draw_tiling(draw, part, t, hosts, t.name in part.cached) for t in part.tables}
        for part in parts.values()
    }
    script = [draw_action(draw, parts, hosts) for _ in range(draw(st.integers(2, 6)))]
    script.append(Train(tuple(parts)))
    return Composition(
        tuple(parts.values()), plan, hosts, tuple(draw(st.integers(0, 4)) for _ in range(size)), tuple(script),
        draw(st.booleans()), draw(st.integers(0, 99)),
    )  # fmt: skip


def given_compositions(test: Callable[[Composition], None]) -> Callable[[], None]:
    """Few and always the same, or (nightly) many from a seed."""
    drawn = given(compositions())(test)
    if not NIGHTLY:
        return settings(max_examples=40)(drawn)
    examples = int(os.environ.get("TILEREC_FUZZ_EXAMPLES", "2400"))
    many = settings(max_examples=examples, derandomize=False, suppress_health_check=list(HealthCheck))(drawn)
    return seed(int(os.environ.get("TILEREC_FUZZ_SEED", "0")))(many)


@given_compositions
def test_any_composition_equals_the_unsharded_model(made: Composition) -> None:
    check(made)


def test_a_loss_that_is_not_scaled_by_the_ranks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    table = TableCase("a0", 9, 4, ("f",))
    made = Composition(
        (Part("a", (table,), "sgd"),), {"a": {"a0": TILINGS["row_wise"](9, 4, ((0, 1),), 0)}}, ((0, 1),), (4, 4),
        (Train(("a",)), Train(("a",))),
    )  # fmt: skip
    check(made)
    real = composition.loss
    monkeypatch.setattr(composition, "loss", lambda outs, scale: real(outs, 1.0))
    with pytest.raises(AssertionError):
        check(made)
