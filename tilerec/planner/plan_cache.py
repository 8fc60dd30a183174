"""Plans in a folder, each under the digest of its request: what was planned once is read and not searched again.

An entry is one JSON file with its request's digest, the plan, its report and a checksum of them. It is written
whole or not at all, so readers never read half of one, and writers of the same entry write the same. An entry
that cannot be read, or that is not for its request, is warned of and made anew.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any, final

from tilerec.atomic_file import write_file
from tilerec.errors import ConfigError
from tilerec.json_document import read_json
from tilerec.planner.report.plan_report import PlanReport
from tilerec.planner.request import PlanRequest
from tilerec.spec.plan import ShardingPlan

VERSION = 2


@final
class PlanCache:
    """Plans in a folder.

    Args:
        folder: made if it is not there.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path(self, request: PlanRequest) -> Path:
        """Where a request's entry is, or would be."""
        return self.folder / f"plan-{request.digest()}.json"

    def load(self, request: PlanRequest) -> tuple[ShardingPlan, PlanReport] | None:
        """The plan and the report of a request; None if there is no entry, or none that can be read."""
        path = self.path(request)
        if not path.exists():
            return None
        try:
            entry = read_json(path, "Plan cache").value
            if not isinstance(entry, dict) or entry.get("version") != VERSION:
                raise ConfigError("it is of another version")
            body = {name: entry.get(name) for name in ("request", "plan", "report")}
            if entry.get("checksum") != _checksum(body):
                raise ConfigError("its checksum is not that of its contents")
            if entry["request"] != request.digest():
                raise ConfigError("it is for another request")
            plan = ShardingPlan.from_json(entry["plan"])
            report = PlanReport.from_json(entry["report"])
            sizes: dict[str, dict[str, tuple[int, int]]] = {}
            for table in request.tables:
                for module, name in table.names:
                    sizes.setdefault(module, {})[name] = (table.rows, table.dim)
            plan.check(sizes, request.topology.world_size)
        except (ConfigError, ValueError, KeyError, TypeError) as error:
            _warn(path, str(error))
            return None
        return plan, report

    def store(self, request: PlanRequest, plan: ShardingPlan, report: PlanReport) -> None:
        """Keep a plan. A folder that cannot be written is warned of: the plan is as good without."""
        path = self.path(request)
        body: dict[str, Any] = {
            "request": request.digest(),
            "plan": plan.to_json(),
            "report": report.to_json(),
        }
        entry = {"version": VERSION, "checksum": _checksum(body), **body}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_file(path, json.dumps(entry, separators=(",", ":")), "Plan cache")
        except OSError as error:
            warnings.warn(
                f"Plan cache: {path} cannot be written ({error}); the plan is not kept.", stacklevel=4
            )


def _checksum(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _warn(path: Path, why: str) -> None:
    warnings.warn(f"Plan cache: {path} is not used and made anew: {why}.", stacklevel=5)
