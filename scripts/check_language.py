"""List words that give a thing a person's voice, and fail if there are any.

    python scripts/check_language.py [PATH ...]     # default: tilerec, README.md and docs

Documentation uses the verbs of the field instead: returns, sends, raises, detects. In Python files the script checks
comments, strings and names, including parts of names that underscores separate. In Markdown it ignores quotations
("…", “…” and lines that begin with >).
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

BANNED = ("told", "says", "asked", "heard", "nobody", "somebody", "whoever", "whom", "news")
WORD = re.compile(rf"(?<![a-z])(?:{'|'.join(BANNED)})(?![a-z])", re.IGNORECASE)
QUOTED = re.compile(r"“[^”]*”|\"[^\"]*\"")
ROOTS = ("tilerec", "README.md", "docs")
TEXT = (tokenize.COMMENT, tokenize.STRING, tokenize.NAME)


def words_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the word for each banned word of a file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        for number, line in enumerate(text.splitlines(), 1):
            if not line.lstrip().startswith(">"):
                yield from ((number, found.group()) for found in WORD.finditer(QUOTED.sub("", line)))
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in TEXT:
            for found in WORD.finditer(token.string):
                yield token.start[0] + token.string.count("\n", 0, found.start()), found.group()


def files_of(paths: list[Path]) -> Iterator[Path]:
    """Yield the Python and Markdown files among paths and in folders."""
    for path in paths:
        inside = (each for each in path.rglob("*") if each.suffix in (".py", ".md"))
        yield from sorted(inside) if path.is_dir() else [path]


def main() -> int:
    """Print each banned word with its file and line; return 1 if there is one."""
    root = Path(__file__).resolve().parent.parent
    paths = [Path(given) for given in sys.argv[1:]] or [root / name for name in ROOTS]
    count = 0
    for path in files_of(paths):
        for line, word in words_of(path):
            print(f"{path}:{line}: {word}")
            count += 1
    print(f"{count} words of {', '.join(BANNED)}")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
