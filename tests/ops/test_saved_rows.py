"""Gradients of sample weights belong to the rows that their forward read, whatever is written before the backward."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.modules.cached_tables import cache_tables, flush_caches
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.row_reset import reset_rows
from tilerec.modules.table_resize import resize_table
from tilerec.ops.lookup.saved_rows import id_segments, positions_in_copies
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tilerec.testing.batches import random_batch

CONFIGS = (
    EmbeddingBagConfig(20, 4, "user", feature_names=["u", "v"]),
    EmbeddingBagConfig(9, 6, "item", feature_names=["i", "u"], pooling=PoolingType.MEAN),
    EmbeddingBagConfig(5, 1, "low", feature_names=["l"], data_type="BF16"),
)
KINDS = ["plain", "cached"]


def bags(kind: str = "plain", lr: float | None = 1.0) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    module = EmbeddingBagCollection(list(CONFIGS), is_weighted=True)
    if lr is not None:
        apply_optimizer_in_backward(torch.optim.Adagrad, module.parameters(), {"lr": lr})
    return module if kind == "plain" else cache_tables(module, 0.5)  # type: ignore[return-value]


def batch(seed: int, variable: bool = False, size: int = 4) -> KeyedJaggedTensor:
    kjt = random_batch(["v", "l", "u", "other", "i"], 5, size, seed=seed, weighted=True)
    if variable:
        lengths, size = kjt.lengths(), len(kjt.keys()) * size
        kjt = KeyedJaggedTensor(
            kjt.keys(), kjt.values(), kjt.weights(), lengths, stride_per_key_per_rank=[[size // 5]] * 4 + [[size // 5]],
            inverse_indices=(kjt.keys(), torch.arange(size // 5).expand(5, -1)),
        )  # fmt: skip
    kjt.weights().requires_grad_()
    return kjt


def loss(module: Any, kjt: KeyedJaggedTensor) -> Tensor:
    return (module(kjt).values() ** 2).sum()


def want(module: Any, kjt: KeyedJaggedTensor) -> Tensor:
    """The gradient at the rows as they are now."""
    twin = copy.deepcopy(module)
    twin.requires_grad_(False)
    (grad,) = torch.autograd.grad(loss(twin, kjt), [kjt.weights()])
    return grad


def test_the_examples_hold() -> None:
    assert positions_in_copies(torch.tensor([2, 0, 2]), [(0, 1), (1, 3)]).tolist() == [0, 0, 1]
    assert id_segments(torch.tensor([0, 2, 3, 3, 7]), [2, 0], [2, 2]) == [(3, 7), (0, 3)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variable", [False, True])
def test_two_forwards_then_two_backwards_give_the_gradients_of_the_rows_that_were_read(
    kind: str, variable: bool
) -> None:
    module = bags(kind)
    batches = [batch(seed, variable) for seed in range(3)]
    wanted = [want(module, kjt) for kjt in batches]
    losses = [loss(module, kjt) for kjt in batches]
    for one in reversed(losses):
        one.backward()
    for kjt, grad in zip(batches, wanted, strict=True):
        torch.testing.assert_close(kjt.weights().grad, grad)
    assert module.embedding_bags["user"].rows.updates == 3


@pytest.mark.parametrize("kind", KINDS)
def test_updates_in_between_are_the_same_whether_weights_need_gradients_or_not(kind: str) -> None:
    modules = bags(kind), bags("plain")
    for module, needed in zip(modules, (True, False), strict=True):
        batches = [batch(seed) for seed in range(2)]
        for kjt in batches:
            kjt.weights().requires_grad_(needed)
        losses = [loss(module, kjt) for kjt in batches]
        for one in losses:
            one.backward()
    for a, b in zip(*(module.state_dict().values() for module in modules), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_one_backward_of_two_lookups_reads_both_before_it_writes(kind: str) -> None:
    """Gradient accumulation: losses are summed; every gradient is that of the rows before the update."""
    module, batches = bags(kind), [batch(seed) for seed in range(2)]
    wanted = [want(module, kjt) for kjt in batches]
    (loss(module, batches[0]) + loss(module, batches[1])).backward()
    for kjt, grad in zip(batches, wanted, strict=True):
        torch.testing.assert_close(kjt.weights().grad, grad)
    assert module.embedding_bags["user"].rows.updates == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_for_the_weights_alone_may_be_followed_by_an_update_and_another_one(kind: str) -> None:
    module, kjt, other = bags(kind), batch(0), batch(1)
    wanted, out = want(module, kjt), loss(module, kjt)
    for _ in range(2):
        (grad,) = torch.autograd.grad(out, [kjt.weights()], retain_graph=True)
        torch.testing.assert_close(grad, wanted)
        loss(module, other).backward()
    out.backward()
    torch.testing.assert_close(kjt.weights().grad, wanted)
    assert module.embedding_bags["user"].rows.updates == 3


def _load(module: Any) -> None:
    module.load_state_dict({name: torch.ones_like(value) for name, value in module.state_dict().items()})


def _reset(module: Any) -> None:
    loss(module, batch(7)).backward()  # so that initial values are others
    reset_rows(module.embedding_bags["user"], torch.arange(20))


def _reset_alone(module: Any) -> None:
    reset_rows(module.embedding_bags["user"], torch.arange(-1, 20))  # no other lookup has copied rows


def _flush_and_write(module: Any) -> None:
    flush_caches(module)
    with torch.no_grad():
        for table in module.embedding_bags.values():
            table.weight.add_(1.0)


@pytest.mark.parametrize(("kind", "write"), [
    ("plain", _load), ("cached", _load), ("plain", _reset), ("cached", _reset), ("cached", _flush_and_write),
    ("plain", _reset_alone), ("cached", _reset_alone),
    ("plain", EmbeddingBagCollection.bfloat16),
    ("plain", EmbeddingBagCollection.reset_parameters), ("cached", EmbeddingBagCollection.reset_parameters),
])  # fmt: skip
def test_what_the_library_writes_in_between_is_known_too(kind: str, write: Callable[[Any], None]) -> None:
    module, kjt = bags(kind), batch(0)
    loss(module, batch(3)).backward()
    wanted, out = want(module, kjt), loss(module, kjt)
    write(module)
    out.backward()
    torch.testing.assert_close(kjt.weights().grad, wanted)


@pytest.mark.filterwarnings("ignore:Table 'user'. evicted rows get their initial values:UserWarning")
@pytest.mark.parametrize("write", [_load, _reset_alone, EmbeddingBagCollection.bfloat16])
def test_what_the_library_writes_to_tables_without_an_attached_optimizer_is_known_too(
    write: Callable[[Any], None],
) -> None:
    module, kjt = bags(lr=None), batch(0)
    with torch.no_grad():
        module.embedding_bags["user"].weight.mul_(2.0)  # so that initial values are others
    wanted, out = want(module, kjt), loss(module, kjt)
    write(module)
    out.backward()
    torch.testing.assert_close(kjt.weights().grad, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_that_was_resized_in_between_is_refused_and_left_alone(kind: str) -> None:
    """Rows have other numbers then: the gradients would go to the wrong ones."""
    module, kjt = bags(kind), batch(0)
    wanted, out, rows = want(module, kjt), loss(module, kjt), torch.arange(20)
    resize_table(module, "user", 40, rows, 39 - rows)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(InputError, match="Table 'user': it was resized between a lookup and its backward"):
        out.backward()
    torch.testing.assert_close(kjt.weights().grad, wanted)
    moved = [n.split(".")[1] for n, v in module.state_dict().items() if not torch.equal(v, before[n])]
    assert sorted(moved) == ["item", "low"]
    twin = copy.deepcopy(module)
    for each in (module, twin):
        loss(each, batch(1)).backward()
        assert each.embedding_bags["user"].rows.updates == 1


def test_a_tied_table_that_another_collection_updates_is_known_too() -> None:
    module, kjt = bags(), batch(0)
    other = EmbeddingCollection([EmbeddingConfig(20, 4, "user", feature_names=["u"])])
    other.embeddings["user"].weight = module.embedding_bags["user"].weight
    wanted, out = want(module, kjt), loss(module, kjt)
    other(batch(1))["u"].values().sum().backward()
    out.backward()
    torch.testing.assert_close(kjt.weights().grad, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_two_tables_of_a_lookup_that_are_tied_are_both_copied(kind: str) -> None:
    torch.manual_seed(0)
    tables = [EmbeddingBagConfig(20, 4, name, feature_names=[key]) for name, key in (("one", "u"), ("two", "v"))]
    module: Any = EmbeddingBagCollection(tables, is_weighted=True)
    module.embedding_bags["two"].weight = module.embedding_bags["one"].weight
    apply_optimizer_in_backward(torch.optim.Adagrad, module.parameters(), {"lr": 1.0})
    if kind == "cached":
        cache_tables(module, 0.5)
    kjt, other = (random_batch(["u", "v"], 20, 4, seed=seed, weighted=True) for seed in range(2))
    kjt.weights().requires_grad_()
    wanted, out = want(module, kjt), loss(module, kjt)
    loss(module, other).backward()
    out.backward()
    torch.testing.assert_close(kjt.weights().grad, wanted)


@pytest.mark.parametrize("attached", [False, True])
def test_what_others_write_in_between_is_refused_with_the_tables_name(attached: bool) -> None:
    module, kjt = bags(lr=1.0 if attached else None), batch(0)
    out = loss(module, kjt)
    with torch.no_grad():
        module.embedding_bags["item"].weight.mul_(2.0)
    with pytest.raises(InputError, match=r"Table 'item': its rows were written.*Run the backward before"):
        out.backward()
    loss(module, kjt).backward()


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_a_step_of_a_torch_optimizer_in_between_is_known(options: dict[str, bool]) -> None:
    """Fused ones write without being counted by torch."""
    module, batches = bags(lr=None), [batch(seed) for seed in range(3)]
    module.embedding_bags["low"].float()  # which fused ones step
    optimizer = torch.optim.Adam(module.parameters(), lr=1.0, **options)
    wanted, losses = [want(module, kjt) for kjt in batches], [loss(module, kjt) for kjt in batches]
    before = [p.detach().clone() for p in module.parameters()]
    for one in losses:
        one.backward()
        optimizer.step()
    assert not any(torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True))
    for kjt, grad in zip(batches, wanted, strict=True):
        torch.testing.assert_close(kjt.weights().grad, grad)


def test_a_compiled_step_in_between_is_known_too() -> None:
    module, batches = bags(lr=None), [batch(seed) for seed in range(2)]
    module.embedding_bags["low"].float()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, fused=True)
    wanted, losses = want(module, batches[1]), [loss(module, kjt) for kjt in batches]
    losses[0].backward()
    torch.compile(optimizer.step, backend="eager")()
    assert not torch.equal(want(module, batches[1]), wanted)
    losses[1].backward()
    torch.testing.assert_close(batches[1].weights().grad, wanted)


def test_an_optimizer_of_other_parameters_copies_nothing() -> None:
    module, kjt = bags(lr=None), batch(0)
    other = torch.nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    out = loss(module, kjt)
    torch.optim.SGD([other], lr=1.0).step()
    assert len(module.embedding_bags["user"].rows.readers) == 1
    out.backward()


def test_writing_into_one_table_says_nothing_of_its_neighbour_in_memory() -> None:
    module, kjt = bags(lr=None), batch(0)
    other = EmbeddingBagConfig(3, 2, "unread", feature_names=["other"])
    both = EmbeddingBagCollection([*CONFIGS, other], is_weighted=True)
    versions = {name: p._version for name, p in both.named_parameters()}
    with torch.no_grad():
        both.embedding_bags["unread"].weight.zero_()
    changed = [name for name, p in both.named_parameters() if p._version != versions[name]]
    assert changed == ["embedding_bags.unread.weight"]
    loss(module, kjt).backward()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_copied_or_kept_in_a_loop_of_forwards_and_backwards(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, outs = bags(kind), []
    copies: list[int] = []
    monkeypatch.setattr("tilerec.ops.lookup.saved_rows.SavedRows._take", lambda self, features: copies.extend(features))
    for seed in range(3):
        kjt = batch(seed)
        outs.append(loss(module, kjt))  # held on to, as a running mean of losses may be
        outs[-1].backward()
        ids = weakref.ref(kjt.values())
        del kjt
    gc.collect()
    assert copies == []
    assert ids() is None or kind == "cached"
    assert not module.embedding_bags["user"].rows.readers


def test_a_lookup_without_a_backward_is_forgotten_with_its_graph() -> None:
    module = bags()
    out = loss(module, batch(0))
    assert len(module.embedding_bags["user"].rows.readers) == 1
    del out
    gc.collect()
    assert not module.embedding_bags["user"].rows.readers


def test_readers_that_another_thread_has_just_let_go_are_none() -> None:
    rows = bags().embedding_bags["user"].rows
    gone = frozenset([1])
    rows.readers = weakref.WeakKeyDictionary()
    rows.readers.data[weakref.ref(gone)] = 0  # its callback has not run yet
    del gone
    assert len(rows.readers) == 1
    rows.about_to_write()
    assert not rows.readers


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_lookups_give_the_same_gradients(reentrant: bool) -> None:
    results = []
    for checkpointed in (False, True):
        module, kjt = bags(), batch(0)

        def forward(weights: Tensor, module: Any = module, kjt: Any = kjt) -> Tensor:
            own = KeyedJaggedTensor(kjt.keys(), kjt.values(), weights, kjt.lengths())
            return module(own).values() ** 2

        if checkpointed:
            out = torch.utils.checkpoint.checkpoint(forward, kjt.weights(), use_reentrant=reentrant)
        else:
            out = forward(kjt.weights())
        out.sum().backward()
        results.append([kjt.weights().grad, *module.parameters()])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_a_copied_table_knows_of_no_lookups_of_its_original() -> None:
    module = bags()
    out = loss(module, batch(0))
    twin = copy.deepcopy(module)
    assert not twin.embedding_bags["user"].rows.readers
    out.backward()
