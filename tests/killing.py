"""Processes that die at a chosen call of the operating system, for scripts that kill their forks."""

import os
import select
import signal
import time
import traceback
from contextlib import suppress


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


def kill_at_request(process, proxy, k, later=0.0):
    """Kill a process once `k` requests of it came through a `FaultProxy`, and so many seconds; say whether that hit."""
    while len(proxy.requests) < k and process.poll() is None:
        time.sleep(0.001)
    time.sleep(later)
    process.kill()
    hit = process.wait() == -signal.SIGKILL
    proxy.settle()  # what it had sent may still be carried out
    return hit


def hold_from(proxy, k):
    """Let a `FaultProxy` hold the k-th request from now on, and all that follow it."""
    proxy.reset()
    proxy.expect_groups(*[1] * (k - 1), 1 << 30)


def kill_held(process, proxy, k):
    """Kill the process group of a process whose k-th request is held; say whether it came to that.

    The requests that were held are carried out, though nobody is there for their answers.
    """
    while len(proxy.requests) < k and process.poll() is None:
        time.sleep(0.001)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    hit = process.wait() == -signal.SIGKILL
    proxy.reset()
    proxy.settle()
    return hit


def in_fork(work, seconds=None, lines=0):
    """Run `work(pipe)` in a fork; return what it wrote, and whether it died.

    It is killed, unless `seconds` is None, so long after it wrote so many lines.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(read_end)
            work(write_end)
            code = 0
        except BaseException:  # noqa: BLE001  the child ends here
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write_end)
    text, end = b"", None
    while True:
        if seconds is not None and end is None and text.count(b"\n") >= lines:
            end = time.monotonic() + seconds
        left = None if end is None else max(0.0, end - time.monotonic())
        if not select.select([read_end], [], [], left)[0]:
            os.kill(child, signal.SIGKILL)
            seconds = end = None
            continue
        data = os.read(read_end, 1 << 16)
        if not data:
            break
        text += data
    os.close(read_end)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), code
    return text, code != 0
