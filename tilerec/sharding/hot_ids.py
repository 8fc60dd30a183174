"""`HotIds`: replaces the hot ids of a batch by the rows of their copies, before the batch is routed.

Nouns
  form  a feature that reads several tables may need other ids for each of them: one copy of the batch's ids per form
        (`modules/id_clamp.py` makes the first ones). Tables with other hot ids need further forms
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilerec.ops.hot.definition import finder_of
from tilerec.sharding.layout import SharedLayout


class HotIds:
    """Hot ids of the tables of a module. Make it with `of`."""

    def __init__(self, layout: SharedLayout) -> None:
        self._slots = layout.slots
        self._maps: dict[int, tuple[Tensor, Tensor]] = {}  # by table: hot ids and their finder
        self._rows = [table.tiling.rows for table in layout.tables]
        self._names = [f"{slot.feature}@{layout.tables[slot.table].name}" for slot in layout.slots]
        for t, table in enumerate(layout.tables):
            if table.tiling.head is not None:
                ids = table.tiling.head.hot.ids
                self._maps[t] = torch.from_numpy(ids.copy()), finder_of(ids)

    @staticmethod
    def of(layout: SharedLayout) -> HotIds | None:
        """Return the hot ids of a layout's tables; None if there are none."""
        return HotIds(layout) if any(table.tiling.head is not None for table in layout.tables) else None

    def __call__(
        self, every: Sequence[Tensor], forms: Sequence[int], keys: Sequence[int], offsets: Tensor,
        batches: Sequence[int],
    ) -> tuple[list[Tensor], list[int]]:  # fmt: skip
        """Return the batch's ids in all forms with hot ids replaced, and the form of each slot.

        Args:
            every: ids in each form.
            forms, keys: per slot, its form and the position of its key.
            offsets, batches: of the batch, as in `pooled_lookup`.

        Raises:
            InputError: see the op `hot_ids`.
        """
        # By key and form, the different maps of the slots that read it: the first of them in the form itself.
        wanted: dict[tuple[int, int], list[int]] = {}
        own_forms: list[int] = []
        for slot, form, key in zip(self._slots, forms, keys, strict=True):
            several = wanted.setdefault((key, form), [])
            table = slot.table if slot.table in self._maps else -1
            alike = [k for k, other in enumerate(several) if self._same(table, other)]
            if not alike:
                several.append(table)
            own_forms.append((alike[0] if alike else len(several) - 1) * len(every) + form)
        found: list[Tensor] = []
        for k in range(max(map(len, wanted.values()), default=1)):
            for form, ids in enumerate(every):
                tables = {
                    key: several[k]
                    for (key, own), several in wanted.items()
                    if own == form and k < len(several) and several[k] >= 0
                }
                found.append(self._replaced(ids, tables, keys, offsets, batches) if tables else ids)
        types = {ids.dtype for ids in found}
        return [ids.to(torch.int64) if len(types) > 1 else ids for ids in found], own_forms

    def _same(self, table: int, other: int) -> bool:
        if table < 0 or other < 0:
            return table == other
        return self._rows[table] == self._rows[other] and torch.equal(self._maps[table][0], self._maps[other][0])

    def _replaced(
        self, ids: Tensor, tables: dict[int, int], keys: Sequence[int], offsets: Tensor, batches: Sequence[int]
    ) -> Tensor:
        """Return the ids with the hot ones of some keys replaced. tables: by key."""
        slot_of = {(key, slot.table): s for s, (slot, key) in enumerate(zip(self._slots, keys, strict=True))}
        maps = [self._on(table, ids.device) for table in tables.values()]
        return torch.ops.tilerec.hot_ids(
            ids, offsets, list(tables), batches, [hot for hot, _ in maps], [finder for _, finder in maps],
            [self._rows[table] for table in tables.values()],
            ",".join([self._names[slot_of[item]] for item in tables.items()]),
        )  # fmt: skip

    def _on(self, table: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the hot ids of a table and their finder, and keep them on this device."""
        hot, finder = self._maps[table]
        if hot.device != device:
            self._maps[table] = hot, finder = hot.to(device), finder.to(device)
        return hot, finder
