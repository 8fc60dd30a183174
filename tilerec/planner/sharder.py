"""What a planner reads of sharders: for which kind of collection each speaks, and the optimizer it gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from torch import nn

from tilerec.errors import ConfigError
from tilerec.spec.optimizer import OptimizerSpec


class Sharder(Protocol):
    """`tilerec.parallel.EmbeddingBagCollectionSharder` and its like."""

    @property
    def module_type(self) -> type[nn.Module]:
        """The kind of collection it speaks of."""

    @property
    def optimizer(self) -> OptimizerSpec | None:
        """Of the tables of this kind that have none attached, unless their kernel is `dense`."""


_S = TypeVar("_S", bound=Sharder)


def check_sharder(sharder: Any, what: str) -> None:
    """Refuse what is no sharder.

    Args:
        what: begins the message.

    Raises:
        ConfigError: a class, or a thing of another kind.
    """
    if isinstance(sharder, type) and not issubclass(sharder, nn.Module):
        raise ConfigError(
            f"{what} is the class {sharder.__name__}; wanted a sharder of it: {sharder.__name__}(...)."
        )
    if not all(hasattr(sharder, name) for name in ("module_type", "optimizer")):
        raise ConfigError(
            f"{what} is {_words(sharder)}; wanted a sharder of tilerec.parallel: "
            "EmbeddingBagCollectionSharder(...) or EmbeddingCollectionSharder(...)."
        )


def _words(sharder: Any) -> str:
    return f"the class {sharder.__name__}" if isinstance(sharder, type) else f"a {type(sharder).__name__}"


def listed(sharders: Sequence[_S] | None, who: str) -> list[_S]:
    """The sharders, checked.

    Args:
        who: takes them, for messages.

    Raises:
        ConfigError: they are no list, one of them is no sharder, or two speak of one kind of collection.
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
                f"{who}: sharders[{first}] and sharders[{i}] both speak of {sharder.module_type.__name__}; give one "
                "for each kind. A single table's optimizer is apply_optimizer_in_backward's, its wire the plan's."
            )
    return list(sharders)


def sharder_of(module: nn.Module, sharders: Sequence[_S] | None) -> _S | None:
    """The sharder that speaks of a collection; one of the module with managed collision around it goes before."""
    around = vars(module).get("_managed_by")
    for kind in (type(module),) if around is None else (around, type(module)):
        for sharder in sharders or ():
            if issubclass(kind, sharder.module_type):
                return sharder
    return None
