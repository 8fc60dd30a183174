"""Next-item losses against naive loops; several ranks equal one process; sequences of every length."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from tests.retrieval.retrieval_data import log_data, next_item_run, write_log
from tilerec.comms.process import ProcessGroupComms
from tilerec.data.batch import Batch
from tilerec.data.share import Share, cut
from tilerec.errors import ConfigError, InputError
from tilerec.models.sasrec import SASRec
from tilerec.retrieval.next_item_task import NextItemTask
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD
from tilerec.testing import run_ranks
from tilerec.train.config import RunConfig
from tilerec.train.loop import train
from tilerec.train.override import override_all
from tilerec.train.world import World

CPU = torch.device("cpu")
SEQUENCES = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9], [2, 2]]
TARGETS = [4, 3, 4, 10, 11]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("log") / "log.txt")


def _batch(sequences: list[list[int]], targets: list[int]) -> Batch:
    size = len(sequences)
    values = [0] * size + targets + [one for sequence in sequences for one in sequence]
    lengths = [1] * (2 * size) + [len(one) for one in sequences] + [0] * size
    features = KeyedJaggedTensor(
        ["user", "item", "history", "seen"], torch.tensor(values, dtype=torch.int64), lengths=torch.tensor(lengths),
        stride=size,
    )  # fmt: skip
    return Batch(torch.zeros(size, 0), features, torch.ones(size), torch.arange(1.0, size + 1))


def _built(run: RunConfig, world: World | None = None) -> tuple[NextItemTask, SASRec]:
    dataset = run.data.open()
    torch.manual_seed(0)
    model = run.model.build(dataset, CPU)
    task = run.task.build(dataset, run.train, CPU, world or World(None))
    assert isinstance(model, SASRec)
    assert isinstance(task, NextItemTask)
    return task, model


def _naive(run: RunConfig, task: NextItemTask, model: SASRec, candidates: list[int]) -> Tensor:
    """Return the loss, sequence by sequence and position by position."""
    table = model.embedding_collection.embeddings["items"].weight
    config: Any = run.task
    total, count, at = torch.zeros(()), 0, 0
    for b, (sequence, target) in enumerate(zip(SEQUENCES, TARGETS, strict=True)):
        if not sequence:
            continue
        states = model(torch.zeros(1, 0), _batch([sequence], [target]).sparse_features).states
        for state, following in zip(states, [*sequence[1:], target], strict=True):
            if config.loss == "full":
                items = task.item_ids.tolist()
                loss = cross_entropy(table[items] @ state, torch.tensor(items.index(following)))
            elif config.loss == "sampled":
                others = [one for one in candidates if one != following]
                shift = math.log((len(task.item_ids) - 1) / len(candidates)) if config.correction else 0.0
                scores = torch.cat([(table[following] @ state)[None], table[others] @ state + shift])
                loss = cross_entropy(scores, torch.tensor(0))
            else:
                loss = -logsigmoid(table[following] @ state)
                if candidates[at] not in sequence:
                    loss = loss - logsigmoid(-(table[candidates[at]] @ state))
            total = total + loss * (b + 1)
            count, at = count + 1, at + 1
    return total / count


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "full"},
        {"loss": "sampled", "negatives": 9},
        {"loss": "sampled", "negatives": 9, "correction": True},
        {"loss": "bce"},
    ],
    ids=lambda one: "-".join(map(str, one.values())),
)
def test_losses_and_gradients_are_those_of_a_loop(path: Path, settings: dict[str, Any]) -> None:
    run = next_item_run(path, **settings)
    task, model = _built(run)
    seen: list[Tensor] = []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[2]) if len(inputs) > 2 else None)
    loss = task.loss(model, Share(_batch(SEQUENCES, TARGETS), 0, 5, 5))
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    expected = _naive(run, task, model, seen[0].tolist())
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("loss", ["full", "sampled", "bce"])
@pytest.mark.parametrize("sequences", [[], [[]], [[], []]])
def test_batches_without_items_have_no_loss_and_gradients_of_every_parameter(
    path: Path, loss: str, sequences: list[list[int]]
) -> None:
    """All ranks must have gradients for the same parameters, or the others wait for them."""
    task, model = _built(next_item_run(path, loss=loss, negatives=3))
    found = task.loss(model, Share(_batch(sequences, [1] * len(sequences)), 0, len(sequences), len(sequences)))
    found.backward()
    assert found == 0
    dense = {name: one.grad for name, one in model.named_parameters() if "embedding" not in name}
    assert all(grad is not None and not grad.any() for grad in dense.values())


def _losses_of_rank(run: RunConfig) -> list[float]:
    world = World(ProcessGroupComms())
    task, model = _built(run, world)
    batch = _batch(SEQUENCES, TARGETS)
    parts = [0, 1, 5] if world.size == 2 else [0, 5]
    low, high = parts[world.rank], parts[world.rank + 1]
    return [task.loss(model, Share(cut(batch, low, high), low, 5, 5)).item() for _ in range(3)]


@pytest.mark.parametrize("loss", ["full", "sampled", "bce"])
def test_negatives_and_the_mean_do_not_depend_on_the_number_of_ranks(path: Path, loss: str) -> None:
    run = next_item_run(path, loss=loss, negatives=5)
    task, model = _built(run)
    single = [task.loss(model, Share(_batch(SEQUENCES, TARGETS), 0, 5, 5)).item() for _ in range(3)]
    ranks = run_ranks(2, _losses_of_rank, run)
    assert [sum(one) / 2 for one in zip(*ranks, strict=True)] == pytest.approx(single, rel=1e-5)
    assert len(set(single)) == (1 if loss == "full" else 3)  # negatives differ from step to step


def test_negatives_depend_on_the_seed_and_on_the_step(path: Path) -> None:
    drawn = []
    for seed in (0, 1, 10**12):
        run = next_item_run(path, train={"seed": seed, "dense_optimizer": SGD(0.0), "embedding_optimizer": SGD(0.0)},
                            loss="sampled", negatives=4)  # fmt: skip
        task, model = _built(run)
        seen: list[list[int]] = []
        model.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[2].tolist()))
        share = next(iter(run.data.open().train_shares(7)))
        for _ in range(2):
            task.loss(model, share)
        drawn += seen
    assert len(set(map(tuple, drawn))) == 6


def test_negatives_without_a_maximum_length_do_not_depend_on_the_number_of_ranks(path: Path) -> None:
    run = next_item_run(path, loss="bce")
    task, _ = _built(run)
    batch = _batch([[1, 2, 3], [4]], [5, 6])
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    drawn = []
    for generator, length in zip(generators, (0, 3), strict=True):
        task._lengths["history"] = length
        drawn.append(task._candidates(Share(batch, 0, 2, 2), batch.sparse_features["history"], generator).tolist())
    assert drawn[0] == drawn[1]


def _train_on_ranks(run: RunConfig) -> tuple[dict[str, float], int]:
    result = train(run, group=ProcessGroupComms())
    return dict(result.held_out.numbers), result.held_out.samples


@pytest.mark.parametrize(("loss", "sharding"), [("full", "row_wise"), ("sampled", "planned"), ("bce", "column_wise")])
def test_a_run_on_two_ranks_has_the_scores_of_one(path: Path, loss: str, sharding: str) -> None:
    plain = {"epochs": 2, "dense_optimizer": SGD(0.1), "embedding_optimizer": SGD(0.5)}
    run = next_item_run(path, loss=loss, negatives=6, train=plain)
    single = train(run).held_out
    sharded = override_all(run, [f"parallel.sharding={sharding}"])
    for numbers, samples in run_ranks(2, _train_on_ranks, sharded):
        assert samples == single.samples
        assert numbers == pytest.approx(single.numbers, abs=1e-6)


@pytest.mark.parametrize("loss", ["full", "sampled", "bce"])
def test_training_learns_the_pattern(path: Path, loss: str) -> None:
    run = next_item_run(path, loss=loss, negatives=10, train={"epochs": 60})
    before = train(override_all(run, ["train.max_steps=1"])).held_out.numbers
    after = train(run).held_out.numbers
    assert after["ndcg@3"] > before["ndcg@3"] + 0.3


def test_the_query_vector_is_the_state_after_the_last_item(path: Path) -> None:
    task, model = _built(next_item_run(path))
    batch = _batch(SEQUENCES, TARGETS)
    query = task.query_vectors(model, batch)
    states = model(batch.dense_features, batch.sparse_features).states
    assert torch.equal(query[0], states[2])
    assert not query[1].any()
    assert torch.equal(query[4], states[-1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "exact"}, "task.loss: got 'exact'"),
        ({"negatives": 0}, "task.negatives: got 0"),
        ({"cutoffs": ()}, r"task.cutoffs: got \[\]"),
    ],
)
def test_settings_out_of_range_are_refused(path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(next_item_run(path).task, **settings)


def test_data_that_do_not_fit_are_refused(path: Path) -> None:
    run = next_item_run(path)
    with pytest.raises(ConfigError, match=r"task.sequence: got 'user'; expected a feature with the table of 'item'"):
        train(replace(run, task=replace(run.task, sequence="user")))  # type: ignore[call-arg]
    with pytest.raises(
        ConfigError, match=r"model.max_length: got 3 for sequences of up to 5 items; expected at least 5"
    ):
        train(override_all(run, ["model.max_length=3"]))
    task, model = _built(run)
    with pytest.raises(InputError, match=r"a sequence of 9 items; expected at most max_length=5"):
        task.loss(model, Share(_batch([[1] * 9], [2]), 0, 1, 1))
    dataset = log_data(path, samples="users", max_length=5).open()
    none = next(iter(dataset.rows(3)))[0]
    assert task.check(none) is None
    with pytest.raises(InputError, match=r"feature 'item': got 0 to 0 ids per sample"):
        task.check(next(iter(log_data(path).open_rows((str(path),), labels=False).rows(3)))[0])
