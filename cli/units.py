"""Figures for people: bytes, counts, times, and aligned columns."""

from __future__ import annotations

from collections.abc import Iterable

_SIZES = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def nbytes(n: float) -> str:
    """Return a size as 924.0 GiB.

    >>> nbytes(992137445376), nbytes(512)
    ('924.0 GiB', '512 bytes')
    """
    unit = 0
    while abs(n) >= 1024 and unit < len(_SIZES) - 1:
        n, unit = n / 1024, unit + 1
    return f"{n:.1f} {_SIZES[unit]}" if unit else f"{int(n)} bytes"


def seconds(n: float) -> str:
    """Return a duration as 3 s, 2 min 5 s or 1 h 12 min."""
    whole = round(n)
    if whole < 60:
        return f"{n:.1f} s" if n < 10 else f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def counted(n: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun, in the singular or plural.

    >>> counted(1, "sample"), counted(17312345, "token")
    ('1 sample', '17,312,345 tokens')
    """
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def aligned(rows: Iterable[tuple[str, str]], indent: str = "") -> str:
    """Return lines of a name and a value, the values in one column; a value of several lines keeps to it."""
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0) + 2
    gap = "\n" + " " * (len(indent) + width)
    return "\n".join(f"{indent}{name:<{width}}{value.replace(chr(10), gap)}".rstrip() for name, value in rows)
