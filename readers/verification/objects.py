"""Reading objects for verification: bounded, and twice before anything is called corrupt.

Spec: rule VFY-4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import xxhash

from hsfmt.errors import HsfmtError, NotFoundError
from hsfmt.readers.verification.report import Findings
from hsfmt.storage import Store

BLOCK_NBYTES = 8 << 20

_T = TypeVar("_T")


def read_twice(findings: Findings, path: str, fetch: Callable[[], _T], corrupt: str = "corrupt") -> _T | None:
    """Return what `fetch` returns, tried twice; None after a second failure, which is then a finding.

    Parameters
    ----------
    findings
        Where failures go; a second try that succeeds leaves a warning.
    path
        What is read.
    fetch
        Reads and checks; raises an error of this package.
    corrupt
        Code of the finding where the bytes are not the right ones.
    """
    try:
        return fetch()
    except NotFoundError as error:
        findings.raised(error, path)
        return None
    except HsfmtError as error:
        first = error
    try:
        result = fetch()
    except HsfmtError as error:
        findings.raised(error, path, corrupt)
        return None
    unstable(findings, path, str(first))
    return result


def unstable(findings: Findings, path: str, got: str) -> None:
    """Add the warning that a second read gave the right bytes."""
    findings.add("warning", "unstable_read", path, expected="the same bytes at every read", got=got)


def file_digest(store: Store, path: str, nbytes: int, advance: Callable[[int], None]) -> str:
    """Return the digest of the first `nbytes` bytes of an object, read in blocks.

    Parameters
    ----------
    store, path
        The object.
    nbytes
        Its size, as its manifest says and as it was found to be.
    advance
        Told the bytes of each block.

    Raises
    ------
    NotFoundError, StorageError, CorruptionError
        Missing, unreadable or shorter.
    """
    state = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(nbytes, BLOCK_NBYTES)))
    for offset in range(0, nbytes, BLOCK_NBYTES):
        block = buffer[: min(BLOCK_NBYTES, nbytes - offset)]
        store.read_into(path, offset, block)
        state.update(block)
        advance(len(block))
    return f"xxh3_128:{state.hexdigest()}"
