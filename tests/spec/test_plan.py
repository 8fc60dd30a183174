"""Plans: what they accept and refuse, their file, and what they say of a model that is not theirs."""

from __future__ import annotations

import copy
import dataclasses
import enum
import json
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tilerec.errors import ConfigError
from tilerec.spec.cache import CacheAlgorithm, CacheParams
from tilerec.spec.key_value import KeyValueParams
from tilerec.spec.plan import (
    KERNELS_IN_USE,
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    Held,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
    Wire,
)
from tilerec.spec.table import DataType
from tilerec.spec.tile import Rectangle, Tiling


def on_rank(rank: int, rows: int = 10, dim: int = 4) -> Tiling:
    return Tiling.of("t", rows, dim, [(0, rows, 0, dim, rank)])


def halves(first: int, second: int) -> Tiling:
    return Tiling.of("t", 10, 4, [(0, 5, 0, 4, first), (5, 10, 0, 4, second)])


def plan_of(**tables: ParameterSharding) -> ShardingPlan:
    return ShardingPlan({"ebc": EmbeddingModuleShardingPlan(tables)}, 2)


def whole_plan() -> ShardingPlan:
    replicated = Tiling.of("c", 10, 4, [(0, 5, 0, 4, (0, 1)), (5, 10, 0, 2, 0), (5, 10, 2, 4, 1)])
    return ShardingPlan(
        {
            "ebc": EmbeddingModuleShardingPlan(
                {
                    "a": ParameterSharding("table_wise", "dense", tiling=on_rank(1), data_type=DataType.BF16),
                    "b": ParameterSharding("row_wise", ranks=[1, 0], tiling=halves(1, 0), wire=Wire("bf16", "int8")),
                }
            ),
            "deep.ec": EmbeddingModuleShardingPlan(
                {
                    "c": ParameterSharding("explicit", tiling=replicated, ids_per_bag=1.0),
                    "d": ParameterSharding("column_wise", ranks=[0, 1]),
                }
            ),
        },
        2,
        [[0], [1]],
    )


def test_words_are_those_that_users_know() -> None:
    assert [t.value for t in ShardingType] == [
        "data_parallel",
        "table_wise",
        "column_wise",
        "row_wise",
        "table_row_wise",
        "table_column_wise",
        "grid_shard",
        "explicit",
    ]
    assert ShardingType.ROW_WISE == "row_wise"
    assert EmbeddingComputeKernel.FUSED_UVM_CACHING.value == "fused_uvm_caching"


def test_enums_strings_and_another_librarys_enums_are_accepted() -> None:
    class Other(enum.Enum):
        ROW_WISE = "row_wise"

    for word in (ShardingType.ROW_WISE, "row_wise", "ROW_WISE", Other.ROW_WISE):
        assert ParameterSharding(word).kind is ShardingType.ROW_WISE  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"sharding_type: got 'row'; expected a ShardingType or one of \['data"):
        ParameterSharding("row")
    with pytest.raises(ConfigError, match="compute_kernel: got 3"):
        ParameterSharding("row_wise", 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("kernel", [k for k in EmbeddingComputeKernel if k not in KERNELS_IN_USE])
def test_a_kernel_that_is_not_in_use_is_kept_with_a_warning(kernel: EmbeddingComputeKernel) -> None:
    with pytest.warns(UserWarning, match=f"got compute_kernel '{kernel.value}', which acts as 'fused' here"):
        sharding = ParameterSharding("row_wise", kernel)
    assert sharding.kernel is kernel


def test_ranks_are_read_off_the_tiling_unless_given() -> None:
    assert ParameterSharding("row_wise", tiling=halves(3, 1)).ranks == (3, 1)  # in the order of the pieces
    assert ParameterSharding("explicit", tiling=halves(3, 1)).ranks == (1, 3)
    assert ParameterSharding("row_wise", ranks=[3, 1], tiling=halves(3, 1)).ranks == (3, 1)
    with pytest.raises(ConfigError, match="got a tiling on ranks 3; expected only ranks='0-1'"):
        ParameterSharding("row_wise", ranks=[0, 1], tiling=halves(3, 1))


@pytest.mark.parametrize(
    ("kind", "fits", "tiling"),
    [
        ("table_wise", True, on_rank(0)),
        ("data_parallel", True, Tiling.of("t", 10, 4, [(0, 10, 0, 4, (0, 1))])),
        ("table_wise", False, halves(0, 1)),
        ("data_parallel", False, halves(0, 1)),
        ("row_wise", True, halves(0, 1)),
        ("row_wise", True, on_rank(0)),
        ("column_wise", False, halves(0, 1)),
        ("grid_shard", True, halves(0, 1)),
        ("row_wise", False, Tiling.of("t", 10, 4, [(0, 10, 0, 2, 0), (0, 10, 2, 4, 1)])),
        ("table_column_wise", True, Tiling.of("t", 10, 4, [(0, 10, 0, 2, 0), (0, 10, 2, 4, 1)])),
    ],
)
def test_a_sharding_type_that_contradicts_the_tiling_is_refused(kind: str, fits: bool, tiling: Tiling) -> None:
    """As in a saved plan whose type was edited and whose tiling was not."""
    if fits:
        assert ParameterSharding(kind, tiling=tiling).tiling is tiling
    else:
        with pytest.raises(ConfigError, match=f"got sharding_type='{kind}' with a tiling of another type"):
            ParameterSharding(kind, tiling=tiling)


def test_a_sharding_spec_is_read_into_the_tiling() -> None:
    placement = SimpleNamespace(rank=lambda: 2)
    shards = [
        SimpleNamespace(shard_offsets=[0, 0], shard_sizes=[6, 4], placement=placement),
        SimpleNamespace(shard_offsets=[6, 0], shard_sizes=[4, 4], placement="rank:0/cuda:0"),
    ]
    sharding = ParameterSharding("row_wise", "fused", None, SimpleNamespace(shards=shards))
    assert sharding.tiling == Tiling.of("t", 10, 4, [(0, 6, 0, 4, 2), (6, 10, 0, 4, 0)])
    assert sharding.ranks == (2, 0)
    with pytest.raises(ConfigError, match="got a sharding_spec without shards"):
        ParameterSharding("row_wise", "fused", None, SimpleNamespace(shards=[]))
    with pytest.raises(ConfigError, match=r"got no tile with .* columns \[0, 4\)"):
        ParameterSharding("row_wise", "fused", None, SimpleNamespace(shards=shards[1:]))


def test_what_a_strategy_made_is_as_if_it_were_checked() -> None:
    tiling, wire = halves(1, 0), Wire("bf16", "int8")
    quick = ParameterSharding.of_strategy(ShardingType.ROW_WISE, (1, 0), tiling, wire, DataType.FP32, 2.0)
    checked = ParameterSharding(
        "row_wise", ranks=[1, 0], tiling=tiling, wire=wire, data_type=DataType.FP32, ids_per_bag=2.0
    )
    assert quick == checked
    assert vars(quick) == vars(checked)
    assert quick.to_json() == checked.to_json()
    assert pickle.loads(pickle.dumps(quick)) == replace(quick, ids_per_bag=2.0) == checked


def test_wires_know_four_formats() -> None:
    assert Wire() == Wire("fp32", "fp32")
    with pytest.raises(ConfigError, match="Wire: got backward='mx4'; expected one of"):
        Wire("bf16", "mx4")
    for distinct in (1, "yes", [True]):
        with pytest.raises(ConfigError, match=r"Wire: got distinct=.*; expected True, False or None"):
            Wire(distinct=distinct)  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [-1, "x"])
def test_ids_per_bag_is_a_number_from_0(ids: object) -> None:
    with pytest.raises(ConfigError, match="got ids_per_bag="):
        ParameterSharding("row_wise", ids_per_bag=ids)  # type: ignore[arg-type]


def test_files_keep_a_plan(tmp_path: Path) -> None:
    plan = whole_plan()
    plan.save(tmp_path / "plan.json")
    loaded = ShardingPlan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.fingerprint() == plan.fingerprint()
    assert loaded.dumps() == (tmp_path / "plan.json").read_text()


def test_a_file_has_one_line_per_table_and_is_json() -> None:
    plan = whole_plan()
    assert json.loads(plan.dumps()) == plan.to_json()
    lines = plan.dumps().splitlines()
    assert sum('"sharding_type"' in line for line in lines) == 4
    changed = plan.replaced("ebc", "a", ParameterSharding("table_wise", tiling=on_rank(0)))
    assert sum(a != b for a, b in zip(lines, changed.dumps().splitlines(), strict=True)) == 1
    assert changed.fingerprint() != plan.fingerprint()
    assert plan.plan["ebc"]["a"].ranks == (1,)


def test_a_person_writes_kind_and_ranks_only(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(
        '{"plan": {"ebc": {"a": {"sharding_type": "table_wise", "ranks": 3}, "b": {"sharding_type": "row_wise"}}}}'
    )
    plan = ShardingPlan.load(tmp_path / "plan.json")
    assert plan.world_size is None
    part = plan.get_plan_for_module("ebc")
    assert part is not None
    assert part["a"].ranks == (3,)
    assert part["b"].ranks is None
    assert part["b"].kernel is None
    assert plan.get_plan_for_module("other") is None


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{]")
    with pytest.raises(ConfigError, match=r"plan\.json is not JSON"):
        ShardingPlan.load(tmp_path / "plan.json")


def one(**item: object) -> dict[str, object]:
    return {"plan": {"ebc": {"t": item}}}


ROW = {"sharding_type": "row_wise"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], r": got \[\]; expected an object with \"plan\"\."),
        ({}, ': got an object without "plan"; expected .*"hosts"'),
        ({"plan": {}, "plans": 1}, ': got unknown "plans"; expected'),
        ({"plan": 3}, ": plan: got 3; expected an object of modules"),
        ({"plan": {"ebc": 3}}, r": plan\.ebc: got 3; expected an object"),
        ({"plan": {"ebc": {"t": 3}}}, r": plan\.ebc\.t: got 3; expected an object with \"sharding_type\""),
        ({"plan": {"a.b": {"t": 3}}}, r': plan\["a\.b"\]\.t: got 3'),
        ({"plan": {}, "version": 2}, ": version: got 2; expected 1, the version that this release reads"),
        ({"plan": {}, "version": True}, ": version: got true"),
        (
            {"plan": {}, "world_size": "3"},
            ': world_size: got "3"; expected a whole number from 1 to 1,048,576',
        ),
        ({"plan": {}, "world_size": 0}, ": world_size: got 0"),
        ({"plan": {}, "world_size": 10**11}, ": world_size: got 100000000000"),
        ({"plan": {}, "hosts": 3}, ": hosts: got 3; expected a list such as"),
        ({"plan": {}, "hosts": ["0-a"]}, r": hosts\[0\]: got \"0-a\""),
        (
            {"plan": {}, "hosts": ["0-99999999999"]},
            r": hosts\[0\]: got \"0-99999999999\"; .* each below 1,048,576",
        ),
        (one(), 't: got an object without "sharding_type"'),
        (one(**ROW, rank=3), 't: got unknown "rank"; expected "sharding_type"'),
        (one(sharding_type="rows"), r"plan\.ebc\.t: .*sharding_type: got 'rows'"),
        (one(sharding_type=["row_wise"]), r"t\.sharding_type: got \[\"row_wise\"\]"),
        (one(**ROW, compute_kernel="x"), "t: .*compute_kernel: got 'x'"),
        (one(**ROW, compute_kernel=["fused"]), r"t\.compute_kernel: got \[\"fused\"\]; expected a string"),
        (one(**ROW, ids_per_bag=True), r"t\.ids_per_bag: got true; expected a number from 0"),
        (one(**ROW, ranks="x"), r"t\.ranks: got \"x\"; expected ranks such as"),
        (one(**ROW, ranks=None), r"t\.ranks: got null"),
        (one(**ROW, data_type="FP33"), r"t\.data_type: got \"FP33\"; expected one of .*BF16"),
        (one(**ROW, wire={"up": 1}), r"t\.wire: got unknown \"up\""),
        (one(**ROW, wire=3), r"t\.wire: got 3"),
        (one(**ROW, wire={"forward": ["fp16"]}), r"t\.wire\.forward: got \[\"fp16\"\]; expected one of"),
        (one(**ROW, tiling=[{"ranks": "0"}]), "expected rows and dim beside tiling"),
        (
            one(**ROW, tiling=[{"ranks": "0"}], rows="7", dim=4),
            r"t\.rows: got \"7\"; expected a whole number",
        ),
        (one(**ROW, tiling={"ranks": "0"}, rows=7, dim=4), r"t\.tiling: got an object .* expected a list"),
        (one(**ROW, tiling=None, rows=7, dim=4), r"t\.tiling: got null"),
        (one(**ROW, tiling=True, rows=7, dim=4), r"t\.tiling: got true"),
        (one(**ROW, tiling=[{"ranks": None}], rows=7, dim=4), r"t\.tiling\[0\]\.ranks: got null"),
        (one(**ROW, tiling=[{"ranks": "0", "rows": [0, 7.5]}], rows=7, dim=4), r"\[0\]\.rows\[1\]: got 7\.5"),
        (
            one(**ROW, tiling=[{"ranks": "0"}], rows=7, dim=4, ranks="1"),
            "got a tiling on ranks 0; expected only ranks='1'",
        ),
    ],
)
def test_json_that_is_no_plan_is_refused(data: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShardingPlan.from_json(data)  # type: ignore[arg-type]


def test_a_data_type_may_be_written_small() -> None:
    plan = ShardingPlan.from_json(one(**ROW, data_type="bf16"))
    assert plan.plan["ebc"]["t"].data_type is DataType.BF16


def test_a_plan_says_what_a_rank_holds() -> None:
    plan = whole_plan().replaced("deep.ec", "d", ParameterSharding("table_wise", tiling=on_rank(0)))
    assert plan.held_by(1) == (
        Held("ebc", "a", (Rectangle(0, 10, 0, 4),), 80),
        Held("ebc", "b", (Rectangle(0, 5, 0, 4),), None),
        Held("deep.ec", "c", (Rectangle(0, 5, 0, 4), Rectangle(5, 10, 2, 4)), None),
    )
    with pytest.raises(ConfigError, match=r"got column_wise without a tiling for table 'd' of module 'deep\.ec'"):
        whole_plan().held_by(0)


MODEL = {"ebc": {"a": (10, 4), "b": (10, 4)}}


def test_a_plan_for_this_model_and_world_passes() -> None:
    plan_of(
        a=ParameterSharding("table_wise", tiling=on_rank(1)),
        b=ParameterSharding("row_wise", tiling=halves(0, 1)),
    ).check(MODEL, 2)


def test_each_misfit_of_plan_and_model_has_its_own_error() -> None:
    a = ParameterSharding("table_wise", tiling=on_rank(1))
    b = ParameterSharding("row_wise", tiling=halves(0, 1))
    for plan, world_size, message in (
        (plan_of(a=a, b=b), 4, "got a plan for 2 ranks; expected one for the 4 ranks here. Plan again"),
        (plan_of(a=a), 2, r"got tables \['a'\]; expected table 'b' of module 'ebc', too"),
        (ShardingPlan({}), 2, "expected module 'ebc' of the model, too"),
        (
            plan_of(a=a, b=b, c=a),
            2,
            r"got table 'c', which module 'ebc' lacks; expected its tables, \['a', 'b'\]",
        ),
        (
            ShardingPlan({**plan_of(a=a, b=b).plan, "more": EmbeddingModuleShardingPlan({"c": a})}),
            2,
            "got module 'more', which the model lacks; expected its embedding modules,",
        ),
        (
            plan_of(a=ParameterSharding("table_wise", tiling=on_rank(1, rows=9)), b=b),
            2,
            "got 9 x 4 cells for table 'a' of module 'ebc'; expected 10 x 4",
        ),
        (plan_of(a=ParameterSharding("table_wise", ranks=[0]), b=b), 2, "got table_wise without a tiling"),
        (
            replace(plan_of(a=ParameterSharding("table_wise", tiling=on_rank(5)), b=b), world_size=None),
            2,
            "on rank 5; expected ranks 0 to 1",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            plan.check(MODEL, world_size)


def test_a_module_without_tables_needs_no_plan() -> None:
    ShardingPlan({}).check({"empty": {}}, 2)


def test_parts_that_know_their_world_tell_the_whole() -> None:
    part = {"a": ParameterSharding("row_wise")}
    knows = EmbeddingModuleShardingPlan(part, world_size=4, hosts=[[0, 1], [2, 3]])
    whole = ShardingPlan({"ebc": knows, "other": EmbeddingModuleShardingPlan(part)})
    assert (whole.world_size, whole.hosts) == (4, ((0, 1), (2, 3)))
    assert "plan for 4 ranks on 2 hosts" in str(knows)
    again = whole.get_plan_for_module("other")
    assert again is not None
    assert (again.world_size, again.hosts) == (4, ((0, 1), (2, 3)))
    assert ShardingPlan.from_json(whole.to_json()) == whole
    for copied in (copy.deepcopy(knows), pickle.loads(pickle.dumps(knows))):
        assert (copied, copied.world_size, copied.hosts) == (knows, knows.world_size, knows.hosts)
    with pytest.raises(ConfigError, match="got a plan for 4 ranks; expected one for the 2 ranks"):
        ShardingPlan({"ebc": knows}).check({}, 2)


def test_parts_of_different_worlds_are_no_plan() -> None:
    part = {"a": ParameterSharding("row_wise")}
    parts = {f"m{n}": EmbeddingModuleShardingPlan(part, world_size=n) for n in (2, 4)}
    with pytest.raises(ConfigError, match=r"got world_size 4 from the plan of module 'm4'; expected 2"):
        ShardingPlan(parts)
    with pytest.raises(ConfigError, match=r"got world_size 2 from the plan of module 'm2'; expected 3"):
        ShardingPlan(parts, 3)
    hosts = EmbeddingModuleShardingPlan(part, world_size=2, hosts=[[0], [1]])
    with pytest.raises(ConfigError, match=r"got hosts .* from the plan of module 'ebc'"):
        ShardingPlan({"ebc": hosts}, 2, [[0, 1]])


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"user": ParameterSharding("row_wise")},
            r"got a ParameterSharding as plan\['user'\]; expected paths",
        ),
        ({"ebc": {"user": "row_wise"}}, r"got a str in plan\['ebc'\]; expected paths"),
    ],
)
def test_what_is_no_plan_of_modules_is_named(plan: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShardingPlan(plan)  # type: ignore[arg-type]


def test_a_plan_of_the_module_by_itself_or_of_the_model_around_it_says_under_which_path_to_put_it() -> None:
    part = EmbeddingModuleShardingPlan({"a": ParameterSharding("table_wise", tiling=on_rank(1))})
    with pytest.raises(ConfigError, match=r"by itself \(''\).* put .*\{'ebc': plan\[''\]\}"):
        ShardingPlan({"": part}).check({"ebc": {"a": (10, 4)}}, 2)
    with pytest.raises(ConfigError, match=r"whose path is ''.* put .*\{'': plan\['ebc'\]\}"):
        ShardingPlan({"ebc": part}).check({"": {"a": (10, 4)}}, 2)


def test_an_unsaid_kernel_stays_unsaid_in_a_file() -> None:
    sharding = ParameterSharding("row_wise")
    assert sharding.kernel is None
    assert "compute_kernel" not in sharding.to_json()
    assert ParameterSharding.from_json("t", sharding.to_json()) == sharding


def test_an_unsaid_wire_stays_unsaid_in_a_file_and_fp32_stays_said() -> None:
    unsaid, said = ParameterSharding("row_wise"), ParameterSharding("row_wise", wire=Wire())
    assert unsaid.wire is None
    assert unsaid != said
    assert "wire" not in unsaid.to_json()
    assert said.to_json()["wire"] == {"forward": "fp32", "backward": "fp32"}
    for sharding in (unsaid, said):
        assert ParameterSharding.from_json("t", sharding.to_json()) == sharding
    with pytest.raises(ConfigError, match="got wire='bf16'; expected a Wire"):
        ParameterSharding("row_wise", wire="bf16")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"stochastic_rounding": False}, r"stochastic_rounding .*fused_params\['stochastic_rounding'\]"),
        ({"stochastic_rounding": True}, r"stochastic_rounding .*fused_params\['stochastic_rounding'\]"),
        ({"bounds_check_mode": 0}, "bounds_check_mode .*on_bad_id="),
        ({"output_dtype": DataType.FP16}, "output_dtype .*set it on the collection"),
    ],
)
def test_a_setting_of_a_sharding_without_effect_is_warned_about_and_not_kept(
    setting: dict[str, object], reason: str
) -> None:
    with pytest.warns(UserWarning, match=f"ParameterSharding: got settings without effect: {reason}") as seen:
        sharding = ParameterSharding("row_wise", "fused", [0, 1], **setting)  # type: ignore[arg-type]
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert sharding == ParameterSharding("row_wise", "fused", [0, 1])
    assert dataclasses.replace(sharding, ranks=[1, 0]).ranks == (1, 0)  # and says nothing again


def test_settings_of_a_sharding_that_hold_anyway_are_taken_in_torchrecs_order() -> None:
    for hbm in (True, False, None):
        sharding = ParameterSharding("row_wise", "fused", [0, 1], None, None, hbm, None, None, None, None)
        assert sharding == ParameterSharding("row_wise", "fused", [0, 1])


def test_key_value_params_are_kept_with_the_kernel_that_reads_them() -> None:
    own, cache = KeyValueParams("/fast"), CacheParams(load_factor=0.3)
    sharding = ParameterSharding("row_wise", "key_value", [0, 1], cache_params=cache, key_value_params=own)
    assert (sharding.cache, sharding.files) == (cache, own)
    assert sharding.to_json()["key_value_params"] == {"ssd_storage_directory": "/fast"}
    assert ParameterSharding.from_json("t", sharding.to_json()) == sharding
    for given in ({"ssd_storage_directory": Path("/fast")}, SimpleNamespace(ssd_storage_directory="/fast", shards=1)):
        again = ParameterSharding("row_wise", "key_value", [0, 1], cache_params=cache, key_value_params=given)
        assert again == sharding
    for kernel in ("fused_uvm_caching", None):
        with pytest.warns(UserWarning, match="key_value_params have no effect with compute_kernel=.*; expected 'key_v"):
            assert ParameterSharding("row_wise", kernel, key_value_params=own).files is None
    for wrong in (object(), {"folder": "/fast"}, {"ssd_storage_directory": ""}, {"ssd_storage_directory": 3}, {}):
        with pytest.raises(
            ConfigError, match=r"key_value_params: got <object|KeyValueParams: got (folder|ssd_storage)"
        ):
            ParameterSharding("row_wise", "key_value", key_value_params=wrong)  # type: ignore[arg-type]


def test_settings_of_a_key_value_store_are_warned_about() -> None:
    with pytest.warns(UserWarning, match="KeyValueParams: got settings without effect: l2_cache_size .*page cache"):
        assert KeyValueParams("/fast", l2_cache_size=4) == KeyValueParams("/fast")


def test_cache_params_are_kept_with_the_kernel_that_reads_them() -> None:
    own = CacheParams(CacheAlgorithm.LFU, 0.3, 1e9)
    sharding = ParameterSharding("row_wise", "fused_uvm_caching", [0, 1], cache_params=own)
    assert sharding.cache == own
    assert sharding.to_json()["cache_params"] == {
        "algorithm": "lfu",
        "load_factor": 0.3,
        "reserved_memory": 1e9,
    }
    assert ParameterSharding.from_json("t", sharding.to_json()) == sharding
    assert dataclasses.replace(sharding, ranks=[1, 0]).cache == own
    words = {"algorithm": "lfu", "load_factor": 0.3, "reserved_memory": 1e9}
    assert ParameterSharding("row_wise", "fused_uvm_caching", [0, 1], cache_params=words) == sharding
    theirs = SimpleNamespace(algorithm=SimpleNamespace(name="LFU"), load_factor=0.3, reserved_memory=1e9, stats=None)
    assert ParameterSharding("row_wise", "fused_uvm_caching", [0, 1], cache_params=theirs) == sharding
    with pytest.warns(UserWarning, match="cache_params have no effect with compute_kernel='fused'; expected"):
        assert ParameterSharding("row_wise", "fused", cache_params=own).cache is None
    with pytest.warns(UserWarning, match="no effect with compute_kernel=None"):
        assert ParameterSharding("row_wise", cache_params=own).cache is None
    for wrong in (object(), {"load": 0.2}, {"load_factor": 2.0}):
        with pytest.raises(ConfigError, match=r"got (cache_params|load_factor)=|cache_params: got "):
            ParameterSharding("row_wise", "fused_uvm_caching", cache_params=wrong)  # type: ignore[arg-type]
