"""`Shortage`: the memory that is too small for a request without a plan, and the bytes that are missing.

Terms
  cap     bytes that a rank may hold, of the memory that holds tables
  taken   bytes of the cap that are reserved, or used by batches and by pinned tables
  least   bytes of a table with the option that uses least memory
"""

from __future__ import annotations

import numpy as np

from tilerec.planner.cost.workload import Workload
from tilerec.planner.decision import Decision
from tilerec.planner.report.plan_report import TIERS
from tilerec.planner.search.relaxed import Relaxed
from tilerec.spec.plan_table import bytes_text

NAMES_SHOWN = 5
"""Most tables that an error names one by one."""


class Shortage:
    """Bytes that a decision without a plan needs, and has, in the memory that is too small.

    tier: that memory, 0 for device and 1 for host; `main`: the memory that holds tables. caps, taken: [R] bytes; `cap`:
    the largest cap. least: [T] bytes of each table. need, room: bytes that all tables need, and that all ranks have.
    """

    def __init__(self, decision: Decision) -> None:
        self.decision, self.request = decision, decision.request
        self.instance, self.topology = decision.problem.instance, decision.request.topology
        self.tier = 1 if self.topology.compute_device == "cpu" else 0
        self.main = self.tier
        proof = decision.solution.proof
        if proof is not None and proof.tier >= 0:
            self.tier = proof.tier
        self.caps = self.instance.cap[:, self.tier]
        self.cap = int(self.caps.max())
        self.taken = self.instance.base_memory[:, self.tier]
        held = Relaxed(decision.problem.lower).least_bytes[:, :, self.tier]
        top = np.iinfo(np.int64).max
        if self.instance.tables:
            self.least = np.where(self.instance.there, held, top).min(1)
        else:
            self.least = np.zeros(0, np.int64)
        self.need = int(self.least.sum()) + int(self.taken.sum())
        self.room = int(self.instance.cap[:, self.tier].sum())

    def sentence(self, proved: bool) -> tuple[str, int]:
        """Return the sentence about the memory that is too small, and the number of missing bytes."""
        tier, proof = TIERS[self.tier], self.decision.solution.proof
        fullest = int((self.taken - self.caps).argmax())
        over = int(self.taken[fullest] - self.caps[fullest])
        if over > 0:
            pinned = self.pinned_on(fullest)
            names = ", ".join(f"'{key}' {bytes_text(size)}" for key, size in pinned[:NAMES_SHOWN])
            return (
                f"rank {fullest} holds {bytes_text(int(self.taken[fullest]))} before any table is placed, "
                f"{bytes_text(over)} more than its cap of {bytes_text(int(self.caps[fullest]))} of {tier} memory: "
                f"{bytes_text(self.request.reserved_bytes()[fullest])} are reserved"
                + (f", pinned tables take {names}" if names else "")
                + ", batches take the rest.",
                over,
            )
        mean = int(self.taken.sum()) // self.topology.world_size
        own = (
            f"{self.topology.world_size} x {self.cap_text()} of {tier} memory, of which {bytes_text(mean)} each are "
            "in use"
        )
        if proof is not None and proof.table is not None:
            return (
                f"no piece of table '{proof.table}' that its constraints and sizes allow fits a rank: the smallest "
                f"is {bytes_text(proof.short)} too large for any of {own}.",
                proof.short,
            )
        if proof is not None and proof.tier >= 0:
            return (
                f"they need at least {bytes_text(self.need)} in total, and there are {own}: at least "
                f"{bytes_text(proof.short)} too much.",
                proof.short,
            )
        short = max(0, self.need - self.room)
        part = 100 * self.need // max(1, self.room)
        how = "every arrangement of them was tried" if proved else "the search did not place all of them"
        return (
            f"they need at least {bytes_text(self.need)} in total, {part} % of {own}, and {how}.",
            short,
        )

    def cap_text(self) -> str:
        least = int(self.caps.min())
        return bytes_text(self.cap) if least == self.cap else f"{bytes_text(least)} to {bytes_text(self.cap)}"

    def pinned_on(self, rank: int) -> list[tuple[str, int]]:
        """Return the pinned tables with their bytes on a rank, optimizer state or gradients included; largest first."""
        pins = self.decision.pins
        works = [work for work in self.request.works() if work.name in pins]
        about = Workload(works)
        found = []
        for t, work in enumerate(works):
            tiling = pins[work.name].tiling
            assert tiling is not None
            cell, row = int(about.element[t] + about.cell_state[t]), int(about.row_state[t])
            size = sum(r.cells * cell + (r.r1 - r.r0) * row for r in tiling.tiles_of(rank))
            if size:
                found.append((work.name, size))
        return sorted(found, key=lambda each: (-each[1], each[0]))
