"""Which backends serve which ops: where PyTorch has a GPU build and Triton, kernels are registered for all of them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tilerec.ops import backends

ROOT = Path(__file__).resolve().parents[2]

# A CPU build that says it is a GPU build: kernels are registered, and none can be called.
PRETENDED = """
import json, sys, torch
torch.version.cuda = sys.argv[1] or None
from tilerec.ops import backends
names = sorted({str(name) for name in torch._C._dispatch_get_all_op_names() if name.startswith("tilerec::")})
has = torch._C._dispatch_has_kernel_for_dispatch_key
print(json.dumps({"triton": backends.TRITON, **{k: [n for n in names if has(n, k)] for k in ("CPU", "CUDA")}}))
"""
# Torch's own kernels do these as they should on GPUs. (There, ids are made distinct only if a plan demands it, and
# rows of files pass through memory of the host.)
AS_THE_REFERENCE = {
    *("offsets_from_lengths", "take_segments_", "hash_rows_", "take_items_", "best_rows", "cross_"),
    "cross_backward_",
    *("distinct_ids", "expand_rows_", "sum_rows_", "read_rows_", "write_rows_", "hot_ids"),
    *("updated_hot_rows", "copy_rows_"),
}


def registered(cuda: str, **environment: str) -> dict[str, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PRETENDED, cuda],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(not backends.NATIVE_CPU, reason="the native library does not serve")
def test_what_the_native_library_serves_on_cpus_triton_serves_on_gpus() -> None:
    found = registered("13.0")
    assert found["triton"]
    left = {name.partition("::")[2] for name in found["CPU"]} - {name.partition("::")[2] for name in found["CUDA"]}
    assert left <= AS_THE_REFERENCE, left


def test_a_cpu_build_registers_nothing_for_gpus_and_does_not_import_triton() -> None:
    if torch.version.cuda is None and torch.version.hip is None:
        assert not backends.TRITON
    assert registered("")["CUDA"] == []


def test_the_kernels_can_be_switched_off() -> None:
    found = registered("13.0", TILEREC_TRITON="0")
    assert not found["triton"]
    assert found["CUDA"] == []
