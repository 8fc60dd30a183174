"""Tables as one."""

from __future__ import annotations

import numpy as np

from tests.planner.plan_requests import plan_request
from tilerec.planner.colocation import merge_colocated
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.decision import decide
from tilerec.planner.search.instance import evaluate
from tilerec.spec.topology import Topology


def test_a_group_costs_and_holds_what_its_tables_do() -> None:
    rows = {f"t{i}": 1000 * 2**i for i in range(6)}
    limits = {name: ParameterConstraints(pooling_factors=[5.0]) for name in rows}
    instance = decide(plan_request(rows, Topology(4, local_world_size=2), limits)).problem.instance
    assert instance.home_memory.any()
    joined, row = merge_colocated(instance, [["ebc.t4", "ebc.t1", "ebc.t3"]])
    assert joined.names == ("ebc.t0", "ebc.t1", "ebc.t2", "ebc.t5")
    assert row.tolist() == [0, 1, 2, 1, 1, 3]
    for o in range(joined.width.shape[1]):
        if not joined.there[:, o].all():
            continue
        option = np.full(joined.tables, o)
        width, pieces = int(joined.width[0, o]), int(joined.pieces[0, o])
        places = [() if width == joined.ranks else tuple(range(pieces))] * joined.tables
        one = evaluate(joined, option, places)
        apart = evaluate(instance, option[row], [places[r] for r in row.tolist()])
        assert one.cost == apart.cost
        assert np.array_equal(one.memory, apart.memory)


def test_no_groups_change_nothing() -> None:
    instance = decide(plan_request({"a": 10, "b": 20}, Topology(2))).problem.instance
    same, row = merge_colocated(instance, [])
    assert same is instance
    assert row.tolist() == [0, 1]
