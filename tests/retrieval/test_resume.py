"""Runs that continue from a state have the bits of runs without an interruption."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.retrieval.retrieval_data import next_item_run, retrieval_run, write_log
from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import ConfigError
from tilerec.parallel import full_state_dict
from tilerec.recipes.retrieval_model import SASRecConfig
from tilerec.retrieval.item_frequency import StreamingFrequency
from tilerec.testing import run_ranks
from tilerec.train.config import RunConfig
from tilerec.train.started_run import started_run
from tilerec.train.training_run import Run
from tilerec.train.world import World

CPU = torch.device("cpu")
STEPS = 4
NAMES = ["streaming", "counted", "sampled", "bce", "full"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("log") / "log.txt")


def _run_config(name: str, path: Path) -> RunConfig:
    """Four steps are less than one epoch, eight are more."""
    if name in ("streaming", "counted"):
        return retrieval_run(path, train={"batch_size": 30, "epochs": 9}, log_q=name, log_q_rate=0.3)
    run = next_item_run(path, train={"epochs": 9}, loss=name, negatives=5)
    assert isinstance(run.model, SASRecConfig)
    return replace(run, model=replace(run.model, dropout=0.3))


def _started(run: RunConfig, world: World, steps: int, seed: int) -> Run:
    """Return a new run, with weights and generators of its own seed, that ends after `steps` steps."""
    run = replace(run, train=replace(run.train, max_steps=steps))
    dataset = run.data.open()
    torch.manual_seed(seed)
    return started_run(run, dataset, world.build(run, dataset, CPU), CPU, world, [], None)


def _saved(run: Run) -> dict[str, Any]:
    optimizers = [one.state_dict() for one in run._optimizers._all]
    return copy.deepcopy({"run": run.state_dict(), "model": run._model.state_dict(), "optimizers": optimizers})


def _trained(run: RunConfig, names: list[str], group: ProcessGroupComms | None) -> dict[str, list[dict[str, Tensor]]]:
    """Return for each name the weights after 2 * STEPS steps: at one go, and continued by new objects."""
    found = {}
    world = World(group)
    for name in names:
        config = _run_config(name, Path(run.data.path[0]))  # type: ignore[attr-defined]
        whole = _started(config, world, 2 * STEPS, 0)
        whole.learn()
        first = _started(config, world, STEPS, 0)
        first.learn()
        state = _saved(first)
        second = _started(config, world, 2 * STEPS, 1)
        second._model.load_state_dict(state["model"])
        for optimizer, own in zip(second._optimizers._all, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)
        second.load_state_dict(state["run"])
        second.learn()
        assert second.steps == whole.steps == 2 * STEPS
        found[name] = [_weights(one._model, group) for one in (whole, second)]
    return found


def _weights(model: nn.Module, group: ProcessGroupComms | None) -> dict[str, Tensor]:
    state = model.state_dict() if group is None else full_state_dict(model)
    return {name: value.detach().clone() for name, value in state.items()}


def _on_rank(run: RunConfig, names: list[str]) -> dict[str, list[dict[str, Tensor]]]:
    return _trained(run, names, ProcessGroupComms())


def _assert_equal(found: dict[str, list[dict[str, Tensor]]]) -> None:
    for name, (whole, continued) in found.items():
        assert whole.keys() == continued.keys()
        for key, value in whole.items():
            assert torch.equal(value, continued[key]), (name, key)


def test_a_run_that_continues_has_the_bits_of_an_uninterrupted_one(path: Path) -> None:
    _assert_equal(_trained(retrieval_run(path), NAMES, None))


def test_a_run_that_continues_on_two_ranks_has_the_bits_of_an_uninterrupted_one(path: Path) -> None:
    for found in run_ranks(2, _on_rank, retrieval_run(path), ["streaming", "sampled", "bce"]):
        _assert_equal(found)


def test_a_state_of_another_task_is_refused(path: Path) -> None:
    streaming, sampled = (_started(_run_config(name, path), World(None), 1, 0) for name in ("streaming", "sampled"))
    with pytest.raises(ConfigError, match=r"NextItemTask: got a state with the entries \['gap', 'last', 'step'\]"):
        sampled.load_state_dict(streaming.state_dict())
    with pytest.raises(ConfigError, match=r"RetrievalTask: got .*'steps'.*same task settings"):
        streaming.load_state_dict(sampled.state_dict())


def test_a_state_of_another_item_table_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"task\.log_q: got a state of 3 items; expected 4"):
        StreamingFrequency(4, 0.1, CPU).load_state_dict(StreamingFrequency(3, 0.1, CPU).state_dict())


def test_a_state_does_not_change_while_training_continues() -> None:
    frequency = StreamingFrequency(3, 0.5, CPU)
    frequency.log_q(torch.tensor([0, 1]))
    state = frequency.state_dict()
    before = copy.deepcopy(state)
    frequency.log_q(torch.tensor([1, 2]))
    assert all(torch.equal(state[name], before[name]) for name in before)
