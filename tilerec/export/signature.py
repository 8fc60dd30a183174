"""Arguments of an exported model: their tensors, names and sizes.

    forward(dense_features, sparse_features)           arguments, by position
      dense_features            float32 [batch, 13]     an input of one tensor
      sparse_features           keys user, item         an input of several tensors
        sparse_features.values  int64 [sparse_features.ids]
        sparse_features.lengths int32 [2, batch]

A size is a number or a name. Equal names are equal sizes; `batch` is the number of samples. Lengths have a row per key:
of a flat list the number of samples would be a quotient, and `torch.export` would assume that it is not 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from tilerec.errors import ConfigError, InputError
from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.torch_private import pytree

BATCH = "batch"
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip
"""Types of the tensors of packages, by name: those that can be mapped from a file."""

Size = int | str


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype (`float32`) and sizes of one tensor."""

    name: str
    dtype: str
    shape: tuple[Size, ...]

    def line(self) -> str:
        """Return the spec as text without spaces inside of a part: `dense_features float32 batch 13`."""
        return " ".join([self.name, self.dtype, *map(str, self.shape)])

    def check(self, tensor: Any, sizes: dict[str, int]) -> None:
        """Raise an `InputError` for a tensor of another dtype or shape.

        Args:
            sizes: values of the named sizes found so far; is extended.
        """
        if not isinstance(tensor, Tensor) or dtype_name(tensor) != self.dtype:
            got, move = f"a {type(tensor).__name__}", f"torch.as_tensor(..., dtype=torch.{self.dtype})"
            if isinstance(tensor, Tensor):
                got, move = dtype_name(tensor), f".to(torch.{self.dtype})"
            raise InputError(
                f"Input '{self.name}': got {got}; expected {self.dtype}, as in the example of the export. Convert it "
                f"with {move}."
            )
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            got, move = f"a tensor on {tensor.device}", ".cpu()"
            if tensor.device.type == "cpu":
                got, move = f"a tensor of the layout {tensor.layout}", ".to_dense()"
            raise InputError(f"Input '{self.name}': got {got}; expected a dense tensor on the CPU. Call {move} on it.")
        shape = tuple(tensor.shape)
        if len(shape) != len(self.shape) or not all(_fits(own, want, sizes) for own, want in zip(shape, self.shape)):  # noqa: B905
            known = {name: size for name, size in sizes.items() if any(name in str(want) for want in self.shape)}
            raise InputError(
                f"Input '{self.name}': got shape {list(shape)}; expected [{', '.join(map(str, self.shape))}]"
                f"{f' with {known}' if known else ''}. Check that all inputs have the same samples."
            )


@dataclass(frozen=True)
class InputSpec:
    """An input: a tensor, or a jagged batch of several.

    Attributes:
        kind: "Tensor", "JaggedTensor" or "KeyedJaggedTensor".
        keys: of a `KeyedJaggedTensor`, in the order of the tensors.
    """

    name: str
    kind: str
    tensors: tuple[TensorSpec, ...]
    keys: tuple[str, ...] = ()

    def tensors_of(self, value: Any) -> list[Any]:
        """Return the tensors of a caller's value, in the order of the specs.

        Raises:
            InputError: the value is of another kind, or lacks a feature or its weights.
        """
        if self.kind == "Tensor":
            return [value]
        kind = KeyedJaggedTensor if self.keys else JaggedTensor
        if not isinstance(value, kind):
            raise InputError(
                f"Input '{self.name}': got a {type(value).__name__}; expected a {self.kind}, as in the example of the "
                "export."
            )
        if isinstance(value, KeyedJaggedTensor):
            value = self._in_order(value)
        out = []
        for spec in self.tensors:
            part = spec.name.rpartition(".")[2]
            if part == "values":
                out.append(value.values())
            elif part == "lengths":  # counts of any integer type are the same batch
                lengths = _converted(value.lengths(), spec)
                keyed = isinstance(value, KeyedJaggedTensor)
                out.append(lengths.view(len(self.keys), value.stride()) if keyed else lengths)
            else:
                out.append(self._weights(value))
        return out

    def value_of(self, tensors: Sequence[Tensor]) -> Any:
        """Return the input that the tensors are parts of; the opposite of `tensors_of`."""
        if self.kind == "Tensor":
            return tensors[0]
        values, lengths = tensors[0], tensors[-1]
        weights = tensors[1] if len(tensors) == 3 else None
        if self.keys:
            return KeyedJaggedTensor(list(self.keys), values, weights, lengths=lengths.reshape(-1))
        return JaggedTensor(values, weights, lengths=lengths)

    def _in_order(self, value: KeyedJaggedTensor) -> KeyedJaggedTensor:
        given = value.keys()
        if value.variable_stride_per_key():
            raise InputError(
                f"Input '{self.name}': got a batch whose keys have different numbers of samples; expected one number. "
                "Expand it before the call."
            )
        if tuple(given) == self.keys:
            return value
        missing = [key for key in self.keys if key not in given]
        if missing:
            raise InputError(
                f"Input '{self.name}': got no feature {missing[:4]} (keys {given[:8]}); expected "
                f"{list(self.keys)[:40]}. Add the features, with empty bags if there are no ids."
            )
        unknown = [key for key in given if key not in self.keys]
        if unknown:
            raise InputError(
                f"Input '{self.name}': got the unknown features {unknown[:4]}; expected {list(self.keys)[:40]}. Remove "
                "them from the batch."
            )
        return value.permute([given.index(key) for key in self.keys])

    def _weights(self, value: KeyedJaggedTensor | JaggedTensor) -> Tensor:
        weights = value.weights_or_none()
        if weights is None:
            raise InputError(
                f"Input '{self.name}': got a batch without weights; expected weights, as in the example of the export. "
                "Pass one weight per id."
            )
        return weights


@dataclass(frozen=True)
class Signature:
    """Arguments of a model, flattened into inputs.

    Attributes:
        arguments: names of the parameters of `forward`, by position.
        structure: containers of the inputs, as text.
    """

    arguments: tuple[str, ...]
    inputs: tuple[InputSpec, ...]
    structure: str

    def specs(self) -> list[TensorSpec]:
        """Return the specs of all tensors, in order."""
        return [spec for own in self.inputs for spec in own.tensors]


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype: `float32`."""
    return str(tensor.dtype).removeprefix("torch.")


def _converted(lengths: Tensor, spec: TensorSpec) -> Tensor:
    """Return lengths in the type of the package; raise `InputError` for one that it cannot hold."""
    converted = lengths.to(DTYPES[spec.dtype])
    if converted.dtype != lengths.dtype and not torch.equal(converted.to(lengths.dtype), lengths):
        raise InputError(
            f"Input '{spec.name}': got {dtype_name(lengths)} lengths from {int(lengths.min())} to "
            f"{int(lengths.max())}; expected numbers that {spec.dtype} holds, with the number of ids as their sum. "
            "Correct the lengths."
        )
    return converted


def _fits(own: int, want: Size, sizes: dict[str, int]) -> bool:
    return own == (want if isinstance(want, int) else sizes.setdefault(want, own))


# ---------------------------------------------------------------------------------------------------- of an example


def bound_arguments(model: nn.Module, example: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Return names and values of the arguments of an example: a tuple, a mapping by name, or a single argument.

    Raises:
        ConfigError: the example does not fit the model's `forward`.
    """
    by_name = isinstance(example, Mapping) and all(isinstance(name, str) for name in example)
    named: Mapping[str, Any] = example if by_name else {}
    given = () if by_name else tuple(example) if isinstance(example, (tuple, list)) else (example,)
    try:
        bound = inspect.signature(model.forward).bind(*given, **named)
    except TypeError as error:
        raise ConfigError(
            f"export: got an example that {type(model).__name__}.forward cannot take ({error}); expected a tuple of "
            "its arguments, or a dict by name."
        ) from None
    if bound.kwargs:
        raise ConfigError(
            f"export: got {sorted(bound.kwargs)} of {type(model).__name__}.forward by name only; expected arguments "
            "that also have a position. Wrap the model in a module whose forward has them."
        )
    names = list(bound.arguments)
    values = bound.args
    if len(names) != len(values):  # *args
        names = [*names[:-1], *(f"{names[-1]}_{i}" for i in range(len(values) - len(names) + 1))]
    return tuple(names), values


def example_signature(names: Sequence[str], args: Sequence[Any]) -> Signature:
    """Return the signature of example arguments.

    Raises:
        ConfigError: an argument is no tensor and no jagged batch.
    """
    values, structure = pytree.tree_flatten(tuple(args), is_leaf=is_input)
    paths = []
    for name, arg in zip(names, args, strict=True):
        found, _ = pytree.tree_flatten_with_path(arg, is_leaf=is_input)
        paths += [name + pytree.keystr(path) for path, _ in found]
    for path, value in zip(paths, values, strict=True):
        _check_example(path, value)
    batch = _batch_size(values)
    inputs = tuple(_input(path, value, batch) for path, value in zip(paths, values, strict=True))
    if not any(BATCH in spec.shape for own in inputs for spec in own.tensors):
        raise ConfigError("export: got an example without samples; expected a batch of the model. Pass its arguments.")
    try:
        text = pytree.treespec_dumps(structure)
    except NotImplementedError:
        raise ConfigError(
            f"export: got arguments with a container that a file cannot describe ({structure}); expected lists, "
            "tuples and dicts. Pass its tensors to a module around the model."
        ) from None
    return Signature(tuple(names), inputs, text)


def flat_tensors(signature: Signature, values: Sequence[Any]) -> list[Any]:
    """Return the tensors of inputs, in the order of the signature's specs."""
    return [tensor for own, value in zip(signature.inputs, values, strict=True) for tensor in own.tensors_of(value)]


def dynamic_sizes(signature: Signature) -> tuple[dict[int, Any], ...]:
    """Return the dynamic sizes of the signature's tensors, as `torch.export` takes them."""
    names = {size for spec in signature.specs() for size in spec.shape if isinstance(size, str)}
    dims = {name: Dim("".join(c if c.isalnum() else "_" for c in name), min=0) for name in sorted(names)}
    return tuple(
        {at: dims[size] for at, size in enumerate(spec.shape) if isinstance(size, str)} for spec in signature.specs()
    )


def with_flat_forward(model: nn.Module, signature: Signature) -> nn.Module:
    """Let `forward` of a model take the signature's tensors instead of its arguments; return the model."""
    inputs, kind = signature.inputs, type(model)
    structure = pytree.treespec_loads(signature.structure)
    plain = structure.num_leaves == len(signature.arguments)

    def forward(self: nn.Module, *tensors: Tensor) -> Any:
        values, at = [], 0
        for own in inputs:
            values.append(own.value_of(tensors[at : at + len(own.tensors)]))
            at += len(own.tensors)
        return kind.forward(self, *(values if plain else pytree.tree_unflatten(values, structure)))

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return model


def is_input(value: Any) -> bool:
    """Return True for a jagged batch, which is one input of several tensors."""
    return isinstance(value, (JaggedTensor, KeyedJaggedTensor))


def _check_example(name: str, value: Any) -> None:
    if isinstance(value, KeyedJaggedTensor):
        if value.variable_stride_per_key() or not value.keys():
            raise ConfigError(
                f"export: input '{name}': got a batch {'without keys' if not value.keys() else 'of variable strides'}; "
                "expected keys with one number of samples. Build the example with from_lengths_sync()."
            )
    elif not isinstance(value, (Tensor, JaggedTensor)):
        raise ConfigError(
            f"export: input '{name}': got a {type(value).__name__}; expected a tensor, a KeyedJaggedTensor or a "
            "JaggedTensor. Fix other values in a module around the model."
        )


def _batch_size(values: Sequence[Any]) -> int:
    for value in values:
        if isinstance(value, KeyedJaggedTensor):
            return value.stride()
        if isinstance(value, JaggedTensor):
            return value.lengths().shape[0]
    return next((value.shape[0] for value in values if value.dim()), 0)


def _input(name: str, value: Any, batch: int) -> InputSpec:
    if isinstance(value, Tensor):
        first: list[Size] = [BATCH] if value.dim() and value.shape[0] == batch else list(value.shape[:1])
        return InputSpec(name, "Tensor", (TensorSpec(name, dtype_name(value), (*first, *value.shape[1:])),))
    keys = tuple(value.keys()) if isinstance(value, KeyedJaggedTensor) else ()
    weights = value.weights_or_none()
    parts: Iterator[tuple[str, Tensor | None, tuple[Size, ...]]] = iter(
        (
            ("values", value.values(), (f"{name}.ids", *value.values().shape[1:])),
            ("weights", weights, () if weights is None else (f"{name}.ids", *weights.shape[1:])),
            ("lengths", value.lengths(), (len(keys), BATCH) if keys else (BATCH,)),
        )
    )
    specs = [TensorSpec(f"{name}.{part}", dtype_name(own), shape) for part, own, shape in parts if own is not None]
    return InputSpec(name, type(value).__name__, tuple(specs), keys)
