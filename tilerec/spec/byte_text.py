"""Numbers of bytes as text: "80GB", "2GiB", "4096"."""

from __future__ import annotations

from tilerec.errors import ConfigError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip


def bytes_of(option: str, text: str) -> int:
    """Return the bytes that a text stands for; raise a `ConfigError` that names the option. Example: "2KiB" -> 2048."""
    word = text.strip().lower().replace(" ", "")
    number = word.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = word[len(number) :]
    try:
        value = float(number) * _UNITS[unit]
        if not 0 <= value < 2**62:
            raise ValueError
    except (KeyError, ValueError):
        raise ConfigError(f"{option}: got {text!r}; expected a number of bytes. Write 80GB, 79GiB, or bytes.") from None
    return int(value)


def byte_text(count: int) -> str:
    """Return a number of bytes with three digits and its unit. Example: 70400000 -> "67.1 MiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count} B"
