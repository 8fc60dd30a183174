"""`port`: a program's imports of TorchRec rewritten to tilerec's.

    from torchrec.modules.mlp import MLP, Perceptron       ->  from tilerec.modules import MLP, Perceptron
    import torchrec.distributed as trec; trec.ShardingEnv  ->  from tilerec.parallel import ShardingEnv; ShardingEnv
    from torchrec.distributed.dist_data import X           stays, and is listed with the reason

A name that tilerec has only in `tilerec.compat` is imported from there, and listed.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from types import FunctionType

from tilerec.compat.standins.name_table import ROOTS, Home, names_of, other_numbers, reason_of_absence
from tilerec.errors import InputError

_PUBLIC = ("tilerec", *(f"tilerec.{name}" for name in (
    "planner", "parallel", "modules", "optim", "sparse", "data", "metrics", "models", "pipelines",
)))  # fmt: skip
"""Packages whose public names replace classes that only extend them."""

_PARTS = ("keys", "values", "lengths", "weights", "offsets")
_PRIVATE = {"_plan": "plan", **{f"_{name}": f"{name}()" for name in _PARTS}}
"""Private attributes of TorchRec's objects that programs read -> the public ones of tilerec's."""

_TORCH_ATTACH = "torch.distributed.optim", "_apply_optimizer_in_backward"


@dataclass
class Ported:
    """A rewritten program.

    Attributes:
        text: its source.
        notes: (line of the original, what a person must look at).
    """

    text: str
    notes: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True)
class _Edit:
    """A replacement of the text from `begin` to `end`, byte positions in UTF-8."""

    begin: int
    end: int
    text: str


def port(source: str, name: str = "program") -> Ported:
    """Rewrite a program.

    Args:
        source: its text.
        name: its name, for errors.

    Raises:
        InputError: the text is not Python.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise InputError(f"{name}: line {error.lineno}: {error.msg}; expected Python. Correct the line.") from error
    return _Port(source, tree).result()


class _Port:
    def __init__(self, source: str, tree: ast.Module) -> None:
        self._bytes, self._tree = source.encode(), tree
        self._starts = [0]
        for line in self._bytes.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._notes: list[tuple[int, str]] = []
        self._edits: list[_Edit] = []
        self._local_modules: dict[str, str] = {}  # local name -> module of TorchRec
        self._added: dict[str, set[str]] = {}  # module of tilerec -> names used through a module
        self._anchor: ast.stmt | None = None
        self._replaced: Counter[str] = Counter()  # local name of a module -> uses that were replaced

    def result(self) -> Ported:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ImportFrom):
                self._from(node)
            elif isinstance(node, ast.Import):
                self._import(node)
        parents = {id(child): node for node in ast.walk(self._tree) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(self._tree):
            if not isinstance(node, ast.Attribute):
                continue
            if node.attr in _PRIVATE and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                self._note(node, f"{node.attr}: private to TorchRec's objects; tilerec's have {_PRIVATE[node.attr]}")
            if not isinstance(parents.get(id(node)), ast.Attribute):
                self._chain(node)
        self._remove_unused()
        if self._anchor is not None and self._added:
            at, _ = self._span(self._anchor)
            lines = "".join(f"from {m} import {', '.join(sorted(n))}\n" for m, n in sorted(self._added.items()))
            self._edits.append(_Edit(at, at, lines))
        out = self._bytes
        for edit in sorted(self._edits, key=lambda edit: (edit.begin, edit.end), reverse=True):
            out = out[: edit.begin] + edit.text.encode() + out[edit.end :]
        return Ported(out.decode(), sorted(set(self._notes)))

    def _remove_unused(self) -> None:
        """Remove imports of modules whose uses have all been replaced; list the others."""
        uses = Counter(node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name))
        for node in ast.walk(self._tree):
            if not isinstance(node, ast.Import):
                continue
            left = []
            for alias in node.names:
                local = alias.asname or alias.name.partition(".")[0]
                if local not in self._local_modules:
                    left.append(alias)
                elif uses[local] > self._replaced[local]:
                    left.append(alias)
                    self._note(node, f"import {alias.name}: still used")
            if len(left) < len(node.names):
                begin, end = self._span(node)
                shown = ", ".join(alias.name + (f" as {alias.asname}" if alias.asname else "") for alias in left)
                end += not left and self._bytes[end : end + 1] == b"\n" and node.col_offset == 0
                self._edits.append(
                    _Edit(begin, end, f"import {shown}" if left else "" if node.col_offset == 0 else "pass")
                )

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, (ast.stmt, ast.expr))
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = self._starts[node.lineno - 1] + node.col_offset
        return begin, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _note(self, node: ast.stmt | ast.expr, text: str) -> None:
        self._notes.append((node.lineno, text))

    def _from(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level or (module.partition(".")[0] not in ROOTS and module != _TORCH_ATTACH[0]):
            return
        by_home: dict[str, list[str]] = {}
        kept: list[str] = []
        for alias in node.names:
            shown = alias.name + (f" as {alias.asname}" if alias.asname else "")
            if (module, alias.name) == _TORCH_ATTACH:
                name = "apply_optimizer_in_backward"
                local = alias.asname or alias.name
                by_home.setdefault("tilerec.optim", []).append(name if local == name else f"{name} as {local}")
                continue
            home = names_of().get(module, {}).get(alias.name) if module.partition(".")[0] in ROOTS else None
            if home is None:
                kept.append(shown)
                self._unknown(node, module, alias)
                continue
            place, own = self._native(node, alias.name, home)
            local = alias.asname or alias.name
            by_home.setdefault(place, []).append(own if own == local else f"{own} as {local}")
        if not by_home:
            return
        indent = " " * node.col_offset
        lines = [f"from {place} import {', '.join(names)}" for place, names in sorted(by_home.items())]
        lines += [f"from {module} import {', '.join(kept)}"] if kept else []
        begin, end = self._span(node)
        self._edits.append(_Edit(begin, end, f"\n{indent}".join(lines)))

    def _unknown(self, node: ast.stmt, module: str, alias: ast.alias) -> None:
        if module == _TORCH_ATTACH[0]:
            return
        if f"{module}.{alias.name}" in names_of():
            self._local_modules[alias.asname or alias.name] = f"{module}.{alias.name}"
            self._anchor = self._anchor or node
            self._note(node, f"from {module} import {alias.name}: a module; remove the line if nothing else uses it")
        elif alias.name == "*":
            self._note(node, f"from {module} import *: name what the program uses")
        else:
            self._note(node, reason_of_absence(module, alias.name))

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            root = alias.name.partition(".")[0]
            if root in ROOTS:
                self._local_modules[alias.asname or root] = alias.name if alias.asname else root
                self._anchor = self._anchor or node

    def _chain(self, node: ast.Attribute) -> None:
        """Replace `module.Name`, with the path of a module of TorchRec, by `Name`."""
        parts: list[ast.Attribute] = []
        base: ast.expr = node
        while isinstance(base, ast.Attribute):
            parts.append(base)
            base = base.value
        if not isinstance(base, ast.Name):
            return
        names = [base.id, *(part.attr for part in reversed(parts))]
        if names[:3] == ["torch", "ops", "fbgemm"]:
            self._note(
                node,
                f"{'.'.join(names)}: an operator of FBGEMM; import tilerec.compat.torchrec first, or use "
                "tilerec.ops.jagged.definition",
            )
            return
        module = self._local_modules.get(base.id)
        if module is None:
            return
        for part in reversed(parts):
            deeper = f"{module}.{part.attr}"
            home = names_of()[module].get(part.attr)
            if home is not None:
                place, own = self._native(node, part.attr, home)
                self._added.setdefault(place, set()).add(own if own == part.attr else f"{own} as {part.attr}")
                begin, end = self._span(part)
                self._edits.append(_Edit(begin, end, part.attr))
                self._replaced[base.id] += 1
                return
            if deeper not in names_of():
                self._note(node, reason_of_absence(module, part.attr))
                return
            module = deeper

    def _native(self, node: ast.stmt | ast.expr, name: str, home: Home) -> tuple[str, str]:
        """Return module and name of an object: the public class that a class of `compat` extends, if it does."""
        if name in other_numbers():
            self._note(node, f"{name}: {other_numbers()[name]}")
        if not home.module.startswith("tilerec.compat"):
            return home.module, home.attribute
        found = home.load()
        for base in found.__mro__[1:] if isinstance(found, type) else ():
            for place in _places(base):
                self._note(node, f"{name}: {place}.{base.__name__} has fewer of TorchRec's methods than {home}")
                return place, base.__name__
        if isinstance(found, FunctionType):
            for place in filter(lambda module: hasattr(import_module(module), name), _PUBLIC):
                return place, name
        self._note(node, f"{name}: only in {home.module}")
        return home.module, home.attribute


def _places(kind: type) -> Iterator[str]:
    """Yield the public packages that have a class under its name."""
    for module in _PUBLIC:
        if kind.__module__.startswith("tilerec.") and getattr(import_module(module), kind.__name__, None) is kind:
            yield module
