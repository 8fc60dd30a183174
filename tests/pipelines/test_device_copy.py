"""Copies of batches to the device; a device without memory stands for one."""

from __future__ import annotations

import torch

from tests.pipelines.pipeline_models import batch_of
from tilerec.pipelines.batch_in_flight import BatchInFlight, Origin
from tilerec.pipelines.device_copy import DeviceCopy


def test_the_empty_batch_of_a_rank_that_has_run_out_is_copied_too() -> None:
    """It was not read, so it has no marks."""
    found = BatchInFlight(Origin(0, 3, filler=True), batch_of(1))
    DeviceCopy(torch.device("meta"))(found, "test")
    assert found.batch.dense.is_meta
    assert found.batch.features.values().is_meta
