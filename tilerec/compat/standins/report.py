"""The report at the end of a program: names that were substituted, settings without effect, numbers that differ."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, TextIO

from tilerec.compat.standins.name_table import Home, other_numbers

_WITHOUT_EFFECT = re.compile(r"\b(?:no|without) effect\b|\bis ignored\b")
_SHOWN = 12


class Report:
    """What happened in a program that runs on stand-ins.

    Attributes:
        names: (module, name) -> the object's place in tilerec.
        ignored: warning about settings without effect -> number of times.
        operators: operators of FBGEMM that were called.
    """

    def __init__(self) -> None:
        self.names: dict[tuple[str, str], Home] = {}
        self.ignored: Counter[str] = Counter()
        self.operators: Counter[str] = Counter()
        self._show: Callable[..., None] | None = None

    def add_name(self, module: str, name: str, home: Home) -> None:
        """Record the first use of a name."""
        self.names[module, name] = home

    def watch_warnings(self) -> None:
        """Record warnings about settings without effect, in addition to showing them."""
        self._show = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if _WITHOUT_EFFECT.search(str(message)):
                self.ignored[str(message)] += 1
            assert self._show is not None
            self._show(message, category, *place, **more)

        warnings.showwarning = show

    def stop_watching(self) -> None:
        """Show warnings as before `watch_warnings`."""
        if self._show is not None:
            warnings.showwarning, self._show = self._show, None

    def lines(self) -> list[str]:
        """Return the report; [] if the program used no stand-in."""
        if not self.names and not self.operators:
            return []
        out = [f"tilerec.compat.torchrec: substituted by tilerec: {len(self.names)} names"]
        by_module: dict[str, list[str]] = {}
        for module, name in self.names:
            by_module.setdefault(module, []).append(name)
        out += [f"  {module}: {', '.join(sorted(names))}" for module, names in sorted(by_module.items())]
        if self.operators:
            calls = ", ".join(f"{name} ({count})" for name, count in sorted(self.operators.items()))
            out.append(f"  torch.ops.fbgemm, calls: {calls}")
        out.append(f"ignored (no effect): {len(self.ignored) or 'nothing'}")
        out += [f"  {text}" for text in list(self.ignored)[:_SHOWN]]
        if len(self.ignored) > _SHOWN:
            out.append(f"  ... and {len(self.ignored) - _SHOWN} more")
        used = {name for _, name in self.names}
        notes = [f"  {name}: {how}" for name, how in other_numbers().items() if name in used]
        return [*out, f"numbers that differ from TorchRec's: {len(notes) or 'none known'}", *notes]

    def print(self, stream: TextIO) -> None:
        """Print the report."""
        for line in self.lines():
            print(line, file=stream)
