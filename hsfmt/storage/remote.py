"""A dataset at any fsspec URL. Objects appear whole; nothing is known of directories or fsync there."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

import fsspec
from fsspec.core import url_to_fs

from hsfmt.errors import CorruptionError, HsfmtError, NotFoundError, StorageError, UsageError
from hsfmt.storage.base import BytesLike, ObjectWriter, Store, check_path, check_prefix, flat_view
from hsfmt.storage.failures import ShortBodyError, attempt, is_transient, typed_failure


class RemoteStore(Store):
    """A dataset at an fsspec URL.

    Only the URL and the options are pickled; each process makes its own file system on first use, so that the store
    works after fork, whatever the parent did with it.

    Parameters
    ----------
    url
        Any URL that fsspec knows, chained ones included.
    storage_options
        Given to fsspec's file system.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        self.url = url.rstrip("/") if not url.endswith("://") else url
        self._options = dict(storage_options)
        self._opened: tuple[int, fsspec.AbstractFileSystem, str] | None = None

    def __repr__(self) -> str:
        return f"RemoteStore({self.url!r})"  # options may hold secrets

    def __reduce__(self) -> tuple[type[RemoteStore], tuple[str, dict[str, Any]]]:
        return type(self), (self.url, self._options)

    def read(self, path: str, max_nbytes: int) -> bytes:
        fs, key = self._fs(), self._key(path)

        def fetch() -> bytes:
            try:
                # One byte more than allowed shows an object that is too large without a request for its size.
                return bytes(fs.cat_file(key, start=0, end=max_nbytes + 1))
            except FileNotFoundError:
                raise
            except Exception:
                if fs.info(key)["size"] == 0:  # S3 and GCS refuse any range of an empty object
                    return b""
                raise

        data = attempt(path, fetch)
        if len(data) > max_nbytes:
            raise CorruptionError.at(path, expected=f"at most {max_nbytes} bytes", got="a larger object")
        return data

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        view = flat_view(buffer)
        if len(view):
            view[:] = self.read_ranges([(path, offset, len(view))])[0]

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
        fs = self._fs()
        keys = [self._key(path) for path, _, _ in ranges]
        results: list[bytes | None] = [b"" if nbytes == 0 else None for _, _, nbytes in ranges]

        def fetch() -> None:
            missing = [at for at, result in enumerate(results) if result is None]
            starts = [ranges[at][1] for at in missing]
            ends = [ranges[at][1] + ranges[at][2] for at in missing]
            got = fs.cat_ranges([keys[at] for at in missing], starts, ends, on_error="return")
            failure: Exception | None = None
            for at, data in zip(missing, got, strict=True):
                try:
                    results[at] = self._checked_range(fs, keys[at], ranges[at], data)
                except Exception as error:  # noqa: BLE001 - raised below; the batch's other results are kept
                    if failure is None or (is_transient(failure) and not is_transient(error)):
                        failure = error
            if failure is not None:
                raise failure

        if None in results:
            paths = sorted({path for path, _, _ in ranges})
            attempt(paths[0] if len(paths) == 1 else f"{paths[0]} … {paths[-1]}", fetch)
        return [result for result in results if result is not None]

    def _checked_range(
        self, fs: fsspec.AbstractFileSystem, key: str, wanted: tuple[str, int, int], data: object
    ) -> bytes:
        path, offset, nbytes = wanted
        if isinstance(data, Exception):
            if not is_transient(data) and not isinstance(data, FileNotFoundError):
                self._refuse_short(fs, key, wanted)  # a range beyond the end is an error on some storages
            raise typed_failure(data, path) if not is_transient(data) else data
        assert isinstance(data, bytes | bytearray | memoryview)
        if len(data) > nbytes:
            raise StorageError.at(
                path,
                expected=f"{nbytes} bytes at offset {offset}",
                got=f"{len(data)} bytes",
                remedy="the server does not honour range requests",
            )
        if len(data) < nbytes:
            self._refuse_short(fs, key, wanted)
            raise ShortBodyError(f"{len(data)} of {nbytes} bytes at offset {offset}")
        return bytes(data)

    @staticmethod
    def _refuse_short(fs: fsspec.AbstractFileSystem, key: str, wanted: tuple[str, int, int]) -> None:
        path, offset, nbytes = wanted
        fs.invalidate_cache()
        size = fs.info(key)["size"]
        if size is not None and size < offset + nbytes:
            raise CorruptionError.at(
                path,
                expected=f"{nbytes} bytes at offset {offset}",
                got=f"an object of {size} bytes",
                remedy="the object was truncated: restore it, or run `hsfmt verify`",
            )

    def size(self, path: str) -> int | None:
        fs, key = self._fs(), self._key(path)

        def fetch() -> int | None:
            fs.invalidate_cache()
            try:
                info = fs.info(key)
            except (FileNotFoundError, NotADirectoryError):
                return None
            return None if info.get("type") == "directory" else int(info["size"])

        return attempt(path, fetch)

    def list(self, prefix: str) -> list[str]:
        fs, key = self._fs(), self._key(check_prefix(prefix))

        def fetch() -> list[str]:
            fs.invalidate_cache()
            try:
                found = [str(name).rstrip("/") for name in fs.ls(key, detail=False)]
            except (FileNotFoundError, NotADirectoryError):
                return []
            # Object stores may list a placeholder of the folder itself.
            return sorted({name.rpartition("/")[2] for name in found if name not in {key, key.lstrip("/")}})

        return attempt(prefix, fetch)

    def walk(self, prefix: str) -> Iterator[tuple[str, int]]:
        fs, key = self._fs(), self._key(check_prefix(prefix))
        root = self._key("")

        def fetch() -> list[tuple[str, int]]:
            fs.invalidate_cache()
            try:
                found = fs.find(key, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
            below = [
                (str(name).removeprefix(root).lstrip("/"), int(info.get("size") or 0)) for name, info in found.items()
            ]
            return sorted(
                (item for item in below if item[0] and item[0] != prefix), key=lambda item: item[0].split("/")
            )

        yield from attempt(prefix, fetch)

    def create(self, path: str, data: BytesLike) -> bool:
        """Create the object, unless it exists.

        Atomic where the file system's `pipe_file` knows `mode="create"` as a condition of the request (S3, GCS, Azure).
        Elsewhere it looks, writes and reads back, which leaves a window for two creators: callers whose objects have
        fixed names compare the content afterwards.
        """
        fs, key, body = self._fs(), self._key(path), bytes(data)
        exclusive = _has_conditional_create(fs)
        attempts = 0

        def put() -> bool:
            nonlocal attempts
            attempts += 1
            if exclusive:
                try:
                    fs.pipe_file(key, body, mode="create")
                except FileExistsError:
                    # After a failed attempt that may have arrived, the one in our way can be ourselves.
                    return attempts > 1 and bytes(fs.cat_file(key)) == body
                return True
            fs.invalidate_cache()
            if fs.exists(key):
                return attempts > 1 and bytes(fs.cat_file(key)) == body
            fs.pipe_file(key, body)
            return bytes(fs.cat_file(key)) == body

        return attempt(path, put)

    def write(self, path: str, data: BytesLike) -> None:
        fs, key, body = self._fs(), self._key(path), bytes(data)
        attempt(path, lambda: fs.pipe_file(key, body))

    def open_object(self, path: str) -> ObjectWriter:
        fs, key = self._fs(), self._key(path)
        return _RemoteObjectWriter(path, key, fs, attempt(path, lambda: fs.open(key, "wb")))

    def sync(self, directories: Iterable[str]) -> None:
        for directory in directories:
            check_prefix(directory)

    def remove(self, path: str) -> None:
        fs, key = self._fs(), self._key(path)
        if self.size(path) is None:  # object stores report success for a key that never was
            raise NotFoundError.at(path, expected="an object", got="nothing of that name")
        attempt(path, lambda: fs.rm_file(key))

    def _fs(self) -> fsspec.AbstractFileSystem:
        return self._file_system()[1]

    def _key(self, path: str) -> str:
        root = self._file_system()[2]
        if not path:
            return root
        return f"{root}/{check_path(path)}" if root else path

    def _file_system(self) -> tuple[int, fsspec.AbstractFileSystem, str]:
        opened = self._opened
        if opened is not None and opened[0] == os.getpid():
            return opened
        # No lock, which a fork could copy while it is held: two threads at most make a file system too many.
        opened = self._opened = (os.getpid(), *self._connected())
        return opened

    def _connected(self) -> tuple[fsspec.AbstractFileSystem, str]:
        try:
            fs, root = url_to_fs(self.url, **{"skip_instance_cache": True, **self._options})
        except ImportError as error:
            raise UsageError.at(
                self.url, expected="an installed driver", got=str(error), remedy="install the package it names"
            ) from error
        except ValueError as error:
            raise UsageError.at(self.url, expected="a URL that fsspec knows", got=str(error)) from error
        except Exception as error:
            raise typed_failure(error, self.url) from error
        return fs, root.rstrip("/")


class _RemoteObjectWriter(ObjectWriter):
    def __init__(self, path: str, key: str, fs: fsspec.AbstractFileSystem, file: IO[bytes]) -> None:
        self.nbytes = 0
        self._path = path
        self._key = key
        self._fs = fs
        self._file: IO[bytes] | None = file

    def write(self, data: BytesLike) -> None:
        view = flat_view(data)
        try:
            self._open_file().write(view)
        except HsfmtError:
            raise
        except Exception as error:
            raise typed_failure(error, self._path) from error
        self.nbytes += len(view)

    def commit(self) -> None:
        try:
            self._open_file().close()
            self._fs.invalidate_cache()
            nbytes = self._fs.info(self._key)["size"]
        except HsfmtError:
            raise
        except Exception as error:
            self.abort()
            raise typed_failure(error, self._path) from error
        self._file = None
        if nbytes != self.nbytes:
            raise StorageError.at(self._path, expected=f"{self.nbytes} bytes stored", got=f"{nbytes} bytes")

    def abort(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        with suppress(Exception):
            file.discard()  # type: ignore[attr-defined]  # ends a multipart upload
        with suppress(Exception):
            file.closed = True  # type: ignore[misc]  # or the garbage collector would close it, which commits it
        with suppress(Exception):
            self._fs.invalidate_cache()
            if self._fs.exists(self._key):
                self._fs.rm_file(self._key)

    def _open_file(self) -> IO[bytes]:
        if self._file is None:
            raise StorageError.at(self._path, expected="an object still open", got="one committed or aborted")
        return self._file


def _has_conditional_create(fs: fsspec.AbstractFileSystem) -> bool:
    put = getattr(fs, "_pipe_file", fs.pipe_file)
    inherited = getattr(put, "__func__", None) is fsspec.AbstractFileSystem.pipe_file
    return not inherited and "mode" in inspect.signature(put).parameters
