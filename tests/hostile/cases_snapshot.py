# ruff: noqa: PLW0108  a case a line
"""Lies in the tables and counts of a snapshot."""

from collections.abc import Callable

import numpy as np
from cases import array, case, edited
from dataset_forge import Forge

for _table in ("part", "shadowed_part", "retracted_part"):
    for _value in (-1, 2, 2**31 - 1, -(2**31)):
        case(f"{_table} {_value}", "snapshot", lambda f, t=_table, v=_value: _first_of(f, t, v))  # type: ignore[misc]
for _table in ("row", "shadowed_row", "retracted_row"):
    for _value in (-1, -(2**31)):
        case(f"{_table} {_value}", "snapshot", lambda f, t=_table, v=_value: _first_of(f, t, v))  # type: ignore[misc]
    for _value in (3, 2**31 - 1):
        _whom = {"row": "rows", "shadowed_row": "verify", "retracted_row": "verify"}[_table]
        case(f"{_table} {_value}", _whom, lambda f, t=_table, v=_value: _first_of(f, t, v))  # type: ignore[misc]


def _first_of(forge: Forge, name: str, value: int) -> None:
    arrays, counts = forge.snapshot.arrays, forge.snapshot.metadata["counts"]
    prefix, _, _ = name.rpartition("_")
    if prefix:
        arrays[f"{prefix}_part"], arrays[f"{prefix}_row"] = np.zeros(1, np.int32), np.zeros(1, np.int32)
        if prefix == "shadowed":
            arrays["shadowed_same"] = np.ones(1, np.uint8)
        counts[prefix] = 1
    arrays[name][0] = value


for _name, _value in {"0": 0, "-1": -1, "2^31-1": 2**31 - 1, "one more": 4}.items():
    _kind2 = "snapshot" if _name in ("0", "-1") else "rows"

    def _tokens(forge: Forge, value: int = _value) -> None:
        arrays, metadata = forge.snapshot.arrays, forge.snapshot.metadata
        arrays["n_tokens"][0] = value
        metadata["counts"]["tokens"] = forge.pointer["tokens"] = int(arrays["n_tokens"].sum(dtype=np.int64))

    case(f"n_tokens {_name}", _kind2, _tokens, but=("info",))
case("another id hash", "rows", array("snapshot", "id_hash", edited(0, 1)), but=("info", "ls", "ls --json"))
case(
    "the same row twice",
    "verify",
    lambda f: (
        f.snapshot.arrays["row"].__setitem__(1, 0),
        [f.snapshot.arrays[n].__setitem__(1, f.snapshot.arrays[n][0]) for n in ("n_tokens", "n_supervised", "id_hash")],
        _recount(f),
    ),
)


def _recount(forge: Forge) -> None:
    arrays, metadata = forge.snapshot.arrays, forge.snapshot.metadata
    metadata["counts"]["tokens"] = forge.pointer["tokens"] = int(arrays["n_tokens"].sum())
    metadata["counts"]["supervised_tokens"] = int(arrays["n_supervised"].sum())


def _part_name(text: bytes) -> Callable[[Forge], None]:
    return lambda forge: forge.snapshot.arrays["part_names"].__setitem__(slice(0, 6), np.frombuffer(text, np.uint8))


for _name, _text in {
    "twice": b"part-1",
    "dots": b"../../",
    "upper": b"Part-0",
    "NUL": b"part\0a",
    "no ascii": b"part-\xff",
    "unknown": b"part-9",
    "absolute": b"/etc/x",
    "falling": b"part-2",
}.items():
    _kind3 = {"unknown": "rows", "falling": "rows"}.get(_name, "snapshot")
    case(f"part name in the snapshot: {_name}", _kind3, _part_name(_text))
for _name2, _values3 in {"part_manifest_nbytes": (0, -1, -(2**63)), "part_index_nbytes": (-1, -(2**63))}.items():
    for _value in _values3:
        case(
            f"{_name2} {_value}",
            "snapshot",
            lambda f, n=_name2, v=_value: (f.keep.add("parts table"), f.snapshot.arrays[n].__setitem__(0, v)),
        )  # type: ignore[misc]
for _name2, _values3 in {"part_manifest_nbytes": (2**62,), "part_index_nbytes": (0, 1, 2**62)}.items():
    for _value in _values3:
        _who = "verify" if _name2 == "part_manifest_nbytes" else "rows"
        case(
            f"{_name2} {_value}",
            _who,
            lambda f, n=_name2, v=_value: (f.keep.add("parts table"), f.snapshot.arrays[n].__setitem__(0, v)),
        )  # type: ignore[misc]
for _name, _value in {"-1": -1, "2^63-1": 2**63 - 1, "float": 6.0, "true": True, "text": "6", "null": None}.items():
    for _member in ("samples", "parts", "retracted", "holes"):
        _k = "verify full" if (_name, _member) == ("2^63-1", "holes") else "snapshot"
        case(
            f"snapshot counts.{_member}: {_name}",
            _k,
            lambda f, m=_member, v=_value: f.snapshot.metadata["counts"].__setitem__(m, v),
        )  # type: ignore[misc]
    _ids_kind = "snapshot"
    case(
        f"ids nbytes: {_name}",
        _ids_kind,
        lambda f, v=_value: (f.keep.add("ids"), f.snapshot.metadata["ids"].__setitem__("nbytes", v)),
    )  # type: ignore[misc]
for _member in (
    "attachments",
    "complete",
    "content_digest",
    "counts",
    "format",
    "header",
    "ids",
    "kind",
    "readable_from",
):
    case(
        f"snapshot without {_member}", "snapshot", lambda f, m=_member: (f.keep.add("ids"), f.snapshot.metadata.pop(m))
    )  # type: ignore[misc]
    case(
        f"snapshot with a list for {_member}",
        "snapshot",
        lambda f, m=_member: (f.keep.add("ids"), f.snapshot.metadata.__setitem__(m, [[]])),
    )  # type: ignore[misc]
case("an incomplete snapshot that says complete", "verify", lambda f: _drop_last(f))


def _drop_last(forge: Forge) -> None:
    for name in ("part", "row", "n_tokens", "n_supervised", "id_hash"):
        forge.snapshot.arrays[name] = forge.snapshot.arrays[name][:-1]
    forge.ids.arrays["ids"], forge.ids.arrays["id_offsets"] = (
        forge.ids.arrays["ids"][:-3],
        forge.ids.arrays["id_offsets"][:-1],
    )
    forge.snapshot.metadata["counts"]["samples"] = forge.pointer["samples"] = 5
    _recount(forge)
