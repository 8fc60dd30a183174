"""`Outcome`: what planning came to on one rank, and the one comparison that all ranks make of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from tilerec.comms.agree import agree
from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.planner.request import PlanRequest
from tilerec.spec.plan import ShardingPlan


@final
@dataclass
class Outcome:
    """How far a rank came.

    Args:
        request: what it planned; None if it never had one. digest: the request's, "" likewise.
        plan: what it found, or None. fingerprint: the plan's, or 0.
        trouble: the message of what stopped it, "" if nothing did.
    """

    request: PlanRequest | None = None
    digest: str = ""
    plan: ShardingPlan | None = None
    fingerprint: int = 0
    trouble: str = ""

    def compare(self, group: Group, raises: bool = True) -> None:
        """Raise on every rank if ranks differ; a digest each travels, and all of it only where digests differ.

        Args:
            raises: False where this rank is about to raise its own trouble: then only other inputs, which may be why,
                are raised.

        Raises:
            ConfigError: names ranks, the first difference, and what each has there.
        """
        marks = group.all_gather_object([self.trouble, self.digest, str(self.fingerprint)])
        if all(mark == marks[0] for mark in marks):
            return
        digests = {mark[1] for mark in marks if isinstance(mark, list)}
        if len(digests) > 1 and "" not in digests:
            agree(group, "the plan", {"inputs": self._inputs()})
        plan = {} if self.plan is None else self.plan.to_json()
        try:
            agree(group, "the plan", {"checks": self.trouble or "passed", "plan": plan})
        except ConfigError:
            if raises:
                raise

    def _inputs(self) -> dict[str, Any]:
        assert self.request is not None
        inputs = self.request.to_json()
        tables = self.request.tables
        inputs["tables"] = {t.key: item for t, item in zip(tables, inputs["tables"], strict=True)}
        inputs["order of tables"] = [t.key for t in tables]
        return inputs
