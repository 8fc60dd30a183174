"""Speeds of a machine: seconds per operation of a training step with sharded tables.

Nouns
  width    number of fp32 columns; rows of another data type count as fp32 columns of the same number of bytes
  far      a row that is read from memory;  near: a row that is in a CPU or GPU cache
  home     the rank that has the batch;  owner: a rank that holds rows
  link     connection of ranks on one host;  network: between hosts, a rank's share of its host's network card
  call     one collective, without the time of its bytes

docs/planner-cost.md lists the factor of each number. `tilerec calibrate` measures them; by default the planner derives
them from the bandwidths of a `Topology`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, final

from tilerec.errors import ConfigError
from tilerec.json_document import JsonValue

WIDTHS = (16, 32, 64, 128, 256)


@final
@dataclass(frozen=True)
class Speeds:
    """Speeds of a machine while all its ranks work at once.

    Args:
        widths: numbers of columns at which the rates per row were measured, ascending.
        lookup_far, lookup_near: seconds to read and add one row, at each width.
        lookup_bag: seconds to write one pooled row, at each width.
        update_far, update_near: seconds to read, change and write one row of a table without optimizer state.
        update_id: seconds to sort one id and to add its gradient.
        update_bag: seconds to read the gradient of one bag.
        place, pick: seconds to write one row to the output, and to read its gradient from the output's gradient.
        route: seconds per id to sort a batch by owner.
        copy: seconds per copied byte.
        link_in, link_out: seconds per byte that a rank receives from, and sends to, ranks of its host.
        network_in, network_out: seconds per byte that a rank receives from, and sends to, ranks of other hosts.
        duplex: True: a link sends and receives at once, so an exchange takes the longer of the two. False: it takes
            their sum, as where the same processor copies at both ends.
        call: seconds of an empty collective between two ranks. call_peer: additional seconds per further rank.
        step: seconds per step and collection that do not depend on the tables.
        part: seconds per part of a table (a range of rows on one rank) to which a home sends ids, and again per part
            that an owner reads for a home.
        replica: seconds per table that is on every rank, to reduce its gradients, in addition to its ids and rows.
        row_sum: seconds per column block of a table whose optimizer needs sums over whole rows.
        cache: bytes of a rank's CPU or GPU cache that can hold rows.
        origin: source of the numbers.
        fresh: seconds per byte of newly allocated memory at its first write. On virtual machines it is many times
            `copy`. None: equal to `copy`.
        file_row: seconds to read a row of 512 bytes in a file from the disk, or to write it. None: 10 us.
        hot_id: seconds to look for an id among the hot ids of its table. None: 8 ns.

    Raises:
        ConfigError: a value is negative or not a number, or the rates do not match the widths.
    """

    lookup_far: Sequence[float]
    lookup_near: Sequence[float]
    lookup_bag: Sequence[float]
    update_far: Sequence[float]
    update_near: Sequence[float]
    update_id: Sequence[float]
    update_bag: Sequence[float]
    place: Sequence[float]
    pick: Sequence[float]
    route: float
    copy: float
    link_in: float
    link_out: float
    network_in: float
    network_out: float
    call: float
    call_peer: float
    step: float
    part: float
    replica: float
    row_sum: float
    cache: int
    widths: Sequence[int] = field(default=WIDTHS, kw_only=True)
    origin: str = field(default="", kw_only=True)
    fresh: float | None = field(default=None, kw_only=True)
    file_row: float | None = field(default=None, kw_only=True)
    hot_id: float | None = field(default=None, kw_only=True)
    duplex: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("widths", *PER_WIDTH):
            if isinstance(getattr(self, name), str) or not isinstance(getattr(self, name), Sequence):
                raise ConfigError(
                    f"Speeds: got {name}={getattr(self, name)!r}; expected a list of numbers. Pass one for each width."
                )
        widths = tuple(self.widths)
        whole = all(isinstance(w, int) and not isinstance(w, bool) for w in widths)
        if not whole or len(widths) < 2 or widths[0] < 1 or list(widths) != sorted(set(widths)):
            raise ConfigError(
                f"Speeds: got widths={self.widths!r}; expected two or more whole numbers. Pass them ascending from 1."
            )
        object.__setattr__(self, "widths", widths)
        for name in PER_WIDTH:
            rates = tuple(getattr(self, name))
            if len(rates) != len(widths):
                raise ConfigError(
                    f"Speeds: got {len(rates)} numbers in {name}; expected {len(widths)}. Pass one for each width."
                )
            object.__setattr__(self, name, tuple(_number(name, rate) for rate in rates))
        for name in SINGLE:
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        for name in ("fresh", "file_row", "hot_id"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _number(name, getattr(self, name)))
        if not isinstance(self.duplex, bool):
            raise ConfigError(f"Speeds: got duplex={self.duplex!r}; expected True or False. Pass one of them.")
        if isinstance(self.cache, bool) or not isinstance(self.cache, int) or self.cache < 0:
            raise ConfigError(
                f"Speeds: got cache={self.cache!r}; expected a whole number of bytes from 0. Pass the bytes of one "
                "rank."
            )

    def to_json(self) -> dict[str, Any]:
        """Return a dict of JSON values."""
        out: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            out[f.name] = list(value) if isinstance(value, tuple) else value
        return out

    @staticmethod
    def from_json(data: Mapping[str, Any] | JsonValue) -> Speeds:
        """Build from a dict that `to_json` returned."""
        value = JsonValue.of(data, "Speeds JSON")
        known = [f.name for f in fields(Speeds)]
        required = (*PER_WIDTH, *SINGLE, "cache")
        found = value.record(known, required, "Measure again (tilerec calibrate), or correct the names.")
        for name in ("widths", *PER_WIDTH):
            if name in found:
                for each in found[name].items("a list of numbers, one for each width"):
                    each.number(0)
        for name in (*SINGLE, "fresh", "file_row", "hot_id"):
            if name in found and found[name].value is not None:
                found[name].number(0)
        if "origin" in found:
            found["origin"].text()
        try:
            return Speeds(**value.value)
        except ConfigError as error:
            raise value.refused(error) from error


PER_WIDTH = (
    "lookup_far", "lookup_near", "lookup_bag", "update_far", "update_near", "update_id", "update_bag", "place", "pick",
)  # fmt: skip
SINGLE = (
    "route", "copy", "link_in", "link_out", "network_in", "network_out", "call", "call_peer", "step", "part", "replica",
    "row_sum",
)  # fmt: skip


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConfigError(
            f"Speeds: got {value!r} in {name}; expected a number of seconds from 0. Measure again (tilerec calibrate)."
        )
    return float(value)
