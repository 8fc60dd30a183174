"""Normalized entropy (NE) on the planted stream: how much of it int8 and int4 rows lose over fp32."""

from __future__ import annotations

import os

import pytest
import torch

from tilerec.quantized import quantize_tables
from tilerec.recipes.registry import make_run
from tilerec.train.evaluate import Scores, evaluate
from tilerec.train.loop import train
from tilerec.train.override import override_all

NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="minutes of training: nightly")
LIMITS = {"fp16": 1e-4, "int8": 1e-4, "int4": 5e-4}
"""Largest relative increase of NE."""


@pytest.mark.parametrize(
    ("steps", "dim"),
    [(40, 16), pytest.param(1900, 16, marks=NIGHTLY), pytest.param(1900, 64, marks=NIGHTLY)],
)
def test_quantized_tables_keep_the_normalized_entropy(steps: int, dim: int) -> None:
    run = override_all(make_run("synthetic"), [f"train.max_steps={steps}", f"model.embedding_dim={dim}"])
    model = train(run).model.eval()
    held_out = list(run.data.open().held_out(8192))

    def ne(row_type: str) -> float:
        scores = evaluate(quantize_tables(model, row_type), held_out, torch.device("cpu"))
        assert isinstance(scores, Scores)
        return scores.ne

    trained = ne("fp32")
    assert trained < 0.9  # it has learned: rows matter
    for row_type, limit in LIMITS.items():
        assert ne(row_type) <= trained * (1 + limit), row_type
