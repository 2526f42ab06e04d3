"""An object's bytes in order, for copies: some ranges ahead of whoever takes them, and no more of it in memory.

Spec: none; this is how, not what.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

from hsfmt.digests import FileHasher
from hsfmt.errors import CorruptionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hsfmt.storage.base import Arrivals, BytesLike, Store

BLOCK_NBYTES = 4 << 20
WINDOW_NBYTES = 4 * BLOCK_NBYTES
MOST_HELD_NBYTES = 2 * WINDOW_NBYTES
"""What a copy holds of its source at most."""


def blocks_in_order(source: Store, path: str, nbytes: int) -> Iterator[BytesLike]:
    """Yield the first `nbytes` bytes of an object; while one window is taken, the next one is on its way.

    Raises
    ------
    NotFoundError, CorruptionError
        As `Store.read_into`.
    """
    windows = [_window(path, start, nbytes) for start in range(0, nbytes, WINDOW_NBYTES)]
    with ExitStack() as opened:
        arriving = [opened.enter_context(source.read_each(window)) for window in windows[:1]]
        for number, window in enumerate(windows):
            arriving += [opened.enter_context(source.read_each(each)) for each in windows[number + 1 : number + 2]]
            yield from _sorted(arriving.pop(0), len(window))


def _window(path: str, start: int, nbytes: int) -> list[tuple[str, int, int]]:
    stop = min(start + WINDOW_NBYTES, nbytes)
    return [(path, at, min(BLOCK_NBYTES, stop - at)) for at in range(start, stop, BLOCK_NBYTES)]


def _sorted(arrivals: Arrivals, n: int) -> Iterator[BytesLike]:
    early: dict[int, BytesLike] = {}
    following = 0
    with arrivals:
        for number, body in arrivals:
            early[number] = body
            del body
            while following in early:
                yield early.pop(following)
                following += 1
    assert following == n


def copy_object(
    source: Store, target: Store, path: str, nbytes: int, digest: str, advance: Callable[[int], None] | None
) -> None:
    """Copy an object to the same path of another store, comparing its digest on the way: see `Store.copy_from`."""
    size = source.size(path)
    if size is not None and size != nbytes:
        raise CorruptionError.at(f"{source.url}: {path}", expected=f"{nbytes} bytes", got=f"{size} bytes")
    hasher = FileHasher()
    with target.open_object(path) as file:
        for block in blocks_in_order(source, path, nbytes):
            hasher.update(memoryview(block))
            file.write(block)
            if advance is not None:
                advance(len(block))
        if hasher.digest() != digest:
            raise CorruptionError.at(f"{source.url}: {path}", expected=digest, got=hasher.digest())
        file.commit()
