"""A dataset's life in a bucket of GCS, by the command line and from Python: what a folder gives, bit by bit."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from flow_steps import (
    check_copies_and_merges,
    check_damage_is_repaired,
    converting,
    held,
    in_a_process,
    objects,
    shards,
    source_folder,
    write_part,
)
from servers.fault_proxy import Fault

from hsfmt import layout
from hsfmt.errors import HeaderMismatchError, StorageError
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.storage import open_store


@pytest.fixture(autouse=True)
def environment(monkeypatch, gcs_server, no_credentials, tmp_path):
    """What is said to programs about GCS; the class that gcsfs takes by default can't talk to this server."""
    said = {
        "STORAGE_EMULATOR_HOST": gcs_server.endpoint,
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "NO_GCE_CHECK": "true",
        "CLOUDSDK_CONFIG": str(tmp_path / "none"),
    }
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    return said


@pytest.fixture
def url(gcs_bucket):
    return f"gs://{gcs_bucket}/some/d"


def test_a_life(hsfmt, url, make_gcs_bucket, tmp_path):
    """Converted, joined by a writer, sealed, verified, retracted, compacted, collected; in a folder likewise."""
    source, folder = source_folder(tmp_path / "source", range(5)), tmp_path / "d"
    for place in (url, folder):
        hsfmt(*converting(source, place))
        write_part(place, "p-by-a-writer", range(20, 24), holes=["h1"])
        hsfmt("seal", place, "--expect", "9")
    assert held(url) == held(folder)
    assert shards(url) == shards(folder)
    for level in ("quick", "complete", "full"):
        hsfmt("verify", url, "--level", level, "-q")
    assert hsfmt.json("info", url)["samples"] == 9
    for place in (url, folder):
        hsfmt("retract", place, "s3", "s21")
        hsfmt("compact", place, "-q")
        hsfmt("gc", place, "--older-than", "0s", "--force", "--keep-snapshots", "1")
    assert held(url) == held(folder)
    assert len(objects(url)) == len(objects(folder))
    hsfmt("verify", url, "--level", "full", "-q")
    assert open_store(url).unfinished_uploads() == []


def test_a_flipped_byte_is_found_and_repaired(hsfmt, url):
    check_damage_is_repaired(hsfmt, url)


def test_copies(hsfmt, url, make_gcs_bucket, tmp_path):
    check_copies_and_merges(hsfmt, url, f"gs://{make_gcs_bucket()}/d", tmp_path)


def test_random_samples(url, tmp_path, gcs_faults, monkeypatch):
    """Equal to those of a folder, with no permission but to get objects; and how many requests they are."""
    for place in (url, tmp_path / "d"):
        write_part(place, "p-one", range(12))
        write_part(place, "p-two", range(12, 30), seal=True)
    here = SampleReader(tmp_path / "d")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_faults.url)
    gcs_faults.faults.append(Fault("status", "^/(?!download/)", count=None, status=403, method=""))
    there = SampleReader(url)
    assert len(gcs_faults.requests) == 2
    assert len(there) == len(here) == 30
    gcs_faults.requests.clear()
    gcs_faults.expect_groups(2, 6)  # manifest and index, then the two ends of a sample in each column
    assert there.read(3).hidden_states.tobytes() == here.read(3).hidden_states.tobytes()
    assert gcs_faults.groups_left == 0
    assert [request.path.partition("/storage")[0] for request in gcs_faults.requests] == ["/download"] * 8
    order = random.Random(1)
    for _ in range(20):
        rows = order.sample(range(30), 5)
        for one, other in zip(there.read_many(rows), here.read_many(rows), strict=True):
            assert one.hidden_states.tobytes() == other.hidden_states.tobytes()
            assert one.input_ids.tobytes() == other.input_ids.tobytes()
            assert one.loss_mask.tobytes() == other.loss_mask.tobytes()
    there.close()
    here.close()


@pytest.mark.torch
def test_batches_of_forked_workers(url, tmp_path):
    import torch
    from torch.utils.data import DataLoader

    from hsfmt import HiddenStateDataset

    for place in (url, tmp_path / "d"):
        write_part(place, "p-one", range(8), seal=True)
    there, here = HiddenStateDataset(url), HiddenStateDataset(tmp_path / "d")
    assert torch.equal(there[3]["hidden_states"], here[3]["hidden_states"])
    loader = DataLoader(there, batch_size=2, num_workers=1, collate_fn=list)
    found = [item["hidden_states"] for batch in loader for item in batch]
    assert len(found) == 8
    assert all(torch.equal(item, here[i]["hidden_states"]) for i, item in enumerate(found))


def test_writers_that_begin_a_dataset_together(url):
    """One of them makes the root document, and all of them commit."""
    barrier = threading.Barrier(4)

    def write(number):
        barrier.wait()
        write_part(url, f"p-{number}", range(3 * number, 3 * number + 3))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    write_part(url, "p-last", [99], seal=True)
    assert {each[0] for each in held(url)[2]} == {f"s{number}" for number in (*range(12), 99)}


def test_a_writer_of_other_states_is_refused(url):
    write_part(url, "p-one", range(2))
    before = objects(url)
    with pytest.raises(HeaderMismatchError):
        write_part(url, "p-two", range(2, 4), layers=(0, 2))
    assert objects(url) == before


@pytest.mark.slow
def test_programs(environment, url, tmp_path):
    source = source_folder(tmp_path / "source", range(3))
    for argv in (
        (*converting(source, url), "--workers", "2"),
        ("verify", url, "--level", "full", "--workers", "2", "-q", "--storage-option", "token=anon"),
        ("pull", f"simplecache::{url}", tmp_path / "copy", "-q"),
    ):
        done = in_a_process(*argv, **environment)
        assert done.returncode == 0, done.stderr
    assert objects(tmp_path / "copy")[layout.POINTER]
    for cache in ("simplecache", "blockcache"):
        done = in_a_process("retract", f"{cache}::{url}", "s1", **environment)
        assert done.returncode == 2
        assert f"leave out {cache}::" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_bucket_that_is_not_there(hsfmt, tmp_path):
    url = "gs://no-such-bucket/d"
    here = tmp_path / "d"
    write_part(here, "p-one", range(2), seal=True)
    for argv in (("info", url), ("verify", url, "-q"), ("push", here, url, "-q"), ("pull", url, tmp_path / "o"),
                 ("gc", url, "--older-than", "7d"), ("merge", url, here)):  # fmt: skip
        result = hsfmt(*argv, codes=(3,))
        assert len(result.stderr.splitlines()) == 1, result.stderr
        assert "a bucket 'no-such-bucket'" in result.stderr
    with pytest.raises(StorageError, match="a bucket 'no-such-bucket'"):
        write_part(url, "p-one", range(2))
