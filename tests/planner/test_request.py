"""What a request refuses, how it is written, and what it makes of constraints."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.planner.plan_requests import ADAGRAD, plan_request, table
from tilerec.errors import ConfigError
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.workload import Skew
from tilerec.planner.pins import groups_of
from tilerec.planner.request import PlanRequest
from tilerec.planner.table_limits import limits_of_tables
from tilerec.planner.table_list import read_tables
from tilerec.spec.plan import ParameterSharding, ShardingType, Wire
from tilerec.spec.table import DataType
from tilerec.spec.topology import Topology

NAN = float("nan")
TWO_HOSTS = Topology(4, local_world_size=2)


def full() -> PlanRequest:
    tables = [
        table("a", features=("f", "g"), weighted=True, wire=Wire("bf16", "fp16", distinct=False)),
        table("b", 50, 7, data_type=DataType.BF16, optimizer=None, pooled=False),
        replace(table("c", trained=False), names=(("ebc", "c"), ("ec", "cc"))),
    ]
    limits = {
        "a": ParameterConstraints(["row_wise"], pooling_factors=[2, 3.5], skew=Skew(100, 1.2)),
        "b": ParameterConstraints(with_table="c", ranks="0-1"),
    }
    return plan_request(tables, TWO_HOSTS, limits, batch_size=64, reserved=10, effort=2)


def test_a_request_is_read_back_from_json() -> None:
    back = PlanRequest.from_json(json.loads(json.dumps(full().to_json())))
    assert back.to_json() == full().to_json()
    assert back.tables == full().tables
    assert back.constraints == full().constraints
    assert back.digest() == full().digest()


def test_everything_that_is_asked_for_is_in_the_digest() -> None:
    request = full()
    others = [
        replace(request, batch_size=65),
        replace(request, reserved=11),
        replace(request, effort=1),
        replace(request, topology=Topology(4)),
        replace(request, topology=replace(TWO_HOSTS, hbm_cap=2**30)),
        replace(request, tables=(table("a"), *request.tables[1:])),
        replace(
            request, tables=(replace(request.tables[0], wire=Wire("bf16", "fp16", distinct=True)), *request.tables[1:])
        ),
        request.with_constraint("ebc.b", ranks=[0]),
    ]
    assert len({r.digest() for r in [request, *others]}) == len(others) + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0; it must be a whole number from 1"),
        ({"effort": True}, "effort is True"),
        ({"tables": [table("a"), table("a")]}, "Table 'a' of module 'ebc' occurs twice"),
        ({"constraints": {"x": ParameterConstraints()}}, "constraints name 'ebc.x', which is no table"),
        (
            {"constraints": {"a": ParameterConstraints(ranks=[4])}},
            "name rank 4, but the topology has ranks 0 to 3",
        ),
        (
            {"constraints": {"a": ParameterConstraints(hosts=[2])}},
            "name host 2, but the topology has hosts 0 to 1",
        ),
        (
            {"constraints": {"a": ParameterConstraints(hosts=[1], ranks=[0])}},
            "none of the ranks .* is on one of",
        ),
        (
            {"constraints": {"a": ParameterConstraints(device_group="cpu")}},
            "got device_group 'cpu'; expected the topology's",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(change: dict[str, Any], message: str) -> None:
    given = {"tables": [table("a")], "topology": TWO_HOSTS, **change}
    with pytest.raises(ConfigError, match=message):
        plan_request(**given)


def test_reads_are_what_constraints_say_of_each_feature() -> None:
    two = table("a", features=("f", "g"))
    limits = {
        "a": ParameterConstraints(pooling_factors=[2, 5], num_poolings=[3], batch_sizes=[8, 16], is_weighted=True)
    }
    (work,) = plan_request([two], TWO_HOSTS, limits, batch_size=64).works()
    assert [(r.bags, r.ids_per_bag, r.weighted) for r in work.reads] == [(24, 2, True), (48, 5, True)]
    (plain,) = plan_request([two], TWO_HOSTS, batch_size=64).works()
    assert [(r.bags, r.ids_per_bag, r.weighted) for r in plain.reads] == [(64, 1, False)] * 2
    (weighted,) = plan_request([replace(two, weighted=True)], TWO_HOSTS, batch_size=64).works()
    assert all(r.weighted for r in weighted.reads)
    with pytest.raises(ConfigError, match=r"pooling_factors has 3 numbers for 2 features"):
        plan_request([two], TWO_HOSTS, {"a": ParameterConstraints(pooling_factors=[1, 2, 3])}).works()


def test_a_table_without_gradients_has_neither_state_nor_gradient() -> None:
    (work,) = plan_request([table("a", trained=False)], TWO_HOSTS).works()
    assert work.optimizer is not None
    assert not work.optimizer.slots


def test_input_bytes_are_ids_lengths_and_weights_of_a_batch() -> None:
    assert plan_request([table("a")], TWO_HOSTS, batch_size=100).input_bytes() == pytest.approx(100 * (4 + 8), abs=1)
    limits = {"a": ParameterConstraints(pooling_factors=[3], is_weighted=True)}
    assert plan_request([table("a")], TWO_HOSTS, limits, batch_size=100).input_bytes() == pytest.approx(
        100 * (4 + 36), abs=1
    )


@pytest.mark.parametrize(
    ("kind", "topology", "dim", "searched"),
    [
        ("row_wise", Topology(1), 64, ()),
        ("column_wise", Topology(4), 257, ("table_wise",)),
        ("column_wise", Topology(4), 64, ("column_wise",)),
        ("grid_shard", TWO_HOSTS, 257, ("table_row_wise",)),
        ("grid_shard", TWO_HOSTS, 64, ("grid_shard",)),
        ("grid_shard", Topology(2, local_world_size=1), 64, ("column_wise",)),
        ("table_row_wise", Topology(2, local_world_size=1), 64, ("table_wise",)),
    ],
)
def test_types_that_come_down_to_simpler_ones_are_searched_as_these(
    kind: str, topology: Topology, dim: int, searched: tuple[str, ...]
) -> None:
    request = plan_request([table("a", dim=dim)], topology, {"a": ParameterConstraints([kind])})
    limits = limits_of_tables(request, {}).get("ebc.a")
    assert (() if limits is None else limits.types) == tuple(ShardingType(word) for word in searched)


def test_tables_that_lie_together_are_grouped_through_each_other() -> None:
    limits = {"a": ParameterConstraints(with_table="b"), "c": ParameterConstraints(with_table="ebc.b")}
    request = plan_request({"a": 10, "b": 10, "c": 10, "d": 10}, TWO_HOSTS, limits)
    assert groups_of(request, {}) == [["ebc.a", "ebc.b", "ebc.c"]]
    pin = {"ebc.b": ParameterSharding("table_wise", ranks=[2])}
    assert groups_of(request, pin) == []
    with pytest.raises(ConfigError, match=r"with_table='x' is no table of the model"):
        groups_of(plan_request({"a": 10}, TWO_HOSTS, {"a": ParameterConstraints(with_table="x")}), {})


def test_a_name_that_several_tables_have_is_asked_about() -> None:
    tables = [table("a"), replace(table("x"), names=(("u", "x"),)), replace(table("x"), names=(("v", "x"),))]
    with pytest.raises(ConfigError, match=r"with_table='x' may be any of \['u.x', 'v.x'\]"):
        groups_of(plan_request(tables, TWO_HOSTS, {"a": ParameterConstraints(with_table="x")}), {})


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], r"Tables: got \[\]; expected a list such as"),
        ({"a": 3}, 'Tables: got an object with "a"; expected a list such as'),
        ([3], r"Tables: \[0\]: got 3; expected an object with \"name\""),
        ([{"name": "a"}], 'got an object without "num_embeddings", "embedding_dim"'),
        (
            [{"name": "a", "num_embeddings": 0, "embedding_dim": 4}],
            r"Tables: \[0\]\.num_embeddings: got 0; expected a whole number from 1",
        ),
        ([{"name": "a", "num_embeddings": 5, "embedding_dim": -4}], r"\[0\]\.embedding_dim: got -4"),
        ([{"name": "a", "num_embeddings": 5, "embedding_dim": 4, "rows": 3}], 'got unknown "rows"'),
        (
            [{"name": "a", "num_embeddings": 5, "embedding_dim": 4, "data_type": "fp3"}],
            'data_type: got "fp3"; expected one of FP32',
        ),
        (
            [{"name": "a", "num_embeddings": 5, "embedding_dim": 4, "optimizer": "Sgdd"}],
            'got optimizer="Sgdd"',
        ),
        (
            [{"name": "a", "num_embeddings": 5, "embedding_dim": 4, "optimizer": 3}],
            "optimizer: got 3; expected",
        ),
        (
            [{"name": "a", "num_embeddings": 5, "embedding_dim": 4, "wire": {"up": 1}}],
            'wire: got unknown "up"',
        ),
        (
            [{"name": "a", "num_embeddings": 5, "embedding_dim": 4, "wire": {"distinct": 1}}],
            r"wire\.distinct: got 1; expected true, false or null",
        ),
        (
            [
                {
                    "name": "a",
                    "num_embeddings": 5,
                    "embedding_dim": 4,
                    "constraints": {"pooling_factors": [float("nan")]},
                }
            ],
            r"constraints\.pooling_factors\[0\]: got nan; expected a finite number",
        ),
    ],
)
def test_lists_of_tables_that_are_none_are_refused_with_the_table(tables: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_tables(tables)


def test_a_table_in_a_list_needs_a_name_and_a_size_only() -> None:
    tables, constraints = read_tables([{"name": "a", "num_embeddings": 5, "embedding_dim": 4, "optimizer": "Adam"}])
    assert constraints == {}
    (one,) = tables
    assert (one.key, one.rows, one.dim, one.features, one.data_type) == ("a", 5, 4, ("a",), DataType.FP32)
    assert type(one.optimizer).__name__ == "Adam"
    assert one.optimizer != ADAGRAD


def test_requests_of_other_versions_and_other_things_are_refused() -> None:
    with pytest.raises(ConfigError, match='got an object without "topology"'):
        PlanRequest.from_json({"tables": []})
    with pytest.raises(ConfigError, match="version: got 99; expected 1"):
        PlanRequest.from_json({**full().to_json(), "version": 99})


def test_works_come_by_key_whatever_the_order_of_tables() -> None:
    assert [work.name for work in plan_request({"b": 1, "a": 2, "c": 3}, TWO_HOSTS).works()] == [
        "ebc.a",
        "ebc.b",
        "ebc.c",
    ]


def test_of_ranks_that_differ_a_part_is_reserved_of_each() -> None:
    request = plan_request({"a": 10}, Topology(2, hbm_caps=[1000, 3001]), reserved=7, reserved_part=0.1)
    assert request.reserved_bytes() == [107, 308]
    assert PlanRequest.from_json(json.loads(json.dumps(request.to_json()))).digest() == request.digest()


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"feature_names": "user"}, 'feature_names: got "user"; expected a list of texts'),
        ({"feature_names": [1]}, r"feature_names\[0\]: got 1"),
        ({"feature_names": 7}, "feature_names: got 7"),
        ({"also": 5}, r"also: got 5; expected a list of \[path, table\]"),
        ({"also": [["x"]]}, r"also\[0\]: got \[\"x\"\]; expected \[path, table\]"),
        ({"module": 3}, "module: got 3"),
        ({"trained": "no"}, 'trained: got "no"; expected true or false'),
        ({"pooled": 1}, "pooled: got 1"),
    ],
)
def test_fields_of_another_kind_are_refused(item: dict[str, Any], message: str) -> None:
    data = [{"name": "user", "num_embeddings": 10, "embedding_dim": 4, **item}]
    with pytest.raises(ConfigError, match=r"Tables: \[0\]\." + message):
        read_tables(data)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"reserved": -1}, "reserved=-1; expected bytes per rank"),
        ({"reserved": 0.5}, "reserved=0.5; expected bytes per rank"),
        ({"reserved": 2**60}, r"below 2\^60"),
        ({"reserved_part": 1.0}, "reserved_part=1.0; expected a part of the memory"),
        ({"reserved_part": "x"}, "reserved_part='x'"),
        ({"batch_size": 10**12}, "batch_size is 1000000000000"),
    ],
)
def test_numbers_out_of_range_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_request({"a": 10}, TWO_HOSTS, **more)


def test_tables_beyond_all_machines_are_refused_before_numbers_overflow() -> None:
    with pytest.raises(
        ConfigError, match=r"Table 'b' of module 'ebc': 281474976710656 x 64 cells make the tables larger"
    ):
        plan_request({"a": 1, "b": 2**48}, TWO_HOSTS)


def test_a_table_does_not_lie_with_itself() -> None:
    with pytest.raises(ConfigError, match=r"Table 'ebc.a': with_table='a' is the table itself"):
        groups_of(plan_request({"a": 10}, TWO_HOSTS, {"a": ParameterConstraints(with_table="a")}), {})
