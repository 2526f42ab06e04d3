"""Canonical JSON: one byte form per document, and a parser that takes only that form.

Spec: rules JSON-1 to JSON-5. Numbers are integers within 64 bits, so that every language prints them alike.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from hsfmt.errors import FormatError

MAX_DEPTH = 32
_INT_LIMIT = 2**63

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
    try:
        text = data.decode("utf-8")
        document = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError.at(where, expected="strict JSON", got=f"{type(error).__name__}: {error}"[:300]) from None
    _check(document, where, 0, integers_only=not metadata)
    if metadata and not isinstance(document, dict):
        raise FormatError.at(where, expected="a JSON object", got=type(document).__name__)
    if not metadata and _encode(document) != data:
        raise FormatError.at(where, expected="canonical JSON (sorted keys, no white space)", got="another byte form")
    return document


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
    if depth > MAX_DEPTH:
        raise FormatError.at(where, expected=f"nesting of at most {MAX_DEPTH}", got="deeper")
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
    elif isinstance(value, dict):
        for key, member in value.items():
            if not isinstance(key, str):
                raise FormatError.at(where, expected="string keys", got=repr(key)[:100])
            _check_text(key, where)
            _check(member, where, depth + 1, integers_only=integers_only)
    elif isinstance(value, list | tuple):
        for member in value:
            _check(member, where, depth + 1, integers_only=integers_only)
    else:
        got = f"{type(value).__name__} {value!r}"[:100]
        raise FormatError.at(where, expected="JSON of strings, integers, booleans, lists and objects", got=got)


def _check_text(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise FormatError.at(where, expected="Unicode text", got="a lone surrogate") from None
