"""Processes that are started on the simulated GPU are on it, too: Python imports this before anything else."""

import os
import sys
from pathlib import Path

if os.environ.get("TILEREC_SIMULATED_GPU") == "1" and "torch" not in sys.modules:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import run

    if Path(sys.argv[0] if sys.argv else "").name != "run.py":
        run.load()
