"""Undone steps have the bits of their beginning, whichever writes they made."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.parallel.checkpoint_models import train, wrapped
from tests.storage.cached_tables import batch, ebc, output
from tilerec.checkpoint.step_journal import StepJournal, undo
from tilerec.modules.row_reset import reset_rows
from tilerec.optim.fused import FusedOptimizer
from tilerec.spec.optimizer import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    LarsSGD,
    OptimizerSpec,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
)
from tilerec.testing.ranks import Ranks

Pool = Callable[[int], Ranks]


def step(module: torch.nn.Module, dice: random.Random) -> None:
    output(module, batch(dice)).square().sum().backward()


def rows_of(journal: StepJournal) -> list[Tensor]:
    """Return copies of all rows and slots."""
    return [tensor.clone() for table in journal.tables for tensor in table.host()]


def undone(journal: StepJournal, begun: int) -> list[Tensor]:
    """Return all rows and slots at the beginning of a step; the tables keep theirs."""
    tables = [[tensor.clone() for tensor in table.host()] for table in journal.tables]
    undo(tables, [write for log in reversed(journal.undoable()) if log.step >= begun for write in log.writes])
    return [tensor for some in tables for tensor in some]


def same(got: list[Tensor], want: list[Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


KINDS = [SGD, Adagrad, RowWiseAdagrad, Adam, AdamW, PartialRowWiseAdam, LAMB, PartialRowWiseLAMB, LarsSGD]


@pytest.mark.parametrize("kind", KINDS)
def test_undone_steps_have_the_bits_of_their_beginnings(kind: type[OptimizerSpec]) -> None:
    module, dice = ebc(kind(lr=0.1)), random.Random(1)
    journal, want = StepJournal({"model": module}, 3), {}
    for begun in range(5):
        journal.begin(begun)
        want[begun] = rows_of(journal)
        step(module, dice)
        step(module, dice)
    assert [log.step for log in journal.undoable()] == [4, 3, 2]
    for begun in (2, 3, 4):
        assert not all(torch.equal(a, b) for a, b in zip(rows_of(journal), want[begun], strict=True))
        same(undone(journal, begun), want[begun])


def test_reset_rows_are_undone_with_their_slots() -> None:
    module, dice = ebc(Adam(lr=0.1)), random.Random(2)
    step(module, dice)
    journal = StepJournal({"model": module}, 3)
    journal.begin(0)
    want = rows_of(journal)
    table = next(iter(module.embedding_bags.values()))
    reset_rows(table, torch.arange(300))
    step(module, dice)
    same(undone(journal, 0), want)


def test_rows_outside_of_the_leaf_are_none_and_the_ids_of_the_caller_stay() -> None:
    module = ebc(SGD(lr=0.1))
    journal = StepJournal({"model": module}, 3)
    journal.begin(0)
    table = journal.tables[0]
    want, ids = table.leaf.detach().clone(), torch.tensor([-1, 5, 300, 5])
    table.about_to_write(ids)
    with torch.no_grad():
        table.leaf[5] = 7.0
    assert ids.tolist() == [-1, 5, 300, 5]
    assert torch.equal(undone(journal, 0)[0], want)


def on_tiles(turn: int) -> None:
    """Undo steps of tiles of all kinds: replicas, columns, rows, several on a rank."""
    dmp = wrapped(0, turn)
    train(dmp)
    journal = StepJournal({"model": dmp.module}, 3)
    journal.begin(0)
    want = rows_of(journal)
    train(dmp)
    journal.begin(1)
    middle = rows_of(journal)
    train(dmp)
    assert not all(torch.equal(a, b) for a, b in zip(middle, want, strict=True))
    same(undone(journal, 1), middle)
    same(undone(journal, 0), want)
    journal.close()
    assert not any(table.observers for table in journal.tables)


@pytest.mark.parametrize("turn", [0, 1])
def test_steps_of_all_tilings_are_undone(pool: Pool, turn: int) -> None:
    pool(2).run(on_tiles, turn)


def announced(module: torch.nn.Module) -> None:
    """Write rows by loading a state: no rows are named."""
    optimizer = FusedOptimizer(module)
    optimizer.load_state_dict(optimizer.state_dict())


def unannounced(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)


@pytest.mark.parametrize("write", [announced, unannounced])
def test_a_write_without_rows_is_lost_for_the_steps_before_it_only(write: Callable[[torch.nn.Module], None]) -> None:
    module, dice = ebc(Adam(lr=0.1)), random.Random(3)
    journal = StepJournal({"model": module}, 3)
    journal.begin(0)
    write(module)
    step(module, dice)
    assert journal.undoable() == []
    assert "table" in journal.lost
    journal.begin(1)
    want = rows_of(journal)
    step(module, dice)
    assert [log.step for log in journal.undoable()] == [1]
    same(undone(journal, 1), want)
