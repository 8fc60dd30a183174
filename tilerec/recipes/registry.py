"""Registry of recipes by name."""

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
"""Recipes that the library includes, by name."""


def find_recipe(name: str) -> Callable[..., RunConfig]:
    """Return a recipe's function, by the name of a built-in recipe or as `module:function`.

    Raises:
        ConfigError: the recipe does not exist.
    """
    if name in RECIPES:
        return RECIPES[name]
    module_name, colon, function_name = name.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, RECIPES, 1)
        hint = (
            f"Did you mean {near[0]!r}?"
            if near
            else f"Expected one of {', '.join(RECIPES)}, or module:function of your own."
        )
        raise ConfigError(f"There is no recipe {name!r}. {hint}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"Recipe {name!r}: {error}. Is its folder on PYTHONPATH?") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"Recipe {name!r}: module {module_name!r} has no function {function_name!r}.")
    recipe: Callable[..., RunConfig] = function
    return recipe


def needs_data(recipe: Callable[..., Any]) -> bool:
    """Return True if a recipe takes the path of the data."""
    return "data" in inspect.signature(recipe).parameters


def make_run(name: str, data: str | None = None) -> RunConfig:
    """Return the config of a recipe.

    Args:
        name: see `find_recipe`.
        data: path of the data, for recipes that read files.

    Raises:
        ConfigError: the recipe does not exist, a needed path is missing, or the recipe takes no path.
    """
    recipe = find_recipe(name)
    if needs_data(recipe):
        if data is None:
            raise ConfigError(f"Recipe {name!r} reads files. Pass their path with --data PATH.")
        run = recipe(data=data)
    elif data is not None:
        raise ConfigError(f"Recipe {name!r} generates its own data. Leave --data out.")
    else:
        run = recipe()
    if not isinstance(run, RunConfig):
        raise ConfigError(f"Recipe {name!r} returned a {type(run).__name__}; expected a RunConfig.")
    return run
