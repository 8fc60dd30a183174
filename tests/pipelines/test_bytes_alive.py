"""Memory of the batches in a pipeline, counted on real processes.

The unit is a batch as it is read. A batch on its way has further forms: sorted, sent, and received by its owners, half
a batch each here.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

if not (Path(__file__).parents[2] / "benchmarks").exists():
    pytest.skip("benchmarks are part of the repository, not of the wheel", allow_module_level=True)
if not hasattr(ctypes.CDLL(None), "mallinfo2"):
    pytest.skip("the C library does not count its memory", allow_module_level=True)

from benchmarks.pipeline_bytes_rank import count, tilerec_side
from tilerec.testing import run_ranks

BARS = {
    "TrainPipelineBase": (2.2, 2.8),
    "TrainPipelineSparseDistLite": (2.2, 3.5),
    "TrainPipelineSparseDist": (3.1, 4.0),
    "PrefetchTrainPipelineSparseDist": (3.1, 4.0),
    "TrainPipelineSparseDistLite free_features_storage_early": (2.2, 3.0),
    "TrainPipelineSparseDist free_features_storage_early": (3.1, 3.0),
    "PrefetchTrainPipelineSparseDist free_features_storage_early": (3.1, 3.0),
}
"""Batches alive at any moment, at most: on one rank, and on two."""


def _counts() -> list[dict[str, float]]:
    return [count(tilerec_side, name) for name in BARS]


@pytest.mark.parametrize("ranks", [1, 2])
def test_batches_alive(ranks: int) -> None:
    for own in run_ranks(ranks, _counts):
        for name, found in zip(BARS, own, strict=True):
            # Less than a batch would mean that nothing was counted.
            assert 1 <= max(found.values()) <= BARS[name][ranks - 1], (name, found)
        assert own[0]["backward"] < 1.2, "the batch of the step is released after its forward"
