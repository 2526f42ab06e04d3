"""Processes that die at a chosen call of the operating system, for scripts that kill their forks."""

import os
import signal


def no_fsync():
    os.fsync = lambda fd: None  # what a process wrote survives its death anyway, and the rounds must be short


def killing_at(k, calls):
    """Return a hook that kills the process just before the k-th of these calls of the operating system."""

    def hook():
        no_fsync()
        left = k

        def counted(real):
            def call(*args, **kwargs):
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return call

        for name in calls:
            setattr(os, name, counted(getattr(os, name)))

    return hook
