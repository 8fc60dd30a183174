"""Forward and backward of local collections never wait for the device that the tables are on.

There is no GPU here, so "meta" stands for the device: reading a number of a tensor there raises, whatever asks for it.
What goes the other way, too: `torch.tensor(list, device=...)` waits, and so does `.to(device)` unless it says that it
does not. (That the kernels do not wait either is for `tests/cuda/`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from tests.modules.no_waiting import DEVICE, NoWaiting
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.ops.gradient.definition import GradientSink, deliver
from tilerec.ops.gradient.record import GradientRecord
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig, PoolingType

pytestmark = pytest.mark.usefixtures("no_lists_to_the_device")


def batch(variable: bool, weighted: bool) -> KeyedJaggedTensor:
    def on_device(count: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(count, dtype=dtype, device=DEVICE)

    return KeyedJaggedTensor(
        ["x", "z", "y"], on_device(9), on_device(9, torch.float32) if weighted else None, lengths=on_device(6),
        stride_per_key_per_rank=[[3], [1], [2]] if variable else None, length_per_key=[4, 0, 5],
        inverse_indices=(["x", "z", "y"], on_device(12).view(3, 4)) if variable else None,
    )  # fmt: skip


def train(module: nn.Module, features: KeyedJaggedTensor, attached: bool) -> None:
    if attached:
        apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), module.parameters())
    with NoWaiting():
        out = module(features)
        values = [jagged.values() for jagged in out.values()] if isinstance(out, dict) else [out.values()]
        torch.stack([value.sum() for value in values]).sum().backward()


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("on_bad_id", ["error", "clamp"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("variable", [False, True])
def test_pooled_collections_do_not_wait(
    variable: bool, weighted: bool, on_bad_id: Literal["error", "clamp"], attached: bool
) -> None:
    tables = [
        EmbeddingBagConfig(10, 4, "a", feature_names=["x", "y"]),
        EmbeddingBagConfig(20, 8, "b", feature_names=["x"], pooling=PoolingType.MEAN, data_type="BF16"),
    ]
    module = EmbeddingBagCollection(tables, weighted, DEVICE, on_bad_id=on_bad_id)
    train(module, batch(variable, weighted), attached)


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("on_bad_id", ["error", "clamp"])
@pytest.mark.parametrize("variable", [False, True])
def test_sequence_collections_do_not_wait_where_the_host_knows_the_sizes(
    variable: bool, on_bad_id: Literal["error", "clamp"], attached: bool
) -> None:
    tables = [
        EmbeddingConfig(10, 4, "a", feature_names=["y", "x"]),
        EmbeddingConfig(20, 8, "b", feature_names=["x"]),
    ]
    train(EmbeddingCollection(tables, DEVICE, on_bad_id=on_bad_id), batch(variable, False), attached)


def test_tables_that_several_lookups_of_a_pass_share_do_not_wait() -> None:
    """Their records become one: pooled ones, with and without weights, and one of a sequence."""

    class Table(GradientSink):
        def batch_key(self) -> int:
            return 0

        def take(self, sinks: Sequence[GradientSink], record: GradientRecord) -> None:
            self.taken = record

    def there(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=DEVICE)

    table = Table()
    ids, offsets, weights = there(torch.int64, 9), there(torch.int64, 7), there(torch.float32, 9)
    one = ((table.handle,), (4,), (3,), (3,), (0,), (4,), (1,))
    records = [
        GradientRecord(0, there(torch.float32, 3, 4), ids, offsets, None, *one),
        GradientRecord(1, there(torch.bfloat16, 3, 4), ids, offsets, weights, *one),
        GradientRecord(2, there(torch.float32, 9, 4), ids, None, None, *one[:-1], (0,)),
    ]
    with NoWaiting():
        deliver(records)
    assert table.taken.ids.shape == (27,)
    assert table.taken.starts == (3, 10, 17)


def test_permuting_keys_does_not_wait() -> None:
    for variable in (False, True):
        features = batch(variable, True)
        with NoWaiting():
            assert features.permute([2, 0]).length_per_key() == [5, 4]


def test_what_waits_is_noticed() -> None:
    there = torch.empty(3, device=DEVICE)
    with NoWaiting():
        for waits in (
            lambda: torch.tensor([1, 2], device=DEVICE),
            lambda: torch.zeros(3).to(DEVICE),
            lambda: there.sum().item(),
            lambda: there.tolist(),
            lambda: there.nonzero(),
            lambda: there + torch.zeros(3),
        ):
            with pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
                waits()
