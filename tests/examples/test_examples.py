"""Every example runs, and shows what it says it shows."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tilerec.testing import Ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="examples are part of the repository, not of the wheel")


def _main(name: str) -> Callable[..., float]:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main  # type: ignore[no-any-return]


def test_every_example_is_run_here() -> None:
    source = Path(__file__).read_text()
    missing = [path.stem for path in EXAMPLES.glob("*.py") if f'"{path.stem}"' not in source]
    assert not missing, f"no test runs {missing}"


def test_train_dlrm_learns_what_was_planted() -> None:
    assert _main("train_dlrm")(steps=120, batch_size=512) > 0.6


def test_compile_and_export_gives_the_same_numbers() -> None:
    # aot_eager traces and partitions as inductor does, without the minute of C++ compiling.
    assert _main("compile_and_export")(backend="aot_eager") < 1e-6


# Examples for torchrun: each rank runs `main` in a process group that is there already.


def _on_rank(name: str, options: dict[str, Any]) -> float:
    return _main(name)(**options)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def test_sharded_tables_learn_what_is_clicked(two_ranks: Ranks) -> None:
    assert max(two_ranks.run(_on_rank, "sharded", {"steps": 40})) < 0.2


def test_sharded_dlrm_learns_what_was_planted_on_ranks_with_different_numbers_of_batches(
    two_ranks: Ranks,
) -> None:
    options = {"train_rows": 30_000, "batch_size": 512}  # 59 batches: 30 on rank 0, 29 on rank 1
    first, second = two_ranks.run(_on_rank, "sharded_dlrm", options)
    assert first == second > 0.6


def test_managed_ids_fill_the_rows_they_have(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(_on_rank, "managed_collision", {"steps": 60})
    assert first == second > 0.9
