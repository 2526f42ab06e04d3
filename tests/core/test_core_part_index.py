"""The part index: round trip, and each table that contradicts another is refused by name."""

import dataclasses

import numpy as np
import pytest
from made_parts import make_columns, make_index
from safetensors.numpy import load

from hsfmt import tables
from hsfmt.errors import CorruptionError, FormatError
from hsfmt.index import parse_index

COLUMNS = make_columns(11, 2, extras=("ragged", "sample"))
INDEX = make_index(COLUMNS, ["a", "é" * 3], [5, 6])


def test_an_index_comes_back():
    data = INDEX.to_bytes("p")
    index = parse_index(data, "p", COLUMNS, "x")
    assert (index.n_samples, index.lengths.tolist()) == (2, [5, 6])
    assert [index.sample_id(i) for i in range(2)] == ["a", "ééé"]
    assert index.metadata(1) == {"a": 1}
    assert index.to_bytes("p") == data
    assert load(data)["chunks.hidden_states"].shape == (6, 3)
    assert set(load(data)) >= {"token_offsets", "valid.boxes", "offsets.boxes", "valid.score", "chunks.score"}


def changed(name, change, key=None):
    """Return the index with one array changed."""
    if key is None:
        array = np.array(getattr(INDEX, name))
        return dataclasses.replace(INDEX, **{name: change(array)})
    mapping = dict(getattr(INDEX, name))
    mapping[key] = change(np.array(mapping[key]))
    return dataclasses.replace(INDEX, **{name: mapping})


def put(*at, value):
    def change(array):
        array[at] = value
        return array

    return change


HOSTILE = {
    "token offsets from 1": (changed("token_offsets", put(0, value=1)), "token_offsets"),
    "token offsets to the wrong end": (changed("token_offsets", put(2, value=12)), "token_offsets"),
    "an empty sample": (changed("token_offsets", put(1, value=11)), "token_offsets"),
    "negative offsets": (changed("token_offsets", put(1, value=-1)), "token_offsets"),
    "falling offsets": (changed("token_offsets", put(1, value=12)), "token_offsets"),
    "token offsets of int32": (changed("token_offsets", lambda a: a.astype(np.int32)), "token_offsets"),
    "no samples": (changed("token_offsets", lambda a: a[:1]), "x: expected at least one sample"),
    "no offsets": (changed("token_offsets", lambda a: a[:0]), "x: expected at least one sample"),
    "more supervised tokens than tokens": (changed("n_supervised", put(0, value=6)), "n_supervised"),
    "negative supervised tokens": (changed("n_supervised", put(0, value=-1)), "n_supervised"),
    "a row too few": (changed("n_supervised", lambda a: a[:1]), "n_supervised"),
    "a mask flag of 2": (changed("loss_mask_given", put(0, value=2)), "loss_mask_given"),
    "ids cut short": (changed("ids", lambda a: a[:-1]), "id_offsets"),
    "an empty id": (changed("id_offsets", put(1, value=0)), "id_offsets"),
    "an id that ends within a character": (changed("id_offsets", put(1, value=2)), "ids: expected ids of UTF-8"),
    "an id of other bytes": (changed("ids", put(1, value=0xFF)), "ids: expected ids of UTF-8"),
    "id offsets beyond the end": (changed("id_offsets", put(1, value=2**40)), "id_offsets"),
    "metadata beyond the end": (changed("meta_offsets", put(2, value=99)), "meta_offsets"),
    "a digest too few": (changed("content_digest", lambda a: a[:1]), "content_digest"),
    "digests of 8 bytes": (changed("extra_digest", lambda a: a[:, :8]), "extra_digest"),
    "a validity of 255": (changed("valid", put(0, value=255), "score"), "score"),
    "no validity": (dataclasses.replace(INDEX, valid={"boxes": INDEX.valid["boxes"]}), "valid.score"),
    "ragged offsets to the wrong end": (changed("offsets", put(2, value=7), "boxes"), "offsets.boxes"),
    "ragged offsets that fall": (changed("offsets", put(1, value=7), "boxes"), "offsets.boxes"),
    "no ragged offsets": (dataclasses.replace(INDEX, offsets={}), "offsets.boxes"),
    "a chunk too few": (changed("chunks", lambda a: a[:-1], "hidden_states"), "chunks.hidden_states"),
    "a chunk too many": (changed("chunks", lambda a: np.vstack([a, a[-1:]]), "input_ids"), "chunks.input_ids"),
    "no chunk table": (dataclasses.replace(INDEX, chunks={}), "chunks.hidden_states"),
    "chunks that overlap": (changed("chunks", put(1, 0, value=64), "hidden_states"), "dense and in order in shard 0"),
    "a gap between chunks": (changed("chunks", put(1, 0, value=99), "hidden_states"), "dense and in order in shard 0"),
    "a shard that starts late": (changed("chunks", put(0, 0, value=4), "hidden_states"), "in shard 0"),
    "a second shard that goes on": (changed("chunks", put(4, 0, value=272), "hidden_states"), "in shard 1"),
    "two chunks swapped": (changed("chunks", lambda a: a[[1, 0, 2, 3, 4, 5]], "hidden_states"), "in shard 0"),
    "an offset of 2**63": (changed("chunks", put(1, 0, value=2**63), "hidden_states"), "in shard 0"),
    "a payload of nothing": (changed("chunks", put(0, 1, value=0), "hidden_states"), "payloads of 64 to 64 bytes"),
    "a payload of 2**64 - 1": (changed("chunks", put(0, 1, value=2**64 - 1), "hidden_states"), "payloads of 64"),
    "a raw payload one short": (changed("chunks", put(0, 1, value=63), "hidden_states"), "payloads of 64"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_contradictions_are_refused(case):
    index, message = HOSTILE[case]
    with pytest.raises(CorruptionError, match=message):
        parse_index(index.to_bytes("p"), "p", COLUMNS, "x")


def test_a_compressed_payload_has_at_least_a_byte_and_at_most_the_cap():
    column = dataclasses.replace(COLUMNS["score"], codec="zstd")
    columns = {**COLUMNS, "score": column}

    def index(nbytes):
        return changed("chunks", put(0, 1, value=nbytes), "score").to_bytes("p")

    for nbytes in (1, column.max_payload_nbytes):
        assert parse_index(index(nbytes), "p", columns, "x").chunks["score"][0, 1] == nbytes
    for nbytes in (0, column.max_payload_nbytes + 1):
        with pytest.raises(CorruptionError, match=f"payloads of 1 to {column.max_payload_nbytes} bytes"):
            parse_index(index(nbytes), "p", columns, "x")


def test_an_index_of_another_part_or_kind_is_refused():
    with pytest.raises(CorruptionError, match="the index of part q"):
        parse_index(INDEX.to_bytes("p"), "q", COLUMNS, "x")
    for metadata in ({"format": "1.0", "kind": "hsfmt.snapshot", "part": "p"}, {}):
        with pytest.raises(CorruptionError, match="the index of part p"):
            parse_index(tables.serialize({"a": np.zeros(1, np.uint8)}, metadata), "p", COLUMNS, "x")


def test_ids_and_metadata_have_a_cap():
    for index, where in (
        (make_index(COLUMNS, ["a", "b" * 4097], [5, 6]), "id_offsets: expected at most 4096"),
        (
            make_index(COLUMNS, ["a", "b"], [5, 6], meta=b"x" * ((1 << 20) + 1)),
            "meta_offsets: expected at most 1048576",
        ),
    ):
        with pytest.raises(CorruptionError, match=where):
            parse_index(index.to_bytes("p"), "p", COLUMNS, "x")


def test_all_problems_come_at_once():
    index = dataclasses.replace(
        changed("n_supervised", put(0, value=6)), loss_mask_given=np.full(2, 3, np.uint8),
        chunks={**INDEX.chunks, "score": INDEX.chunks["score"] * np.uint64(0)},
    )  # fmt: skip
    with pytest.raises(CorruptionError) as caught:
        parse_index(index.to_bytes("p"), "p", COLUMNS, "x")
    assert [problem.where for problem in caught.value.problems] == [
        "x: n_supervised",
        "x: loss_mask_given",
        "x: chunks.score",
    ]


def test_metadata_is_an_object():
    for meta in (b"[]", b"", b"{", b'{"a":NaN}', b'{"a":1,"a":2}', b"\xff"):
        index = parse_index(make_index(COLUMNS, ["a", "b"], [5, 6], meta=meta).to_bytes("p"), "p", COLUMNS, "x")
        with pytest.raises(FormatError, match="metadata of a"):
            index.metadata(0)
