"""Files that an earlier release wrote, and what is in them: a plan, its report and request, checkpoints.

`files/` is written once (`write.py --files`, on purpose only) and stays: users have such files. The cases
load them and hash what they hold.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from tests.golden.digest import digest
from tests.golden.planning import CPU_4, KNOWN, SHARDERS, SMALL, numbers_of, planner_of
from tests.golden.processes import Model, run_on_ranks, trained
from tests.golden.training import Marks, Run, build, features, step_of
from tilerec import DistributedModelParallel
from tilerec.optim import FusedOptimizer
from tilerec.parallel import full_state_dict
from tilerec.planner import PlanReport, PlanRequest, ShardingPlan, make_plan

FOLDER = Path(__file__).with_name("files")
RUN = Run("mixed", "adam_row_step", "sum", "2+2", "types")
ALONE = Run("table_wise", "rowwise_adagrad_l2", "sequence", "1", "types")


def _sharded_model(tiling: str) -> Any:
    run = Run(tiling, RUN.optimizer, RUN.form, RUN.world, RUN.data_type)
    return DistributedModelParallel(Model(run), plan={"tables": run.plan}, init_data_parallel=False)


def save_checkpoint(folder: str) -> None:
    """Train a sharded model and save it with its optimizer's state. Runs on every rank."""
    model = _sharded_model(RUN.tiling)
    trained(model, RUN, range(3))
    states = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
    dcp.save(states, checkpoint_id=folder)


def load_checkpoint(folder: str, tiling: str) -> tuple[str, str]:
    """Load it under another tiling. Runs on every rank."""
    model = _sharded_model(tiling)
    states = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
    dcp.load(states, checkpoint_id=folder)
    model.load_state_dict(states["model"])
    model.fused_optimizer.load_state_dict(states["optimizer"])
    return digest(full_state_dict(model)), digest(model.fused_optimizer.full_state_dict()["state"])


def _checkpoint_sharded() -> Marks:
    (found,) = set(run_on_ranks(load_checkpoint, str(FOLDER / "checkpoint"), "checkerboard"))
    return {"weights": found[0], "state": found[1]}


def _checkpoint_unsharded() -> Marks:
    model = Model(RUN)
    optimizer = FusedOptimizer(model)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(states, checkpoint_id=str(FOLDER / "checkpoint"), no_dist=True)
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    return {"weights": digest(model.state_dict()), "state": digest(optimizer.state_dict()["state"])}


def _unsharded() -> Marks:
    found = torch.load(FOLDER / "unsharded.pt", weights_only=True)
    module = build(ALONE)
    module.load_state_dict(found["model"])
    module.fused_optimizer.load_state_dict(found["optimizer"])
    state = digest(module.fused_optimizer.state_dict())
    outputs = step_of(module, features(ALONE, 0, 7), 1.0)  # and it goes on
    return {"state": state, "outputs": digest(outputs), "weights": digest(module.state_dict())}


def _plan() -> Marks:
    plan = ShardingPlan.load(FOLDER / "plan.json")
    price = planner_of(CPU_4, KNOWN, {}).price(SMALL, plan, SHARDERS)
    return {"plan": digest(plan.dumps()), "price": digest(price.cost_ps)}


def _report() -> Marks:
    report = PlanReport.load(FOLDER / "plan.report.json").to_json()
    return {"numbers": digest(numbers_of(report)), "tables": digest(report["tables"])}


def _request() -> Marks:
    request = PlanRequest.load(FOLDER / "plan.request.json")
    return {"request": digest(str(request.digest())), "plan": digest(make_plan(request).dumps())}


CASES: dict[str, Callable[[], Marks]] = {
    "files/plan": _plan,
    "files/report": _report,
    "files/request": _request,
    "files/checkpoint-sharded": _checkpoint_sharded,
    "files/checkpoint-unsharded": _checkpoint_unsharded,
    "files/unsharded": _unsharded,
}


def write() -> None:
    """Replace all files by those of today's code."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    planner = planner_of(CPU_4, KNOWN, {})
    plan = planner.plan(SMALL, SHARDERS)
    plan.save(FOLDER / "plan.json")
    plan.report.save(FOLDER / "plan.report.json")
    request = planner.request(SMALL, SHARDERS).to_json()
    (FOLDER / "plan.request.json").write_text(json.dumps(request, indent=1) + "\n")
    module = build(ALONE)
    for step in range(3):
        step_of(module, features(ALONE, 0, step), 1.0)
    states = {"model": module.state_dict(), "optimizer": module.fused_optimizer.state_dict()}
    torch.save(states, FOLDER / "unsharded.pt")
    run_on_ranks(save_checkpoint, str(FOLDER / "checkpoint"))
