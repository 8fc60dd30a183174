"""`ItemIndex` and `FaissIndex`: results of a sort, raw ids, filters, changes in any order, and bad input."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tilerec.errors import ConfigError, InputError
from tilerec.ops.search.definition import quantized
from tilerec.retrieval.faiss_index import FaissIndex
from tilerec.retrieval.item_index import FORMS, Filters, IndexForm, ItemIndex

HAS_FAISS = importlib.util.find_spec("faiss") is not None
KINDS: list[Any] = [
    *(pytest.param((ItemIndex, form), id=form) for form in FORMS),
    *(
        pytest.param(
            (FaissIndex, form),
            id=f"faiss-{form}",
            marks=pytest.mark.skipif(not HAS_FAISS, reason="faiss is not installed"),
        )
        for form in ("exact", "ivf")
    ),
]
Kind = tuple[Any, IndexForm]


def items(count: int, dim: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return vectors, and raw ids over all 64 bits."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(-(2**63), 2**63 - 1, (count,), generator=draw)
    return torch.randn(count, dim, generator=draw), ids


def built(kind: Kind, vectors: Tensor, ids: Tensor, **settings: Any) -> Any:
    """Return an index that reads all its lists."""
    make, form = kind
    if "ivf" in form:
        lists = min(4, len(vectors))
        settings = {"lists": lists, "nprobe": lists, **settings}
    return make.build(vectors, ids, form=form, **settings)


def scores_of(form: str, query: Tensor, vectors: Tensor) -> Tensor:
    """Return the scores [B, N] of a form."""
    if "int8" not in form:
        return query @ vectors.t()
    (code, scale), (item, item_scale) = quantized(query), quantized(vectors)
    return (code.float() @ item.float().t()) * item_scale * scale[:, None]


def check(kind: Kind, index: Any, query: Tensor, k: int, held: dict[int, Tensor], *given: Any) -> None:
    """Compare a search with a sort of the scores of the held items."""
    ids = torch.tensor(list(held))
    score = scores_of(kind[1], query, torch.stack(list(held.values())))
    want, order = score.sort(dim=1, descending=True, stable=True)
    got, found = index(query, k, *given)
    assert got.dtype == torch.float32
    assert found.dtype == torch.int64
    if "int8" in kind[1]:
        assert torch.equal(got, want[:, :k])
    else:
        torch.testing.assert_close(got, want[:, :k], rtol=1e-5, atol=1e-5)
    # Random vectors have distinct scores, so their order is that of the ids.
    assert torch.equal(found, ids[order[:, :k]])


# -- search ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "k"), [(1, 1), (5, 30), (70, 200)])
def test_results_are_those_of_a_sort_and_ids_keep_64_bits(kind: Kind, batch: int, k: int) -> None:
    vectors, ids = items(200)
    query, _ = items(batch, seed=1)
    check(kind, built(kind, vectors, ids), query, k, dict(zip(ids.tolist(), vectors, strict=True)))


@pytest.mark.parametrize("form", FORMS)
def test_of_equal_scores_the_lower_slot_is_first(form: IndexForm) -> None:
    vectors = torch.tensor([[1.0, 0], [2, 0], [1, 0], [2, 0], [1, 0]])
    one_list = {"lists": 1, "nprobe": 1} if "ivf" in form else {}
    index = ItemIndex.build(vectors, torch.tensor([50, 40, 30, 20, 10]), form=form, **one_list)
    assert index(torch.tensor([[1.0, 0]]), 4)[1].tolist() == [[40, 20, 50, 30]]


@pytest.mark.parametrize("form", ["ivf", "ivf-int8"])
def test_ivf_reads_the_lists_that_are_nearest_to_the_query(form: IndexForm) -> None:
    vectors, ids = items(300)
    query, _ = items(6, seed=2)
    index = ItemIndex.build(vectors, ids, form=form, lists=10, nprobe=3)
    place = {one: slot for slot, one in enumerate(index.ids.tolist())}
    list_of = {one: int((index.first <= place[one]).sum()) - 1 for one in ids.tolist()}
    probed = (query @ index.probes.t()).argsort(1, descending=True)[:, :3]
    assert torch.equal(index.probed(query), probed)
    score = scores_of(form, query, vectors)
    for q in range(6):
        own = [i for i, one in enumerate(ids.tolist()) if list_of[one] in probed[q].tolist()]
        best = ids[own][score[q, own].argsort(descending=True)[:5]]
        assert index(query, 5)[1][q].tolist() == best.tolist()
    assert torch.equal(index(query, 5, nprobe=10)[1], ids[score.argsort(1, descending=True)[:, :5]])


def test_ivf_finds_the_items_of_an_exact_search_in_a_twentieth_of_the_rows() -> None:
    draw = torch.Generator().manual_seed(0)
    centers = torch.randn(100, 16, generator=draw)
    vectors = centers[torch.randint(0, 100, (8000,), generator=draw)] + 0.3 * torch.randn(8000, 16, generator=draw)
    query = vectors[:50] + 0.1 * torch.randn(50, 16, generator=draw)
    ids = torch.arange(8000)
    index = ItemIndex.build(vectors, ids, form="ivf")
    assert index.nprobe == round(index.used.numel() / 20)
    exact = ItemIndex.build(vectors, ids)(query, 20)[1]
    found = index(query, 20)[1]
    assert sum(len({*a} & {*b}) for a, b in zip(exact.tolist(), found.tolist(), strict=True)) >= 0.95 * 20 * 50
    assert float(index.used[index.probed(query)].sum(1).float().mean()) <= 0.08 * 8000


# -- filters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_flags_and_excluded_ids_leave_items_out(kind: Kind) -> None:
    vectors, ids = items(120)
    query, _ = items(8, seed=3)
    draw = torch.Generator().manual_seed(4)
    flags = torch.randint(0, 8, (120,), generator=draw) | (1 << 61)
    index = built(kind, vectors, ids, flags=flags)
    required = torch.tensor([0, 1, 1 << 61, 3, 0, 0, 4, 0])
    forbidden = torch.tensor([0, 0, 0, 4, 2, 7, 3, 1 << 60])
    excluded = torch.full((8, 5), -1)
    excluded[:4] = index(query, 5)[1][:4]
    excluded[3, 2:] = 12345  # no item
    score, found = index(query, 60, Filters(required, forbidden, excluded))
    exact = scores_of(kind[1], query, vectors)
    for q in range(8):
        seen = set(excluded[q].tolist())
        own = [
            i
            for i, (one, flag) in enumerate(zip(ids.tolist(), flags.tolist(), strict=True))
            if flag & required[q] == required[q] and not flag & forbidden[q] and one not in seen
        ]
        best = sorted(own, key=lambda i: -float(exact[q, i]))[:60]
        count = len(best)
        assert found[q].tolist() == ids[best].tolist() + [-1] * (60 - count)
        assert bool(score[q, :count].isfinite().all())
        assert score[q, count:].tolist() == [-torch.inf] * (60 - count)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_filter_works_alone(kind: Kind) -> None:
    vectors, ids = items(10)
    query, _ = items(2, seed=3)
    index = built(kind, vectors, ids, flags=torch.arange(10) % 2)
    odd = {one for i, one in enumerate(ids.tolist()) if i % 2}
    ones = torch.ones(2, dtype=torch.int64)
    best = index(query, 1)[1]
    assert set(index(query, 5, Filters(required=ones))[1].view(-1).tolist()) == odd
    assert not set(index(query, 5, Filters(forbidden=ones))[1].view(-1).tolist()) & odd
    assert torch.equal(index(query, 9, Filters(excluded=best))[1], index(query, 10)[1][:, 1:])
    assert torch.equal(index(query, 10, Filters(excluded=best[:, :0]))[1], index(query, 10)[1])


# -- changes ---------------------------------------------------------------------------------------------------------

STEP = st.tuples(st.sampled_from(["add", "remove"]), st.lists(st.integers(0, 30), unique=True, max_size=12))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(steps=st.lists(STEP, max_size=6), spare=st.sampled_from([0.0, 0.5]))
def test_any_order_of_adds_replacements_and_removals_gives_the_items_held(
    kind: Kind, steps: list[tuple[str, list[int]]], spare: float
) -> None:
    vectors, query = items(10)[0], items(3, seed=5)[0]
    held = dict(enumerate(vectors))
    index = built(kind, vectors, torch.arange(10), **({} if kind[0] is FaissIndex else {"spare": spare}))
    for number, (step, ids) in enumerate(steps):
        if step == "add":
            fresh = items(len(ids), seed=100 + number)[0].view(-1, 8)
            index.add(fresh, ids)
            held |= dict(zip(ids, fresh, strict=True))
        else:
            gone = [one for one in ids if one in held]
            index.remove(gone)
            held = {one: vector for one, vector in held.items() if one not in gone}
        assert sorted(index.item_ids().tolist()) == sorted(held)
        assert len(index) == len(held)
        if held:
            check(kind, index, query, len(held), held)
    if held and kind[0] is ItemIndex:
        check(kind, copy.deepcopy(index), query, len(held), held)


def test_a_replacement_has_the_new_flags() -> None:
    vectors, ids = items(3)
    index = ItemIndex.build(vectors, ids, flags=torch.tensor([1, 1, 1]))
    index.add(vectors[:1], ids[:1])
    found = index(vectors[:1], 3, Filters(required=torch.tensor([1])))[1]
    assert set(found[0].tolist()) == {*ids[1:].tolist(), -1}


def test_a_full_list_grows_by_half_and_spare_room_does_not_move_rows() -> None:
    vectors, ids = items(20)
    index = ItemIndex.build(vectors, ids)
    assert index.rows.shape[0] == 20
    index.add(vectors[:1], [7])
    assert index.rows.shape[0] == 30
    roomy = ItemIndex.build(vectors, ids, spare=0.5)
    before = roomy.rows.data_ptr()
    roomy.add(items(10, seed=6)[0], list(range(10)))
    assert roomy.rows.shape[0] == 30
    assert roomy.rows.data_ptr() == before
    roomy.remove(ids[:1])
    roomy.add(vectors[:1], [77])
    assert roomy.ids[0] == 77  # the freed slot


@pytest.mark.parametrize("form", FORMS)
def test_rebuild_keeps_items_flags_and_tower_and_drops_free_slots(form: IndexForm) -> None:
    vectors, ids = items(60)
    index = built((ItemIndex, form), vectors, ids, flags=torch.arange(60), tower="t", spare=1.0)
    assert index.advice() == ""
    index.remove(ids[:40])
    assert "have no item" in index.advice()
    fresh = index.rebuild()
    assert (len(fresh), fresh.tower, fresh.advice(), fresh.changed) == (20, "t", "", 0)
    assert fresh.rows.shape[0] in range(20, 25)
    query, _ = items(4, seed=7)
    found = fresh(query, 20, Filters(required=torch.full((4,), 32)))
    want = index(query, 20, Filters(required=torch.full((4,), 32)))
    torch.testing.assert_close(found[0], want[0], rtol=1e-5, atol=1e-6)


def test_many_changes_of_an_ivf_index_advise_new_centroids() -> None:
    vectors, ids = items(40)
    index = ItemIndex.build(vectors, ids, form="ivf", lists=4)
    for _ in range(2):
        index.add(vectors[:21], ids[:21])
    assert "since the centroids of 40 were made" in index.advice()


def test_an_index_without_items_can_be_filled() -> None:
    vectors, ids = items(5)
    index = ItemIndex.build(vectors[:0], ids[:0], form="int8")
    with pytest.raises(InputError, match="got an index without items"):
        index(vectors, 1)
    index.add(vectors, ids)
    check((ItemIndex, "int8"), index, vectors, 5, dict(zip(ids.tolist(), vectors, strict=True)))


def test_a_loaded_state_has_its_number_of_items() -> None:
    vectors, ids = items(6)
    index = ItemIndex.build(vectors, ids)
    other = ItemIndex.build(vectors, ids)
    other.remove(ids[:2])
    index.load_state_dict(other.state_dict())
    assert len(index) == 4


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("query", "k", "text"),
    [
        (torch.zeros(2, 7), 1, r"got queries \[2, 7\]"),
        (torch.zeros(8), 1, r"got queries \[8\]"),
        (torch.full((1, 8), torch.nan), 1, "finite"),
        (torch.zeros(1, 8), 0, "k=0 with 5 items; expected 1 to 5"),
        (torch.zeros(1, 8), 6, "k=6 with 5 items; expected 1 to 5"),
    ],
)
def test_bad_queries_are_refused(kind: Kind, query: Tensor, k: int, text: str) -> None:
    index = built(kind, *items(5))
    with pytest.raises(InputError, match=text):
        index(query, k)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("vectors", "ids", "flags", "text"),
    [
        (torch.zeros(2, 8), [4, 4], None, "got id 4 more than once"),
        (torch.zeros(2, 8), [4, -1], None, "got the id -1"),
        (torch.zeros(2, 8), [4], None, "got 2 vectors, 1 ids"),
        (torch.zeros(2, 8), torch.tensor([4.0, 5]), None, "got ids of torch.float32"),
        (torch.zeros(1, 8), [[4]], None, r"got ids \[1, 1\]"),
        (torch.zeros(1, 7), [4], None, r"expected \[n, 8\]"),
        (torch.tensor([[0.0] * 8, [torch.inf] * 8]), [4, 5], None, "got vector 1 with values that are not finite"),
        (torch.zeros(1, 8), [4], torch.tensor([1 << 62]), "got flags beyond bit 61"),
        (torch.zeros(1, 8), [4], torch.tensor([-1]), "got flags beyond bit 61"),
        (torch.zeros(1, 8), [4], torch.tensor([True]), "flags torch.bool"),
    ],
)
def test_bad_items_are_refused_and_change_nothing(
    kind: Kind, vectors: Tensor, ids: Any, flags: Tensor | None, text: str
) -> None:
    own, own_ids = items(5)
    index = built(kind, own, own_ids)
    with pytest.raises(InputError, match=text):
        index.add(vectors, ids, flags)
    check(kind, index, own, 5, dict(zip(own_ids.tolist(), own, strict=True)))


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_ids_are_not_removed_and_nothing_else_is(kind: Kind) -> None:
    vectors, ids = items(5)
    index = built(kind, vectors, ids)
    with pytest.raises(InputError, match="got id 3 to remove"):
        index.remove([int(ids[0]), 3])
    assert len(index) == 5


@pytest.mark.parametrize(
    ("given_settings", "text"),
    [
        ({"form": "pq"}, "got form='pq'; expected one of exact, int8, ivf, ivf-int8"),
        ({"form": "ivf", "lists": 6}, "got lists=6 for 5 items"),
        ({"form": "ivf", "lists": 0}, "got lists=0 for 5 items"),
        ({"form": "ivf", "lists": 2, "nprobe": 3}, "got nprobe=3 with 2 lists; expected 1 to 2"),
        ({"form": "ivf", "lists": 2, "nprobe": 0}, "got nprobe=0"),
        ({"nprobe": 1}, "got lists=None, nprobe=1 with form='exact'"),
        ({"spare": -1.0}, "got spare=-1.0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(given_settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"ItemIndex: {text}"):
        ItemIndex.build(*items(5), **given_settings)


def test_an_ivf_index_needs_items_and_searches_check_nprobe() -> None:
    vectors, ids = items(5)
    with pytest.raises(ConfigError, match="for 0 items"):
        ItemIndex.build(vectors[:0], ids[:0], form="ivf")
    with pytest.raises(ConfigError, match="got nprobe=9 with 2 lists"):
        ItemIndex.build(vectors, ids, form="ivf", lists=2)(vectors, 1, nprobe=9)
    with pytest.raises(ConfigError, match="got nprobe=2 with form='exact'"):
        ItemIndex.build(vectors, ids)(vectors, 1, nprobe=2)
    with pytest.raises(InputError, match=r"got vectors torch.int64 \[5, 8\]; expected floats"):
        ItemIndex.build(vectors.long(), ids)


@pytest.mark.parametrize(
    ("filters", "text"),
    [
        (Filters(required=torch.zeros(3, dtype=torch.int64)), r"filters.required: got torch.int64 \[3\] for 2 queries"),
        (Filters(forbidden=torch.zeros(2)), r"filters.forbidden: got torch.float32 \[2\]"),
        (Filters(excluded=torch.zeros(2, dtype=torch.int64)), r"filters.excluded: got torch.int64 \[2\]"),
        (Filters(excluded=torch.zeros(2, 1)), r"filters.excluded: got torch.float32 \[2, 1\]"),
    ],
)
def test_filters_that_do_not_fit_are_refused(filters: Filters, text: str) -> None:
    with pytest.raises(InputError, match=text):
        ItemIndex.build(*items(5))(torch.zeros(2, 8), 1, filters)
