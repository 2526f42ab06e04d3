"""Commands in messages, made to work as they stand: `--map` by itself means `pt`, not the source that was found."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from hsfmt.errors import SourceError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAP = re.compile(r"(?P<named>--from \S+ )?--map (?P<role>ROLE=|(?=[A-Za-z_]+=))")
# The others know their keys, and let the user only leave some out.
_TAKE_ROLES = frozenset({"pt", "safetensors", "npz", "transformers"})


def with_source(text: str, name: str) -> str:
    """Put the source before each `--map` of a text.

    >>> with_source("leave it out with --map ignore=x, or name it with --map ROLE=x", "eagle-ge")
    'leave it out with --from eagle-ge --map ignore=x, or name it with --from pt --map ROLE=x'
    """

    def put(match: re.Match[str]) -> str:
        if match["named"]:
            return match[0]
        return f"--from {name if not match['role'] or name in _TAKE_ROLES else 'pt'} {match[0]}"

    return _MAP.sub(put, text)


@contextmanager
def naming_source(name: str) -> Iterator[None]:
    """Put the source into the remedies of what is raised inside."""
    try:
        yield
    except (SourceError, UsageError) as error:
        problems = tuple(replace(problem, remedy=with_source(problem.remedy, name)) for problem in error.problems)
        if problems == error.problems:
            raise
        raise type(error)(problems) from error
