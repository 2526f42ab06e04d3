"""Requests to a container of Azure's, each made once, with errors in the words that all storages have here."""

from __future__ import annotations

import asyncio
import io
import os
import time
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from hsfmt.errors import StorageError
from hsfmt.storage.base import BytesLike
from hsfmt.storage.clients.azure_account import AzureCredentialsError
from hsfmt.storage.clients.base import Body, TakesParts, check_content_range, range_header, strong_version
from hsfmt.storage.clients.base import unsatisfied_nbytes as unsatisfied
from hsfmt.storage.process_state import abandoned_in_child
from hsfmt.storage.retries import StatusError, WrongRangeError, chain, class_names, parse_retry_after

# aiohttp warns of larger ones, which it would send without letting go of the event loop.
_LARGEST_BYTES = 1 << 20
_COPY_PAUSE_SECONDS = 0.05
_LONGEST_COPY_PAUSE_SECONDS = 2.0
_REFUSED = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
_REFUSED_CODES = frozenset({"PublicAccessNotPermitted"})
_TAKEN_CODES = frozenset({"BlobAlreadyExists", "ConditionNotMet", "UnauthorizedBlobOverwrite"})
_NO_SOURCE_CODES = frozenset({"CannotVerifyCopySource"})
_COPYING_CODES = frozenset({"PendingCopyOperation"})
# In an object's metadata, so that its creator knows it again.
_CREATOR = "hsfmt_creator"

Connected = Callable[[], tuple[Any, Any]]


class AzureClient(TakesParts):
    """Blobs below a prefix.

    Parameters
    ----------
    connect
        Returns azure-storage-blob's client of the account and its credential or None; called on the loop.
    container
        The container.
    prefix
        What all names begin with.
    """

    def __init__(self, connect: Connected, container: str, prefix: str) -> None:
        self._connect = connect
        self._container_name = container
        self._prefix = f"{prefix}/" if prefix else ""
        self._opened: Any = None

    async def get(self, path: str, start: int, end: int) -> Body:
        """Return the bytes [start, end) of an object."""
        began = time.monotonic()
        with _translated():
            # The generated client: the other one reads bodies again by itself, with a second in between.
            download = self._blob(path)._client.blob.download  # noqa: SLF001
            try:
                answer, pieces = await download(range=range_header(start, end), cls=_answer_and_body)
            except Exception as error:
                if _status(error) != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                    raise
                nbytes = unsatisfied(_headers(error).get("Content-Range"))
                return Body(b"", nbytes if nbytes is not None else await self.nbytes(path))
            first_byte = time.monotonic() - began
            stop, nbytes = _sent(answer, path, start, end)
            data = await _whole(pieces, stop - start)
        return Body(data, nbytes, strong_version(answer.headers.get("ETag")), first_byte)

    async def nbytes(self, path: str) -> int | None:
        """Return the size of an object."""
        return int((await self.properties(path)).size)

    async def properties(self, path: str) -> Any:
        """Return what there is to know of an object; raises FileNotFoundError of a folder as well."""
        with _translated():
            found = await self._blob(path).get_blob_properties()
        if _is_folder(found):
            raise FileNotFoundError("a folder is no object")
        return found

    async def names(self, prefix: str) -> list[str]:
        """Return the names of objects and folders directly below a folder, sorted."""
        start = self._key(f"{prefix}/") if prefix else self._prefix
        with _translated():
            listing = self._container().walk_blobs(name_starts_with=start, include=["metadata"], delimiter="/")
            found = [item.name async for item in listing if item.name.endswith("/") or not _is_folder(item)]
        return sorted({name.removeprefix(start).rstrip("/") for name in found} - {""})

    async def objects(self, prefix: str) -> list[tuple[str, int]]:
        """Return (path, size) of every object below a folder."""
        start = self._key(f"{prefix}/") if prefix else self._prefix
        with _translated():
            listing = self._container().list_blobs(name_starts_with=start, include=["metadata"])
            found = [(item.name.removeprefix(self._prefix), int(item.size)) async for item in listing
                     if not _is_folder(item)]  # fmt: skip
        # An empty object with a slash at its end stands for a folder, to consoles and file browsers.
        return [(path, nbytes) for path, nbytes in found if path and (nbytes or not path.endswith("/"))]

    async def put(self, path: str, body: bytes) -> None:
        """Store a whole object."""
        await self._put(path, body)

    async def create(self, path: str, body: bytes, creator: str) -> bool:
        """Store a whole object if there is none, and say whether it is this creator's."""
        try:
            await self._put(path, body, creator)
        except FileExistsError:
            return bool((await self.properties(path)).metadata.get(_CREATOR) == creator)
        return True

    async def _put(self, path: str, body: bytes, creator: str = "") -> None:
        metadata = {_CREATOR: creator} if creator else None
        with _translated():
            if len(body) > _LARGEST_BYTES:
                upload = await self.begin(path)
                await self._commit(path, [await self.send_part(path, upload, 1, body)], metadata)
            else:
                options = {"length": len(body), "overwrite": not creator, "validate_content": bool(body)}
                await self._blob(path).upload_blob(body, metadata=metadata, max_concurrency=1, **options)

    async def begin(self, path: str) -> str:  # noqa: ARG002  as others need it
        """Return a name for an upload, by no request."""
        return uuid.uuid4().hex

    async def send_part(self, path: str, upload: str, number: int, body: bytes) -> str:
        """Send a block, with a checksum that the server compares; return its id."""
        block = f"{upload}-{number:06d}"  # all ids of a blob have one length
        with _translated():
            await self._blob(path).stage_block(block, io.BytesIO(body), length=len(body), validate_content=True)
        return block

    async def complete(self, path: str, upload: str, receipts: Sequence[str]) -> None:  # noqa: ARG002  ids have it
        """Make the object of all blocks; once more is the same."""
        with _translated():
            await self._commit(path, receipts)

    async def abort(self, path: str, upload: str) -> None:
        """Leave the blocks alone: they can't be removed, and the service forgets them."""

    async def delete(self, path: str) -> None:
        """Remove an object."""
        with _translated():
            await self._blob(path).delete_blob(delete_snapshots="include")

    async def copy(self, source: AzureClient, path: str) -> bool:
        """Let the server copy an object of the same path, and wait until it has; False if it may not read it."""
        url, pause = source._blob(path).url, _COPY_PAUSE_SECONDS
        with _translated():
            try:
                answer = await self._blob(path).start_copy_from_url(url)
            except Exception as error:
                if _code(error) in _NO_SOURCE_CODES:
                    return False
                if _code(error) not in _COPYING_CODES:  # begun before, and its answer was lost
                    raise
                answer = {"copy_status": "pending"}
            status, said = answer["copy_status"], ""
            while status == "pending":
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_COPY_PAUSE_SECONDS)
                copied = (await self._blob(path).get_blob_properties()).copy
                status, said = copied.status, copied.status_description or ""
        if status != "success":
            raise OSError(f"the server's copy ended as {status}: {said}")
        return True

    async def account(self) -> str:
        """Return the URL of the account, without what may be secret in it."""
        return str(self._service().url).partition("?")[0]

    async def _commit(self, path: str, blocks: Sequence[str], metadata: dict[str, str] | None = None) -> None:
        """Make the object; with metadata only where there is none."""
        from azure.core import MatchConditions
        from azure.storage.blob import BlobBlock

        condition = {"match_condition": MatchConditions.IfMissing} if metadata else {}
        found = [BlobBlock(block) for block in blocks]
        await self._blob(path).commit_block_list(found, metadata=metadata, **condition)

    def _key(self, path: str) -> str:
        return f"{self._prefix}{path}"

    def _blob(self, path: str) -> Any:
        return self._container().get_blob_client(self._key(path))

    def _container(self) -> Any:
        return self._service().get_container_client(self._container_name)

    def _service(self) -> Any:
        if self._opened is None:
            self._opened, credential = self._connect()
            abandoned_in_child(self._opened)
            weakref.finalize(self, _close, os.getpid(), asyncio.get_running_loop(), self._opened, credential)
        return self._opened


def _close(pid: int, loop: asyncio.AbstractEventLoop, *opened: Any) -> None:
    for each in opened:
        if each is not None and os.getpid() == pid and loop.is_running():
            asyncio.run_coroutine_threadsafe(each.close(), loop)


def _answer_and_body(response: Any, body: Any, headers: Any) -> tuple[Any, Any]:  # noqa: ARG001  as the client calls it
    return response.http_response, body


def _sent(answer: Any, path: str, start: int, end: int) -> tuple[int, int | None]:
    """Return (end of what is sent, size of the object)."""
    if answer.status_code == HTTPStatus.PARTIAL_CONTENT:
        return check_content_range(answer.headers.get("Content-Range"), start, end)
    # The whole object, of a server that ignores ranges, is what was asked for if it is no more than that.
    nbytes = int(answer.headers["Content-Length"])
    if start or nbytes > end:
        got = f"all {nbytes} bytes instead of {start} to {end}"
        remedy = "this server can't be read from: copy the dataset to another one, or to a folder"
        raise StorageError.at(path, expected="a server that answers ranges", got=got, remedy=remedy)
    return nbytes, nbytes


async def _whole(pieces: AsyncIterator[bytes], nbytes: int) -> BytesLike:
    """Return a body, or what came of it, in memory of its size."""
    data, at = bytearray(nbytes), 0
    async for piece in pieces:
        if at + len(piece) > nbytes:
            raise WrongRangeError(f"more than {nbytes} bytes")
        data[at : at + len(piece)] = piece
        at += len(piece)
    return memoryview(data)[:at]


def _is_folder(properties: Any) -> bool:
    """Say whether a blob stands for a folder: Data Lake accounts and Hadoop have such."""
    metadata = getattr(properties, "metadata", None) or {}
    return any(name.lower() == "hdi_isfolder" and str(value).lower() == "true" for name, value in metadata.items())


@contextmanager
def _translated() -> Iterator[None]:
    """Raise what the SDK raises as what it means."""
    from azure.core.exceptions import AzureError

    try:
        yield
    except AzureError as error:
        raise _meaning(error) from error


def _meaning(error: Exception) -> Exception:
    status, code = _status(error), _code(error)
    said = str(error).partition("\n")[0]  # what follows are ids, times and the answer's text
    said = said.removeprefix("Operation returned an invalid status ").strip("'")
    text = f"{code}: {said}" if code else said
    names = set().union(*map(class_names, chain(error)))
    meaning: Exception
    if code == "ContainerNotFound":
        meaning = FileNotFoundError("the specified container does not exist")
    elif code in _TAKEN_CODES:
        meaning = FileExistsError(text)
    elif status in _REFUSED or code in _REFUSED_CODES:
        meaning = PermissionError(text)
    elif status == HTTPStatus.NOT_FOUND:
        meaning = FileNotFoundError(text)
    elif status is not None and "DecodeError" not in names:
        after = _headers(error).get("Retry-After")
        meaning = StatusError(status, text, parse_retry_after(after))
    elif "ClientAuthenticationError" in names:  # of what signs requests, or looks for a token
        meaning = AzureCredentialsError(text)
    elif "InvalidURL" in names:
        meaning = OSError(text)
    else:  # no answer, or the beginning of one
        meaning = ConnectionError(text)
    return meaning


def _status(error: Exception) -> int | None:
    status = getattr(error, "status_code", None)
    return status if isinstance(status, int) else None


def _code(error: Exception) -> str:
    """Return Azure's name for an error: also an answer without a body has it in a header."""
    code = getattr(error, "error_code", None) or _headers(error).get("x-ms-error-code") or ""
    return str(getattr(code, "value", code))


def _headers(error: Exception) -> Any:
    return getattr(getattr(error, "response", None), "headers", None) or {}
