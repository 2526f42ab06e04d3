"""Server programs of tests: on free ports, ended with the tests that asked for them."""

import ctypes
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
START_SECONDS = 300
_STARTS = 3
# Looked up here, as little as possible being done between fork and exec.
_prctl = ctypes.CDLL(None).prctl


def _die_with_parent():
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def free_ports(n: int, *offsets: int) -> list[int]:
    """Ports that nobody listens at, and neither at these distances from them."""
    found: list[int] = []
    while len(found) < n:
        # With the offset of SeaweedFS below those that the system hands out itself. Tests that seed `random` do not
        # choose the same ones in each process.
        port = random.SystemRandom().randrange(10_000, 22_000)
        if port not in found and all(_is_free(port + offset) for offset in (0, *offsets)):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def started(start: Callable[[], "ServerProgram"]) -> "ServerProgram":
    """Start a program on free ports; again on others if it ended, as somebody may have taken those meanwhile."""
    for _ in range(_STARTS - 1):
        with suppress(RuntimeError):
            return start()
    return start()


class ServerProgram:
    """A program that runs until `stop`, or until this process ends, however it does."""

    def __init__(self, argv: list, log: Path) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [str(word) for word in argv],
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=_die_with_parent,  # noqa: PLW1509 - no threads are needed in between
            )  # fmt: skip

    def wait_until(self, ready) -> None:
        """Wait until `ready()` does not raise; raises RuntimeError if the program ends or takes too long."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                ready()
                assert self.process.poll() is None, "another program answers there"
                return
            except Exception as error:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.stop()
                    text = self.log.read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"{self.process.args[0]} does not work: {text}") from error
            time.sleep(0.05)

    def stop(self) -> None:
        """Kill it: SeaweedFS takes 12 seconds to end in good order."""
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
