"""From counted ids to a plan with hot rows: statistics, plan files, the report, the explanation, and who gets none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tilerec.comms.group import Group
from tilerec.data.ids import BatchIds
from tilerec.data.statistics import Statistics, gather
from tilerec.errors import ConfigError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.shard import shard
from tilerec.planner import decision
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.workload import Skew
from tilerec.planner.decision import decide
from tilerec.planner.planner import EmbeddingShardingPlanner
from tilerec.planner.report import what_if
from tilerec.planner.report.explanation import Explainer
from tilerec.planner.report.plan_report import PlanReport
from tilerec.planner.request import PlanRequest
from tilerec.planner.tables import PlannedTable
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.cache import CacheParams
from tilerec.spec.hot_rows import HotRows
from tilerec.spec.key_value import KeyValueParams
from tilerec.spec.optimizer import SGD, Adagrad
from tilerec.spec.plan import EmbeddingComputeKernel, ParameterSharding, ShardingPlan, Wire
from tilerec.spec.table import DataType, EmbeddingConfig
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.testing.virtual import run_virtual_ranks

ROWS, SAMPLES, LENGTH = 20_000, 500, 20
SLOW = Topology(4, "cpu", intra_host_bw=1e4)
ORDER = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3))
EACH: dict[str, Any] = {"sharding_types": ["row_wise"]}
TABLE = PlannedTable(
    (("", "t"),), ROWS, 64, DataType.FP32, ("f",), SGD(0.1), pooled=False, wire=Wire(distinct=False)
)  # fmt: skip
CONFIG = EmbeddingConfig(ROWS, 64, "t", feature_names=["f"])


def batch(seed: int) -> KeyedJaggedTensor:
    weights = torch.arange(1, ROWS + 1, dtype=torch.float64) ** -1.3
    generator = torch.Generator().manual_seed(seed)
    ids = torch.multinomial(weights, SAMPLES * LENGTH, replacement=True, generator=generator)
    return KeyedJaggedTensor(["f"], ORDER[ids], lengths=torch.full((SAMPLES,), LENGTH))


class Data:
    batch_size = SAMPLES

    def __init__(self, sparse: KeyedJaggedTensor) -> None:
        self.sparse_features = sparse


def statistics(hot: int = 300) -> Statistics:
    source: Any = BatchIds(lambda: iter([Data(batch(s)) for s in range(4)]), "made")  # type: ignore[misc,list-item]
    return gather(source, hot=hot)


def planner(skew: Skew | None, **more: Any) -> EmbeddingShardingPlanner:
    limits = ParameterConstraints(pooling_factors=[LENGTH], skew=skew, **{**EACH, **more})
    return EmbeddingShardingPlanner(SLOW, batch_size=SAMPLES, constraints={"t": limits})


def model() -> EmbeddingCollection:
    module = EmbeddingCollection([CONFIG], device=torch.device("meta"))
    apply_optimizer_in_backward(SGD(lr=0.1), module.parameters())
    return module


def test_ids_that_statistics_name_become_hot_rows_of_a_plan_in_a_file(tmp_path: Path) -> None:
    statistics().save(tmp_path / "stats.json")
    found = Statistics.load(tmp_path / "stats.json")
    limits = found.constraints([CONFIG])["t"]
    assert limits.skew is not None
    assert set(limits.skew.hot[:50]) & set(ORDER[:50].tolist()) >= set(ORDER[:20].tolist())
    assert ParameterConstraints.from_json("t", limits.to_json()).skew == limits.skew
    plan = planner(limits.skew).plan([TABLE])
    sharding = plan.plan[""]["t"]
    assert sharding.hot is not None
    assert 0 < len(sharding.hot) <= 300
    assert sharding.hot == HotRows(np.array(limits.skew.hot[: len(sharding.hot)]))
    plan.save(tmp_path / "plan.json")
    loaded = ShardingPlan.load(tmp_path / "plan.json")
    assert loaded.plan[""]["t"].hot == sharding.hot
    assert plan.report is not None
    assert plan.report.is_of(loaded)
    note = next(note for note in plan.report.notes if "hot rows" in note)
    assert note.startswith(f"1 of 1 tables have {len(sharding.hot):,} hot rows on every rank: with them a rank sends ")
    assert note.endswith(" less in a step")
    request = planner(limits.skew).request([TABLE])
    text = Explainer(request).explanation("t")
    assert text.chosen.option == f"rows over 4 ranks, {len(sharding.hot) / ROWS:.2%} of rows on each"
    assert plan.report.tables[0].option == text.chosen.option
    assert max(float(way.option.split()[-5][:-1]) for way in text.considered if "on each" in way.option) == 1.5
    assert any("Its hot ids are known. In ranges of rows on all ranks, a rank sends" in line for line in text.notes)
    assert text.curve[-1] == (ROWS, 1.0)

    def live(group: Group) -> int:
        module = shard(model(), plan, group)
        torch.cat([own.values() for own in module(batch(group.rank)).values()]).sum().backward()
        return len(module._tables["t"].tiling.head.hot)

    assert run_virtual_ranks(4, live) == [len(sharding.hot)] * 4


@pytest.mark.parametrize("ordered", [False, True], ids=["named", "in order"])
def test_a_plan_has_hot_rows_of_a_table_in_files_which_its_cache_does_not_read(tmp_path: Path, ordered: bool) -> None:
    skew = Skew(ROWS, 1.3, ordered=ordered, hot=() if ordered else ORDER[:200].numpy())
    files: dict[str, Any] = {
        "compute_kernels": ["key_value"], "cache_params": CacheParams(load_factor=0.01),
        "key_value_params": KeyValueParams(str(tmp_path)),
    }  # fmt: skip
    made = planner(skew, **files)
    plan = made.plan([TABLE])
    sharding = plan.plan[""]["t"]
    assert sharding.hot is not None
    assert sharding.kernel is EmbeddingComputeKernel.KEY_VALUE
    hot = sharding.hot.ids.tolist()
    assert hot == (list(range(len(hot))) if ordered else sorted(ORDER[: len(hot)].tolist()))
    assert plan.report is not None
    assert any(note.startswith(f"1 of 1 tables have {len(hot):,} hot rows on every rank") for note in plan.report.notes)
    assert plan.report.bound_s <= plan.report.cost_s
    assert made.price([TABLE], plan).seconds == pytest.approx(plan.report.cost_s)
    found = Explainer(made.request([TABLE])).explanation("t")
    assert found.considered[0].option == f"rows over 4 ranks, cached, {len(hot) / ROWS:.2%} of rows on each"
    bare = replace(plan, plan={"": {"t": replace(sharding, hot=None, tiling=sharding.tiling.bare)}})  # type: ignore[union-attr]
    assert made.price([TABLE], plan).seconds < made.price([TABLE], bare).seconds

    def live(group: Group) -> tuple[int, int]:
        module = shard(model(), plan, group)
        ids = batch(group.rank)
        torch.cat([own.values() for own in module(ids).values()]).sum().backward()
        return module.cache_stats()["t"].ids, int(torch.isin(ids.values(), torch.tensor(hot)).sum())

    counts = run_virtual_ranks(4, live)
    assert sum(ids for ids, _ in counts) == 4 * SAMPLES * LENGTH - sum(found for _, found in counts)


def test_changes_of_a_large_plan_behind_caches_are_left_out_with_hot_rows_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In device memory alone, which they would be planned for, there is no such plan."""
    files: dict[str, Any] = {
        "compute_kernels": ["key_value"], "cache_params": CacheParams(load_factor=0.01),
        "key_value_params": KeyValueParams(str(tmp_path)),
    }  # fmt: skip
    skew = Skew(ROWS, 1.3, hot=ORDER[:200].numpy())
    report = planner(skew, **files).plan([TABLE]).report
    assert report is not None
    assert report.tables[0].option == "rows over 4 ranks, cached, 1.00% of rows on each"
    monkeypatch.setattr(what_if, "LARGE", 0)
    assert {change.outcome for change in report.what_would_help()} == {what_if.LEFT_OUT}


def cost_of(request: PlanRequest) -> int:
    found = decide(request)
    assert found.priced is not None
    assert found.bound <= found.priced.cost_ps
    return found.priced.cost_ps


def test_a_plan_of_few_tables_costs_no_more_because_hot_ids_have_more_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """One table of bags and eight of sequences on eight GPUs: the search of all options alone ends at a dearer plan."""
    each = Wire(distinct=False)
    tables = [PlannedTable((("", "b"),), 285_082, 16, DataType.FP32, ("b",), Adagrad(0.1), wire=each)] + [
        PlannedTable((("", f"s{i}"),), 83_084, 64, DataType.FP32, (f"s{i}",), Adagrad(0.1), pooled=False, wire=each)
        for i in range(8)
    ]
    limits = {
        table.key: ParameterConstraints(
            pooling_factors=[100 if table.pooled else 50],
            skew=Skew(table.rows, 1.3 if table.pooled else 1.2, hot=np.arange(1000)),
        )
        for table in tables
    }
    made = EmbeddingShardingPlanner(Topology.preset("a100"), batch_size=8192, constraints=limits)
    cost = cost_of(made.request(tables))
    monkeypatch.setattr(decision, "MOST_PIECES_SEARCHED_TWICE", 0)
    assert cost < cost_of(made.request(tables))


def test_tables_without_counted_rows_of_their_own_get_no_hot_rows() -> None:
    """Managed collision gives rows to other ids, raw values are no rows, and first rows need no names."""
    skew = Skew(ROWS, 1.3, hot=ORDER[:200].numpy())
    for managed in (False, True):
        plan = planner(skew).plan([replace(TABLE, managed=managed)])
        assert bool(plan.plan[""]["t"].hot) != managed
    one = statistics().features["f"]
    for rows, table_rows in ((True, True), (False, False)):
        known = one.skew(ROWS, table_rows=table_rows)
        assert known is not None
        assert bool(known.hot) == rows


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"ranks": "0-1"}, "it takes all 4 ranks, but the table may only use ranks 0-1"),
        ({"hosts": [1]}, "it takes all 4 ranks, but the table may only use ranks 2-3"),
        ({"max_ranks": 2}, "it takes 4 ranks, and max_ranks is 2"),
        ({"max_ranks": 4}, ""),
    ],
    ids=["ranks", "hosts", "two ranks", "all ranks"],
)
def test_a_table_that_some_ranks_must_not_hold_has_no_hot_rows(limits: dict[str, Any], reason: str) -> None:
    """All ranks would have copies of its hot rows."""
    topology = Topology(4, "cpu", local_world_size=2, intra_host_bw=1e4, inter_host_bw=1e4)
    given = ParameterConstraints(pooling_factors=[LENGTH], skew=Skew(ROWS, 1.3, hot=ORDER[:300].numpy()), **limits)
    made = EmbeddingShardingPlanner(topology, batch_size=SAMPLES, constraints={"t": given})
    sharding = made.plan([TABLE]).plan[""]["t"]
    assert sharding.tiling is not None
    assert bool(sharding.hot) == (not reason)
    assert len(sharding.tiling.ranks()) <= (2 if reason else 4)
    considered = Explainer(made.request([TABLE])).explanation("t").considered
    heads = [way for way in considered if "of rows on each" in way.option and way.option.startswith("rows x 2")]
    assert len(heads) == 4  # 10, 40, 200 and 300 rows
    assert {way.ruled_out for way in heads} == {reason}


def test_statistics_of_a_longer_table_are_refused_by_name() -> None:
    short = EmbeddingConfig(100, 64, "t", feature_names=["f"])
    with pytest.raises(ConfigError, match=r"got id \d+ of feature 'f'; expected row numbers of table 't', 0 to 99"):
        statistics().constraints([short])
    with pytest.raises(ConfigError, match=r"Table 't': got the hot id \d+; expected ids of its 100 rows"):
        planner(Skew(100, 1.0, hot=ORDER[:50].numpy())).plan([short])


def given(hot: HotRows | None, tiled: bool = False) -> ParameterSharding:
    tiling = Tiling.of("t", ROWS, 64, [(k * ROWS // 4, (k + 1) * ROWS // 4, 0, 64, k) for k in range(4)])
    return ParameterSharding("row_wise", tiling=tiling if tiled else None, wire=Wire(distinct=False), hot=hot)


@pytest.mark.parametrize("tiled", [False, True], ids=["by its type", "tiled"])
@pytest.mark.parametrize("way", ["pin", "fixed"])
def test_hot_rows_of_a_given_sharding_count_in_memory_and_price(way: str, tiled: bool) -> None:
    def report(hot: HotRows | None) -> PlanReport:
        own: dict[str, Any] = {}
        if way == "fixed":
            own["fixed"] = {"": {"t": given(hot, tiled)}}
        else:
            own["constraints"] = {"t": ParameterConstraints(sharding=given(hot, tiled))}
        found = EmbeddingShardingPlanner(SLOW, batch_size=SAMPLES, **own).plan([TABLE]).report
        assert found is not None
        return found

    hot = HotRows(ORDER[:1000].numpy())
    bare, made = report(None), report(hot)
    more = [after - before for before, after in zip(bare.memory_per_rank, made.memory_per_rank, strict=True)]
    assert min(more) >= 1000 * 64 * 4
    assert any(note.startswith("1 of 1 tables have 1,000 hot rows") for note in made.notes)
    assert made.cost_s != bare.cost_s
    with pytest.raises(ConfigError, match="Table 't': got the hot id 20000; expected ids of its 20,000 rows"):
        report(HotRows([ROWS]))


def test_a_plan_with_hot_rows_has_the_price_of_its_file(tmp_path: Path) -> None:
    made = planner(Skew(ROWS, 1.3, hot=ORDER[:200].numpy()))
    plan = made.plan([TABLE])
    assert plan.plan[""]["t"].hot
    plan.save(tmp_path / "plan.json")
    again = ShardingPlan.load(tmp_path / "plan.json")
    assert made.price([TABLE], again).seconds == made.price([TABLE], plan).seconds
    assert again.plan[""]["t"].tiling == plan.plan[""]["t"].tiling
    assert Explainer(made.request([TABLE])).explanation("t").is_in(again)
    assert plan.report is not None
    plan.report.save(tmp_path / "report.json")
    for report in (plan.report, PlanReport.load(tmp_path / "report.json")):
        assert report.is_of(plan)
        assert report.is_of(again)
