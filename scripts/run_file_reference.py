"""Write the reference of the run file in docs/training.md, from the dataclasses and their docstrings.

python scripts/run_file_reference.py            # print the reference
python scripts/run_file_reference.py --write    # replace it in the page
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from tilerec.spec.optimizer import OptimizerSpec
from tilerec.train.config import DataConfig, ModelConfig, RunConfig, TaskConfig
from tilerec.train.kinds import class_of_kind, has_kinds, kind_of, kinds_of
from tilerec.train.values import hints_of, is_required, record_fields, type_name

PAGE = Path(__file__).resolve().parent.parent / "docs" / "training.md"
BEGIN, END = "<!-- reference: begin -->", "<!-- reference: end -->"


def reference() -> str:
    """Return the tables of all settings as Markdown."""
    return "\n".join(_tables()).strip() + "\n"


def _tables() -> Iterator[str]:
    yield from _table("The file itself", RunConfig, "")
    for title, base, place in (
        ("Data", DataConfig, "data"),
        ("Models", ModelConfig, "model"),
        ("Tasks", TaskConfig, "task"),
    ):
        for kind in kinds_of(base):
            cls = class_of_kind(base, kind, place)
            yield from _table(f'{title}: `[{place}]` with `kind = "{kind}"`', cls, place)
            yield from _inner(cls, place)
    for place in ("train", "parallel", "checkpoint"):
        yield from _table(f"`[{place}]`", hints_of(RunConfig)[place], place)
        yield from _inner(hints_of(RunConfig)[place], place)
    for kind in kinds_of(OptimizerSpec):
        cls = class_of_kind(OptimizerSpec, kind, "optimizer")
        yield from _table(f'Optimizers: `kind = "{kind}"`', cls, "optimizer")


def _inner(cls: type, place: str) -> Iterator[str]:
    """Yield the tables of the records inside of a record."""
    for name in record_fields(cls):
        hint = hints_of(cls)[name]
        inner = next(
            (one for one in (hint, *get_args(hint)) if isinstance(one, type) and dataclasses.is_dataclass(one)),
            None,
        )
        if inner is None or has_kinds(inner):
            continue
        full = f"{place}.{name}"
        header = f"`[[{full}]]`" if get_args(hint) else f"`[{full}]`"
        yield from _table(f"{header}", inner, full)
        yield from _inner(inner, full)


def _table(title: str, cls: type, place: str) -> Iterator[str]:
    described = descriptions(cls)
    yield from ("", f"### {title}", "", "| setting | type | default | meaning |", "|---|---|---|---|")
    for name, item in record_fields(cls).items():
        hint = hints_of(cls)[name]
        default = "required" if is_required(item) else f"`{_shown(item)}`"
        plain = isinstance(hint, type) and dataclasses.is_dataclass(hint)
        if is_required(item) and plain and not any(map(is_required, record_fields(hint).values())):
            default = "its defaults"
        text = described.get(name, "").replace("|", "\\|")
        yield f"| `{name}` | {type_name(hint).replace('|', chr(92) + '|')} | {default} | {text} |"


def _shown(item: dataclasses.Field[Any]) -> str:
    value = _default(item)
    if isinstance(value, OptimizerSpec):
        return f"{type(value).__name__}(lr={value.lr})"
    if isinstance(value, TaskConfig):
        return f'kind = "{kind_of(value)}"'
    if dataclasses.is_dataclass(value):
        changed = {
            f.name: getattr(value, f.name) for f in dataclasses.fields(value) if getattr(value, f.name) != _default(f)
        }
        return ", ".join(f"{name} = {one}" for name, one in changed.items()) or "its defaults"
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "none"
    return str(list(value)) if isinstance(value, tuple) else '""' if value == "" else str(value)


def _default(item: dataclasses.Field[Any]) -> Any:
    """Return the default of a field; MISSING if it has none."""
    made = item.default_factory
    return item.default if made is dataclasses.MISSING else made()


def descriptions(cls: type) -> dict[str, str]:
    """Return the texts of a class's `Attributes:` (or `Fields of every optimizer:`), bases first, by field."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        text = inspect.cleandoc(base.__doc__ or "")
        section = re.search(r"^(?:Attributes|Fields of every optimizer):\n((?:[ ]{4}.*\n?|\n)*)", text, re.MULTILINE)
        for part in re.split(r"\n(?= {4}\S)", "\n" + section.group(1)) if section else []:
            head, colon, rest = part.strip().partition(":")
            if colon:
                for name in head.split(","):
                    found[name.strip()] = " ".join(rest.split())
    if issubclass(cls, OptimizerSpec):
        own = re.findall(r"^ {0,4}(\w+): (.+)$", inspect.cleandoc(cls.__doc__ or ""), re.MULTILINE)
        found.update({name: text for name, text in own if name in record_fields(cls)})
    return found


def replaced(page: str) -> str:
    """Return a page with the reference between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{reference()}\n{END}{after}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(reference())
