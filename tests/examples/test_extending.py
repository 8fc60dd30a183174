"""Extensions from outside of the package: each example runs on one rank and on two; registries refuse bad entries.

`docs/extending.md` walks through these files.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.registries import restored_registries
from tilerec.comms import Codec, codec, register_codec
from tilerec.errors import ConfigError
from tilerec.planner.cost.workload import wire_bytes
from tilerec.sharders.qcomms import QCommsConfig
from tilerec.spec.plan import ParameterSharding, Wire
from tilerec.testing import Ranks

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "extending"

pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="examples are part of the repository, not of the wheel")


def _example(name: str) -> ModuleType:
    """Import an example once per process: it registers names."""
    key = f"example_extending_{name}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[key] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[key])
    return sys.modules[key]


def _main(name: str, *args: Any) -> Any:
    return _example(name).main(*args)


@pytest.fixture(autouse=True, scope="module")
def _examples_leave_no_names() -> Iterator[None]:
    with restored_registries():
        yield


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as pool:
        yield pool


def test_a_strategy_is_sharded_planned_and_checkpointed(ranks: Ranks, tmp_path: Path) -> None:
    assert max(ranks.run(_main, "strategy", str(tmp_path))) < 1e-6


def test_an_optimizer_updates_sharded_rows_as_whole_ones(ranks: Ranks) -> None:
    assert max(ranks.run(_main, "optimizer")) < 1e-6


def test_a_wire_format_carries_rows_and_gradients(ranks: Ranks) -> None:
    for error, fall in ranks.run(_main, "wire_format"):
        assert 0.01 < error <= 1 / 14 + 1e-6
        assert fall < 0.5


def test_a_metric_covers_the_samples_of_all_ranks(ranks: Ranks) -> None:
    for lifetime, at_once in ranks.run(_main, "metric"):
        assert lifetime == pytest.approx(at_once, rel=1e-12)


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> str:
    draw = torch.Generator().manual_seed(0)
    path = tmp_path_factory.mktemp("clicks") / "clicks.jsonl"
    lines = []
    for _ in range(1_500):
        user, item, price = (int(torch.randint(0, 20, (), generator=draw)) for _ in range(3))
        lines.append({"click": int(user < item), "price": price, "user": f"u{user}", "seen": [f"i{item}"] * 2})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_reader_trains_a_recipe_and_gives_statistics(ranks: Ranks, clicks: str) -> None:
    for reached, ids_per_sample in ranks.run(_main, "reader", clicks):
        assert reached > 0.8
        assert ids_per_sample == 2.0


def test_a_task_trains_to_the_same_error_on_any_number_of_ranks(ranks: Ranks) -> None:
    for error, of_the_mean in ranks.run(_main, "task"):
        assert error < 0.97 * of_the_mean
        assert error == pytest.approx(_main("task")[0], abs=1e-4)


def test_every_example_is_run_here_and_named_in_the_page() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    page = (ROOT / "docs" / "extending.md").read_text()
    assert names == {"strategy", "optimizer", "wire_format", "metric", "reader", "task"}
    assert {name for name in names if f"examples/extending/{name}.py" in page} == names


def test_the_pages_python_comes_from_the_examples() -> None:
    """A page whose code drifted from the tested file misleads."""
    page = (ROOT / "docs" / "extending.md").read_text()
    sources = "\n".join(path.read_text() for path in EXAMPLES.glob("*.py"))
    lines = [line for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    missing = [line for line in lines if line.strip() not in ("", "...") and line not in sources]
    assert lines
    assert not missing, missing


# ---------------------------------------------------------------------------------------------------- wire formats


class _Nibbles(Codec):
    name = "nibbles"
    wire_dtype = torch.uint8

    def encode(self, flat: Tensor, segments: Any) -> Tensor:
        return flat.to(torch.uint8)

    def decode(self, wire: Tensor, segments: Any) -> Tensor:
        return wire.to(torch.float32)


def _codec(**changes: Any) -> Codec:
    return type("Changed", (_Nibbles,), changes)()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (_codec(name="fp16"), "name='fp16', which is taken"),
        (_codec(name="4bit"), "lower-case identifier"),
        (_codec(name="INT4"), "lower-case identifier"),
        (_codec(name=None), "lower-case identifier"),
        ("int4", "subclass of tilerec.comms.Codec"),
        (_codec(row_elements=lambda self, width: width + 1), r"encode returned torch.uint8 \[11\].*expected.*\[14\]"),
        (_codec(wire_dtype=torch.int8), "encode returned torch.uint8"),
        (_codec(decode=lambda self, wire, segments: wire), "decode returned torch.uint8"),
    ],
)  # fmt: skip
def test_codecs_that_are_refused(made: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        register_codec(made)
    with pytest.raises(ConfigError, match="expected one of"):
        Wire("nibbles", "fp32")


def test_a_registered_format_is_a_word_of_plans_and_qcomms_and_has_a_price() -> None:
    _example("wire_format")
    sharding = ParameterSharding("row_wise", wire=Wire("int4", "bf16"))
    assert ParameterSharding.from_json("t", sharding.to_json()) == sharding
    assert QCommsConfig("int4", "fp16").wire() == Wire("int4", "fp16")
    assert wire_bytes("int4") == (0.5, 4)
    assert [wire_bytes(name) for name in ("fp32", "bf16", "int8")] == [(4, 0), (2, 0), (1, 4)]
    with pytest.raises(ConfigError, match="which is taken"):
        register_codec(codec("int4"))


def test_the_example_codec_keeps_what_is_not_finite_visible() -> None:
    _example("wire_format")
    flat = torch.tensor([1.0, torch.inf, 2.0, torch.nan, 1.0, 1.0, 7.0, 0.0, -7.0, 0.0, 0.0, 0.0])
    decoded = codec("int4").decode(codec("int4").encode(flat, [(4, 3), (0, 5)]), [(4, 3), (0, 5)])
    assert decoded[:6].isnan().all()
    assert decoded[6:].tolist() == [7.0, 0.0, -7.0, 0.0, 0.0, 0.0]
