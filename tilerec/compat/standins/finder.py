"""The import hook: modules named `torchrec…` and `fbgemm_gpu…` whose names are objects of tilerec.

import torchrec.distributed     ->  find_spec("torchrec.distributed")  ->  a StandIn, if the table has the module
from torchrec.x import Name     ->  StandIn.__getattr__("Name")        ->  the object of tilerec, imported now
                                    not in the table                   ->  ImportError with the reason
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from tilerec.compat.standins.name_table import ROOTS, names_of, reason_of_absence
from tilerec.compat.standins.report import Report

VERSION = "1.8.0+tilerec"
"""`torchrec.__version__`: the version whose names the table has."""


class StandIn(ModuleType):
    """A module whose attributes are the table's objects for it."""

    _report: Report

    def __getattr__(self, name: str) -> Any:
        home = names_of()[self.__name__].get(name)
        if home is None and f"{self.__name__}.{name}" in names_of():
            return import_module(f"{self.__name__}.{name}")
        if home is None:
            raise AttributeError(reason_of_absence(self.__name__, name))
        found = home.load()
        vars(self)[name] = found
        self._report.add_name(self.__name__, name, home)
        return found

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *names_of()[self.__name__]})


class StandInLoader(Loader):
    """Makes stand-ins."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_report=self._report, __all__=sorted(names_of()[module.__name__]), __version__=VERSION)


class StandInFinder(MetaPathFinder):
    """Finds the modules of the table."""

    def __init__(self, report: Report) -> None:
        self._loader = StandInLoader(report)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a stand-in, and None for modules of other packages.

        Raises:
            ImportError: the module, or the name in its package, has no stand-in.
        """
        if fullname.partition(".")[0] not in ROOTS:
            return None
        if fullname in names_of():
            return ModuleSpec(fullname, self._loader, is_package=True)
        package, _, name = fullname.rpartition(".")
        if name.startswith("__"):
            return None
        raise ImportError(reason_of_absence(package, name), name=fullname)


def check_no_other(names: Sequence[str] = ROOTS) -> None:
    """Raise an ImportError if the process has imported one of the packages that stand-ins replace."""
    for name in names:
        module = sys.modules.get(name)
        if module is not None and not isinstance(module, StandIn):
            raise ImportError(
                f"tilerec.compat.torchrec: got the package {name} imported from {getattr(module, '__file__', '?')}; "
                f"expected that it is not imported yet. Import tilerec.compat.torchrec before {name}, or run the "
                "program with python -m tilerec.compat.torchrec.",
                name=name,
            )
