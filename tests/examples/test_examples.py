"""Every example runs, and shows what it says it shows."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.skipif(
    not EXAMPLES.exists(), reason="examples are part of the repository, not of the wheel"
)


def _main(name: str) -> Callable[..., float]:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main  # type: ignore[no-any-return]


def test_every_example_is_run_here() -> None:
    source = Path(__file__).read_text()
    missing = [path.stem for path in EXAMPLES.glob("*.py") if f'_main("{path.stem}")' not in source]
    assert not missing, f"no test runs {missing}"


def test_train_dlrm_learns_what_was_planted() -> None:
    assert _main("train_dlrm")(steps=120, batch_size=512) > 0.6


def test_compile_and_export_gives_the_same_numbers() -> None:
    # aot_eager traces and partitions as inductor does, without the minute of C++ compiling.
    assert _main("compile_and_export")(backend="aot_eager") < 1e-6
