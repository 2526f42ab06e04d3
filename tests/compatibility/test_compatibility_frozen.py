"""Format 1.0 is frozen: its vectors and datasets stay as they are, and this and every later version reads them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from frozen import DATASETS, digests, listed
from make_datasets import EXTRAS, STATES, expected, sample

from hsfmt import DatasetWriter, seal
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.verification import verify
from hsfmt.sealing import build_live
from hsfmt.storage import open_store
from spec.reference.dataset import load, to_json

NAMES = sorted(path.name for path in DATASETS.iterdir())
FROZEN = "format 1.0 is frozen: put the files back; new vectors and datasets go to a new folder"


@pytest.fixture
def old(tmp_path):
    """A copy of a frozen dataset, to write to."""
    return lambda name: Path(shutil.copytree(DATASETS / name / "dataset", tmp_path / name))


def wanted(name):
    return json.loads((DATASETS / name / "expected.json").read_text(encoding="utf-8"))


def current(name):
    pointer = json.loads((DATASETS / name / "dataset/hsfmt/manifest.json").read_bytes())
    return pointer["fingerprint"].partition(":")[2]


def test_no_byte_of_what_is_frozen_has_changed():
    was, now = listed(), digests()
    assert len(was) == 159
    changed = sorted(path for path, digest in was.items() if now.get(path) != digest)
    assert not changed, f"{FROZEN}: {', '.join(changed)}"


def test_frozen_datasets_have_every_kind_of_thing():
    """What the reading below would otherwise not show."""
    kinds, dtypes, headers, facts = set(), set(), set(), set()
    for name in NAMES:
        for path in (DATASETS / name / "dataset/hsfmt/manifests").iterdir():
            manifest = json.loads(path.read_bytes())
            headers.add((manifest["header"]["dtype"], manifest["columns"]["hidden_states"]["codec"]))
            kinds |= {column["kind"] for column in manifest["columns"].values()}
            dtypes |= {column["dtype"] for column in manifest["columns"].values()}
            facts |= {key for key in ("holes", "replaces") if manifest[key]}
        for snapshot in wanted(name).values():
            facts |= {key for key, count in snapshot["counts"].items() if count}
            facts |= {"attachments"} if snapshot["attachments"] else set()
        assert len(wanted(name)) == 2
    assert headers == {(dtype, codec) for dtype in STATES for codec in ("none", "zstd")}
    assert kinds == {"token", "sample", "ragged"}
    assert dtypes == set(EXTRAS)
    assert facts >= {"holes", "replaces", "retracted", "attachments", "parts", "samples"}
    assert sum(path.stat().st_size for path in DATASETS.rglob("*") if path.is_file()) < 300 << 10


@pytest.mark.parametrize("name", NAMES)
def test_frozen_dataset_gives_the_same_samples(name):
    """Each of its snapshots, to the byte: digests, ids, states, masks, metadata, extras."""
    assert expected(DATASETS / name / "dataset") == wanted(name)
    assert SampleReader(DATASETS / name / "dataset").snapshot.fingerprint == f"xxh3_128:{current(name)}"


@pytest.mark.parametrize("name", NAMES)
def test_frozen_dataset_verifies(name):
    report = verify(DATASETS / name / "dataset", level="full")
    assert [str(finding) for finding in (*report.errors, *report.of("warning"))] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_reader_agrees(name):
    found = to_json(load(DATASETS / name / "dataset"))
    snapshot = wanted(name)[current(name)]
    assert found["content_digest"] == snapshot["content_digest"]
    assert [entry["id"] for entry in found["samples"]] == [entry["id"] for entry in snapshot["samples"]]


@pytest.mark.parametrize("name", NAMES)
def test_sealing_a_frozen_dataset_again_makes_the_same_content(old, name):
    dataset = old(name)
    before = wanted(name)[current(name)]
    assert expected(dataset)[current(name)] == before
    sealed = seal(dataset)
    assert sealed.snapshot.content_digest == before["content_digest"]
    index_file, _ = build_live(open_store(dataset), sealed.snapshot.header)
    assert len(index_file) > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_frozen_dataset_can_be_gone_on_with(old, name):
    """This version adds a part; what was there before reads as before, retracted and attached things too."""
    dataset, dtype = old(name), name.partition("-")[0]
    before = wanted(name)[current(name)]
    with DatasetWriter(dataset, layers=[1, 3], hidden_size=8, final_norm="pre", dtype=dtype, model="example/tiny") as w:
        assert w.committed_ids() == {"sample-0", "sample-1", "sample-2", "sample-3", "sample-4"}
        given = sample(7, dtype, {})
        w.write("added", **given)
    now = expected(dataset)
    assert {key: now[key] for key in wanted(name)} == wanted(name)
    reader = SampleReader(dataset)
    latest = now[reader.snapshot.fingerprint.partition(":")[2]]
    assert [entry for entry in latest["samples"] if entry["id"] != "added"] == before["samples"]
    added = reader.read(reader.sample_ids.index("added"))
    assert added.hidden_states.tobytes() == given["hidden_states"].tobytes()
    assert np.array_equal(added.input_ids, given["input_ids"])
    assert latest["attachments"] == before["attachments"]
    assert latest["counts"]["retracted"] == 1
    assert verify(dataset, level="full").ok
