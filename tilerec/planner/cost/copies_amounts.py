"""Amounts of the option COPIES: a copy of the table on every rank; and of heads, copies of rows that are read most.

Each rank looks its own batch up in its copy. Then all ranks exchange their gradients, and every copy is updated with
the gradients of all ranks (docs/planner-cost.md).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tilerec.planner.cost.model import KEY_BYTES, NETWORK_STAGES, Copied, Model, Replicas
from tilerec.planner.cost.option_amounts import OptionAmounts
from tilerec.planner.cost.portable import Floats
from tilerec.planner.cost.workload import Ints


class Head(NamedTuple):
    """Rows of tables on every rank, and the batch of one home in them.

    Args:
        first, rows: [T] the first row, and their number; 0 without a head. Hot ids are rows behind the table.
        reads, once, distinct: [T] share of the table's ids, of the distinct ids of one home, and of the distinct rows
            of all homes.
        P, N, payload, items: [n] bags, ids, bytes of ids, and bags to write, for the tables of an option.
    """

    first: Ints
    rows: Ints
    reads: Floats
    once: Floats
    distinct: Floats
    P: Floats
    N: Floats
    payload: Floats
    items: Floats


# The charges of each form of `Replicas`: 0 bags, 1 rows, 2 dense, 3 dense without an attached optimizer, 4 shares.
_CHARGES_OF_FORMS = (
    ("replicas", (0, 1, 2, 4)), ("replica rows", (0, 1, 4)), ("dense replicas", (2, 3)),
    ("replica shares", (4,)),
)  # fmt: skip


def add_copies(amounts: OptionAmounts, o: int, t: Ints) -> None:
    """Add the amounts of option o, copies on every rank, for tables t."""
    work = amounts.work
    reads = amounts.bags[t], amounts.ids[t], amounts.payload[t], amounts.bags[t]
    _add_rows(amounts, amounts.model, o, t, np.zeros_like(t), work.rows[t], *reads)
    amounts.put(amounts.cost, o, t, "ids", amounts.ids[t] * amounts.model.speeds.route)
    # Nothing travels, so ids are not sent once each.
    beyond = (amounts.bags[t] - amounts.least_bags[t]) * work.dim[t] * work.wide
    beyond = beyond + (amounts.payload[t] - amounts.least_payload[t]) * (1 + amounts.model.depth)
    amounts.home_memory[t, o, amounts.model.tier] += np.floor(beyond).astype(np.int64)
    amounts.use("partly filled", o, t, amounts.part_filled[t])


def add_head(amounts: OptionAmounts, model: Model, o: int, t: Ints, head: Head) -> None:
    """Add the amounts of copies of the head of tables t; the other rows have amounts of their own."""
    # Ranks without a piece of the table have a copy, too.
    at_home = amounts.options[o].width < amounts.ranks
    _add_rows(amounts, model, o, t, head.first[t], head.rows[t], head.P, head.N, head.payload, head.items, at_home)


def _add_rows(
    amounts: OptionAmounts, model: Model, o: int, t: Ints, first: Ints, rows: Ints, bags: Floats, ids: Floats,
    payload: Floats, items: Floats, at_home: bool = False,
) -> None:  # fmt: skip
    """Add the amounts of copies of some rows.

    Args:
        model: with the heads of the tables. first, rows: [n] the first of the rows, and their number.
        bags, ids, payload: [n] of one home. items: bags, or ids of a sequence, to write there.
        at_home: the copies are no part of a piece, whose ranks hold nothing but pieces of their own.
    """
    seconds = amounts.home if at_home else amounts.cost
    work, ranks = model.workload, amounts.ranks
    rates, speeds = model.rates, model.speeds
    dim, element = work.dim[t].astype(np.float64), work.element[t]
    far = model.lookup_far(t, model.seen(1).between(t, first, first + rows))
    routed = rates.copied(2.0 * payload) + speeds.part * 2.0 * amounts.features[t]
    amounts.put(seconds, o, t, "ids", routed)
    lookup = rates.lookup(ids, far, bags, dim, element) + rates.copied(payload)
    amounts.put(seconds, o, t, "lookup", lookup)
    amounts.put(seconds, o, t, "gradients", items * (rates.at("place", dim) + rates.at("pick", dim)))
    every_rank = np.full(len(t), ranks)
    replicas = Replicas(model, Copied(t, first, first + rows, every_rank, dim, bags, ids))
    others = ranks - 1.0
    bytes_sent = replicas.sent * others + 2.0 * replicas.reduced * others / ranks
    every = replicas.distinct
    state = work.cell_state[t] * work.attached[t]
    update = rates.update(
        replicas.ids, replicas.bags, every, model.update_far(every), dim, element, state, work.row_state[t]
    )
    dense = rates.copied(3.0 * rows * dim * element) * ~work.attached[t]
    near, far_bytes = (bytes_sent * peers / others for peers in _peers(amounts))
    link = rates.exchanged(near, near)
    amounts.put(seconds, o, t, "update", update + dense + replicas.seconds + link)
    amounts.put(seconds, o, t, NETWORK_STAGES[3], rates.exchanged(far_bytes, far_bytes, network=True))
    memory = model.weights(t, rows.astype(np.float64), dim)
    memory = memory + payload * (1 + model.depth) + bags * dim * work.wide + ids * KEY_BYTES
    memory = memory + 2.0 * (replicas.sent * others + replicas.reduced)
    for to in (amounts.home_memory,) if at_home else (amounts.memory, amounts.least_memory):
        to[t, o, model.tier] += np.floor(memory).astype(np.int64)
    for charge, forms in _CHARGES_OF_FORMS:
        amounts.use(charge, o, t, np.isin(replicas.form, forms))


def _peers(amounts: OptionAmounts) -> tuple[float, float]:
    """Return the number of other ranks on a rank's host, and on other hosts.

    They are those of the rank for which an exchange with all others takes longest; in a bound, least long.
    """
    some, ranks, sizes = min if amounts.lower else max, amounts.ranks, amounts.sizes
    if amounts.topology.nic == "host":  # links and network cards are separate stages
        return some(sizes) - 1.0, some(ranks - n for n in sizes) * 1.0
    rates = amounts.model.rates

    def seconds(n: int) -> float:
        away = float(ranks - n)
        return float(rates.exchanged(n - 1.0, n - 1.0) + rates.exchanged(away, away, network=True))

    n = some(sizes, key=seconds)
    return n - 1.0, float(ranks - n)
