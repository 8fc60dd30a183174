"""`kserve_manifest`: an InferenceService of KServe that serves a package with `tilerec serve`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tilerec.errors import ConfigError
from tilerec.export.package_file import open_package

_MODELS = "/mnt/models"
"""Where KServe puts the files of STORAGE_URI."""
_MIB = 1 << 20
_SERVER_MIB, _WORKER_MIB = 512, 128


@dataclass(frozen=True)
class KserveOptions:
    """Settings of an InferenceService.

    Attributes:
        image: of the container, with tilerec[serve] and the torch version of the package.
        storage_uri: of the folder that has the package, such as s3://BUCKET/FOLDER or pvc://CLAIM/FOLDER.
        name: of the service; "": that of the file without its ending.
        workers: processes of the server, a CPU each.
        replicas: least number of pods.
    """

    image: str
    storage_uri: str
    name: str = ""
    workers: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        if not self.image or "://" not in self.storage_uri or self.workers < 1 or self.replicas < 0:
            raise ConfigError(
                f"KServe: got image {self.image!r}, storage URI {self.storage_uri!r}, {self.workers} workers and "
                f"{self.replicas} replicas; expected an image, a URI such as s3://bucket/folder, at least 1 worker and "
                "no negative number. Correct them."
            )


def kserve_manifest(package: str | Path, options: KserveOptions) -> str:
    """Return the YAML of an InferenceService (serving.kserve.io/v1beta1).

    Memory: the weights, which all workers share, and room for the processes. A worker that follows deltas needs memory
    of its own for the rows that change.

    Raises:
        FileError, ConfigError: the file cannot be read, is no package, or the name is none of Kubernetes.
    """
    source = PurePosixPath(package)
    name = options.name or re.sub(r"[^a-z0-9-]+", "-", source.stem.lower()).strip("-")
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", name):
        raise ConfigError(
            f"KServe: got the name {name!r}; expected lower-case letters, digits and '-', a letter first. Correct it."
        )
    opened = open_package(package)
    weights = max((own.start + opened.weights[own.name].nbytes for own in opened.manifest.weights), default=0)
    memory = -(-weights // _MIB) + _SERVER_MIB + _WORKER_MIB * options.workers
    command = [
        "python", "-m", "tilerec", "serve", f"{_MODELS}/{source.name}", "--host", "0.0.0.0", "--port", "8080",
        "--workers", str(options.workers),
    ]  # fmt: skip
    return f"""apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata:
  name: {name}
spec:
  predictor:
    minReplicas: {options.replicas}
    containers:
      - name: kserve-container
        image: {json.dumps(options.image)}
        command: {json.dumps(command)}
        env:
          - name: STORAGE_URI  # KServe puts its files into {_MODELS}
            value: {json.dumps(options.storage_uri)}
        ports:
          - containerPort: 8080
            protocol: TCP
        livenessProbe:
          httpGet: {{path: /healthz, port: 8080}}
        readinessProbe:
          httpGet: {{path: /readyz, port: 8080}}
        resources:
          requests: {{cpu: "{options.workers}", memory: {memory}Mi}}
          limits: {{cpu: "{options.workers}", memory: {memory}Mi}}
"""
