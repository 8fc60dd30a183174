"""Structure of the Kubernetes objects in examples/cluster, written by hand from their CRDs: fields and their types.

A dict lists all fields that the examples may use; `[schema]` is a list; a type is that of a leaf. A field with `!` is
required.
"""

from __future__ import annotations

from typing import Any

METADATA = {"name!": str, "labels": dict}
POD = {
    "terminationGracePeriodSeconds": int,
    "restartPolicy": ("Always", "OnFailure", "Never"),
    "containers!": [
        {
            "name!": str,
            "image": str,
            "command": [str],
            "args": [str],
            "env": [{"name!": str, "value": str}],
            "volumeMounts": [{"name!": str, "mountPath!": str}],
        }
    ],
    "volumes": [{"name!": str, "persistentVolumeClaim": {"claimName!": str}}],
}
KINDS: dict[tuple[str, str], Any] = {
    ("kubeflow.org/v1", "PyTorchJob"): {
        "apiVersion!": str,
        "kind!": str,
        "metadata!": METADATA,
        "spec!": {
            "nprocPerNode": str,
            "elasticPolicy": {"rdzvBackend": str, "minReplicas": int, "maxReplicas": int, "maxRestarts": int},
            "pytorchReplicaSpecs!": {
                "Worker": {
                    "replicas": int,
                    "restartPolicy": ("Always", "OnFailure", "Never", "ExitCode"),
                    "template!": {"spec!": POD},
                }
            },
        },
    },
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): {
        "apiVersion!": str,
        "kind!": str,
        "metadata!": METADATA,
        "spec!": {
            "mlPolicy": {"numNodes": int, "torch": {"numProcPerNode": int}},
            "template!": {
                "spec!": {
                    "replicatedJobs!": [
                        {
                            "name!": str,
                            "template!": {
                                "metadata": {"labels": dict},
                                "spec!": {"backoffLimit": int, "template!": {"spec!": POD}},
                            },
                        }
                    ]
                }
            },
        },
    },
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): {
        "apiVersion!": str,
        "kind!": str,
        "metadata!": METADATA,
        "spec!": {
            "runtimeRef!": {"apiGroup": str, "kind": ("TrainingRuntime", "ClusterTrainingRuntime"), "name!": str},
            "trainer": {"image": str, "command": [str], "args": [str], "numNodes": int, "numProcPerNode": int},
        },
    },
}


def check_manifest(found: Any, schema: Any, place: str) -> None:
    """Raise `AssertionError` with the place of an unknown, missing or wrong field."""
    if isinstance(schema, list):
        assert isinstance(found, list), place
        assert found, place
        for index, one in enumerate(found):
            check_manifest(one, schema[0], f"{place}[{index}]")
    elif isinstance(schema, dict):
        assert isinstance(found, dict), place
        fields = {name.rstrip("!"): part for name, part in schema.items()}
        assert set(found) <= set(fields), f"{place}: {sorted(set(found) - set(fields))} unknown"
        required = {name[:-1] for name in schema if name.endswith("!")}
        assert required <= set(found), f"{place}: {sorted(required - set(found))} missing"
        for name, value in found.items():
            check_manifest(value, fields[name], f"{place}.{name}")
    elif isinstance(schema, tuple):
        assert found in schema, f"{place}: {found!r}"
    else:
        assert type(found) is schema, f"{place}: {found!r}"
