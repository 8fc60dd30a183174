"""`Retriever`: a query tower and an index as one exported program, of one training state, with raw ids."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.experimental import _config as export_settings

from tilerec.errors import ConfigError, InputError
from tilerec.models.two_tower import Tower, TwoTower
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.hash_zch import HashZchManagedCollisionModule
from tilerec.modules.managed_collection import ManagedCollisionCollection
from tilerec.modules.managed_embedding import ManagedCollisionEmbeddingBagCollection
from tilerec.retrieval.item_index import FORMS, Filters, IndexForm, ItemIndex
from tilerec.retrieval.retriever import Retriever, index_of_items
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.train.saved_model import weights_hash

ITEMS = 50


def two_towers() -> TwoTower:
    torch.manual_seed(0)
    tables = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(30, 8, "user", feature_names=["user"]),
            EmbeddingBagConfig(ITEMS, 8, "item", feature_names=["history", "item"]),
        ]
    )
    return TwoTower(tables, [8, 4], query_features=["user", "history"], candidate_features=["item"], normalize=True)


def catalog(ids: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lengths_sync(["item"], ids, torch.ones_like(ids))


def queries(batch: int) -> KeyedJaggedTensor:
    draw = torch.Generator().manual_seed(batch)
    lengths = torch.cat([torch.ones(batch, dtype=torch.int64), torch.randint(0, 4, (batch,), generator=draw)])
    ids = torch.randint(0, 30, (int(lengths.sum()),), generator=draw)
    return KeyedJaggedTensor.from_lengths_sync(["user", "history"], ids, lengths)


def retriever(form: IndexForm = "int8", k: int = 5) -> Retriever:
    model = two_towers()
    query = Tower(model, "query")
    ids = torch.arange(ITEMS)
    index = index_of_items(
        Tower(model, "candidate"), catalog(ids), ids * 10**15, query_tower=query, form=form, batch_size=7
    )
    return Retriever(query, index, k, temperature=0.5)


def test_scores_are_those_of_the_towers_divided_by_the_temperature() -> None:
    model, found = two_towers(), retriever("exact", ITEMS)
    item_ND = Tower(model, "candidate")(catalog(torch.arange(ITEMS)))
    score_BN = Tower(model, "query")(queries(3)) @ item_ND.t() / 0.5
    score, ids = found(queries(3))
    torch.testing.assert_close(score, score_BN.sort(descending=True)[0].detach())
    torch.testing.assert_close(score, score_BN.gather(1, ids // 10**15).detach())


@pytest.mark.parametrize(("form", "strict"), [*((form, False) for form in FORMS), ("ivf-int8", True)])
def test_one_exported_program_serves_any_batch_with_filters(form: IndexForm, strict: bool) -> None:
    vectors = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    tower = nn.Linear(3, 6)
    index = ItemIndex.build(vectors, torch.arange(40) * 2**40, form=form, tower=weights_hash(tower))
    model = Retriever(tower, index, 3).eval()

    def inputs(batch: int, seen: int) -> tuple[Tensor, Filters]:
        query = torch.randn(batch, 3, generator=torch.Generator().manual_seed(batch))
        return query, Filters(excluded=model(query)[1][:, :1].repeat(1, seen))

    batch = {0: Dim.DYNAMIC}
    shapes = {"features": batch, "filters": Filters(None, None, {0: Dim.DYNAMIC, 1: Dim.DYNAMIC})}  # type: ignore[arg-type]
    program = torch.export.export(model, inputs(4, 3), dynamic_shapes=shapes, strict=strict).module()
    for size, seen in ((4, 3), (1, 1), (0, 2), (9, 5)):
        given = inputs(size, seen)
        for got, want in zip(program(*given), model(*given), strict=True):
            assert torch.equal(got, want)
    with pytest.raises(InputError, match="got query 1 with values that are not finite"):
        program(torch.tensor([[0.0] * 3, [torch.nan] * 3]), Filters(excluded=torch.full((2, 2), -1)))


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_two_towers_export_with_bags_of_ids_for_any_batch(strict: bool) -> None:
    model = retriever()
    model(queries(2))  # tables of a tower must be read once before an export
    with export_settings.patch(backed_size_oblivious=True):  # else torch refuses a single sample
        shapes = {"features": [{0: Dim.DYNAMIC}, {0: Dim.DYNAMIC}]}
        program = torch.export.export(model, (queries(4),), dynamic_shapes=shapes, strict=strict).module()
    for size in (1, 4, 9):
        for got, want in zip(program(queries(size)), model(queries(size)), strict=True):
            assert torch.equal(got, want)


def test_items_of_another_training_state_are_refused() -> None:
    found = retriever()
    with torch.no_grad():
        found.tower.embedding_bag_collection.embedding_bags["user"].weight[3, 1] += 1e-3
    with pytest.raises(ConfigError, match=r"Retriever: got items of the tower \w{12}… for a query tower \w{12}…"):
        Retriever(found.tower, found.index, 5)
    with pytest.raises(ConfigError, match="Retriever: got an index without the hash"):
        Retriever(found.tower, ItemIndex.build(torch.zeros(2, 4), [1, 2]), 1)


def test_the_hash_is_that_of_names_types_and_values() -> None:
    model, again = two_towers(), two_towers()
    assert weights_hash(model) == weights_hash(again)
    assert len(weights_hash(model)) == 64
    assert weights_hash(Tower(model, "query")) != weights_hash(Tower(model, "candidate"))
    names = {*Tower(model, "query").state_dict()}
    assert weights_hash(model, names) == weights_hash(Tower(model, "query"))
    square, flat = nn.Linear(2, 2, bias=False), nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        flat.weight.copy_(square.weight.view(1, 4))
    assert weights_hash(square) != weights_hash(flat)
    with torch.no_grad():
        again.candidate_proj[1].bias += 1
    assert weights_hash(again) != weights_hash(model)
    assert weights_hash(again, names) == weights_hash(model, names)


def test_what_does_not_fit_is_refused() -> None:
    found = retriever()
    with pytest.raises(InputError, match="Retriever: got k=51 with 50 items; expected 1 to 50"):
        Retriever(found.tower, found.index, 51)
    with pytest.raises(ConfigError, match="Retriever: got temperature=0; expected a number above 0"):
        Retriever(found.tower, found.index, 5, 0)
    with pytest.raises(InputError, match="index_of_items: got features of no item"):
        index_of_items(found.tower, catalog(torch.arange(0)), torch.arange(0), query_tower=found.tower)


class ManagedTower(nn.Module):
    """A tower of one table with managed ids."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        configs = [EmbeddingBagConfig(rows, 4, "item", feature_names=["item"])]
        module = HashZchManagedCollisionModule(rows, "cpu", 1, eviction_policy_name="LRU_EVICTION")
        self.tables = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(configs), ManagedCollisionCollection({"item": module}, configs)
        )

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled, _ = self.tables(features)
        vectors: Tensor = pooled["item"]
        return vectors


def test_raw_ids_survive_managed_collision() -> None:
    torch.manual_seed(0)
    tower = ManagedTower(64)
    ids = torch.randint(-(2**62), 2**62, (20,))
    tower(catalog(ids))  # each id gets a row
    index = index_of_items(tower, catalog(ids), ids, query_tower=tower)
    tower.eval()
    rows = tower(catalog(ids)).detach()
    assert rows.unique(dim=0).shape[0] == 20
    nearest = (rows @ rows.t()).argmax(1)
    score, found = Retriever(tower, index, 1)(catalog(ids))
    assert torch.equal(found[:, 0], ids[nearest])
    assert bool((score > 0).all())
