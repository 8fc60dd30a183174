"""Whole models: their programs take batches of 0, 1 and many samples, and call ops that the library for C++ has."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.models.click_models import BOTH, MODELS
from tests.models.test_dlrm import MODELS as DLRMS
from tests.models.test_dlrm import batch as dlrm_batch
from tests.models.test_dlrm import tables as dlrm_tables
from tests.models.test_sasrec import _model as next_items
from tilerec.errors import ConfigError
from tilerec.export.arguments import flat_tensors
from tilerec.export.exporting import prepared
from tilerec.export.torch_library import ops_path
from tilerec.export.whole_model import whole_model
from tilerec.models.sasrec_tower import SASRecTower
from tilerec.models.two_tower import Tower, TwoTower
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.quantized import quantize_tables
from tilerec.retrieval.item_index import Filters, ItemIndex
from tilerec.retrieval.retriever import Retriever
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.torch_private import pytree
from tilerec.train.saved_model import weights_hash

OFTEN = ("dcn, mixture, crosses alone", "ple", "DLRM_Projection")


def _name(model: str) -> Any:
    seldom = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="traces a model like others here")
    return model if model in OFTEN else pytest.param(model, marks=seldom)


def _library_ops() -> set[str]:
    library = ctypes.CDLL(str(ops_path()))
    library.tilerec_ops_schemas.restype = ctypes.c_char_p
    return {text.partition("(")[0] for text in library.tilerec_ops_schemas().decode().splitlines()}


def _check(model: nn.Module, example: Any, batches: Sequence[Sequence[Any]], *, strict: bool = False) -> None:
    found = prepared(whole_model(model), example, strict=strict)
    program = found.program.module()
    for batch in batches:
        with torch.no_grad():
            wanted = pytree.tree_leaves(model(*batch))
        got = pytree.tree_leaves(program(*flat_tensors(found.manifest.signature, batch)))
        assert all(map(torch.equal, got, wanted))
    targets = {str(node.target) for node in found.program.graph.nodes if str(node.target).startswith("tilerec.")}
    assert targets
    assert {target.split(".")[1] for target in targets} <= _library_ops()


@pytest.mark.parametrize("name", [_name(model) for model in MODELS])
def test_click_models(name: str) -> None:
    model = MODELS[name][0](BOTH.bags(), BOTH.dense, 2).eval()
    _check(model, BOTH.batch(7), [BOTH.batch(size, seed=size) for size in (0, 1, 9)])


@pytest.mark.parametrize("name", [_name(model) for model in DLRMS])
def test_dlrm_and_its_relatives(name: str) -> None:
    batches = [dlrm_batch(size) for size in (1, 2, 9)]
    args = [(batch.dense_features, batch.sparse_features) for batch in batches]
    _check(DLRMS[name](dlrm_tables()).eval(), args[-1], args, strict=name == "DLRM_Projection")


@pytest.mark.parametrize("side", ["query", "candidate"])
def test_a_tower_alone_has_its_own_tables_and_the_model_s_vectors(side: str) -> None:
    configs = [
        EmbeddingBagConfig(20, 4, "user", feature_names=["u", "v"]),
        EmbeddingBagConfig(20, 4, "item", feature_names=["i"]),
    ]
    both = TwoTower(EmbeddingBagCollection(configs), [8, 3], query_features=["u", "v"], candidate_features=["i"])
    tower = Tower(both.eval(), side).eval()
    features = KeyedJaggedTensor.from_lengths_sync(["u", "v", "i"], torch.arange(9), torch.ones(9, dtype=torch.int64))
    with torch.no_grad():
        wanted = both(torch.zeros(3, 0), features)[side == "candidate"]
        assert torch.equal(tower(features), wanted)
    own = features.permute([0, 1] if side == "query" else [2])
    manifest = prepared(whole_model(tower), own).manifest
    table = "user" if side == "query" else "item"
    assert [entry.name for entry in manifest.tables] == [f"embedding_bag_collection.embedding_bags.{table}"]
    _check(tower, own, [(own,)])
    if side == "query":
        vectors = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
        index = ItemIndex.build(vectors, torch.arange(20) + (1 << 40), tower=weights_hash(tower))
        few = KeyedJaggedTensor.from_lengths_sync(["u", "v"], torch.arange(2), torch.ones(2, dtype=torch.int64))
        retriever = Retriever(tower, index, 4).eval()
        _check(retriever, own, [(own,), (few,)])
        none = torch.zeros(3, dtype=torch.int64)
        with pytest.raises(ConfigError, match="got arguments with a container that a file cannot describe"):
            prepared(whole_model(retriever), (own, Filters(none, none, none[:, None])))


@pytest.mark.parametrize("side", ["query", "candidate"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_side_of_a_model_of_next_items_takes_other_numbers_and_lengths(side: str, strict: bool) -> None:
    tower = SASRecTower(next_items().eval(), side).eval()

    def batch(sequences: list[list[int]]) -> tuple[KeyedJaggedTensor]:
        flat = torch.tensor([item for one in sequences for item in one], dtype=torch.int64)
        return (KeyedJaggedTensor(tower.features, flat, lengths=torch.tensor([len(one) for one in sequences])),)

    others = ([[1], [2, 3], [], [4, 5, 6, 7, 8, 9]], [[2, 1]], [[], []], [])
    _check(tower, batch([[1, 2, 3], [4], [5, 6, 7, 8]]), [batch(one) for one in others], strict=strict)


@pytest.mark.parametrize("quantized", [False, True])
def test_tables_with_names_of_module_attributes(quantized: bool) -> None:
    names = ["items", "type", "type_", "user"]
    model: nn.Module = EmbeddingBagCollection([EmbeddingBagConfig(20, 4, name) for name in names]).eval()
    if quantized:
        model = quantize_tables(model, "int8")
    features = KeyedJaggedTensor.from_lengths_sync(names, torch.arange(12), torch.ones(12, dtype=torch.int64))
    found = prepared(whole_model(model), features)
    places = [f"embedding_bags.{name}" for name in names]
    assert [(entry.name, entry.weight) for entry in found.manifest.tables] == [(own, f"{own}.weight") for own in places]
    with torch.no_grad():
        got = found.program.module()(features.values(), features.lengths().view(4, 3))
        assert torch.equal(got.values(), model(features).values())


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
def test_tables_that_clamp_ids(strict: bool, quantized: bool) -> None:
    configs = [EmbeddingBagConfig(rows, 4, f"t{rows}", feature_names=["u"]) for rows in (10, 20)]
    model: nn.Module = EmbeddingBagCollection(configs, on_bad_id="clamp").eval()
    if quantized:
        model = quantize_tables(model, "int8")
    batches = [
        (KeyedJaggedTensor.from_lengths_sync(["u"], torch.tensor(ids), torch.ones(len(ids), dtype=torch.int64)),)
        for ids in ([3, 4, 5], [99, -1, 15, 2], [12])
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* lay outside their tables and were clamped")
        _check(model, batches[0], batches, strict=strict)


def test_a_model_with_quantized_tables() -> None:
    model = quantize_tables(DLRMS["DLRM"](dlrm_tables()).eval(), "int8")
    batches = [dlrm_batch(size) for size in (1, 2, 9)]
    args = [(batch.dense_features, batch.sparse_features) for batch in batches]
    _check(model, args[-1], args)
