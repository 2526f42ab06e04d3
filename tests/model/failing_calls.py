"""Calls of the operating system that fail at their k-th time."""

import os
from pathlib import Path

CALLS = ("write", "rename", "link", "unlink", "open", "close")
REAL = {name: getattr(os, name) for name in CALLS}


class failing:  # noqa: N801 - used as a context
    """Let the k-th of these calls on such paths fail; a list that holds something once it has.

    Other writers of this process are at work in threads of their own, which are not to be hit.
    """

    def __init__(self, name, k, code, about):
        self.name, self.left, self.code, self.about, self.failed = name, k, code, about, []

    def __enter__(self):
        self.real = getattr(os, self.name)

        def call(*args, **kwargs):
            path = str(Path(f"/proc/self/fd/{args[0]}").readlink() if isinstance(args[0], int) else args[0])
            self.left -= self.about(path)
            if self.left == 0 and not self.failed:
                self.failed.append(self.name)
                raise OSError(self.code, os.strerror(self.code))
            return self.real(*args, **kwargs)

        setattr(os, self.name, call)
        return self.failed

    def __exit__(self, *_):
        setattr(os, self.name, self.real)
