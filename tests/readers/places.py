"""Where the readers' tests open their datasets: in the folder they were written to, or where a copy of it lies."""

import itertools
from pathlib import Path

import fsspec

_NUMBERS = itertools.count()


class Folder:
    """Where it was written."""

    name = "local"
    n_used = 0

    def url(self, path: Path) -> str:
        return str(path)

    def changed(self, path: Path) -> None:
        """Note that a file was changed in place."""


class Web:
    """Below nginx, which serves the very files."""

    name = "http"

    def __init__(self, server) -> None:
        self.n_used = 0
        self._server = server
        self._links: dict[Path, Path] = {}

    def url(self, path: Path) -> str:
        self.n_used += 1
        if path not in self._links:
            link = self._links[path] = self._server.root / f"place-{next(_NUMBERS)}"
            link.symlink_to(path)
        return f"{self._server.url}/{self._links[path].name}"

    def changed(self, path: Path) -> None:
        """They are the very files."""

    def end(self) -> None:
        for link in self._links.values():
            link.unlink()


class Copies:
    """In a storage of objects: what changed since then is copied when the URL is asked for again."""

    def __init__(self, name: str, fs: fsspec.AbstractFileSystem, root: str) -> None:
        self.name = name
        self.n_used = 0
        self._fs = fs
        self._root = root
        self._copies: dict[Path, tuple[str, dict[str, tuple[int, int, int]]]] = {}

    def url(self, path: Path) -> str:
        self.n_used += 1
        key, there = self._copies.setdefault(path, (f"{self._root}/place-{next(_NUMBERS)}", {}))
        files = [file for file in path.rglob("*") if file.is_file()]
        now = {str(file.relative_to(path)): _state(file) for file in files}
        new = {name: state for name, state in now.items() if there.get(name) != state}
        gone = there.keys() - now.keys()
        if new:
            self._fs.pipe({f"{key}/{name}": (path / name).read_bytes() for name in new})
        if gone:
            self._fs.rm([f"{key}/{name}" for name in gone])
        there.clear()
        there.update(now)
        return f"{self.name}://{key}"

    def changed(self, path: Path) -> None:
        for folder in self._copies:
            if path.is_relative_to(folder):
                self.url(folder)

    def end(self) -> None:
        for key, _ in self._copies.values():
            self._fs.rm(key, recursive=True)


def _state(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


CURRENT: list = [Folder()]
"""The place in use, the last one."""
