"""Reading objects for verification: bounded, and twice before anything is called corrupt.

Spec: rule VFY-4.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import xxhash

from hsfmt.errors import AccessError, HsfmtError, NotFoundError
from hsfmt.readers.verification.report import Findings
from hsfmt.storage import Store

BLOCK_NBYTES = 8 << 20

_T = TypeVar("_T")


def read_twice(
    findings: Findings, path: str, fetch: Callable[[], _T], corrupt: str = "corrupt", store: Store | None = None
) -> _T | None:
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
    store
        If given, the second try is made past the page cache of this machine, where the system allows.
    """
    try:
        return fetch()
    except (NotFoundError, AccessError) as error:
        findings.raised(error, path)
        return None
    except HsfmtError as error:
        first = str(error)  # not the error: its frames hold what was read
    if store is not None:
        forget_cached(store, path)
    try:
        result = fetch()
    except HsfmtError as error:
        findings.raised(error, path, corrupt)
        return None
    unstable(findings, path, first)
    return result


def forget_cached(store: Store, path: str) -> None:
    """Ask the system to drop a local file from its page cache, so that the next read is one of the device."""
    if not store.is_local or not hasattr(os, "posix_fadvise"):
        return
    with suppress(OSError, HsfmtError):
        fd = os.open(store.local_path(path) or "", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


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
