"""Memory of the batches in a pipeline: bytes alive, in batches, beside TorchRec's.

    python benchmarks/pipeline_bytes.py [--peer .venv-peer/bin/python] [--ranks 1,2]

`pipeline_bytes_rank.py` is one process of either side; its first lines describe the count. Batches have lists of 64
int64 ids for two features, so nearly all their bytes are ids. The tables are sharded by rows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

EARLY = "free_features_storage_early"
PIPELINES = [
    "TrainPipelineBase", "TrainPipelineSparseDistLite", f"TrainPipelineSparseDistLite {EARLY}",
    "TrainPipelineSparseDist", f"TrainPipelineSparseDist {EARLY}",
    "PrefetchTrainPipelineSparseDist", f"PrefetchTrainPipelineSparseDist {EARLY}",
]  # fmt: skip


def counted(python: str, library: str, pipeline: str, ranks: int) -> dict[str, float]:
    """Run the processes of one side; batches alive by stage, on rank 0."""
    rank = str(Path(__file__).parent / "pipeline_bytes_rank.py")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "counts.json")
        launch = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        done = subprocess.run([*launch, rank, library, pipeline, str(out)], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        return {str(stage): float(number) for stage, number in json.loads(out.read_text()).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="Python with TorchRec")
    parser.add_argument("--ranks", default="1,2")
    args = parser.parse_args()
    sides = [("tilerec", sys.executable, name) for name in PIPELINES]
    if args.peer:
        sides.append(("torchrec", args.peer, "TrainPipelineSparseDist"))
        sides.append(("torchrec", args.peer, f"TrainPipelineSparseDist {EARLY}"))
    print("| ranks | library | pipeline | most batches alive | moment |\n|---|---|---|---|---|")
    for ranks in map(int, args.ranks.split(",")):
        for library, python, name in sides:
            found = counted(python, library, name, ranks)
            stage = max(found, key=lambda one: found[one])
            print(f"| {ranks} | {library} | {name} | {found[stage]:.2f} | {stage} |", flush=True)


if __name__ == "__main__":
    main()
