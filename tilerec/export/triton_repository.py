"""`write_triton`: a package in a model repository of Triton Inference Server.

    FOLDER/NAME/            config.pbtxt   inputs, outputs and instances
    FOLDER/NAME/VERSION/    model.py       the server's Python backend runs it (triton_model.py)
                            model.pt2      the package

The server's PyTorch backend cannot run the file: it expects the weights inside the compiled part, and a package has
them beside it, to map them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tilerec.atomic_file import write_file
from tilerec.errors import ConfigError, FileError
from tilerec.export.archive import check_parts
from tilerec.export.manifest import Manifest
from tilerec.export.package_file import check_weights, open_package
from tilerec.export.signature import TensorSpec
from tilerec.export.triton_model import PACKAGE, THREADS

_TYPES = {
    "bool": "BOOL", "uint8": "UINT8", "int8": "INT8", "int16": "INT16", "int32": "INT32", "int64": "INT64",
    "float16": "FP16", "float32": "FP32", "float64": "FP64",
}  # fmt: skip
_MODEL = '''"""Run by the Python backend of Triton Inference Server, in an environment with tilerec."""

from tilerec.export.triton_model import TritonPythonModel as TritonPythonModel
'''


def write_triton(
    package: str | Path, folder: str | Path, name: str = "", *, instances: int = 1, threads: int = 1
) -> Path:
    """Write a package into a model repository, as a new version of a model; return the version's folder.

    The version appears as a whole. The package is linked if the file system can, else copied. A config that is there
    already stays, so that you may edit its instances.

    Args:
        package: of `export`.
        folder: the repository; is made if it does not exist.
        name: of the model; "": that of the file without its ending.
        instances: processes of the server; they share the weights' memory.
        threads: of each instance.

    Raises:
        FileError: the package cannot be read, or the folder not be written.
        ConfigError: it is no package, it has types that the server's Python backend lacks, or the repository has a
            model of this name with other inputs or outputs.
    """
    source = Path(package)
    what = f"Package {source}"
    opened = open_package(source)
    check_weights(opened, what)
    check_parts(source, what)
    model = Path(folder) / _checked(name or source.stem)
    text = triton_config(opened.manifest, model.name, instances=instances, threads=threads)
    config = model / "config.pbtxt"
    try:
        model.mkdir(parents=True, exist_ok=True)
        if not config.exists():
            write_file(config, text, "Triton config")
        elif _tensors(opened.manifest) not in config.read_text():
            raise ConfigError(
                f"{config}: got the config of a model with other inputs or outputs; expected that of this package. "
                "Choose another name, or remove the folder."
            )
        number = 1 + max((int(own.name) for own in model.iterdir() if own.name.isdigit()), default=0)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=model) as made:
            version = Path(made) / str(number)
            version.mkdir()
            write_file(version / "model.py", _MODEL, "Triton model")
            try:
                os.link(source, version / PACKAGE)
            except OSError:  # another file system
                shutil.copyfile(source, version / PACKAGE)
            version.rename(model / version.name)
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(
            f"Model repository {folder}: got '{error.strerror or error}'; expected a writable folder on a disk "
            "with enough space. Free space or check the path.",
            error.errno,
        ) from error
    return model / str(number)


def triton_config(manifest: Manifest, name: str, *, instances: int = 1, threads: int = 1) -> str:
    """Return the text of a `config.pbtxt`.

    `max_batch_size` is 0, so the server joins no requests: it would concatenate dimension 0 of each input, which is the
    number of ids, or of keys, for jagged inputs.

    Raises:
        ConfigError: see `write_triton`.
    """
    if instances < 1 or threads < 1:
        raise ConfigError(
            f"Model repository: got {instances} instances of {threads} threads; expected at least 1 of each. Correct "
            "them."
        )
    return f"""name: {_quoted(name)}
backend: "python"
max_batch_size: 0
{_tensors(manifest)}
instance_group [
  {{ count: {instances}, kind: KIND_CPU }}
]
parameters {{ key: "{THREADS}", value: {{ string_value: "{threads}" }} }}
"""


def _tensors(manifest: Manifest) -> str:
    specs = {"input": manifest.signature.specs(), "output": manifest.outputs}
    return "\n".join(f"{kind} [\n" + ",\n".join(map(_tensor, own)) + "\n]" for kind, own in specs.items())


def _tensor(spec: TensorSpec) -> str:
    if spec.dtype not in _TYPES:
        raise ConfigError(
            f"'{spec.name}': got {spec.dtype}; expected one of {', '.join(_TYPES)}, the types of the server's Python "
            "backend. Convert it in the model."
        )
    dims: Sequence[int] = [size if isinstance(size, int) else -1 for size in spec.shape] or [1]
    return f"  {{ name: {_quoted(spec.name)}, data_type: TYPE_{_TYPES[spec.dtype]}, dims: {list(dims)} }}"


def _quoted(text: str) -> str:
    """Return a string of the protobuf text format. Its escapes include those of JSON but \\uXXXX above ASCII."""
    return json.dumps(text, ensure_ascii=False)


def _checked(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(
            f"Model repository: got the name {name!r}; expected letters, digits, '.', '_' and '-'. Correct it."
        )
    return name
