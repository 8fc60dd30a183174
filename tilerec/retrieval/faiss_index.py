"""`FaissIndex`: the interface of `ItemIndex` on the package faiss, for searches outside of a model.

    form       exact         int8                  ivf           ivf-int8
    faiss      IndexFlatIP   IndexScalarQuantizer  IndexIVFFlat  IndexIVFScalarQuantizer, by inner product

It is no part of an exported program. Its int8 forms have 8 bits per number over the range of a column, so their scores
differ from those of `ItemIndex`. The order of equal scores is faiss's.

Legend: B queries, D dim, N items, n items of a call, E excluded ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilerec.errors import ConfigError, InputError
from tilerec.retrieval.index_files import import_faiss
from tilerec.retrieval.item_index import (
    NO_ITEM,
    Filters,
    IndexForm,
    check_filters,
    checked_ids,
    checked_items,
    without_excluded,
)


class FaissIndex:
    """Items with their vectors and raw 64-bit ids in an index of faiss.

    Use `FaissIndex.build`. Search: `index(query_BD, k)`. Arguments and results are those of `ItemIndex`.

    Attributes:
        form: see the top of this file.
        nprobe: lists that a query reads.
        native: the index of faiss.
    """

    def __init__(self, form: IndexForm, index: Any, dim: int, nprobe: int) -> None:
        self.form, self.nprobe = form, nprobe
        self.native, self._dim = index, dim
        self._flags: dict[int, int] = {}

    @staticmethod
    def build(
        vectors: Tensor, ids: Tensor | Sequence[int], *, form: IndexForm = "exact", flags: Tensor | None = None,
        lists: int | None = None, nprobe: int | None = None,
    ) -> FaissIndex:  # fmt: skip
        """Return an index of items; see `ItemIndex.build`.

        Raises:
            ConfigError: faiss is not installed, or settings do not fit.
            InputError: see `ItemIndex.build`.
        """
        faiss = import_faiss("FaissIndex")
        count, dim = vectors.shape
        own_ids, _ = checked_items(vectors, ids, flags, dim, "cpu")
        data = np.ascontiguousarray(vectors.detach().float().cpu().numpy())
        kind, metric = faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
        if form in ("ivf", "ivf-int8"):
            wanted = max(1, round(2 * count**0.5)) if lists is None else lists
            if not 1 <= wanted <= count:
                raise ConfigError(
                    f"FaissIndex: got lists={wanted} for {count:,} items; expected 1 to the number of items. Use fewer."
                )
            probes = max(1, round(wanted / 20)) if nprobe is None else nprobe
            coarse = faiss.IndexFlatIP(dim)
            made = (
                faiss.IndexIVFFlat(coarse, dim, wanted, metric)
                if form == "ivf"
                else faiss.IndexIVFScalarQuantizer(coarse, dim, wanted, kind, metric)
            )
            made.cp.min_points_per_centroid = 1  # no warning for small indexes
        else:
            probes = 1
            flat = faiss.IndexFlatIP(dim) if form == "exact" else faiss.IndexScalarQuantizer(dim, kind, metric)
            made = faiss.IndexIDMap2(flat)
        made.train(data)
        index = FaissIndex(form, made, dim, probes)
        index.add(vectors, own_ids, flags)
        return index

    def __call__(
        self, query: Tensor, k: int, filters: Filters | None = None, *, nprobe: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return scores float32 [B, k] and raw ids int64 [B, k], best first; see `ItemIndex.forward`."""
        faiss = import_faiss("FaissIndex")
        filters = Filters() if filters is None else filters
        if query.dim() != 2 or query.shape[1] != self._dim or not bool(query.isfinite().all()):
            raise InputError(
                f"FaissIndex: got queries {list(query.shape)}; expected finite numbers [B, {self._dim}]. Check them."
            )
        if not 1 <= k <= len(self):
            raise InputError(
                f"FaissIndex: got k={k} with {len(self):,} items; expected 1 to {len(self):,}. Correct it."
            )
        check_filters(filters, len(query))
        data = np.ascontiguousarray(query.detach().float().cpu().numpy())
        wanted = k if filters.excluded is None else min(k + filters.excluded.shape[1], len(self))
        score = torch.full((len(data), wanted), -torch.inf)
        found = torch.full((len(data), wanted), NO_ITEM)
        zeros = torch.zeros(len(data), dtype=torch.int64)
        flags = torch.stack([zeros if one is None else one for one in (filters.required, filters.forbidden)], 1)
        for required, forbidden in flags.unique(dim=0).tolist():
            own = (flags == torch.tensor([required, forbidden])).all(1).numpy()
            part = self._search(faiss, data[own], wanted, required, forbidden, nprobe or self.nprobe)
            score[own], found[own] = part
        score = score.masked_fill(found == NO_ITEM, -torch.inf)
        if filters.excluded is None:
            return score, found
        score, found = without_excluded(score, found, filters.excluded, k)
        return score, found

    def _search(
        self, faiss: Any, data: Any, k: int, required: int, forbidden: int, nprobe: int
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        selector = None
        if required or forbidden:
            taken = [one for one, own in self._flags.items() if own & required == required and not own & forbidden]
            selector = faiss.IDSelectorBatch(np.array(taken, np.int64))
        if self.form in ("ivf", "ivf-int8"):
            settings = faiss.SearchParametersIVF(sel=selector, nprobe=nprobe)
        else:
            settings = faiss.SearchParameters(sel=selector)
        score, ids = self.native.search(data, k, params=settings)
        return torch.from_numpy(score), torch.from_numpy(ids)

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._flags)

    def item_ids(self) -> Tensor:
        """Return the raw ids of all items, int64 [N]."""
        return torch.tensor(list(self._flags), dtype=torch.int64)

    def add(self, vectors: Tensor, ids: Tensor | Sequence[int], flags: Tensor | None = None) -> None:
        """Add items; an item whose id the index has is replaced; see `ItemIndex.add`."""
        own, words = checked_items(vectors, ids, flags, self._dim, "cpu")
        self._remove([one for one in own.tolist() if one in self._flags])
        data = np.ascontiguousarray(vectors.detach().float().cpu().numpy())
        self.native.add_with_ids(data, own.cpu().numpy())
        self._flags |= dict(zip(own.tolist(), (words >> 1).tolist(), strict=True))

    def remove(self, ids: Tensor | Sequence[int]) -> None:
        """Remove items; see `ItemIndex.remove`."""
        own = checked_ids(ids, "cpu").tolist()
        unknown = [one for one in own if one not in self._flags]
        if unknown:
            raise InputError(f"FaissIndex: got id {unknown[0]} to remove; expected ids of the index. Leave it out.")
        self._remove(own)

    def _remove(self, ids: list[int]) -> None:
        if ids:
            self.native.remove_ids(np.array(ids, np.int64))
        for one in ids:
            del self._flags[one]
