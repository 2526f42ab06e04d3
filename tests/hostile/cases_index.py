# ruff: noqa: E501  a case a line
"""Lies in the tables of a part index: offsets, ids, metadata, chunk tables."""

from collections.abc import Callable

import numpy as np
import xxhash
from cases import MIB, PART, array, case, edited
from dataset_forge import Forge

OFFSETS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "negative": edited(1, -1), "unsorted": edited(1, 2**40), "falling": lambda o: o[::-1].copy(), "not from 0": edited(0, 1),
    "beyond the end": edited(-1, 2**40), "short of the end": lambda o: np.where(o == o[-1], o - 1, o),
    "2^63-1": edited(1, 2**63 - 1), "-2^63": edited(1, -(2**63)), "one more": lambda o: np.append(o, o[-1]), "one less": lambda o: o[:-1],
    "none": lambda o: o[:0], "one": lambda o: o[:1], "wrapping": lambda o: np.array([0, 2**63 - 1, -(2**63), o[-1]]),
}  # fmt: skip
for _name, _change in OFFSETS.items():
    for _table in ("token_offsets", "id_offsets", "meta_offsets", "offsets.topk"):
        if not (_table == "offsets.topk" and _name == "short of the end"):
            case(f"{_table}: {_name}", "index", array("index", _table, _change))
    case(f"part names: {_name}", "snapshot", array("snapshot", "part_name_offsets", _change))
    case(f"ids: offsets {_name}", "ids", array("ids", "id_offsets", _change))
case("an empty sample", "index", array("index", "token_offsets", edited(1, 0)))
case("an empty id", "index", array("index", "id_offsets", edited(1, 0)))
for _name, _change in {
    "negative": edited(0, -1),
    "too many": edited(0, 4),
    "2^63-1": edited(0, 2**63 - 1),
    "-2^63": edited(0, -(2**63)),
    "one more": lambda o: np.append(o, 0),
}.items():
    case(f"n_supervised: {_name}", "index", array("index", "n_supervised", _change))
for _name, _change in {
    "loss_mask_given": edited(0, 2),
    "valid.topk": edited(0, 255),
    "valid.score": edited(0, 2),
}.items():
    case(f"{_name} of neither 0 nor 1", "index", array("index", _name, _change))
case("valid.topk says null where there are rows", "verify full", array("index", "valid.topk", edited(0, 0)))
for _value in (2**63 - 1, -(2**63)):
    case(f"source_index {_value}", "nobody", array("index", "source_index", edited(0, _value)))
case("another content digest", "verify full", array("index", "content_digest", edited((0, 0), 7)))

# Ids and metadata, of the same length as those that were there.
for _name, _text in {
    "not utf-8": b"s-\xff",
    "split": b"s\xc3\xa9",
    "overlong": b"\xc0\xafx",
    "surrogate": b"\xed\xa0\x80",
}.items():
    _kind = "nobody" if _name == "split" else "index"

    def _ids(forge: Forge, text: bytes = _text) -> None:
        _rename(forge, text, hashes=True)

    case(f"an id of {_name} bytes", _kind, _ids)
for _name, _text in {
    "control characters": b"\x1b[m",
    "NUL": b"s\0x",
    "dots": b"../",
    "a path": b"/et",
    "blanks": b"   ",
    "bidi": "\u202e".encode(),
    "a line end": b"a\nb",
}.items():
    case(f"an id of {_name}", "nobody", lambda f, t=_text: _rename(f, t, hashes=True))  # type: ignore[misc]
case("an id twice in a part", "verify", lambda f: _rename(f, b"s-1", hashes=True))
case(
    "ids of other samples",
    "ids",
    lambda f: _rename(f, b"s-9", hashes=False, index=False),
    but=("ids", "ls", "ls --json"),
)
case("ids that are no utf-8", "ids", lambda f: f.ids.arrays.__setitem__("ids", edited(0, 255)(f.ids.arrays["ids"])))
case(
    "ids of half a character",
    "ids",
    lambda f: f.ids.arrays.__setitem__("ids", edited(slice(2, 4), [0xC3, 0xA9])(f.ids.arrays["ids"])),
)


def _rename(forge: Forge, text: bytes, *, hashes: bool, index: bool = True) -> None:
    """Name the first sample of part-0 anew, which is also the snapshot's first, in `len(text)` = 3 bytes."""
    if index:
        forge.indexes[PART].arrays["ids"][: len(text)] = np.frombuffer(text, np.uint8)
    forge.ids.arrays["ids"][: len(text)] = np.frombuffer(text, np.uint8)
    if hashes:
        forge.snapshot.arrays["id_hash"][0] = xxhash.xxh3_64_intdigest(text)


def _meta(text: bytes) -> Callable[[Forge], None]:
    def change(forge: Forge) -> None:
        arrays = forge.indexes[PART].arrays
        rest = arrays["meta"][arrays["meta_offsets"][1] :]
        shift = len(text) - arrays["meta_offsets"][1]
        arrays["meta"] = np.concatenate([np.frombuffer(text, np.uint8), rest])
        arrays["meta_offsets"] = np.concatenate([[0], arrays["meta_offsets"][1:] + shift])

    return change


for _name, _text in {
    "a list": b"[]", "nothing": b"", "null": b"null", "NaN": b'{"a":NaN}', "1e999": b'{"a":1e999}', "2^64": b'{"a":18446744073709551616}',
    "a duplicate key": b'{"a":1,"a":2}', "no utf-8": b'{"a":"\xff"}', "a surrogate": b'{"a":"\\ud800"}', "depth": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "5000 digits": b'{"a":' + b"9" * 5000 + b"}", "python": b"{'a': 1}", "half": b'{"a":',
}.items():  # fmt: skip
    case(f"metadata: {_name}", "verify full", _meta(_text))
case("metadata of 2 MiB", "index", _meta(b'{"a":"' + b"x" * 2 * MIB + b'"}'))
case("metadata of control characters", "verify full", _meta('{"\\u001b[2J":"\u202e\u009b"}'.encode()))

# --- chunk tables -----------------------------------------------------------------------------------------------------

for _column in ("hidden_states", "input_ids"):
    for _name, _change in {
        "offset 2^64-1": edited((1, 0), 2**64 - 1), "offset beyond the shard": edited((0, 0), 2**40), "nbytes 2^64-1": edited((0, 1), 2**64 - 1),
        "nbytes 2^64-4": edited((0, 1), 2**64 - 4), "nbytes 0": edited((0, 1), 0), "the same offset": edited((1, 0), 0),
        "swapped": lambda t: t[[1, 0, *range(2, len(t))]], "gapped": lambda t: t + np.array([1, 0, 0], np.uint64) * (np.arange(len(t)) == 1)[:, None].astype(np.uint64),
        "one more": lambda t: np.concatenate([t, t[-1:]]), "one less": lambda t: t[:-1], "none": lambda t: t[:0],
    }.items():  # fmt: skip
        case(f"chunks.{_column}: {_name}", "index", array("index", f"chunks.{_column}", _change))
case("another chunk digest", "chunk", array("index", "chunks.hidden_states", edited((0, 2), 5)))


def _into_index(forge: Forge) -> None:
    """A payload that goes on into the index of its shard, with its right digest."""
    table = forge.indexes[PART].arrays["chunks.hidden_states"]
    data = (forge.path / forge.shard(PART, "hidden_states", 1)).read_bytes()
    at = int(table[-1, 0])
    table[-1, 1] = min(len(data) - at, int(table[-1, 1]) + 12)
    table[-1, 2] = xxhash.xxh3_64_intdigest(data[at : at + int(table[-1, 1])])


case("a chunk that goes on into the shard's index", "chunk", _into_index)


def _other_chunk(forge: Forge) -> None:
    """The bytes of chunk 2 in the place of chunk 0."""
    forge.chunk(PART, "hidden_states", 0, forge.payload(PART, "hidden_states", 2))


case("a chunk in the place of another", "verify full", _other_chunk)
