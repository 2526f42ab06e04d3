"""Lies in the bytes of documents, and documents of sheer size."""

from collections.abc import Callable
from typing import Any

from cases import MANIFEST, MIB, PART, case
from dataset_forge import POINTER, ROOT, Forge

BYTES: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda data: b"",
    "blanks": lambda data: b" " * 100,
    "a byte order mark": lambda data: b"\xef\xbb\xbf" + data,
    "utf-16": lambda data: data.decode().encode("utf-16"),
    "utf-32": lambda data: data.decode().encode("utf-32-be"),
    "bytes that are no utf-8": lambda data: data.replace(b'"format"', b'"form\xff\xfe"', 1),
    "overlong utf-8": lambda data: data.replace(b'"format"', b'"form\xc0\xaf"', 1),
    "surrogates in utf-8": lambda data: data.replace(b'"format"', b'"form\xed\xa0\x80"', 1),
    "a lone surrogate": lambda data: data[:-1] + b',"\\ud800":1}',
    "a duplicate key": lambda data: data[:-1] + b',"format":"1.0"}',
    "a duplicate key by escape": lambda data: data[:-1] + b',"\\u0066ormat":"1.0"}',
    "NaN": lambda data: data[:-1] + b',"x":NaN}',
    "Infinity": lambda data: data[:-1] + b',"x":-Infinity}',
    "minus zero": lambda data: data[:-1] + b',"x":-0}',
    "1e999": lambda data: data[:-1] + b',"x":1e999}',
    "a float": lambda data: data[:-1] + b',"x":1.0}',
    "2^63": lambda data: data[:-1] + b',"x":9223372036854775808}',
    "2^64": lambda data: data[:-1] + b',"x":18446744073709551616}',
    "a number of 5000 digits": lambda data: data[:-1] + b',"x":' + b"9" * 5000 + b"}",
    "a number of a million digits": lambda data: b"9" * MIB,
    "100000 arrays": lambda data: b"[" * 100_000 + b"]" * 100_000,
    "100000 objects": lambda data: b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "33 levels": lambda data: data[:-1] + b',"x":' + b"[" * 40 + b"]" * 40 + b"}",
    "a line end": lambda data: data + b"\n",
    "a second document": lambda data: data + data,
    "half of it": lambda data: data[: len(data) // 2],
    "NUL bytes": lambda data: bytes(len(data)),
    "python": lambda data: b"__import__('os').system('true')",
    "pickle": lambda data: b"cos\nsystem\n(S'true'\ntR.",
    "null": lambda data: b"null",
    "a number": lambda data: b"5",
    "a text": lambda data: b'"x"',
    "a list": lambda data: b"[]",
    "an object": lambda data: b"{}",
}
for _name, _change in BYTES.items():
    for _kind, _path in (("manifest", MANIFEST), ("pointer", POINTER), ("root", ROOT)):
        if (_name, _kind) != ("33 levels", "nothing"):
            case(f"{_kind} of {_name}", _kind, lambda f, p=_path, c=_change: f.raw.__setitem__(p, c))  # type: ignore[misc]


def _in_table(kind: str, change: Callable[[bytes], bytes]) -> Callable[[Forge], None]:
    """Put bytes in the place of a table's JSON header."""

    def edit(data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        text = change(data[8 : 8 + size].rstrip())
        return len(text).to_bytes(8, "little") + text + data[8 + size :]

    def plant(forge: Forge) -> None:
        (forge.indexes[PART] if kind == "index" else forge.snapshot).edit_bytes = edit

    return plant


def _in_table_metadata(kind: str, change: Callable[[bytes], bytes]) -> Callable[[Forge], None]:
    def edit(header: dict[str, Any]) -> None:
        text = header["__metadata__"]["hsfmt"].encode()
        header["__metadata__"]["hsfmt"] = change(text).decode("utf-8", "surrogateescape")

    def plant(forge: Forge) -> None:
        (forge.indexes[PART] if kind == "index" else forge.snapshot).edit_header = edit

    return plant


# Of these nothing is left in a table's header, or they break no rule of it: it is any JSON.
_HARMLESS = {
    name for name, change in BYTES.items() if change(b'{"a":1}').startswith(b'{"a":1') and name != "a second document"
}
for _name, _change in BYTES.items():
    for _kind in ("index", "snapshot"):
        if _name not in _HARMLESS:
            case(f"{_kind} header of {_name}", _kind, _in_table(_kind, _change))
        case(f"{_kind} metadata of {_name}", _kind, _in_table_metadata(_kind, _change))

# Sheer size: what is cheap to write and dear to hold, just under the cap of bytes, and beyond it. Keys and texts are as
# many as the cap of values lets through.
_N = (1 << 18) - 64
BULK: dict[str, Callable[[], bytes]] = {
    "16 MB of arrays": lambda: b"[" + b"[]," * (5 * MIB) + b"[]]",
    "16 MB of objects": lambda: b"[" + b"{}," * (5 * MIB) + b"{}]",
    "16 MB of numbers": lambda: b"[" + b"7," * (7 * MIB) + b"7]",
    "16 MB of empty texts": lambda: b"[" + b'"",' * (5 * MIB) + b'""]',
    "16 MB of keys": lambda: b"{" + b",".join(b'"%052x":0' % i for i in range(_N)) + b"}",
    "16 MB of texts": lambda: b'{"x":[' + b",".join(b'"%055x"' % i for i in range(_N)) + b"]}",
    "one text of 15 MB": lambda: b'{"x":"' + b"a" * (15 * MIB) + b'"}',
    "one text of 15 MB beyond ASCII": lambda: b'{"x":"' + "\u00e9".encode() * (15 * MIB // 2) + b'"}',
    "15 MB of escapes": lambda: b'{"x":"' + b"\\n" * (15 * MIB // 2) + b'"}',
    "15 MB of escapes for nothing": lambda: b'["' + b"\\u1234" * (15 * MIB // 6) + b'"]',
    "64 MB of arrays": lambda: b"[" + b"[]," * (21 * MIB) + b"[]]",
    "64 MB of keys": lambda: b"{" + b",".join(b'"%055x":0' % i for i in range(MIB)) + b"}",
    "64 MB of one text": lambda: b'{"x":"' + b"a" * (63 * MIB) + b'"}',
}
# With what every case may cost, twice the largest chunk.
_ALLOWANCE = 80 * MIB
for _name, _body in BULK.items():
    case(
        f"a manifest: {_name}",
        "manifest",
        lambda f, b=_body: f.raw.__setitem__(MANIFEST, lambda data: b()),  # type: ignore[misc]
        allowance=_ALLOWANCE,
    )
    case(f"an index header: {_name}", "index", _in_table("index", lambda data, b=_body: b()), allowance=_ALLOWANCE)  # type: ignore[misc]
for _name, _more in {
    "one text of 12 MB": lambda: b'"' + b"a" * (12 * MIB) + b'"',
    "6 MB of keys": lambda: b"{" + b",".join(b'"%040x":0' % i for i in range(MIB // 8)) + b"}",
}.items():
    case(
        f"index metadata: {_name}",
        "index",
        _in_table_metadata("index", lambda data, m=_more: b'{"a":' + m() + b"}"),
        allowance=_ALLOWANCE,
    )  # type: ignore[misc]
case(
    "a byte more than a manifest may have",
    "manifest",
    lambda f: f.raw.__setitem__(MANIFEST, lambda data: data + b" " * (16 * MIB)),
)
case("a pointer of 65 KB", "pointer", lambda f: f.raw.__setitem__(POINTER, lambda data: data + b" " * (65 << 10)))
case("a root of 65 KB", "root", lambda f: f.raw.__setitem__(ROOT, lambda data: data + b" " * (65 << 10)))
