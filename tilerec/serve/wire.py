"""Requests and answers as bytes: JSON by samples, JSON by columns, and safetensors.

by samples      {"instances": [{"dense": [0.1, 2], "sparse": {"user": [17], "item": [3, 4]}}, …]}
                -> {"predictions": [{"output": 0.7}, …], "version": "…"}
by columns      {"inputs": {"dense": [[0.1, 2], …], "sparse": {"values": […], "lengths": [[…], …]}}}
                -> {"outputs": {"output": [0.7, …]}, "version": "…"}
safetensors     the tensors of the manifest by name: "dense", "sparse.values", "sparse.lengths"
                -> the outputs by name; the version is in the header X-Model-Version

Names are those of the model's arguments. `lengths` has a row per key, `values` the ids key by key. A sample may leave
out features, which are then empty. A jagged input with weights has {"ids": [3, 4], "weights": [0.5, 1]} in a sample.

Legend: B samples, K keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tilerec.errors import InputError
from tilerec.export.arrays import ARRAY_DTYPES, Array, array_of, floats_of, is_float
from tilerec.export.manifest import Manifest
from tilerec.export.signature import BATCH, InputSpec, TensorSpec

MOST_SAMPLES = 1 << 16
"""Of a request. A body of 64 MiB may have ten million samples without ids, and their outputs need far more memory."""
SAFETENSORS = "application/octet-stream"
_SAFETENSORS_TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "bool": "BOOL", "complex64": "C64",
}  # fmt: skip
"""Types of safetensors files, by ours."""
ALIVE = "alive"
"""Body of the answer to GET /healthz."""


class AnswerError(Exception):
    """Outputs that an answer cannot hold."""


class Query(NamedTuple):
    """A request: the tensors of the manifest's inputs, its samples, and the form of its answer."""

    tensors: list[Array]
    samples: int
    form: str


def parse(body: bytes, content_type: str, manifest: Manifest) -> Query:
    """Return the query of a request's body.

    Raises:
        InputError: it does not fit the model.
    """
    if content_type.partition(";")[0].strip() == SAFETENSORS:
        return _of_tensors(body, manifest)
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        data = json.loads(text, parse_constant=_no_number)
        if "true" in text or "false" in text:
            _check_no_booleans(data, manifest)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"Request: got a body that is no JSON ({error}); expected a JSON object. Correct it."
        ) from error
    if not isinstance(data, dict) or len(data) != 1 or not {"instances", "inputs"} & set(data):
        got = sorted(data)[:4] if isinstance(data, dict) else type(data).__name__
        raise InputError(f"Request: got {got}; expected an object with 'instances' or 'inputs'. See docs/serving.md.")
    if "instances" in data:
        return _of_instances(data["instances"], manifest)
    return _of_columns(data["inputs"], manifest)


def answer(query: Query, outputs: Sequence[Array], manifest: Manifest, version: str) -> tuple[bytes, str]:
    """Return the body and the content type of an answer.

    Raises:
        AnswerError: an output is NaN, and the answer is JSON.
    """
    named = {spec.name: tensor for spec, tensor in zip(manifest.outputs, outputs, strict=True)}
    if query.form == "safetensors":
        return _safetensors(named, {spec.name: spec.dtype for spec in manifest.outputs}), SAFETENSORS
    lists = {spec.name: _listed(spec, named[spec.name]) for spec in manifest.outputs}
    if query.form == "columns":
        return json.dumps({"outputs": lists, "version": version}).encode(), "application/json"
    samples = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    return json.dumps({"predictions": samples, "version": version}).encode(), "application/json"


def _listed(spec: TensorSpec, array: Array) -> Any:
    """Return the numbers as lists, exact; null for infinities, which JSON lacks."""
    if not is_float(spec.dtype):
        return array.tolist()
    numbers = floats_of(array, spec.dtype)
    listed = numbers.tolist()
    if bool(np.isfinite(numbers).all()):
        return listed
    if bool(np.isnan(numbers).any()):
        raise AnswerError(
            f"Output '{spec.name}': got nan at {np.argwhere(np.isnan(numbers))[0].tolist()}; expected numbers: the "
            "model's weights are damaged, or it has no output for this input. Look at the newest version and its "
            "training."
        )
    return _finite(listed)


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return value if math.isfinite(value) else None


# -------------------------------------------------------------------------------------------------------- safetensors


def _safetensors(arrays: Mapping[str, Array], types: Mapping[str, str]) -> bytes:
    """Return a safetensors file: the size of its header, the header, the arrays.

    The functions of the package safetensors differ between its versions.
    """
    header, end = {}, 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        header[name] = {
            "dtype": _SAFETENSORS_TYPES[types[name]], "shape": array.shape, "data_offsets": [start, end],
        }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *(array.tobytes() for array in arrays.values())])


def _of_tensors(body: bytes, manifest: Manifest) -> Query:
    from safetensors import SafetensorError, deserialize

    try:
        found = dict(deserialize(body))
    except (SafetensorError, ValueError, KeyError) as error:
        raise InputError(
            f"Request: got a body that is no safetensors file ({error}); expected one. Send it again."
        ) from error
    specs = manifest.signature.specs()
    _check_names("the tensors", set(found), {spec.name for spec in specs}, complete=True)
    arrays = [_array_of_part(found[spec.name], spec) for spec in specs]
    return Query(arrays, _samples(arrays, specs), "safetensors")


def _array_of_part(part: Mapping[str, Any], spec: TensorSpec) -> Array:
    if part["dtype"] != _SAFETENSORS_TYPES.get(spec.dtype):
        raise InputError(
            f"Input '{spec.name}': got {part['dtype']}; expected {spec.dtype}, as in the example of the export. "
            "Convert it."
        )
    return np.frombuffer(part["data"], ARRAY_DTYPES[spec.dtype]).reshape(part["shape"])


# ------------------------------------------------------------------------------------------------------------ columns


def _of_columns(data: Any, manifest: Manifest) -> Query:
    inputs = manifest.signature.inputs
    _check_names("the inputs", _keys(data, "inputs"), {own.name for own in inputs}, complete=True)
    tensors: list[Array] = []
    for own in inputs:
        value = data[own.name]
        if own.kind == "Tensor":
            tensors.append(_tensor(value, own.tensors[0]))
            continue
        parts = {spec.name.rpartition(".")[2]: spec for spec in own.tensors}
        _check_names(f"input '{own.name}'", _keys(value, own.name), set(parts), complete=True)
        tensors += [_tensor(value[part], spec) for part, spec in parts.items()]
    return Query(tensors, _samples(tensors, manifest.signature.specs()), "columns")


def _tensor(value: Any, spec: TensorSpec) -> Array:
    floats = is_float(spec.dtype) or spec.dtype.startswith("complex")
    try:
        found = np.array(value) if value or not isinstance(value, list) else np.empty(0, np.int64)
        if found.dtype.kind not in "biuf":
            raise ValueError("other values than numbers of 64 bits, or rows of different lengths")
        if found.size and found.dtype.kind == "f" and not floats:
            raise ValueError("numbers with a point")
        made = array_of(found, spec.dtype)
        if not floats and spec.dtype != "bool" and not np.array_equal(made, found):
            raise ValueError(f"numbers outside of its range, as {found[made != found].flat[0]}")
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"Input '{spec.name}': got values that are no {spec.dtype} tensor ({error}); expected [{_shape(spec)}]. "
            "Correct them."
        ) from None
    if is_float(spec.dtype):
        finite = np.isfinite(floats_of(made, spec.dtype))
        if not bool(finite.all()):
            raise InputError(
                f"Input '{spec.name}': got a number outside of the range of {spec.dtype} at "
                f"{np.argwhere(~finite)[0].tolist()}; expected finite numbers. Correct it."
            )
    if not made.size and made.ndim < len(spec.shape):  # [] for no samples
        made = made.reshape([0 if isinstance(size, str) else size for size in spec.shape])
    return made


def _no_number(word: str) -> Any:
    raise InputError(f"Request: got {word} in its JSON; expected finite numbers: JSON has no others. Correct it.")


def _shape(spec: TensorSpec) -> str:
    return ", ".join(map(str, spec.shape))


# ---------------------------------------------------------------------------------------------------------- instances


def _of_instances(data: Any, manifest: Manifest) -> Query:
    if not isinstance(data, list):
        raise InputError(f"Request: got {type(data).__name__} as 'instances'; expected a list of samples. Correct it.")
    if len(data) > MOST_SAMPLES:
        raise _too_many(len(data))
    inputs = manifest.signature.inputs
    names = {own.name for own in inputs}
    for sample in data:
        _check_names("a sample", _keys(sample, "a sample"), names, complete=False)
    tensors: list[Array] = []
    for own in inputs:
        values = [sample.get(own.name) for sample in data]
        if own.kind == "Tensor":
            if any(value is None for value in values):
                raise InputError(f"Input '{own.name}': got a sample without it; expected numbers. Add them.")
            tensors.append(_tensor(values, own.tensors[0]))
        else:
            tensors += _jagged(own, values)
    return Query(tensors, len(data), "instances")


def _jagged(own: InputSpec, values: list[Any]) -> list[Array]:
    """Return the tensors of a jagged input: of each key the ids of all samples."""
    specs = {spec.name.rpartition(".")[2]: spec for spec in own.tensors}
    weighted = "weights" in specs
    if own.keys:
        values = [{} if value is None else value for value in values]
        for value in values:
            _check_names(f"input '{own.name}'", _keys(value, own.name), set(own.keys), complete=False)
    ids: list[Any] = []
    weights: list[Any] = []
    lengths: list[list[int]] = []
    own_weights: list[Any] = []
    for key in own.keys or ("",):
        row: list[int] = []
        for value in values:
            bag: Any = value.get(key) if own.keys else value
            if bag is None:  # left out. 0 and false are wrong, and no empty bags
                bag = []
            if weighted:
                bag = {"ids": [], "weights": []} if bag == [] else bag
                _check_names(f"input '{own.name}'", _keys(bag, own.name), {"ids", "weights"}, complete=True)
                own_weights, bag = bag["weights"], bag["ids"]
                if not isinstance(own_weights, list):
                    raise InputError(
                        f"Input '{own.name}': got {type(own_weights).__name__} as the weights of '{key}'; expected a "
                        "list. Correct it."
                    )
                weights.extend(own_weights)
            elif isinstance(bag, Mapping) and "weights" in bag:
                raise InputError(
                    f"Input '{own.name}': got weights for the ids of '{key}'; expected none: the model reads none. "
                    "Send the ids as a list."
                )
            if not isinstance(bag, list):
                raise InputError(
                    f"Input '{own.name}': got {type(bag).__name__} as the ids of '{key}'; expected a list. Correct it."
                )
            if weighted and len(own_weights) != len(bag):  # of each bag: equal sums would shift weights to other ids
                raise InputError(
                    f"Input '{own.name}': got {len(own_weights)} weights for the {len(bag)} ids of '{key}' in a "
                    "sample; expected as many. Correct the sample."
                )
            ids.extend(bag)
            row.append(len(bag))
        lengths.append(row)
    found = {"values": ids, "weights": weights, "lengths": lengths if own.keys else lengths[0]}
    try:
        made = {part: _tensor(found[part], spec) for part, spec in specs.items()}
    except InputError:
        _check_each_key(own, ids, lengths)  # raises with the key, if ids are wrong
        raise
    if own.keys:
        made["lengths"] = made["lengths"].reshape(len(own.keys), len(values))
    return list(made.values())


def _check_each_key(own: InputSpec, ids: list[Any], lengths: list[list[int]]) -> None:
    spec = next(spec for spec in own.tensors if spec.name.endswith(".values"))
    at = 0
    for key, row in zip(own.keys, lengths):  # noqa: B905 - a jagged input without keys has one row
        _tensor(ids[at : at + sum(row)], replace(spec, name=f"{own.name}.{key}"))
        at += sum(row)


# ------------------------------------------------------------------------------------------------------------- checks


def _check_no_booleans(data: Any, manifest: Manifest) -> None:
    """Raise for true or false among numbers: numpy would take [true, 3] as the ids 1 and 3."""
    found = data.get("instances", [data.get("inputs")]) if isinstance(data, dict) else ()
    samples = [sample for sample in found if isinstance(sample, dict)] if isinstance(found, list) else []
    for own in manifest.signature.inputs:
        if any(spec.dtype == "bool" for spec in own.tensors):
            continue
        place = next(filter(None, (_boolean({own.name: sample.get(own.name)}) for sample in samples)), "")
        if place:
            raise InputError(f"Input '{place[1:]}': got true or false; expected numbers. Correct it.")


def _boolean(value: Any, place: str = "") -> str:
    """Return the place of the first true or false in a JSON value, such as ".sparse.user.0"; "" if there is none."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        if isinstance(part, bool):
            return f"{place}.{key}"
        found = _boolean(part, f"{place}.{key}") if isinstance(part, (list, dict)) else ""
        if found:
            return found
    return ""


def _keys(value: Any, what: str) -> set[str]:
    if not isinstance(value, Mapping):
        raise InputError(f"Request: got {type(value).__name__} as {what}; expected an object. See docs/serving.md.")
    return set(value)


def _check_names(what: str, got: set[str], known: set[str], *, complete: bool) -> None:
    unknown, missing = sorted(got - known), sorted(known - got) if complete else []
    if unknown or missing:
        found = f"the unknown {unknown[:4]}" if unknown else f"no {missing[:4]}"
        raise InputError(f"Request: got {found} in {what}; expected {sorted(known)[:40]}. Correct the names.")


def _too_many(samples: int) -> InputError:
    return InputError(
        f"Request: got {samples:,} samples; expected at most {MOST_SAMPLES:,}. Send them in several requests."
    )


def _samples(tensors: Sequence[Array], specs: Sequence[TensorSpec]) -> int:
    """Return the number of samples; shapes are checked when the package runs."""
    for tensor, spec in zip(tensors, specs, strict=True):
        if BATCH in spec.shape and tensor.ndim > spec.shape.index(BATCH):
            samples = tensor.shape[spec.shape.index(BATCH)]
            if samples > MOST_SAMPLES:
                raise _too_many(samples)
            return samples
    raise InputError("Request: got no samples; expected inputs with samples. See docs/serving.md.")
