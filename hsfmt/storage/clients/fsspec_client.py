"""Ranges through whatever file system fsspec has for a URL."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem

from hsfmt.storage.clients.base import Body, Client
from hsfmt.storage.retries import is_transient

_N_THREADS = 16
# Of the synchronous file systems, those that several threads can use at a time without mixing up answers.
_THREAD_SAFE = frozenset({"memory", "file", "local", "hf"})


class FsspecClient(Client):
    """Any file system of fsspec.

    Parameters
    ----------
    fs
        The file system; synchronous ones work in threads.
    root
        The dataset in it.
    chained
        Whether it lies on top of another file system.
    """

    def __init__(self, fs: fsspec.AbstractFileSystem, root: str, *, chained: bool = False) -> None:
        self._fs = fs
        self._root = root
        self._is_async = isinstance(fs, AsyncFileSystem) and not chained
        self._options: dict[str, Any] = {}
        self._threads: ThreadPoolExecutor | None = None
        if not self._is_async:
            protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
            n_threads = _N_THREADS if protocols & _THREAD_SAFE and not chained else 1
            self._threads = ThreadPoolExecutor(n_threads, "hsfmt-fsspec")
            if "hf" in protocols:
                self._options = {"cache_type": "none"}  # or it reads 5 MiB ahead of each range

    def key(self, path: str) -> str:
        """Return the name of an object in the file system."""
        return f"{self._root}/{path}" if self._root else path

    async def get(self, path: str, start: int, end: int) -> Body:
        """Return the bytes [start, end) of an object."""
        key = self.key(path)
        try:
            if self._is_async:
                data = await self._fs._cat_file(key, start=start, end=end)  # noqa: SLF001  fsspec's name for async
            else:
                data = await self._in_thread(partial(self._fs.cat_file, key, start=start, end=end, **self._options))
        except FileNotFoundError:
            raise
        except Exception as error:
            if is_transient(error) or isinstance(error, PermissionError):
                raise
            # A range beyond the end is an error on some storages.
            nbytes = await self.nbytes(path)
            if nbytes is None or not (nbytes <= start or 0 < start < nbytes < end):
                raise
            return Body(b"", nbytes)
        return Body(data)

    async def nbytes(self, path: str) -> int | None:
        """Return the size of an object."""
        self._fs.invalidate_cache()
        key = self.key(path)
        if self._is_async:
            info = await self._fs._info(key)  # noqa: SLF001  likewise
        else:
            info = await self._in_thread(partial(self._fs.info, key))
        size = info.get("size")
        return None if size is None else int(size)

    async def _in_thread(self, call: partial[Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)
