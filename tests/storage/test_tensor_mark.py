"""A mark changes with every write that torch or tilerec makes to a tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.row_reset import reset_rows
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.storage.tensor_mark import mark_of


def test_a_view_of_the_whole_tensor_has_its_mark_and_other_tensors_have_others() -> None:
    ids = torch.arange(6)
    assert mark_of(ids.view(6)) == mark_of(ids)
    others = [ids.clone(), ids[:3], ids[::2], ids.view(2, 3), ids.view(torch.float64)]
    assert all(mark_of(other) != mark_of(ids) for other in others)


def test_a_write_through_any_view_changes_the_mark_and_a_read_does_not() -> None:
    ids = torch.arange(6)
    before = mark_of(ids)
    ids.sum()
    assert mark_of(ids) == before
    ids[2:3].fill_(9)
    assert mark_of(ids) != before


def test_inference_tensors_have_marks() -> None:
    with torch.inference_mode():
        ids = torch.arange(3)
    assert mark_of(ids) == mark_of(ids)


def module(optimizer: bool) -> EmbeddingBagCollection:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(4, 3, "t")])
    if optimizer:
        apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), ebc.parameters())
    return ebc


def look_up(ebc: EmbeddingBagCollection) -> None:
    batch = KeyedJaggedTensor.from_lengths_sync(["t"], torch.tensor([1, 2]), torch.tensor([1, 1]))
    ebc(batch).values().sum().backward()


def step(ebc: EmbeddingBagCollection) -> None:
    look_up(ebc)
    torch.optim.SGD(ebc.parameters(), lr=0.1).step()


WRITERS: dict[str, tuple[bool, Callable[[EmbeddingBagCollection], object]]] = {
    "an attached update": (True, look_up),
    "an optimizer of torch": (False, step),
    "initial values": (False, lambda ebc: ebc.reset_parameters()),
    "a state dict": (False, lambda ebc: ebc.load_state_dict(module(False).state_dict())),
    "a reset of rows": (True, lambda ebc: reset_rows(ebc.embedding_bags["t"], torch.tensor([1]))),
    "a copy": (False, lambda ebc: torch.no_grad()(ebc.embedding_bags["t"].weight.copy_)(torch.ones(4, 3))),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_every_writer_of_a_table_changes_the_mark_of_its_leaf(writer: str) -> None:
    optimizer, write = WRITERS[writer]
    ebc = module(optimizer)
    before = mark_of(ebc.embedding_bags["t"].weight)
    write(ebc)
    assert mark_of(ebc.embedding_bags["t"].weight) != before


def test_an_attached_update_changes_the_marks_of_its_state() -> None:
    ebc = module(True)
    state = list(ebc.embedding_bags["t"].rows.slots)
    before = [mark_of(slot) for slot in state]
    look_up(ebc)
    assert all(mark_of(slot) != old for slot, old in zip(state, before, strict=True))
