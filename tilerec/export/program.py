"""`traced`: a model as a `torch.export` program for batches of any size, 0 and 1 included."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from tilerec.errors import ConfigError, TilerecError
from tilerec.export.arguments import dtype_name, dynamic_sizes, flat_tensors, is_input, with_flat_forward
from tilerec.export.signature import Signature, TensorSpec
from tilerec.sparse.keyed_tensor import KeyedTensor
from tilerec.torch_private import any_sizes, pytree, submodules


def rename_hidden(model: nn.Module) -> dict[str, str]:
    """Rename submodules that an attribute of their parent hides, such as a table `items` or `type`.

    torch.export and AOTInductor find a module's tensors through attributes. `_` is added to the name of such a module;
    forwards of collections do not use the names of their tables.

    Returns:
        The old path of each renamed submodule, by its new path.
    """
    renamed = {}
    for path, part in model.named_modules():
        children = dict(submodules(part))
        hidden = [name for name, child in children.items() if getattr(part, name, None) is not child]
        if not hidden:
            continue
        submodules(part).clear()
        for name, child in children.items():
            free = name
            while name in hidden and (free in children or hasattr(part, free)):
                free += "_"
            submodules(part)[free] = child
            if free != name:
                renamed[".".join(filter(None, (path, free)))] = ".".join(filter(None, (path, name)))
    return renamed


def traced(model: nn.Module, signature: Signature, args: tuple[Any, ...], *, strict: bool) -> ExportedProgram:
    """Return the program of a model of `whole_model`: of the signature's tensors, for any number of samples and ids.

    Args:
        args: example arguments.
        strict: trace with Dynamo instead of running the Python code.

    Raises:
        ConfigError: `torch.export` cannot trace the model.
    """
    name = type(model).__name__
    values, _ = pytree.tree_flatten(args, is_leaf=is_input)
    tensors = tuple(tensor.detach().cpu().clone() for tensor in flat_tensors(signature, values))
    try:
        with torch.no_grad(), any_sizes():
            return torch.export.export(
                with_flat_forward(model, signature), tensors, strict=strict,
                dynamic_shapes={"tensors": dynamic_sizes(signature)},
            )  # fmt: skip
    except TilerecError:
        raise
    except Exception as error:
        own = next((cause for cause in _causes(error) if isinstance(cause, TilerecError)), None)
        if own is not None:
            raise own from error
        text = " ".join(str(error).split())
        raise ConfigError(
            f"export: torch.export cannot trace {name}: got {type(error).__name__}: {text:.600}; expected a model "
            "whose shapes follow from the sizes of its inputs, for any number of samples. Export a part of it, or try "
            f"strict={not strict}."
        ) from error


def _causes(error: BaseException | None) -> list[BaseException]:
    out: list[BaseException] = []
    while error is not None and error not in out:
        out.append(error)
        error = error.__cause__ or error.__context__
    return out


def output_specs(program: ExportedProgram, signature: Signature) -> tuple[list[TensorSpec], dict[str, list[str]]]:
    """Return the specs of the outputs, and the keys of each output that is a `KeyedTensor`, by name.

    Raises:
        ConfigError: an output is no tensor.
    """
    names = _size_names(program, signature)
    structure = program.call_spec.out_spec
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    values = list(output.args[0])[-structure.num_leaves :] if structure.num_leaves else []
    found, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(values, structure))
    specs = []
    for path, node in found:
        value = node.meta.get("val") if hasattr(node, "meta") else node
        name = "output" + pytree.keystr(path)
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"export: '{name}' of the model is a {type(value).__name__}; expected tensors. Return tensors only."
            )
        specs.append(TensorSpec(name, dtype_name(value), tuple(_size(size, names) for size in value.shape)))
    keyed, _ = pytree.tree_flatten_with_path(
        pytree.tree_unflatten(values, structure), is_leaf=lambda value: isinstance(value, KeyedTensor)
    )
    keys = {"output" + pytree.keystr(path): list(v.keys()) for path, v in keyed if isinstance(v, KeyedTensor)}
    return specs, keys


def _size_names(program: ExportedProgram, signature: Signature) -> dict[str, str]:
    """Return the names of the program's symbols: {"s49": "batch"}."""
    inputs = set(program.graph_signature.user_inputs)
    nodes = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in inputs]
    return {
        str(size): name
        for node, spec in zip(nodes, signature.specs(), strict=True)
        for size, name in zip(node.meta["val"].shape, spec.shape, strict=True)
        if isinstance(name, str)
    }


def _size(size: Any, names: dict[str, str]) -> int | str:
    if isinstance(size, int):
        return size
    text = str(size)
    for symbol, name in names.items():
        text = text.replace(symbol, name)
    return text.replace(" ", "")
