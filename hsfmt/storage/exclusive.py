"""Giving a finished file its name so that of several creators one wins, and nobody ever sees a part of it.

A hard link does that wherever there are any. File systems without (exFAT, many FUSE and SMB mounts) get a rename that
never replaces; where the kernel or file system knows none either, a look and a plain rename, under a lock on the folder
that holds creators of one machine apart. Only creators on several machines, on such a mount, can then both believe that
they won; the name holds one whole file all the same. What is created by two at once has a fixed name, and is read back
by its creators (rule WRITE-8); names of parts do not collide.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_UNSUPPORTED = frozenset(
    {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EMLINK, errno.ENOLCK}
)
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1


def publish_new(temporary: str, final: str) -> bool:
    """Give a whole, fsynced file its name unless that is taken; `temporary` may be left over.

    Returns
    -------
    bool
        True if `final` is this file now, False if it was there.

    Raises
    ------
    OSError
        The file system refuses.
    """
    for publish in (_link, _rename_unless_there):
        try:
            return publish(temporary, final)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
    with _folder_locked(os.path.dirname(final)):
        if os.path.lexists(final):
            return False
        os.rename(temporary, final)
    return True


def _link(temporary: str, final: str) -> bool:
    try:
        os.link(temporary, final)
    except FileExistsError:
        # A retransmitted NFS request reports its own success as EEXIST; the link count tells.
        return os.stat(temporary).st_nlink > 1
    return True


def _rename_unless_there(temporary: str, final: str) -> bool:
    renameat2 = _renameat2()
    if renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if renameat2(_AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(final), _RENAME_NOREPLACE) == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.EEXIST:
        return False
    raise OSError(code, os.strerror(code), final)


@functools.cache
def _renameat2() -> Callable[..., int] | None:
    """Return the C library's function, None where it has none (macOS, musl, glibc before 2.28)."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
        function.restype = ctypes.c_int
    return function


@contextmanager
def _folder_locked(folder: str) -> Iterator[None]:
    """Hold creators of this machine apart; the lock ends with the process that holds it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # some network file systems know no locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):  # close() alone would leave it to a child that was forked meanwhile
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
