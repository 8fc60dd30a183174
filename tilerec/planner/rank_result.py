"""`Outcome`: the result of planning on one rank, and the check that all ranks have the same result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from tilerec.comms.agreement import agree
from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.planner.request import PlanRequest
from tilerec.spec.plan import ShardingPlan


@final
@dataclass
class Outcome:
    """Result of planning on one rank, or the error that stopped it.

    Args:
        request: the planned request; None if building it failed. digest: the request's digest; "" without a request.
        plan: the plan; None if planning failed. fingerprint: the plan's fingerprint; 0 without a plan.
        trouble: message of the error; "" if there was none.
    """

    request: PlanRequest | None = None
    digest: str = ""
    plan: ShardingPlan | None = None
    fingerprint: int = 0
    trouble: str = ""

    def compare(self, group: Group, raises: bool = True) -> None:
        """Raise on every rank if the outcomes of the ranks differ. Collective.

        Ranks exchange digests, and exchange requests and plans only if the digests differ.

        Args:
            raises: False if this rank will raise its own error. It then raises here only if the requests differ, as
                this may be the cause of its error.

        Raises:
            ConfigError: outcomes differ; names the ranks, the first difference, and the values there.
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
