"""The simulated GPU is one: what it forbids is refused, graphs are replayed, and the library trains on it.

The quick ones of `tests/cuda` run here; `make simulated-gpu` runs them all.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="needs a C++ compiler"),
    pytest.mark.skipif(os.environ.get("TILEREC_SIMULATED_GPU") == "1", reason="this is the simulated GPU"),
]

HERE = Path(__file__).parent
QUICK = [
    "test_update.py::test_an_update_of_sgd_is_captured_and_replayed",
    "test_update.py::test_a_step_of_a_module_does_not_wait",
    "test_update.py::test_a_gradient_that_is_not_finite_is_told_at_a_later_step",
    "test_lookup.py::test_an_error_appears_at_a_later_op_without_anybody_waiting",
    "test_cached.py::test_a_prefetched_batch_is_looked_up_and_updated_without_waiting_for_the_device",
    "test_cached.py::test_moving_a_cached_module_moves_its_caches_only",
    "test_sharded_waits.py::test_a_forward_on_two_hosts_waits_once_and_has_the_cpus_bits[False]",
]


def on_it(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(HERE / "run.py"), *arguments], capture_output=True, text=True, timeout=150
    )


@pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="tests the simulation, not the library: nightly")
def test_a_device_refuses_what_a_gpu_refuses_and_replays_what_was_captured(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import warnings, torch
cpu, gpu = torch.arange(6.0), torch.arange(6.0, device="cuda")
assert gpu.is_cuda and torch.equal(gpu.cpu(), cpu)

def refused(call, words):
    try:
        call()
    except RuntimeError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nobody refused: {words}")

refused(lambda: cpu + gpu, "at least two devices")
torch.cuda.set_sync_debug_mode("error")
for waits in (gpu.tolist, gpu.cpu, gpu.nonzero, gpu.sum().item, lambda: cpu.to("cuda"), lambda: gpu[gpu > 2],
              torch.cuda.synchronize):
    refused(waits, "synchroniz")
pinned = cpu.pin_memory()
assert pinned.is_pinned() and not cpu.is_pinned()
pinned.to("cuda", non_blocking=True)
torch.cuda.set_sync_debug_mode("default")
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    torch.cuda.set_sync_debug_mode("warn")
    assert gpu.tolist() == cpu.tolist()
    torch.cuda.synchronize()
    gpu + 1
    torch.cuda.set_sync_debug_mode("default")
assert len(told) == 2 and all("synchronizing" in str(one.message) for one in told), told

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    refused(gpu.sum().item, "capturing")
    double = gpu * 2
    gpu += 1
assert torch.equal(gpu.cpu(), cpu), "captured is not run"
for n in range(3):
    graph.replay()
    assert double.tolist() == ((cpu + n) * 2).tolist(), (n, double)

other = torch.ones(2, device="cuda:1")
assert other.device.index == 1
grown = torch.empty(0, device="cuda")
torch.arange(5, out=grown)
assert grown.tolist() == [0, 1, 2, 3, 4]
leaf = torch.ones(3, device="cuda", requires_grad=True)
(leaf.view(3, 1) * 2).sum().backward()
assert leaf.grad.tolist() == [2, 2, 2]
print("all of it")
"""
    )
    done = on_it(str(script))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all of it" in done.stdout


def test_the_library_trains_on_it_without_waiting_captured_cached_and_told_of_what_is_wrong() -> None:
    tests = [str(HERE.parent / "cuda" / name) for name in QUICK]
    done = on_it("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"{len(QUICK)} passed" in done.stdout
