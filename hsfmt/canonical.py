"""Canonical JSON: one byte form per document, and a parser that takes only that form.

Spec: rules JSON-1 to JSON-6. Numbers are integers within 64 bits, so that every language prints them alike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import Any, NoReturn

import numpy as np

from hsfmt.errors import FormatError

MAX_DEPTH = 32
MAX_VALUES = 1 << 18
_INT_LIMIT = 2**63
_PIECE_NBYTES = 1 << 20
_MARKS = (b",", b"[", b"{")

JSON = Any  # the values json.loads makes; narrowed by each document's own validator


def dumps(document: JSON) -> bytes:
    """Return the canonical bytes: UTF-8, keys sorted by code point, no white space, integers only.

    Raises
    ------
    FormatError
        The document holds a float, a non-string key, a lone surrogate, an integer beyond 64 bits or is nested too deep.
    """
    _check(document, "document", 0, integers_only=True)
    return _encode(document)


def dumps_metadata(document: JSON) -> bytes:
    """Return the bytes of a sample's metadata object: as `dumps`, with finite floats allowed.

    They are kept as bytes and never encoded again, so that no other language has to print floats alike.
    """
    _check(document, "metadata", 0, integers_only=False)
    return _encode(document)


def loads(data: bytes, where: str, *, metadata: bool = False) -> JSON:
    """Parse canonical JSON strictly.

    Parameters
    ----------
    data
        The whole document; the caller has bounded its size.
    where
        Path of the document, for errors.
    metadata
        Allow finite floats and any member order and spacing (sample metadata).

    Raises
    ------
    FormatError
        Not UTF-8, not JSON, duplicate keys, NaN or Infinity, too deep, or (documents) not the canonical bytes.
    """
    check_n_values(data, where)
    try:
        document = json.loads(data.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        # Web servers may answer with a page, and no status that says so, where they have nothing.
        page = ", of a web page or another document that begins with <" if data.lstrip().startswith(b"<") else ""
        got = f"{type(error).__name__}: {error}"[:300]
        raise FormatError.at(where, expected="strict JSON", got=f"{got}{page}") from None
    _check(document, where, 0, integers_only=not metadata)
    if metadata and not isinstance(document, dict):
        raise FormatError.at(where, expected="a JSON object", got=type(document).__name__)
    if not metadata and _encode(document) != data:
        raise FormatError.at(where, expected="canonical JSON (sorted keys, no white space)", got="another byte form")
    return document


def check_n_values(data: bytes, where: str) -> None:
    """Refuse JSON of more values than any document has: parsed, empty lists take twenty times their bytes.

    Raises
    ------
    FormatError
        There are more than `MAX_VALUES` commas and opening brackets outside of strings.
    """
    at, found, inside = 0, 0, False
    # No further than it takes: what is refused costs little, however large it is.
    while len(data) - at > MAX_VALUES - found:
        end = _piece_end(data, at)
        marks, inside = _n_marks(data[at:end], inside=inside)
        at, found = end, found + marks
        if found > MAX_VALUES:
            raise FormatError.at(where, expected=f"JSON of at most {MAX_VALUES} values", got="more")


def _piece_end(data: bytes, at: int) -> int:
    """Return where a piece of about `_PIECE_NBYTES` ends: not between a backslash and what it escapes."""
    end = min(at + _PIECE_NBYTES, len(data))
    piece = data[at:end]
    n_backslashes = len(piece) - len(piece.rstrip(b"\\"))
    return min(end + n_backslashes % 2, len(data))


def _n_marks(piece: bytes, *, inside: bool) -> tuple[int, bool]:
    """Return the marks outside of strings, and whether the piece ends within a string, as it began (`inside`)."""
    if b"\\" in piece:
        piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
    if not any(mark in piece for mark in _MARKS):
        return 0, inside ^ bool(piece.count(b'"') & 1)
    characters = np.frombuffer(piece, np.uint8)
    quotes = (characters == ord('"')).view(np.uint8)
    quotes[0] ^= inside
    strings = np.bitwise_xor.accumulate(quotes).view(np.bool_)
    outside = ~strings
    return sum(int(np.count_nonzero(outside & (characters == ord(mark)))) for mark in _MARKS), bool(strings[-1])


def _encode(document: JSON) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode(
        "utf-8"
    )


def _no_duplicates(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate key")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _check(value: JSON, where: str, depth: int, *, integers_only: bool) -> None:
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise FormatError.at(where, expected="string keys", got=repr(key)[:100])
            _check_text(key, where)
        _check_members(value.values(), where, depth + 1, integers_only=integers_only)
    elif isinstance(value, list | tuple):
        _check_members(value, where, depth + 1, integers_only=integers_only)
    else:
        _check_leaf(value, where, integers_only=integers_only)


def _check_members(members: Collection[JSON], where: str, depth: int, *, integers_only: bool) -> None:
    """Check what an array or object holds, without a call for each of what is most of it."""
    if depth > MAX_DEPTH and members:
        raise FormatError.at(where, expected=f"nesting of at most {MAX_DEPTH}", got="deeper")
    for member in members:
        kind = type(member)
        if (kind is str and member.isascii()) or (kind is int and -_INT_LIMIT <= member < _INT_LIMIT):
            continue
        _check(member, where, depth, integers_only=integers_only)


def _check_leaf(value: JSON, where: str, *, integers_only: bool) -> None:
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, str):
        _check_text(value, where)
    elif isinstance(value, int):
        if not -_INT_LIMIT <= value < _INT_LIMIT:
            raise FormatError.at(where, expected="integers of 64 bits", got=f"an integer of {value.bit_length()} bits")
    elif isinstance(value, float) and not integers_only:
        if not math.isfinite(value):
            raise FormatError.at(where, expected="finite numbers", got=repr(value))
    else:
        got = f"{type(value).__name__} {value!r}"[:100]
        raise FormatError.at(where, expected="JSON of strings, integers, booleans, lists and objects", got=got)


def _check_text(text: str, where: str) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise FormatError.at(where, expected="Unicode text", got="a lone surrogate") from None
