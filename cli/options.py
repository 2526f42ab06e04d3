"""Options and argument types that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from hsfmt.digests import is_digest

F = TypeVar("F", bound=Callable[..., Any])


class LocalFile(click.Path):
    """The path of a file on this machine."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse a URL, which as a path would be a folder named after its scheme."""
        if "://" in str(value):
            self.fail("a URL; it is written to a local file", param, ctx)
        return super().convert(value, param, ctx)


_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power, _letter: 1024**_power}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)")
_A_FINGERPRINT = "a fingerprint like xxh3_128:<32 hex digits>, as hsfmt info shows it"


def layer_ids(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Return layer ids given as 2,4,5,8: the callback of such options."""
    if value is None:
        return None
    words = [word.strip() for word in value.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise click.BadParameter(f"{value!r} is not a list of layer ids like 2,4,5,8", ctx, param)
    return tuple(map(int, words))


def size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Return bytes given as 32GiB, 500MB or 1048576: the callback of such options."""
    match = _SIZE.fullmatch(value.strip().lower())
    n = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if n < 1:
        raise click.BadParameter(f"{value!r} is not a size like 32GiB, 500MB or 1048576", ctx, param)
    return n


def fingerprint(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Return a snapshot's fingerprint, or live: the callback of such options."""
    if value is None or value == "live" or is_digest(value):
        return value
    raise click.BadParameter(f"{value!r} is neither live nor {_A_FINGERPRINT}", ctx, param)


def stored_fingerprint(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Return a snapshot's fingerprint, or live for the command to refuse, as it knows what to do instead."""
    if value is None or value == "live" or is_digest(value):
        return value
    raise click.BadParameter(f"{value!r} is not {_A_FINGERPRINT}", ctx, param)


def json_option(function: F) -> F:
    """Add --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")(function)


def quiet_option(function: F) -> F:
    """Add --quiet."""
    return click.option("-q", "--quiet", is_flag=True, help="No progress.")(function)


def workers_option(text: str) -> Callable[[F], F]:
    """Add --workers."""
    return click.option("--workers", type=click.IntRange(1, 1024), default=1, show_default=True, metavar="N", help=text)


def snapshot_option(function: F) -> F:
    """Add --snapshot."""
    text = "A snapshot's fingerprint, or `live` for all that is committed. [default: the sealed one, else live]"
    return click.option("--snapshot", metavar="FINGERPRINT", callback=fingerprint, help=text)(function)
