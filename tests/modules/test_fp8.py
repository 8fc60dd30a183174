"""Tables in fp8 (e4m3fn): what they hold, what comes out of them, and that they train."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD
from tilerec.spec.table import DataType, EmbeddingBagConfig, EmbeddingConfig

FP8 = torch.float8_e4m3fn


def batch() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["x", "y"], torch.tensor([1, 2, 3, 4, 5, 6]), lengths=torch.tensor([2, 1, 1, 2]))


def bags(*types: DataType | torch.dtype | str, init_fn: object = None) -> EmbeddingBagCollection:
    torch.manual_seed(7)
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(10, 4, name, feature_names=[name], data_type=data_type, init_fn=init_fn)  # type: ignore[arg-type]
            for name, data_type in zip("xy", types, strict=False)
        ]
    )


@pytest.mark.parametrize("given", [FP8, "FP8", "fp8", DataType.FP8])
def test_a_table_can_be_in_fp8(given: DataType | torch.dtype | str) -> None:
    assert bags(given).embedding_bags["x"].weight.dtype == FP8


@pytest.mark.parametrize("init_fn", [None, nn.init.normal_])
def test_initial_values_are_those_of_fp32_rounded(init_fn: object) -> None:
    eight, full = bags("FP8", init_fn=init_fn), bags("FP32", init_fn=init_fn)
    rows, wanted = eight.embedding_bags["x"].weight.float(), full.embedding_bags["x"].weight.to(FP8).float()
    assert torch.equal(rows, wanted)
    assert rows.unique().numel() > 5


def test_outputs_of_fp8_tables_are_fp32_and_of_mixed_ones_what_the_others_are() -> None:
    assert bags("FP8", "FP8")(batch()).values().dtype == torch.float32
    assert bags("FP8", "BF16")(batch()).values().dtype == torch.bfloat16
    assert bags("FP16", "FP8")(batch()).values().dtype == torch.float16
    sequences = EmbeddingCollection([EmbeddingConfig(10, 4, "x", data_type="FP8")])
    assert sequences(batch())["x"].values().dtype == torch.float32


def test_pooled_rows_are_the_sums_of_what_the_table_holds() -> None:
    module = bags("FP8")
    rows = module.embedding_bags["x"].weight.float()
    assert torch.equal(module(batch()).values(), torch.stack([rows[1] + rows[2], rows[3]]))


def test_fp8_tables_train_and_only_touched_rows_move() -> None:
    module = bags("FP8")
    apply_optimizer_in_backward(SGD(lr=0.5), module.parameters())
    before = module.embedding_bags["x"].weight.detach().float()
    module(batch()).values().sum().backward()
    moved = module.embedding_bags["x"].weight.detach().float() - before
    # One of the two neighbours of the true value, which lie within an eighth of it.
    torch.testing.assert_close(moved[1:4], torch.full((3, 4), -0.5), rtol=0.0, atol=0.13)
    assert not moved[[0, 4, 5, 6, 7, 8, 9]].any()


def test_fp8_tables_are_copied_and_loaded_bit_by_bit() -> None:
    module, other = bags("FP8"), bags("FP8")
    with torch.no_grad():
        other.embedding_bags["x"].weight.copy_(torch.zeros(10, 4))
    other.load_state_dict(module.state_dict())
    for one in (other, copy.deepcopy(module)):
        rows = one.embedding_bags["x"].weight.view(torch.uint8)
        assert torch.equal(rows, module.embedding_bags["x"].weight.view(torch.uint8))
