"""Saves of tables on a GPU while training goes on, and of changed rows only."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.checkpoint.test_asynchronous import Gate, Values, loaded, same, values_of
from tests.cuda.sizes import size
from tests.storage.cached_tables import batch, ebc, output
from tilerec.checkpoint import CheckpointManager, save_ahead
from tilerec.checkpoint.contents import SavedContents
from tilerec.modules.cached_tables import iter_table_rows, set_cache
from tilerec.optim.fused import FusedOptimizer
from tilerec.spec.cache import CacheParams
from tilerec.spec.optimizer import Adam

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SPEC = Adam(lr=0.1)


def on_device() -> Any:
    return ebc(SPEC).cuda()


def cached() -> Any:
    module = ebc(SPEC)
    for table, rows in list(iter_table_rows(module)):
        set_cache(table, rows, CacheParams(load_factor=0.2), torch.device("cuda"))
    return module


def step(module: Any, dice: random.Random) -> None:
    output(module, batch(dice).to(torch.device("cuda"))).square().sum().backward()


def on_host(values: Values) -> Values:
    return {name: value.cpu() for name, value in values.items()}


def parts(module: Any) -> dict[str, Any]:
    return {"model": module, "optimizer": FusedOptimizer(module)}


@pytest.mark.parametrize("make", [on_device, cached])
@pytest.mark.parametrize("pace", [0, 4])
def test_a_save_has_the_bits_of_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], pace: int
) -> None:
    module, dice, gate = make(), random.Random(3), Gate(monkeypatch)
    step(module, dice)
    want = on_host(values_of(module))
    running = save_ahead(tmp_path / "step-1", parts(module))
    for _ in range(size(8, 3)):
        step(module, dice)
        gate.open(pace)
    gate.end()
    running.wait()
    same(loaded(tmp_path / "step-1", SPEC), want)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("make", [on_device, cached])
def test_every_save_of_a_chain_has_the_bits_of_its_moment(
    tmp_path: Path, make: Callable[[], Any], asynchronous: bool
) -> None:
    module, dice = make(), random.Random(4)
    manager = CheckpointManager(tmp_path, incremental=True, asynchronous=asynchronous, keep_last=0)
    want = {}
    for number in range(3):
        step(module, dice)
        want[number] = on_host(values_of(module))
        manager.save(number, parts(module))
    manager.wait()
    for number, values in want.items():
        same(loaded(tmp_path / f"step-{number}", SPEC), values)
    assert any(saved.rows for saved in SavedContents(tmp_path / "step-1").manifest.tensors.values())
