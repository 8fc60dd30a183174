"""`PlannerError`: no plan exists or none was found. It reports missing bytes, the heaviest tables, and remedies."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from tilerec.errors import ConfigError
from tilerec.planner.decision import Decision
from tilerec.planner.remedies import Remedy, remedies_for
from tilerec.planner.report.plan_report import TIERS
from tilerec.planner.search.instance import Status
from tilerec.planner.shortage import NAMES_SHOWN, Shortage
from tilerec.spec.plan_table import bytes_text


class PlannerErrorType(Enum):
    """Error types of a planner, with TorchRec's names.

    `PlannerError.error_type` is INSUFFICIENT_STORAGE or STRICT_CONSTRAINTS; the others are plain `ConfigError`s in
    tilerec.
    """

    INSUFFICIENT_STORAGE = "insufficient_storage"
    STRICT_CONSTRAINTS = "strict_constraints"
    PARTITION = "partition"
    OTHER = "other"
    PLANNER_INPUT_CONTEXT_MISMATCH = "planner_input_context_mismatch"
    PLAN_LOADING_FAILED = "plan_loading_failed"
    INVALID_RANK_ASSIGNMENT = "invalid_rank_assignment"
    INPUT_VALIDATION = "input_validation"
    MISSING_MODULE_IN_PLAN = "missing_module_in_plan"
    INVALID_COMPUTE_KERNEL = "invalid_compute_kernel"


class PlannerError(ConfigError):
    """Raised if there is no plan for a request, or if none was found.

    Attributes:
        proved: True if no plan exists; False if the search found none.
        tier: memory that is too small: "device" or "host"; "" if unknown.
        short: least number of missing bytes, over all ranks; on one rank if a piece of one table is too large.
        heaviest: names of the tables with the most bytes.
        remedies: changes of the request for which a plan was found.
        error_type: as in TorchRec. INSUFFICIENT_STORAGE: the tables need more memory than all ranks have, or a rank is
            full before any table is placed. STRICT_CONSTRAINTS: all ranks together have enough memory.
    """

    def __init__(
        self,
        message: str,
        *,
        proved: bool = False,
        tier: str = "",
        short: int = 0,
        heaviest: Sequence[str] = (),
        remedies: Sequence[Remedy] = (),
        error_type: PlannerErrorType = PlannerErrorType.INSUFFICIENT_STORAGE,
    ) -> None:
        super().__init__(message)
        self.proved, self.tier, self.short = proved, tier, short
        self.heaviest, self.remedies = tuple(heaviest), tuple(remedies)
        self.error_type = error_type


def planner_error_of(decision: Decision) -> PlannerError:
    """Return the error for a decision without a plan."""
    found = Shortage(decision)
    names = found.instance.names
    proof = decision.solution.proof
    proved = decision.solution.status is Status.NONE_EXISTS
    sentence, short = found.sentence(proved)
    order = sorted(range(len(names)), key=lambda t: (-int(found.least[t]), names[t]))[:NAMES_SHOWN]
    heaviest = [names[t] for t in order]
    heavy = ", ".join(f"'{names[t]}' {bytes_text(int(found.least[t]))}" for t in order)
    remedies = remedies_for(found)
    start = "No plan exists" if proved else "No plan was found (there may be one)"
    ranks, hosts = found.topology.world_size, found.topology.host_count
    world = f"{_count(ranks, f'{found.topology.compute_device} rank')} of {_count(hosts, 'host')}"
    text = f"{start} for {_count(len(found.request.tables), 'table')} on {world}: {sentence}"
    if heavy:
        text += f" The heaviest tables need at least {heavy}."
    if remedies:
        text += " Remedies, each with a plan:" + "".join(f"\n  - {remedy.text}" for remedy in remedies)
    else:
        text += (
            " None of these changes alone was enough: more ranks, a larger cap, optimizers that update in the "
            "backward pass, bf16 rows, other sharding types. Combine several, or plan fewer tables."
        )
    tier = TIERS[proof.tier] if proof is not None and proof.tier >= 0 else TIERS[found.tier]
    has_room = found.need <= found.room and bool((found.taken <= found.caps).all())
    kind = PlannerErrorType.STRICT_CONSTRAINTS if has_room else PlannerErrorType.INSUFFICIENT_STORAGE
    return PlannerError(
        text, proved=proved, tier=tier, short=short, heaviest=heaviest, remedies=remedies, error_type=kind
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
