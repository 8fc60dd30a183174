"""`TableEntry`: the entry of one table in a plan's report.

Legend: S stages. Times are whole picoseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tilerec.json_document import JsonValue
from tilerec.planner.search.instance import PICO
from tilerec.spec.tile import Tile, Tiling, rectangles

COLUMNS = (
    "path", "name", "rows", "dim", "data_type", "bytes", "sharding_type", "option", "tiling", "owner_ps", "home_ps",
)  # fmt: skip


@dataclass(frozen=True)
class TableEntry:
    """One table in a plan.

    Args:
        path, name: path of the table's module, and the table's name.
        rows, dim, data_type: size of the table, and its data type as a word such as "fp32".
        bytes: bytes on all ranks together, including optimizer state or dense gradients, and buffers.
        sharding_type: sharding type in the plan. option: name of the search's option ("columns x 4"), or "pinned".
        tiling: tiling of the table.
        owner_ps: [S] time that the table adds on the rank that holds most of it; on a host's link, the rank's part.
        home_ps: [S] time that the table adds on every rank, for the rank's own batch. Both times are () if unknown.
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
        """(r0, r1, c0, c1, ranks) of each rectangle: adjacent column blocks with equal rows and owners are merged."""
        return rectangles(self.tiling)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold cells of the table."""
        return self.tiling.ranks()

    @property
    def seconds(self) -> tuple[float, ...]:
        """[S] seconds that the table adds on the rank that holds most of it, including the rank's own batch."""
        return tuple((own + home) / PICO for own, home in zip(self.owner_ps, self.home_ps, strict=True))

    def ps_on(self, rank: int) -> int:
        """Return the approximate ps that the table adds on a rank, in proportion to its cells there.

        The rank's own batch is not included.
        """
        if not self.owner_ps:
            return 0
        own = sum(r.cells for r in self.tiling.tiles_of(rank))
        return sum(self.owner_ps) * own // self._most if own else 0

    @cached_property
    def _most(self) -> int:
        return max(sum(r.cells for r in self.tiling.tiles_of(rank)) for rank in self.ranks)

    def to_json(self) -> list[Any]:
        """Return a list of JSON values, in the order of `COLUMNS`."""
        return [
            self.path, self.name, self.rows, self.dim, self.data_type, self.bytes, self.sharding_type, self.option,
            self.tiling.to_json(), list(self.owner_ps), list(self.home_ps),
        ]  # fmt: skip

    @staticmethod
    def from_json(row: Sequence[Any] | JsonValue, stages: int, world_size: int) -> TableEntry:
        """Read an entry that `to_json` returned.

        Args:
            stages: number of stages S. world_size: number of ranks; tilings may use ranks below it.

        Raises:
            ConfigError: the data is not such a row.
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
