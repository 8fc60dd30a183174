"""Valid files of every kind, changed at random: each outcome is a file that is read, or an error of the library.

`python tests/document_fuzzer.py SECONDS [SEED]` runs the long form.
"""

from __future__ import annotations

import json
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tilerec.data.statistics import FeatureStatistics, Statistics
from tilerec.errors import TilerecError
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.default_speeds import default_speeds
from tilerec.planner.make_plan import make_plan
from tilerec.planner.report.plan_report import PlanReport
from tilerec.planner.request import PlanRequest
from tilerec.planner.table_list import read_tables
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.topology import Topology
from tilerec.viz.report import report_html

WORDS: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**53, 2**62, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e300, 5e-324, "", "0",
    "0-3", "3-0", "0-99999999999", "0-1048575", "{0,1}", "{0-1048575}", "{", "}", "0,,1", "-", "a", "\x1b[31m",
    "\u202e",
    "row_wise", "explicit", "fused", "fused_uvm_caching", "FP8", "bf16", "cpu", "x" * 300, [], {}, [0], [[]], [0, 1],
    [[0, 1]], {"ranks": "0"}, [{"ranks": "0"}], ["0-1"], {"forward": "fp16"}, {"load_factor": 2},
    float("inf"), float("nan"),
]  # fmt: skip


BITS = (b"[" * 500, b"\xff", b'"', b"{", b"9" * 5000, b"1e999", b"NaN", b",", b"\x00", b"\\ud800")


def documents() -> dict[str, Any]:
    """One valid document of each kind."""
    data = [
        {"name": "user", "num_embeddings": 2000, "embedding_dim": 64, "optimizer": "RowWiseAdagrad", "module": "ebc"},
        {"name": "item", "num_embeddings": 500, "embedding_dim": 32, "constraints": {"sharding_types": ["row_wise"]}},
        {"name": "ad", "num_embeddings": 100, "embedding_dim": 16, "feature_names": ["a", "b"], "cached": 0.5,
         "optimizer": {"optimizer": "Adam", "lr": 0.1, "betas": [0.9, 0.99]}, "also": [["ec", "ad"]],
         "wire": {"forward": "bf16", "backward": "bf16"},
         "constraints": {"ranks": "0-2", "pooling_factors": [1.0, 2.0], "cache_params": {"load_factor": 0.1},
                         "skew": {"distinct": 5, "exponent": 1.1, "ordered": False}}},
        {"name": "pin", "num_embeddings": 10, "embedding_dim": 8, "constraints": {"sharding": {
            "sharding_type": "explicit", "rows": 10, "dim": 8,
            "tiling": [{"columns": [0, 4], "rows": [0, 3, 10], "ranks": "0-1"},
                       {"columns": [4, 8], "ranks": "{2,3}"}]}}},
    ]  # fmt: skip
    tables, constraints = read_tables(data)
    bare = Topology(4, "cuda", local_world_size=2, hbm_caps=[2**33, 2**33, 2**34, 2**34])
    topology = Topology(
        4, "cuda", hosts=[[0, 1], [2, 3]], hbm_caps=[2**33, 2**33, 2**34, 2**34], speeds=default_speeds(bare)
    )
    request = PlanRequest(tuple(tables), topology, 64, constraints)
    plan = make_plan(request)
    feature = FeatureStatistics(10, 20, 1, 4, 7, 0.01, 9, 1.2, 0.1, True, ((3, 5), ("é", 4)), 1)
    return {
        "tables": data,
        "topology": topology.to_json(),
        "request": request.to_json(),
        "plan": plan.to_json(),
        "report": plan.report.to_json(),
        "statistics": Statistics("clicks", 10, 0, False, {"user": feature, "item": feature}).to_json(),
    }


def _plan(path: Path) -> None:
    plan = ShardingPlan.load(path)
    str(plan).encode()
    assert ShardingPlan.from_json(json.loads(plan.dumps())) == plan


def _topology(path: Path) -> None:
    topology = Topology.load(path)
    str(topology).encode()
    assert Topology.from_json(json.loads(json.dumps(topology.to_json(), allow_nan=False))) == topology


def _request(path: Path) -> None:
    request = PlanRequest.load(path)
    assert (
        PlanRequest.from_json(json.loads(json.dumps(request.to_json(), allow_nan=False))).digest() == request.digest()
    )


def _report(path: Path) -> None:
    report = PlanReport.load(path)
    str(report).encode()
    report_html(None, report).encode()


def _statistics(path: Path) -> None:
    found = Statistics.load(path)
    tables, _ = read_tables([{"name": "user", "num_embeddings": 100, "embedding_dim": 8}])
    limits: dict[str, ParameterConstraints] = found.constraints([_Table(tables[0].rows)])
    str(limits).encode()
    json.dumps(found.to_json(), allow_nan=False)


class _Table:
    name = "user"
    feature_names = ("user", "item")

    def __init__(self, rows: int) -> None:
        self.num_embeddings = rows


def _tables(path: Path) -> None:
    from tilerec.plan_cli.sources import file_source

    file_source(path, None)


READERS: dict[str, Callable[[Path], None]] = {
    "plan": _plan, "topology": _topology, "request": _request, "report": _report, "statistics": _statistics,
    "tables": _tables,
}  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    found: list[tuple[Any, Any]] = []
    todo = [value]
    while todo:
        item = todo.pop()
        keys: Any = item.keys() if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ()
        for key in keys:
            found.append((item, key))
            todo.append(item[key])
    return found


def changed(document: Any, draw: random.Random) -> bytes:
    """The document with one to three changes of values, or of bytes."""
    copy = json.loads(json.dumps(document))
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        everywhere = places(copy)
        if not everywhere:
            break
        container, key = draw.choice(everywhere)
        kind = draw.random()
        if kind < 0.6:
            container[key] = deepcopy(draw.choice(WORDS))
        elif kind < 0.7:
            container[key] = draw.choice(everywhere)[0]  # a part of the document at another place
            try:
                json.dumps(copy)
            except ValueError:
                container[key] = None  # a part of itself
            else:
                copy = json.loads(json.dumps(copy))
        elif kind < 0.8:
            del container[key]
        elif kind < 0.9 and isinstance(container, list):
            container.insert(key, deepcopy(draw.choice(WORDS)))
        elif isinstance(container, dict):
            container[draw.choice([str(w) for w in WORDS if not isinstance(w, (list, dict))])] = container[key]
    text = json.dumps(copy, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    if draw.random() < 0.25:
        for _ in range(draw.randint(1, 3)):
            at, kind = draw.randrange(len(text) + 1), draw.random()
            bit = draw.choice(
                [b"[" * 500, b"\xff", b'"', b"{", b"9" * 5000, b"1e999", b"NaN", b",", b"\x00", b"\\ud800"]
            )
            if kind < 0.5:
                text = text[:at] + bit + text[at + draw.randrange(3) :]
            elif kind < 0.75:
                text = text[:at]
            else:
                text = text[:at] + text[at : at + 40] + text[at:]
    return text


def outcome(kind: str, text: bytes, folder: Path) -> str:
    """ "read", or the error's message; other exceptions get out."""
    path = folder / f"{kind}.json"
    path.write_bytes(text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            READERS[kind](path)
    except TilerecError as error:
        return str(error)
    return "read"


def main(seconds: float, seed: int) -> None:
    """Run the long form; exits with 1 at the first failure of each kind of exception."""
    draw = random.Random(seed)
    valid = documents()
    end = time.monotonic() + seconds
    counts: dict[str, int] = {}
    failures: set[str] = set()
    slowest = 0.0
    with TemporaryDirectory() as name:
        while time.monotonic() < end:
            kind = draw.choice(list(valid))
            text = changed(valid[kind], draw)
            began = time.process_time()
            try:
                found = outcome(kind, text, Path(name))
            except Exception as error:
                mark = f"{kind} {type(error).__name__} {traceback.extract_tb(error.__traceback__)[-1]}"
                if mark not in failures:
                    failures.add(mark)
                    print(mark, str(error)[:200], sep="\n  ")
                    traceback.print_exc(limit=-4)
                    (Path("/tmp") / f"fuzz-{kind}-{len(failures)}.json").write_bytes(text)
                continue
            took = time.process_time() - began
            if took > slowest:
                slowest = took
                print(f"{kind} took {took:.2f} s: {found[:200]}")
            counts[f"{kind} {'read' if found == 'read' else 'refused'}"] = (
                counts.get(f"{kind} {'read' if found == 'read' else 'refused'}", 0) + 1
            )
    print(dict(sorted(counts.items())), f"{len(failures)} failures", f"slowest {slowest:.2f} s")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
