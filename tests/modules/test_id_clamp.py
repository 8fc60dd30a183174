"""Clamped ids in compiled programs: one graph, with the rows and the count of eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.quantized import quantize_tables
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig

TORCH_212 = torch.torch_version.TorchVersion(torch.__version__) >= (2, 12)
"""torch 2.11 takes every traced program for an export, which has no count."""


def rows_of(out: Any) -> list[Tensor]:
    return [part.values() for part in out.values()] if isinstance(out, dict) else [out.values()]


@pytest.mark.filterwarnings("ignore:.* lay outside their tables and were clamped")
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("pooled", [False, True])
def test_a_collection_that_clamps_is_one_graph(pooled: bool, quantized: bool) -> None:
    torch._dynamo.reset()
    collection: Any
    if pooled:  # the feature has a form of its ids for each size
        bags = [EmbeddingBagConfig(rows, 4, f"t{rows}", feature_names=["u"]) for rows in (10, 20)]
        collection = EmbeddingBagCollection(bags, on_bad_id="clamp")
    else:
        collection = EmbeddingCollection([EmbeddingConfig(10, 4, "t", feature_names=["u"])], on_bad_id="clamp")
    if quantized:
        collection = quantize_tables(collection, "int8")
    features = KeyedJaggedTensor.from_lengths_sync(["u"], torch.tensor([99, -1, 5]), torch.tensor([1, 0, 2]))
    compiled = torch.compile(collection, fullgraph=True, backend="aot_eager")
    for got, want in zip(rows_of(compiled(features)), rows_of(collection(features)), strict=True):
        assert torch.equal(got, want)
    if not quantized and TORCH_212:
        assert collection.clamped_ids == 4
