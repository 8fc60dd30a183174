"""Run files: every run survives the round trip, and a mistake is named by file, setting and next move."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilerec.data.dataset import Dataset
from tilerec.data.file_list import FilePath
from tilerec.errors import ConfigError, FileError
from tilerec.recipes.data import CriteoData, MovieLensData, SyntheticData
from tilerec.recipes.model import DLRMConfig, DotConfig
from tilerec.recipes.runs import synthetic
from tilerec.spec.optimizer import SGD, SPECS, Adagrad, Adam, RowWiseAdagrad
from tilerec.train.config import DataConfig, ParallelConfig, RunConfig, TrainConfig
from tilerec.train.run_file import read_run_file, run_of_toml, toml_of_run, write_run_file

SMALL = """
[data]
kind = "synthetic"
num_rows = [30, 20]

[model]
kind = "dlrm"
"""


@dataclass(frozen=True)
class Part:
    """A record inside of a config."""

    name: str
    size: int = 3
    limit: float | None = None


@dataclass(frozen=True)
class OwnData(DataConfig):
    """A user's own source, with every form that a field may have."""

    parts: tuple[Part, ...]
    main: Part = Part("main")
    mode: Literal["fast", "slow"] = "fast"
    pair: tuple[int, float] = (1, 2.0)
    words: tuple[str, ...] = ()
    seed: int | None = 7
    files: tuple[FilePath, ...] = ()

    def open(self) -> Dataset:
        raise AssertionError


texts = st.text(st.characters(codec="utf-8"), max_size=8)
wholes = st.integers(-(2**63), 2**63 - 1)
counts = st.integers(1, 2**40)
numbers = st.floats(allow_nan=False)
parts = st.builds(Part, name=texts, size=wholes, limit=st.none() | numbers)
own = st.builds(
    OwnData,
    parts=st.lists(parts, max_size=3).map(tuple),
    main=parts,
    mode=st.sampled_from(["fast", "slow"]),
    pair=st.tuples(wholes, numbers),
    words=st.lists(texts, max_size=3).map(tuple),
    seed=st.none() | wholes,
    files=st.lists(texts, max_size=2).map(tuple),
)
builtin = st.one_of(
    st.builds(SyntheticData, num_rows=st.lists(wholes, max_size=4).map(tuple), bias=numbers),
    st.builds(MovieLensData, path=texts, on_bad_row=st.sampled_from(["error", "skip"])),
    st.builds(CriteoData, path=texts, num_rows=st.tuples(wholes)),
)
optimizers = st.builds(
    lambda name, lr, rounding: SPECS[name](lr=lr, stochastic_rounding=rounding),
    st.sampled_from(sorted(SPECS)),
    st.floats(0, 10),
    st.booleans(),
)
runs = st.builds(
    RunConfig,
    name=texts,
    data=own | builtin,
    model=st.builds(DLRMConfig, over_arch=st.lists(counts, max_size=3).map(tuple), init_bound=numbers)
    | st.builds(DotConfig, embedding_dim=counts),
    train=st.builds(
        TrainConfig,
        batch_size=counts,
        decay_to=st.floats(0, 1),
        seed=st.integers(0, 2**63 - 1),
        embedding_optimizer=optimizers,
        dense_optimizer=optimizers,
    ),
    log_dir=texts,
    parallel=st.builds(ParallelConfig, plan=texts, exact=st.booleans())
    | st.builds(ParallelConfig, sharding=st.sampled_from(["row_wise", "table_wise"])),
)


@given(runs)
def test_every_run_is_read_back_equal(run: RunConfig) -> None:
    assert run_of_toml(toml_of_run(run)) == run


def test_absent_settings_have_their_defaults_and_the_name_is_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "clicks.toml"
    path.write_text(SMALL)
    expected = RunConfig("clicks", SyntheticData(num_rows=(30, 20)), DLRMConfig(), TrainConfig())
    assert read_run_file(path) == expected


def test_a_whole_number_is_a_number_and_a_kind_is_a_short_name_or_a_class(tmp_path: Path) -> None:
    run = run_of_toml(
        f'[data]\nkind = "{__name__}:OwnData"\nparts = [{{name = "a", limit = 1}}]\nseed = "none"\n'
        '[model]\nkind = "dot"\n[train]\nembedding_optimizer = {kind = "RowWiseAdagrad", lr = 1}\n'
    )
    assert run.data == OwnData(parts=(Part("a", limit=1.0),), seed=None)
    assert run.model == DotConfig()
    assert run.train.embedding_optimizer == RowWiseAdagrad(lr=1.0)
    assert type(run.train.embedding_optimizer.lr) is float


def test_paths_begin_at_the_folder_of_the_file_and_urls_stay(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        f'log_dir = "logs"\n[data]\nkind = "{__name__}:OwnData"\nparts = []\n'
        'files = ["x/y", "s3://b/k", "/z"]\n[model]\nkind = "dlrm"\n[parallel]\nplan = ""\n'
    )
    run = read_run_file(tmp_path / "a.toml")
    assert run.log_dir == str(tmp_path / "logs")
    assert run.data.files == (str(tmp_path / "x" / "y"), "s3://b/k", "/z")  # type: ignore[attr-defined]
    assert run.parallel.plan == ""


def test_a_written_file_holds_absolute_paths_and_every_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = replace(synthetic(), data=MovieLensData(path="ratings"))
    (tmp_path / "logs").mkdir()
    write_run_file(tmp_path / "logs" / "run.toml", run)
    found = read_run_file(tmp_path / "logs" / "run.toml")
    assert found == replace(run, data=MovieLensData(path=os.path.join(os.getcwd(), "ratings")))
    assert "check_replicas_every = 0" in (tmp_path / "logs" / "run.toml").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 3\n" + SMALL, "name: got 3; expected text"),
        (SMALL + "\n[data]\n", r"not TOML: .*at line 9"),
        (SMALL.replace("num_rows", "num_row"), r"data\.num_row: got an unknown .* mean 'data\.num_rows'"),
        (SMALL.replace("[30, 20]", "[30, 2.5]"), r"data\.num_rows: got .*2\.5.*; expected a list of whole"),
        (SMALL.replace("num_rows = [30, 20]", ""), r"data\.num_rows: got nothing; expected .* Add it"),
        (SMALL.replace('"synthetic"', '"synthetik"'), r"data\.kind: got 'synthetik'.* mean 'synthetic'"),
        (SMALL.replace('kind = "dlrm"', ""), r"model\.kind: got nothing.*model\.kind = \"dlrm\""),
        (SMALL.replace('kind = "dlrm"', "kind = 3"), r"model\.kind: got 3; expected one of dlrm"),
        (SMALL.replace('"dlrm"', '"nowhere_at_all:Model"'), r"nowhere_at_all.*PYTHONPATH"),
        (SMALL.replace('"dlrm"', '"os:nope"'), r"expected a class of module 'os'"),
        (SMALL.replace('"dlrm"', '"os:getcwd"'), r"extends ModelConfig"),
        (SMALL + "embedding_dim = true\n", r"model\.embedding_dim: got true; expected a whole number"),
        (SMALL + "mean_pooling = 1\n", r"model\.mean_pooling: got 1; expected true or false"),
        (SMALL + "[train]\nbatch_sise = 3\n", r"train\.batch_sise: .* mean 'train\.batch_size'"),
        (SMALL + "[train]\nbatch_size = 0\n", r"train\.batch_size: got 0; expected at least 1"),
        (SMALL + '[train]\ndense_optimizer.kind = "adam"\n', r"dense_optimizer\.kind: .* mean 'Adam'"),
        (SMALL + '[train.dense_optimizer]\nkind = "SGD"\nlr = -1\n', r"train\.dense_optimizer: .*lr=-1"),
        (SMALL + "[train]\ndense_optimizer = 3\n", r"train\.dense_optimizer: got 3; expected a table"),
        (SMALL + '[parallel]\nsharding = "rowwise"\n', r"sharding: got 'rowwise'.* mean 'row_wise'"),
        ("train = 3\n" + SMALL, r"train: got 3; expected a table of settings"),
        ("", r"data: got nothing; expected a table\. Add it \(RunConfig needs .*data"),
        ("a" * 5, r"not TOML"),
        ("a = " + "[" * 5000, r"not TOML|nested too deeply"),
    ],
)
def test_a_mistake_is_named_by_file_setting_and_next_move(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        read_run_file(path)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


def test_errors_inside_of_lists_name_the_element() -> None:
    with pytest.raises(ConfigError, match=r"data\.parts\[1\]\.size: got 'x'; expected a whole number"):
        run_of_toml(f'[data]\nkind = "{__name__}:OwnData"\nparts = [{{name = "a"}}, {{name = "b", size = "x"}}]\n')
    with pytest.raises(ConfigError, match=r"data\.parts\[0\]\.nam: got an unknown .*data\.parts\[0\]\.name"):
        run_of_toml(f'[data]\nkind = "{__name__}:OwnData"\nparts = [{{nam = "a"}}]\n')


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"none\.toml: got 'No such file"):
        read_run_file(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"name = '\xff'\n")
    with pytest.raises(ConfigError, match=r"bytes\.toml: got bytes that are not UTF-8"):
        read_run_file(tmp_path / "bytes.toml")


def test_a_class_inside_of_a_function_has_no_name_for_a_file() -> None:
    @dataclass(frozen=True)
    class Local(DataConfig):
        def open(self) -> Dataset:
            raise AssertionError

    with pytest.raises(ConfigError, match=r"top level of a module"):
        toml_of_run(replace(synthetic(), data=Local()))


def test_optimizers_are_written_by_their_names() -> None:
    run = replace(synthetic(), train=TrainConfig(embedding_optimizer=Adagrad(), dense_optimizer=SGD(lr=1.0)))
    text = toml_of_run(run)
    assert 'kind = "Adagrad"' in text
    assert 'kind = "SGD"' in text
    assert Adam().rule not in text
