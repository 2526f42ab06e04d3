"""Holes in the numbers of files that a program counts: a sample that was never written leaves no other trace."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_ROWS = r"rows_(?P<first>[0-9]{1,12})-[0-9]{1,12}"
_NUMBERED = re.compile(rf"(?P<run>(?:.*?/)??)(?P<rows>{_ROWS}/)?data_(?P<number>[0-9]{{1,12}})\..*", re.DOTALL)
_SHOWN = 10


def numbering_notes(paths: Iterable[str], folder: str) -> list[str]:
    """Say which numbers of `data_{i}` have no file, a line for each run of numbers.

    A run is a folder, or all folders `rows_{a}-{b}` in one, whose numbers go on from one to the next.

    Parameters
    ----------
    paths
        Of the files, below the folder.
    folder
        Name of the folder, which may be one `rows_{a}-{b}` of several.
    """
    rows = re.fullmatch(_ROWS, folder)
    begin = int(rows["first"]) if rows else 0
    runs: dict[str, set[int]] = {}
    firsts: dict[str, int] = {}
    for path in paths:
        match = _NUMBERED.fullmatch(path)
        if match is None:
            continue
        run, number = match["run"], int(match["number"])
        runs.setdefault(run, set()).add(number)
        first = int(match["first"]) if match["rows"] else begin
        firsts[run] = min(firsts.get(run, first), first)
    notes = []
    for run, numbers in runs.items():
        where = f" in {run.rstrip('/')}" if run else ""
        n_missing, shown = _missing(numbers, firsts[run])
        if n_missing:
            more = " …" if n_missing > len(shown) else ""
            missing = ", ".join(f"data_{number}" for number in shown) + more
            notes.append(f"the numbers of the files{where} have holes, {n_missing} without a file: no {missing}")
    return notes


def _missing(numbers: set[int], first: int) -> tuple[int, list[int]]:
    """How many numbers from `first` on are missing, and the first of them; without a list of them all."""
    shown: list[int] = []
    count, expected = 0, first
    for number in sorted(numbers):
        if number > expected:
            count += number - expected
            shown.extend(range(expected, min(number, expected + _SHOWN - len(shown))))
        expected = max(expected, number + 1)
    return count, shown
