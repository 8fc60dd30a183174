"""`PieceAmounts`: amounts of one option that splits tables, or places them whole: pieces whose owners serve all homes.

Both ends of an exchange cost time (home_side.py). The owner of a piece receives ids, sends rows and receives gradients;
`cost` has its side. Every home does the opposite; `home` has its side.

If row pieces of one table share a host, a proxy on it adds their rows before they cross to other hosts (host_sums.py).

Legend: T tables, n tables of this option, P present bags, N ids, q share of a table's traffic.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tilerec.planner.cost.copies_amounts import Head, add_head
from tilerec.planner.cost.cuts import distinct_below, heads_of
from tilerec.planner.cost.host_sums import sums_inside_hosts
from tilerec.planner.cost.model import HOST, KEY_BYTES, NETWORK_STAGES
from tilerec.planner.cost.option_amounts import OptionAmounts
from tilerec.planner.cost.portable import Floats
from tilerec.planner.cost.ways import Option, Way
from tilerec.planner.cost.workload import Bools, Ints

MANY_RANGES = 8
"""Of more ranges of ordered ids, one more than so many are looked at."""
ROW_CHANGE = 1.0 / 64  # relative change of a range of rows, to measure how its present bags depend on its rows


def add_pieces(amounts: OptionAmounts, o: int, option: Option, t: Ints) -> PieceAmounts:
    """Add the amounts of option o, which splits tables t or places them whole; return the counts they follow from.

    `PieceAmounts.add_placed` adds the rest.
    """
    pieces = PieceAmounts(amounts, o, option, t)
    pieces.add_exchanges()
    pieces.add_lookup()
    pieces.add_sums_inside_hosts()
    pieces.add_home()
    pieces.add_update()
    if option.head:
        add_head(amounts, pieces.model, o, t, pieces.head)
    amounts.use("exchange", o, t, amounts.ranks > 1)
    amounts.use("hosts", o, t, pieces.merge > 0.0)
    # Rows of repeated ids are written to all bags at once.
    added = amounts.work.per_table(np.where(pieces.once, 0.0, 1.0))[t] > 0.0
    in_parts = pieces.rows > 1 or option.head > 0.0
    amounts.use("partly filled", o, t, in_parts & added | amounts.part_filled[t])
    return pieces


class Ranges(NamedTuple):
    """Parts of each table in one range of its rows, [T] each. In a bound these are the means of all ranges.

    Args:
        reads: share of the ids. rows: of the rows. distinct: of the distinct rows in the batches of all ranks. once: of
            the distinct ids of one home. missed: rows that are not in the cache of the range.
    """

    reads: Floats
    rows: Floats
    distinct: Floats
    once: Floats
    missed: Floats


class PieceAmounts:
    """Counts [n] of one piece, and of all pieces of a home, from which all costs follow.

    hot_rows, cut_off: [T] rows of heads: copies of hot ids, which are also in some range; rows that no range has.
    columns, rows: column blocks, and ranges of rows in each of them. parts: messages of a home. on: ranks of a piece.
    once: [F] features whose ids homes send once each. ranges: shares [T] of a table in one range of rows, the range
    that costs most (in a bound: the mean). share: [n] of its rows. uneven: some tables have uneven ranges. cut: those.
    P, N: present bags and ids of a range, for each home.
    home_P, home_N: the same for a home's sum over ranges; home_items: bags, or ids of a sequence, to write there.
    whole_P, whole_N, whole_payload: of the whole table. more_P, more_N, more_payload: repetitions in the batch of the
    owner of a whole table, which do not travel. payload, home_payload: bytes of ids. kept: part of the present bags
    that a slightly shorter range would not save. distinct: rows that all homes read. merge: 1.0 for tables whose rows
    are added inside hosts. sent: bags that a member sends on as a proxy.
    """

    def __init__(self, amounts: OptionAmounts, o: int, option: Option, t: Ints) -> None:
        self.amounts, self.o, self.t, self.option = amounts, o, t, option
        head_rows = heads_of(amounts.work, option.head, cached=option.cached)  # of all tables, as for other options
        self.hot_rows = hot = np.where(amounts.work.ordered & (not option.cached), 0, head_rows)
        self.cut_off = head_rows - hot
        self.model = model = amounts.model.with_most_frequent(hot) if hot.any() else amounts.model
        work, lower = model.workload, amounts.lower
        way, k, on = option[:3]
        self.on, self.ranks = on, float(amounts.ranks)
        self.columns = columns = k if way in (Way.COLUMNS, Way.GRID) else 1
        self.rows = rows = option.ranges
        self.parts = float(rows * columns)
        self.width, self.element = work.dim[t] / float(columns), work.element[t]
        self.once = once = self._sent_once()
        distinct = amounts.distinct_if(once)
        self.head = head = self._head(distinct)
        self.even = even = (1.0 - head.reads) / rows
        self.even_once = even_once = (1.0 - head.once) / rows
        self.cut = np.intersect1d(amounts.ranges.tables, t, assume_unique=True)
        self.uneven = rows > 1 and len(self.cut) > 0
        self._most: dict[int, Floats] = {}
        self.ranges = ranges = self._ranges()
        self.share = ranges.rows[t]
        self.P, self.N, lengths = self._in_a_range(distinct)
        least = lower and self.uneven
        self.home_P, self.home_N, home_lengths = (
            (x[t] for x in work.present(even, distinct, even_once))
            if self.uneven and not least
            else (self.P, self.N, lengths)
        )
        self.home_items = self.home_P
        if once.any():
            self.home_items = (self._least_present(None, 1)[0] if least else work.present(even)[0])[t]
        behind = 1.0 - head.reads
        every = [x[t] for x in self._behind(behind)]
        whole = [x[t] for x in work.present(behind, distinct, 1.0 - head.once)] if once.any() else every
        self.whole_P, self.whole_N = whole[:2]
        self.whole_payload = amounts.payload_of(t, 1.0, behind[t], *whole[1:])
        shorter = 1.0 - ROW_CHANGE
        fewer = work.present(ranges.reads * shorter, distinct, ranges.once * shorter)[0][t]
        self.kept = np.clip(1.0 - (1.0 - fewer / np.maximum(self.P, 1e-300)) / ROW_CHANGE, 0.0, 1.0)
        self.payload = amounts.payload_of(t, self.share, ranges.reads[t], self.N, lengths)
        self.home_payload = amounts.payload_of(t, self.share, even[t], self.home_N, home_lengths)
        alone = float(option.holders == 1)
        self.more_P, self.more_N = alone * (every[0] - self.P), alone * (every[1] - self.N)
        self.more_payload = alone * (amounts.payload_of(t, 1.0, behind[t], *every[1:]) - self.payload)
        self.distinct = model.all_distinct[t] * ranges.distinct[t]
        self.sums = sums_inside_hosts(model, on, self.parts, even, even_once, t, distinct, lower=lower)
        self.merge, self.direct = self.sums.merge, 1.0 - self.sums.merge
        self.sent, self.home_sums = self.sums.sent, self.sums.home
        # Rows of repeated ids are written to all their bags.
        self.written = self.sums
        if once.any():
            self.written = sums_inside_hosts(
                model, on, self.parts, even, even, t, np.full(len(once), -1.0), lower=lower
            )
        if least and on > 1:
            self._count_least_sums(distinct)

    def _sent_once(self) -> Bools:
        """Return [F] features whose ids homes send once each; owners aside, of a whole table.

        If owners and other homes decide differently, all count as the others, and in a bound as those that send less.
        """
        amounts, holders = self.amounts, self.option.holders
        behind: Floats | float = 1.0 - self.option.head
        if self.hot_rows.any():
            work = amounts.work
            behind = np.where(self.cut_off > 0, behind, work.rows / (work.rows + self.hot_rows))[work.table]
        own = amounts.sent_once(behind * (1.0 - 1.0 / holders))
        if holders == amounts.ranks:
            return own
        others = amounts.sent_once(behind)
        return own | others if amounts.lower else others

    def _head(self, distinct: Floats) -> Head:
        """Return the head of each table, and a home's batch in it."""
        amounts, t = self.amounts, self.t
        work, model, none = self.model.workload, self.model, np.zeros(len(amounts.work.names))
        rows = self.hot_rows + self.cut_off
        first = np.where(self.hot_rows > 0, work.rows, 0)
        if not self.option.head:
            nothing = np.zeros(len(t))
            return Head(first, rows, none, none, none, nothing, nothing, nothing, nothing)
        every = np.arange(len(rows))
        reads = np.where(rows > 0, work.share(every, first, first + rows), 0.0)
        once = np.diff(distinct_below(model, every, np.stack([first, first + rows], axis=1), self.once), axis=1)[:, 0]
        seen = model.seen(amounts.ranks)
        part = seen.between(every, first, first + rows) / np.maximum(seen.whole, 1e-300)
        P, N, lengths = (x[t] for x in work.present(reads, distinct, once))
        payload = amounts.payload_of(t, 1.0, reads[t], N, lengths)
        return Head(first, rows, reads, once, part, P, N, payload, work.present(reads)[0][t])

    def _behind(self, reads: Floats) -> tuple[Floats, Floats, Floats]:
        """Return [T] bags, ids and lengths of a home in the rows behind heads, which have these `reads` [T]."""
        if self.option.head:
            return self.model.workload.present(reads)
        return self.amounts.bags, self.amounts.ids, self.amounts.lengths

    def _ranges(self) -> Ranges:
        """Return the shares of the range with most of them; in a bound, the means of all ranges.

        The ranges of tables with ordered ids are uneven; those of other tables are even.
        """
        amounts, even, head = self.amounts, self.even, self.head
        model, work = self.model, self.model.workload
        rows, distinct = (1.0 - self.cut_off / work.rows) / self.rows, (1.0 - head.distinct) / self.rows
        means = Ranges(even, rows, distinct, self.even_once, model.missed * rows if self.option.cached else even)
        cut = self.cut
        if not self.uneven or (amounts.lower and not self.option.cached):
            return means
        found = Ranges(*(x.copy() for x in means))
        # Ranges get longer, and less is read of them. A few of many tell the most; a bound needs all.
        few = self.rows > MANY_RANGES and not amounts.lower
        which = np.unique(np.arange(MANY_RANGES + 1) * (self.rows - 1) // MANY_RANGES) if few else np.arange(self.rows)
        edges = np.union1d(which, which + 1)
        low, high = np.searchsorted(edges, which), np.searchsorted(edges, which + 1)
        table, ends = cut[:, None], self._cuts(edges)

        def between(below: Any) -> Any:
            """Return [n, m] amounts in the ranges, from those below their ends."""
            return below[:, high] - below[:, low]

        if self.option.cached:
            begin, end = (ends[:, side].reshape(-1) for side in (low, high))
            moved = model.missed_in(np.repeat(cut, len(which)), begin, end).reshape(len(cut), len(which))
            found.missed[cut] = sum(moved.T) / self.rows if amounts.lower else np.max(moved, axis=1)
        if amounts.lower:
            return found
        every, places = np.maximum(model.all_distinct[cut], 1e-300), work.laws.places(table, ends)
        found.reads[cut] = np.max(between(work.reads_below(table, places)), axis=1)
        found.rows[cut] = np.max(between(ends) / work.rows[table], axis=1)
        found.distinct[cut] = np.max(between(model.seen(amounts.ranks).below(table, places)) / every[:, None], axis=1)
        if self.once.any():
            found.once[cut] = np.max(between(distinct_below(model, cut, ends, self.once)), axis=1)
        return found

    def _cuts(self, which: Ints) -> Ints:
        """Return [n, m] the first rows of ranges `which` [m] of tables with ordered ids."""
        found = self.amounts.ranges.cuts(self.cut, self.rows, self.option.head, which)
        # Hot ids are also in the first range.
        return np.where((which == 0) & (self.hot_rows[self.cut, None] > 0), 0, found)

    def _in_a_range(self, distinct: Floats) -> tuple[Floats, Floats, Floats]:
        """Return [n] present bags and ids of a range for each home, and the lengths that it receives."""
        work, ranges, t = self.model.workload, self.ranges, self.t
        if not (self.amounts.lower and self.uneven):
            P, N, lengths = (x[t] for x in work.present(ranges.reads, distinct, ranges.once))
            return P, N, lengths
        P, N = self._least_present(distinct, 1)
        # The ranges with few reads may send no lengths.
        lengths = np.where(work.ordered, 0.0, work.present(self.even, distinct, self.even_once)[2])
        return P[t], N[t], lengths[t]

    def _least_present(self, distinct: Floats | None, members: int) -> tuple[Floats, Floats]:
        """Return [T] bags and ids in so many neighbouring ranges, which the mean over all such groups is not below.

        Present bags are a concave function of the reads: at half of the reads there are at least half as many. So the
        mean is least if groups have the most reads that one can have, or none.
        """
        found, most = self.even * float(members), self._most_reads(members)
        part = found / np.maximum(most, 1e-300)
        once = self.even_once * float(members) / np.maximum(part, 1e-300)
        P, N, _ = self.model.workload.present(most, distinct, once)
        return P * part, N * part

    def _most_reads(self, members: int) -> Floats:
        """Return [T] a share of the reads that no group of so many neighbouring ranges is above."""
        if members not in self._most:
            found, cut, work = self.even * float(members), self.cut, self.amounts.work
            ends, top = self._cuts(np.array([0, members])), self.head.rows[cut]
            # The first ranges are read most. Cuts are between whole rows, so others have a row more at most at each
            # end.
            first, row = self.model.workload.share(cut, ends[:, 0], ends[:, 1]), work.share(cut, top, top + 1)
            most = found.copy()
            most[cut] = np.clip(first + 2.0 * row, found[cut], (self.even * float(self.rows))[cut])
            self._most[members] = most
        return self._most[members]

    def _count_least_sums(self, distinct: Floats) -> None:
        """Count the sums inside hosts of tables with ordered ids, for a bound."""
        amounts, t, members = self.amounts, self.t, int(self.sums.most)
        neighbours = all(host == tuple(range(host[0], host[-1] + 1)) for host in amounts.topology.host_ranks)
        if self.on == amounts.ranks and not neighbours:
            members = self.rows  # all sums of a home have at least the bags of the whole table
        ordered, sums = amounts.work.ordered[t], float(self.columns * self.rows) / members
        union, items = (self._least_present(one, members)[0][t] for one in (distinct, None))
        self.sent = np.where(ordered, union / members * self.sums.turn, self.sent)
        self.home_sums = np.where(ordered, union * sums, self.home_sums)
        self.written = self.written._replace(home=np.where(ordered, items * sums, self.written.home))

    def add_exchanges(self) -> None:
        """Add ids, rows and gradients on links inside hosts and on the network, on both sides."""
        amounts, o, t, on, parts = self.amounts, self.o, self.t, self.on, self.parts
        work, sums, model = amounts.work, self.sums, self.amounts.model
        forward = model.wire(t, self.width, backward=False)
        backward = model.wire(t, self.width, backward=True)
        head = 8.0 * amounts.features[t]
        amounts.put_owner_bytes(o, t, "ids", head, on)
        amounts.put_owner_bytes(o, t, "ids", self.payload, on)
        amounts.put_owner_bytes(o, t, "rows", self.P * forward, on, self.kept)
        amounts.put_owner_bytes(o, t, "gradients", self.P * backward, on, self.kept)
        for exchange, count in (
            ("ids", head + self.home_payload),
            ("rows", self.home_P * forward),
            ("gradients", self.home_P * backward),
        ):
            amounts.put_home_bytes(o, t, exchange, parts * count)
        if amounts.hosts == 1:  # no byte leaves the host
            return
        crossing = self.direct * self.P + self.merge * self.sent
        distinct = amounts.distinct_if(self.once)
        positions = work.positions(self.even, sums.apart, distinct, self.even_once)[t]
        places = 4.0 * self.merge * positions
        if amounts.lower:
            places = np.where(work.ordered[t], 0.0, places)
        merge_heads = 4.0 * amounts.features[t] * (1.0 + sums.most) / sums.most
        merge_heads = self.merge * merge_heads * (sums.far > 0.0)
        home_crossing = parts * self.direct * self.home_P + self.merge * self.home_sums
        # The members of a sum share its way out, whatever rows they hold.
        fixed = np.where(self.merge > 0.0, 1.0, self.kept)
        at_home = parts * (head + merge_heads + self.home_payload + places)
        # The member with the fewest turns receives fewer headers and positions.
        at_owner = head + sums.turn * merge_heads + self.payload + sums.turn * places
        for exchange, count, home_count, fixed_part in (
            ("ids", at_owner, at_home, 0.0),
            ("rows", crossing * forward, home_crossing * forward, fixed),
            ("gradients", crossing * backward, home_crossing * backward, fixed),
        ):
            amounts.put_owner_bytes(o, t, exchange, count, on, fixed_part, network=True)
            amounts.put_home_bytes(o, t, exchange, home_count, network=True)

    def add_lookup(self) -> None:
        """Add the lookup of one piece for all homes, and the overhead of its messages."""
        amounts, o, t, ranks = self.amounts, self.o, self.t, self.ranks
        model, rates = amounts.model, amounts.model.rates
        far = model.lookup_far(t, self.distinct)
        lookup = rates.lookup(ranks * self.N + self.more_N, far, ranks * self.P + self.more_P, self.width, self.element)
        if self.option.cached:
            lookup = lookup + model.fetched(t, self.ranges.missed[t], self.width)
        per_part = model.speeds.part * ranks * amounts.features[t]
        amounts.put(amounts.cost, o, t, "ids", per_part)
        amounts.put(amounts.fixed, o, t, "ids", per_part)
        amounts.put(amounts.cost, o, t, "lookup", lookup + rates.copied(ranks * self.payload + self.more_payload))
        bags = rates.at("lookup_bag", self.width)
        amounts.put(amounts.fixed, o, t, "lookup", self.kept * ranks * self.P * bags)

    def add_sums_inside_hosts(self) -> None:
        """Add the rows that members send to proxies of their host, and the additions there."""
        amounts, o, t, sums = self.amounts, self.o, self.t, self.sums
        rates, n = amounts.model.rates, sums.proxies
        wide = float(amounts.work.wide)
        inner = self.merge * sums.far * self.P * self.width * wide * (n - 1.0) / n
        for stage, rate in (("rows", "place"), ("gradients", "pick")):
            seconds = rates.exchanged(inner, inner) + self.merge * sums.far * self.P * rates.at(rate, self.width)
            amounts.put(amounts.cost, o, t, stage, seconds)
            # A proxy receives what all members send, however few rows it holds itself.
            amounts.put(amounts.fixed, o, t, stage, seconds)

    def add_home(self) -> None:
        """Add the work of every home: routing its ids, and placing the rows that it receives."""
        amounts, o, t, parts = self.amounts, self.o, self.t, self.parts
        rates, speeds = amounts.model.rates, amounts.model.speeds
        routed = self.columns * amounts.ids[t] * speeds.route + rates.copied(2.0 * parts * self.home_payload)
        routed = routed + amounts.model.find_hot(t) * (self.hot_rows[t] > 0)
        amounts.put(amounts.home, o, t, "ids", routed + speeds.part * parts * amounts.features[t])
        amounts.put(amounts.cost, o, t, "ids", rates.copied(2.0 * self.more_payload))
        placed = rates.at("place", self.width) + rates.at("pick", self.width)
        rows = self.direct * parts * self.home_items + self.merge * self.written.home
        amounts.put(amounts.home, o, t, "gradients", rows * placed)
        if self.on > 1:  # on the host of the pieces, rows of the members arrive one by one
            items = self.home_items if amounts.lower else amounts.work.present(self.ranges.reads)[0][t]
            rows = self.merge * np.maximum(self.sums.apart * items - self.written.union, 0.0)
            amounts.put(amounts.cost, o, t, "gradients", rows * placed)

    def add_update(self) -> None:
        """Add the update of one piece with the gradients of all homes."""
        amounts, o, t, ranks = self.amounts, self.o, self.t, self.ranks
        model, work, rates = amounts.model, amounts.work, amounts.model.rates
        state = work.cell_state[t] * work.attached[t]
        update = rates.update(
            ranks * self.N + self.more_N, ranks * self.P + self.more_P, self.distinct, model.update_far(self.distinct),
            self.width, self.element, state, work.row_state[t],
        )  # fmt: skip
        rows = 3.0 * self.share * work.rows[t]
        dense = rates.copied(rows * self.width * self.element) * ~work.attached[t]
        # A step writes no hot row to a table behind a cache.
        hot = model.all_distinct[t] * self.head.distinct[t] * (self.hot_rows[t] > 0) * (not self.option.cached)
        amounts.put(amounts.cost, o, t, "update", update + dense + model.write_back(t, hot / self.parts))
        bags = rates.at("update_bag", self.width)
        amounts.put(amounts.fixed, o, t, "update", self.kept * ranks * self.P * bags)

    def add_placed(self, amounts: OptionAmounts) -> None:
        """Add to these amounts the parts in which estimates and bounds differ if they know all the rest alike."""
        self._add_memory(amounts)
        if self.columns > 1:
            self._add_row_sums(amounts)

    def _add_row_sums(self, amounts: OptionAmounts) -> None:
        """Add the sums over a row that its column blocks exchange, for row rules with sums over whole rows."""
        o, t, distinct = self.o, self.t, self.distinct
        work, rates = amounts.work, amounts.model.rates
        others = self.columns - 1.0
        if self.option.way is Way.GRID:
            near, far = 0.0, others
        elif amounts.hosts == 1:
            near, far = others, 0.0
        elif amounts.lower:  # as many blocks as possible share a host
            far = max(0.0, self.columns - amounts.sizes[-1])
            near = others - far if amounts.topology.nic == "device" else 0.0
        else:  # blocks are on any ranks
            far = others * (amounts.ranks - amounts.ranks / amounts.hosts) / (amounts.ranks - 1.0)
            near = others - far
        sums = 4.0 * distinct * (work.sums[t] + 1.0)
        seconds = amounts.model.speeds.row_sum + rates.copied(6.0 * distinct * self.width * float(work.wide))
        seconds = seconds + rates.exchanged(sums * near, sums * near)
        talks = work.talks[t] > 0
        amounts.put(amounts.cost, o, t, "update", np.where(talks, seconds, 0.0))
        crossing = rates.exchanged(sums * far, sums * far, network=True)
        amounts.put(amounts.cost, o, t, NETWORK_STAGES[3], np.where(talks, crossing, 0.0))
        amounts.use("row sums", o, t, talks)

    def _add_memory(self, amounts: OptionAmounts) -> None:
        """Add weights, optimizer state and buffers of one piece, and the buffers of every home, to these amounts."""
        o, t, ranks, width = self.o, self.t, self.ranks, self.width
        model, work, cached = amounts.model, amounts.work, self.option.cached
        copies = 1 + model.depth  # of ids: the present batch, and those that are routed ahead
        # The first range is the longest one, the last the shortest.
        fair = np.maximum(self.share * work.rows[t], 1e-300)
        last = np.maximum(work.rows[t] - (self.rows - 1.0) * np.ceil(fair), 0.0)
        uneven = work.ordered[t] & (self.rows > 1)
        length = np.where(uneven, fair, np.ceil(fair) if amounts.rounded_up else last)
        if amounts.lower and self.option.way is Way.GRID and not amounts.even_room:
            length = np.where(uneven, 1.0, length)  # the ranks with least room may hold the shortest ranges
        weights = model.weights(t, length, width)
        # Present bags are a concave function of the rows: a longer range has at most proportionally more of them.
        part = length / fair
        buffers = part * ranks * (self.payload * copies + self.P * width * work.wide + self.N * KEY_BYTES)
        # The owner of a whole table also has a larger batch of its own.
        more = self.more_payload * copies + self.more_P * width * work.wide
        cold = model.all_distinct[t] * (1.0 - self.head.distinct[t])  # rows that a cache serves
        buffers = buffers + 2.0 * more + self.more_N * KEY_BYTES
        # Bytes of a home beyond those for a whole table.
        held = self.parts * self.home_P * width + self.head.P * work.dim[t]
        beyond = np.maximum(held - amounts.least_bags[t] * work.dim[t], 0.0) * work.wide
        sent = self.parts * self.home_payload + self.head.payload
        beyond = beyond + np.maximum(sent - amounts.least_payload[t], 0.0) * copies
        if cached:
            amounts.memory[t, o, HOST] += np.floor(model.in_host(t, weights)).astype(np.int64)
            weights = model.lines(t, length, width, cold * (length / work.rows[t]), uneven & amounts.lower)
        amounts.memory[t, o, model.tier] += np.floor(weights + buffers).astype(np.int64)
        amounts.home_memory[t, o, model.tier] += np.floor(beyond * part).astype(np.int64)
        # A bound knows the means of uneven ranges, as of those whose shares the search may change.
        if self.option.way is Way.ROWS and self.rows > 1:
            amounts.divisible[t, o] = np.where(work.ordered[t], amounts.lower, self.option.head == 0.0)
        # Uneven ranges have fewer present bags in total, though not fewer than the whole table.
        buffers = self.whole_payload * copies + self.whole_P * width * work.wide
        buffers = ranks * (buffers + self.whole_N * KEY_BYTES)
        every = (work.rows - self.cut_off)[t].astype(np.float64)
        weights = model.weights(t, every, width)
        if cached:
            amounts.least_memory[t, o, HOST] += np.floor(model.in_host(t, weights) / self.rows).astype(np.int64)
            weights = model.lines(t, every, width, cold, uneven & amounts.lower)
        amounts.least_memory[t, o, model.tier] += np.floor((weights + buffers) / self.rows).astype(np.int64)
