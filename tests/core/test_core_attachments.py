"""Arrays that belong to a dataset as a whole: written once, kept by every later seal, checked by every reader."""

import io
from pathlib import Path

import numpy as np
import pytest
from made_parts import HEADER, put_part

from hsfmt import HiddenStateDataset, attachments, digests, layout, sealing
from hsfmt.catalog import ensure_dataset, read_pointer
from hsfmt.errors import CorruptionError, UsageError
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.sealing import build_live, seal
from hsfmt.storage import open_store
from hsfmt.storage.local import LocalStore

D2T, T2D = np.array([1, 259], np.int64), np.array([False, True, True])


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path / "dataset")
    ensure_dataset(store, HEADER)
    put_part(store, "p1", ids=("a", "b"))
    return store


def names(snapshot):
    return [entry["name"] for entry in snapshot.attachments]


def test_they_come_back_bit_for_bit(store):
    given = {
        "d2t": D2T,
        "t2d-64": T2D,
        "scores": np.arange(6, dtype=">f4").reshape(2, 3).T,
        "one": np.float16(2),
        "none": np.zeros((0, 4), np.uint8),
    }
    sealed = seal(store, attachments=given)
    assert names(sealed.snapshot) == ["d2t.npy", "none.npy", "one.npy", "scores.npy", "t2d-64.npy"]
    found = SampleReader(store).attachments()
    assert sorted(found) == sorted(given)
    for name, array in given.items():
        assert np.array_equal(found[name], array), name
        assert (found[name].dtype, found[name].shape) == (array.dtype.newbyteorder("="), array.shape)
    with pytest.raises(ValueError, match="read-only"):
        found["d2t"][0] = 7


def test_plain_numpy_reads_the_file(store):
    (entry,) = seal(store, attachments={"d2t": D2T}).snapshot.attachments
    path = Path(store.url) / layout.ATTACHMENTS / entry["digest"].partition(":")[2] / "d2t.npy"
    assert np.load(path).tolist() == D2T.tolist()
    assert (path.stat().st_size, digests.digest(path.read_bytes())) == (entry["nbytes"], entry["digest"])


def test_later_seals_keep_them_until_told_to_drop_them(store):
    first = seal(store, attachments={"d2t": D2T, "t2d": T2D})
    assert not seal(store).changed
    assert not seal(store, attachments={"t2d": T2D}).changed
    put_part(store, "p2", ids=("c",), lengths=(3,))
    assert seal(store, attachments={"token_freq": [0, 4]}).snapshot.n_samples == 3
    assert sorted(SampleReader(store).attachments()) == ["d2t", "t2d", "token_freq"]
    assert names(seal(store, drop_attachments=["d2t", "t2d"]).snapshot) == ["token_freq.npy"]
    # The former snapshot has what it had.
    old = SampleReader(store, snapshot=first.snapshot.fingerprint)
    assert old.attachments()["d2t"].tolist() == D2T.tolist()


def test_another_one_of_the_name_is_refused(store):
    seal(store, attachments={"d2t": D2T})
    pointer = read_pointer(store)
    with pytest.raises(UsageError, match=r"attachment d2t.npy: .* --drop-attachment d2t$"):
        seal(store, attachments={"d2t": D2T + 1})
    assert read_pointer(store) == pointer
    sealed = seal(store, attachments={"d2t": D2T + 1}, drop_attachments=["d2t"])
    assert names(sealed.snapshot) == ["d2t.npy"]
    assert SampleReader(store).attachments()["d2t"].tolist() == [2, 260]


def test_names_that_are_not_there_can_not_be_dropped(store):
    seal(store, attachments={"d2t": D2T})
    with pytest.raises(UsageError, match=r"names of attachments: d2t, got t2d"):
        seal(store, drop_attachments=["t2d"])
    with pytest.raises(UsageError, match="a collection of names"):
        seal(store, drop_attachments="d2t")


def test_without_a_pointer_those_of_every_snapshot_stay(store):
    seal(store, attachments={"d2t": D2T})
    put_part(store, "p2", ids=("c",), lengths=(3,))
    seal(store, attachments={"t2d": T2D})
    (Path(store.url) / layout.POINTER).unlink()
    assert names(seal(store).snapshot) == ["d2t.npy", "t2d.npy"]


def test_the_live_set_has_them(store):
    sealed = seal(store, attachments={"d2t": D2T})
    index_file, _ = build_live(store, HEADER)
    assert digests.digest(index_file) == sealed.snapshot.fingerprint


def test_seals_that_race_keep_both(store, monkeypatch):
    original = sealing.build_snapshot
    raced = []

    def build(*args):
        if not raced:
            raced.append(True)
            seal(store, attachments={"t2d": T2D})
        return original(*args)

    monkeypatch.setattr(sealing, "build_snapshot", build)
    sealed = seal(store, attachments={"d2t": D2T})
    assert (names(sealed.snapshot), sealed.rounds) == (["d2t.npy", "t2d.npy"], 2)
    assert sorted(SampleReader(store).attachments()) == ["d2t", "t2d"]


def test_durable_before_the_snapshot(store, monkeypatch):
    events = []
    for name in ("create", "write"):
        original = getattr(LocalStore, name)

        def record(self, path, data, original=original):
            result = original(self, path, data)
            events.append(path.split("/")[1])
            return result

        monkeypatch.setattr(LocalStore, name, record)
    seal(store, attachments={"d2t": D2T, "t2d": T2D})
    assert events == ["attachments", "attachments", "snapshots", "snapshots", "manifest.json"]


def test_a_damaged_file_is_refused_and_mended_by_attaching_it_again(store):
    (entry,) = seal(store, attachments={"d2t": D2T}).snapshot.attachments
    path = Path(store.url) / attachments.entry_path(entry, "")
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + b"\1")
    with pytest.raises(CorruptionError, match=r"d2t.npy: expected a file of xxh3_128:"):
        SampleReader(store).attachments()
    seal(store, attachments={"d2t": D2T})
    assert path.read_bytes() == sound


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("D2T", D2T),
        ("../d2t", D2T),
        ("", D2T),
        ("x" * 61, D2T),
        ("d2t", np.array(["a"])),
        ("d2t", np.array([object()])),
        ("d2t", np.zeros(1, complex)),
    ],
)
def test_what_can_not_be_attached(store, name, array):
    with pytest.raises(UsageError, match="attachments"):
        seal(store, attachments={name: array})
    assert read_pointer(store) is None
    assert not (Path(store.url) / layout.ATTACHMENTS).exists()


def npy(header: bytes, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY",
        npy(b"{'descr': '<i8', 'fortran_order': False, 'shape': (1152921504606846976,), }\n"),
        npy(b"{'descr': '<i8', 'fortran_order': False, 'shape': (2,), }\n", bytes(15)),
        npy(b"{'descr': '<i8', 'fortran_order': False, 'shape': (2,), }\n", bytes(17)),
        npy(b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n", b"cos\nsystem\n(S'true'\ntR."),
        npy(b"{'descr': '<i8', 'fortran_order': False, 'shape': (-1,), }\n", bytes(8)),
        npy(b"{'descr': '<i8', 'fortran_order': False, 'shape': (-1, -64), }\n", bytes(512)),
        npy(b"{'descr': '<i8', 'fortran_order': False, 'shape': (0, -3), }\n"),
        npy(b"{'descr': '<i8', 'fortran_order': False, 'shape': (0, 99999999999999999999), }\n"),
        npy(b"{'descr': '<i8', 'fortran_order': False, 'shape': (" + b"1, " * 65 + b"), }\n", bytes(8)),
        npy(b"{'descr': '<i8', 'fortran_order': False, 'shape': (2), }\n", bytes(16)),
        npy(b"{'descr': '<i7', 'fortran_order': False, 'shape': (), }\n", bytes(7)),
        npy(b"{'descr': '<i8', 'fortran_order': 0, 'shape': (), }\n", bytes(8)),
        npy(b"{'descr': '<i8', 'descr': '<i8', 'shape': (), }\n", bytes(8)),
        npy(b"{'descr': '\\d<i8', 'fortran_order': False, 'shape': (), }\n", bytes(8)),
        npy(b"(" * 5000),
        npy(b"__import__('os').system('true')\n"),
        npy(b"{'descr': '<c8', 'fortran_order': False, 'shape': (1,), }\n", bytes(8)),
    ],
)
def test_files_that_are_no_arrays_of_numbers(data):
    with pytest.raises(CorruptionError, match=r"x: expected a \.npy file of numbers"):
        attachments.parse_array(data, "x")


def test_any_other_byte_of_a_header_is_refused_or_means_what_numpy_says():
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.arange(64, dtype="<i2").reshape(4, 16), (1, 0))
    sound = stream.getvalue()
    refused = 0
    for at in range(128):
        for value in range(256):
            data = sound[:at] + bytes([value]) + sound[at + 1 :]
            try:
                found = attachments.parse_array(data, "x")
            except CorruptionError:
                refused += 1
                continue
            wanted = np.load(io.BytesIO(data), allow_pickle=False)
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
            assert found.tobytes() == wanted.tobytes()
    assert 30_000 < refused < 128 * 256 - 128


def test_a_listed_file_with_an_absurd_shape_is_refused(store):
    data = npy(b"{'descr': '<i8', 'fortran_order': False, 'shape': (-1, -64), }\n", bytes(512))
    entry = {"digest": digests.digest(data), "name": "d2t.npy", "nbytes": len(data)}
    store.create(attachments.entry_path(entry, ""), data)
    with pytest.raises(CorruptionError, match=r"d2t.npy: expected a \.npy file of numbers"):
        attachments.load(store, [entry], "snapshot")


def test_versions_and_orders_of_the_format():
    values = np.arange(6, dtype=np.int16).reshape(2, 3)
    for version in ((1, 0), (2, 0)):
        stream = io.BytesIO()
        np.lib.format.write_array(stream, np.asfortranarray(values), version)
        assert np.array_equal(attachments.parse_array(stream.getvalue(), "x"), values)


@pytest.mark.torch
def test_a_dataset_gives_them(store):
    seal(store, attachments={"d2t": D2T})
    assert HiddenStateDataset(store).attachments()["d2t"].tolist() == D2T.tolist()
