"""Cache of plans in a folder, keyed by the digest of the request. A cached plan is read without a search.

An entry is one JSON file with its request's digest, the plan, its report and a checksum of them. It is written
atomically, so readers never see a partial entry. Concurrent writers of one entry write the same content. If an entry
cannot be read, or does not belong to its request, the cache warns, and the planner plans again.
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

VERSION = 4


@final
class PlanCache:
    """Cache of plans in a folder.

    Args:
        folder: folder of the entries; created if it does not exist.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path(self, request: PlanRequest) -> Path:
        """Return the path of a request's entry, which may not exist."""
        return self.folder / f"plan-{request.digest()}.json"

    def load(self, request: PlanRequest) -> tuple[ShardingPlan, PlanReport] | None:
        """Return the plan and the report of a request; None if there is no readable entry."""
        path = self.path(request)
        if not path.exists():
            return None
        try:
            entry = read_json(path, "Plan cache").value
            if not isinstance(entry, dict) or entry.get("version") != VERSION:
                raise ConfigError("it has another version")
            body = {name: entry.get(name) for name in ("request", "plan", "report")}
            if entry.get("checksum") != _checksum(body):
                raise ConfigError("its checksum does not match its contents")
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
            warnings.warn(f"Plan cache: {path} is ignored and will be written again: {error}.", stacklevel=4)
            return None
        return plan, report

    def store(self, request: PlanRequest, plan: ShardingPlan, report: PlanReport) -> None:
        """Write a plan to the folder. If that fails, warn; the plan remains valid."""
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
            warnings.warn(f"Plan cache: {path} cannot be written ({error}); the plan is not cached.", stacklevel=4)


def _checksum(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
