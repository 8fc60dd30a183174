"""`ArrayPackage`: a package that runs on numpy arrays, in a process that need not import torch.

`load` (loading.py) makes a package that runs on tensors. Both run the compiled part with torch's loader; here it is
called by libtilerec_ops.so.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np

from tilerec.errors import ConfigError, InputError
from tilerec.export.archive import check_parts
from tilerec.export.arrays import ARRAY_DTYPES, Array, check_array
from tilerec.export.manifest import Manifest
from tilerec.export.package_file import check_lines, check_weights, open_package
from tilerec.export.torch_library import cpu_level, last_error, ops_library
from tilerec.export.versions import check_versions

_CODES = {
    "uint8": 0, "int8": 1, "int16": 2, "int32": 3, "int64": 4, "float16": 5, "float32": 6, "float64": 7,
    "complex64": 9, "complex128": 10, "bool": 11, "bfloat16": 15, "float8_e5m2": 23, "float8_e4m3fn": 24,
}  # fmt: skip
"""torch's numbers of dtypes."""


@final
class ArrayPackage:
    """A loaded package. Any number of threads may run it; one call runs at a time.

    Attributes:
        manifest: inputs, outputs, tables, weights and versions.
        weights: the arrays that calls read, by name. They are mapped from the file: a row written here is read by the
            next call of this process, and the file does not change.
    """

    def __init__(self, manifest: Manifest, weights: dict[str, Array], loaded: int) -> None:
        self.manifest, self.weights = manifest, weights
        self._loaded = loaded
        self._running = threading.Lock()
        self._specs = manifest.signature.specs()
        weakref.finalize(self, ops_library().tilerec_ops_free, loaded).atexit = False

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Return the arrays of the outputs for those of the inputs, both in the order of the manifest.

        Raises:
            InputError: an input is missing or has another dtype or shape, or an id is outside its table.
        """
        sizes: dict[str, int] = {}
        if len(arrays) != len(self._specs):
            raise InputError(
                f"Package: got {len(arrays)} arrays; expected {len(self._specs)}: "
                f"{[spec.name for spec in self._specs][:40]}. Pass them in this order."
            )
        for spec, array in zip(self._specs, arrays, strict=True):
            check_array(spec, array, sizes)
        inputs = [array if array.flags.c_contiguous else array.copy(order="C") for array in arrays]
        words = _words(zip(inputs, (spec.dtype for spec in self._specs), strict=True))
        with self._running:
            found = ops_library().tilerec_ops_run(self._loaded, words.ctypes.data, len(inputs))
            if not found:
                text = last_error().removeprefix("InputError: ")
                raise InputError(text)
            return list(self._outputs(found))

    def _outputs(self, words: Any) -> Iterator[Array]:
        """Yield copies of the outputs: the next call writes their memory."""
        at = 1
        for spec, _ in zip(self.manifest.outputs, range(words[0]), strict=True):
            address, code, dims = words[at : at + 3]
            shape = words[at + 3 : at + 3 + dims]
            at += 3 + dims
            if code != _CODES[spec.dtype]:
                raise InputError(
                    f"Package: got an output '{spec.name}' of torch's dtype {code}; expected {spec.dtype}, as its "
                    "manifest states. Export the model again."
                )
            array = np.empty(shape, ARRAY_DTYPES[spec.dtype])
            ctypes.memmove(array.ctypes.data, address, array.nbytes)
            yield array


def load_arrays(path: str | Path, *, verify: bool = True, name: str = "") -> ArrayPackage:
    """Load a package that runs on numpy arrays.

    Args:
        verify, name: as of `load`.

    Raises:
        FileError, ConfigError: as `load`; or this installation has no `libtilerec_ops.so`.
    """
    what = f"Package {name or path}"
    package = open_package(path, name=name)
    manifest = package.manifest
    library = ops_library()
    check_versions(manifest, what, cpu_level())
    if verify:
        check_weights(package, what)
        check_parts(path, what)
    loaded = library.tilerec_ops_load(str(path).encode())
    if not loaded:
        raise ConfigError(
            f"{what}: got '{last_error():.400}' from torch; expected a compiled model. Export the model again, or copy "
            "the file again."
        )
    made = ArrayPackage(manifest, package.weights, loaded)
    texts = {name: library.tilerec_ops_metadata(loaded, name.encode()) for name in manifest.lines()}
    names = list(_weight_names(loaded))
    check_lines(
        package, {name: text.decode() for name, text in texts.items() if text is not None}, set(names), what
    )  # fmt: skip
    types = {own.name: own.dtype for own in manifest.weights}
    words = _words((package.weights[name], types[name]) for name in names)
    texts_of_names = (ctypes.c_char_p * len(names))(*(name.encode() for name in names))
    if not library.tilerec_ops_bind(loaded, texts_of_names, words.ctypes.data, len(names)):
        raise ConfigError(
            f"{what}: got '{last_error():.400}' from torch; expected its weights to fit. Export it again."
        )
    return made


def _weight_names(loaded: int) -> Iterator[str]:
    number = 0
    while (name := ops_library().tilerec_ops_weight(loaded, number)) is not None:
        yield name.decode()
        number += 1


def _words(arrays: Iterable[tuple[Array, str]]) -> Array:
    """Return arrays, each with its dtype, in the form that the library takes."""
    words: list[int] = []
    for array, dtype in arrays:
        words += [array.ctypes.data, _CODES[dtype], array.ndim, *array.shape]
    return np.array(words, np.int64)
