"""`Manifest`: the description inside a package: inputs, outputs, tables, weights and versions.

It is JSON without times, paths or names of machines: the same model gives the same bytes under every plan and on any
number of ranks. The compiled part of the package holds the lines that a C++ program reads (`lines`), and the
manifest's digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tilerec.export.arrays import ARRAY_DTYPES
from tilerec.export.signature import InputSpec, Signature, TensorSpec
from tilerec.json_document import JsonValue

VERSION = 1
OPS_ABI = 1
"""TR_OPS_ABI of native/torch/ops.h: changes when an op that packages call gets another schema or another meaning."""


_AGAIN = "Export the model again."


@dataclass(frozen=True)
class TableEntry:
    """A table of the model.

    Attributes:
        name: path of the table's module.
        weight: name of its rows among the weights; tied tables have one.
    """

    name: str
    features: tuple[str, ...]
    rows: int
    dim: int
    data_type: str
    pooling: str
    weight: str


@dataclass(frozen=True)
class Weight:
    """A tensor of the package: parameters, buffers and constants, contiguous.

    Attributes:
        start: first byte, from the start of the weights.
        sha256: of its bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Description of a package.

    Attributes:
        abi: `OPS_ABI` of the ops that it calls.
        torch: major and minor version that compiled it.
        cpu: vector level that it needs: `torch.backends.cpu.get_cpu_capability()`.
        base: digest of all weights, `base_hash`.
        output_keys: keys of each output that is a `KeyedTensor`, by name.
    """

    abi: int
    torch: str
    cpu: str
    base: str
    signature: Signature
    outputs: tuple[TensorSpec, ...]
    output_keys: dict[str, list[str]]
    tables: tuple[TableEntry, ...]
    weights: tuple[Weight, ...]

    def to_json(self) -> str:
        """Return the manifest as text; equal manifests give equal text."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n"

    def lines(self) -> dict[str, str]:
        """Return the texts of the compiled part: one tensor a line, its parts separated by spaces."""
        return {
            "tilerec.abi": str(self.abi),
            "tilerec.torch": self.torch,
            "tilerec.cpu": self.cpu,
            "tilerec.manifest": hashlib.sha256(self.to_json().encode()).hexdigest(),
            "tilerec.inputs": "\n".join(spec.line() for spec in self.signature.specs()),
            "tilerec.outputs": "\n".join(spec.line() for spec in self.outputs),
            "tilerec.weights": "\n".join(
                " ".join([own.name, own.dtype, str(own.start), *map(str, own.shape)]) for own in self.weights
            ),
        }

    @staticmethod
    def of(data: JsonValue) -> Manifest:
        """Return the manifest of a JSON document.

        Raises:
            ConfigError: it is not as `to_json` writes it.
        """
        names = ("version", "abi", "torch", "cpu", "base", "signature", "outputs", "output_keys", "tables", "weights")
        found = _fields(data, *names)
        if found["version"].value != VERSION:
            raise found["version"].error(f"{VERSION}, the version that this release reads", _AGAIN)
        signature = _fields(found["signature"], "arguments", "inputs", "structure")
        return Manifest(
            found["abi"].whole(),
            found["torch"].text(),
            found["cpu"].text(),
            found["base"].text(),
            Signature(
                signature["arguments"].texts(),
                tuple(read_input(own) for own in signature["inputs"].items()),
                signature["structure"].text(),
            ),
            tuple(_tensor(own) for own in found["outputs"].items()),
            {name: list(keys.texts()) for name, keys in found["output_keys"].members().items()},
            tuple(read_table(own) for own in found["tables"].items()),
            tuple(_weight(own) for own in found["weights"].items()),
        )


def base_hash(weights: Sequence[Weight]) -> str:
    """Return the digest of all weights: SHA-256 of one line per weight, with its name, dtype, shape and digest."""
    lines = sorted(f"{own.name} {own.dtype} {list(own.shape)} {own.sha256}\n" for own in weights)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _fields(value: JsonValue, *names: str) -> dict[str, JsonValue]:
    return value.record(names, names, _AGAIN)


def _dtype(value: JsonValue) -> str:
    if value.value not in list(ARRAY_DTYPES):
        raise value.error(f"one of {list(ARRAY_DTYPES)}", _AGAIN)
    return value.text()


def _tensor(value: JsonValue) -> TensorSpec:
    found = _fields(value, "name", "dtype", "shape")
    shape = tuple(size.text() if isinstance(size.value, str) else size.whole() for size in found["shape"].items())
    return TensorSpec(found["name"].text(), _dtype(found["dtype"]), shape)


def read_input(value: JsonValue) -> InputSpec:
    """Return an input of a manifest. Raises `ConfigError`."""
    found = _fields(value, "name", "kind", "tensors", "keys")
    tensors = tuple(_tensor(own) for own in found["tensors"].items())
    return InputSpec(found["name"].text(), found["kind"].text(), tensors, found["keys"].texts())


def read_table(value: JsonValue) -> TableEntry:
    """Return a table of a manifest. Raises `ConfigError`."""
    found = _fields(value, "name", "features", "rows", "dim", "data_type", "pooling", "weight")
    return TableEntry(
        found["name"].text(), found["features"].texts(), found["rows"].whole(), found["dim"].whole(),
        found["data_type"].text(), found["pooling"].text(), found["weight"].text(),
    )  # fmt: skip


def _weight(value: JsonValue) -> Weight:
    found = _fields(value, "name", "dtype", "shape", "start", "sha256")
    shape = tuple(size.whole() for size in found["shape"].items())
    return Weight(
        found["name"].text(), _dtype(found["dtype"]), shape, found["start"].whole(), found["sha256"].text()
    )  # fmt: skip
