"""A manifest for KServe: a service that runs `tilerec serve` with room for the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from tests.export.test_triton_repository import written
from tilerec.cli import app
from tilerec.errors import ConfigError
from tilerec.export.kserve_manifest import KserveOptions, kserve_manifest
from tilerec.file_kind import EXPORT, KSERVE


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return written(tmp_path_factory.mktemp("package") / "My_Clicks.pt2", "user", "item")


def test_the_container_runs_tilerec_serve_on_the_files_of_the_storage_uri(package: Path, tmp_path: Path) -> None:
    out = tmp_path / "service.yaml"
    words = ["--image", "host:5000/tilerec:1", "--storage-uri", "s3://models/a", "--workers", "4", "--replicas", "2"]
    ended = CliRunner().invoke(app, ["serve-files", str(package), "--kserve", str(out), *words])
    assert ended.exit_code == 0, ended.output
    assert EXPORT.has(package)
    assert KSERVE.has(out)
    service = yaml.safe_load(out.read_text())
    assert (service["apiVersion"], service["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    assert service["metadata"]["name"] == "my-clicks"
    predictor = service["spec"]["predictor"]
    (container,) = predictor["containers"]
    assert (predictor["minReplicas"], container["name"], container["image"]) == (2, "kserve-container", words[1])
    assert container["env"] == [{"name": "STORAGE_URI", "value": "s3://models/a"}]
    ports = {container[probe]["httpGet"]["port"] for probe in ("livenessProbe", "readinessProbe")}
    assert ports == {container["ports"][0]["containerPort"]} == {8080}
    assert container["resources"]["requests"] == {"cpu": "4", "memory": f"{1 + 512 + 4 * 128}Mi"}
    command = container["command"]
    assert command[:5] == ["python", "-m", "tilerec", "serve", "/mnt/models/My_Clicks.pt2"]
    help_text = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    assert all(word in help_text for word in command if word.startswith("--"))


def test_settings_that_make_no_service_are_refused(package: Path) -> None:
    with pytest.raises(ConfigError, match="got image '', storage URI 's3://a'"):
        KserveOptions("", "s3://a")
    with pytest.raises(ConfigError, match="got the name 'A'; expected lower-case letters"):
        kserve_manifest(package, KserveOptions("image", "s3://a", "A"))
