"""A writer and its seals against a model in memory, over random histories."""

import os
import shutil
import tempfile
from unittest import mock

import numpy as np
import part_oracles as oracles
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from hsfmt import DatasetWriter, seal
from hsfmt.catalog import committed_parts, read_pointer, read_snapshot
from hsfmt.errors import DuplicateSampleError, SampleError
from hsfmt.snapshot import parse_snapshot_ids
from hsfmt.storage import open_store

IDS = st.sampled_from([f"s{number}" for number in range(12)])


class WriterMachine(RuleBasedStateMachine):
    """Accepted, durable, holes, retracted and served ids, as the model has them and as the dataset says."""

    snapshots = Bundle("snapshots")

    @initialize(codec=st.sampled_from(["none", "zstd"]), chunk=st.integers(1, 5))
    def begin(self, codec, chunk):
        self.folder = tempfile.mkdtemp()
        self.url = f"{self.folder}/dataset"
        self.options = {"codec": codec, "chunk_tokens": chunk, "shard_tokens": 2 * chunk}
        self.patch = mock.patch.object(os, "fsync", return_value=None)
        self.patch.start()
        self.accepted, self.durable, self.open_holes, self.holes = {}, {}, {}, {}
        self.returned, self.retracted, self.sealed = set(), set(), None
        self.open()

    def open(self):
        self.writer = DatasetWriter(
            self.url, layers=[1, 2], hidden_size=3, final_norm="pre", dtype="float32", part_seconds=None, seal=False,
            **self.options,
        )  # fmt: skip

    def teardown(self):
        if hasattr(self, "folder"):
            self.writer.abort()
            self.patch.stop()
            shutil.rmtree(self.folder)

    @rule(sample_id=IDS, n_tokens=st.integers(1, 12), value=st.integers(0, 99))
    def write(self, sample_id, n_tokens, value):
        given = (np.arange(n_tokens) + value, np.full((n_tokens, 2, 3), value, np.float32))
        if sample_id in self.accepted or sample_id in self.durable:
            with pytest.raises(DuplicateSampleError):
                self.writer.write(sample_id, *given)
        else:
            self.writer.write(sample_id, *given)
            self.accepted[sample_id] = value, n_tokens
            self.open_holes.pop(sample_id, None)

    @rule(sample_id=IDS)
    def refused(self, sample_id):
        with pytest.raises(SampleError):
            self.writer.write(sample_id, [1, 2], np.zeros((1, 2, 3), np.float32))

    @rule(sample_id=IDS)
    def hole(self, sample_id):
        if sample_id in self.accepted:
            with pytest.raises(SampleError):
                self.writer.hole(sample_id, "x")
        elif sample_id not in self.durable:
            self.writer.hole(sample_id, "x")
            self.open_holes[sample_id] = "x"

    def _all_durable(self):
        self.durable |= self.accepted
        self.holes |= self.open_holes
        self.accepted, self.open_holes = {}, {}

    @rule()
    def commit(self):
        expected = set(self.accepted)
        assert set(self.writer.commit()) == expected
        self._all_durable()

    @rule()
    def reopen(self):
        self.writer.close()
        self._all_durable()
        self.open()

    @rule()
    def crash(self):
        self.writer.abort()
        self.accepted, self.open_holes = {}, {}
        self.open()

    @precondition(lambda self: self.durable or self.holes)
    @rule(target=snapshots, ids=st.sets(IDS, max_size=2))
    def seal(self, ids):
        ids &= set(self.durable)
        self.retracted |= ids
        served = set(self.durable) - self.retracted
        snapshot = seal(self.url, retract=ids, expect=served).snapshot
        assert snapshot.counts["holes"] == len(set(self.holes) - set(self.durable))
        assert snapshot.counts["retracted"] == len(self.retracted)
        assert snapshot.counts["tokens"] == sum(self.durable[sample_id][1] for sample_id in served)
        self.sealed = served
        return snapshot.fingerprint, frozenset(served)

    @rule(snapshot=snapshots)
    def look_back(self, snapshot):
        fingerprint, served = snapshot
        assert self._served(fingerprint) == served, "a snapshot never changes"

    def _served(self, fingerprint):
        store = open_store(self.url)
        snapshot, _ = read_snapshot(store, fingerprint)
        path = f"hsfmt/snapshots/{fingerprint.rpartition(':')[2]}/ids.safetensors"
        ids = parse_snapshot_ids(store.read(path, snapshot.ids_nbytes), snapshot, path)
        return {ids[i] for i in range(len(ids))}

    @invariant()
    def the_committed_set_is_the_models(self):
        if not hasattr(self, "folder"):
            return
        ids = self.writer.committed_ids()
        assert len(ids) == len(self.durable)
        assert all(sample_id in ids for sample_id in self.durable)
        pointer = read_pointer(open_store(self.url))
        assert (pointer is None) == (self.sealed is None)
        if pointer is not None:
            assert self._served(pointer.fingerprint) == self.sealed

    @rule()
    def read_all(self):
        read = oracles.read_samples(self.url)
        assert set(read) == set(self.durable)
        for sample_id, (value, n_tokens) in self.durable.items():
            assert read[sample_id].input_ids.tolist() == [value + i for i in range(n_tokens)]
            assert read[sample_id].states.shape == (n_tokens, 2, 3)
            assert (read[sample_id].states == value).all()
        assert not [path for path in oracles.left_files(self.url) if path.endswith(".tmp")] or self.accepted
        assert len(committed_parts(open_store(self.url))) <= len(self.durable) + len(self.holes)


TestWriterMachine = WriterMachine.TestCase
TestWriterMachine.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
