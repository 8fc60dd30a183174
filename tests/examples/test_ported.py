"""`examples/ported`: programs with TorchRec's imports run unchanged, with the losses that they have under TorchRec."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tilerec.compat.standins.session import installed
from tilerec.compat.test_utils import get_free_port

FOLDER = Path(__file__).parents[2] / "examples" / "ported"
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="the examples are part of the repository, not of the wheel")

LAST_OF_TORCHREC = {
    "golden_dlrm.py": ["step 6 loss 0.929481", "step 7 loss 0.734342"],
    "golden_dlrm.py --data-parallel": ["step 6 loss 0.742444", "step 7 loss 0.708559"],
    "two_tower.py": ["step 6 loss 0.692379", "step 7 loss 0.694733"],
    "bert4rec.py": ["step 6 loss 4.615388", "step 7 loss 4.660717"],
    "criteo_trainer.py": ["step 0.7 loss 0.736763", "val auroc 0.5268 samples 256"],
}
"""The last lines of each program on one rank under TorchRec 1.8.0 and torch 2.13 (`benchmarks/ported.py`)."""


@pytest.mark.parametrize("command", LAST_OF_TORCHREC)
def test_a_program_for_torchrec_runs_unchanged_with_the_same_losses(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *arguments = command.split()
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(get_free_port())}
    for name, value in rank.items():
        monkeypatch.setitem(os.environ, name, value)
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    with installed() as session:
        try:
            runpy.run_path(str(FOLDER / program), run_name="__main__")
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        report = session.report
    lines = capsys.readouterr().out.splitlines()[-2:]
    for line, theirs in zip(lines, LAST_OF_TORCHREC[command], strict=True):
        for word, other in zip(line.split(), theirs.split(), strict=True):
            assert word == other or float(word) == pytest.approx(float(other), rel=1e-4)
    assert len(report.names) > 8
    assert not report.ignored
