"""Arguments of an exported model as tensors, in the order of its signature, and the signature of an example."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from tilerec.errors import ConfigError, InputError
from tilerec.export.signature import BATCH, Signature, Size, TensorSpec
from tilerec.export.signature import InputSpec as InputSpec
from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.torch_private import pytree


def check_tensor(spec: TensorSpec, tensor: Any, sizes: dict[str, int]) -> None:
    """Raise an `InputError` for a tensor of another dtype or shape.

    Args:
        sizes: values of the named sizes found so far; is extended.
    """
    if not isinstance(tensor, Tensor) or dtype_name(tensor) != spec.dtype:
        got, move = f"a {type(tensor).__name__}", f"torch.as_tensor(..., dtype=torch.{spec.dtype})"
        if isinstance(tensor, Tensor):
            got, move = dtype_name(tensor), f".to(torch.{spec.dtype})"
        raise InputError(
            f"Input '{spec.name}': got {got}; expected {spec.dtype}, as in the example of the export. Convert it "
            f"with {move}."
        )
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        got, move = f"a tensor on {tensor.device}", ".cpu()"
        if tensor.device.type == "cpu":
            got, move = f"a tensor of the layout {tensor.layout}", ".to_dense()"
        raise InputError(f"Input '{spec.name}': got {got}; expected a dense tensor on the CPU. Call {move} on it.")
    spec.check_shape(tuple(tensor.shape), sizes)


def tensors_of(own: InputSpec, value: Any) -> list[Any]:
    """Return the tensors of a caller's value, in the order of the specs.

    Raises:
        InputError: the value is of another kind, or lacks a feature or its weights.
    """
    if own.kind == "Tensor":
        return [value]
    kind = KeyedJaggedTensor if own.keys else JaggedTensor
    if not isinstance(value, kind):
        raise InputError(
            f"Input '{own.name}': got a {type(value).__name__}; expected a {own.kind}, as in the example of the export."
        )
    if isinstance(value, KeyedJaggedTensor):
        value = _in_order(own, value)
    if value.weights_or_none() is not None and not any(spec.name.endswith(".weights") for spec in own.tensors):
        raise InputError(
            f"Input '{own.name}': got a batch with weights; expected none, as in the example of the export: the model "
            "reads none. Pass the batch without its weights, or export with weights in the example."
        )
    out = []
    for spec in own.tensors:
        part = spec.name.rpartition(".")[2]
        if part == "values":
            out.append(value.values())
        elif part == "lengths":  # counts of any integer type are the same batch
            lengths = _converted(value.lengths(), spec)
            keyed = isinstance(value, KeyedJaggedTensor)
            out.append(lengths.view(len(own.keys), value.stride()) if keyed else lengths)
        else:
            out.append(_weights(own, value))
    return out


def value_of(own: InputSpec, tensors: Sequence[Tensor]) -> Any:
    """Return the input that the tensors are parts of; the opposite of `tensors_of`."""
    if own.kind == "Tensor":
        return tensors[0]
    values, lengths = tensors[0], tensors[-1]
    weights = tensors[1] if len(tensors) == 3 else None
    if own.keys:
        return KeyedJaggedTensor(list(own.keys), values, weights, lengths=lengths.reshape(-1))
    return JaggedTensor(values, weights, lengths=lengths)


def _in_order(own: InputSpec, value: KeyedJaggedTensor) -> KeyedJaggedTensor:
    given = value.keys()
    if value.variable_stride_per_key():
        raise InputError(
            f"Input '{own.name}': got a batch whose keys have different numbers of samples; expected one number. "
            "Expand it before the call."
        )
    if tuple(given) == own.keys:
        return value
    missing = [key for key in own.keys if key not in given]
    if missing:
        raise InputError(
            f"Input '{own.name}': got no feature {missing[:4]} (keys {given[:8]}); expected "
            f"{list(own.keys)[:40]}. Add the features, with empty bags if there are no ids."
        )
    unknown = [key for key in given if key not in own.keys]
    if unknown:
        raise InputError(
            f"Input '{own.name}': got the unknown features {unknown[:4]}; expected {list(own.keys)[:40]}. Remove "
            "them from the batch."
        )
    return value.permute([given.index(key) for key in own.keys])


def _weights(own: InputSpec, value: KeyedJaggedTensor | JaggedTensor) -> Tensor:
    weights = value.weights_or_none()
    if weights is None:
        raise InputError(
            f"Input '{own.name}': got a batch without weights; expected weights, as in the example of the export. "
            "Pass one weight per id."
        )
    return weights


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype: `float32`."""
    return str(tensor.dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name: the opposite of `dtype_name`."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def _converted(lengths: Tensor, spec: TensorSpec) -> Tensor:
    """Return lengths in the type of the package; raise `InputError` for one that it cannot hold."""
    converted = lengths.to(torch_dtype(spec.dtype))
    if converted.dtype != lengths.dtype and not torch.equal(converted.to(lengths.dtype), lengths):
        raise InputError(
            f"Input '{spec.name}': got {dtype_name(lengths)} lengths from {int(lengths.min())} to "
            f"{int(lengths.max())}; expected numbers that {spec.dtype} holds, with the number of ids as their sum. "
            "Correct the lengths."
        )
    return converted


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
    return [tensor for own, value in zip(signature.inputs, values, strict=True) for tensor in tensors_of(own, value)]


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
            values.append(value_of(own, tensors[at : at + len(own.tensors)]))
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
