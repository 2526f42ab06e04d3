"""The part manifest: round trip, its digest, and hostile members refused by name."""
# ruff: noqa: E501 - one case a line

import copy
import dataclasses

import pytest
from made_parts import HEADER, make_part

from hsfmt import canonical, digests
from hsfmt.errors import CorruptionError, FormatError, FormatVersionError, HsfmtError
from hsfmt.manifest import Counts, PartManifest, parse_manifest

MANIFEST, _ = make_part(
    holes={"h1": "failed", "h2": "NaN"}, extras=("ragged", "sample"), replaces={"o": digests.digest(b"")}
)
WHERE = "hsfmt/manifests/p.json"


def document():
    return canonical.loads(MANIFEST.to_bytes(), WHERE)


def signed(body):
    body = {key: value for key, value in body.items() if key != "digest"}
    return canonical.dumps({**body, "digest": digests.digest(canonical.dumps(body))})


def refuse(body, error=FormatError):
    with pytest.raises(error) as caught:
        parse_manifest(signed(body), "p", WHERE)
    for problem in caught.value.problems:
        assert problem.where.startswith(WHERE)
        assert len(str(problem)) < 1000
    return caught.value


def test_a_manifest_comes_back():
    parsed = parse_manifest(MANIFEST.to_bytes(), "p", WHERE)
    assert dataclasses.replace(parsed, stored=None) == MANIFEST
    assert parsed.to_bytes() == MANIFEST.to_bytes()
    assert parsed.digest() == MANIFEST.digest() == document()["digest"]
    assert parsed.index_file.path == "hsfmt/index/p.safetensors"


def test_a_part_of_holes_alone_comes_back():
    manifest = PartManifest("p", HEADER, {}, (), Counts(0, 0, 0, 1), {"a": "b"})
    parsed = parse_manifest(manifest.to_bytes(), "p", WHERE)
    assert dataclasses.replace(parsed, stored=None) == manifest
    with pytest.raises(CorruptionError, match=r"p\.json: expected an entry of .*p\.safetensors, got 0"):
        _ = parsed.index_file


def test_no_changed_byte_goes_unnoticed():
    data = MANIFEST.to_bytes()
    for at in range(0, len(data), 7):
        for mask in (0x01, 0x80, 0xFF):
            changed = bytearray(data)
            changed[at] ^= mask
            with pytest.raises(HsfmtError):
                parse_manifest(bytes(changed), "p", WHERE)
    for cut in (0, 1, len(data) // 2, len(data) - 1):
        with pytest.raises(HsfmtError):
            parse_manifest(data[:cut], "p", WHERE)


def test_a_manifest_under_another_name_is_refused():
    with pytest.raises(CorruptionError, match="expected part q, got 'p' — a part can't be renamed or copied by hand"):
        parse_manifest(MANIFEST.to_bytes(), "q", "hsfmt/manifests/q.json")


@pytest.mark.parametrize(
    "place", [(), ("counts",), ("files", 0), ("holes", 0), ("columns", "score"), ("replaces", 0), ("header",)], ids=str
)
def test_unknown_members_are_kept_and_ignored(place):
    body = change(*place, "later", value={"a": [1]})
    body["header_digest"] = digests.digest(canonical.dumps(body["header"]))
    data = signed(body)
    parsed = parse_manifest(data, "p", WHERE)
    assert parsed.to_bytes() == data
    assert parsed.digest() == canonical.loads(data, WHERE)["digest"]


def test_a_later_format_is_refused_with_advice():
    error = refuse({**document(), "format": "9.1", "readable_from": "9.0", "columns": "other"}, FormatVersionError)
    assert "got format 9.1, read from 9.0 on — install a newer hsfmt" in str(error)
    assert parse_manifest(signed({**document(), "format": "1.9"}), "p", WHERE).format == "1.9"


def change(*path, value=None, drop=False):
    body = copy.deepcopy(document())
    *parents, last = path
    target = body
    for key in parents:
        target = target[key]
    if drop:
        del target[last]
    else:
        target[last] = value
    return body


MEMBERS = (
    "columns", "counts", "files", "format", "header", "header_digest", "holes", "kind", "part", "producer",
    "readable_from", "replaces",
)  # fmt: skip


@pytest.mark.parametrize("member", MEMBERS)
def test_each_member_must_be_there_and_of_its_kind(member):
    refuse(change(member, drop=True), HsfmtError)
    values = [None, 5, "x", [5], [[]], [{}], True, -1]
    for value in values if member == "producer" else [*values, {"x": 5}]:
        refuse(change(member, value=value), HsfmtError)


FILES = MANIFEST.files
HOSTILE = {
    "a path of a number": (change("files", 0, "path", value=5), "text"),
    "a path of a list": (change("files", 0, "path", value=["a"]), "text"),
    "a path outside": (change("files", 0, "path", value="../../etc/passwd"), "files"),
    "an absolute path": (change("files", 0, "path", value="/etc/passwd"), "files"),
    "a path of another part": (change("files", 0, "path", value="parts/q/zarr.json"), "files"),
    "a file too few": (change("files", 0, drop=True), "files"),
    "a file twice": (change("files", value=[document()["files"][0], *document()["files"]]), "files"),
    "files in another order": (change("files", value=document()["files"][::-1]), "files"),
    "a negative size": (change("files", 0, "nbytes", value=-1), "no count"),
    "a size of a flag": (change("files", 0, "nbytes", value=True), "no count"),
    "another digest algorithm": (change("files", 0, "digest", value="md5:" + "0" * 32), "a digest like"),
    "another size of a zarr.json": (change("files", next(i for i, f in enumerate(FILES) if f.path == "parts/p/zarr.json"), "nbytes", value=1), "manifest implies"),
    "another digest of a zarr.json": (change("files", next(i for i, f in enumerate(FILES) if f.path.endswith("states/zarr.json")), "digest", value=digests.digest(b"")), "manifest implies"),
    "another header digest": (change("header_digest", value=digests.digest(b"")), "header_digest"),
    "a changed header": (change("header", "final_norm", value="post"), "header_digest"),
    "a header of another width": (change("header", "hidden_size", value=8), "hidden_states"),
    "a bad header": (change("header", "layers", value=[2, 1]), "header: layers"),
    "no hidden states": (change("columns", "hidden_states", drop=True), "columns"),
    "columns with samples missing": (change("columns", value={}), "columns"),
    "another dtype of the states": (change("columns", "hidden_states", "dtype", value="float64"), "hidden_states"),
    "ids of int16": (change("columns", "input_ids", "dtype", value="int16"), "input_ids"),
    "a mask of bool": (change("columns", "loss_mask", "dtype", value="bool"), "loss_mask"),
    "an unknown codec": (change("columns", "loss_mask", "codec", value="lz4"), "columns.loss_mask: codec"),
    "a column of another length": (change("columns", "score", "shape", value=[3]), "score"),
    "2**40 tokens": (change("columns", "input_ids", "shape", value=[2**40]), "input_ids"),
    "more samples than tokens": (change("counts", "samples", value=12), "counts"),
    "more supervised tokens than tokens": (change("counts", "supervised_tokens", value=12), "counts"),
    "tokens that do not fit": (change("counts", "tokens", value=12), "hidden_states"),
    "a count of a float as text": (change("counts", "tokens", value="11"), "no count"),
    "a hole too few": (change("holes", 0, drop=True), "holes"),
    "a hole twice": (change("holes", value=[document()["holes"][0]] * 2), "holes"),
    "holes in another order": (change("holes", value=document()["holes"][::-1]), "holes: expected names ascending"),
    "a hole without reason": (change("holes", 0, "reason", drop=True), "members"),
    "a reason that is no text": (change("holes", 0, "reason", value=5), "members"),
    "states of another kind": (change("columns", "hidden_states", "kind", value="ragged"), "hidden_states: expected kind token"),
    "ids of another kind": (change("columns", "input_ids", "kind", value="ragged"), "input_ids: expected kind token"),
    "a replaced part of no name": (change("replaces", 0, "part", value="../x"), "a part name"),
    "a replaced part without digest": (change("replaces", 0, "digest", value="x"), "a digest like"),
    "a producer of pairs": (change("producer", value=[["a", 1]]), "members"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_members_are_named(case):
    body, message = HOSTILE[case]
    assert message in str(refuse(body))


def test_columns_that_imply_a_trillion_shards_cost_nothing():
    body = document()
    body["counts"]["tokens"] = 2**40
    for name, trailing in (("hidden_states", [2, 4]), ("input_ids", []), ("loss_mask", [])):
        chunk_trailing = [1, 4] if trailing else []
        body["columns"][name] |= {
            "shape": [2**40, *trailing], "chunk_shape": [1, *chunk_trailing], "shard_shape": [1, *trailing],
        }  # fmt: skip
    assert "files as the columns imply" in str(refuse(body))


def test_the_problems_of_all_columns_come_at_once():
    body = document()
    body["columns"]["score"]["codec"] = "lz4"
    body["columns"]["loss_mask"]["dtype"] = "x"
    body["columns"]["boxes"]["chunk_shape"] = [0, 2]
    error = refuse(body)
    assert {problem.where.split(": ")[1] for problem in error.problems} == {
        "columns.score",
        "columns.loss_mask",
        "columns.boxes",
    }


def test_the_problems_of_all_members_come_at_once():
    body = document()
    body["header_digest"] = digests.digest(b"")
    body["counts"]["supervised_tokens"] = 99
    body["columns"]["input_ids"]["dtype"] = "int16"
    assert {"header_digest", "counts", "input_ids"} <= {
        problem.where.split(": ")[1] for problem in refuse(body).problems
    }


def test_a_part_without_samples_has_no_columns():
    body = document()
    body["counts"] |= {"samples": 0, "tokens": 0, "supervised_tokens": 0}
    refuse(body)
    refuse({**body, "columns": {}})
    assert parse_manifest(signed({**body, "columns": {}, "files": []}), "p", WHERE).counts.holes == 2


def test_the_scale_column_of_float8():
    header = dataclasses.replace(HEADER, dtype="float8_e4m3fn", scaling={"column": "score", "rule": "bfloat16_product"})
    manifest, _ = make_part(extras=("sample",), header=header)
    with pytest.raises(FormatError, match=r"score: expected a float32 .token. column"):
        parse_manifest(manifest.to_bytes(), "p", WHERE)
