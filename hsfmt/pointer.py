"""The pointer `hsfmt/manifest.json` to the current snapshot: the only object that is ever replaced.

Spec: rule SNAP-9.
"""

from __future__ import annotations

from dataclasses import dataclass

from hsfmt import canonical, digests, layout, tables
from hsfmt.errors import CorruptionError
from hsfmt.header import Header, parse_header
from hsfmt.manifest import parse_signed
from hsfmt.snapshot import Snapshot
from hsfmt.versions import FORMAT, READABLE_FROM

MAX_POINTER_NBYTES = 64 << 10
POINTER_KIND = "hsfmt.pointer"


@dataclass(frozen=True, slots=True)
class Pointer:
    """The pointer `hsfmt/manifest.json`: which snapshot is current (rule SNAP-9).

    Attributes
    ----------
    fingerprint, index_nbytes
        The snapshot, and its index's size in bytes.
    sealed
        When, as ISO 8601 in UTC.
    header
        The dataset's header, repeated.
    samples, tokens
        Counts, for people who look at the file.
    content_digest
        The snapshot's.
    """

    fingerprint: str
    index_nbytes: int
    sealed: str
    header: Header
    samples: int
    tokens: int
    content_digest: str

    def to_bytes(self) -> bytes:
        """Return the pointer file."""
        body = {
            "content_digest": self.content_digest,
            "fingerprint": self.fingerprint,
            "format": FORMAT,
            "header": self.header.to_json(),
            "index": {"nbytes": self.index_nbytes, "path": layout.snapshot_path(self.fingerprint, "index")},
            "kind": POINTER_KIND,
            "readable_from": READABLE_FROM,
            "samples": self.samples,
            "sealed": self.sealed,
            "tokens": self.tokens,
        }
        return canonical.dumps({**body, "digest": digests.digest(canonical.dumps(body))})


def make_pointer(snapshot: Snapshot, index_nbytes: int, sealed: str) -> Pointer:
    """Return the pointer to a snapshot."""
    return Pointer(
        fingerprint=snapshot.fingerprint,
        index_nbytes=index_nbytes,
        sealed=sealed,
        header=snapshot.header,
        samples=snapshot.n_samples,
        tokens=int(snapshot.counts["tokens"]),
        content_digest=snapshot.content_digest,
    )


def parse_pointer(data: bytes, where: str = layout.POINTER) -> Pointer:
    """Parse and check the pointer.

    Raises
    ------
    CorruptionError
        Changed bytes.
    FormatError, FormatVersionError
        Another document, or one that needs a newer library.
    """
    document = parse_signed(data, where, POINTER_KIND)
    try:
        pointer = Pointer(
            fingerprint=digests.check(document["fingerprint"], f"{where}: fingerprint"),
            index_nbytes=document["index"]["nbytes"],
            sealed=document["sealed"],
            header=parse_header(document["header"], f"{where}: header"),
            samples=document["samples"],
            tokens=document["tokens"],
            content_digest=digests.check(document["content_digest"], f"{where}: content_digest"),
        )
    except (KeyError, TypeError) as error:
        raise CorruptionError.at(where, expected="the members of a pointer", got=repr(error)[:200]) from None
    sizes = (pointer.index_nbytes, pointer.samples, pointer.tokens)
    if any(type(n) is not int or n < 0 for n in sizes) or not 0 < pointer.index_nbytes <= tables.MAX_TABLE_NBYTES:
        raise CorruptionError.at(where, expected="sizes within the caps", got=repr(sizes)[:100])
    path = layout.snapshot_path(pointer.fingerprint, "index")
    if document["index"].get("path") != path or not isinstance(pointer.sealed, str):
        got = repr((document["index"].get("path"), pointer.sealed))[:200]
        raise CorruptionError.at(where, expected=f"the path {path} and a time", got=got)
    return pointer
