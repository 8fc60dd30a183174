"""`Traffic`: the bytes that a rank sent, by name of the call and receiving rank.

Messages from a rank to itself are not counted. An all-reduce is counted as the ring that sends the fewest bytes: see
`record_ring`. Start-up checks (`all_gather_object`, `barrier`) are not counted.

Legend: W ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from operator import add, mul
from typing import NamedTuple, final

from tilerec.errors import ConfigError


class Sent(NamedTuple):
    """One line of the table.

    name: name of the calls.
    calls: number of calls.
    bytes: bytes sent to each rank, [W]; 0 for the rank itself.
    """

    name: str
    calls: int
    bytes: tuple[int, ...]

    @property
    def total(self) -> int:
        """Bytes sent to all other ranks."""
        return sum(self.bytes)


class _Counts:
    """Running sums shared by every `Traffic` of one rank: the channels and parts of one group add to them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: dict[str, int] = {}
        self.bytes: dict[str, list[int]] = {}

    def line(self, name: str) -> list[int]:
        """Count a call of this name and return its bytes per rank, to which the caller adds."""
        self.calls[name] = self.calls.get(name, 0) + 1
        line = self.bytes.get(name)
        if line is None:
            line = self.bytes[name] = [0] * self.size
        return line


@final
class Traffic:
    """The bytes that one rank of W sent since the last `reset`.

    Worked example: rank 0 of 2 sends 3 and 4 int32 to ranks 0 and 1 under "ids", twice; `table()` is
    `[Sent("ids", calls=2, bytes=(0, 32))]`.
    """

    __slots__ = ("_counts", "_ranks", "_whole", "rank", "size")

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._counts = _Counts(size)
        self._ranks: tuple[int, ...] = tuple(range(size))
        self._whole = True

    def part(self, ranks: Sequence[int]) -> Traffic:
        """Return a view for a group of some of the ranks, numbered in that order from 0; it adds to the same sums."""
        view = Traffic(ranks.index(self.rank), len(ranks))
        view._counts = self._counts
        view._ranks = tuple(self._ranks[rank] for rank in ranks)
        view._whole = view._ranks == tuple(range(self._counts.size))
        return view

    def record(self, name: str, splits: Sequence[int], element_size: int) -> None:
        """Count a call that sent `splits[p]` elements to each rank p, [W]."""
        line = self._counts.line(name)
        own = self._ranks[self.rank]
        if self._whole:
            line[:] = map(add, line, map(mul, splits, repeat(element_size)))
        else:
            for rank, split in zip(self._ranks, splits, strict=True):
                line[rank] += split * element_size
        line[own] = 0

    def record_to(self, name: str, bytes_by_rank: Mapping[int, int]) -> None:
        """Count a call that sent `bytes_by_rank[p]` bytes to each rank p."""
        line = self._counts.line(name)
        for rank, count in bytes_by_rank.items():
            if rank != self.rank:
                line[self._ranks[rank]] += count

    def record_ring(self, name: str, elements: int, element_size: int) -> None:
        """Count a sum over all ranks as a ring: a rank sends W - 1 of W chunks to the next rank, twice.

        Chunks are of equal size; the first `elements % W` are one element longer. In the first round rank r sends all
        chunks but r + 1, in the second all but r + 2 (mod W). All ranks together send 2 (W - 1) elements per element.
        """
        line = self._counts.line(name)
        size = self.size
        if size == 1:
            return
        each, more = divmod(elements, size)
        kept = sum(each + ((self.rank + step) % size < more) for step in (1, 2))
        line[self._ranks[(self.rank + 1) % size]] += (2 * elements - kept) * element_size

    def table(self) -> list[Sent]:
        """Return one line per name, in the order of their first calls."""
        return [Sent(name, self._counts.calls[name], tuple(line)) for name, line in self._counts.bytes.items()]

    def __iter__(self) -> Iterator[Sent]:
        return iter(self.table())

    def __getitem__(self, name: str) -> Sent:
        """Return the line of a name; zero calls and bytes if there was no call."""
        counts = self._counts
        line = counts.bytes.get(name, [0] * counts.size)
        return Sent(name, counts.calls.get(name, 0), tuple(line))

    def total(self) -> int:
        """Return the bytes sent to all other ranks under all names."""
        return sum(map(sum, self._counts.bytes.values()))

    def between(self, hosts: Sequence[Sequence[int]]) -> dict[str, int]:
        """Return the bytes sent to other hosts, by name, given the ranks of each host (`Topology.hosts`)."""
        own = self._ranks[self.rank]
        homes = [host for host in hosts if own in host]
        if len(homes) != 1 or sorted(rank for host in hosts for rank in host) != list(range(self._counts.size)):
            raise ConfigError(
                f"Traffic.between: hosts {tuple(map(tuple, hosts))} do not hold each of the ranks 0 to "
                f"{self._counts.size - 1} once; pass the topology's hosts."
            )
        near = set(homes[0])
        return {
            name: sum(count for rank, count in enumerate(line) if rank not in near)
            for name, line in self._counts.bytes.items()
        }

    def reset(self) -> None:
        """Set all counts to zero."""
        self._counts.calls.clear()
        self._counts.bytes.clear()

    def __str__(self) -> str:
        lines = self.table()
        width = max([4, *(len(line.name) for line in lines)])
        head = f"{'name':{width}}  {'calls':>7}  {'bytes sent':>15}"
        body = [f"{line.name:{width}}  {line.calls:>7,}  {line.total:>15,}" for line in lines]
        return "\n".join([f"rank {self._ranks[self.rank]} of {self._counts.size}", head, *body])
