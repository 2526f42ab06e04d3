"""What a folder mixes: how many of its files have which dtype, layers and width, when one does not go with the rest."""

from __future__ import annotations

from contextlib import suppress

from hsfmt.cli import units
from hsfmt.errors import HsfmtError
from hsfmt.readers.sources import Source

# A look reads a file's head; more of them than this would take too long for a message.
_MAX_FILES = 2000


def survey(source: Source) -> list[str]:
    """Return a line on each kind of files if there is more than one, with their number and the first one's name."""
    kinds: dict[str, list[str]] = {}
    shapes = set()
    for item in source.items[:_MAX_FILES]:
        with suppress(HsfmtError):  # a damaged file is of no kind
            meaning = source.look(item)
            shapes.add((meaning.n_layers, meaning.hidden_size, meaning.scaling is None))
            layers = units.counted(meaning.n_layers, "layer")
            kinds.setdefault(f"{layers} of width {meaning.hidden_size}, {meaning.dtype}", []).append(item.key)
    if len(kinds) < 2:
        return []
    share = f" (of the first {_MAX_FILES:,} files)" if len(source.items) > _MAX_FILES else ""
    lines = [
        f"the folder mixes kinds{share}: {units.counted(len(keys), 'file')} with {kind}, {keys[0]} the first"
        for kind, keys in kinds.items()
    ]
    if len(shapes) == 1:
        lines.append("they differ in nothing but their dtype: --cast DTYPE makes one of them, and records it")
    return lines
