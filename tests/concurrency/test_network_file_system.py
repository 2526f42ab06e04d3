"""What network file systems do: no hard links, lost replies, listings and attributes that lag, stale handles."""

import collections
import errno
import gc
import os

import numpy as np
import pytest

from hsfmt import DatasetWriter, seal
from hsfmt.catalog import committed_parts
from hsfmt.errors import HsfmtError
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store
from hsfmt.storage.local import LocalStore

SETTINGS = {"layers": [1], "hidden_size": 4, "final_norm": "pre", "dtype": "float32", "threads": 1, "seal": False}
IDS = [f"s{number}" for number in range(4)]


def values(sample_id):
    return np.full((3, 1, 4), int(sample_id[1:]), np.float32)


def produce(url):
    """Write what is not there yet, two commits, and seal; return what was acknowledged."""
    acknowledged = []
    with DatasetWriter(url, on_duplicate="skip", **SETTINGS) as writer:
        for sample_id in IDS:
            writer.write(sample_id, [1, 2, 3], values(sample_id), source_index=int(sample_id[1:]))
            if sample_id in {"s1", "s3"}:
                acknowledged += writer.commit()
    seal(url)
    return acknowledged


def check(url):
    reader = SampleReader(url)
    assert [reader.sample_ids[i] for i in range(len(reader))] == IDS
    for sample_id, found in zip(IDS, reader.read_many(range(len(IDS))), strict=True):
        assert found.hidden_states.tolist() == values(sample_id).tolist()
    assert verify(url, level="full").ok


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK])
def test_without_hard_links_all_works(tmp_path, monkeypatch, code):
    asked = []

    def link(*paths, **_):
        asked.append(paths)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)
    assert produce(str(tmp_path / "dataset")) == IDS
    assert len(asked) >= 3
    check(str(tmp_path / "dataset"))


@pytest.mark.parametrize("call", ["link", "rename", "unlink"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOENT, errno.EEXIST, errno.ESTALE])
def test_a_reply_that_was_lost(tmp_path, monkeypatch, call, code):
    """The k-th call is done and reports an error: whatever is said then, all that was acknowledged is there."""
    real, outcomes = getattr(os, call), collections.Counter()
    for k in range(1, 60):
        url, left, acknowledged = str(tmp_path / f"{k}"), k, []

        def done_and_failed(*args, _k=k, **kwargs):
            nonlocal left
            left -= 1
            real(*args, **kwargs)
            if left == 0:
                raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, call, done_and_failed)
        try:
            acknowledged = produce(url)
            outcomes["went on"] += left <= 0
        except HsfmtError:
            outcomes["refused"] += 1
        monkeypatch.setattr(os, call, real)
        if left > 0:
            break
        committed = set(SampleReader(url, snapshot="live").sample_ids) if committed_parts(open_store(url)) else set()
        assert set(acknowledged) <= committed
        produce(url)
        check(url)
    assert left > 0, "a run without a fault ended it"
    assert sum(outcomes.values()) >= 3


class Lagging(LocalStore):
    """Lists what was there a listing ago, as a client whose attribute cache has not expired."""

    def __init__(self, url):
        super().__init__(url)
        self.before, self.lagged = {}, 0

    def list(self, prefix):
        now = super().list(prefix)
        shown = self.before.get(prefix, now)
        self.lagged += shown != now
        self.before[prefix] = now
        return shown


def test_a_listing_that_lags_loses_nothing_for_good(tmp_path):
    """A seal may then miss the last commit; the next one that sees it has it, and nothing sealed ever goes missing."""
    url, sizes = str(tmp_path / "dataset"), []
    lagging = Lagging(url)
    for sample_id in IDS:
        with DatasetWriter(url, **SETTINGS) as writer:
            writer.write(sample_id, [1, 2, 3], values(sample_id), source_index=int(sample_id[1:]))
        sizes.append(seal(lagging).snapshot.n_samples)
    assert lagging.lagged > 0
    assert sizes == sorted(sizes)
    seal(url)
    check(url)


@pytest.mark.parametrize("call", ["open", "read", "preadv", "stat", "fstat"])
def test_a_stale_handle_is_said_and_nothing_else_is_served(tmp_path, monkeypatch, call):
    url = str(tmp_path / "dataset")
    produce(url)
    real, refused, served = getattr(os, call), 0, 0
    for k in range(1, 80):
        left = k

        def stale(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, call, stale)
        try:
            reader = SampleReader(url)
            found = [sample.hidden_states.tolist() for sample in reader.read_many(range(len(reader)))]
        except HsfmtError:
            refused += 1
        else:
            served += 1
            assert found == [values(sample_id).tolist() for sample_id in IDS]
        monkeypatch.setattr(os, call, real)
        gc.collect()  # what a failed read left behind is sound too
        if left > 0:
            break
    assert left > 0
    assert served >= 1
    # A shard whose handle went stale is opened once more, and read.
    assert refused >= 1 or call in {"stat", "preadv"}
