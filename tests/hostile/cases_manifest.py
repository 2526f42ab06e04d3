# ruff: noqa: E501  a case a line
"""Lies in the manifest of a part."""

from cases import MIB, NUMBERS, PART, PATHS, case, in_header, in_manifest, put
from dataset_forge import Forge

for _name, _value in PATHS.items():
    case(f"file path: {_name}", "manifest", in_manifest("files", 1, "path", value=_value))
    case(f"part name: {_name}", "manifest", in_manifest("part", value=_value))
    case(
        f"replaces: {_name}",
        "manifest",
        in_manifest("replaces", value=[{"part": _value, "digest": "xxh3_128:" + "0" * 32}]),
    )
case("the same file twice", "manifest", lambda f: f.manifests[PART]["files"].insert(1, f.manifests[PART]["files"][1]))
case("files in another order", "manifest", lambda f: f.manifests[PART]["files"].reverse())
case(
    "a file more",
    "manifest",
    lambda f: f.manifests[PART]["files"].append({"path": "zz", "nbytes": 1, "digest": "xxh3_128:" + "0" * 32}),
)
case("no files", "manifest", in_manifest("files", value=[]))
case("no columns", "manifest", in_manifest("columns", value={}))


def _holes_only(forge: Forge) -> None:
    """A manifest of nothing but holes, beside a snapshot that names an index of it."""
    manifest = forge.manifests[PART]
    manifest |= {"files": [], "columns": {}}
    manifest["counts"] |= {"samples": 0, "tokens": 0, "supervised_tokens": 0}


case(
    "a part of holes whose index the snapshot names",
    "manifest",
    _holes_only,
    but=("live", "info live", "export npz live", "seal", "seal with attachments", "hsfmt seal", "writer", "convert"),
)

for _name, _value in NUMBERS.items():
    for _member in ("samples", "tokens", "supervised_tokens", "holes"):
        case(f"counts.{_member}: {_name}", "manifest", in_manifest("counts", _member, value=_value))
    case(
        f"nbytes of the index: {_name}",
        "manifest",
        lambda f, v=_value: (f.keep.add("index entry"), f.manifests[PART]["files"][0].__setitem__("nbytes", v)),
    )  # type: ignore[misc]
for _name, _value in {
    "md5": "md5:" + "0" * 32,
    "short": "xxh3_128:0",
    "upper": "xxh3_128:" + "A" * 32,
    "digits": "xxh3_128:" + "\u0660" * 32,
    "null": None,
    "path": "xxh3_128:../../../../../../../../etc/pw",
}.items():
    case(
        f"digest: {_name}",
        "manifest",
        lambda f, v=_value: (f.keep.add("index entry"), f.manifests[PART]["files"][0].__setitem__("digest", v)),
    )  # type: ignore[misc]
for _member, _values in {
    "shape": {
        "2^40 rows": [2**40, 2, 8], "2^40 + 1 rows": [2**40 + 1, 2, 8], "2^63": [2**63 - 1] * 3, "2^64": [2**64] * 3,
        "negative": [-12, 2, 8], "no rows": [0, 2, 8], "no layers": [12, 0, 8], "2^31 layers": [12, 2**31, 8],
        "2^40 all": [2**40] * 3, "rank 0": [], "rank 2": [12, 2], "rank 9": [12] + [1] * 8, "nested": [[12], 2, 8],
        "floats": [12.0, 2.0, 8.0], "texts": ["12", "2", "8"], "bools": [True, True, True], "an object": {"0": 12},
        "a million axes": [1] * MIB, "null": None, "one row more": [13, 2, 8], "one row less": [11, 2, 8],
    },
    "chunk_shape": {"zero": [0, 1, 8], "negative": [-4, 1, 8], "two layers": [4, 2, 8], "2^40": [2**40, 1, 8], "3": [3, 1, 8], "over 64 MiB": [1 << 22, 1, 8], "null": None},
    "shard_shape": {"zero": [0, 2, 8], "no multiple": [6, 2, 8], "2^40": [2**40, 2, 8], "4097 chunk rows": [4 * 4097, 2, 8], "negative": [-8, 2, 8], "null": None},
    "dtype": {"complex": "complex128", "void": "V8", "object": "object", "bfloat17": "bfloat17", "another": "float16", "number": 5, "null": None, "list": ["bfloat16"], "object member": {"name": "bfloat16"}, "NUL": "bfloat16\0"},
    "codec": {"gzip": "gzip", "blosc": "blosc", "null": None, "list": ["zstd"], "pickle": "pickle", "case": "ZSTD", "number": 1, "object": {}},
    "kind": {"another": "ragged", "unknown": "map", "null": None, "list": ["token"], "object": {}},
}.items():  # fmt: skip
    for _name, _value in _values.items():
        case(f"{_member}: {_name}", "manifest", in_manifest("columns", "hidden_states", _member, value=_value))
for _name in (
    "../x",
    "/x",
    "Topk",
    "topk ",
    "\u0441core",
    "",
    "a\0",
    "a" * 65,
    "hidden-states",
    "C:",
    "c/0",
    "\u202escore",
):
    case(
        f"column name: {_name!a}",
        "manifest",
        lambda f, n=_name: f.manifests[PART]["columns"].__setitem__(n, f.manifests[PART]["columns"]["score"]),
    )  # type: ignore[misc]
for _name, _value in {
    "null": None,
    "list": [],
    "text": "x",
    "number": 1,
    "of nothing": {"x": {}},
    "of null": {"x": None},
}.items():
    case(f"columns: {_name}", "manifest", in_manifest("columns", value=_value))
for _member in (
    "columns",
    "counts",
    "files",
    "format",
    "header",
    "header_digest",
    "holes",
    "kind",
    "part",
    "producer",
    "readable_from",
    "replaces",
):
    case(
        f"manifest without {_member}",
        "manifest",
        lambda f, m=_member: (f.keep.add("header_digest"), f.manifests[PART].pop(m)),
    )  # type: ignore[misc]
    case(
        f"manifest with a list for {_member}",
        "manifest",
        lambda f, m=_member: (f.keep.add("header_digest"), f.manifests[PART].__setitem__(m, [[]])),
    )  # type: ignore[misc]
_HOLE = {"id": "hole-2", "reason": "x"}
for _name, _value in {
    "twice": [_HOLE, _HOLE], "falling": [{"id": "b", "reason": "x"}, {"id": "a", "reason": "x"}], "number": [{"id": 5, "reason": "x"}],
    "no reason": [{"id": "x"}], "text": ["x"], "an object": {"id": "x"}, "surrogate": [{"id": "\ud800", "reason": "x"}], "none": [],
}.items():  # fmt: skip
    case(f"holes: {_name}", "manifest", in_manifest("holes", value=_value))
for _name, _value in {
    "later": "9.0",
    "later minor": "1.1",
    "huge": "9" * 4000 + ".0",
    "line end": "1.0\n",
    "arabic": "\u0661.0",
    "float": 1.5,
    "five digits": "10000.0",
    "sign": "+1.0",
    "zero": "01.0",
}.items():
    case(f"readable_from: {_name}", "manifest", in_manifest("readable_from", value=_value))
    case(f"pointer readable_from: {_name}", "pointer", put(lambda f: f.pointer, "readable_from", value=_value))
    case(
        f"snapshot readable_from: {_name}",
        "snapshot",
        put(lambda f: f.snapshot.metadata, "readable_from", value=_value),
    )
    case(f"header readable_from: {_name}", "header", in_header("readable_from", _value))
case("a part of another header", "manifest", put(lambda f: f.manifests[PART]["header"], "final_norm", value="post"))
case(
    "another header digest",
    "manifest",
    lambda f: (f.keep.add("header_digest"), f.manifests[PART].__setitem__("header_digest", "xxh3_128:" + "0" * 32)),
)
case(
    "a part that replaces itself",
    "manifest",
    lambda f: _replaces(f, PART, PART),
    but=(
        "read",
        "metadata",
        "ids",
        "zarr",
        "cat",
        "export safetensors",
        "export zarr",
        "items",
        "batch",
        "speculators",
        "extras",
        "window",
        "info",
        "info --json",
        "ls",
        "ls --json",
        "ls --holes",
    ),
)
case("parts that replace each other", "nobody", lambda f: (_replaces(f, PART, "part-1"), _replaces(f, "part-1", PART)))
case("a part that replaces what it does not know", "nobody", lambda f: _replaces(f, PART, "gone"))
case(
    "a producer of control characters",
    "nobody",
    in_manifest(
        "producer",
        value={
            "engine\x1b[2J": "\x1b]0;x\x07",
            "command": "a\nb\r\x00",
            "host": "\u202e",
            "started": ["\x1b"],
            "x": {"\x9b": "\x9b31m"},
        },
    ),
)
case(
    "a producer of odd values",
    "nobody",
    in_manifest(
        "producer",
        value={
            "started": None,
            "host": 2**62,
            "command": {"a": []},
            "source_files": "x",
            "source_folders": -1,
            "source_nbytes": -(2**63),
            "x_nbytes": True,
            "codec": [[]],
            "y": {},
        },
    ),
)
case(
    "holes of control characters",
    "nobody",
    in_manifest("holes", value=[{"id": "\x1b[31m\n\u202e", "reason": "\x1b]8;;http://x\x07\r\n"}]),
)


def _replaces(forge: Forge, part: str, other: str) -> None:
    forge.manifests[part]["replaces"] = [
        {"part": other, "digest": forge.manifests.get(other, {}).get("digest", "xxh3_128:" + "0" * 32)}
    ]
