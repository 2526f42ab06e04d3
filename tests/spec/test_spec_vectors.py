"""The vectors, read by the library and by the reader that was written from the spec alone."""

import os
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import xxhash
from vector_cases import INVALID, SPEC, VALID, VECTORS, about, expected

from hsfmt import catalog, layout
from hsfmt.errors import FormatVersionError, HsfmtError, NotFoundError
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.verification import verify
from hsfmt.sealing import seal
from hsfmt.snapshot import parse_snapshot_ids
from hsfmt.storage import open_store
from hsfmt.writers.dataset_writer import DatasetWriter
from spec.reference.dataset import load, to_json
from spec.reference.refusal import Refused
from spec.vectors.make import make, sums


def test_released_vectors_are_as_they_were():
    assert (VECTORS / "SHA256SUMS").read_text() == sums(VECTORS)


def test_vectors_stay_small():
    assert sum(path.stat().st_size for path in SPEC.rglob("*") if path.is_file()) < 1_500_000


@pytest.mark.skipif(numcodecs.__version__ != "0.16.6", reason="zstd frames differ between releases of numcodecs")
def test_script_still_makes_the_vectors(tmp_path):
    make(tmp_path)
    different = [
        path.relative_to(tmp_path).as_posix()
        for path in sorted(tmp_path.rglob("*"))
        if path.is_file() and _bytes(VECTORS / path.relative_to(tmp_path)) != path.read_bytes()
    ]
    assert different == []


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


@pytest.mark.parametrize("case", VALID)
def test_reference_reads_valid(vector, case):
    assert to_json(load(vector(f"valid/{case}"))) == expected(case)


@pytest.mark.parametrize("case", VALID)
def test_library_reads_valid(vector, case):
    reader = SampleReader(vector(f"valid/{case}"), snapshot="live" if case == "unsealed" else None)
    wanted = expected(case)
    assert reader.header.to_json() == wanted["header"]
    assert reader.content_digest == wanted["content_digest"]
    assert list(reader.sample_ids) == [sample["id"] for sample in wanted["samples"]]
    for i, sample in enumerate(wanted["samples"]):
        found = reader.read(i)
        assert _shown(found.hidden_states) == sample["hidden_states"]
        assert _shown_ids(found.input_ids) == sample["input_ids"]
        mask = sample["loss_mask"]
        assert mask == (found.loss_mask.astype(int).tolist() if isinstance(mask, list) else _digest(found.loss_mask))
        assert found.metadata == sample["metadata"]
        extras = {name: None if rows is None else rows.tobytes().hex() for name, rows in found.extras.items()}
        assert extras == sample["extras"]


def _shown(states: np.ndarray) -> str:
    data = states.tobytes()
    return data.hex() if len(data) <= 1024 else _digest(states)


def _shown_ids(ids: np.ndarray) -> list[int] | str:
    return ids.tolist() if len(ids) <= 64 else _digest(ids.astype("<i8"))


def _digest(array: np.ndarray) -> str:
    return "xxh3_128:" + xxhash.xxh3_128_hexdigest(array.tobytes())


@pytest.mark.parametrize("case", VALID)
def test_verify_accepts_valid(vector, case):
    report = verify(vector(f"valid/{case}"), level="full")
    assert [str(finding) for finding in report.errors] == []


@pytest.mark.parametrize("case", sorted(set(VALID) - {"newer-writers-only", "subset"}))
def test_sealing_valid_again_changes_no_sample(vector, case):
    dataset = vector(f"valid/{case}")
    assert seal(dataset).snapshot.content_digest == expected(case)["content_digest"]


def test_sealing_a_subset_makes_it_complete(vector):
    snapshot = seal(vector("valid/subset")).snapshot
    assert snapshot.complete
    assert snapshot.content_digest == expected("two-parts")["content_digest"] != expected("subset")["content_digest"]


def test_attachments_outlive_a_seal(vector):
    dataset = vector("valid/attachment")
    with DatasetWriter(dataset, layers=[1, 2, 4], hidden_size=4, final_norm="pre") as writer:
        writer.write("new", np.arange(2), np.zeros((2, 3, 4), np.uint16))
    snapshot = seal(dataset).snapshot
    assert [entry["name"] for entry in snapshot.attachments] == ["d2t.npy"]
    assert snapshot.n_samples == 2
    assert verify(dataset, level="full").ok


def test_seal_and_writer_leave_datasets_of_newer_writers_alone(vector):
    dataset = vector("valid/newer-writers-only")
    with pytest.raises(FormatVersionError, match=r"supports up to 1\.0.*from 1\.1 on.*install a newer hsfmt"):
        seal(dataset)
    with pytest.raises(FormatVersionError):
        DatasetWriter(dataset, layers=[1, 2, 4], hidden_size=4, final_norm="pre")


def test_unsealed_is_refused_unless_live_is_asked_for(vector):
    with pytest.raises(NotFoundError, match=r"hsfmt seal.*live"):
        SampleReader(vector("valid/unsealed"))


@pytest.mark.parametrize("case", INVALID)
def test_reference_refuses_invalid_by_its_rule(vector, case):
    with pytest.raises(Refused) as refused:
        load(vector(f"invalid/{case}"))
    assert refused.value.rule == about(case)["rule"]


@pytest.mark.parametrize("case", INVALID)
def test_library_refuses_invalid_where_it_must(vector, case):
    dataset, where = vector(f"invalid/{case}"), about(case)["where"]
    steps = {"open": _open, "list": _list, "read": _read}
    if where == "verify":
        _open(dataset)
        _read(dataset)
    else:
        with pytest.raises(HsfmtError) as refused:
            steps[where](dataset)
        assert all(problem.where and problem.expected and problem.got for problem in refused.value.problems)
    if where == "read":
        _open(dataset)


@pytest.mark.parametrize("case", INVALID)
def test_verify_finds_invalid(vector, case):
    dataset = vector(f"invalid/{case}")
    report = verify(dataset, level="full")
    assert report.errors
    assert not report.ok


def _open(dataset: os.PathLike[str]) -> None:
    store = open_store(dataset)
    pointer = catalog.read_pointer(store)
    assert pointer is not None
    snapshot, _ = catalog.read_snapshot(store, pointer.fingerprint, pointer.index_nbytes)
    for ref in snapshot.parts:
        catalog.load_ref(store, ref, snapshot.header)


def _list(dataset: os.PathLike[str]) -> None:
    store = open_store(dataset)
    header = catalog.read_header(store)
    parts = [catalog.load_part(store, name, header) for name in catalog.committed_parts(store)]
    catalog.without_superseded(parts)


def _read(dataset: os.PathLike[str]) -> None:
    reader = SampleReader(dataset)
    snapshot = reader.snapshot
    path = layout.snapshot_path(snapshot.fingerprint, "ids")
    parse_snapshot_ids(open_store(dataset).read(path, snapshot.ids_nbytes), snapshot, path)
    for i in range(snapshot.n_samples):
        assert isinstance(reader.read(i).metadata, dict)
