"""Registry of recipes by name."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from tilerec.errors import ConfigError
from tilerec.recipes import click_runs
from tilerec.recipes.retrieval_runs import sasrec, two_tower
from tilerec.recipes.runs import criteo, movielens, synthetic
from tilerec.train.config import RunConfig
from tilerec.train.override import override
from tilerec.train.run_file import read_run_file

RECIPES: dict[str, Callable[..., RunConfig]] = {
    "synthetic": synthetic,
    "movielens": movielens,
    "criteo": criteo,
    "two_tower": two_tower,
    "sasrec": sasrec,
    "movielens_linear": click_runs.movielens_linear,
    "movielens_mlp": click_runs.movielens_mlp,
    "movielens_dcn": click_runs.movielens_dcn,
    "movielens_shared_bottom": click_runs.movielens_shared_bottom,
    "movielens_mmoe": click_runs.movielens_mmoe,
    "movielens_ple": click_runs.movielens_ple,
    "criteo_dcn": click_runs.criteo_dcn,
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
            else f"Expected a run file (.toml), one of {', '.join(RECIPES)}, or module:function of your own."
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
    """Return the config of a recipe or of a run file.

    Args:
        name: see `find_recipe`; or the path of a run file, which ends with ".toml".
        data: path of the data, for recipes that read files; replaces that of a run file.

    Raises:
        ConfigError: the recipe or the file does not exist, a needed path is missing, or the recipe takes no path.
    """
    if name.endswith(".toml"):
        run = read_run_file(name)
        return run if data is None else override(run, f"data.path={data}")
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
