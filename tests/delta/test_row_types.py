"""Published rows in the type that is served: the follower's rows are those of the quantized model."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.delta.test_replay import parts, plan
from tests.sharding.managed_models import build, sizes_of, train
from tests.storage.cached_tables import batch, ebc, output
from tilerec.checkpoint import load, save
from tilerec.comms.process import ProcessGroupComms
from tilerec.delta import DeltaLog, DeltaWriter, EntryName, Follower
from tilerec.delta.row_history import row_history
from tilerec.errors import ConfigError, InputError
from tilerec.ops.quantized.row_format import dequantize_rows, quantize_rows
from tilerec.parallel.shard import shard
from tilerec.planner.helpers import column_wise, table_wise
from tilerec.quantized import quantize_tables
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.testing.ranks import Ranks

SPEC = RowWiseAdagrad(lr=0.1)
Pool = Callable[[int], Ranks]


def step(module: nn.Module, dice: random.Random) -> None:
    output(module, batch(dice)).square().sum().backward()


def same(target: nn.Module, model: Any, **types: Any) -> None:
    want = quantize_tables(copy.deepcopy(model), **types).state_dict()
    got = target.state_dict()
    assert set(got) == set(want)
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize(
    "types", [{"dtype": "int8"}, {"dtype": "int4", "per_table": {"a": "fp16", "c": "int2"}}], ids=["int8", "mixed"]
)
def test_a_quantized_model_follows_a_log_of_its_row_types(tmp_path: Path, types: Any) -> None:
    module, dice = ebc(SPEC), random.Random(5)
    options = {"row_type": types["dtype"], "per_table": types.get("per_table")}
    writer = DeltaWriter(tmp_path, module, **options)
    writer.publish(0)
    target = quantize_tables(ebc(None), **types)
    follower = Follower(tmp_path, target)
    for number in (1, 2, 3):
        step(module, dice)
        if number == 2:  # another process, which knows nothing
            writer.close()
            writer = DeltaWriter(tmp_path, module, **options)
        writer.publish(number)
        follower.poll()
        same(target, module, **types)
    entry = DeltaLog(tmp_path).open(EntryName(2, False))
    assert 0 < entry.rows < 200


def test_the_history_of_a_quantized_row_has_the_numbers_that_it_stands_for(tmp_path: Path) -> None:
    module = ebc(SPEC)
    writer = DeltaWriter(tmp_path, module, row_type="int4", per_table={"c": "fp16"})
    writer.publish(0)
    for name, row_type in (("a", "int4"), ("c", "fp16")):
        weight = module.embedding_bags[name].weight.detach()  # type: ignore[union-attr,index]
        (found,) = row_history(DeltaLog(tmp_path), f"embedding_bags.{name}.weight", 3)
        assert found.columns == (0, weight.shape[1])
        want = weight[3:4].half() if row_type == "fp16" else dequantize_rows(quantize_rows(weight[3:4], 4), 8, 4)
        assert torch.equal(found.values, want[0])


def test_a_budget_counts_quantized_rows_after_a_restart(tmp_path: Path) -> None:
    module, dice = ebc(SPEC), random.Random(5)
    writer = DeltaWriter(tmp_path, module, max_bytes=300, row_type="int8")
    writer.publish(0)
    step(module, dice)
    assert writer.publish(1).left_out
    writer.close()
    writer = DeltaWriter(tmp_path, module, max_bytes=300, row_type="int8")
    while writer.publish(2).left_out:
        pass
    target = quantize_tables(ebc(None), "int8")
    Follower(tmp_path, target).poll()
    same(target, module, dtype="int8")


def publish_on_ranks(folder: Path) -> None:
    group = ProcessGroupComms()
    module = build("lru and lfu, shared rows")
    rows = {**plan(1, group.size)["_embedding_module"]}
    shard(module, {"_embedding_module": rows}, group, exact=True)
    writer = DeltaWriter(folder / "log", module, group=group, row_type="int8")
    writer.publish(0)
    train(module, group, sizes_of(group.size), range(2))
    writer.publish(1)
    save(folder / "whole", parts(module), group=group)


def test_ranks_publish_quantized_rows(pool: Pool, tmp_path: Path) -> None:
    pool(2).run(publish_on_ranks, tmp_path)
    module = build("lru and lfu, shared rows")
    load(tmp_path / "whole", parts(module))
    want = quantize_tables(copy.deepcopy(module), "int8").state_dict()
    got = {name: torch.empty_like(value) for name, value in want.items()}
    Follower(tmp_path / "log", got, partial=True).poll()
    for name, value in want.items():
        if name.rsplit(".", 1)[-1] in ("weight", "ids", "used"):
            assert torch.equal(got[name], value), name


def cut_by_columns(folder: Path) -> str:
    group = ProcessGroupComms()
    module = ebc(SPEC)
    shard(module, {"": {"a": column_wise([0, 1]), "b": column_wise([0, 1]), "c": table_wise(rank=0)}}, group)
    with pytest.raises(ConfigError) as refused:
        DeltaWriter(folder, module, group=group, row_type="int8").publish(0)
    return str(refused.value)


def test_tables_that_are_cut_by_columns_are_refused(pool: Pool, tmp_path: Path) -> None:
    assert all("Cut the table by rows" in text for text in pool(2).run(cut_by_columns, tmp_path))


def test_what_cannot_be_quantized_is_refused_and_published_once_it_can(tmp_path: Path) -> None:
    module, dice = ebc(SPEC), random.Random(5)
    with pytest.raises(ConfigError, match="unknown tables"):
        DeltaWriter(tmp_path, module, per_table={"z": "int8"})
    writer = DeltaWriter(tmp_path, module, row_type="int8")
    writer.publish(0)
    step(module, dice)
    with torch.no_grad():
        kept = module.embedding_bags["b"].weight[7].clone()
        module.embedding_bags["b"].weight[7] = float("nan")
    with pytest.raises(InputError, match="Table 'b': got nan"):
        writer.publish(1)
    with torch.no_grad():
        module.embedding_bags["b"].weight[7] = kept
    writer.publish(1)
    target = quantize_tables(ebc(None), "int8")
    Follower(tmp_path, target).poll()
    same(target, module, dtype="int8")
