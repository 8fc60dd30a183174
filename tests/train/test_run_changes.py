"""Runs that go on with another model or optimizer: the run file states the changes, and the refusal names its keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from torch import Tensor, nn

from tests.train.test_run_checkpoints import EVERY, StopAfter, Stopped, config, same, weights
from tilerec.checkpoint import Changes, load
from tilerec.checkpoint.contents import SavedContents
from tilerec.checkpoint.manager import read_metadata
from tilerec.comms.process import ProcessGroupComms
from tilerec.data.columns import Columns, IdColumn, LabelColumn, TableRows
from tilerec.errors import ConfigError
from tilerec.recipes.files import FilesData
from tilerec.recipes.model import DLRMConfig, MLPConfig
from tilerec.spec.optimizer import SGD, Adam
from tilerec.testing import Ranks
from tilerec.train.config import CheckpointConfig, RunConfig, TrainConfig
from tilerec.train.loop import train
from tilerec.train.override import override_all, settings
from tilerec.train.run_file import run_of_toml, toml_of_run
from tilerec.train.run_metadata import RunMetadata

WIDER = Changes(resize=["model.*", "tables.*"], drop=["dense.*"])
BAGS = "sparse_arch.embedding_bag_collection.embedding_bags"


def trained(own: RunConfig, group: ProcessGroupComms | None = None, stop: int = 0) -> dict[str, Tensor]:
    """Train to the end, or to a step; return the weights."""
    if not stop:
        return weights(train(own, group=group).model, group)
    with pytest.raises(Stopped):
        train(own, group=group, watchers=[StopAfter(stop)])
    return {}


def resumed(folder: Path | str, changes: Changes = WIDER, dim: int = 8) -> RunConfig:
    own = config(folder, resume=True, changes=changes)
    assert isinstance(own.model, DLRMConfig)
    return replace(own, model=replace(own.model, embedding_dim=dim))


def test_a_wider_model_goes_on_and_a_second_start_has_the_bits_of_one(tmp_path: Path) -> None:
    """Columns that both have are loaded; the checkpoints of the wider run are loaded as they are."""
    for name in ("one", "two"):
        trained(config(tmp_path / name), stop=EVERY + 1)
    before = nn.ParameterDict()
    name = f"{BAGS}.feature_0_table.weight"
    before[name.replace(".", "_")] = torch.zeros(40, 4)
    saved = tmp_path / "one" / "checkpoints" / f"step-{EVERY}"
    rename = {f"model.{name}": f"model.{name.replace('.', '_')}"}
    load(saved, {"model": before}, changes=Changes(rename=rename, drop=drop_all_but(saved, f"model.{name}")))
    want = trained(resumed(tmp_path / "one"))
    assert want[name].shape == (40, 8)
    # The run has gone on from the saved columns, by eight small steps.
    assert (want[name][:, :4] - before[name.replace(".", "_")]).abs().max() < 0.5
    trained(resumed(tmp_path / "two"), stop=2 * EVERY + 1)
    assert read_metadata(tmp_path / "two" / "checkpoints" / f"step-{2 * EVERY}")["changes"] == WIDER.note["changes"]
    same(trained(resumed(tmp_path / "two")), want)


def drop_all_but(path: Path, name: str) -> list[str]:
    return [other for other in SavedContents(path).manifest.tensors if other.startswith("model.") and other != name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            Changes(),
            r"0_table.weight .*\[40, 4\]; expected .*\[40, 8\].* in a run file checkpoint.changes.resize",
        ),
        (Changes(resize=["model.*", "tables.*"]), r"exp_avg .* dense optimizer.* checkpoint.changes.drop = \[\"dense"),
    ],
)
def test_a_wider_model_is_refused_by_the_key_that_allows_it(tmp_path: Path, changes: Changes, message: str) -> None:
    trained(config(tmp_path), stop=EVERY + 1)
    with pytest.raises(ConfigError, match=message):
        trained(resumed(tmp_path, changes))


def wider_on_ranks(folder: str, changes: Changes) -> list[tuple[int, ...]] | str:
    try:
        found = trained(resumed(folder, changes), ProcessGroupComms())
    except ConfigError as error:
        return str(error)
    return [tuple(value.shape) for name, value in found.items() if name.startswith(BAGS)]


def saved_on_ranks(folder: str) -> None:
    trained(config(folder), ProcessGroupComms())


def test_ranks_plan_a_wider_model_anew(tmp_path: Path) -> None:
    """The plan of the checkpoint is one for other tables."""
    with Ranks(2) as ranks:
        ranks.run(saved_on_ranks, str(tmp_path))
        for text in ranks.run(wider_on_ranks, str(tmp_path), Changes()):
            assert "in a run file checkpoint.changes.resize" in text
    with Ranks(2) as ranks:  # a run that is refused ends its group
        assert ranks.run(wider_on_ranks, str(tmp_path), WIDER) == [[(40, 8), (20, 8)]] * 2


def with_optimizers(own: RunConfig, tables: Any, dense: Any) -> RunConfig:
    return replace(own, train=replace(own.train, embedding_optimizer=tables, dense_optimizer=dense))


def test_other_optimizers_begin_anew(tmp_path: Path) -> None:
    def own(**checkpoint: Any) -> RunConfig:
        return with_optimizers(config(tmp_path, resume=True, **checkpoint), Adam(lr=0.01), SGD(lr=0.01))

    trained(config(tmp_path), stop=EVERY + 1)
    with pytest.raises(ConfigError, match=r"without tables.*exp_avg.*checkpoint\.changes\.keep.*'tables\.\*'"):
        trained(own())
    with pytest.raises(ConfigError, match=r"the settings amsgrad, .* dense optimizer; .*, SGD\. Set .*\[\"dense"):
        trained(own(changes=Changes(drop=["tables.*"])))
    trained(own(changes=Changes(drop=["tables.*", "dense.*"])))
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def files(folder: Path, rows: int, ids: str = "rows", **checkpoint: Any) -> RunConfig:
    columns = Columns(
        labels=(LabelColumn("click"),), ids=(IdColumn("item"),), tables=(TableRows("item", rows, ids=ids),)  # type: ignore[arg-type]
    )  # fmt: skip
    return RunConfig(
        "grown",
        FilesData((str(folder / "clicks.parquet"),), columns),
        MLPConfig(embedding_dim=4, layers=(4,)),
        TrainConfig(batch_size=16, max_steps=4),
        log_dir=str(folder / ids),
        checkpoint=CheckpointConfig(**{"every": 2, **checkpoint}),
    )


@pytest.mark.parametrize("ids", ["rows", "hash"])
def test_a_table_of_ids_with_own_rows_may_grow(tmp_path: Path, ids: str) -> None:
    """Hashed ids would have other rows."""
    items = pa.array([i % 9 for i in range(200)])
    parquet.write_table(pa.table({"item": items, "click": [i % 2 for i in range(200)]}), tmp_path / "clicks.parquet")
    first = files(tmp_path, 10, ids)
    train(replace(first, train=replace(first.train, max_steps=2)))
    changes = Changes(resize=["model.*item*", "tables.*item*"])
    with pytest.raises(ConfigError, match=r"data\.columns\.tables\[0\]\.rows = 12; expected 10|\[10, 4\]; expected"):
        train(files(tmp_path, 12, ids, resume=True))
    grown = files(tmp_path, 12, ids, resume=True, changes=changes)
    if ids == "hash":
        with pytest.raises(ConfigError, match=r"data\.columns\.tables\[0\]\.rows = 12; expected 10"):
            train(grown)
    else:
        found = weights(train(grown).model, None)
        assert [tuple(value.shape) for name, value in found.items() if "item" in name] == [(12, 4)]


CHANGES = Changes({"model.a": "model.b", "model.c.d": "model.e"}, ("dense.*",), (), ("model.*", "tables.*"))


def test_run_files_and_the_command_line_state_changes() -> None:
    own = config("x", changes=CHANGES)
    text = toml_of_run(own)
    assert run_of_toml(text) == own
    assert '"model.c.d" = "model.e"' in text
    given = ("rename=model.a=model.b, model.c.d=model.e", "drop=dense.*", "resize=model.*,tables.*")
    found = override_all(config("x"), [f"checkpoint.changes.{one}" for one in given])
    assert found == own
    assert settings(found)["checkpoint.changes.rename"] == {"model.a": "model.b", "model.c.d": "model.e"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: Changes(drop=["windows.*"]), r"checkpoint\.changes\.drop: got 'windows\.\*'; expected names that"),
        (lambda: Changes(rename={"model.a": "b"}), r"checkpoint\.changes\.rename: got 'b'; expected names that"),
    ],
)
def test_names_of_other_parts_are_refused(change: Callable[[], Changes], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointConfig(changes=change())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("keep = 3", r"checkpoint\.changes\.keep: got 3; expected a list of words"),
        ('rename = ["a"]', r"checkpoint\.changes\.rename: got .*; expected a table of texts, such as old=new"),
        ('rename = {"model.a" = 3}', r"checkpoint\.changes\.rename\.model\.a: got 3; expected text"),
        ('resise = ["model.*"]', r"checkpoint\.changes\.resise: got an unknown setting.*resize"),
    ],
)
def test_mistakes_in_a_run_file_are_named(line: str, message: str) -> None:
    text = toml_of_run(config("x"))
    start = text.index("[checkpoint.changes]")
    end = text.index("[delta]")
    with pytest.raises(ConfigError, match=message):
        run_of_toml(f"{text[:start]}[checkpoint.changes]\n{line}\n\n{text[end:]}")
    with pytest.raises(ConfigError, match=r"changes\.rename: got \"model\.a\"; expected a table of texts"):
        override_all(config("x"), ["checkpoint.changes.rename=model.a"])


def test_a_checkpoint_without_the_types_of_ids_goes_on(tmp_path: Path) -> None:
    """Earlier versions did not save them."""
    parquet.write_table(pa.table({"item": ["a", "b"] * 50, "click": [0, 1] * 50}), tmp_path / "clicks.parquet")
    own = files(tmp_path, 10, "hash")
    own = replace(own, data=own.data.as_opened(own.data.open()))
    found = RunMetadata(own, 1)
    before = found.settings()
    assert before.pop("data.columns.ids[0].type") == "text"
    found.check("step-2", {"settings": before}, None)
    before["data.columns.ids[0].type"] = "integer"
    with pytest.raises(ConfigError, match=r"ids\[0\]\.type = text; expected integer"):
        found.check("step-2", {"settings": before}, None)
    del before["data.columns.ids[0].kind"]
    with pytest.raises(ConfigError, match=r"ids\[0\]\.kind = single; expected nothing"):
        found.check("step-2", {"settings": before}, None)
