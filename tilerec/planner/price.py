"""`price`: seconds of every part of a step on every rank, and bytes in every memory tier, for any tilings.

Nouns
  part     what a step is made of ("lookup"); PARTS lists them in the order of a step
  home     the rank whose batch it is;  owner: a rank that reads a piece for homes
  near     home and owner are on one host;  far: on two
  entry    (part of the layout, owner) with the homes that it reads for

What travels is read off the layout that the runtime compiles (`sharding/layout.py`), so predicted bytes bear the names
that `comms/traffic.py` counts. Formulas with units: docs/planner-cost.md.

Legend: T tables, F features, R = W ranks, P present bags, N ids, U distinct rows, q share of a table's traffic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilerec.planner.cost import KEY_BYTES, NETWORK_STAGES, STAGES, Model
from tilerec.planner.portable import Floats, missed
from tilerec.planner.workload import Ints
from tilerec.sharding.layout import Layout, ShardedTable, SlotRead, reader
from tilerec.spec.tile import Tiling

PARTS = (
    "route", "header", "ids", "lookup", "rows in host", "rows", "combine", "gather", "gradients", "gradients in host",
    "replicas", "update", "overhead",
)  # fmt: skip
STAGE_OF_PART = {
    "route": 0, "header": 0, "ids": 0, "overhead": 0, "lookup": 1, "rows in host": 1, "rows": 1, "combine": 2,
    "gather": 2, "gradients": 2, "gradients in host": 2, "replicas": 3, "update": 3,
}  # fmt: skip


@dataclass(frozen=True)
class Price:
    """What a plan costs.

    Args:
        parts: seconds of each of PARTS on each rank, [R].
        network: seconds on the host's network card, by stage of NETWORK_STAGES, [R] (ranks of a host alike).
        calls: seconds of collectives as such, once.
        memory: bytes, [R, 2] (device, host).
        sent: bytes that a rank sends to others, by the traffic's names, [R].
        between_hosts: those of them that leave the host.
    """

    parts: Mapping[str, Floats]
    network: Mapping[str, Floats]
    calls: float
    memory: Ints
    sent: Mapping[str, Floats]
    between_hosts: Mapping[str, Floats]

    @property
    def stages(self) -> dict[str, Floats]:
        """Seconds of each stage on each rank."""
        found: dict[str, Floats] = {name: np.zeros(len(self.memory)) for name in STAGES}
        for name, seconds in self.parts.items():
            found[STAGES[STAGE_OF_PART[name]]] = found[STAGES[STAGE_OF_PART[name]]] + seconds
        return {**found, **self.network}

    @property
    def seconds(self) -> float:
        """The step: the sum over stages of the slowest rank, and the collectives as such."""
        return sum(float(s.max()) for s in self.stages.values()) + self.calls


def price(tilings: Sequence[Tiling], model: Model) -> Price:
    """What tilings of a workload's tables cost, each in the order of `model.workload.names`."""
    return _Pricing(tilings, model).result()


class _Pricing:
    def __init__(self, tilings: Sequence[Tiling], model: Model) -> None:
        self.model, self.work, self.rates = model, model.workload, model.rates
        work, topology = self.work, model.topology
        self.ranks = model.ranks
        self.parts = {name: np.zeros(self.ranks) for name in PARTS}
        self.sent: dict[str, Floats] = {}
        self.far: dict[str, Floats] = {}
        self.received: dict[str, Floats] = {}
        self.far_received: dict[str, Floats] = {}
        self.memory = np.zeros(self.ranks)
        self.calls = 0
        host = np.empty(self.ranks, np.int64)
        for h, ranks in enumerate(topology.host_ranks):
            host[list(ranks)] = h
        self.host = host
        self.on_host = np.bincount(host)[host].astype(np.float64)
        tables = [
            ShardedTable(t.name, tiling, t.ids_per_bag, t.wire)
            for t, tiling in zip(work.tables, tilings, strict=True)
        ]
        slots = [SlotRead(int(t), "") for t in work.table]
        layout = Layout(tables, slots, topology, 0)
        self.layout = layout
        self._count_parts(layout)
        self._count_merges(layout)
        self._exchange()
        self._work_of_owners(layout)
        self._work_of_homes()
        self._replicas(tilings)
        self._row_sums(tilings)
        self._weigh()

    # ---------------------------------------------------------------------------------------------- who reads what

    def _count_parts(self, layout: Layout) -> None:
        """Arrays over parts, and over (part, owner) entries with the homes that it reads for."""
        work, ranks, topology = self.work, self.ranks, self.model.topology
        parts = layout.parts
        self.slot = np.array([p.slot for p in parts], np.int64)
        self.table = work.table[self.slot] if len(parts) else np.zeros(0, np.int64)
        r0 = np.array([p.r0 for p in parts], np.int64)
        r1 = np.array([p.r1 for p in parts], np.int64)
        self.q = work.share(self.table, r0, r1)
        self.row_share = (r1 - r0) / work.rows[self.table]
        length, bags = work.ids_per_bag[self.slot], work.bags[self.slot]
        self.P = bags * (1.0 - missed(self.q, length))
        self.N = bags * length * self.q
        self.lengths = np.where(self.N - self.P > 0.5, self.P, 0.0)
        self.weighted = work.weighted[self.slot]
        self.id_bytes = 8.0 if np.any(r1 - r0 >= 1 << 31) else 4.0
        self.payload = self.N * (self.id_bytes + work.wide * self.weighted) + 4.0 * self.lengths
        entries: list[tuple[int, int, int, int, int]] = []  # part, owner, near homes, far homes, own
        everyone = tuple(range(ranks))
        for p, part in enumerate(parts):
            if len(part.owners) == 1:
                o = part.owners[0]
                near = int(self.on_host[o]) - 1
                entries.append((p, o, near, ranks - 1 - near, 1))
            elif part.owners == everyone:
                entries.extend((p, o, 0, 0, 1) for o in everyone)
            else:
                homes: dict[int, list[int]] = {o: [] for o in part.owners}
                for home in everyone:
                    homes[reader(part.owners, home, topology)].append(home)
                for o, own in homes.items():
                    near = sum(h != o and self.host[h] == self.host[o] for h in own)
                    entries.append((p, o, near, len(own) - near - (o in own), int(o in own)))
        table = np.array(entries, np.int64).reshape(len(entries), 5)
        self.e_part, self.e_owner = table[:, 0], table[:, 1]
        self.e_near, self.e_far, self.e_own = (table[:, i].astype(np.float64) for i in (2, 3, 4))
        self.single = np.array([len(p.owners) == 1 for p in parts], np.bool_)
        self.first_owner = np.array([part.owners[0] for part in parts], np.int64)
        self.width = np.array([sum(u.width for u in p.units) for p in parts], np.float64)

    def _count_merges(self, layout: Layout) -> None:
        """(members' parts, host) of the sums inside hosts."""
        self.merges: list[tuple[int, tuple[int, ...]]] = []
        if layout.hierarchical:
            seen = set()
            for home in {host[0] for host in self.model.topology.host_ranks}:
                for merge in layout.merges(home):
                    if merge.parts not in seen:
                        seen.add(merge.parts)
                        owner = layout.parts[merge.parts[0]].owners[0]
                        self.merges.append((int(self.host[owner]), merge.parts))
        self.merged = np.zeros(len(layout.parts), np.bool_)
        for _, parts in self.merges:
            self.merged[list(parts)] = True

    # ---------------------------------------------------------------------------------------------- what travels

    def _line(self, lines: dict[str, Floats], name: str) -> Floats:
        return lines.setdefault(name, np.zeros(self.ranks))

    def _from_homes(self, name: str, owner: Ints, near: Floats, far: Floats, count: Floats) -> None:
        """`count` bytes from each of an owner's homes to it."""
        received, far_received = self._line(self.received, name), self._line(self.far_received, name)
        np.add.at(received, owner, (near + far) * count)
        np.add.at(far_received, owner, far * count)

    def _by_homes(self, name: str, mask: Any, count: Floats) -> None:
        """What homes send (or get): every home has `count` of each part, but where it reads the part itself."""
        sent, far = self._line(self.sent, name), self._line(self.far, name)
        own, away = self._home_side(mask, count)
        sent += own
        far += away

    def _home_side(self, mask: Any, count: Floats) -> tuple[Floats, Floats]:
        """Per home: of all parts in `mask`, what goes between it and other ranks, and other hosts."""
        single = mask & self.single
        owner = self.first_owner
        weights = np.where(single, count, 0.0)
        by_owner: Floats = np.bincount(owner, weights, self.ranks).astype(np.float64)
        by_host: Floats = np.bincount(self.host[owner], weights, int(self.host.max()) + 1).astype(np.float64)
        total = float(sum(by_owner.tolist()))
        others, away = total - by_owner, total - by_host[self.host]
        for p in np.flatnonzero(mask & ~self.single).tolist():
            owners = self.layout.parts[p].owners
            if len(owners) == self.ranks:
                continue
            for home in range(self.ranks):
                o = reader(owners, home, self.model.topology)
                others[home] += count[p] * (o != home)
                away[home] += count[p] * (self.host[o] != self.host[home])
        return others, away

    def _exchange(self) -> None:
        """Bytes of header, ids, rows and gradients."""
        every = np.ones(len(self.single), np.bool_)
        words = np.full(len(self.single), 8.0)
        self._by_homes("header", every, words)
        self.sent["header"] += 4.0 * (self.ranks - 1)
        self.far["header"] += 4.0 * (self.ranks - self.on_host)
        self._from_homes("header", self.e_owner, self.e_near, self.e_far, np.full(len(self.e_part), 8.0))
        if self.layout.alone:
            self._network()
            return
        self.calls += 3
        self._by_homes("ids", every, self.payload)
        self._from_homes("ids", self.e_owner, self.e_near, self.e_far, self.payload[self.e_part])
        for name, backward in (("rows", False), ("gradients", True)):
            bytes_p = np.zeros(len(self.single))
            for p, part in enumerate(self.layout.parts):
                t = self.table[p : p + 1]
                for unit in part.units:
                    bytes_p[p] += float(self.model.wire(t, unit.width, backward=backward)[0])
            bytes_p = bytes_p * self.P
            far = np.where(self.merged[self.e_part], 0.0, self.e_far)
            owner = np.zeros(self.ranks)
            away = np.zeros(self.ranks)
            np.add.at(owner, self.e_owner, (self.e_near + far) * bytes_p[self.e_part])
            np.add.at(away, self.e_owner, far * bytes_p[self.e_part])
            home, home_away = self._home_side(every & ~self.merged, bytes_p)
            near, near_away = self._home_side(self.merged, bytes_p)
            home, home_away = home + near - near_away, home_away
            ends = (self.sent, self.far, self.received, self.far_received)
            own = (owner, away, home, home_away) if not backward else (home, home_away, owner, away)
            for lines, value in zip(ends, own, strict=True):
                lines[name] = value
        self._merge_bytes()
        self._network()

    def _merge_bytes(self) -> None:
        """Sums inside hosts: members to the proxy, the union's rows to the home, and back."""
        if not self.merges:
            return
        self.calls += 2
        topology, wide = self.model.topology, float(self.work.wide)
        names = ("rows in host", "gradients in host")
        lines = {name: (self._line(self.sent, name), self._line(self.received, name)) for name in names}
        self.merge_place = np.zeros(self.ranks)
        self.merge_home = np.zeros(self.ranks)
        local = np.array([topology.local_rank(r) for r in range(self.ranks)])
        for host, parts in self.merges:
            members = list(parts)
            first = self.layout.parts[members[0]]
            slot = first.slot
            q = min(1.0, float(sum(self.q[members].tolist())))
            union = float(self.work.bags[slot] * (1.0 - missed(q, self.work.ids_per_bag[slot])))
            t = self.table[members[:1]]
            forward = sum(float(self.model.wire(t, u.width, backward=False)[0]) for u in first.units) * union
            backward = sum(float(self.model.wire(t, u.width, backward=True)[0]) for u in first.units) * union
            owners = sorted({self.layout.parts[p].owners[0] for p in members})
            homes = self.host != host
            width = self.width[members[0]]
            proxies = np.array(owners)[local % len(owners)]
            count = np.bincount(proxies[homes], minlength=self.ranks).astype(np.float64)
            inner = self.P[members] * width * wide
            # Positions of members' bags in the union, where they are not all of it.
            positions = 4.0 * float(sum(p for p in self.P[members].tolist() if union - p > 0.5))
            head = 4.0 * (1 + len(members))
            for name, value in (("ids", positions), ("header", head)):
                self.sent[name][homes] += value
                self.far[name][homes] += value
                self.received[name] += value * count
                self.far_received[name] += value * count
            self.sent["rows"] += forward * count
            self.far["rows"] += forward * count
            self.received["rows"][homes] += forward
            self.far_received["rows"][homes] += forward
            self.sent["gradients"][homes] += backward
            self.far["gradients"][homes] += backward
            self.received["gradients"] += backward * count
            self.far_received["gradients"] += backward * count
            for proxy in owners:
                for p, size in zip(members, inner.tolist(), strict=True):
                    o = self.layout.parts[p].owners[0]
                    if o != proxy:
                        lines[names[0]][0][o] += size * count[proxy]
                        lines[names[0]][1][proxy] += size * count[proxy]
                        lines[names[1]][0][proxy] += size * count[proxy]
                        lines[names[1]][1][o] += size * count[proxy]
            rate = float(self.rates.at("place", width) + self.rates.at("pick", width))
            self.merge_place += count * float(sum(self.P[members].tolist())) * rate
            self.merge_home[homes] += union * rate

    def _network(self) -> None:
        speeds, parts = self.model.speeds, self.parts
        self.network = {name: np.zeros(self.ranks) for name in NETWORK_STAGES}
        where = {
            "header": NETWORK_STAGES[0], "ids": NETWORK_STAGES[0], "rows": NETWORK_STAGES[1],
            "gradients": NETWORK_STAGES[2],
        }  # fmt: skip
        for name, sent in self.sent.items():
            far = self._line(self.far, name)
            received, far_received = self._line(self.received, name), self._line(self.far_received, name)
            parts[name] += (sent - far) * speeds.link_out + (received - far_received) * speeds.link_in
            if name in where:
                own = far * speeds.network_out + far_received * speeds.network_in
                self.network[where[name]] += self._of_hosts(own)

    def _of_hosts(self, seconds: Floats) -> Floats:
        """Ranks of a host share its card: their mean, for each of them."""
        return np.bincount(self.host, seconds)[self.host] / self.on_host

    # ---------------------------------------------------------------------------------------------- work

    def _work_of_owners(self, layout: Layout) -> None:
        work, model, rates = self.work, self.model, self.rates
        p = self.e_part
        homes = self.e_near + self.e_far + self.e_own
        t = self.table[p]
        seconds = np.zeros(len(p))
        for u in range(max((len(part.units) for part in layout.parts), default=0)):
            has = np.array([len(part.units) > u for part in layout.parts], np.bool_)[p]
            width = np.array([part.units[u].width if len(part.units) > u else 0 for part in layout.parts])[p]
            seconds = seconds + has * rates.lookup(
                homes * self.N[p], 0.0, homes * self.P[p], width, work.element[t]
            )
        np.add.at(self.parts["lookup"], self.e_owner, seconds + rates.copied(homes * self.payload[p]))
        overhead = model.speeds.part * (self.e_near + self.e_far + self.e_own)
        np.add.at(self.parts["overhead"], self.e_owner, overhead)
        # Rows from memory, by rectangle: features of a table share its rows.
        feature_first = {int(t): int(s) for s, t in reversed(list(enumerate(work.table.tolist())))}
        held: list[tuple[int, int, float, float, float]] = []  # table, owner, width, row share, homes
        q_of: list[float] = []
        bags_of: list[float] = []
        present = np.zeros(len(layout.parts))
        by_range: dict[tuple[int, int, tuple[int, ...]], float] = {}
        marks = [(int(t), part.r0, part.owners) for t, part in zip(self.table, layout.parts, strict=True)]
        for mark, count in zip(marks, self.P.tolist(), strict=True):
            by_range[mark] = by_range.get(mark, 0.0) + count
        present[:] = [by_range[mark] for mark in marks]
        for e, (part_number, owner) in enumerate(
            zip(self.e_part.tolist(), self.e_owner.tolist(), strict=True)
        ):
            part = layout.parts[part_number]
            number = int(self.table[part_number])
            if feature_first[number] != part.slot:
                continue
            for unit in part.units:
                held.append((number, owner, unit.width, float(self.row_share[part_number]), float(homes[e])))
                q_of.append(float(self.q[part_number]))
                bags_of.append(float(present[part_number]))
        rows = np.array(held, np.float64).reshape(len(held), 5)
        table, ranks = rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64)
        widths, share, read_for = rows[:, 2], rows[:, 3], rows[:, 4]
        q = np.array(q_of)
        distinct = np.zeros(len(rows))
        for count in sorted(set(read_for.tolist())):
            which = read_for == count
            found = work.distinct(max(1, int(count))) if count else np.zeros(len(work.names))
            distinct[which] = found[table[which]] * share[which]
        far = model.lookup_far(table, distinct)
        extra = far * (rates.at("lookup_far", widths * work.element[table] / 4.0)
                       - rates.at("lookup_near", widths * work.element[table] / 4.0))  # fmt: skip
        np.add.at(self.parts["lookup"], ranks, np.maximum(extra, 0.0))
        # Updates: with the gradients of all homes (replicas: `_replicas` adds what they tell each other).
        replicated = np.array([not tiling for tiling in self._single_tables(layout)], np.bool_)[table]
        ids = work.ids[table] * q * read_for
        bags = read_for * np.array(bags_of)
        every = model.all_distinct[table] * share
        update = rates.update(
            ids, bags, np.where(replicated, 0.0, every), np.where(replicated, 0.0, model.update_far(every)), widths,
            work.element[table], work.cell_state[table] * work.attached[table], work.row_state[table],
        )  # fmt: skip
        np.add.at(self.parts["update"], ranks, np.where(replicated, 0.0, update))
        dense = 3.0 * share * work.rows[table] * widths * work.element[table]
        np.add.at(self.parts["update"], ranks, np.where(work.attached[table], 0.0, rates.copied(dense)))
        # Memory: weights with state; ids for each batch in flight; rows or gradients; keys while they are sorted.
        np.add.at(self.memory, ranks, model.weights(table, share * work.rows[table], widths))
        ids_here = homes * self.payload[p] * (1 + model.depth)
        buffers = homes * (self.P[p] * self.width[p] * work.wide + self.N[p] * KEY_BYTES)
        np.add.at(self.memory, self.e_owner, ids_here + buffers)

    def _single_tables(self, layout: Layout) -> list[bool]:
        """Per table: every tile has one owner."""
        return [not table.tiling.replicated for table in layout.tables]

    def _work_of_homes(self) -> None:
        work, rates, model = self.work, self.rates, self.model
        routes = np.zeros(len(work.bags))
        for route in self.layout.routes:
            routes[route.slot] += 1
        ids = float(sum((work.bags * work.ids_per_bag * routes).tolist()))
        self.parts["route"] += ids * model.speeds.route
        self.parts["route"] += rates.copied(2.0 * float(sum(self.payload.tolist())))
        self.parts["overhead"] += (
            model.speeds.part * len(self.layout.parts) + model.speeds.step * work.collections
        )
        rows = np.where(self.merged, 0.0, self.P)
        place = float(sum((rows * rates.at("place", self.width)).tolist()))
        pick = float(sum((rows * rates.at("pick", self.width)).tolist()))
        self.parts["combine"] += place
        self.parts["gather"] += pick
        if self.merges:
            self.parts["rows in host"] += self.merge_place / 2.0
            self.parts["gradients in host"] += self.merge_place / 2.0
            near = np.where(self.merged, self.P, 0.0)
            near = near * (rates.at("place", self.width) + rates.at("pick", self.width))
            owner_host = self.host[self.first_owner]
            own = np.bincount(owner_host, near, int(self.host.max()) + 1)[self.host]
            self.parts["combine"] += (own + self.merge_home) / 2.0
            self.parts["gather"] += (own + self.merge_home) / 2.0
        split = np.zeros(len(work.names), np.bool_)
        split[self.table[self.q < 1.0]] = True
        output = float(sum((work.per_table(work.bags) * work.dim * work.wide).tolist()))
        zeroed = float(sum((work.per_table(work.bags) * work.dim * work.wide * split).tolist()))
        self.parts["combine"] += rates.copied(0.5 * (output if zeroed > 0 else 0.0))
        self.memory += 2.0 * output + float(sum((self.P * self.width).tolist())) * work.wide
        self.memory += float(sum(self.payload.tolist())) * (1 + model.depth)

    def _replicas(self, tilings: Sequence[Tiling]) -> None:
        """Copies of a table agree on its gradients; all of them apply those of all."""
        work, model, rates, speeds = self.work, self.model, self.rates, self.model.speeds
        which = [t for t, tiling in enumerate(tilings) if tiling.replicated]
        if not which:
            return
        for t in which:
            tiling = tilings[t]
            table = np.array([t])
            form = model.replicas(table)
            for tile in tiling.tiles():
                share = (tile.r1 - tile.r0) / tiling.rows * (tile.c1 - tile.c0) / tiling.dim
                rows = (tile.r1 - tile.r0) / tiling.rows
                width = float(tile.c1 - tile.c0)
                owners = np.array(tile.owners)
                others = float(len(owners) - 1)
                part = others / max(1, self.ranks - 1)
                sent = float(form.sent[0]) * others * share
                ring = 2.0 * float(form.reduced[0]) * others / max(1.0, others + 1.0) * share
                near = np.array([np.sum(self.host[owners] == self.host[o]) - 1.0 for o in owners])
                split = near / others if others else near
                bytes_o = sent * split
                self.parts["replicas"][owners] += (bytes_o + ring * split) * (
                    speeds.link_in + speeds.link_out
                )
                far = (sent + ring) * (1.0 - split)
                seconds = np.zeros(self.ranks)
                seconds[owners] = far * (speeds.network_in + speeds.network_out)
                self.network[NETWORK_STAGES[3]] += self._of_hosts(seconds)
                self.parts["replicas"][owners] += float(form.seconds[0]) * share
                ids = float(form.ids[0]) * rows if others else float(work.ids[t]) * self.ranks * rows
                every = float(model.all_distinct[t]) * rows
                self.parts["update"][owners] += float(
                    rates.update(
                        ids * part, float(form.bags[0]) * rows * part, every, model.update_far(every), width,
                        work.element[t], work.cell_state[t] * work.attached[t], work.row_state[t],
                    )
                )  # fmt: skip
                self.memory[owners] += (sent + float(form.reduced[0]) * share) * (2.0 if others else 0.0)
                lines = {"replica counts": 24.0 * others, "replica rows": float(form.told[0]) * others,
                         "replica ids": float(form.numbers[0]) * others * share,
                         "replica gradients": float(form.gradients[0]) * others * share}  # fmt: skip
                if form.form[0] == 3:
                    lines = {"dense gradients": ring}
                elif form.form[0] == 2:
                    lines["replica gradients, dense"] = ring
                for name, value in lines.items():
                    self._line(self.sent, name)[owners] += value
                    self._line(self.far, name)[owners] += value * (1.0 - split)
        forms = model.replicas(np.array(which)).form
        self.calls += sum(
            calls
            for calls, used in (
                (1, np.any(forms < 3)), (2, np.any(forms < 2)), (1, np.any(forms == 1)), (1, np.any(forms >= 2)),
            )
            if used
        )  # fmt: skip

    def _row_sums(self, tilings: Sequence[Tiling]) -> None:
        """Column blocks of rules that need sums over whole rows."""
        work, model, rates, speeds = self.work, self.model, self.rates, self.model.speeds
        talks = 0
        for t, tiling in enumerate(tilings):
            if not work.talks[t] or len(tiling.blocks) == 1:
                continue
            for tile in tiling.tiles():
                blocks = {b.owners for b in tiling.blocks}
                others = len(blocks) - 1
                if not others:
                    continue
                talks = max(talks, int(work.talks[t]) + 1)
                distinct = float(model.all_distinct[t]) * (tile.r1 - tile.r0) / tiling.rows
                sums, finite = (distinct * 4.0 * n * others for n in (float(work.sums[t]), 1.0))
                owners = list(tile.owners)
                self.parts["update"][owners] += (sums + finite) * (speeds.link_in + speeds.link_out)
                width = float(tile.c1 - tile.c0)
                own = speeds.row_sum + float(rates.copied(6.0 * distinct * width * work.wide))
                self.parts["update"][owners] += own
                self._line(self.sent, "row sums")[owners] += sums
                self._line(self.sent, "finite")[owners] += finite
        self.calls += talks

    def _weigh(self) -> None:
        self.bytes = np.zeros((self.ranks, 2), np.int64)
        self.bytes[:, self.model.tier] = np.ceil(self.memory).astype(np.int64)

    def result(self) -> Price:
        far = {name: self._line(self.far, name) for name in self.sent}
        calls = (self.calls + 1) * self.model.call * self.work.collections  # the header is one
        return Price(self.parts, self.network, calls, self.bytes, self.sent, far)
