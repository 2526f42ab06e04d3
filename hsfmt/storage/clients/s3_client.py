"""Ranges from S3 through s3fs's own connection: by its credentials and settings, with what it leaves out of answers.

s3fs returns bytes alone. Here the answer's ETag, size and range are looked at, and failures are raised at once: retries
are made by who calls.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from hsfmt.errors import StorageError
from hsfmt.storage.clients.base import Body, TakesParts, check_content_range, range_header, strong_version
from hsfmt.storage.clients.base import unsatisfied_nbytes as unsatisfied
from hsfmt.storage.failures import is_taken
from hsfmt.storage.retries import WrongRangeError, status

# In an object's metadata, so that its creator knows it again.
_CREATOR = "hsfmt-creator"


class S3Client(TakesParts):
    """S3 as an s3fs file system reaches it.

    Parameters
    ----------
    fs
        An `s3fs.S3FileSystem`.
    root
        Bucket and prefix.
    """

    def __init__(self, fs: Any, root: str) -> None:
        self._fs = fs
        self._root = root

    def key(self, path: str) -> str:
        """Return an object's key in its bucket; of "" what all keys begin with."""
        _, key, _ = self._fs.split_path(f"{self._root}/{path}")
        return str(key)

    async def get(self, path: str, start: int, end: int) -> Body:
        """Return the bytes [start, end) of an object."""
        began = time.monotonic()
        try:
            answer = await self.call("get_object", path, Range=range_header(start, end))
        except OSError as error:
            if status(error) != 416:
                raise
            response = getattr(error.__cause__, "response", {})
            headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
            nbytes = unsatisfied(headers.get("content-range"))
            return Body(b"", nbytes if nbytes is not None else await self.nbytes(path))
        first_byte = time.monotonic() - began
        body = answer["Body"]
        try:
            version = strong_version(answer.get("ETag"))
            if "ContentRange" in answer:
                stop, nbytes = check_content_range(answer["ContentRange"], start, end)
            else:
                # The whole object, of a server that ignores ranges, is what was asked for if it is no more than that.
                stop = nbytes = int(answer["ContentLength"])
                if start or stop > end:
                    got = f"all {nbytes} bytes instead of {start} to {end}"
                    remedy = "this S3 server can't be read from: copy the dataset to another one, or to a folder"
                    raise StorageError.at(path, expected="a server that answers ranges", got=got, remedy=remedy)
            data = await body.read()
        finally:
            body.close()
        if len(data) > stop - start:
            raise WrongRangeError(f"{len(data)} bytes instead of {stop - start}")
        return Body(data, nbytes, version, first_byte)

    async def nbytes(self, path: str) -> int | None:
        """Return the size of an object."""
        return int((await self.call("head_object", path))["ContentLength"])

    async def put(self, path: str, body: bytes) -> None:
        """Store a whole object."""
        await self.call("put_object", path, Body=body)

    async def create(self, path: str, body: bytes, creator: str) -> bool:
        """Store a whole object if there is none, and say whether it is this creator's."""
        try:
            await self.call("put_object", path, Body=body, IfNoneMatch="*", Metadata={_CREATOR: creator})
        except OSError as error:
            if not is_taken(error):
                raise
            return bool((await self.call("head_object", path)).get("Metadata", {}).get(_CREATOR) == creator)
        return True

    async def begin(self, path: str) -> str:
        """Begin an upload; return its name."""
        return str((await self.call("create_multipart_upload", path))["UploadId"])

    async def send_part(self, path: str, upload: str, number: int, body: bytes) -> str:
        """Send a part; return its ETag."""
        return str((await self.call("upload_part", path, UploadId=upload, PartNumber=number, Body=body))["ETag"])

    async def complete(self, path: str, upload: str, receipts: Sequence[str]) -> None:
        """Make the object of all parts."""
        parts = [{"ETag": etag, "PartNumber": number} for number, etag in enumerate(receipts, 1)]
        await self.call("complete_multipart_upload", path, UploadId=upload, MultipartUpload={"Parts": parts})

    async def abort(self, path: str, upload: str) -> None:
        """Forget the parts."""
        await self.call("abort_multipart_upload", path, UploadId=upload)

    async def call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        """Make a request of S3's about an object; raises what s3fs makes of its errors."""
        from botocore.exceptions import ClientError
        from s3fs.errors import translate_boto_error

        fs = self._fs
        bucket, key, version = fs.split_path(f"{self._root}/{path}")
        await fs.set_session()
        function = getattr(await fs.get_s3(bucket), method)
        if version:
            arguments["VersionId"] = version
        wanted = fs._get_s3_method_kwargs(function, Bucket=bucket, Key=key, **fs.req_kw, **arguments)  # noqa: SLF001
        try:
            answer: dict[str, Any] = await function(**wanted)
        except ClientError as error:
            raise translate_boto_error(error) from error
        return answer
