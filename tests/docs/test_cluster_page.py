"""docs/cluster.md shows the files of examples/cluster; they run, or have the structure of their kinds."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tilerec.train.launch import GRACE_S

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "examples" / "cluster"
PAGE = (ROOT / "docs" / "cluster.md").read_text()
NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="starts a launcher: nightly")
NIGHTLY_MODELS = pytest.mark.skipif(
    os.environ.get("TILEREC_NIGHTLY") != "1", reason="reads the models of kubeflow-training: nightly"
)
RUN_FILE = """
[data]
kind = "synthetic"
num_rows = [40, 20]
num_dense = 3
train_rows = 640
held_out_rows = 64

[model]
kind = "dlrm"
embedding_dim = 4
dense_arch = [8]
over_arch = [8]

[train]
batch_size = 64
log_every = 1
"""


@pytest.mark.parametrize("name", sorted(path.name for path in CLUSTER.iterdir() if path.is_file()))
def test_the_page_shows_the_files(name: str) -> None:
    assert f"`{name}`" in PAGE
    assert (CLUSTER / name).read_text() in PAGE


def trainer_model(name: str) -> Callable[[Any], Any]:
    """Return a function that reads an object by the model of this name in Kubeflow Trainer, and writes it again.

    Fields that the model lacks are missing in the result; values of another type raise.
    """
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
    return lambda found: getattr(models, name).from_dict(found).to_dict()


def test_the_runtime_and_its_job_fit_the_models_of_kubeflow_trainer() -> None:
    yaml = pytest.importorskip("yaml")
    objects = list(yaml.safe_load_all((CLUSTER / "trainjob.yaml").read_text()))
    assert [found["kind"] for found in objects] == ["TrainingRuntime", "TrainJob"]
    for found in objects:
        assert trainer_model(f"TrainerV1alpha1{found['kind']}")(found) == found
    runtime, job = objects
    runtime["spec"]["mlPolicy"]["torch"]["numProcPerNode"] = 2
    assert trainer_model("TrainerV1alpha1TrainingRuntime")(runtime) != runtime
    job["spec"]["trainer"]["numProcPerNode"] = "2"
    with pytest.raises(ValueError, match="numProcPerNode"):
        trainer_model("TrainerV1alpha1TrainJob")(job)


def test_the_pods_of_the_pytorchjob_fit_the_model_of_kubernetes() -> None:
    yaml = pytest.importorskip("yaml")
    (job,) = yaml.safe_load_all((CLUSTER / "pytorchjob.yaml").read_text())
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert trainer_model("IoK8sApiCoreV1PodSpec")(pod) == pod


@NIGHTLY_MODELS
@pytest.mark.filterwarnings("default")  # the package's own
def test_the_pytorchjob_fits_the_model_of_the_training_operator() -> None:
    yaml = pytest.importorskip("yaml")
    from kubeflow import training  # of tilerec[test-nightly]: without it, the nightly tests fail

    (job,) = yaml.safe_load_all((CLUSTER / "pytorchjob.yaml").read_text())

    def written_again(found: Any) -> Any:
        client = training.ApiClient()
        return client.sanitize_for_serialization(
            client.deserialize(SimpleNamespace(data=json.dumps(found)), "KubeflowOrgV1PyTorchJob")
        )

    assert written_again(job) == job
    assert written_again({**job, "spec": {**job["spec"], "nprocPerNode": 2}})["spec"]["nprocPerNode"] == "2"
    with pytest.raises(ValueError, match="run_policy"):
        written_again({**job, "spec": {name: part for name, part in job["spec"].items() if name != "runPolicy"}})


def test_names_in_manifests_belong_together() -> None:
    yaml = pytest.importorskip("yaml")
    (job,) = yaml.safe_load_all((CLUSTER / "pytorchjob.yaml").read_text())
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    pods = [worker["template"]["spec"]]
    assert job["spec"]["elasticPolicy"]["maxReplicas"] >= worker["replicas"]
    assert pods[0]["containers"][0]["name"] == "pytorch"  # the operator looks for it
    runtime, train_job = yaml.safe_load_all((CLUSTER / "trainjob.yaml").read_text())
    assert train_job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert train_job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pods.append(node["template"]["spec"]["template"]["spec"])
    assert pods[1]["containers"][0]["name"] == node["name"] == "node"
    commands = [pods[0]["containers"][0]["command"], train_job["spec"]["trainer"]["command"]]
    for pod, command in zip(pods, commands, strict=True):
        mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        # Kubernetes kills the pod after the grace period; torchrun must give up before, and a save needs most of it.
        shutdown = int(command[command.index("--shutdown-timeout") + 1])
        assert GRACE_S < shutdown < pod["terminationGracePeriodSeconds"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of the examples and a run file."""
    shutil.copytree(CLUSTER, tmp_path, dirs_exist_ok=True)
    (tmp_path / "run.toml").write_text(RUN_FILE)
    return tmp_path


def test_the_script_is_a_plain_program_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("cluster_train", folder / "train.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.chdir(folder)
    script.main("run.toml", "runs/a")
    assert summary(folder) == (10, 1)
    script.main("run.toml", "runs/a")
    assert summary(folder) == (10, 1)


def summary(folder: Path) -> tuple[int, int]:
    found = json.loads((folder / "runs" / "a" / "summary.json").read_text())
    return found["steps"], found["ranks"]


def program(path: Path, text: str) -> None:
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)


def shell(folder: Path, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    program(tools / "torchrun", "import runpy; runpy.run_module('torch.distributed.run', run_name='__main__')")
    program(tools / "python", "import os, sys; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", script], cwd=folder, capture_output=True, text=True, check=False,
        env={**environment, "PATH": f"{tools}:{environment['PATH']}", **variables},
    )  # fmt: skip


@NIGHTLY
def test_the_command_of_torchrun_runs(folder: Path) -> None:
    with socket.create_server(("localhost", 0)) as listener:
        port = listener.getsockname()[1]
    done = shell(folder, "torchrun.sh", FIRST=f"localhost:{port}")
    assert done.returncode == 0, done.stderr
    assert summary(folder) == (10, 2)


_SRUN = """
import os, subprocess, sys
words = [word for word in sys.argv[1:] if not word.startswith("--")]
slurm = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2", "SLURM_NODEID": "0",
         "SLURM_NODELIST": "localhost"}
if not os.path.exists("requeued"):
    words = ["python", "stopped.py", *words[2:]]
tasks = [
    subprocess.Popen(words, env={**os.environ, **slurm, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)})
    for rank in range(2)
]
sys.exit(max(task.wait() for task in tasks))
"""
_STOPPED = """
import os, signal, sys, train
from tilerec.train import Terminal
shown = Terminal.record
def record(self, event):
    shown(self, event)
    if event.step == 3:
        os.kill(os.getpid(), signal.SIGUSR1)
Terminal.record = record
train.main(*sys.argv[1:])
"""


@NIGHTLY
def test_the_job_of_slurm_is_saved_and_queued_again(folder: Path) -> None:
    """With an srun that starts two tasks, of which one gets the early signal, and a scontrol that notes its call."""
    (folder / "bin").mkdir()
    program(folder / "bin" / "srun", _SRUN)
    program(folder / "bin" / "scontrol", "import sys; open('requeued', 'w').write(' '.join(sys.argv[1:]))")
    (folder / "stopped.py").write_text(_STOPPED)
    variables = {"SLURM_JOB_ID": str(os.getpid())}
    done = shell(folder, "slurm.sh", **variables)
    assert done.returncode == 143, done.stderr
    assert (folder / "requeued").read_text() == f"requeue {os.getpid()}"
    assert not (folder / "runs" / "a" / "summary.json").exists()
    done = shell(folder, "slurm.sh", **variables)
    assert done.returncode == 0, done.stderr
    assert "resumed after step" in done.stdout
    assert summary(folder) == (10, 2)


def test_the_example_of_ray_is_run_by_a_test() -> None:
    source = (ROOT / "tests" / "elastic" / "test_ray.py").read_text()
    assert '"ray_train.py"' in source


def test_names_of_the_page_exist() -> None:
    settings: dict[str, Any] = {"parallel.timeout": 1, "checkpoint.every": 1, "checkpoint.seconds": 1}
    from tilerec.recipes.registry import make_run
    from tilerec.train import settings as settings_of

    assert set(settings) <= set(settings_of(make_run("synthetic")))
    for name in settings:
        assert f"`{name}`" in PAGE, name
