"""The table of names: which object of tilerec stands in for each public name of TorchRec.

names.txt    `module name home`: home is the module of tilerec that has the object, or `module:attribute`
absent.txt   `module name reason`: a name without a stand-in; `*` is the whole module, `-` an empty module
numbers.txt  `name: how`: a name whose numbers differ from TorchRec's
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

PAGE = "docs/torchrec-users.md"
"""The page that lists the names without a stand-in."""

ROOTS = ("torchrec", "fbgemm_gpu")
"""Packages that have stand-ins."""

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Home:
    """The place of an object in tilerec."""

    module: str
    attribute: str

    def load(self) -> object:
        """Return the object."""
        found: object = import_module(self.module)
        for part in self.attribute.split("."):
            found = getattr(found, part)
        return found

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"


def _lines(file: str) -> list[str]:
    text = (_FOLDER / file).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


@cache
def names_of() -> dict[str, dict[str, Home]]:
    """Return module -> name -> home. Every package of a module is a key, too."""
    table: dict[str, dict[str, Home]] = {}
    for line in _lines("names.txt"):
        module, name, home = line.split()
        path, _, attribute = home.partition(":")
        table.setdefault(module, {})[name] = Home(path, attribute or name)
    for module in [*table, *(module for module, name in absent() if name == "-")]:
        parts = module.split(".")
        for i in range(1, len(parts) + 1):
            table.setdefault(".".join(parts[:i]), {})
    return table


@cache
def absent() -> dict[tuple[str, str], str]:
    """Return (module, name) -> the reason why there is no stand-in."""
    found = {}
    for line in _lines("absent.txt"):
        module, name, reason = line.split(maxsplit=2)
        found[module, name] = reason
    return found


@cache
def other_numbers() -> dict[str, str]:
    """Return name -> how its numbers differ from TorchRec's."""
    return dict(line.split(": ", 1) for line in _lines("numbers.txt"))


def reason_of_absence(module: str, name: str) -> str:
    """Return the message for a name without a stand-in: the reason if it is known, else the nearest names."""
    reason = absent().get((module, name)) or absent().get((f"{module}.{name}", "*")) or absent().get((module, "*"))
    if reason is None:
        reason = next((why for (_, known), why in absent().items() if known == name), None)
    if reason is not None:
        return f"{module}.{name}: tilerec has no stand-in: {reason}. {PAGE} lists the names that are not there."
    table = names_of()
    homes = [known for known, names in table.items() if name in names]
    if homes:
        advice = f"Did you mean {_near_module(module, homes)}.{name}?"
    else:
        own = [*table.get(module, ()), *(known.rpartition(".")[2] for known in table if known.startswith(f"{module}."))]
        near = difflib.get_close_matches(name, own, 1)
        everywhere = {known: where for where, names in table.items() for known in names}
        near = near or difflib.get_close_matches(name, everywhere, 1)
        where = module if not near or near[0] in own else everywhere[near[0]]
        advice = f"The nearest known name is {where}.{near[0]}." if near else "No known name is similar."
    return (
        f"{module}.{name}: tilerec has no stand-in for this name. {advice} {PAGE} lists the names that are not there."
    )


def _near_module(module: str, homes: list[str]) -> str:
    return max(homes, key=lambda home: difflib.SequenceMatcher(None, home, module).ratio())
