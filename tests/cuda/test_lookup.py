"""Lookups on a GPU: against the reference at sizes that fill it, without waiting, captured, beyond 2^31 elements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cuda.sizes import real, size, some
from tests.ops.lookup_ops import (
    pooled_lookup_reference,
    sample_weight_grad_reference,
    sequence_lookup_reference,
)
from tilerec.errors import InputError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig, PoolingType

pytest.importorskip("triton")

from tests.ops.triton import lookup_kernels
from tilerec.ops.lookup.triton import backend as lookup
from tilerec.ops.runtime.triton import reports

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda", 0)
F32, BF16, FP16, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn
UNITS = {F32: 2e-6, BF16: 2**-7, FP16: 2**-10}
NO_SINKS = torch.zeros(0, dtype=torch.int64)


@pytest.fixture(autouse=True)
def _nothing_is_told() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        reports.raise_all(CUDA)


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def lengths_of(kind: str, bags: int) -> Tensor:
    if kind == "one":
        return torch.ones(bags, dtype=torch.int64, device=CUDA)
    if kind == "at most one":
        return torch.randint(0, 2, (bags,), device=CUDA)
    if kind == "a few":
        return torch.randint(0, 40, (bags,), device=CUDA)
    lengths = torch.randint(0, 4, (bags,), device=CUDA)
    lengths[7], lengths[bags // 2], lengths[-1] = size(100_000, 520), size(513, 20), size(2_000, 300)
    return lengths


def case(
    kind: str,
    dims: list[int],
    dtypes: list[torch.dtype],
    batch: int,
    weighted: bool,
    index: torch.dtype = torch.int64,
) -> tuple[Any, ...]:
    torch.manual_seed(1)
    rows, features = 1000, len(dims)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device=CUDA), lengths_of(kind, features * batch).cumsum(0)])
    count = int(offsets[-1])
    weights = [torch.randn(rows, d, device=CUDA).to(t) for d, t in zip(dims, dtypes, strict=True)]
    ids = torch.randint(0, rows, (count,), device=CUDA).to(index)
    sample_weights = torch.randn(count, device=CUDA) if weighted else None
    numbers = list(range(features))
    return (
        weights,
        NO_SINKS,
        ids,
        offsets,
        sample_weights,
        numbers,
        numbers,
        [f % 2 for f in numbers],
        [batch],
    )


def names(arguments: tuple[Any, ...]) -> str:
    return ",".join(f"f{f}@t{t}" for f, t in enumerate(arguments[5]))


DIMS = some([128, 64, 4, 3, 257, 1, 128, 512], [128, 32, 4, 3, 129, 1, 16, 8])
TYPES = [F32, BF16, F32, F32, FP16, F32, FP8, BF16]


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["one", "at most one", "a few", "some long"])
def test_pooled_lookups_equal_the_reference(kind: str, weighted: bool, index: torch.dtype) -> None:
    arguments = case(kind, DIMS, TYPES, size(3001, 9), weighted, index)
    for dtype in (F32, BF16, FP16):
        got = lookup_kernels.pooled_lookup(*arguments, dtype, names(arguments))[0]
        want = pooled_lookup_reference(*arguments, dtype, names(arguments))[0]
        # Sums of 100,000 rows: their order counts.
        slack = 200 if kind == "some long" else 4
        torch.testing.assert_close(got, want, rtol=UNITS[dtype] * slack, atol=UNITS[dtype] * slack)
        assert torch.equal(lookup_kernels.pooled_lookup(*arguments, dtype, names(arguments))[0], got), "the same bits"


@pytest.mark.parametrize("kind", ["one", "a few"])
def test_short_bags_have_the_bits_of_the_native_library(kind: str) -> None:
    arguments = case(kind, [128, 20, 64], [F32, F32, BF16], size(301, 9), True)
    got = lookup_kernels.pooled_lookup(*arguments, F32, names(arguments))[0]
    there = [a.cpu() if isinstance(a, Tensor) else a for a in arguments[1:]]
    weights = [w.cpu() for w in arguments[0]]
    want = torch.ops.tilerec.pooled_lookup(weights, *there, F32, names(arguments))[0]
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("kind", ["one", "a few", "some long"])
def test_gradients_of_sample_weights_equal_the_reference(kind: str) -> None:
    bags = size(1001, 9)
    weights, _, ids, offsets, _, *layout = case(kind, DIMS, TYPES, bags, False)
    grad = torch.randn(bags, sum(DIMS), device=CUDA)
    got = lookup_kernels.sample_weight_grad(weights, ids, offsets, grad, *layout)
    want = sample_weight_grad_reference(weights, ids, offsets, grad, *layout)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("dim", [1, 4, 128, 257])
def test_sequence_lookups_equal_the_reference(dim: int, host: bool) -> None:
    weights = [torch.randn(1000, dim, device=CUDA).to(t) for t in (F32, BF16, F32)]
    count = size(100_003, 103)
    ids = torch.randint(0, 1000, (count,), device=CUDA)
    starts = torch.tensor([0, 0, count // 2, count // 2 + 1, count], device="cpu" if host else CUDA)
    arguments = (weights, NO_SINKS, ids, starts, [1, 0, 2, 1], F32, "a@t,b@u,c@v,d@t")
    assert torch.equal(lookup_kernels.sequence_lookup(*arguments)[0], sequence_lookup_reference(*arguments)[0])


@real
def test_new_sizes_compile_nothing() -> None:
    def compiled() -> int:
        kernels = (lookup.pooled_kernel, lookup.chunk_kernel, lookup.sequence_kernel)
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    def run(batch: int) -> None:
        arguments = case("a few", [128, 64], [F32, F32], batch, False)
        lookup_kernels.pooled_lookup(*arguments, F32, names(arguments))
        count = arguments[2].shape[0]
        lookup_kernels.sequence_lookup(
            arguments[0][:1], NO_SINKS, arguments[2], torch.tensor([0, count], device=CUDA), [0], F32, "f@t"
        )

    run(640)
    before = compiled()
    assert before > 0
    for batch in (641, 1024, 100, 2000, 512):
        run(batch)
    assert compiled() == before


@pytest.mark.parametrize("weighted", [False, True])
def test_pooled_lookups_pass_opcheck(weighted: bool) -> None:
    arguments = case("a few", [16, 12], [F32, F32], 8, weighted)
    weights = [weight.requires_grad_() for weight in arguments[0]]
    torch.library.opcheck(
        torch.ops.tilerec.pooled_lookup.default,
        (weights, *arguments[1:], F32, names(arguments)),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def batch_of(keys: list[str], batch: int) -> KeyedJaggedTensor:
    lengths = torch.randint(0, 9, (len(keys) * batch,))
    per_key = lengths.view(len(keys), batch).sum(1).tolist()
    count = sum(per_key)
    return KeyedJaggedTensor(
        keys, torch.randint(0, 50, (count,)).to(CUDA), torch.randn(count).to(CUDA), lengths.to(CUDA),
        length_per_key=per_key,
    )  # fmt: skip


def collections() -> tuple[EmbeddingBagCollection, EmbeddingCollection]:
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(50, 16, "a", feature_names=["x", "y"]),
            EmbeddingBagConfig(60, 128, "b", feature_names=["y"], pooling=PoolingType.MEAN, data_type="BF16"),
        ],
        True,
        CUDA,
    ), EmbeddingCollection([EmbeddingConfig(50, 32, "c", feature_names=["y", "x"])], CUDA)


@pytest.mark.usefixtures("no_waiting")
def test_forwards_do_not_wait() -> None:
    torch.cuda.set_sync_debug_mode("default")
    features = batch_of(["x", "y"], 40)
    pooled, rows = collections()
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(3):
        pooled(features).values()
        rows(features)


def test_a_captured_lookup_follows_its_inputs() -> None:
    arguments = case("a few", [128, 64], [F32, BF16], size(512, 24), True)
    out = lookup_kernels.pooled_lookup(*arguments, F32, names(arguments))[0]  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = lookup_kernels.pooled_lookup(*arguments, F32, names(arguments))[0]
    for _ in range(3):
        arguments[2].random_(0, 1000)
        graph.replay()
        want = pooled_lookup_reference(*arguments, F32, names(arguments))[0]
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    arguments[2][5] = 1000
    graph.replay()
    with pytest.raises(InputError, match=r"Table 't0': got id 1000 of feature 'f0' \(position 5 "):
        reports.raise_all(CUDA)


def test_bad_ids_are_told_and_the_device_lives_on() -> None:
    arguments = case("a few", [128, 64], [F32, BF16], size(512, 24), False)
    good = lookup_kernels.pooled_lookup(*arguments, F32, names(arguments))[0].clone()
    arguments[2][11] = -7
    lookup_kernels.pooled_lookup(*arguments, F32, names(arguments))
    with pytest.raises(
        InputError, match=r"Table 't0': got id -7 of feature 'f0' \(position 11 .* expected ids in \[0, 1000\)"
    ):
        reports.raise_all(CUDA)
    arguments[2][11] = 3
    torch.cuda.synchronize()
    lookup_kernels.pooled_lookup(*arguments, F32, names(arguments))
    assert good.isfinite().all()


def test_an_error_appears_at_a_later_op_without_anybody_waiting() -> None:
    arguments = case("a few", [128], [F32], size(512, 24), False)
    arguments[3][9] = -1
    lookup_kernels.pooled_lookup(*arguments, F32, names(arguments))
    torch.cuda.synchronize()
    with pytest.raises(InputError, match=r"offsets\[9\] is -1; offsets must not fall"):
        lookup_kernels.pooled_lookup(*arguments, F32, names(arguments))


@real
def test_rows_beyond_two_to_the_31_elements_are_reached() -> None:
    rows, dim = 2**26 + 3, 64
    weight = torch.empty(rows, dim, dtype=BF16, device=CUDA)
    weight[rows - 1], weight[2**25] = 3.0, 2.0
    ids = torch.tensor([rows - 1, 2**25], device=CUDA)
    offsets = torch.tensor([0, 2], device=CUDA)
    out = lookup_kernels.pooled_lookup([weight], NO_SINKS, ids, offsets, None, [0], [0], [0], [1], BF16, "f@t")[0]
    assert out.tolist() == [[5.0] * dim]
    out = lookup_kernels.sequence_lookup([weight], NO_SINKS, ids, offsets, [0], BF16, "f@t")[0]
    assert out[:, 0].tolist() == [3.0, 2.0]


@real
def test_outputs_beyond_two_to_the_31_elements_are_written() -> None:
    batch, dim = 2**20 + 1, 2048
    weight = torch.arange(100, device=CUDA).to(BF16)[:, None].expand(100, dim).contiguous()
    ids = torch.randint(0, 100, (batch,), device=CUDA)
    offsets = torch.arange(batch + 1, device=CUDA)
    out = lookup_kernels.pooled_lookup([weight], NO_SINKS, ids, offsets, None, [0], [0], [0], [batch], BF16, "f@t")[0]
    assert torch.equal(out[:, 0].long(), ids)
    assert torch.equal(out[:, -1].long(), ids)
    del out
    out = lookup_kernels.sequence_lookup([weight], NO_SINKS, ids, offsets[[0, -1]], [0], BF16, "f@t")[0]
    assert torch.equal(out[:, 1].long(), ids)


def test_a_bag_of_a_million_ids_is_shared_by_many_programs() -> None:
    weight = torch.randn(1000, 128, device=CUDA)
    count = size(1_000_003, 5003)
    ids = torch.randint(0, 1000, (count,), device=CUDA)
    offsets = torch.tensor([0, 3, count], device=CUDA)
    got = lookup_kernels.pooled_lookup([weight], NO_SINKS, ids, offsets, None, [0], [0], [1], [2], F32, "f@t")[0]
    want = weight.double()[ids[3:]].mean(0)
    torch.testing.assert_close(got[1].double(), want, rtol=1e-5, atol=1e-6)
