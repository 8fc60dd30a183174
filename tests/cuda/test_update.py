"""Updates by compiled Triton kernels: equal to the reference, the same bits every time, nobody waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.cuda.sizes import real, size, some
from tests.ops.random_ops import random_fill_reference_
from tests.ops.triton.random_kernels import random_fill_
from tests.ops.triton.test_parts import PHASED, parts_of, scalars_for
from tests.ops.triton.test_update import RULES, SGD, pooled, single, slots_for
from tests.ops.triton.update_kernels import (
    rule_apply_to_tables_,
    rule_partials_of_tables,
    sum_row_gradients_of_tables,
    update_rows_,
)
from tests.ops.update_ops import (
    rule_apply_to_tables_reference_,
    rule_partials_of_tables_reference,
    sum_row_gradients_of_tables_reference,
    update_rows_reference_,
)
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.ops import backends
from tilerec.ops.runtime.readback import wait_all
from tilerec.ops.update.rules import make_rule
from tilerec.ops.update.triton.apply_runs import update_runs
from tilerec.optim import apply_optimizer_in_backward
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD as SGDSpec
from tilerec.spec.optimizer import Adam
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.storage.table_rows import NonFiniteGradientError

GPU = torch.device("cuda", 0)


@pytest.fixture
def nobody_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def on_gpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(GPU)
    if isinstance(value, (list, tuple)):
        return type(value)(on_gpu(v) for v in value)
    return value


def run(function: Any, weights: Sequence[Tensor], slots: Sequence[Tensor], *rest: Any) -> tuple[Any, ...]:
    own = [w.clone() for w in weights], [s.clone() for s in slots]
    return function(*own, *rest).cpu(), *(x.cpu() for x in (*own[0], *own[1]))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_every_rule_equals_the_reference_and_itself(name: str, dtype: torch.dtype) -> None:
    rule, hyper, kinds = RULES[name]
    dims = some([1, 4, 32, 64, 100, 128, 257, 1000, 2048], [1, 4, 32, 100, 257])
    rows, batch = size(500, 30), size(64, 5)
    lengths = torch.randint(0, 40, (len(dims) * batch,)).tolist()
    record = pooled(dims, lengths, rows, batch, torch.float32, torch.int32, True, ([0, 1, 0] * 3)[: len(dims)])
    weights = [torch.randn(rows, d).to(dtype) for d in dims]
    slots = [s for w in weights for s in slots_for(kinds, *w.shape)]
    count = len(dims)
    rest = (rule, hyper, list(range(1, count + 1)), [3, 4] * count, [2**33] * count, [0] * (count - 1) + [5])
    want = run(update_rows_reference_, weights, slots, *record, *rest)
    given = on_gpu(weights), on_gpu(slots), *on_gpu(record), *rest
    first, second = run(update_rows_, *given), run(update_rows_, *given)
    units = {torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float8_e4m3fn: 0.125}
    for a, b, c in zip(first, second, want, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        # Below 2^-6 the numbers of e4m3fn are 2^-9 apart.
        atol = 2**-9 if a.dtype == torch.float8_e4m3fn else 1e-4
        torch.testing.assert_close(a.float(), c.float(), rtol=max(units.get(a.dtype, 0), 2e-5), atol=atol)


@pytest.mark.parametrize("longest", some([100, 10_000, 400_000], [100, 1000]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_runs_of_all_lengths_have_the_sum_of_their_rows(longest: int, dtype: torch.dtype) -> None:
    """Whole numbers: every order gives one sum, so any row that is lost or added twice is seen."""
    lengths = torch.cat(
        (
            torch.tensor([longest, 1, *some([127, 128, 129, 8192, 8193, 300], [129, 8193])]),
            torch.randint(0, 9, (size(3000, 30),)),
        )
    )
    dim = size(64, 4)
    ids = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    ids = ids[torch.randperm(ids.numel())].to(GPU)
    grad = torch.randint(-2, 3, (ids.numel(), dim), device=GPU).to(dtype)
    weight = torch.zeros(lengths.numel(), dim, device=GPU)
    update_rows_([weight], [], *single(ids, grad), "store", [], [0], [0, 0], [0], [0])
    want = torch.zeros_like(weight, dtype=torch.float64).index_add_(0, ids, grad.double())
    assert torch.equal(weight.double(), want)


def test_the_host_does_not_wait(nobody_waits: None) -> None:
    weights, slots = [torch.zeros(50, 64, device=GPU)], [torch.zeros(50, device=GPU)]
    torch.cuda.set_sync_debug_mode("default")
    record = on_gpu(pooled([64], [3] * 40, 50, 40))
    torch.cuda.set_sync_debug_mode("error")
    rule, hyper, _ = RULES["rowwise-none"]
    for step in range(1, 4):
        told = update_rows_(weights, slots, *record, rule, hyper, [step], [0, 0], [0], [0])
        assert told.device == GPU


@real
def test_new_batch_sizes_compile_nothing() -> None:
    weight = torch.zeros(100, 32, device=GPU)

    def step(batch: int, length: int) -> None:
        record = on_gpu(pooled([32], [length] * batch, 100, batch))
        update_rows_([weight], [], *record, *SGD[:2], [batch], [0, 0], [0], [0])

    for batch, length in ((64, 4), (16, 1)):
        step(batch, length)
    before = sum(len(cache[0]) for cache in update_runs.device_caches.values())
    for batch, length in ((1, 1), (17, 3), (256, 16), (5, 0), (333, 9)):
        step(batch, length)
    assert sum(len(cache[0]) for cache in update_runs.device_caches.values()) == before


@real
def test_tables_beyond_2_31_elements() -> None:
    rows = (2**31 + 2**20) // 128
    if torch.cuda.mem_get_info()[0] < 3 * rows * 128:
        pytest.skip("needs 7 GB")
    weight = torch.empty(rows, 128, dtype=torch.bfloat16, device=GPU)
    ids = torch.tensor([rows - 1, 0, rows - 1], device=GPU)
    weight[ids] = 1.0
    update_rows_(
        [weight], [], *single(ids, torch.ones(3, 128, device=GPU)), "sgd", [0.5, 1.0, 0.0, 0.0, 0.0, 0.0], [1], [0, 0],
        [0], [0],
    )  # fmt: skip
    assert weight[rows - 1].tolist() == [0.0] * 128
    assert weight[0].tolist() == [0.5] * 128


def test_an_update_of_sgd_is_captured_and_replayed() -> None:
    record = on_gpu(single(torch.tensor([1, 1, 3]), torch.ones(3, 8)))
    weight = torch.zeros(5, 8, device=GPU)
    call = ([weight], [], *record, "sgd", [0.5, 1.0, 0.0, 0.0, 0.0, 0.0], [1], [0, 0], [0], [0])
    update_rows_(*call)
    weight.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update_rows_(*call)
    weight.zero_()
    for _ in range(3):
        graph.replay()
    assert weight[:, 0].tolist() == [0.0, -3.0, 0.0, -1.5, 0.0]


@pytest.mark.parametrize("name", PHASED)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("widths", [[128, 37], [1400, 520]])  # of one warp and of several
def test_cut_rows_have_the_references_sums_and_rows(name: str, exact: bool, widths: list[int]) -> None:
    rule, hyper, _ = RULES[name]
    offsets, dims = [8, 3], [2000, 2000]
    parts, made = parts_of(name, offsets, widths, torch.float32), make_rule(rule, hyper)
    for phase in range(made.phases):
        scalars = scalars_for(parts, sum(made.sums(p) for p in range(phase)))
        given = [parts[k] for k in ("weights", "slots", "rows", "grads")]
        rest = (phase, dims, exact, phase == 0, offsets, rule, hyper, [2, 3])
        got = rule_partials_of_tables(*on_gpu(given), on_gpu(scalars), *rest)
        want = rule_partials_of_tables_reference(*given, scalars, *rest)
        torch.testing.assert_close(got.cpu(), want, rtol=2e-6, atol=1e-7)
    scalars = scalars_for(parts, sum(made.sums(p) for p in range(made.phases)))
    rest_ = (dims, rule, hyper, [2, 3], [1, 2, 3, 4], [0, 0], offsets)
    on = on_gpu(parts["weights"]), on_gpu(parts["slots"])
    rule_apply_to_tables_(*on, on_gpu(parts["rows"]), on_gpu(parts["grads"]), on_gpu(scalars), *rest_)
    rule_apply_to_tables_reference_(parts["weights"], parts["slots"], parts["rows"], parts["grads"], scalars, *rest_)
    for a, b in zip((*on[0], *on[1]), (*parts["weights"], *parts["slots"]), strict=True):
        # A row of about 1 less a step of about 1 is off by a last digit of them, however little is left.
        torch.testing.assert_close(a.cpu(), b, rtol=2e-6, atol=3e-7)


def test_row_sums_are_those_of_the_reference() -> None:
    dims = [16, 3, 64]
    record = pooled(dims, torch.randint(0, 9, (3 * 50,)).tolist(), 90, 50, weighted=True)
    args = ([0, 90, 0], dims)
    got = sum_row_gradients_of_tables(*on_gpu(record[:4]), *args, *record[4:])
    want = sum_row_gradients_of_tables_reference(*record[:4], *args, *record[4:])
    assert torch.equal(got[0].cpu(), want[0])
    assert torch.equal(got[2], want[2])
    torch.testing.assert_close(got[1].cpu(), want[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_initial_values_are_those_of_the_cpu(kind: str) -> None:
    got, want = torch.empty(size(1001, 7), 257, device=GPU), torch.empty(size(1001, 7), 257)
    for fill, out in ((random_fill_, got), (random_fill_reference_, want)):
        fill(out, [5, 6], 2**32 - 7, 3, kind, -0.1, 0.2)
    torch.testing.assert_close(
        got.cpu(), want, rtol=0 if kind == "uniform" else 1e-6, atol=0 if kind == "uniform" else 1e-7
    )


def collection(non_finite: str) -> EmbeddingBagCollection:
    made = EmbeddingBagCollection([EmbeddingBagConfig(9, 8, "t", feature_names=["f"])], device=GPU)
    apply_optimizer_in_backward(Adam, made.parameters(), {"lr": 0.1, "non_finite": non_finite})
    return made


def batch() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.tensor([1, 2, 2]), lengths=torch.tensor([1, 2])).to(GPU)


def test_a_gradient_that_is_not_finite_is_told_at_a_later_step() -> None:
    assert backends.TRITON
    module, features = collection("error"), batch()
    module(features).values().sum().backward()  # compiles, which takes longer than the device will be busy
    # The device is busy until the backward has returned: otherwise its report can arrive within the call.
    torch.cuda._sleep(500_000_000)
    (module(features).values() * float("nan")).sum().backward()
    with pytest.raises(NonFiniteGradientError, match="row 1"):
        wait_all(GPU)
    torch.cuda._sleep(500_000_000)
    (module(features).values() * float("nan")).sum().backward()
    torch.cuda.synchronize()
    out = module(batch()).values().sum()
    with pytest.raises(NonFiniteGradientError, match="row 1"):
        out.backward()
    assert module.fused_optimizer.state_dict()


def test_rows_that_are_skipped_are_counted() -> None:
    module = collection("skip")
    (module(batch()).values() * float("inf")).sum().backward()
    assert module.embedding_bags["t"].rows.skipped_rows == 2


def test_a_step_of_a_module_does_not_wait(nobody_waits: None) -> None:
    torch.cuda.set_sync_debug_mode("default")
    module, own = collection("error"), batch()
    module(own).values().sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(3):
        module(own).values().sum().backward()


def test_optimizers_of_one_call_are_told_apart() -> None:
    """Two groups of tables in one backward pass, each with its own rule."""
    tables = [EmbeddingBagConfig(9, 8, name, feature_names=[name]) for name in "ab"]
    module = EmbeddingBagCollection(tables, device=GPU)
    parameters = dict(module.named_parameters())
    for spec, name in ((SGDSpec, "a"), (Adam, "b")):
        own = [p for key, p in parameters.items() if f".{name}." in key]
        apply_optimizer_in_backward(spec, own, {"lr": 0.1})
    before = {key: p.detach().clone() for key, p in parameters.items()}
    ids = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1])).to(GPU)
    module(ids).values().sum().backward()
    for key, p in parameters.items():
        moved = (p.detach() - before[key]).abs().sum(dim=1).cpu()
        assert moved.nonzero().flatten().tolist() == [1 if ".a." in key else 2]
        torch.testing.assert_close(moved[moved > 0], torch.tensor([0.8]), rtol=1e-5, atol=1e-5)
