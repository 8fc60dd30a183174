"""Write the pages of the site to build/site/pages: those of docs/, and references made from the code.

python scripts/docs_site.py               # write the pages
python scripts/docs_site.py --check       # list public names without a docstring, and pages outside of mkdocs.yml's nav

`make docs` runs both, then mkdocs. References: one API page per package, the command line, the settings of a run file.
Links from docs/ to files of the repository become plain text, because these files are not part of the site.
"""

from __future__ import annotations

import ast
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import typer.main

sys.path.insert(0, str(Path(__file__).resolve().parent))

import run_file_reference

from tilerec.cli import app

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, DOCS, PAGES = ROOT / "tilerec", ROOT / "docs", ROOT / "build" / "site" / "pages"
NOTEBOOKS = ROOT / "examples" / "notebooks"
CONFIG = ROOT / "mkdocs.yml"


def write_pages(pages: Path = PAGES) -> None:
    """Write all pages; a folder of an earlier run is replaced."""
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(DOCS, pages)
    for page in pages.glob("*.md"):
        page.write_text(with_titles(without_outside_links(page.read_text())))
    shutil.copytree(NOTEBOOKS, pages / "notebooks")
    made = pages / "reference" / "api"
    made.mkdir(parents=True)
    (made.parent / "cli.md").write_text(command_reference())
    (made.parent / "settings.md").write_text(
        "# Settings\n\nEvery setting of a run file, from the dataclasses that read it. "
        "[Training on your own data](../training.md) explains run files.\n\n"
        + run_file_reference.reference().replace("\n### ", "\n## ")
    )
    found = public_names()
    homes = {path: package for package in sorted(found, reverse=True) for path in found[package].values()}
    homes |= {path: package for package in found if package != "tilerec" for path in found[package].values()}
    for package, names in found.items():
        (made / f"{package}.md").write_text(api_page(package, names, homes))


def without_outside_links(text: str) -> str:
    """Replace links to files outside of docs/ by their text."""
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", text)


def with_titles(text: str) -> str:
    """Replace file names by titles in links such as [sharding.md](sharding.md#on-the-wire)."""

    def titled(link: re.Match[str]) -> str:
        page = DOCS / link[1]
        title = page.read_text().splitlines()[0].lstrip("# ") if page.exists() else link[1]
        return f"[{title}]({link[1]}{link[2] or ''})"

    return re.sub(r"\[([\w-]+\.md)\]\(\1(#[^)]*)?\)", titled, text)


# ----------------------------------------------------------------------------------------------------------- API


def public_names() -> dict[str, dict[str, str]]:
    """Return the full path of each public name, by package: "tilerec" and its packages with names."""
    found: dict[str, dict[str, str]] = {}
    for door in sorted(PACKAGE.rglob("__init__.py")):
        package = ".".join(door.parent.relative_to(ROOT).parts)
        names = dict(_names(ast.parse(door.read_text())))
        if names and not any(part.startswith("_") for part in package.split(".")):
            found[package] = dict(sorted(names.items(), key=lambda item: item[0].lower()))
    return found


def _names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the names that a door lists, `from module import name as name` or in `__all__`, with their paths."""
    listed = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tilerec"):
            for alias in node.names:
                name = alias.asname or alias.name
                if not name.startswith("_") and (alias.asname == alias.name or any(name in each for each in listed)):
                    yield name, f"{node.module}.{alias.name}"


def undocumented(names: dict[str, dict[str, str]]) -> list[str]:
    """Return the public classes and functions that have no docstring."""
    missing = set()
    for path in {path for each in names.values() for path in each.values()}:
        module, _, name = path.rpartition(".")
        file = ROOT / f"{module.replace('.', '/')}.py"
        if not file.exists():
            continue  # a module
        for node in ast.parse(file.read_text()).body:
            named = isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name
            if named and not ast.get_docstring(node):  # type: ignore[arg-type]
                missing.add(path)
    return sorted(missing)


def api_page(package: str, names: dict[str, str], homes: dict[str, str]) -> str:
    """Return the page of a package; a name that has its home on another page is a link to it."""
    about = ast.get_docstring(ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text())) or ""
    links = [f"- [`{name}`][{path}]" for name, path in names.items() if homes[path] != package]
    entries = [f"::: {path}\n" for path in names.values() if homes[path] == package]
    return "\n".join([f"# {package}", "", about.splitlines()[0] if about else "", "", *links, "", *entries])


# --------------------------------------------------------------------------------------------------------- commands


def command_reference() -> str:
    """Return the page of the command line, from the commands themselves."""
    lines = [
        "# Command line",
        "",
        "Every command with its arguments and options. `tilerec COMMAND --help` prints the same.",
    ]
    return "\n".join([*lines, *_command("tilerec", typer.main.get_command(app))]) + "\n"


def _command(path: str, command: click.Command) -> Iterator[str]:
    yield from ("", f"## `{path}`", "", (command.help or "").strip(), "")
    rows = [_parameter(parameter) for parameter in command.params]
    if rows:
        yield from ("| argument or option | default | meaning |", "|---|---|---|", *rows)
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from _command(f"{path} {name}", inner)


def _parameter(parameter: click.Parameter) -> str:
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    if not parameter.name or parameter.param_type_name == "argument":
        names = f"`{(parameter.metavar or parameter.name or '').upper()}`"
    default = "required" if parameter.required else _default(parameter)
    meaning = " ".join((getattr(parameter, "help", "") or "").split()).replace("|", "\\|").replace("<", "&lt;")
    return f"| {names} | {default} | {meaning} |"


def _default(parameter: click.Parameter) -> str:
    value = parameter.default
    return "" if value is None or value is False or callable(value) or value == [] else f"`{value}`"


# ----------------------------------------------------------------------------------------------------------- checks


def unlisted_pages() -> list[str]:
    """Return the pages of docs/ that mkdocs.yml does not list, and listed pages that do not exist."""
    listed = set(re.findall(r"^ +- (?:\w+: )?(\S+\.md)$", CONFIG.read_text(), re.MULTILINE))
    made = {"reference/cli.md", "reference/settings.md", *(f"reference/api/{package}.md" for package in public_names())}
    return sorted(listed ^ (made | {page.name for page in DOCS.glob("*.md")}))


def main() -> int:
    """Write or check the pages; return 1 if a check fails."""
    if "--check" not in sys.argv[1:]:
        write_pages()
        print(f"pages in {PAGES.relative_to(ROOT)}")
        return 0
    problems = [f"{path}: no docstring" for path in undocumented(public_names())]
    problems += [f"{page}: not both in docs/ and in the nav of mkdocs.yml" for page in unlisted_pages()]
    print("\n".join(problems) or "every public name has a docstring, every page is listed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
