"""Changes that would help: which are tried, and that they are plans made afresh."""

from __future__ import annotations

import pytest

from tests.planner.plan_requests import plan_request, table
from tilerec.planner.decision import decide
from tilerec.planner.make_plan import make_plan
from tilerec.planner.report.variation import with_changes
from tilerec.planner.report.what_if import LEFT_OUT, WhatIf, what_ifs
from tilerec.spec.plan import Wire
from tilerec.spec.table import DataType
from tilerec.spec.topology import Topology

REQUEST = plan_request({"a": 40_000, "b": 300, "c": 90_000}, Topology(4, local_world_size=2), batch_size=1024)


def test_what_would_help_is_what_plans_made_afresh_take() -> None:
    made = make_plan(REQUEST).report
    found = {one.change: one for one in made.what_would_help()}
    assert set(found) == {
        "bf16 on the wire", "bf16 rows in 3 tables", "twice the batch, 2,048 samples of a rank",
        "one more host, 3 x 2 ranks",
    }  # fmt: skip
    for name, change, samples in (
        ("bf16 on the wire", {"wire": "bf16"}, 1.0),
        ("bf16 rows in 3 tables", {"data_type": "bf16"}, 1.0),
        ("twice the batch, 2,048 samples of a rank", {"batch_size": 2048}, 2.0),
        ("one more host, 3 x 2 ranks", {"hosts": 3}, 1.5),
    ):
        cost = decide(with_changes(REQUEST, **change)).priced.cost_ps  # type: ignore[arg-type]
        assert found[name].step_ps == cost
        assert found[name].gain == pytest.approx(1 - cost / samples / made.cost_ps)
        assert found[name].per_sample == (samples != 1)
    gains = [one.gain for one in made.what_would_help()]
    assert gains == sorted(gains, reverse=True)
    assert found["bf16 on the wire"].outcome.endswith(" % of the step")
    assert made.what_would_help() is made.what_would_help()
    text = made.text()
    assert all(one.change in text and one.outcome in text for one in found.values())
    assert "what would help" not in made.text(what_would_help=False)
    assert "what would help" not in str(made)


def test_only_changes_that_apply_are_tried() -> None:
    bare = plan_request(
        [table("a", 1000, data_type=DataType.BF16, optimizer=None, wire=Wire("bf16", "bf16"))], Topology(2)
    )
    request = bare.with_constraint("ebc.a", sharding_types=["row_wise"])
    changes = {one.change for one in make_plan(request).report.what_would_help()}
    assert changes == {
        "twice the batch, 1,024 samples of a rank", "one more host, 2 x 2 ranks",
        "an optimizer in the backward pass for 1 table", "no constraints on the placement of 1 table",
    }  # fmt: skip
    assert {one.change for one in make_plan(plan_request({"a": 10}, Topology(1))).report.what_would_help()} == {
        "bf16 rows in 1 table", "twice the batch, 1,024 samples of a rank", "one more host, 2 x 1 ranks",
    }  # fmt: skip


def test_changes_that_fail_or_gain_nothing_say_so() -> None:
    full = plan_request({"a": 60_000}, Topology(1, hbm_cap=20 * 2**20, ddr_cap=0))
    assert make_plan(full).report.fullest_rank == 0
    found = {one.change: one for one in what_ifs(full, 10**12, 0.95)}
    assert found["twice the memory, 40.0 MiB of a rank"].step_ps is not None
    tight = plan_request({"a": 60_000}, Topology(1, hbm_cap=20 * 2**20, ddr_cap=0), batch_size=4096)
    cost = make_plan(tight).report.cost_ps
    doubled = what_ifs(with_changes(tight, batch_size=4096), cost)
    (batch,) = [one for one in doubled if one.change.startswith("twice the batch")]
    assert (batch.step_ps, batch.outcome) == (None, "no plan within the memory there is")
    assert doubled[-1] is batch
    assert WhatIf("x", "", 100, 0.004).outcome == WhatIf("x", "", 100, -0.2).outcome == "no gain"
    assert WhatIf("x", "", 100, 0.123, per_sample=True).outcome == "12.3 % per sample"


def test_of_large_problems_few_changes_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilerec.planner.report.what_if.LARGE", 11)
    monkeypatch.setattr("tilerec.planner.report.what_if.FEW", 1)
    cost = make_plan(REQUEST).report.cost_ps
    found = what_ifs(REQUEST, cost)
    assert [one.change for one in found if one.step_ps is not None] == ["bf16 on the wire"]
    assert {one.outcome for one in found[1:]} == {LEFT_OUT}
    assert len(found) == 4
    # It is the same plan, as host memory is not needed; where it is, nothing is tried.
    assert found[0].step_ps == decide(with_changes(REQUEST, wire="bf16")).priced.cost_ps
    assert {one.outcome for one in what_ifs(REQUEST, cost, cached=True)} == {LEFT_OUT}
