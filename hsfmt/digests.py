"""Digests: what is hashed, in which byte form.

Spec: rules DIG-1 to DIG-6. They guard against accidents, not attackers; the algorithm's name is part of every digest.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xxhash

from hsfmt.errors import FormatError

ALGORITHM = "xxh3_128"
_SAMPLE_TAG = b"hsfmt:sample:1\0"
_EXTRA_TAG = b"hsfmt:extras:1\0"
_PAIR_TAG = b"hsfmt:pair:1\0"
_DATASET_TAG = b"hsfmt:dataset:1\0"

Buffer = bytes | bytearray | memoryview


def digest(data: Buffer) -> str:
    """Return "xxh3_128:<32 hex digits>" of the bytes (rule DIG-1)."""
    return f"{ALGORITHM}:{xxhash.xxh3_128_hexdigest(data)}"


def to_raw(text: str) -> bytes:
    """Return the 16 bytes of a digest string."""
    return bytes.fromhex(check(text, "digest")[len(ALGORITHM) + 1 :])


def from_raw(raw: bytes) -> str:
    """Return the digest string of 16 bytes."""
    return f"{ALGORITHM}:{raw.hex()}"


def is_digest(text: object) -> bool:
    """Say whether `text` is a digest string of a known algorithm."""
    if not isinstance(text, str) or not text.startswith(f"{ALGORITHM}:"):
        return False
    tail = text[len(ALGORITHM) + 1 :]
    return len(tail) == 32 and all(c in "0123456789abcdef" for c in tail)


def check(text: object, where: str) -> str:
    """Return `text` if it is a digest string.

    Raises
    ------
    FormatError
        It is not.
    """
    if not is_digest(text):
        raise FormatError.at(where, expected=f"a digest like {ALGORITHM}:<32 hex>", got=repr(text)[:100])
    assert isinstance(text, str)
    return text


class FileHasher:
    """Digest of a file that is written in pieces."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: Buffer) -> None:
        """Add the next bytes."""
        self._state.update(data)

    def digest(self) -> str:
        """Return the digest string of all bytes so far."""
        return f"{ALGORITHM}:{self._state.hexdigest()}"


def chunk_digest(payload: Buffer) -> int:
    """Return xxh3_64 of a chunk's encoded payload, without its crc32c (rule DIG-2)."""
    return xxhash.xxh3_64_intdigest(payload)


def id_hash(sample_id: bytes) -> int:
    """Return xxh3_64 of a UTF-8 sample id (rule DIG-5)."""
    return xxhash.xxh3_64_intdigest(sample_id)


def id_key(sample_id: bytes) -> bytes:
    """Return xxh3_128 (16 bytes) of a UTF-8 sample id: the key of in-memory id sets."""
    return xxhash.xxh3_128_digest(sample_id)


class SampleHasher:
    """Content digest of a sample, fed block by block (rule DIG-3).

    The byte form is: tag, dtype name and NUL, then u64 T, L, H, the ids as int64, the mask as uint8 and the states
    [token, layer, hidden], all little-endian.
    """

    def __init__(self, dtype: str, n_tokens: int, n_layers: int, hidden_size: int) -> None:
        self._state = xxhash.xxh3_128(_SAMPLE_TAG + dtype.encode("ascii") + b"\0")
        self._state.update(struct.pack("<3Q", n_tokens, n_layers, hidden_size))

    def tokens(self, input_ids: npt.NDArray[np.int64], loss_mask: npt.NDArray[np.uint8]) -> None:
        """Add ids [token] int64 and mask [token] uint8; before any states."""
        self._state.update(np.ascontiguousarray(input_ids, "<i8").data)
        self._state.update(np.ascontiguousarray(loss_mask, np.uint8).data)

    def states(self, block: npt.NDArray[np.generic]) -> None:
        """Add the next states [token, layer, hidden] as little-endian bit patterns."""
        self._state.update(np.ascontiguousarray(block).view(np.uint8).data)

    def digest(self) -> bytes:
        """Return the 16 bytes of the digest."""
        return self._state.digest()


def extras_digest(meta: bytes, extras: Iterable[tuple[str, str, tuple[int, ...], bytes | None]]) -> bytes:
    """Return the digest (16 bytes) of a sample's metadata and extra columns (rule DIG-4).

    Parameters
    ----------
    meta
        The metadata object's bytes as stored.
    extras
        (name, dtype, shape of this sample's value, little-endian bytes or None for null), ascending by name.
    """
    state = xxhash.xxh3_128(_EXTRA_TAG + struct.pack("<Q", len(meta)) + meta)
    for name, dtype, shape, data in extras:
        state.update(f"{name}\0{dtype}\0".encode())
        if data is None:
            state.update(b"\0")
            continue
        state.update(b"\1" + struct.pack(f"<{len(shape) + 1}Q", len(shape), *shape) + data)
    return state.digest()


def dataset_digest(pairs: Iterable[tuple[bytes, bytes]], n_samples: int) -> str:
    """Return the content digest of a set of samples, whatever their order and parts (rule DIG-6).

    Parameters
    ----------
    pairs
        (UTF-8 id, 16-byte content digest) of each sample.
    n_samples
        How many pairs come.
    """
    keys = np.empty((n_samples, 16), np.uint8)
    count = 0
    for sample_id, content in pairs:
        pair = _PAIR_TAG + struct.pack("<Q", len(sample_id)) + sample_id + content
        keys[count] = np.frombuffer(xxhash.xxh3_128_digest(pair), np.uint8)
        count += 1
    assert count == n_samples
    words = keys.view(">u8")
    order = np.lexsort((words[:, 1], words[:, 0]))
    state = xxhash.xxh3_128(_DATASET_TAG + struct.pack("<Q", n_samples))
    state.update(np.ascontiguousarray(keys[order]).data)
    return f"{ALGORITHM}:{state.hexdigest()}"
