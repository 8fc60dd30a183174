"""How fast a machine's ranks do what a step of sharded tables is made of: seconds, as measured or by default.

Nouns
  width    columns of fp32: rows of another type count as the fp32 columns of as many bytes
  far      a row that comes from memory;  near: one that is still in a cache
  home     the rank whose batch it is;  owner: the rank that holds rows
  link     between ranks of one host;  network: between hosts, a rank's share of its host's network card
  call     a collective, whatever it carries

What each number multiplies stands in docs/planner-cost.md. `tilerec calibrate` measures them; without, the planner
takes defaults made from a `Topology`'s bandwidths.
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
    """Constants of a machine, while all its ranks work at once.

    Args:
        widths: columns at which the rates per row were taken, ascending.
        lookup_far, lookup_near: seconds to read and add one row, at each width.
        lookup_bag: seconds to write one pooled row.
        update_far, update_near: seconds to read, change and write one row of a table without optimizer state.
        update_id: seconds to sort one id and to add its gradient.
        update_bag: seconds to read the gradient of one bag.
        place, pick: seconds to put one row into the output, and to read its gradient out of the output's.
        route: seconds per id to sort a batch by owner.
        copy: seconds per byte that is copied.
        link_in, link_out: seconds per byte that a rank receives from, and sends to, ranks of its host.
        network_in, network_out: likewise for other hosts.
        duplex: a link sends and receives at once, so an exchange takes the longer of the two; else their sum, as where
            the same processor copies at both ends.
        call: seconds of a collective that carries nothing, between two ranks; call_peer: more for each further rank.
        step: seconds of a step that no table causes, for each collection.
        part: seconds for each part of a table (a range of rows on one rank) that a home addresses, and again for each
            that an owner reads for a home.
        replica: seconds for each table that lies on every rank, to agree on its gradients, beside its ids and rows.
        row_sum: seconds for each column block of a table whose optimizer needs sums over whole rows.
        cache: bytes of a rank's cache that rows may stay in.
        origin: where the numbers are from.
        fresh: seconds per byte of memory that a process gets beyond what it has had, the first time it is written. On
            virtual machines it is many times a copy; None: as a copy.

    Raises:
        ConfigError: a number is negative or no number, or rates do not fit the widths.
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
    duplex: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("widths", *PER_WIDTH):
            if isinstance(getattr(self, name), str) or not isinstance(getattr(self, name), Sequence):
                raise ConfigError(
                    f"Speeds: {name} is {getattr(self, name)!r}; give a list of numbers, one for each width."
                )
        widths = tuple(self.widths)
        whole = all(isinstance(w, int) and not isinstance(w, bool) for w in widths)
        if not whole or len(widths) < 2 or widths[0] < 1 or list(widths) != sorted(set(widths)):
            raise ConfigError(
                f"Speeds: widths are {self.widths!r}; give two or more whole numbers, ascending from 1."
            )
        object.__setattr__(self, "widths", widths)
        for name in PER_WIDTH:
            rates = tuple(getattr(self, name))
            if len(rates) != len(widths):
                raise ConfigError(
                    f"Speeds: {name} has {len(rates)} numbers for {len(widths)} widths; give one for each."
                )
            object.__setattr__(self, name, tuple(_number(name, rate) for rate in rates))
        for name in SINGLE:
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        if self.fresh is not None:
            object.__setattr__(self, "fresh", _number("fresh", self.fresh))
        if not isinstance(self.duplex, bool):
            raise ConfigError(f"Speeds: duplex is {self.duplex!r}; it must be True or False.")
        if isinstance(self.cache, bool) or not isinstance(self.cache, int) or self.cache < 0:
            raise ConfigError(f"Speeds: cache is {self.cache!r}; it must be a whole number of bytes from 0.")

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values."""
        out: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            out[f.name] = list(value) if isinstance(value, tuple) else value
        return out

    @staticmethod
    def from_json(data: Mapping[str, Any] | JsonValue) -> Speeds:
        """The inverse of `to_json`."""
        value = JsonValue.of(data, "Speeds JSON")
        known = [f.name for f in fields(Speeds)]
        required = (*PER_WIDTH, *SINGLE, "cache")
        found = value.record(known, required, "Measure again (tilerec calibrate), or correct the names.")
        for name in ("widths", *PER_WIDTH):
            if name in found:
                for each in found[name].items("a list of numbers, one for each width"):
                    each.number(0)
        for name in (*SINGLE, "fresh"):
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
        raise ConfigError(f"Speeds: {name} has {value!r}; it must be a number of seconds from 0.")
    return float(value)
