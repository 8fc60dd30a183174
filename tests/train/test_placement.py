"""The place of a process among the ranks, from the variables of each launcher."""

from __future__ import annotations

import re

import pytest

from tilerec.errors import ConfigError
from tilerec.train.placement import Placement, first_host, tasks_per_node

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODELIST": "gpu[07-08]",
}


def test_tasks_of_srun_are_numbered_as_by_torchrun() -> None:
    place = Placement.of(SLURM)
    assert place is not None
    assert (place.rank, place.size) == (3, 4)
    environ: dict[str, str] = {}
    place.export(environ)
    port = int(environ.pop("MASTER_PORT"))
    assert 15_000 <= port < 30_000
    assert environ == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu07",
    }


def test_a_step_has_its_own_tasks_and_nodes() -> None:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "gpu[09,11]"}
    place = Placement.of({**SLURM, **step, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "MASTER_PORT": "29500"})
    assert place is not None
    assert place.size == 2
    assert place.missing["MASTER_ADDR"] == "gpu09"
    assert "MASTER_PORT" not in place.missing


def test_torchrun_inside_of_a_task_takes_precedence() -> None:
    place = Placement.of({**SLURM, "RANK": "5", "WORLD_SIZE": "8"})
    assert place == Placement(5, 8, {})


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WORLD_SIZE": "2"},
        {name: text for name, text in SLURM.items() if name != "SLURM_STEP_ID"},  # the script of sbatch
        {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {**SLURM, "SLURM_STEP_ID": "batch"},
    ],
)
def test_other_processes_are_alone(environ: dict[str, str]) -> None:
    assert Placement.of(environ) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SLURM_TASKS_PER_NODE": "3,1"}, "--ntasks-per-node"),
        ({"SLURM_NODEID": "0"}, "--distribution=block"),
        ({"SLURM_NTASKS": "four"}, "SLURM_NTASKS in the environment: got 'four'"),
        ({"SLURM_TASKS_PER_NODE": "2(x2"}, "got '2(x2'"),
    ],
)
def test_a_malformed_environment_is_refused_by_name(change: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        Placement.of({**SLURM, **change})


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[03-05,9]", "node03"),
        ("rack2-node[1,4]-ib,login", "rack2-node1-ib"),
    ],
)
def test_the_first_host_of_a_list(text: str, host: str) -> None:
    assert first_host(text) == host


def test_numbers_of_tasks() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
