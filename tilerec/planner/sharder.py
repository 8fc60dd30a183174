"""The planner's view of sharders: the kind of collection of each sharder, and the optimizer it attaches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from torch import nn

from tilerec.errors import ConfigError
from tilerec.spec.optimizer import OptimizerSpec


class Sharder(Protocol):
    """Interface of `tilerec.parallel.EmbeddingBagCollectionSharder` and the other sharders."""

    @property
    def module_type(self) -> type[nn.Module]:
        """The class of collections that it shards."""

    @property
    def optimizer(self) -> OptimizerSpec | None:
        """Optimizer for tables of these collections that have none attached, unless their kernel is `dense`."""


_S = TypeVar("_S", bound=Sharder)


def check_sharder(sharder: Any, what: str) -> None:
    """Raise if `sharder` is not a sharder.

    Args:
        what: name of the argument, with which the error begins.

    Raises:
        ConfigError: `sharder` is a class, or another kind of object.
    """
    if isinstance(sharder, type) and not issubclass(sharder, nn.Module):
        raise ConfigError(f"{what} is the class {sharder.__name__}; wanted a sharder of it: {sharder.__name__}(...).")
    if not all(hasattr(sharder, name) for name in ("module_type", "optimizer")):
        kind = f"the class {sharder.__name__}" if isinstance(sharder, type) else f"a {type(sharder).__name__}"
        raise ConfigError(
            f"{what} is {kind}; wanted a sharder of tilerec.parallel: "
            "EmbeddingBagCollectionSharder(...) or EmbeddingCollectionSharder(...)."
        )


def checked_sharders(sharders: Sequence[_S] | None, who: str) -> list[_S]:
    """Return the sharders as a list, after checking them.

    Args:
        who: name of the class that takes them, for error messages.

    Raises:
        ConfigError: `sharders` is not a list, an item is not a sharder, or two are for one kind of collection.
    """
    if sharders is None:
        return []
    if isinstance(sharders, (str, type)) or not isinstance(sharders, Sequence):
        name = sharders.__name__ if isinstance(sharders, type) else type(sharders).__name__
        one = name if hasattr(sharders, "module_type") else "EmbeddingBagCollectionSharder"
        raise ConfigError(f"{who}: sharders is a {name}; wanted a list of sharders: sharders=[{one}(...)].")
    kinds: dict[type, int] = {}
    for i, sharder in enumerate(sharders):
        check_sharder(sharder, f"{who}: sharders[{i}]")
        first = kinds.setdefault(sharder.module_type, i)
        if first != i:
            raise ConfigError(
                f"{who}: sharders[{first}] and sharders[{i}] are both for {sharder.module_type.__name__}; give one "
                "for each kind. Set a single table's optimizer with apply_optimizer_in_backward, and its wire format "
                "in the plan."
            )
    return list(sharders)


def sharder_of(module: nn.Module, sharders: Sequence[_S] | None) -> _S | None:
    """Return the sharder for a collection, or None.

    A sharder for the managed-collision module around the collection takes precedence.
    """
    around = vars(module).get("_managed_by")
    for kind in (type(module),) if around is None else (around, type(module)):
        for sharder in sharders or ():
            if issubclass(kind, sharder.module_type):
                return sharder
    return None
