"""`load`: a package as a callable with the model's own arguments."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilerec.errors import ConfigError, InputError
from tilerec.export.archive import check_parts
from tilerec.export.arguments import check_tensor, flat_tensors, is_input, torch_dtype
from tilerec.export.arrays import Array
from tilerec.export.manifest import Manifest
from tilerec.export.package_file import check_lines, check_weights, open_package
from tilerec.export.versions import check_versions
from tilerec.torch_private import package_loader, pytree

_AGAIN = "Export the model again, or copy the file again."


class Package:
    """A loaded package: call it as the model, from any number of threads. One call runs at a time.

    Attributes:
        manifest: inputs, outputs, tables, weights and versions.
        weights: the tensors that calls read, by name. They are mapped from the file: a row written here is read by the
            next call of this process, and the file does not change.
    """

    def __init__(self, manifest: Manifest, weights: dict[str, Tensor], runner: Any) -> None:
        self.manifest, self.weights = manifest, weights
        self._runner = runner
        # torch's runner takes one call at a time. The next one would wait with Python's global lock, which ops need.
        self._running = threading.Lock()
        spec = runner.get_call_spec()
        self._out_spec = pytree.treespec_loads(spec[1])
        self._structure = pytree.treespec_loads(manifest.signature.structure)
        self._specs = manifest.signature.specs()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs for a batch.

        Args: those of the model's `forward`, by position or name. Keys of a `KeyedJaggedTensor` may be in any order.

        Raises:
            InputError: an input is missing or has another dtype or shape, features are missing or unknown, or an id is
                outside its table.
        """
        outputs = self.run(self._flat(self._bound(args, kwargs)))
        return pytree.tree_unflatten(outputs, self._out_spec)

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of the outputs for the tensors of the inputs, both in the order of the manifest.

        Raises as a call.
        """
        sizes: dict[str, int] = {}
        if len(tensors) != len(self._specs):
            raise InputError(
                f"Package: got {len(tensors)} tensors; expected {len(self._specs)}: "
                f"{[spec.name for spec in self._specs][:40]}. Pass them in this order."
            )
        for spec, tensor in zip(self._specs, tensors, strict=True):
            check_tensor(spec, tensor, sizes)
        try:
            with self._running, torch.no_grad():
                outputs: list[Tensor] = self._runner.boxed_run([tensor.contiguous() for tensor in tensors])
        except RuntimeError as error:
            raise _cause(error) from error
        return outputs

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        names = self.manifest.signature.arguments
        rest = names[len(args) :]
        if len(args) > len(names) or set(kwargs) != set(rest):
            got = [*(["…"] * len(args)), *kwargs]
            raise InputError(f"Package: got the arguments ({', '.join(got)}); expected {list(names)}. Pass each once.")
        return (*args, *(kwargs[name] for name in rest))

    def _flat(self, args: tuple[Any, ...]) -> list[Tensor]:
        values, structure = pytree.tree_flatten(args, is_leaf=is_input)
        if structure != self._structure:
            raise InputError(
                f"Package: got arguments of the structure {_line(structure):.400}; expected {_line(self._structure)}, "
                "as in the example of the export. Pass tensors and jagged batches in these containers."
            )
        return flat_tensors(self.manifest.signature, values)


def _line(value: object) -> str:
    """Return a text of several lines as one."""
    return " ".join(str(value).split())


def _cause(error: RuntimeError) -> InputError:
    """Return the error of an op, which torch passes on as text, or the text of another error."""
    text = str(error).partition("\n\nAt:")[0]  # then the lines of the op's Python code
    name, found, own = text.partition(": ")
    if found and name == InputError.__name__:
        return InputError(own)
    return InputError(f"Package: got '{_line(text):.600}'; expected a batch that the model can take.")


def load(path: str | Path, *, verify: bool = True, name: str = "") -> Package:
    """Load a package of `export`: a callable with the model's arguments, and the bits of its outputs.

    Weights are mapped into memory: processes that load one file share its pages.

    Args:
        verify: compare the digests of all weights with the manifest, and the other parts with their checksums, which
            reads the file once. False starts in well under a second for any size.
        name: of the file in errors; "": the path.

    Raises:
        FileError: the file cannot be read.
        ConfigError: it is no package, not all of one, its manifest does not describe it, or it was made for other ops,
            another torch or wider vectors than this machine has.
    """
    what = f"Package {name or path}"
    package = open_package(path, name=name)
    manifest = package.manifest
    check_versions(manifest, what, torch.backends.cpu.get_cpu_capability())
    if verify:
        check_weights(package, what)
        check_parts(path, what)
    try:
        runner = package_loader(str(path))
        stated = runner.get_metadata()
        wanted = set(runner.get_constant_fqns())
    except RuntimeError as error:
        raise ConfigError(
            f"{what}: got '{_line(error):.400}' from torch; expected a compiled model. {_AGAIN}"
        ) from error
    check_lines(package, stated, wanted, what)
    tensors = as_tensors(manifest, package.weights)
    constants = {name: tensors[name].detach() for name in wanted}
    runner.load_constants(constants, False, True, True)
    loaded = Package(manifest, tensors, runner)
    weakref.finalize(loaded, _release, list(constants.values())).atexit = False
    return loaded


def as_tensors(manifest: Manifest, weights: Mapping[str, Array]) -> dict[str, Tensor]:
    """Return the weights of a package as tensors in the memory of the arrays."""
    types = {own.name: torch_dtype(own.dtype) for own in manifest.weights}
    return {name: torch.from_numpy(array).view(types[name]) for name, array in weights.items()}


def _release(constants: Sequence[Tensor]) -> None:
    """Take the memory from constants of a runner that has ended: torch never frees the tensors themselves."""
    for constant in constants:
        constant.set_()  # type: ignore[call-overload]
