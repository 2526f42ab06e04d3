"""A file system for tests that lives in fsspec's event loop; importing it, also in a child process, registers it."""
# It is about the loop's thread, not about being fast, and fsspec's paths are strings:
# ruff: noqa: ASYNC230, ASYNC240, PTH103, PTH108, PTH112, PTH116, PTH120, PTH123, PTH208

import os

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractBufferedFile


class LoopFileSystem(AsyncFileSystem):
    """Local files through fsspec's event loop thread, which is what S3, GCS and HTTP use: the part that forks badly."""

    protocol = "loop"

    @classmethod
    def _strip_protocol(cls, path):
        return path.removeprefix("loop://").rstrip("/")

    async def _cat_file(self, path, start=None, end=None, **_):
        with open(path, "rb") as file:
            return file.read()[start:end]

    async def _pipe_file(self, path, value, mode="overwrite", **_):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "xb" if mode == "create" else "wb") as file:
            file.write(value)

    async def _info(self, path, **_):
        status = os.stat(path)
        return {"name": path, "size": status.st_size, "type": "directory" if os.path.isdir(path) else "file"}

    async def _ls(self, path, detail=True, **_):
        names = [f"{path}/{name}" for name in os.listdir(path)]
        return [await self._info(name) for name in names] if detail else names

    async def _rm_file(self, path, **_):
        os.unlink(path)

    def rm_file(self, path):
        os.unlink(path)

    def _open(self, path, mode="rb", block_size=None, autocommit=True, cache_options=None, **kwargs):
        return LoopFile(self, path, mode, block_size or 1 << 16, autocommit, **kwargs)


class LoopFile(AbstractBufferedFile):
    """Visible when closed, as a multipart upload."""

    def _initiate_upload(self):
        self.parts = []

    def _upload_chunk(self, final=False):
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.pipe_file(self.path, b"".join(self.parts))
        return True


fsspec.register_implementation("loop", LoopFileSystem, clobber=True)
