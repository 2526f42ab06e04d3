"""Names of files made of sample ids, which are any text: never a path, never hidden, short, and no two alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from urllib.parse import quote

import xxhash

MAX_STEM = 200
_EMPTY = "%"  # which no escaped text is


def file_stem(sample_id: str) -> str:
    """Return a sample's id as a file name without suffix: ASCII, at most 200 bytes, no path and nothing hidden.

    Different ids have different stems, which may differ by case alone: `file_stems` sees to that.

    >>> file_stem("../etc/passwd"), file_stem("chat 7/é")
    ('%2E.%2Fetc%2Fpasswd', 'chat%207%2F%C3%A9')
    >>> file_stem(""), file_stem("."), len(file_stem("x" * 1000))
    ('%', '%2E', 200)
    """
    stem = quote(sample_id, safe="", errors="surrogatepass") or _EMPTY
    if stem.startswith("."):
        stem = "%2E" + stem[1:]
    # Two long ids that begin alike keep apart.
    return stem if len(stem) <= MAX_STEM else _hashed(stem, sample_id)


def file_stems(sample_ids: Sequence[str]) -> list[str]:
    """Return the stems of samples, no two of which differ by case alone: some file systems take such names for one.

    >>> file_stems(["a", "b", "A"])
    ['a-a96faf705af16834e6c632b61e964e1f', 'b', 'A-9b0498cbe3839becd0d496e05c553485']
    """
    stems = [file_stem(sample_id) for sample_id in sample_ids]
    seen = Counter(map(str.lower, stems))
    if len(seen) == len(stems):
        return stems
    stems = [
        stem if seen[stem.lower()] == 1 else _hashed(stem, sample_id)
        for stem, sample_id in zip(stems, sample_ids, strict=True)
    ]
    if len(set(map(str.lower, stems))) < len(stems):
        # An id that looks like another's name with its hash; then all are told apart by hash.
        stems = [_hashed(stem, sample_id) for stem, sample_id in zip(stems, sample_ids, strict=True)]
    return stems


def _hashed(stem: str, sample_id: str) -> str:
    digest = xxhash.xxh3_128_hexdigest(sample_id.encode("utf-8", "surrogatepass"))
    return f"{stem[: MAX_STEM - 1 - len(digest)]}-{digest}"
