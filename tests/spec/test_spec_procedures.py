"""Rules about what happens in which order, and about what is refused before anything is stored."""

import ast
import hashlib
import threading

import numpy as np
import pytest

from hsfmt import catalog, sealing
from hsfmt.columns import MAX_SHARD_CHUNK_ROWS, MAX_SHARD_NBYTES, fitted_shard_rows, parse_column
from hsfmt.errors import CorruptionError, DuplicateSampleError, ExpectationError, NonFiniteError, SampleError
from hsfmt.header import make_header
from hsfmt.index import MAX_META_NBYTES, parse_index
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.sealing import seal
from hsfmt.storage import open_store
from hsfmt.storage.local import LocalStore, _LocalObjectWriter
from hsfmt.writers.dataset_writer import DatasetWriter
from spec.vectors.folder import Folder, Table

from vector_cases import VALID, VECTORS  # isort: skip

SETTINGS = {"layers": [1, 3], "hidden_size": 4, "final_norm": "pre", "codec": "none", "chunk_tokens": 4}


def states(n_tokens: int, value: int = 0x3F80) -> np.ndarray:
    return np.full((n_tokens, 2, 4), value, np.uint16)


def write(root, *ids: str, **options) -> None:
    with DatasetWriter(root, **{**SETTINGS, **options}) as w:
        for i, sample_id in enumerate(ids):
            w.write(sample_id, np.arange(i + 1), states(i + 1))


@pytest.fixture
def events(monkeypatch) -> list[tuple[str, str]]:
    """What the local store is asked for, in order."""
    seen: list[tuple[str, str]] = []

    def record(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(self, *args, **kwargs):
            first = args[0] if args else self._path
            result = original(self, *args, **kwargs)
            seen.extend((name, p) for p in ([first] if isinstance(first, str) else list(first)))
            return result

        monkeypatch.setattr(owner, name, wrapped)

    for name in ("create", "write", "sync", "size", "list", "read"):
        record(LocalStore, name)
    record(_LocalObjectWriter, "commit")
    return seen


# --- layout, tables, index -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_rows", [1, 4, 5, 1000, 1 << 20, 1 << 33])
def test_shards_are_no_larger_than_their_column_needs(n_rows):
    rows = fitted_shard_rows(n_rows, chunk_rows=4, row_nbytes=1 << 10)
    assert rows % 4 == 0
    assert rows < n_rows + 4 or rows == 4
    assert rows * (1 << 10) <= MAX_SHARD_NBYTES
    assert rows // 4 <= MAX_SHARD_CHUNK_ROWS
    entry = {"kind": "token", "dtype": "uint8", "codec": "none"}
    shapes = {"shape": [n_rows, 1 << 10], "chunk_shape": [4, 1 << 10], "shard_shape": [rows, 1 << 10]}
    assert parse_column("x", entry | shapes, "x").shard_rows == rows


@pytest.mark.parametrize("case", VALID)
def test_tables_have_one_byte_form(case):
    paths = sorted((VECTORS / "valid" / case / "dataset/hsfmt").rglob("*.safetensors"))
    assert paths
    for path in paths:
        data = path.read_bytes()
        assert Table(data).to_bytes() == data
        assert int.from_bytes(data[:8], "little") % 8 == 0


def test_long_metadata_is_refused(vector):
    dataset = Folder(vector("valid/minimal"))
    manifest = catalog.load_manifest(open_store(dataset.root), "p-one", catalog.read_header(open_store(dataset.root)))
    table = dataset.index("p-one")
    table.tensors["meta"] = np.full(MAX_META_NBYTES + 1, ord("0"), np.uint8)
    table.tensors["meta_offsets"][1] = MAX_META_NBYTES + 1
    with pytest.raises(CorruptionError, match=f"at most {MAX_META_NBYTES} bytes"):
        parse_index(table.to_bytes(), "p-one", manifest.columns, "index")


# --- samples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "sample_id", "ids", "given", "mask"),
    [
        ("SMP-1", "", [1], states(1), None),
        ("SMP-1", "é" * 2049, [1], states(1), None),
        ("SMP-1", "\ud800", [1], states(1), None),
        ("SMP-1", 7, [1], states(1), None),
        ("SMP-2", "a", [], states(0), None),
        ("SMP-3", "a", [1], states(1).astype(np.float32), None),
        ("SMP-3", "a", [1], states(1)[:, :1], None),
        ("SMP-3", "a", [1, 2], states(1), None),
        ("SMP-4", "a", [1], states(1), [1, 1]),
        ("SMP-4", "a", [1], states(1), [2]),
        ("SMP-4", "a", [1], states(1), [0.5]),
        ("SMP-5", "a", [1.5], states(1), None),
        ("SMP-5", "a", [1 << 31], states(1), None),
        ("SMP-6", "a", [1], states(1, 0x7FC0), None),
    ],
)
def test_samples_that_a_writer_refuses(tmp_path, rule, sample_id, ids, given, mask):
    with DatasetWriter(tmp_path, **SETTINGS) as w:
        with pytest.raises(SampleError):
            w.write(sample_id, ids, given, mask)
        w.write("good", [1], states(1))
    assert list(SampleReader(tmp_path).sample_ids) == ["good"]


def test_nonfinite_states_as_told(tmp_path):
    for policy, n_samples in (("hole", 0), ("keep", 1)):
        with DatasetWriter(tmp_path / policy, nonfinite=policy, **SETTINGS) as w:
            assert w.write("a", [1], states(1, 0x7FC0)) is (policy == "keep")
        assert seal(tmp_path / policy).snapshot.n_samples == n_samples
    with DatasetWriter(tmp_path / "raise", **SETTINGS) as w, pytest.raises(NonFiniteError):
        w.write("a", [1], states(1, 0x7F80))


def test_duplicates_are_refused_or_skipped_as_told(tmp_path):
    write(tmp_path, "a")
    with DatasetWriter(tmp_path, **SETTINGS) as w, pytest.raises(DuplicateSampleError):
        w.write("a", [1], states(1))
    with DatasetWriter(tmp_path, on_duplicate="skip", **SETTINGS) as w:
        assert not w.write("a", [1], states(1))


# --- writing ---------------------------------------------------------------------------------------------------------


def digests(root) -> dict[str, str]:
    files = (path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_only_the_pointer_is_ever_replaced(tmp_path):
    write(tmp_path, "a", "b")
    before = digests(tmp_path)
    write(tmp_path, "c", "d", "e")
    seal(tmp_path, retract=["a"])
    after = digests(tmp_path)
    assert {path for path, value in before.items() if after.get(path) != value} == {"hsfmt/manifest.json"}


def test_manifest_comes_last_and_after_all_is_durable(tmp_path, events):
    write(tmp_path, "a", "b", seal=False, part_names=lambda: "p-one")
    manifest = "hsfmt/manifests/p-one.json"
    committed = events.index(("create", manifest))
    files = [entry["path"] for entry in Folder(tmp_path).manifest("p-one")["files"]]
    last = 0
    for path in files:
        stored = max(i for i, (name, p) in enumerate(events) if p == path and name in ("write", "commit"))
        checked = max(i for i, event in enumerate(events) if event == ("size", path))
        synced = max(i for i, event in enumerate(events) if event == ("sync", path.rpartition("/")[0]))
        assert stored < synced < checked < committed
        last = max(last, checked)
    # Its own folder: by create, and once more for stores whose create does not.
    assert ("sync", "hsfmt/manifests") in events[committed:]
    assert not [e for e in events[committed + 1 :] if e[0] in ("write", "commit", "create")]


def test_a_file_that_vanished_before_the_manifest_commits_nothing(tmp_path, monkeypatch):
    original = LocalStore.size

    def size(self, path):
        return None if path.endswith("/c/0") else original(self, path)

    w = DatasetWriter(tmp_path, seal=False, **SETTINGS)
    w.write("a", [1], states(1))
    monkeypatch.setattr(LocalStore, "size", size)
    with pytest.raises(OSError, match="before the commit"):
        w.close()
    monkeypatch.undo()
    assert catalog.committed_parts(open_store(tmp_path)) == []


def test_samples_are_durable_when_committed_and_not_before(tmp_path):
    w = DatasetWriter(tmp_path, seal=False, **SETTINGS)
    w.write("a", [1], states(1))
    assert "a" not in w.committed_ids()
    assert catalog.committed_parts(open_store(tmp_path)) == []
    assert w.commit() == ["a"]
    assert "a" in w.committed_ids()
    assert len(catalog.committed_parts(open_store(tmp_path))) == 1
    w.close()


def test_a_part_of_holes_is_its_manifest_alone(tmp_path):
    with DatasetWriter(tmp_path, seal=False, part_names=lambda: "p-one", **SETTINGS) as w:
        w.hole("a", "failed")
    assert sorted(digests(tmp_path)) == ["hsfmt/manifests/p-one.json", "parts/zarr.json", "zarr.json"]


def test_many_creators_agree_on_one_header(tmp_path):
    found, barrier = [], threading.Barrier(8)

    def create(i: int) -> None:
        header = make_header(layers=[i], hidden_size=4, final_norm="pre")
        barrier.wait()
        try:
            found.append(catalog.ensure_dataset(open_store(tmp_path), header).layers)
        except ValueError:
            found.append(None)

    threads = [threading.Thread(target=create, args=[i]) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stored = catalog.read_header(open_store(tmp_path)).layers
    assert sorted(found, key=str) == sorted([stored] + [None] * 7, key=str)


# --- sealing ---------------------------------------------------------------------------------------------------------


def test_seal_lists_syncs_writes_points_and_lists_again(tmp_path, events):
    write(tmp_path, "a", "b", seal=False, part_names=lambda: "p-one")
    events.clear()
    fingerprint = seal(tmp_path).snapshot.fingerprint.partition(":")[2]
    ids, index = (f"hsfmt/snapshots/{fingerprint}/{name}.safetensors" for name in ("ids", "index"))
    order = [
        events.index(("list", "hsfmt/manifests")),
        events.index(("read", "hsfmt/manifests/p-one.json")),
        events.index(("read", "hsfmt/index/p-one.safetensors")),
        events.index(("write", ids)),
        events.index(("write", index)),
        events.index(("sync", ids.rpartition("/")[0])),
        max(i for i, (name, path) in enumerate(events) if path == "hsfmt/manifest.json" and name == "write"),
        max(i for i, event in enumerate(events) if event == ("list", "hsfmt/manifests")),
    ]
    assert order == sorted(set(order))
    for folder in ("hsfmt/manifests", "hsfmt/index", "parts/p-one/hidden_states/c/0/0", "parts/p-one/loss_mask"):
        assert events.index(("sync", folder)) < events.index(("write", ids))


def test_seal_starts_over_when_a_part_was_committed_meanwhile(tmp_path, monkeypatch):
    write(tmp_path, "a", seal=False)
    original = LocalStore.write

    def write_and_commit(self, path, data):
        original(self, path, data)
        if path == "hsfmt/manifest.json":
            monkeypatch.setattr(LocalStore, "write", original)
            write(tmp_path, "b", seal=False)

    monkeypatch.setattr(LocalStore, "write", write_and_commit)
    monkeypatch.setattr(LocalStore, "replace", lambda self, path, data: self.write(path, data))
    sealed = seal(tmp_path)
    assert (sealed.rounds, sealed.snapshot.n_samples) == (2, 2)
    assert sorted(SampleReader(tmp_path).sample_ids) == ["a", "b"]


def test_two_seals_and_writers_lose_nothing(tmp_path):
    stop = threading.Event()
    write(tmp_path, "first", seal=False)

    def seal_until_told() -> None:
        while not stop.is_set():
            sealing.seal(tmp_path)

    sealers = [threading.Thread(target=seal_until_told) for _ in range(2)]
    for thread in sealers:
        thread.start()
    for i in range(5):
        write(tmp_path, f"s{i}", seal=False)
    stop.set()
    for thread in sealers:
        thread.join()
    assert sorted(SampleReader(tmp_path).sample_ids) == ["first", *(f"s{i}" for i in range(5))]


def test_retracted_stays_retracted(tmp_path):
    write(tmp_path, "a", "b")
    seal(tmp_path, retract=["a"])
    write(tmp_path, "c")
    assert list(SampleReader(tmp_path).sample_ids) == ["b", "c"]
    with DatasetWriter(tmp_path, on_duplicate="skip", **SETTINGS) as w:
        assert not w.write("a", [1], states(1))


def test_retractions_of_a_seal_that_races_stay(tmp_path, monkeypatch):
    write(tmp_path, "a", "b", "c")
    original = LocalStore.write

    def seal_before_pointing(self, path, data):
        if path == "hsfmt/manifest.json":
            monkeypatch.setattr(LocalStore, "write", original)
            seal(tmp_path, retract=["b"])
        original(self, path, data)

    monkeypatch.setattr(LocalStore, "write", seal_before_pointing)
    monkeypatch.setattr(LocalStore, "replace", lambda self, path, data: self.write(path, data))
    seal(tmp_path, retract=["a"])
    assert list(SampleReader(tmp_path).sample_ids) == ["c"]


@pytest.mark.parametrize("expect", [3, ["a"], ["a", "b", "c"]])
def test_unexpected_set_replaces_nothing(tmp_path, expect):
    write(tmp_path, "a", seal=False)
    seal(tmp_path)
    before = digests(tmp_path)["hsfmt/manifest.json"]
    write(tmp_path, "b", seal=False)
    with pytest.raises(ExpectationError):
        seal(tmp_path, expect=expect)
    assert digests(tmp_path)["hsfmt/manifest.json"] == before
    assert seal(tmp_path, expect=["b", "a"]).snapshot.n_samples == 2


# --- reading ---------------------------------------------------------------------------------------------------------


def test_a_broken_sample_is_not_replaced_and_hides_no_other(vector):
    dataset = Folder(vector("valid/two-parts"))
    dataset.patch(dataset.shard("p-two", "hidden_states"), 0, b"\xff")
    reader = SampleReader(dataset.root)
    with pytest.raises(CorruptionError, match="s-1"):
        reader.read(1)
    assert [reader.read(i).sample_id for i in (0, 2)] == ["s-0", "s-2"]
    assert len(reader.lengths) == 4


def test_no_module_of_the_format_unpickles(repo_root):
    unsafe = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    found = []
    files = [*(repo_root / "hsfmt").rglob("*.py"), *(repo_root / "readers").rglob("*.py")]
    for path in files:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            names = {a.name for a in node.names} if isinstance(node, ast.Import) else set()
            names |= {node.module or ""} if isinstance(node, ast.ImportFrom) else set()
            if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "weights_only"):
                safe = node.arg == "weights_only"
                if not (isinstance(node.value, ast.Constant) and node.value.value is safe):
                    names.add("pickle")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                names.add("pickle")
            found += [f"{path.name}: {name}" for name in names if name.partition(".")[0] in unsafe]
    assert found == []
