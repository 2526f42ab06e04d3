# ruff: noqa: E501  a case a line
"""Lies in the header, wherever it is repeated, and in the pointer."""

from collections.abc import Callable
from typing import Any

from cases import NUMBERS, PATHS, REFUSED_BY, SEALING, case, in_header, put
from dataset_forge import Forge

for _name, _value in {
    "none": [], "descending": [3, 1], "twice": [1, 1], "negative": [-1, 3], "2^63": [1, 2**63], "floats": [1.0, 3.0],
    "bools": [False, True], "texts": ["1", "3"], "one more": [1, 3, 5], "5000": list(range(5000)), "null": None, "number": 3,
    "nested": [[1], [3]],
}.items():  # fmt: skip
    case(f"layers: {_name}", "header", in_header("layers", _value))
for _name, _value in {
    "0": 0,
    "2^20+1": 2**20 + 1,
    "-8": -8,
    "2^63": 2**63,
    "8.0": 8.0,
    "true": True,
    "text": "8",
    "another": 16,
}.items():
    case(
        f"hidden_size: {_name}",
        "header",
        in_header("hidden_size", _value),
        but=("attachments", "open", "ls --holes") if _name == "another" else (),
    )
for _member, _values2 in {
    "final_norm": ("PRE", None, [], {}, 1), "dtype": ("complex64", None, [], {}, "float64"), "scaling": ({}, {"rule": "x"}, "x", []),
    "model": ({}, [], "x", {"name": 1}, {"name": None}, {"a": {"b": "c"}}), "tokenizer": ({}, [], 5, {"name": []}),
    "format": (None, 1, "x", "1", "1.0.0"), "writable_from": (None, 1, "x", [[]]),
}.items():  # fmt: skip
    for _number, _value in enumerate(_values2):
        case(f"header {_member}: {_number}", "header", in_header(_member, _value))
    case(f"header without {_member}", "header", lambda f, m=_member: f.header(lambda header: header.pop(m)))  # type: ignore[misc]
case("a header of 40 KB", "header", in_header("x", "a" * (40 << 10)))
case(
    "a model of control characters",
    "nobody",
    in_header("model", {"name": "\x1b[2J\u202e\r\n", "revision": "\x9b", "\x07": "\x00"}),
)
case("a dataset that no one here may write", "nobody", in_header("writable_from", "9.0"))
case("layers of 2^62", "nobody", in_header("layers", [2**31, 2**62]))


def in_pointer(*path: Any, value: Any) -> Callable[[Forge], None]:
    def change(forge: Forge) -> None:
        forge.keep.add("pointer")
        path_now = dict(forge.pointer)
        forge.save()  # its fingerprint is known only then, and the lie comes after it
        forge.keep.discard("pointer")
        forge.save()
        forge.keep.add("pointer")
        assert path_now.keys() == forge.pointer.keys()
        put(lambda f: f.pointer, *path, value=value)(forge)

    return change


for _name, _value in PATHS.items():
    case(f"snapshot path: {_name}", "pointer", in_pointer("index", "path", value=_value))
    case(f"fingerprint: {_name}", "pointer", in_pointer("fingerprint", value=_value))
    if isinstance(_value, str):
        case(f"fingerprint with algorithm: {_name}", "pointer", in_pointer("fingerprint", value=f"xxh3_128:{_value}"))
for _name, _value in NUMBERS.items():
    case(f"snapshot nbytes: {_name}", "pointer", in_pointer("index", "nbytes", value=_value))
    case(
        f"pointer samples: {_name}",
        "pointer",
        in_pointer("samples", value=_value),
        but=("live", "info live", "export npz live", *SEALING) if _name == "2^63-1" else (),
    )
    case(
        f"pointer tokens: {_name}",
        "pointer",
        in_pointer("tokens", value=_value),
        but=tuple(REFUSED_BY["pointer"]) if _name == "2^63-1" else (),
    )
for _member in (
    "content_digest",
    "fingerprint",
    "format",
    "header",
    "index",
    "kind",
    "readable_from",
    "samples",
    "sealed",
    "tokens",
):
    case(f"pointer without {_member}", "pointer", in_pointer(_member, value=...))
    case(f"pointer with a list for {_member}", "pointer", in_pointer(_member, value=[[]]))
case("a time of control characters", "nobody", in_pointer("sealed", value="\x1b[2J\r\n\u202e"))
