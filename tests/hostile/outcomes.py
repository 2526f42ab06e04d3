# ruff: noqa: E501, PTH100, PTH120, PTH123  paths as the audit hook gives them, unresolved
"""What a consumer of a hostile dataset may do: succeed, or raise an error of this package, within bounds and the root.

Everything else is a finding: another exception, an internal error of the command line, control characters on the
terminal, memory by a document's word, a file opened outside of the dataset, a write by who only reads.
"""

import json
import os
import signal
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from hsfmt.cli.main import main
from hsfmt.errors import HsfmtError

MAX_SECONDS = 600  # a watchdog for hangs, not a measure of speed
# What it takes on a core of its own is a tenth of a second, or one where a document has the size of its cap.
MAX_CPU_SECONDS = 15
ALLOWANCE_NBYTES = 48 << 20
CHECKOUT = Path(__file__).resolve().parent.parent.parent
_EVENTS = {
    "open": 0, "os.listdir": 0, "os.scandir": 0, "os.remove": 0, "os.rename": 1, "os.mkdir": 0, "os.rmdir": 0,
    "os.link": 1, "os.symlink": 1, "os.truncate": 0, "os.chmod": 0, "os.utime": 0, "shutil.rmtree": 0,
}  # fmt: skip
_CHANGES = frozenset(_EVENTS) - {"open", "os.listdir", "os.scandir"}
_FORBIDDEN = ("subprocess.Popen", "os.system", "os.exec", "socket.connect", "socket.getaddrinfo", "ctypes.dlopen")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_PYTHON = tuple(
    os.path.realpath(path)
    for path in {
        *sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, str(CHECKOUT), "/proc", "/sys", "/dev/null",
        "/dev/urandom", "/usr/lib", "/usr/share", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types",
    }
)  # fmt: skip


@dataclass
class Watch:
    """What was opened and changed while it was on."""

    on: bool = False
    opened: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    other: set[str] = field(default_factory=set)


_WATCH = Watch()


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _WATCH.on:
        return
    if event in _EVENTS:
        for path in arguments[: _EVENTS[event] + 1]:
            if isinstance(path, int) or path is None:
                continue
            name = os.path.abspath(os.fsdecode(path))
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING
            (_WATCH.changed if event in _CHANGES or writes else _WATCH.opened).add(name)
    elif event in _FORBIDDEN and event != "ctypes.dlopen":
        _WATCH.other.add(event)


sys.addaudithook(_audit)  # there is no way to take it off again


def _within(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(folder + os.sep) for folder in folders)


@dataclass
class Outcome:
    """How a consumer ended: `error` is the error that it raised, None where it succeeded."""

    error: BaseException | None
    value: Any
    seconds: float
    cpu_seconds: float
    grown_nbytes: int
    findings: list[str]


def _peak_nbytes() -> int:
    with open("/proc/self/status", "rb") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(b"VmHWM"))


def _rss_nbytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class HungError(BaseException):
    """No Exception, and no OSError as TimeoutError is: nobody may make an error of the storage of it."""


@contextmanager
def _alarm() -> Iterator[None]:
    def expired(number: int, frame: object) -> None:
        raise HungError(f"no end after {MAX_SECONDS} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what was read: the frames of an error hold it, and that of `observe` the error, in a cycle."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def observe(
    consume: Callable[[], Any],
    root: Path,
    scratch: Path,
    *,
    writes: bool = False,
    allowance: int = ALLOWANCE_NBYTES,
) -> Outcome:
    """Run a consumer and say how it ended, and what it did that it must not."""
    import time

    error, value = None, None
    _WATCH.opened, _WATCH.changed, _WATCH.other = set(), set(), set()
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before, start, cpu = _rss_nbytes(), time.perf_counter(), time.process_time()
    with _alarm():
        _WATCH.on = True
        try:
            value = consume()
        except (Exception, HungError) as raised:  # noqa: BLE001  what it is, is the question
            error = raised
        finally:
            _WATCH.on = False
    _forget_frames(error)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    grown = max(0, _peak_nbytes() - before)
    findings = []
    if error is not None and not isinstance(error, HsfmtError):
        findings.append(f"raised {type(error).__name__}: {error}"[:300])
    elif isinstance(error, HsfmtError) and not str(error):
        findings.append("an error that says nothing")
    if error is not None and cpu > MAX_CPU_SECONDS:
        findings.append(f"took {cpu:.1f} s of CPU time to refuse")
    if grown > allowance:
        findings.append(f"memory grew by {grown >> 20} MiB")
    inside = (os.path.abspath(root), os.path.abspath(scratch))
    # Whoever makes a dataset durable opens the folder above it, whose entry it is.
    above = (os.path.dirname(inside[0]),) if writes else ()
    foreign = (path for path in sorted(_WATCH.opened) if not _within(path, (*inside, *_PYTHON)) and path not in above)
    findings += [f"opened {path}" for path in foreign]
    allowed = inside if writes else inside[1:]
    findings += [f"changed {path}" for path in sorted(_WATCH.changed) if not _within(path, (*allowed, "/dev/null"))]
    for path in _WATCH.changed:
        parent = os.path.realpath(os.path.dirname(path))
        if path not in ("/dev/null", inside[0]) and not _within(parent, tuple(map(os.path.realpath, allowed))):
            findings.append(f"changed {path}, which leads to {parent}")
    findings += [f"did {event}" for event in sorted(_WATCH.other)]
    return Outcome(error, value, seconds, cpu, grown, findings)


class RefusedError(HsfmtError):
    """What a command ended with: an exit code of the documented ones."""


def command(*arguments: object, refused: tuple[int, ...] = (1, 2, 3)) -> str:
    """Run `hsfmt` in this process; return stdout, or raise as its exit code says.

    Raises
    ------
    RefusedError
        It ended with one of the documented codes.
    AssertionError
        It did not, or its output is not fit for a terminal, or --json gave no document.
    """
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="hsfmt")
    bad = [c for c in result.stdout + result.stderr if not c.isprintable() and c not in "\n\t"]
    assert not bad, f"unprintable {bad[:5]!a} in the output of {arguments[0]}"
    assert result.exit_code in (0, *refused), f"exit {result.exit_code}: {result.stderr[-600:]}"
    if "--json" in arguments:
        json.loads(result.stdout)
    if result.exit_code:
        assert result.stdout or result.stderr.strip()
        raise RefusedError.at(str(arguments[0]), expected="exit 0", got=f"{result.exit_code}: {result.stderr[-300:]}")
    return result.stdout
