"""What a broken seal could write under a right fingerprint, against the parts that it names."""

import json

import numpy as np
import pytest

from hsfmt import canonical, digests, tables
from hsfmt.readers.verification import verify


class SnapshotForger:
    """Changes the current snapshot and names it anew."""

    def __init__(self, root):
        self.root = root
        (self.folder,) = (root / "hsfmt/snapshots").iterdir()
        table = tables.parse((self.folder / "index.safetensors").read_bytes(), "index")
        self.arrays = {name: np.array(array) for name, array in table.arrays.items()}
        self.metadata = table.metadata

    def sign(self):
        data = tables.serialize(self.arrays, self.metadata)
        fingerprint = digests.digest(data)
        (self.folder / "index.safetensors").write_bytes(data)
        self.folder = self.folder.rename(self.folder.with_name(fingerprint.partition(":")[2]))
        pointer = json.loads((self.root / "hsfmt/manifest.json").read_bytes())
        del pointer["digest"]
        pointer |= {
            "content_digest": self.metadata["content_digest"],
            "fingerprint": fingerprint,
            "index": {"nbytes": len(data), "path": f"hsfmt/snapshots/{self.folder.name}/index.safetensors"},
            "samples": len(self.arrays["n_tokens"]),
            "tokens": self.metadata["counts"]["tokens"],
        }
        body = canonical.dumps(pointer)
        (self.root / "hsfmt/manifest.json").write_bytes(canonical.dumps({**pointer, "digest": digests.digest(body)}))

    def set_ids(self, ids):
        data, offsets = tables.pack_strings(ids)
        file = tables.serialize({"ids": data, "id_offsets": offsets}, {"format": "1.0", "kind": "hsfmt.snapshot-ids"})
        (self.folder / "ids.safetensors").write_bytes(file)
        self.metadata["ids"] = {"digest": digests.digest(file), "nbytes": len(file)}

    def count(self):
        """Make the counts agree with the tables."""
        self.metadata["counts"] |= {
            "samples": len(self.arrays["row"]),
            "shadowed": len(self.arrays["shadowed_row"]),
            "supervised_tokens": int(self.arrays["n_supervised"].sum()),
            "tokens": int(self.arrays["n_tokens"].sum()),
        }

    def errors(self, level="full"):
        self.sign()
        path = f"hsfmt/snapshots/{self.folder.name}/index.safetensors"
        return {
            (finding.severity, finding.code, finding.where.removeprefix(f"{path}: ")): finding
            for finding in verify(self.root, level=level).problems
        }


@pytest.fixture
def snapshot(dataset):
    return SnapshotForger(dataset)


def test_the_forger_alone_changes_nothing(snapshot):
    assert snapshot.errors() == {}


@pytest.mark.parametrize("member", ["n_tokens", "n_supervised", "id_hash"])
def test_figures_of_a_sample_that_its_part_does_not_have(snapshot, member):
    snapshot.arrays[member][4] ^= 1
    snapshot.count()
    found = snapshot.errors()
    finding = found["error", "snapshot_rows", member]
    assert finding.samples == ("s1-1",) or not finding.samples
    assert set(found) == {("error", "snapshot_rows", member)}


@pytest.mark.parametrize("level", ["quick", "full"])
@pytest.mark.parametrize("count", ["samples", "tokens", "supervised_tokens", "parts", "shadowed", "retracted"])
def test_counts_of_another_snapshot(snapshot, count, level):
    snapshot.metadata["counts"][count] += 1
    assert ("error", "corrupt", "counts") in snapshot.errors(level)


def test_holes_of_another_snapshot(snapshot):
    assert snapshot.metadata["counts"]["holes"] == 2
    snapshot.metadata["counts"]["holes"] = 1
    assert set(snapshot.errors("complete")) == {("error", "counts", "counts.holes")}


def test_a_sample_in_the_place_of_another(snapshot):
    snapshot.arrays["row"][1] = 0
    assert ("error", "snapshot_rows", "row") in snapshot.errors("quick")
    found = snapshot.errors()
    assert ("error", "snapshot_rows", "n_tokens") in found
    assert ("error", "snapshot_rows", "id_hash") in found


def test_a_row_beyond_its_part(snapshot):
    snapshot.arrays["row"][1] = 99
    assert set(snapshot.errors()) == {("error", "snapshot_rows", "row")}


def test_a_sample_left_out(snapshot):
    for name in ("n_tokens", "n_supervised", "part", "row", "id_hash"):
        snapshot.arrays[name] = snapshot.arrays[name][:-1]
    snapshot.set_ids([b"s0-0", b"s0-1", b"s0-2", b"s1-0", b"s1-1"])
    snapshot.count()
    found = snapshot.errors("quick")
    assert set(found) == {("error", "snapshot_rows", "row"), ("error", "dataset_digest", "content_digest")}
    assert found["error", "snapshot_rows", "row"].got == "1 left out, 0 listed again"


def test_another_order_is_a_warning(snapshot):
    for name in ("n_tokens", "n_supervised", "part", "row", "id_hash"):
        snapshot.arrays[name] = snapshot.arrays[name][::-1]
    snapshot.set_ids([b"s1-2", b"s1-1", b"s1-0", b"s0-2", b"s0-1", b"s0-0"])
    assert set(snapshot.errors()) == {("warning", "snapshot_order", "row")}


def test_ids_of_other_samples(snapshot):
    snapshot.set_ids([b"s0-0", b"s0-2", b"s0-1", b"s1-0", b"s1-1", b"s1-2"])
    assert set(snapshot.errors("quick")) == {("error", "snapshot_rows", "id_hash")}


def test_a_content_digest_of_other_samples(snapshot):
    snapshot.metadata["content_digest"] = digests.digest(b"others")
    assert set(snapshot.errors("complete")) == {("error", "dataset_digest", "content_digest")}


@pytest.mark.parametrize("table", ["part_manifest_digest", "part_index_digest"])
def test_a_digest_of_another_part_is_found_at_tier_quick(snapshot, table):
    snapshot.arrays[table][1, 3] ^= 1
    found = snapshot.errors("quick")
    assert set(found) == {("error", "snapshot_part", "hsfmt/manifests/part-1.json")}
    (finding,) = found.values()
    assert finding.samples == ("s1-0", "s1-1", "s1-2")


def test_served_samples_called_shadowed(snapshot):
    snapshot.arrays["shadowed_part"] = np.array([1], np.int32)
    snapshot.arrays["shadowed_row"] = np.array([2], np.int32)
    snapshot.arrays["shadowed_same"] = np.array([1], np.uint8)
    for name in ("n_tokens", "n_supervised", "part", "row", "id_hash"):
        snapshot.arrays[name] = snapshot.arrays[name][:-1]
    snapshot.set_ids([b"s0-0", b"s0-1", b"s0-2", b"s1-0", b"s1-1"])
    snapshot.count()
    assert set(snapshot.errors()) == {
        ("error", "dataset_digest", "content_digest"),
        ("error", "snapshot_rows", "shadowed_row"),
    }


@pytest.mark.parametrize("damage", ["nothing", "flip", "cut", "delete"])
def test_attachments_that_the_snapshot_names(snapshot, damage):
    data = b"\x93NUMPY and so on"
    folder = snapshot.root / "hsfmt/attachments" / digests.digest(data).partition(":")[2]
    folder.mkdir(parents=True)
    path = folder / "d2t.npy"
    path.write_bytes(data)
    snapshot.metadata["attachments"] = [{"digest": digests.digest(data), "name": "d2t.npy", "nbytes": len(data)}]
    assert snapshot.errors() == {}
    if damage == "nothing":
        return
    if damage == "delete":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "cut" else data[:-1] + b"X")
    found = snapshot.errors("complete")
    assert set(found) == {("error", "attachment", path.relative_to(snapshot.root).as_posix())}
    assert (snapshot.errors("quick") == {}) == (damage == "flip")


@pytest.mark.parametrize("listed", [None, {}, ["d2t.npy"], [{"digest": "x", "name": "../x", "nbytes": -1}]])
def test_attachments_listed_wrongly(snapshot, listed):
    snapshot.metadata["attachments"] = listed
    ((severity, code, where),) = snapshot.errors("quick")
    assert (severity, where) == ("error", "attachments")
    assert code in ("corrupt", "malformed")


def test_the_pointer_repeats_what_its_snapshot_says(dataset):
    path = dataset / "hsfmt/manifest.json"
    document = json.loads(path.read_bytes())
    del document["digest"]
    document |= {"samples": 5, "tokens": 1, "content_digest": digests.digest(b"x")}
    path.write_bytes(canonical.dumps({**document, "digest": digests.digest(canonical.dumps(document))}))
    found = {finding.where for finding in verify(dataset).errors}
    assert found == {f"hsfmt/manifest.json: {member}" for member in ("samples", "tokens", "content_digest")}
