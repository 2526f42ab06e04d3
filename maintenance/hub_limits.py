"""How many files the Hugging Face Hub takes, counted before the first one is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from hsfmt.errors import UsageError

MAX_FILES = 100_000
MAX_ENTRIES_OF_A_FOLDER = 10_000
_WARNED_SHARE = 0.8
_MANY_COMMITS = 100
_REMEDY = "`hsfmt compact` makes few parts of many; or write larger parts and shards (part_nbytes, shard_tokens)"


def check_hub_limits(url: str, paths: Collection[str]) -> list[str]:
    """Return warnings where a destination on the Hub will come near its limits; others have none.

    Parameters
    ----------
    url
        Of the destination.
    paths
        Of all objects that it will have.

    Raises
    ------
    UsageError
        It would have more files than the Hub takes, or more in one folder.
    """
    if not url.startswith("hf://"):
        return []
    entries: Counter[str] = Counter()
    folders: set[str] = set()
    for path in paths:
        name = path
        while name:
            folder = name.rpartition("/")[0]
            entries[folder] += 1
            if not folder or folder in folders:
                break
            folders.add(folder)
            name = folder
    fullest = max(entries, key=lambda folder: (entries[folder], folder), default="")
    found = [
        ("files in a repository", len(paths), MAX_FILES),
        (f"entries in the folder {fullest or '/'}", entries[fullest], MAX_ENTRIES_OF_A_FOLDER),
    ]
    for what, n, limit in found:
        if n >= limit:
            expected = f"fewer than {limit:,} {what}, as the Hub recommends"
            raise UsageError.at(url, expected=expected, got=f"{n:,}", remedy=_REMEDY)
    warnings = [
        f"{n:,} {what}; the Hub recommends fewer than {limit:,}"
        for what, n, limit in found
        if n >= _WARNED_SHARE * limit
    ]
    if len(paths) >= _MANY_COMMITS:
        text = "each file becomes a commit of its own: `hf upload-large-folder` sends a local copy in fewer"
        warnings.append(f"{len(paths):,} files; {text}")
    return warnings
