"""Damage done to one file at a time, what comes out by every path, and what counts as silent."""

import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem
from sweep_paths import PATHS, CommandFailedError, Place, ReadPath, plain

from hsfmt.errors import HsfmtError

MASKS = (0x01, 0x80, 0xFF)
# Far beyond what any path takes here, on any machine: what gets there hangs, or believed a damaged size.
HANG_SECONDS, ROOM_NBYTES = 600, 4 << 30


class HangError(BaseException):
    """A path did not come back."""


def _on_alarm(*_: object) -> None:
    raise HangError


@contextmanager
def guarded() -> Iterator[None]:
    """Turn a hang into an error, and an allocation out of all proportion into MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM_NBYTES, hard))
    former = signal.signal(signal.SIGALRM, _on_alarm)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class Opened:
    """The files of a folder that are opened to read, and keys of the memory file system that are looked up."""

    def __init__(self) -> None:
        self.folder, self.found = "", set()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and self.folder and isinstance(args[0], str) and args[0].startswith(self.folder):
            self.found.add(args[0][len(self.folder) :])

    @contextmanager
    def by(self, folder: str) -> Iterator[set[str]]:
        self.folder, self.found = folder, set()
        try:
            yield self.found
        finally:
            self.folder = ""


OPENED = Opened()


class _LookedUp(dict):
    """The objects of the memory file system; notes which are asked for."""

    def __init__(self, objects: dict[str, Any], found: set[str]) -> None:
        super().__init__(objects)
        self._found = found

    def __getitem__(self, key: str) -> Any:
        self._found.add(key)
        return super().__getitem__(key)


@dataclass
class Tally:
    """Outcomes by path: "error", "warning", "same", and "unread" where the path opens no such file."""

    counts: dict[str, Counter] = field(default_factory=dict)
    silent: list[str] = field(default_factory=list)

    def note(self, path: str, outcome: str) -> None:
        self.counts.setdefault(path, Counter())[outcome] += 1

    def total(self, *outcomes: str) -> int:
        return sum(counts[outcome] for counts in self.counts.values() for outcome in outcomes or counts)

    def sums(self) -> dict[str, int]:
        """Return how often there was each outcome, by all paths."""
        return dict(sum(self.counts.values(), Counter()))

    def table(self) -> str:
        return "\n".join(f"{path:22} {dict(sorted(counts.items()))}" for path, counts in self.counts.items())


class Sweep:
    """A dataset whose files are damaged and put back.

    Parameters
    ----------
    place
        Where; whole.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.contents = {
            path.relative_to(place.root).as_posix(): path.read_bytes()
            for path in sorted(place.root.rglob("*"))
            if path.is_file()
        }
        self.objects = MemoryFileSystem.store
        self.key = "/" + place.url.removeprefix("memory://") + "/"
        self.expected: dict[str, Any] = {}
        self.reads: dict[str, set[str]] = {}
        for path in PATHS:
            self._learn(path)

    def _learn(self, path: ReadPath) -> None:
        """Note what a path returns, and which files it opens: what it does not open can't change what it returns."""
        found: set[str] = set()
        MemoryFileSystem.store = _LookedUp(self.objects, found)
        try:
            with OPENED.by(f"{os.path.realpath(self.place.root)}/") as opened:
                self.expected[path.name] = plain(path.read(self.place))
        finally:
            MemoryFileSystem.store = self.objects
        if path.remote:
            opened = {key.removeprefix(self.key) for key in found if key.startswith(self.key)}
        self.reads[path.name] = opened & self.contents.keys() if path.opens else set(self.contents)
        for again in (False, True):
            if path.writes:
                self.restore_all()
            if not again:
                assert plain(path.read(self.place)) == self.expected[path.name], f"{path.name} is not the same twice"

    def put(self, name: str, data: bytes) -> None:
        """Overwrite a file and its copy in memory, in place, so that open descriptors see it too."""
        with (self.place.root / name).open("r+b") as file:
            file.write(data)
            file.truncate()
        self.objects[self.key + name].seek(0)
        self.objects[self.key + name].truncate()
        self.objects[self.key + name].write(data)

    @contextmanager
    def flipped(self, name: str, position: int, mask: int) -> Iterator[None]:
        """Have one byte of a file changed."""
        good = self.contents[name][position]
        self._poke(name, position, good ^ mask)
        try:
            yield
        finally:
            self._poke(name, position, good)

    def _poke(self, name: str, position: int, value: int) -> None:
        fd = os.open(self.place.root / name, os.O_WRONLY)
        try:
            os.pwrite(fd, bytes([value]), position)
        finally:
            os.close(fd)
        self.objects[self.key + name].getbuffer()[position] = value

    def restore_all(self) -> None:
        """Put all files back, and take away what is new."""
        root, there = str(self.place.root), set()
        for folder, _, files in os.walk(root, topdown=False):
            prefix = folder[len(root) + 1 :] + "/" if folder != root else ""
            for file in files:
                name = prefix + file
                if name in self.contents:
                    there.add(name)
                else:
                    Path(root, name).unlink()
            with suppress(OSError):
                Path(folder).rmdir()  # it is empty: a part of its own had been there
        for name, data in self.contents.items():
            path = Path(root, name)
            if name not in there or path.read_bytes() != data:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)

    def put_remote(self, name: str, data: bytes | None) -> None:
        """Replace an object of the copy in memory, or take it away."""
        self.objects.pop(self.key + name, None)
        if data is not None:
            MemoryFileSystem().pipe_file(self.key + name, data)

    def judge(
        self, path: ReadPath, names: set[str], what: str, tally: Tally, also: Callable[[Any], bool] = bool
    ) -> str:
        """Read by a path, and note the outcome: what is neither the same nor a typed error naming a file is silent."""
        signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
        try:
            outcome = self._outcome(path, names, also)
        except (Exception, HangError) as error:  # noqa: BLE001  whatever else comes out is a finding
            outcome = f"{type(error).__name__}: {str(error)[:600]}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if outcome not in ("same", "error", "warning", "allowed"):
            tally.silent.append(f"{path.name}, {what}: {outcome}")
            outcome = "silent"
        tally.note(path.name, outcome)
        return outcome

    def judge_each(self, path: ReadPath, flips: dict[str, str], tally: Tally) -> Iterator[tuple[str, str]]:
        """Verify what has several damaged files; yield (file, outcome), "same" for a file that no finding is about."""
        signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
        try:
            found = [(finding.path, finding.severity) for finding in path.read(self.place)]
        except (Exception, HangError) as error:  # noqa: BLE001  as above
            found = [(name, f"{type(error).__name__}: {str(error)[:600]}") for name in flips]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for name, what in flips.items():
            severities = {severity for where, severity in found if where == name}
            outcome = "error" if "error" in severities else min(severities, default="same")
            if outcome not in ("same", "error", "warning"):
                tally.silent.append(f"{path.name}, {what}: {outcome}")
                outcome = "silent"
            tally.note(path.name, outcome)
            yield name, outcome

    @staticmethod
    def _is_named(error: HsfmtError, names: set[str]) -> bool:
        """Whether an error is about one of these, or about what one of these says; a remedy may name anything.

        But where the root's header and another one disagree, each fine in itself, the remedy says how to tell.
        """
        about = [f"{problem.where}: {problem.expected}" for problem in error.problems] or [str(error)]
        return any(name in text for text in about for name in names) or _asks_verify(str(error), names)

    def _outcome(self, path: ReadPath, names: set[str], also: Callable[[Any], bool]) -> str:
        expected = self.expected[path.name]
        try:
            result = path.read(self.place)
        except HsfmtError as error:
            return "error" if self._is_named(error, names) else f"an error that names another file: {error!r}"
        except CommandFailedError as error:
            about = str(error).partition(", got ")[0]
            named = any(map(about.__contains__, names)) or _asks_verify(str(error), names)
            return "error" if named else f"a message that names another file: {error}"
        if plain(result) == expected:
            return "same"
        if path.name.startswith("verify"):
            named = {finding.severity for finding in result if finding.path.startswith(tuple(names))}
            return next(
                (severity for severity in ("error", "warning") if severity in named), f"other findings: {result}"
            )
        return "allowed" if also is not bool and also(plain(result)) else f"another result: {str(plain(result))[:300]}"


def _asks_verify(text: str, names: set[str]) -> bool:
    told = ("if it was zarr.json that changed", "`hsfmt verify` says whether zarr.json is as its parts have it")
    return "zarr.json" in names and any(map(text.__contains__, told))
