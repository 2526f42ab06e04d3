"""Snapshots and the pointer: order, duplicates, retraction; and hostile tables."""
# ruff: noqa: E501 - one case a line

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_parts import HEADER, make_columns, make_part
from safetensors.numpy import load

from hsfmt import canonical, digests, layout, tables
from hsfmt.errors import CorruptionError, FormatError, FormatVersionError, HsfmtError
from hsfmt.index import parse_index
from hsfmt.pointer import MAX_POINTER_NBYTES, make_pointer, parse_pointer
from hsfmt.snapshot import parse_snapshot, parse_snapshot_ids
from hsfmt.snapshot_builder import LoadedPart, build_snapshot


def loaded(part, ids, lengths=None, **kwargs):
    lengths = lengths or [5 + i for i in range(len(ids))]
    manifest, data = make_part(part, ids, lengths, **kwargs)
    return LoadedPart(manifest, parse_index(data, part, make_columns(sum(lengths), len(ids)), "x"))


def built(parts, retracted=()):
    index, ids = build_snapshot(parts, HEADER, retracted)
    snapshot = parse_snapshot(index, "x", digests.digest(index))
    names = parse_snapshot_ids(ids, snapshot, "ids")
    return snapshot, [names[i] for i in range(len(names))]


def test_the_default_order_is_by_place_then_id():
    parts = [
        loaded("p2", ["z", "b", "a"], source_index=[0, 2, 2]),
        loaded("p1", ["c", "y"], source_index=[2, 1]),
    ]
    snapshot, ids = built(parts)
    assert ids == ["z", "y", "a", "b", "c"]
    assert [part.name for part in snapshot.parts] == ["p1", "p2"]
    assert list(zip(snapshot.part.tolist(), snapshot.row.tolist(), strict=True)) == [
        (1, 0),
        (0, 1),
        (1, 2),
        (1, 1),
        (0, 0),
    ]
    assert snapshot.n_tokens.tolist() == [5, 6, 7, 6, 5]
    assert snapshot.n_supervised.tolist() == [2, 3, 3, 3, 2]
    assert snapshot.id_hash.tolist() == [digests.id_hash(sample_id.encode()) for sample_id in ids]


def test_the_order_of_parts_does_not_matter():
    parts = [loaded(f"p{i}", [f"s{i}", f"t{i}"]) for i in range(4)]
    assert build_snapshot(parts, HEADER) == build_snapshot(parts[::-1], HEADER)


@given(st.lists(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 2)), min_size=1, max_size=4, unique_by=lambda x: x[0]),
                min_size=1, max_size=4), st.sets(st.sampled_from("abcdefg")))  # fmt: skip
def test_each_id_is_served_once_or_retracted(layouts, retracted):
    """Against a model: the smallest (part, row) of each id counts."""
    parts, model, copies = [], {}, 0
    for number, rows in enumerate(layouts):
        content = [bytes([version]) * 16 for _, version in rows]
        parts.append(loaded(f"p{number}", [sample_id for sample_id, _ in rows], content=content))
        for row, (sample_id, version) in enumerate(rows):
            copies += sample_id in model
            model.setdefault(sample_id, (number, row, version))
    snapshot, ids = built(parts, retracted)
    assert sorted(ids) == sorted(set(model) - retracted)
    for i, sample_id in enumerate(ids):
        assert (snapshot.part[i], snapshot.row[i]) == model[sample_id][:2]
    assert snapshot.counts["shadowed"] == len(snapshot.shadowed_part) == copies
    assert snapshot.counts["retracted"] == len(set(model) & retracted)
    for part, row, same in zip(snapshot.shadowed_part, snapshot.shadowed_row, snapshot.shadowed_same, strict=True):
        sample_id, version = layouts[part][row]
        assert bool(same) == (version == model[sample_id][2])
        assert (part, row) > model[sample_id][:2]


def test_ids_whose_hashes_collide_are_not_duplicates(monkeypatch):
    monkeypatch.setattr(digests, "id_hash", lambda data: data[0])
    snapshot, ids = built([loaded("p", ["a1", "a2", "b"]), loaded("q", ["a1", "a3"])])
    assert sorted(ids) == ["a1", "a2", "a3", "b"]
    assert snapshot.counts["shadowed"] == 1


def test_content_digest_depends_on_samples_alone():
    one = built([loaded("p", ["a", "b", "c"], [5, 6, 7])])[0]
    two = built([loaded("q", ["c"], [7]), loaded("r", ["b", "a"], [6, 5])])[0]
    assert one.content_digest == two.content_digest
    assert one.fingerprint != two.fingerprint


def test_holes_are_those_without_a_sample():
    parts = [loaded("p", ["a"], holes={"b": "x", "c": "y"}), loaded("q", ["b"], holes={"a": "late", "c": "z"})]
    assert built(parts)[0].counts["holes"] == 1
    only = LoadedPart(make_part("r", ("q",), (5,), holes={"d": "x"})[0], None)
    assert built([*parts, only])[0].counts["holes"] == 2


SNAPSHOT_BYTES, IDS_BYTES = build_snapshot([loaded("p", ["a", "b"]), loaded("q", ["c", "a"])], HEADER, ["c"])
TABLE = tables.parse(SNAPSHOT_BYTES, "x")


def changed(name=None, change=None, **metadata):
    arrays = dict(load(SNAPSHOT_BYTES))
    if name is not None:
        value = change(np.array(arrays[name]))
        arrays = {**arrays, name: value} if value is not None else {k: v for k, v in arrays.items() if k != name}
    return tables.serialize(arrays, {**TABLE.metadata, **metadata})


def put(at, value):
    def change(array):
        array[at] = value
        return array

    return change


COUNTS = TABLE.metadata["counts"]
HOSTILE = {
    "a part that is not there": changed("part", put(0, 2)),
    "a negative part": changed("part", put(0, -1)),
    "a negative row": changed("row", put(0, -1)),
    "a shadowed part that is not there": changed("shadowed_part", put(0, 9)),
    "a negative shadowed row": changed("shadowed_row", put(0, -1)),
    "a retracted part that is not there": changed("retracted_part", put(0, 9)),
    "a sample of no tokens": changed("n_tokens", put(0, 0)),
    "a sample of negative tokens": changed("n_tokens", put(0, -(2**31))),
    "more supervised than tokens": changed("n_supervised", put(0, 6)),
    "negative supervised": changed("n_supervised", put(0, -1)),
    "a row too few": changed("row", lambda a: a[:1]),
    "rows of int64": changed("row", lambda a: a.astype(np.int64)),
    "no id hashes": changed("id_hash", lambda a: None),
    "part names cut short": changed("part_names", lambda a: a[:1]),
    "part names that are none": changed("part_names", put(0, ord("/"))),
    "part names outside ASCII": changed("part_names", put(0, 0xFF)),
    "part names in another order": changed("part_names", lambda a: a[::-1]),
    "a part name twice": changed("part_names", put(1, ord("p"))),
    "a byte before the part names": tables.serialize({**load(SNAPSHOT_BYTES), "part_names": np.frombuffer(b"opq", np.uint8), "part_name_offsets": np.array([1, 2, 3])}, TABLE.metadata),
    "a byte behind the part names": changed("part_names", lambda a: np.append(a, a[-1:])),
    "part name offsets that fall": changed("part_name_offsets", put(1, 5)),
    "a negative manifest size": changed("part_manifest_nbytes", put(0, -1)),
    "a negative index size": changed("part_index_nbytes", put(0, -1)),
    "samples of a part without an index": changed("part_index_nbytes", put(0, 0)),
    "a digest too few": changed("part_manifest_digest", lambda a: a[:1]),
    "counts of others": changed(counts={**COUNTS, "samples": 3}),
    "counts of other tokens": changed(counts={**COUNTS, "tokens": 1}),
    "counts of other supervised tokens": changed(counts={**COUNTS, "supervised_tokens": 0}),
    "no counts": changed(counts=None),
    "counts of a list": changed(counts=[]),
    "another kind": changed(kind="hsfmt.part-index"),
    "ids of no size": changed(ids={"digest": digests.digest(b"")}),
    "ids of a size of text": changed(ids={"digest": digests.digest(b""), "nbytes": "5"}),
    "ids of a size of words": changed(ids={"digest": digests.digest(b""), "nbytes": "many"}),
    "ids of 2**40 bytes": changed(ids={"digest": digests.digest(b""), "nbytes": 2**40}),
    "ids of a negative size": changed(ids={"digest": digests.digest(b""), "nbytes": -1}),
    "ids of no digest": changed(ids={"digest": "x", "nbytes": 5}),
    "ids of a list": changed(ids=[]),
    "a content digest that is none": changed(content_digest=5),
    "a bad header": changed(header={**HEADER.to_json(), "layers": []}),
    "no header": changed(header=None),
    "no version": changed(readable_from=None),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_snapshots_are_refused(case):
    with pytest.raises((CorruptionError, FormatError)) as caught:
        parse_snapshot(HOSTILE[case], "hsfmt/snapshots/x/index.safetensors")
    assert str(caught.value).startswith("hsfmt/snapshots/x/index.safetensors")


@pytest.mark.parametrize("name", ["part", "shadowed_part", "retracted_part"])
def test_rows_are_of_parts_that_have_an_index(name):
    """Part 1 is one of nothing but holes, from which none of the three tables may take a row."""
    arrays = {key: np.array(value) for key, value in load(SNAPSHOT_BYTES).items()}
    for other in ("part", "shadowed_part", "retracted_part"):
        arrays[other][:] = 0
    arrays["part_index_nbytes"][1] = 0
    assert len(parse_snapshot(tables.serialize(arrays, TABLE.metadata), "x").parts) == 2
    arrays[name][0] = 1
    with pytest.raises(CorruptionError, match=f"x: {name}: expected parts of samples"):
        parse_snapshot(tables.serialize(arrays, TABLE.metadata), "x")


def test_a_later_format_is_refused_with_advice():
    with pytest.raises(FormatVersionError, match="install a newer hsfmt"):
        parse_snapshot(changed(format="3.0", readable_from="3.0", kind="other"), "x")


def test_unknown_members_of_a_snapshot_are_ignored():
    assert parse_snapshot(changed(later={"a": 1}), "x").n_samples == 2


def test_any_other_byte_is_another_fingerprint():
    fingerprint = digests.digest(SNAPSHOT_BYTES)
    for at in range(0, len(SNAPSHOT_BYTES), 11):
        data = bytearray(SNAPSHOT_BYTES)
        data[at] ^= 1
        with pytest.raises(CorruptionError, match=f"expected digest {fingerprint}"):
            parse_snapshot(bytes(data), "x", fingerprint)


def test_a_snapshot_says_how_large_its_ids_are():
    assert parse_snapshot(SNAPSHOT_BYTES, "x").ids_nbytes == len(IDS_BYTES)


@pytest.mark.parametrize("complete", [True, False])
def test_a_snapshot_says_whether_it_is_complete(complete):
    assert parse_snapshot(changed(complete=complete), "x").complete is complete
    with pytest.raises(CorruptionError, match="1 is neither true nor false"):
        parse_snapshot(changed(complete=1), "x")


def test_ids_must_be_those_that_the_snapshot_names():
    snapshot = parse_snapshot(SNAPSHOT_BYTES, "x")
    ids = parse_snapshot_ids(IDS_BYTES, snapshot, "ids")
    assert (len(ids), ids[0], ids[1]) == (2, "a", "b")
    data = bytearray(IDS_BYTES)
    data[-1] ^= 1
    with pytest.raises(CorruptionError, match="expected digest"):
        parse_snapshot_ids(bytes(data), snapshot, "ids")
    packed, offsets = tables.pack_strings([b"a", b"b", b"c"])
    for other in (
        tables.serialize({"ids": packed, "id_offsets": offsets}, {"format": "1.0", "kind": "hsfmt.snapshot-ids"}),
        tables.serialize({"ids": packed[:2], "id_offsets": offsets[:3]}, {"format": "1.0", "kind": "another"}),
    ):
        named = changed(ids={"digest": digests.digest(other), "nbytes": len(other)})
        with pytest.raises(CorruptionError, match=r"id_offsets|kind"):
            parse_snapshot_ids(other, parse_snapshot(named, "x"), "ids")


POINTER = make_pointer(parse_snapshot(SNAPSHOT_BYTES, "x"), len(SNAPSHOT_BYTES), "2026-11-29T12:00:00+00:00")


def signed(**changes):
    body = {**canonical.loads(POINTER.to_bytes(), "x"), **changes}
    body = {key: value for key, value in body.items() if key != "digest" and value is not ...}
    return canonical.dumps({**body, "digest": digests.digest(canonical.dumps(body))})


def test_a_pointer_comes_back():
    assert parse_pointer(POINTER.to_bytes()) == POINTER
    assert len(POINTER.to_bytes()) < 2048 < MAX_POINTER_NBYTES
    assert parse_pointer(signed(later=[1])).fingerprint == POINTER.fingerprint
    assert (POINTER.samples, POINTER.tokens) == (2, 11)


def test_no_changed_byte_of_the_pointer_goes_unnoticed():
    data = POINTER.to_bytes()
    for at in range(len(data)):
        changed_data = bytearray(data)
        changed_data[at] ^= 1 << (at % 8)
        with pytest.raises(HsfmtError):
            parse_pointer(bytes(changed_data))


PATH = layout.snapshot_path(POINTER.fingerprint, "index")
BAD_POINTERS = {
    "fingerprint": [..., None, "x", digests.digest(b"")],
    "index": [..., None, [], "x", {"path": PATH}, {"nbytes": 5}, {"nbytes": 5, "path": "../x"}, {"nbytes": 0, "path": PATH},
              {"nbytes": -1, "path": PATH}, {"nbytes": 2**40, "path": PATH}, {"nbytes": True, "path": PATH},
              {"nbytes": "5", "path": PATH}],
    "sealed": [..., None, 5],
    "samples": [..., None, -1, "2", True],
    "tokens": [..., None, -1, [2]],
    "header": [..., None, {}, []],
    "content_digest": [..., None, "x"],
    "kind": [..., None, "hsfmt.part"],
    "readable_from": [..., None, "1"],
}  # fmt: skip


@pytest.mark.parametrize("member", BAD_POINTERS)
def test_hostile_pointers_are_refused(member):
    for value in BAD_POINTERS[member]:
        with pytest.raises((CorruptionError, FormatError), match=r"hsfmt/manifest.json"):
            parse_pointer(signed(**{member: value}))


def test_a_later_pointer_is_refused_with_advice():
    with pytest.raises(FormatVersionError, match="install a newer hsfmt"):
        parse_pointer(signed(format="2.0", readable_from="2.0", fingerprint=...))
