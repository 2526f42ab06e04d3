"""A dataset at any fsspec URL. Objects appear whole; nothing is known of directories or fsync there."""

from __future__ import annotations

import base64
import inspect
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import IO, Any

import fsspec
import google_crc32c
import numpy as np
from fsspec.asyn import AsyncFileSystem, get_loop, sync
from fsspec.core import url_to_fs

from hsfmt.errors import HsfmtError, NotFoundError, StorageError, UsageError
from hsfmt.storage.base import BytesLike, ObjectWriter, Store, Upload, check_path, check_prefix, flat_view
from hsfmt.storage.clients.choice import client_of, missing_driver, s3_options
from hsfmt.storage.clients.gcs_requests import gcs_file_system, is_gcs
from hsfmt.storage.clients.s3_client import S3Client
from hsfmt.storage.failures import Place, attempt, is_no_bucket, is_taken, shown, typed_failure
from hsfmt.storage.process_state import abandoned_in_child
from hsfmt.storage.range_reader import RangeReader
from hsfmt.storage.ranged import RangedStore
from hsfmt.storage.retries import timeout_seconds
from hsfmt.storage.uploads import WriterInParts, list_uploads

# Their files appear when they are closed; elsewhere they grow where everyone sees them.
_PROTOCOLS_OF_WHOLE_OBJECTS = frozenset({"abfs", "abfss", "az", "gcs", "gs", "hf", "s3", "s3a"})
_PATIENCE = 8
_SLOWEST_NBYTES_A_SECOND = 64 << 10
# Of fsspec: they lose the condition of a `create`, and what they hold of an object that is replaced stays.
_CACHES = frozenset({"blockcache", "cached", "filecache", "simplecache"})


class RemoteStore(RangedStore):
    """A dataset at an fsspec URL: read by the client that suits it, listed and written through fsspec's file system.

    Parameters
    ----------
    url
        Any URL that fsspec knows, chained ones included.
    storage_options
        Given to fsspec's file system.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        super().__init__(url, storage_options)
        self._opened: tuple[int, fsspec.AbstractFileSystem, str] | None = None

    def _open_reader(self) -> RangeReader:
        _, fs, root = self._file_system()
        client, faster = client_of(fs, root, self._url)
        return RangeReader(client, self._place, faster)

    def size(self, path: str) -> int | None:
        fs, key = self._fs(), self._key(path)

        def fetch() -> int | None:
            fs.invalidate_cache()
            try:
                info = fs.info(key)
            except (FileNotFoundError, NotADirectoryError) as error:
                if is_no_bucket(error):
                    raise
                return None
            return None if info.get("type") == "directory" else int(info["size"])

        return attempt(path, fetch, self._place)

    def list(self, prefix: str) -> list[str]:
        fs, key = self._fs(), self._key(check_prefix(prefix))

        def fetch() -> list[str]:
            fs.invalidate_cache()
            try:
                found = [str(name).rstrip("/") for name in fs.ls(key, detail=False)]
            except (FileNotFoundError, NotADirectoryError) as error:
                if is_no_bucket(error):
                    raise
                return []
            # Object stores may list a placeholder of the folder itself.
            return sorted({name.rpartition("/")[2] for name in found if name not in {key, key.lstrip("/")}})

        return attempt(prefix, fetch, self._place)

    def walk(self, prefix: str) -> Iterator[tuple[str, int]]:
        fs, key = self._fs(), self._key(check_prefix(prefix))
        root = self._key("")

        def fetch() -> list[tuple[str, int]]:
            fs.invalidate_cache()
            try:
                found = fs.find(key, detail=True)
            except (FileNotFoundError, NotADirectoryError) as error:
                if is_no_bucket(error):
                    raise
                return []
            below = [
                (str(name).removeprefix(root).lstrip("/"), int(info.get("size") or 0)) for name, info in found.items()
            ]
            # An empty object with a slash at its end stands for a folder, to consoles and file browsers.
            kept = (item for item in below if item[0] not in {"", prefix} and (item[1] or not item[0].endswith("/")))
            return sorted(kept, key=lambda item: item[0].split("/"))

        yield from attempt(prefix, fetch, self._place)

    def create(self, path: str, data: BytesLike) -> bool:
        """Create the object, unless it exists.

        Atomic where the file system's `pipe_file` knows `mode="create"` as a condition of the request (S3, GCS).
        Elsewhere it looks, writes and reads back, which leaves a window for two creators: callers whose objects have
        fixed names compare the content afterwards.
        """
        fs, key, body = self._fs(), self._key(path), bytes(data)
        exclusive, s3 = _has_conditional_create(fs), self._s3()
        attempts, creator = 0, uuid.uuid4().hex

        def put() -> bool:
            nonlocal attempts
            attempts += 1
            if exclusive and s3 is not None:
                # Of an attempt whose answer was lost, also one that aiohttp made by itself, the one in our way is ours.
                found: bool = sync(get_loop(), s3.create, path, body, creator, timeout=_seconds(body))
                return found
            if exclusive:
                try:
                    self._put(key, body, mode="create")
                except OSError as error:
                    if not is_taken(error):
                        raise
                    # After a failed attempt that may have arrived, the one in our way can be ourselves.
                    return attempts > 1 and bytes(fs.cat_file(key)) == body
                return True
            fs.invalidate_cache()
            if fs.exists(key):
                return attempts > 1 and bytes(fs.cat_file(key)) == body
            self._put(key, body)
            return bytes(fs.cat_file(key)) == body

        self._written(path)
        return attempt(path, put, self._place)

    def write(self, path: str, data: BytesLike) -> None:
        key, body = self._key(path), bytes(data)
        self._written(path)
        attempt(path, lambda: self._put(key, body), self._place)

    def _put(self, key: str, body: bytes, **options: Any) -> None:
        fs = self._fs()
        if isinstance(fs, AsyncFileSystem) and "::" not in self._url:
            # Drivers do not notice a server that is silent before it takes the body.
            options["timeout"] = _seconds(body)
        fs.pipe_file(key, body, **options)

    def open_object(self, path: str) -> ObjectWriter:
        fs, key, place = self._fs(), self._key(path), self._place
        self._written(path)
        s3 = self._s3()
        if s3 is not None:
            return WriterInParts(s3, path, place)
        answered = place.answered
        file = attempt(path, lambda: fs.open(key, "wb"), place)
        place.answered = answered  # there may have been no request yet
        return _RemoteObjectWriter(path, key, fs, file, place)

    def unfinished_uploads(self) -> Sequence[Upload]:
        s3 = self._s3()
        return [] if s3 is None else attempt("", lambda: sync(get_loop(), list_uploads, s3), self._place)

    def abort_upload(self, upload: Upload) -> None:
        s3, path = self._s3(), check_path(upload.path)
        if s3 is None:
            return
        request = partial(s3.call, UploadId=upload.upload_id)

        def abort() -> None:
            with suppress(FileNotFoundError):
                sync(get_loop(), request, "abort_multipart_upload", path)

        attempt(path, abort, self._place)

    def _s3(self) -> S3Client | None:
        """Return what makes requests of S3's own, None where this is another storage."""
        client = self._reader().client
        return client if isinstance(client, S3Client) else None

    def sync(self, directories: Iterable[str]) -> None:
        for directory in directories:
            check_prefix(directory)

    def remove(self, path: str) -> None:
        fs, key = self._fs(), self._key(path)
        if self.size(path) is None:  # object stores report success for a key that never was
            raise NotFoundError.at(path, expected="an object", got="nothing of that name")
        self._written(path)
        attempts = 0

        def delete() -> None:
            nonlocal attempts
            attempts += 1
            try:
                fs.rm_file(key)
            except FileNotFoundError:
                if attempts == 1:
                    raise
                # A failed attempt did arrive, and only its answer was lost.

        attempt(path, delete, self._place)

    def modified(self, path: str) -> float | None:
        fs, key = self._fs(), self._key(path)

        def fetch() -> float | None:
            fs.invalidate_cache()
            try:
                return float(fs.modified(key).timestamp())
            except (FileNotFoundError, NotADirectoryError, NotImplementedError, KeyError, AttributeError):
                return None

        return attempt(path, fetch, self._place)

    def shares_storage(self, source: Store) -> bool:
        return (
            isinstance(source, RemoteStore)
            and type(self._fs()) is type(source._fs())  # noqa: SLF001  its own kind
            and self._options == source._options  # noqa: SLF001  likewise
            and "::" not in self._url + source._url  # noqa: SLF001  likewise
        )

    def link(self, source: Store, path: str) -> bool:
        if not isinstance(source, RemoteStore) or not self.shares_storage(source):
            return False
        fs, origin, key = self._fs(), source._key(path), self._key(path)  # noqa: SLF001  likewise
        nbytes = source.size(path)
        if nbytes is None:
            raise NotFoundError.at(path, expected="an object", got="nothing of that name")
        self._written(path)
        try:
            attempt(path, lambda: fs.cp_file(origin, key), self._place)
        except StorageError as error:
            if isinstance(error.__cause__, NotImplementedError):
                return False
            raise
        if self.size(path) != nbytes:
            raise StorageError.at(path, expected=f"{nbytes} bytes copied", got=f"{self.size(path)} bytes")
        return True

    def _written(self, path: str) -> None:
        """Note that an object is about to become another one by our own hand; refuse where that can't be."""
        cache = next((each for each in self._url.split("::")[:-1] if each.partition("://")[0] in _CACHES), None)
        if cache is not None:
            got, remedy = f"a cache before it, {cache}", f"leave out {cache}::"
            raise UsageError.at(self.url, expected="a place to write to", got=got, remedy=remedy)
        if self._reading is not None:
            self._reading[1].forget(path)

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
        abandoned_in_child(opened[1])
        return opened

    def _fs_options(self) -> dict[str, Any]:
        """Return what the file system is made with."""
        return s3_options(self._options) if self._url.startswith(("s3://", "s3a://")) else self._options

    def _connected(self) -> tuple[fsspec.AbstractFileSystem, str]:
        try:
            if is_gcs(self._url):
                fs, root = gcs_file_system(self._url, self._options, self._place)
            else:
                fs, root = url_to_fs(self._url, **{"skip_instance_cache": True, **self._fs_options()})
        except ImportError as error:
            raise missing_driver(self.url, error) from error
        except HsfmtError:
            raise
        except ValueError as error:
            got = self._place.redacted(str(error))
            raise UsageError.at(self.url, expected="a URL that fsspec knows", got=got) from shown(error, self._place)
        except Exception as error:  # noqa: BLE001  raised typed
            raise typed_failure(error, self.url, self._place) from shown(error, self._place)
        return fs, root.rstrip("/")


class _RemoteObjectWriter(ObjectWriter):
    def __init__(self, path: str, key: str, fs: fsspec.AbstractFileSystem, file: IO[bytes], place: Place) -> None:
        self.nbytes = 0
        self._place = place
        self._path = path
        self._key = key
        self._fs = fs
        self._file: IO[bytes] | None = file
        self._crc32c = 0

    def write(self, data: BytesLike) -> None:
        view = flat_view(data)
        try:
            self._open_file().write(view)
        except HsfmtError:
            raise
        except Exception as error:  # noqa: BLE001  raised typed
            raise typed_failure(error, self._path, self._place) from shown(error, self._place)
        self.nbytes += len(view)
        self._crc32c = google_crc32c.extend(self._crc32c, np.frombuffer(view, np.uint8))

    def commit(self) -> None:
        try:
            self._open_file().close()
            nbytes, crc32c = attempt(self._path, self._stored, self._place)
        except Exception as error:  # noqa: BLE001  raised typed
            if self._file is not None:
                self.abort()
            raise typed_failure(error, self._path, self._place) from shown(error, self._place)
        self._file = None
        if nbytes != self.nbytes:
            raise StorageError.at(self._path, expected=f"{self.nbytes} bytes stored", got=f"{nbytes} bytes")
        expected = base64.b64encode(self._crc32c.to_bytes(4, "big")).decode()
        if crc32c not in {None, expected}:
            remedy = "it was altered on the way: write it again"
            raise StorageError.at(self._path, expected=f"CRC-32C {expected}", got=crc32c, remedy=remedy)

    def abort(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        with suppress(Exception):
            file.discard()  # type: ignore[attr-defined]  # ends a multipart upload
        with suppress(Exception):
            file.closed = True  # type: ignore[misc]  # or the garbage collector would close it, which commits it
        if _PROTOCOLS_OF_WHOLE_OBJECTS.intersection(_protocols(self._fs)):
            return  # what is under the name now was there before, or was committed by somebody else
        with suppress(Exception):
            self._fs.invalidate_cache()
            if self._fs.exists(self._key):
                self._fs.rm_file(self._key)

    def _stored(self) -> tuple[int, str | None]:
        """Return the object's size and, where the storage has it (GCS), its checksum."""
        self._fs.invalidate_cache()
        info = self._fs.info(self._key)
        return int(info["size"]), info.get("crc32c")

    def _open_file(self) -> IO[bytes]:
        if self._file is None:
            raise StorageError.at(self._path, expected="an object still open", got="one committed or aborted")
        return self._file


def _protocols(fs: fsspec.AbstractFileSystem) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _seconds(body: bytes) -> float:
    return _PATIENCE * timeout_seconds() + len(body) / _SLOWEST_NBYTES_A_SECOND


def _has_conditional_create(fs: fsspec.AbstractFileSystem) -> bool:
    put = getattr(fs, "_pipe_file", fs.pipe_file)
    inherited = getattr(put, "__func__", None) is fsspec.AbstractFileSystem.pipe_file
    return not inherited and "mode" in inspect.signature(put).parameters
