"""Finding a recipe by its name."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from tilerec.errors import ConfigError
from tilerec.recipes.runs import criteo, movielens, synthetic
from tilerec.train.config import RunConfig

RECIPES: dict[str, Callable[..., RunConfig]] = {
    "synthetic": synthetic,
    "movielens": movielens,
    "criteo": criteo,
}
"""The recipes that come with the library, by name."""


def find_recipe(name: str) -> Callable[..., RunConfig]:
    """A recipe's function, by the name of one of ours or as `module:function`.

    Raises:
        ConfigError: there is none.
    """
    if name in RECIPES:
        return RECIPES[name]
    module_name, colon, function_name = name.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, RECIPES, 1)
        hint = (
            f"did you mean {near[0]!r}?"
            if near
            else f"there are {', '.join(RECIPES)}, or module:function of yours."
        )
        raise ConfigError(f"There is no recipe {name!r}; {hint}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"Recipe {name!r}: {error}; is its folder on PYTHONPATH?") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"Recipe {name!r}: module {module_name!r} has no function {function_name!r}.")
    recipe: Callable[..., RunConfig] = function
    return recipe


def needs_data(recipe: Callable[..., Any]) -> bool:
    """Whether a recipe takes the path of the data."""
    return "data" in inspect.signature(recipe).parameters


def make_run(name: str, data: str | None = None) -> RunConfig:
    """The config of a recipe.

    Args:
        name: see `find_recipe`.
        data: path of the data, for recipes that read files.

    Raises:
        ConfigError: no such recipe, a path where none is read, no path where one is needed.
    """
    recipe = find_recipe(name)
    if needs_data(recipe):
        if data is None:
            raise ConfigError(f"Recipe {name!r} reads files; say where they are with --data PATH.")
        run = recipe(data=data)
    elif data is not None:
        raise ConfigError(f"Recipe {name!r} makes its own data; leave --data out.")
    else:
        run = recipe()
    if not isinstance(run, RunConfig):
        raise ConfigError(f"Recipe {name!r} returned a {type(run).__name__}; a recipe returns a RunConfig.")
    return run
