"""`ItemIndex`: search among items inside a model, as plain tensors that `torch.export` takes.

    queries [B, D]  ->  scores float32 [B, k], raw ids of items int64 [B, k], best first

Forms
  exact     float32 rows, all of them
  int8      rows of int8 with a scale each, all of them: a quarter of the memory and of the time
  ivf       the float32 rows of the `nprobe` lists nearest to the query (item_lists.py)
  ivf-int8  both

Layout: rows of a list are neighbours, with room for more; `exact` and `int8` have one list.

    slot   0   1   2   3   4   5   6   7        first = [0, 3, 8]: list 0 has slots 0-2, list 1 has slots 3-7
    id    17   4   -  90  12  55   -   -        used  = [2, 3]: a query reads slots 0-1 and 3-5

Legend: B queries, D dim, R slots, C lists, N items, n items of a call, E excluded ids of a query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError, InputError
from tilerec.ops import backends as backends
from tilerec.ops.search.definition import MOST_COLUMNS, quantized
from tilerec.retrieval.item_lists import Centroids, best_lists, nearest_lists, trained_centroids

IndexForm = Literal["exact", "int8", "ivf", "ivf-int8"]
FORMS: tuple[str, ...] = get_args(IndexForm)

NO_ITEM = -1
"""Id where a query has fewer than k items, and padding of excluded ids."""
FLAGS = 62
"""Number of flags of an item."""
_MOST_RESULTS = 1 << 16


class Filters(NamedTuple):
    """Items that a search leaves out.

    Attributes:
        required: flags that an item must all have, int64 [B]; None: none.
        forbidden: flags of which an item must have none, int64 [B]; None: none.
        excluded: ids to leave out, such as items seen, int64 [B, E]; -1 is padding. None: none.
    """

    required: Tensor | None = None
    forbidden: Tensor | None = None
    excluded: Tensor | None = None


class ItemIndex(nn.Module):
    """Items with their vectors and raw 64-bit ids, for search by inner product.

    Use `ItemIndex.build`, or `load_item_index`. Search: `index(query_BD, k)`. Results equal a stable sort of the scores
    of the same form: of equal scores the lower slot is first. Scores of int8 forms are the same bits on every machine.

    Attributes:
        form: see the top of this file.
        nprobe: lists that a query reads, at most C; 1 without lists.
        tower: hash of the weights of the query tower, "" for none.
        changed: items added and removed since the lists were made.

    State: `rows` [R, D], `scale` [R] (int8 forms), `words` [R] (flags, and whether the slot has an item), `ids` [R],
        `centroids` and `probes` [C, D] (ivf forms), `first` [C + 1], `used` [C].
    """

    rows: Tensor
    scale: Tensor
    words: Tensor
    ids: Tensor
    centroids: Tensor
    probes: Tensor
    first: Tensor
    used: Tensor

    def __init__(
        self, form: IndexForm, centroids: Centroids | None, dim: int, *, nprobe: int = 1, tower: str = "",
        device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        """Make an index without items.

        Args:
            form: see the top of this file.
            centroids: for ivf forms, else None.
            dim: D.
            nprobe, tower: see the attributes.
            device: of the tensors.
        """
        super().__init__()
        if form not in FORMS:
            raise ConfigError(f"ItemIndex: got form={form!r}; expected one of {', '.join(FORMS)}. Correct it.")
        if not 1 <= dim <= MOST_COLUMNS:
            raise ConfigError(f"ItemIndex: got vectors with {dim} numbers; expected 1 to {MOST_COLUMNS}. Correct them.")
        self.form, self.tower, self.changed = form, tower, 0
        none = torch.zeros(0, dim)
        center, probe = centroids or Centroids(none, none)
        lists = max(1, center.shape[0])
        self.register_buffer("rows", torch.zeros(lists, dim, dtype=self._dtype, device=device))
        self.register_buffer("scale", torch.zeros(lists if self._int8 else 0, device=device))
        self.register_buffer("words", torch.zeros(lists, dtype=torch.int64, device=device))
        self.register_buffer("ids", torch.full((lists,), NO_ITEM, dtype=torch.int64, device=device))
        self.register_buffer("centroids", center.to(device))
        self.register_buffer("probes", probe.to(device))
        self.register_buffer("first", torch.arange(lists + 1, device=device))
        self.register_buffer("used", torch.zeros(lists, dtype=torch.int64, device=device))
        self._count = 0
        self.register_load_state_dict_post_hook(_recount)
        self.nprobe = 1
        self.set_nprobe(nprobe)

    @staticmethod
    @torch.no_grad()
    def build(
        vectors: Tensor, ids: Tensor | Sequence[int], *, form: IndexForm = "exact", flags: Tensor | None = None,
        lists: int | None = None, nprobe: int | None = None, spare: float = 0.0, tower: str = "", seed: int = 0,
    ) -> ItemIndex:  # fmt: skip
        """Return an index of items.

        Args:
            vectors: float [N, D], on the index's device.
            ids: raw ids, int64 [N]; any but -1, each once.
            form: see the top of this file.
            flags: int64 [N], bits 0 to 61 with a meaning of your own, for filters. None: 0.
            lists: C of ivf forms; None: about twice the square root of N.
            nprobe: lists that a query reads; None: a twentieth of them.
            spare: room in each list for further items, as a fraction of its items. A full list grows.
            tower: `weights_hash` of the query tower that has learned with these vectors.
            seed: of k-means.

        Raises:
            InputError: vectors that are not finite, ids that repeat, or sizes that differ.
            ConfigError: settings that do not fit.
        """
        if vectors.dim() != 2 or not vectors.is_floating_point():
            raise InputError(
                f"ItemIndex: got vectors {vectors.dtype} {list(vectors.shape)}; expected floats [N, D]. Convert them."
            )
        vectors = vectors.detach().float()
        centroids = None
        if form in ("ivf", "ivf-int8"):
            wanted = max(1, round(2 * len(vectors) ** 0.5)) if lists is None else lists
            if not 1 <= wanted <= len(vectors):
                raise ConfigError(
                    f"ItemIndex: got lists={wanted} for {len(vectors):,} items; expected 1 to the number of items. "
                    "Use fewer lists, or form='exact' without items."
                )
            _check_vectors(vectors, vectors.shape[1])
            centroids = trained_centroids(vectors, wanted, seed)
        elif lists is not None or nprobe is not None:
            raise ConfigError(
                f"ItemIndex: got lists={lists}, nprobe={nprobe} with form={form!r}; expected none without lists. Use "
                "an ivf form."
            )
        own_lists = 1 if centroids is None else len(centroids.center)
        probes = max(1, round(own_lists / 20)) if nprobe is None else nprobe
        index = ItemIndex(form, centroids, vectors.shape[1], nprobe=probes, tower=tower, device=vectors.device)
        if not 0 <= spare <= 100:
            raise ConfigError(f"ItemIndex: got spare={spare}; expected 0 to 100. Correct it.")
        index._insert(vectors, *checked_items(vectors, ids, flags, vectors.shape[1], vectors.device), spare)
        return index

    # -- search ------------------------------------------------------------------------------------------------------

    def forward(
        self, query: Tensor, k: int, filters: Filters | None = None, *, nprobe: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return scores float32 [B, k] and raw ids int64 [B, k], best first.

        A query with fewer than k items, because of filters or in the lists that it reads, has scores of -inf and ids of
        -1 at the end.

        Args:
            query: float [B, D].
            k: at most the number of items.
            filters: items to leave out; None: none.
            nprobe: lists to read, in place of the index's.

        Raises:
            InputError: a query that is not finite or has another dim, k out of range, or an index without items.
            ConfigError: nprobe out of range.
        """
        if query.dim() != 2 or query.shape[1] != self.rows.shape[1]:
            raise InputError(
                f"ItemIndex: got queries {list(query.shape)}; expected [B, {self.rows.shape[1]}]. Use the query tower "
                "of these items."
            )
        if not self._count:
            raise InputError("ItemIndex: got an index without items; expected at least one. Add items first.")
        if not 1 <= k <= min(self._count, _MOST_RESULTS):
            raise InputError(
                f"ItemIndex: got k={k} with {self._count:,} items; expected 1 to {min(self._count, _MOST_RESULTS):,}. "
                "Use a smaller k."
            )
        filters = Filters() if filters is None else filters
        query = query.detach().float()
        list_BP = self.probed(query, nprobe)
        first_BP = self.first[list_BP]
        batch = query.shape[0]
        check_filters(filters, batch)
        none_B = torch.zeros(batch, dtype=torch.int64, device=query.device)
        required_B = none_B if filters.required is None else filters.required
        forbidden_B = none_B if filters.forbidden is None else filters.forbidden
        excluded = filters.excluded
        # At most E of the k + E best items are excluded ones.
        wanted = k if excluded is None else k + excluded.shape[1]
        score, slot = torch.ops.tilerec.best_rows(
            query, self.rows, self.scale, self.words, first_BP, first_BP + self.used[list_BP], required_B * 2 + 1,
            forbidden_B * 2, wanted,
        )  # fmt: skip
        found = torch.where(slot >= 0, self.ids[slot.clamp(min=0)], NO_ITEM)
        if excluded is None:
            return score, found
        return without_excluded(score, found, excluded, k)

    def probed(self, query: Tensor, nprobe: int | None = None) -> Tensor:
        """Return the lists that queries read, int64 [B, nprobe], best first; of equal centroids the lower list."""
        if not self.centroids.shape[0]:
            if nprobe not in (None, 1):
                raise ConfigError(
                    f"ItemIndex: got nprobe={nprobe} with form={self.form!r}; expected none. Leave it out."
                )
            return torch.zeros(query.shape[0], 1, dtype=torch.int64, device=query.device)
        probes = self.nprobe if nprobe is None else self._probes(nprobe)
        return best_lists(query, self.probes, probes)

    def set_nprobe(self, nprobe: int) -> None:
        """Set the number of lists that a query reads.

        Raises:
            ConfigError: it is not in 1 to C.
        """
        self.nprobe = self._probes(nprobe)

    # -- items -------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of items."""
        return self._count

    def item_ids(self) -> Tensor:
        """Return the raw ids of all items, int64 [N], in the order of their slots."""
        return self.ids[self._live()]

    @torch.no_grad()
    def add(self, vectors: Tensor, ids: Tensor | Sequence[int], flags: Tensor | None = None) -> None:
        """Add items; an item whose id the index has is replaced, with its flags.

        Each item goes to a free slot of its nearest list. A full list grows by a half of its slots, and then all rows
        are copied: use `spare` of `build` for room. Cost of a call without growth: one sort of the ids.

        Args:
            vectors: float [n, D].
            ids: int64 [n]; any but -1, each once.
            flags: int64 [n]; None: 0.

        Raises:
            InputError: see `build`; the index is then unchanged.
        """
        own_ids, words = checked_items(vectors, ids, flags, self.rows.shape[1], self.ids.device)
        slot = self._slots(own_ids)
        self._clear(slot[slot >= 0])
        self._insert(vectors.detach().to(self.rows.device).float(), own_ids, words, 0.0)
        self.changed += own_ids.numel()

    @torch.no_grad()
    def remove(self, ids: Tensor | Sequence[int]) -> None:
        """Remove items. Their slots are free for others.

        Raises:
            InputError: an id that repeats, or that the index does not have; the index is then unchanged.
        """
        own_ids = checked_ids(ids, self.ids.device)
        slot = self._slots(own_ids)
        if bool((slot < 0).any()):
            raise InputError(
                f"ItemIndex: got id {int(own_ids[slot < 0][0])} to remove; expected ids of the index. Leave it out."
            )
        self._clear(slot)
        self.changed += own_ids.numel()

    def advice(self) -> str:
        """Return why the index should be rebuilt, "" if it need not."""
        used = int(self.used.sum())
        if used > 2 * self._count:
            return f"{used - self._count:,} of the {used:,} rows that searches read have no item"
        if self.centroids.shape[0] and self.changed > self._count:
            return f"{self.changed:,} items were added or removed since the centroids of {self._count:,} were made"
        return ""

    @torch.no_grad()
    def rebuild(self, *, spare: float = 0.0, seed: int = 0) -> ItemIndex:
        """Return a new index of the same items, with new centroids and without free slots.

        Items of int8 forms have the vectors of their codes. To use the original ones, `build` an index.
        """
        live = self._live()
        vectors = self.rows[live].float()
        if self._int8:
            vectors = vectors * self.scale[live, None]
        lists = min(self.centroids.shape[0], self._count) or None
        nprobe = None if lists is None else min(self.nprobe, lists)
        return ItemIndex.build(
            vectors, self.ids[live], form=self.form, flags=self.words[live] >> 1, lists=lists, nprobe=nprobe,
            spare=spare, tower=self.tower, seed=seed,
        )  # fmt: skip

    # -- parts -------------------------------------------------------------------------------------------------------

    @property
    def _int8(self) -> bool:
        return self.form in ("int8", "ivf-int8")

    @property
    def _dtype(self) -> torch.dtype:
        return torch.int8 if self._int8 else torch.float32

    def _live(self) -> Tensor:
        return (self.words & 1).nonzero()[:, 0]

    def _probes(self, nprobe: int) -> int:
        lists = max(1, self.centroids.shape[0])
        if not 1 <= nprobe <= lists:
            raise ConfigError(
                f"ItemIndex: got nprobe={nprobe} with {lists} lists; expected 1 to {lists}. Correct it, or build more "
                "lists."
            )
        return nprobe

    def _slots(self, ids: Tensor) -> Tensor:
        """Return the slot of each id, int64 [n]; -1 for ids that the index does not have."""
        live = self._live()
        if not live.numel():
            return torch.full_like(ids, -1)
        ordered, order = self.ids[live].sort()
        place = torch.searchsorted(ordered, ids).clamp(max=ordered.numel() - 1)
        return torch.where(ordered[place] == ids, live[order[place]], -1)

    def _clear(self, slot: Tensor) -> None:
        self.words[slot] = 0
        self.ids[slot] = NO_ITEM
        self._count -= slot.numel()

    def _insert(self, vectors: Tensor, ids: Tensor, words: Tensor, spare: float) -> None:
        """Put items, none of which the index has, into free slots of their lists."""
        lists = self.used.shape[0]
        if self.centroids.shape[0]:
            list_n = nearest_lists(vectors, self.centroids)
        else:
            list_n = torch.zeros_like(ids)
        need_C = torch.bincount(list_n, minlength=lists)
        self._make_room(need_C, spare)
        free = ((self.words & 1) == 0).nonzero()[:, 0]
        begin_C = torch.searchsorted(free, self.first[:-1])
        order = list_n.argsort(stable=True)
        own_list = list_n[order]
        number = torch.arange(order.numel(), device=ids.device) - (need_C.cumsum(0) - need_C)[own_list]
        slot = free[begin_C[own_list] + number]
        if self._int8:
            codes, self.scale[slot] = quantized(vectors[order])
            self.rows[slot] = codes
        else:
            self.rows[slot] = vectors[order]
        self.words[slot], self.ids[slot] = words[order], ids[order]
        self.used.scatter_reduce_(0, own_list, slot - self.first[own_list] + 1, "amax")
        self._count += ids.numel()

    def _make_room(self, need_C: Tensor, spare: float) -> None:
        """Let each list have `need_C` free slots: a list with fewer grows, and rows of later lists move."""
        size_C = self.first.diff()
        live_C = torch.bincount(self._list_of(self._live()), minlength=size_C.numel())
        short_C = need_C - (size_C - live_C)
        if spare:
            grown_C = (need_C * (1 + spare)).ceil().long().clamp(min=1)
        else:
            grown_C = size_C + torch.maximum(short_C, torch.where(live_C > 0, size_C // 2, 0))
        new_C = torch.where(short_C > 0, grown_C, size_C)
        if torch.equal(new_C, size_C):
            return
        first = torch.nn.functional.pad(new_C.cumsum(0), (1, 0))
        old = torch.arange(self.rows.shape[0], device=first.device)
        slot = old + (first - self.first)[:-1].repeat_interleave(size_C)
        total = int(first[-1])
        for name in ("rows", "scale", "words", "ids"):
            before: Tensor = getattr(self, name)
            if not before.numel():
                continue
            after = before.new_full((total, *before.shape[1:]), NO_ITEM if name == "ids" else 0)
            after[slot] = before
            setattr(self, name, after)
        self.first = first

    def _list_of(self, slot: Tensor) -> Tensor:
        return torch.searchsorted(self.first, slot, right=True) - 1


def without_excluded(score: Tensor, ids: Tensor, excluded: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best results of each query without its excluded ids; `NO_ITEM` at the end if there are fewer.

    Args:
        score, ids: results, best first [B, m].
        excluded: int64 [B, E].
        k: at most m.
    """
    hit = (ids[:, :, None] == excluded[:, None, :]).any(2)
    score, order = score.masked_fill(hit, -torch.inf).sort(dim=1, descending=True, stable=True)
    ids = ids.masked_fill(hit, NO_ITEM).gather(1, order)
    return score[:, :k], ids[:, :k]


def _recount(index: ItemIndex, _: object) -> None:
    index._count = index._live().numel()


def checked_items(
    vectors: Tensor, ids: Tensor | Sequence[int], flags: Tensor | None, dim: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Return ids [n] and words [n] of items to add, after all checks of them. A word is 2 * flags + 1."""
    _check_vectors(vectors, dim)
    own = checked_ids(ids, device)
    count = own.numel()
    words = torch.zeros(count, dtype=torch.int64) if flags is None else torch.as_tensor(flags)
    if count != vectors.shape[0] or words.shape != (count,) or words.dtype != torch.int64:
        raise InputError(
            f"ItemIndex: got {vectors.shape[0]} vectors, {count} ids and flags {words.dtype} {list(words.shape)}; "
            "expected an id and flags (int64) per vector. Pass as many of each."
        )
    if bool(((words < 0) | (words >= 1 << FLAGS)).any()):
        raise InputError(f"ItemIndex: got flags beyond bit {FLAGS - 1}; expected bits 0 to {FLAGS - 1}. Use fewer.")
    return own, words.to(own.device) * 2 + 1


def checked_ids(ids: Tensor | Sequence[int], device: torch.device | str) -> Tensor:
    """Return ids of items as int64 [n], after all checks of them."""
    own = torch.as_tensor(ids)
    if own.numel() and (own.is_floating_point() or own.is_complex() or own.dtype in (torch.bool, torch.uint64)):
        raise InputError(f"ItemIndex: got ids of {own.dtype}; expected int64. Convert them.")
    own = own.to(device, torch.int64)
    if own.dim() != 1:
        raise InputError(f"ItemIndex: got ids {list(own.shape)}; expected [n]. Pass one id per item.")
    if bool((own == NO_ITEM).any()):
        raise InputError(f"ItemIndex: got the id {NO_ITEM}; expected others, as it means no item. Use another id.")
    ordered = own.sort()[0]
    again = (ordered[1:] == ordered[:-1]).nonzero()
    if again.numel():
        raise InputError(
            f"ItemIndex: got id {int(ordered[again[0, 0]])} more than once; expected each id once. Leave out the "
            "repeated items."
        )
    return own


def _check_vectors(vectors: Tensor, dim: int) -> None:
    if vectors.dim() != 2 or vectors.shape[1] != dim:
        raise InputError(
            f"ItemIndex: got vectors {list(vectors.shape)}; expected [n, {dim}]. Use the index's item tower."
        )
    if not bool(vectors.isfinite().all()):
        bad = int((~vectors.isfinite().all(1)).nonzero()[0, 0])
        raise InputError(
            f"ItemIndex: got vector {bad} with values that are not finite; expected numbers. Check the weights of the "
            "item tower."
        )


def check_filters(filters: Filters, batch: int) -> None:
    """Raise `InputError` for filters that do not fit a batch of queries."""
    for name, flags in (("required", filters.required), ("forbidden", filters.forbidden)):
        if flags is not None and (flags.dim() != 1 or flags.shape[0] != batch or flags.dtype != torch.int64):
            raise InputError(
                f"filters.{name}: got {flags.dtype} {list(flags.shape)} for {batch} queries; expected int64 [B]. "
                "Convert it."
            )
    excluded = filters.excluded
    if excluded is not None and (excluded.dim() != 2 or excluded.shape[0] != batch or excluded.dtype != torch.int64):
        raise InputError(
            f"filters.excluded: got {excluded.dtype} {list(excluded.shape)} for {batch} queries; expected int64 "
            f"[B, E]. Fill up shorter lists with {NO_ITEM}."
        )
