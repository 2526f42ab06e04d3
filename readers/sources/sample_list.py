"""`hsfmt_samples.jsonl`: the ids of a folder that `hsfmt export` wrote in a format which only numbers its samples.

A JSON object a line, `id` and `n_tokens`, the line's number being that of the sample. It lies at the top of the folder.
It is held against the folder: ids that belong to other files would be worse than none.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from hsfmt.errors import Problem, SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hsfmt.readers.sources.base import SourceItem

SAMPLE_LIST = "hsfmt_samples.jsonl"
ROLE = "sample ids"
_LINE_NBYTES = 64 << 10
_REMEDY = f"export the dataset again; or move {SAMPLE_LIST} away, and the samples get the ids that their files give"


def read_sample_list(root: Path) -> list[tuple[str, int]]:
    """Return (id, tokens) of each sample, by number.

    Raises
    ------
    SourceError
        A line is something else, or an id is there twice.
    OSError
        The file can't be read.
    """
    listed: list[tuple[str, int]] = []
    known: set[str] = set()
    with (root / SAMPLE_LIST).open("rb") as file:
        while line := file.readline(_LINE_NBYTES):
            where = f"{SAMPLE_LIST}:{len(listed) + 1}"
            try:
                entry = json.loads(line) if line.endswith(b"\n") else None
            except (ValueError, RecursionError):
                entry = None
            if not isinstance(entry, dict) or set(entry) != {"id", "n_tokens"}:
                raise _refuse(where, "a line with id and n_tokens, as hsfmt writes it", repr(line)[:100])
            sample_id, n_tokens = entry["id"], entry["n_tokens"]
            if not isinstance(sample_id, str) or not sample_id or type(n_tokens) is not int or n_tokens < 1:
                raise _refuse(where, "a text as id, and a number of tokens", repr(line)[:100])
            if sample_id in known:
                raise _refuse(where, "an id of its own", f"{sample_id[:100]!r} a second time")
            known.add(sample_id)
            listed.append((sample_id, n_tokens))
    return listed


def with_listed_ids(
    items: Sequence[SourceItem],
    listed: Sequence[tuple[str, int]],
    number: Callable[[SourceItem], int | None],
    n_samples: int | None,
) -> tuple[list[SourceItem], dict[str, int]]:
    """Give the items the ids that are listed; return them, and the tokens that each has to have by key.

    Parameters
    ----------
    number
        The number of an item's sample, None where it can't be one of an export.
    n_samples
        How many samples the format says there are; None where only the files say it, of which some may be gone.

    Raises
    ------
    SourceError
        The list is that of another folder.
    """
    if n_samples is not None and n_samples != len(listed):
        raise _refuse(SAMPLE_LIST, f"a line for each of the {n_samples} samples", f"{len(listed)} lines")
    named: list[SourceItem] = []
    n_tokens: dict[str, int] = {}
    taken: dict[int, str] = {}
    for item in items:
        place = number(item)
        if place is None or not 0 <= place < len(listed) or taken.setdefault(place, item.key) != item.key:
            got = f"{item.key}, which has none"
            if place is not None and place in taken:
                got = f"{taken[place]} and {item.key} for one"
            raise _refuse(SAMPLE_LIST, f"{len(listed)} lines, one for each sample of the folder", got)
        named.append(replace(item, sample_id=listed[place][0]))
        n_tokens[item.key] = listed[place][1]
    return named, n_tokens


def check_listed(n_tokens: int, listed: int | None, where: str) -> None:
    """Refuse a sample of another length than is listed.

    Raises
    ------
    SourceError
        It is another sample.
    """
    if listed is not None and n_tokens != listed:
        raise _refuse(where, f"{listed} tokens, as {SAMPLE_LIST} says", str(n_tokens))


def _refuse(where: str, expected: str, got: str) -> SourceError:
    return SourceError([Problem(where, expected, got, _REMEDY)])
