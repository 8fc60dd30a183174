"""Small helpers over `torch.nn` modules: activations given in several forms, output sizes, module lists.

Legend of the shapes in names: B samples, I input features, O output features.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable

import torch
from torch import nn

from tilerec.errors import ConfigError, InputError
from tilerec.modules.recorded_call import is_proxy

TensorFunction = Callable[[torch.Tensor], torch.Tensor]
ModuleFactory = Callable[[], nn.Module]


def check_size(what: str, value: object, least: int = 1) -> int:
    """Return `value` if it is an integer of at least `least`; else raise a `ConfigError` that names `what`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{what}: got {value!r}; expected an integer of at least {least}.")
    return value


def check_last_dim(what: str, tensor: torch.Tensor, wanted: int, dims: int | None = None) -> None:
    """Raise `InputError` unless `tensor`'s last dimension is `wanted` (and it has `dims` dimensions, if given)."""
    if is_proxy(tensor):  # it has no shape
        return
    if tensor.dim() == 0 or tensor.shape[-1] != wanted or (dims is not None and tensor.dim() != dims):
        shape = "[…, " if dims is None else "[" + "batch, " * (dims - 1)
        raise InputError(
            f"{what}: got input of shape {list(tensor.shape)}; expected {shape}{wanted}]. "
            "Check the layer before it, or the size that this one was built with."
        )


def _is_factory(function: Callable[..., object]) -> bool:
    """Return True if `function` takes no arguments, so that it builds a module rather than maps a tensor.

    `torch.relu` and other builtins have no signature; they map tensors.
    """
    if isinstance(function, type):
        return True
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    required = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return False
    return not any(p.kind in required and p.default is inspect.Parameter.empty for p in parameters)


def extract_module_or_tensor_callable(
    module_or_callable: ModuleFactory | nn.Module | TensorFunction,
) -> nn.Module | TensorFunction:
    """Return the module or function that maps a tensor; call a module class or zero-argument factory first.

    Args:
        module_or_callable: `nn.PReLU()` (returned unchanged), `nn.PReLU` or `lambda: nn.LeakyReLU(0.1)` (called), or a
            function of one tensor such as `torch.relu` (returned unchanged).

    Raises:
        ConfigError: the argument is none of these, or a factory returned no module.
    """
    if isinstance(module_or_callable, nn.Module):
        return module_or_callable
    if not callable(module_or_callable):
        raise ConfigError(
            f"activation: got {module_or_callable!r}; expected a module, a module class, a factory of modules or a "
            "function of one tensor."
        )
    if not _is_factory(module_or_callable):
        return module_or_callable  # type: ignore[return-value]
    made = module_or_callable()  # type: ignore[call-arg]
    if not isinstance(made, nn.Module):
        raise ConfigError(
            f"activation: factory {module_or_callable!r} returned a {type(made).__name__}; expected a torch.nn.Module."
        )
    return made


def get_module_output_dimension(module: TensorFunction | nn.Module, in_features: int) -> int:
    """Return the width of `module`'s output for an input of shape [1, in_features], from one run on zeros."""
    with torch.no_grad():
        return int(module(torch.zeros(1, in_features)).size(-1))


def check_module_output_dimension(module: Iterable[nn.Module] | nn.Module, in_features: int, out_features: int) -> bool:
    """Return True if `module` (every one, if several) maps `in_features` to `out_features`."""
    modules = [module] if isinstance(module, nn.Module) and not isinstance(module, nn.ModuleList) else module
    return all(get_module_output_dimension(m, in_features) == out_features for m in modules)


def init_mlp_weights_xavier_uniform(m: nn.Module) -> None:
    """Initialise an `nn.Linear`: Xavier-uniform weights and zero biases (Glorot & Bengio, 2010). For `module.apply`."""
    if isinstance(m, nn.Linear):
        nn.init.xavier_uniform_(m.weight)
        if m.bias is not None:
            nn.init.zeros_(m.bias)


def _fresh_copy(module: nn.Module) -> nn.Module:
    copied = copy.deepcopy(module)
    for child in copied.modules():
        reset = getattr(child, "reset_parameters", None)
        if callable(reset):
            reset()
    return copied


def _check_levels(sizes: tuple[int, ...]) -> None:
    if not sizes:
        raise ConfigError("sizes: got (); expected the length of each level of the module list, such as (2, 4).")


def construct_modulelist_from_single_module(module: nn.Module, sizes: tuple[int, ...]) -> nn.ModuleList:
    """Return nested `nn.ModuleList`s of shape `sizes`, filled with independently initialised copies of `module`.

    >>> lists = construct_modulelist_from_single_module(nn.Linear(2, 3), (2, 4))
    >>> len(lists), len(lists[0])
    (2, 4)
    """
    _check_levels(sizes)
    if len(sizes) == 1:
        return nn.ModuleList(_fresh_copy(module) for _ in range(sizes[0]))
    return nn.ModuleList(construct_modulelist_from_single_module(module, sizes[1:]) for _ in range(sizes[0]))


def convert_list_of_modules_to_modulelist(modules: Iterable[nn.Module], sizes: tuple[int, ...]) -> nn.ModuleList:
    """Return the (nested) iterable `modules` as nested `nn.ModuleList`s; its lengths must be `sizes`.

    Raises:
        ConfigError: a level's length differs from its entry in `sizes`.
    """
    _check_levels(sizes)
    level = list(modules)
    if len(level) != sizes[0]:
        raise ConfigError(f"modules: got {len(level)} entries; expected {sizes[0]} (sizes={sizes}). Make them equal.")
    if len(sizes) == 1:
        return nn.ModuleList(level)
    return nn.ModuleList(convert_list_of_modules_to_modulelist(m, sizes[1:]) for m in level)  # type: ignore[arg-type]
