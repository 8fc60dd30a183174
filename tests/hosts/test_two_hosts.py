"""Two hosts for real: network namespaces joined by a slow cable, torchrun on each, one sharded model over them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

if not (ROOT / "benchmarks").exists():
    pytest.skip("benchmarks are part of the repository, not of the wheel", allow_module_level=True)


def _linked_hosts() -> Any:
    spec = importlib.util.spec_from_file_location("linked_hosts", ROOT / "benchmarks/linked_hosts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


linked_hosts = _linked_hosts()
REASON = linked_hosts.why_not()
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="half a minute: nightly"),
    pytest.mark.skipif(REASON is not None, reason=f"{REASON}"),
]

RATE = "100mbit"
# Ethernet, IP and TCP headers (66 in 1,514 bytes) and the acknowledgements of what comes the other way.
PROTOCOL = 1.12
BARRIERS = 4096


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The benchmark's report, and what it printed."""
    report = tmp_path_factory.mktemp("two_hosts") / "report.json"
    program = [sys.executable, str(ROOT / "benchmarks/two_hosts.py"), f"--rate={RATE}", f"--json={report}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(report.read_text()), done.stdout


TILINGS = ["row_wise", "table_row_wise", "grid_shard", "table_wise"]


@pytest.mark.parametrize("tiling", TILINGS)
def test_ranks_on_two_hosts_equal_the_unsharded_module(run: tuple[dict[str, Any], str], tiling: str) -> None:
    assert run[0]["tilings"][tiling]["error"] <= 1e-6


@pytest.mark.parametrize("tiling", TILINGS)
def test_bytes_over_the_link_are_those_predicted(run: tuple[dict[str, Any], str], tiling: str) -> None:
    facts = run[0]["tilings"][tiling]
    for host in range(2):
        assert facts["counted"][host] == facts["predicted"][host]
        total = sum(facts["counted"][host].values())
        assert total > 400_000
        assert total < facts["seen"][host] <= PROTOCOL * total + BARRIERS


def test_a_table_on_one_host_or_half_its_columns_on_each_sends_the_fewest_rows(
    run: tuple[dict[str, Any], str],
) -> None:
    """Of bags with several ids: row-wise over all ranks, nearly every bag needs a sum from the other host."""

    def rows(tiling: str) -> int:
        return sum(host["rows"] for host in run[0]["tilings"][tiling]["counted"])

    assert rows("table_row_wise") < 0.6 * rows("row_wise")
    assert rows("grid_shard") < 0.6 * rows("row_wise")
    # Sums are added on the other host before they cross: cut rows cost nothing there.
    assert rows("table_row_wise") < 1.01 * rows("table_wise")


def test_the_report_says_which_is_fastest_on_that_link(run: tuple[dict[str, Any], str]) -> None:
    last = run[1].strip().splitlines()[-1]
    times = {tiling: facts["ms"] for tiling, facts in run[0]["tilings"].items()}
    assert last.startswith(f"fastest on this link: {min(times, key=lambda tiling: times[tiling])}, then ")
    assert sorted(last.partition(": ")[2].replace(", then", ",").split(", ")) == sorted(TILINGS)
    print(run[1])


def test_the_link_is_as_slow_as_it_is_told_to_be(run: tuple[dict[str, Any], str]) -> None:
    link = run[0]["link"]
    if link != f"{RATE} each way":
        pytest.skip(link)
    for facts in run[0]["tilings"].values():
        # What a 100 Mbit/s cable cannot have carried any faster; the bucket lets 32 KiB through at once.
        least_ms = (max(facts["seen"]) - 4 * 32 * 1024) * 8 / 100e6 * 1e3
        assert facts["ms"] > least_ms


@pytest.fixture
def hosts() -> Iterator[Any]:
    with linked_hosts.LinkedHosts() as made:
        yield made


def test_hosts_reach_each_other_and_nothing_else(hosts: Any) -> None:
    names = "import os; print(sorted(os.listdir('/sys/class/net')))"
    for host in range(2):
        seen = hosts.popen(host, [sys.executable, "-S", "-c", names], stdout=subprocess.PIPE, text=True)
        assert seen.communicate()[0].strip() == f"['{linked_hosts.DEVICE}', 'lo']"
    port = hosts.free_port(0)
    serve = (
        f"import socket; s = socket.create_server(('{linked_hosts.ADDRESSES[0]}', {port})); "
        "print('up', flush=True); s.accept()[0].sendall(b'hello')"
    )
    server = hosts.popen(0, [sys.executable, "-S", "-c", serve], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "up\n"
    ask = f"import socket; print(socket.create_connection(('{linked_hosts.ADDRESSES[0]}', {port})).recv(9))"
    client = hosts.popen(1, [sys.executable, "-S", "-c", ask], stdout=subprocess.PIPE, text=True)
    assert client.communicate()[0] == "b'hello'\n"
    server.communicate()


def test_hosts_leave_no_process_and_no_namespace() -> None:
    with linked_hosts.LinkedHosts() as made:
        left = made.popen(1, ["sleep", "600"])
    assert left.returncode == -9
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in listed for name in made.names)
