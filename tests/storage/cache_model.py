"""A cache in plain Python, by its definition: what `CacheSets` must do, row by row."""

from __future__ import annotations

from tilerec.spec.cache import CacheAlgorithm


class ModelCache:
    """Lines of sets first, then as many spare ones as are asked for."""

    def __init__(self, sets: int, ways: int, algorithm: CacheAlgorithm) -> None:
        self.sets, self.ways, self.algorithm = sets, ways, algorithm
        self.lines: list[dict[int, int]] = [{} for _ in range(sets)]  # per set: way -> row
        self.spare: set[int] = set()
        self.named: dict[int, int] = {}  # of resident rows
        self.count: dict[int, int] = {}
        self.serial = 0
        self.hits = self.misses = self.conflicts = self.evictions = 0

    def resident(self) -> set[int]:
        return self.spare | {row for own in self.lines for row in own.values()}

    def request(self, rows: set[int], oldest: int | None = None) -> None:
        self.serial += 1
        oldest = self.serial if oldest is None else oldest
        here = self.resident()
        self.hits += len(rows & here)
        self.misses += len(rows - here)
        for row in rows & here:
            self.named[row] = self.serial
        in_sets = {row for own in self.lines for row in own.values()}
        released = {row for row in self.spare if self.named[row] < oldest}
        wanting = rows - in_sets
        lfu = self.algorithm is CacheAlgorithm.LFU
        for s in range(self.sets):
            own = self.lines[s]
            queue = [row for row in sorted(wanting) if row % self.sets == s]
            if lfu:
                queue.sort(key=lambda row: -self.count.get(row, 0))
            ways = [w for w in range(self.ways) if w not in own or self.named[own[w]] < oldest]

            def turn(way: int, own: dict[int, int] = own) -> tuple[int, int]:
                if way not in own:
                    return (-1, -1)
                row = own[way]
                return (self.count.get(row, 0) if lfu else 0, self.named[row])

            ways.sort(key=turn)
            for row, way in zip(queue, ways, strict=False):
                if lfu and way in own and self.count.get(row, 0) + 1 < self.count.get(own[way], 0):
                    continue
                if way in own:
                    self.evictions += 1
                    del self.named[own[way]]
                own[way] = row
                wanting.discard(row)
        for row in released - wanting - rows:
            del self.named[row]
        before = set(self.spare)
        self.spare = (self.spare - released) | wanting
        self.spare -= {row for own in self.lines for row in own.values()}
        self.conflicts += len(wanting - before)
        for row in rows:
            self.named[row] = self.serial
            self.count[row] = self.count.get(row, 0) + 1
