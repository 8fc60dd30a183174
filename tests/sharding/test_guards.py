"""Guards of compiled sharded models: their number, and changes that they notice."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

from tilerec.models import DLRM
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.compiled_model import compile_model
from tilerec.parallel.shard import shard
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.sparse.keys import Keys
from tilerec.spec.table import EmbeddingBagConfig

ROWS, SAMPLES = 20, 5


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch._dynamo.reset()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def keys(tables: int) -> list[str]:
    return [f"f{i}" for i in range(tables)]


def dlrm(tables: int, attached: bool = True) -> Any:
    torch.manual_seed(0)
    bags = EmbeddingBagCollection([EmbeddingBagConfig(ROWS, 8, key, feature_names=[key]) for key in keys(tables)])
    if attached:
        apply_optimizer_in_backward(torch.optim.Adagrad, bags.parameters(), {"lr": 0.1})
    return shard(DLRM(bags, 13, [16, 8], [16, 1]))


def batch(names: list[str]) -> tuple[Tensor, KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(1)
    count = SAMPLES * len(names)
    ids = torch.randint(0, ROWS, (count,), generator=generator)
    features = KeyedJaggedTensor(names, ids, lengths=torch.ones(count, dtype=torch.int64))
    return torch.rand(SAMPLES, 13, generator=generator), features


def counted(model: nn.Module) -> tuple[Callable[..., Tensor], Any]:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    return compile_model(model, backend=counter), counter


def guards(tables: int) -> int:
    """Return the lines of the guards of a compiled DLRM: guards, and the objects that they read."""
    model = dlrm(tables)
    compile_model(model, backend="eager")(*batch(keys(tables)))
    (entry,) = _debug_get_cache_entry_list(type(model).forward.__code__)
    return str(entry.guard_manager).count("+- ")


def test_the_number_of_guards_does_not_depend_on_the_number_of_tables() -> None:
    few = guards(4)
    torch._dynamo.reset()
    assert guards(12) == few


def test_other_keys_are_another_graph_and_equal_keys_are_not() -> None:
    model = dlrm(3)
    compiled, counter = counted(model)
    first = compiled(*batch(keys(3)))
    dense, features = batch(keys(3))
    again = pickle.loads(pickle.dumps(features))  # as from a process that loads data
    assert again._parts.keys is not features._parts.keys
    assert torch.equal(compiled(dense, again), first)
    assert counter.frame_count == 1
    turned = features.permute([2, 0, 1])
    assert torch.equal(compiled(dense, turned), first)
    assert counter.frame_count == 2


def test_keys_with_the_same_text_have_the_same_names() -> None:
    assert Keys(["a, b"]).text != Keys(["a", "b"]).text
    assert Keys(["a', 'b"]).text != Keys(["a", "b"]).text
    assert Keys(["1"]).text != Keys(["1", ""]).text


def test_a_data_type_that_changes_is_another_graph() -> None:
    """The optimizer is attached, so no table is an input of the program, whose type would be guarded."""
    model = dlrm(2)
    compiled, counter = counted(model)
    compiled(*batch(keys(2)))
    bags = model.sparse_arch.embedding_bag_collection
    bags.to(torch.float32)  # no change
    compiled(*batch(keys(2)))
    assert counter.frame_count == 1
    bags.to(torch.bfloat16)
    assert torch.equal(compiled(*batch(keys(2))), model(*batch(keys(2))))
    assert counter.frame_count == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda model, bags: bags.embedding_bags["f0"].weight.requires_grad_(False),
        lambda model, bags: apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.1}),
        lambda model, bags: model.dense_arch.requires_grad_(False),
    ],
    ids=["freeze a table", "attach an optimizer", "freeze a layer"],
)
def test_a_change_of_training_is_noticed_at_the_next_call(change: Callable[..., Any]) -> None:
    eager, twin = dlrm(2, attached=False), dlrm(2, attached=False)
    compiled, _ = counted(twin)
    for step in range(3):
        for model, forward in ((eager, eager), (twin, compiled)):
            if step == 1:
                change(model, model.sparse_arch.embedding_bag_collection)
            model.zero_grad()
            forward(*batch(keys(2))).sum().backward()
        for (name, one), other in zip(eager.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=0, msg=name)
            torch.testing.assert_close(other.grad, one.grad, rtol=0, atol=0, msg=name)


def test_a_copy_of_a_model_has_lookups_of_its_own() -> None:
    model = dlrm(2)
    counted(model)[0](*batch(keys(2))).sum().backward()
    other = copy.deepcopy(model)
    bags, copied = (own.sparse_arch.embedding_bag_collection for own in (model, other))
    assert int(bags.handle) != int(copied.handle)
    before = bags.embedding_bags["f0"].weight.detach().clone()
    counted(other)[0](*batch(keys(2))).sum().backward()
    assert torch.equal(bags.embedding_bags["f0"].weight, before)
    assert not torch.equal(copied.embedding_bags["f0"].weight, before)
