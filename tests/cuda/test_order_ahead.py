"""Batches that are sorted ahead: the same bits, on other streams, changed, forgotten; and lookups that share tables."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.cuda.sizes import size
from tilerec.errors import InputError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.ops.update.triton import backend as update
from tilerec.optim import apply_optimizer_in_backward
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import Adam, RowWiseAdagrad
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tilerec.storage.prefetched_results import MAX_RESULTS

GPU = torch.device("cuda", 0)
ROWS, BATCH = size(100_000, 9), size(4096, 3)


@pytest.fixture
def sorts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Per update: whether an order was there."""
    real = update.reuse_order
    taken: list[bool] = []

    def reuse_order(*args: Any) -> Any:
        taken.append((order := real(*args)) is not None)
        return order

    monkeypatch.setattr(update, "reuse_order", reuse_order)
    return taken


def collection() -> EmbeddingBagCollection:
    torch.manual_seed(2)
    tables = [
        EmbeddingBagConfig(ROWS, 8, "a", feature_names=["x", "y"]),
        EmbeddingBagConfig(ROWS, 12, "b", feature_names=["y"], pooling=PoolingType.MEAN, data_type="BF16"),
        EmbeddingBagConfig(ROWS, 4, "c", feature_names=["x"]),
    ]
    module = EmbeddingBagCollection(tables, is_weighted=True, device=GPU)
    apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), [module.embedding_bags[n].weight for n in "ab"])
    apply_optimizer_in_backward(Adam(lr=0.1), [module.embedding_bags.c.weight])
    return module


def batches(count: int) -> list[KeyedJaggedTensor]:
    generator, made = torch.Generator().manual_seed(4), []
    for _ in range(count):
        lengths = torch.randint(0, 5, (2 * BATCH,), generator=generator)
        total = int(lengths.sum())
        ids = torch.randint(0, ROWS, (total,), generator=generator)
        weights = torch.rand(total, generator=generator)
        made.append(KeyedJaggedTensor.from_lengths_sync(["x", "y"], ids, lengths, weights).to(GPU))
    return made


def trained(before: Callable[[EmbeddingBagCollection, KeyedJaggedTensor], Any], steps: int = 3) -> list[Tensor]:
    """All rows after some steps; `before`: called with each batch ahead of its forward."""
    module = collection()
    for batch in batches(steps):
        before(module, batch)
        module(batch).values().float().square().sum().backward()
    return [p.detach().clone() for p in module.parameters()]


def nothing(module: EmbeddingBagCollection, batch: KeyedJaggedTensor) -> None: ...


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_a_prefetched_batch_is_not_sorted_again(sorts: list[bool]) -> None:
    want = trained(nothing)
    assert sorts == [False] * 6  # three steps of two optimizers
    sorts.clear()
    assert_same(trained(lambda module, batch: module.prefetch(batch)), want)
    assert sorts == [True] * 6


def test_prefetching_does_not_wait() -> None:
    module, (first, second) = collection(), batches(2)
    module(first).values().float().sum().backward()
    module.prefetch(second)
    torch.cuda.set_sync_debug_mode("error")
    try:
        module.prefetch(first)
        module(first).values().float().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def sequences(clamps: bool = False) -> EmbeddingCollection:
    """Two lookups, by columns: one reads the batch's ids as they lie, the other those of one key."""
    torch.manual_seed(2)
    tables = [
        EmbeddingConfig(ROWS, 8, "a", feature_names=["x", "y"]),
        EmbeddingConfig(ROWS, 12, "b", feature_names=["y"], data_type="BF16"),
    ]
    module = EmbeddingCollection(tables, GPU, on_bad_id="clamp" if clamps else "error")
    apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), module.parameters())
    return module


def clamping() -> EmbeddingBagCollection:
    """Tables of two sizes read a feature, so its ids are clamped twice."""
    torch.manual_seed(2)
    tables = [
        EmbeddingBagConfig(ROWS // 2, 8, "a", feature_names=["x", "y"]),
        EmbeddingBagConfig(ROWS - 1, 8, "b", feature_names=["y"], pooling=PoolingType.MEAN),
    ]
    module = EmbeddingBagCollection(tables, device=GPU, on_bad_id="clamp")
    apply_optimizer_in_backward(Adam(lr=0.1), module.parameters())
    return module


def step(module: EmbeddingCollection | EmbeddingBagCollection, batch: KeyedJaggedTensor) -> None:
    out = module(batch)
    parts = [part.values() for part in out.values()] if isinstance(out, dict) else [out.values()]
    torch.stack([part.float().square().sum() for part in parts]).sum().backward()


KINDS = {"sequences": sequences, "clamped sequences": lambda: sequences(True), "clamped bags": clamping}


@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_are_made_of_a_batch_are_made_ahead_too(kind: str, sorts: list[bool]) -> None:
    """Clamped ones, and those of some keys."""
    plain, module, coming = KINDS[kind](), KINDS[kind](), batches(3)
    for batch in coming:
        step(plain, batch)
    assert sorts == [False] * 6  # three steps of two lookups, or of tables whose ids are clamped apart
    sorts.clear()
    module.prefetch(coming[0])
    for at, batch in enumerate(coming):
        module.prefetch(coming[(at + 1) % 3])
        if at == 1:
            module.prefetch(batch)  # made anew
        step(module, batch)
    assert sorts == [True] * 6
    assert_same([p.detach() for p in module.parameters()], [p.detach() for p in plain.parameters()])
    assert module.clamped_ids == plain.clamped_ids
    assert (plain.clamped_ids > 0) == (kind == "clamped bags")
    # What an evaluation reads stays for the step to come, and the step takes it.
    with torch.no_grad():
        module(coming[0])
    step(module, coming[0])
    assert sorts == [True] * 8
    assert not module._ahead
    assert not getattr(module, "_ordered", None)


def test_made_ids_of_a_batch_that_was_written_to_are_made_anew(sorts: list[bool]) -> None:
    modules, (batch,) = [clamping(), clamping()], batches(1)
    modules[0].prefetch(batch)
    batch.values().add_(1)
    for module in modules:
        step(module, batch)
    assert sorts == [False] * 4
    assert_same(*[[p.detach() for p in module.parameters()] for module in modules])


def test_another_stream_may_sort_while_a_batch_trains(sorts: list[bool]) -> None:
    want = trained(nothing, 4)
    sorts.clear()
    module, ahead = collection(), torch.cuda.Stream()
    coming = batches(4)
    torch.cuda.synchronize()
    with torch.cuda.stream(ahead):
        module.prefetch(coming[0])
    for batch, following in itertools.zip_longest(coming, coming[1:]):
        out = module(batch)
        if following is not None:
            with torch.cuda.stream(ahead):
                module.prefetch(following)
        out.values().float().square().sum().backward()
    assert sorts == [True] * 8
    assert_same([p.detach() for p in module.parameters()], want)


def test_a_batch_that_was_written_to_is_sorted_anew(sorts: list[bool]) -> None:
    def change(module: EmbeddingBagCollection, batch: KeyedJaggedTensor) -> None:
        batch.values().add_(1).remainder_(ROWS)

    def prefetch_and_change(module: EmbeddingBagCollection, batch: KeyedJaggedTensor) -> None:
        module.prefetch(batch)
        change(module, batch)

    want = trained(change)
    sorts.clear()
    assert_same(trained(prefetch_and_change), want)
    assert sorts == [False] * 6


def test_tables_that_were_loaded_or_moved_meanwhile_do_no_harm(sorts: list[bool]) -> None:
    def prefetch_and_load(module: EmbeddingBagCollection, batch: KeyedJaggedTensor) -> None:
        module.prefetch(batch)
        module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()})
        for table in module.embedding_bags.children():  # not side by side any more
            table.weight.data = table.weight.data.clone()

    want = trained(nothing)
    assert_same(trained(prefetch_and_load), want)


def test_batches_that_are_never_trained_on_are_forgotten(sorts: list[bool]) -> None:
    module, coming = collection(), batches(MAX_RESULTS + 2)
    for batch in coming:
        module.prefetch(batch)
        module.prefetch(batch)  # one is kept
    orders = module.embedding_bags.a.rows.orders
    assert len(orders.made) == MAX_RESULTS
    for batch in coming:
        module(batch).values().float().sum().backward()
    assert sorts == [False] * 4 + [True] * 2 * MAX_RESULTS
    assert not orders.made
    module.prefetch(coming[0])
    assert "orders" not in module.embedding_bags.a.rows.__getstate__()  # copies and files begin without


def test_batches_ahead_do_not_mind_lookups_that_train_nothing(sorts: list[bool]) -> None:
    module, (batch, *_) = collection(), batches(1)
    module.prefetch(batch)
    with torch.no_grad():
        module.prefetch(batch)
        module(batch)
    assert len(module.embedding_bags.a.rows.orders.made) == 1
    module(batch).values().float().sum().backward()
    assert sorts == [True, True]


@pytest.mark.parametrize("pooled_only", [True, False])
def test_tables_that_several_lookups_share_are_updated_without_waiting(pooled_only: bool) -> None:
    """The CPU adds sums of lookups, a GPU all occurrences: equal to rounding, the same bits every time."""

    def run(device: torch.device) -> list[Tensor]:
        torch.manual_seed(5)
        tables = [
            EmbeddingBagConfig(ROWS, 4, "a", feature_names=["x", "y"]),
            EmbeddingBagConfig(ROWS, 12, "b", feature_names=["y"]),
        ]
        pooled = EmbeddingBagCollection(tables, is_weighted=True, device=device)
        rows = EmbeddingCollection([EmbeddingConfig(ROWS, 4, "a", feature_names=["y"])], device)
        rows.embeddings.a.weight = pooled.embedding_bags.a.weight
        apply_optimizer_in_backward(Adam(lr=0.1), pooled.parameters())
        first, second, third = [batch.to(device) for batch in batches(3)]
        lengths = third.length_per_key()  # the host knows
        assert len(lengths) == 2
        for _ in range(2):
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            loss = pooled(first).values().square().sum() + pooled(second).values().sum()
            if not pooled_only:
                loss = loss + rows(third)["y"].values().square().sum()
            loss.backward()
            torch.cuda.set_sync_debug_mode("default")
        return [p.detach().cpu() for p in pooled.parameters()]

    want, got = run(torch.device("cpu")), run(GPU)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert_same(run(GPU), got)


@pytest.mark.parametrize("fused", [False, True])
def test_sample_weights_that_an_optimizer_steps_meanwhile_are_those_of_their_forward(fused: bool) -> None:
    """torch does not count what fused steps write."""

    def run(ahead: bool) -> list[Tensor]:
        module, weights = collection(), torch.nn.Parameter(torch.ones(4, device=GPU))
        optimizer = torch.optim.SGD([weights], lr=0.5, fused=fused)
        lengths = torch.tensor([2, 0, 1, 1], device=GPU)
        made = [torch.tensor(ids, device=GPU) for ids in ([0, 1, 2, 3], [3, 3, 1, 8])]
        coming = [KeyedJaggedTensor(["x", "y"], ids, weights, lengths) for ids in made]
        for at, batch in enumerate(coming):
            out = module(batch).values()
            if ahead and not at:
                module.prefetch(coming[1])
            out.float().square().sum().backward()
            optimizer.step()
        return [p.detach() for p in (*module.parameters(), weights)]

    assert_same(run(True), run(False))


def test_a_bad_id_is_told_once_though_weights_want_gradients() -> None:
    module, coming = collection(), batches(5)
    coming[0].values()[0] = ROWS
    errors = []
    for batch in coming:
        batch.weights().requires_grad_()
        try:
            module(batch).values().float().sum().backward()
            torch.cuda.synchronize()
        except InputError as error:
            errors.append(str(error))
    assert len(errors) == 1
    assert errors[0].startswith(f"Table 'a': got id {ROWS} of feature 'x'")
