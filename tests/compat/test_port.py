"""`tilerec port`: imports of TorchRec become tilerec's, and everything else is listed."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilerec.cli import app
from tilerec.compat.port import port
from tilerec.errors import InputError

PROGRAM = """import torch
import torchrec
import torchrec.distributed as trec_dist
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.modules.mlp import MLP, Perceptron as P
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.model_parallel import (
    DistributedModelParallel,
    get_default_sharders,
)
if True:
    from torchrec.datasets.criteo import DAYS
é = torchrec.EmbeddingBagConfig, torchrec.sparse.jagged_tensor.KeyedTensor
y: trec_dist.ShardingEnv = trec_dist.types.ShardingEnv.from_local(1, 0)
z = torch.ops.fbgemm.dense_to_jagged
"""
PORTED = """import torch
from tilerec import EmbeddingBagConfig
from tilerec.parallel import ShardingEnv
from tilerec.sparse import KeyedTensor
from tilerec.optim import apply_optimizer_in_backward
from tilerec.modules import MLP, Perceptron as P
from torchrec.distributed.dist_data import KJTAllToAll
from tilerec import DistributedModelParallel
from tilerec.parallel import get_default_sharders
if True:
    from tilerec.compat.datasets.criteo import DAYS
é = EmbeddingBagConfig, KeyedTensor
y: ShardingEnv = ShardingEnv.from_local(1, 0)
z = torch.ops.fbgemm.dense_to_jagged
"""


def test_private_attributes_of_torchrec_are_listed_and_those_of_the_program_are_not() -> None:
    program = "print(model._plan.plan)\nids = kjt._values\n\nclass A:\n    def f(self):\n        return self._weights\n"
    ported = port(program)
    assert ported.text == program
    assert ported.notes == [
        (1, "_plan: private to TorchRec's objects; tilerec's have plan"),
        (2, "_values: private to TorchRec's objects; tilerec's have values()"),
    ]


def test_imports_and_uses_are_rewritten_and_the_rest_is_listed() -> None:
    ported = port(PROGRAM)
    assert ported.text == PORTED
    notes = dict(ported.notes)
    assert "classes of TorchRec's exchange" in notes[6]
    assert "only in tilerec.compat.datasets.criteo" in notes[12]
    assert "an operator of FBGEMM" in notes[15]


def test_modules_that_are_still_used_keep_their_import() -> None:
    ported = port("import torchrec, os\nimport torchrec.sparse as s\nprint(torchrec, s.nonsense)\n")
    assert ported.text == "import torchrec, os\nimport torchrec.sparse as s\nprint(torchrec, s.nonsense)\n"
    assert [line for line, _ in ported.notes] == [1, 2, 3]


def test_the_command_writes_the_program_and_lists_notes_on_stderr(tmp_path: Path) -> None:
    program, out = tmp_path / "train.py", tmp_path / "ported.py"
    program.write_text(PROGRAM)
    done = CliRunner().invoke(app, ["port", str(program), "--out", str(out)])
    assert done.exit_code == 0
    assert out.read_text() == PORTED
    assert f"{program}:6: " in done.stderr
    same = CliRunner().invoke(app, ["port", str(program), "--out", str(program)])
    assert same.exit_code == 1
    assert program.read_text() == PROGRAM
    assert CliRunner().invoke(app, ["port", str(tmp_path / "nowhere.py")]).exit_code == 1
    assert CliRunner().invoke(app, ["port", str(program)]).stdout == PORTED


def test_text_that_is_not_python_is_refused() -> None:
    with pytest.raises(InputError, match=r"train\.py: line 2"):
        port("x = 1\ny = = 2\n", "train.py")
