"""Canonical JSON, versions, the header, signed documents: sections 3 to 6."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn

import xxhash

from .refusal import Refused, need


def canonical(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest(data: bytes) -> str:
    return "xxh3_128:" + xxhash.xxh3_128_hexdigest(data)


def parse_json(data: bytes, what: str, *, metadata: bool = False) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len(dict(pairs)) == len(pairs), "JSON-1", f"{what}: duplicate key")
        return dict(pairs)

    def constant(name: str) -> NoReturn:
        raise Refused("JSON-1", f"{what}: {name}")

    def fraction(text: str) -> float:
        need(metadata, "JSON-3", f"{what}: {text}")
        return float(text)

    try:
        text = data.decode("utf-8")
        document = json.loads(text, object_pairs_hook=unique, parse_constant=constant, parse_float=fraction)
        depth = max((level for level, _ in walk(document)), default=0)
    except RecursionError:
        raise Refused("JSON-4", f"{what}: nesting") from None
    except ValueError as error:
        raise Refused("JSON-1", f"{what}: {error}") from None
    need(depth <= 32, "JSON-4", f"{what}: nesting of {depth}")
    for _, value in walk(document):
        if isinstance(value, int):
            need(-(1 << 63) <= value < 1 << 63, "JSON-3", f"{what}: {value}")
        need(not isinstance(value, float) or math.isfinite(value), "JSON-5", f"{what}: {value}")
    if metadata:
        need(isinstance(document, dict), "JSON-5", f"{what}: no object")
    else:
        need(canonical(document) == data, "JSON-2", f"{what}: not canonical")
    return document


def walk(value: Any, depth: int = 0) -> Iterator[tuple[int, Any]]:
    yield depth, value
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in children:
        yield from walk(child, depth + 1)


def check_version(document: Any, what: str) -> None:
    need(isinstance(document, dict), "VER-2", f"{what}: no object")
    match = re.fullmatch(r"(0|[1-9]\d{0,3})\.(0|[1-9]\d{0,3})", str(document.get("readable_from")))
    need(match, "VER-1", f"{what}: readable_from {document.get('readable_from')!r}")
    assert match is not None
    need((int(match[1]), int(match[2])) <= (1, 0), "VER-2", f"{what}: readable from {match[0]} on, this reads 1.0")


def check_header(header: Any, what: str) -> None:
    check_version(header, what)
    layers = header.get("layers")
    good = isinstance(layers, list) and all(type(i) is int and i >= 0 for i in layers) and 0 < len(layers) <= 4096
    need(good and sorted(set(layers)) == layers, "HDR-1", f"{what}: layers {layers}")
    size = header.get("hidden_size")
    need(type(size) is int and 0 < size <= 1 << 20, "HDR-2", f"{what}: hidden_size {size}")
    need(header.get("final_norm") in ("pre", "post", "unknown"), "HDR-3", f"{what}: final_norm")
    states = ("bfloat16", "float16", "float32", "float8_e4m3fn")
    need(header.get("dtype") in states, "HDR-4", f"{what}: dtype {header.get('dtype')}")
    for key in ("model", "tokenizer"):
        value = header.get(key, 0)
        strings = isinstance(value, dict) and value and all(isinstance(v, str) for v in value.values())
        need(value is None or strings, "HDR-5", f"{what}: {key}")
    scaling = header.get("scaling", 0)
    if header["dtype"] == "float8_e4m3fn":
        good = isinstance(scaling, dict) and scaling.get("rule") == "bfloat16_product"
        need(good and isinstance(scaling.get("column"), str), "HDR-6", f"{what}: scaling")
    else:
        need(scaling is None, "HDR-6", f"{what}: scaling without float8_e4m3fn")
    for key in ("format", "writable_from"):
        need(re.fullmatch(r"(0|[1-9]\d{0,3})\.(0|[1-9]\d{0,3})", str(header.get(key))), "HDR-7", f"{what}: {key}")


def check_signed(document: Any, kind: str, what: str) -> None:
    check_version(document, what)
    need(document.get("kind") == kind, "MAN-3", f"{what}: kind {document.get('kind')}")
    body = {key: value for key, value in document.items() if key != "digest"}
    need(document.get("digest") == digest(canonical(body)), "MAN-2", f"{what}: own digest")
