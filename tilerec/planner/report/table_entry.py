"""`TableEntry`: one table's part of a plan's report.

Legend: S stages. Times are whole picoseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tilerec.json_document import JsonValue
from tilerec.spec.tile import Tile, Tiling, rectangles

PICO = 1e12
COLUMNS = (
    "path", "name", "rows", "dim", "data_type", "bytes", "sharding_type", "option", "tiling", "owner_ps", "home_ps",
)  # fmt: skip


@dataclass(frozen=True)
class TableEntry:
    """One table in a plan.

    Args:
        path, name: the module that holds it, and the table.
        rows, dim, data_type: of the table; `data_type` is a word such as "fp32".
        bytes: of all ranks together, with optimizer state or dense gradients, and buffers.
        sharding_type: its word in the plan. option: what the search called it ("columns x 4"), or "pinned".
        tiling: where its cells are.
        owner_ps: [S] what it adds on the rank that holds most of it; of a host's link, the rank's part. home_ps: [S]
            what it adds on every rank, for the rank's own batch. Both () where that is unknown.
    """

    path: str
    name: str
    rows: int
    dim: int
    data_type: str
    bytes: int
    sharding_type: str
    option: str
    tiling: Tiling
    owner_ps: tuple[int, ...] = ()
    home_ps: tuple[int, ...] = ()

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """(r0, r1, c0, c1, ranks) of each rectangle that lies together."""
        return rectangles(self.tiling)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that hold some of it."""
        return self.tiling.ranks()

    @property
    def seconds(self) -> tuple[float, ...]:
        """[S] what it adds on the rank that holds most of it, its own batch included."""
        return tuple((own + home) / PICO for own, home in zip(self.owner_ps, self.home_ps, strict=True))

    def ps_on(self, rank: int) -> int:
        """About what it adds on a rank, beside the rank's own batch: in proportion to what lies there."""
        if not self.owner_ps:
            return 0
        own = sum(r.cells for r in self.tiling.tiles_of(rank))
        return sum(self.owner_ps) * own // self._most if own else 0

    @cached_property
    def _most(self) -> int:
        return max(sum(r.cells for r in self.tiling.tiles_of(rank)) for rank in self.ranks)

    def to_json(self) -> list[Any]:
        """A row of `COLUMNS`."""
        return [
            self.path, self.name, self.rows, self.dim, self.data_type, self.bytes, self.sharding_type, self.option,
            self.tiling.to_json(), list(self.owner_ps), list(self.home_ps),
        ]  # fmt: skip

    @staticmethod
    def from_json(row: Sequence[Any] | JsonValue, stages: int, world_size: int) -> TableEntry:
        """The inverse of `to_json`.

        Args:
            stages: S. world_size: ranks that a tiling may name.

        Raises:
            ConfigError: it is no such row.
        """
        value = JsonValue.of(row, "TableEntry JSON")
        items = value.items("a row of columns")
        if len(items) != len(COLUMNS):
            raise value.error(f"{len(COLUMNS)} values: {list(COLUMNS)}", "Plan again.")
        found = dict(zip(COLUMNS, items, strict=True))
        name = found["name"].text()
        sizes = [found[key].whole(1) for key in ("rows", "dim")]
        tiling = Tiling.from_json(name, sizes[0], sizes[1], found["tiling"])
        tiling.check(name, world_size)
        times = []
        for key in ("owner_ps", "home_ps"):
            one = tuple(each.whole() for each in found[key].items())
            if len(one) not in (0, stages):
                raise found[key].error(f"no numbers, or {stages}, one for each stage", "Plan again.")
            times.append(one)
        texts = {key: found[key].text() for key in ("path", "data_type", "sharding_type", "option")}
        return TableEntry(
            name=name, rows=sizes[0], dim=sizes[1], bytes=found["bytes"].whole(), tiling=tiling, owner_ps=times[0],
            home_ps=times[1], **texts,
        )  # fmt: skip
