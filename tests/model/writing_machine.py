"""Several writers, readers, seals and crashes on one dataset, beside the model of it."""

import errno
import os
import pickle
import shutil
import signal
import tempfile
import warnings
from contextlib import suppress
from unittest import mock

import numpy as np
import pytest
from failing_calls import CALLS, REAL, failing
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from killing import killing_at
from model_comparison import DONE, compare
from model_dataset import HIDDEN, LAYERS, Model, Part, Sample, dataset_digest

from hsfmt import DatasetWriter, seal
from hsfmt.catalog import committed_parts, load_ids, read_pointer, read_snapshot
from hsfmt.errors import (
    CorruptionError,
    DuplicateSampleError,
    ExpectationError,
    HsfmtError,
    NotFoundError,
    SampleError,
    UsageError,
)
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store
from hsfmt.stored_snapshots import stored_snapshots

NAMES = [f"s{number:02}" for number in range(24)]
IDS = st.sampled_from(NAMES)
SLOTS = st.integers(0, 2)
SAMPLES = st.builds(Sample, IDS, st.integers(0, 6), st.integers(0, 5), st.integers(1, 9))


class Crew:
    """A writer, and what the model knows of it."""

    def __init__(self, writer):
        self.writer, self.open, self.mine, self.known, self.part = writer, Part(), set(), None, None


class WritingMachine(RuleBasedStateMachine):
    """The model beside the dataset: after each step they must be equal, for every reader that was ever opened."""

    @initialize(codec=st.sampled_from(["none", "zstd"]), chunk=st.integers(1, 5))
    def begin(self, codec, chunk):
        self.folder = tempfile.mkdtemp()
        self.url = f"{self.folder}/dataset"
        self.options = {"codec": codec, "chunk_tokens": chunk, "shard_tokens": 2 * chunk}
        self.patch = mock.patch.object(os, "fsync", return_value=None)
        self.patch.start()
        self.model, self.names, self.readers = Model(), [], []
        self.sealed, self.steps = None, 0
        self.crews = [self.crew() for _ in range(3)]
        DONE["examples"] += 1

    def name(self, clock):
        """Make a part's name by a clock that jumps: later parts may come first."""
        name = f"p{clock:02}-{len(self.names):04}"
        self.names.append(name)
        return name

    def open_writer(self, *, url=None, **settings):
        options = {"final_norm": "pre", "dtype": "float32", "part_seconds": None, "seal": False, "threads": 1}
        return DatasetWriter(
            url or self.url, layers=list(LAYERS), hidden_size=HIDDEN, **{**options, **self.options, **settings}
        )

    def crew(self):
        crew = Crew(None)
        crew.writer = self.open_writer(part_names=lambda: crew.part)
        return crew

    def teardown(self):
        if not hasattr(self, "folder"):
            return
        try:
            self.check(full=True)
        finally:
            for crew in self.crews:
                crew.writer.abort()
            self.patch.stop()
            shutil.rmtree(self.folder)

    def check(self, *, full=False):
        """Compare what can be seen of the dataset with the model: the sealed snapshot, and now and then all else."""
        DONE["steps"] += 1
        self.steps += 1
        store = open_store(self.url)
        assert committed_parts(store) == sorted([*self.model.parts, *self.model.superseded])
        pointer = read_pointer(store)
        assert (pointer is None) == (self.sealed is None)
        if pointer is not None:
            samples, counts, attachments = self.sealed
            assert pointer.content_digest == dataset_digest(samples)
            reader = SampleReader(self.url)
            assert reader.snapshot.counts == counts
            if full or self.steps % 3 == 0:
                assert {name: array.tolist() for name, array in reader.attachments().items()} == attachments
                compare(reader, samples)
        if self.model.parts and (full or self.steps % 5 == 0):
            compare(SampleReader(self.url, snapshot="live"), self.model.served())
            for reader, samples in self.readers:
                compare(reader, samples)
        if full and self.model.parts:
            report = verify(self.url, level="full")
            assert report.ok, report.problems
            DONE["verified"] += 1

    # --- writers

    def begin_part(self, crew, clock):
        if not crew.open.samples and not crew.open.holes and crew.part is None:
            crew.part = self.name(clock)

    @rule(slot=SLOTS, samples=st.lists(SAMPLES, min_size=1, max_size=4), clock=st.integers(0, 99))
    def write(self, slot, samples, clock):
        crew = self.crews[slot]
        for sample in samples:
            self.begin_part(crew, clock)
            crew.known = set(self.model.copies()) if crew.known is None else crew.known
            if sample.sample_id in crew.known | crew.mine:
                with pytest.raises(DuplicateSampleError):
                    crew.writer.write(sample.sample_id, *sample.arrays(), source_index=sample.source_index)
                DONE["duplicates refused"] += 1
                continue
            ids, states, mask = sample.arrays()
            crew.writer.write(sample.sample_id, ids, states, mask, source_index=sample.source_index)
            states[:] = 7  # the arrays are the caller's again
            crew.open.samples.append(sample)
            crew.open.holes.pop(sample.sample_id, None)
            crew.mine.add(sample.sample_id)
            DONE["samples written"] += 1
        self.check()

    @rule(slot=SLOTS, samples=st.lists(SAMPLES, min_size=1, max_size=4), clock=st.integers(0, 99))
    def write_and_commit(self, slot, samples, clock):
        self.write(slot, samples, clock)
        self.commit(slot)

    @rule(slot=SLOTS, sample_id=IDS, clock=st.integers(0, 99))
    def hole(self, slot, sample_id, clock):
        crew = self.crews[slot]
        self.begin_part(crew, clock)
        if sample_id in crew.mine:
            with pytest.raises(SampleError):
                crew.writer.hole(sample_id, "failed")
        else:
            crew.writer.hole(sample_id, "failed")
            crew.open.holes[sample_id] = "failed"
            DONE["holes"] += 1
        self.check()

    def committed(self, crew):
        if crew.open.samples or crew.open.holes:
            self.model.parts[crew.part] = crew.open
        crew.open, crew.part = Part(), None

    @rule(slot=SLOTS)
    def commit(self, slot):
        crew = self.crews[slot]
        assert crew.writer.commit() == [sample.sample_id for sample in crew.open.samples]
        DONE["commits"] += bool(crew.open.samples)
        self.committed(crew)
        self.check()

    @rule(slot=SLOTS, how=st.sampled_from(["close", "abort"]))
    def reopen(self, slot, how):
        crew = self.crews[slot]
        getattr(crew.writer, how)()
        if how == "close":
            self.committed(crew)
        self.crews[slot] = self.crew()
        self.check()

    @rule(slot=SLOTS)
    def refresh(self, slot):
        crew = self.crews[slot]
        ids = crew.writer.committed_ids()
        assert {sample_id for sample_id in NAMES if sample_id in ids} == set(self.model.copies())
        crew.known = set(self.model.copies())

    # --- crashes

    @precondition(lambda self: any(crew.open.samples for crew in self.crews))
    @rule(slot=SLOTS, call=st.sampled_from(["write", "rename", "link", "open"]), k=st.integers(1, 12),
          code=st.sampled_from([errno.EIO, errno.ENOSPC, errno.ESTALE]))  # fmt: skip
    def failing_commit(self, slot, call, k, code):
        """One call of the operating system fails in the middle of a commit."""
        busy = [number for number, crew in enumerate(self.crews) if crew.open.samples]
        slot = busy[slot % len(busy)]
        crew = self.crews[slot]
        error = None
        with failing(call, k, code, lambda path: crew.part in path) as failed:
            try:
                crew.writer.commit()
            except HsfmtError as caught:
                error = caught
        if error is None or crew.part in committed_parts(open_store(self.url)):
            self.committed(crew)  # if not acknowledged, yet whole: verification reads every byte of it
        if error is not None:
            assert failed
            DONE["commits that failed"] += 1
            crew.writer.abort()
            self.crews[slot] = self.crew()
        self.check()

    @rule(samples=st.lists(SAMPLES, min_size=1, max_size=3, unique_by=lambda sample: sample.sample_id),
          clock=st.integers(0, 99), k=st.one_of(st.integers(1, 140), st.integers(60, 140)),
          sealing=st.sampled_from([True, True, False]), retracting=st.booleans())  # fmt: skip
    def killed_process(self, samples, clock, k, sealing, retracting):
        """Another process writes, commits and seals, and is killed at the k-th call of the operating system."""
        gone = {samples[0].sample_id} if retracting else set()
        name, said = self.name(clock), self.in_fork(samples, len(self.names) - 1, k, gone if sealing else None)
        taken = set(self.model.copies())
        fresh = [sample for sample in samples if sample.sample_id not in taken]
        there = name in committed_parts(open_store(self.url))
        assert there or not ("committed" in said and fresh), "an acknowledged part is lost"
        if there:
            self.model.parts[name] = Part(fresh)
        self.learn_retractions(gone, "sealed" in said)
        if self.model.parts and sealing:
            pointer = read_pointer(open_store(self.url))
            if "sealed" in said:
                assert pointer is not None
            now = self.snapshot_now()
            new = pointer is not None and pointer.content_digest == dataset_digest(now[0])
            if "sealed" in said:
                assert new, "an acknowledged seal is lost"
            if new and SampleReader(self.url).snapshot.counts == now[1]:
                self.sealed = now
        self.check()

    def learn_retractions(self, ids, acknowledged):
        """Learn what took effect: a snapshot that is whole retracts, though no pointer named it before a crash."""
        store, known = open_store(self.url), set()
        for fingerprint in stored_snapshots(store) if ids else ():
            snapshot, _ = read_snapshot(store, fingerprint)
            for part, row in zip(snapshot.retracted_part.tolist(), snapshot.retracted_row.tolist(), strict=True):
                with suppress(NotFoundError, CorruptionError):  # of a part that was repaired
                    known.add(load_ids(store, snapshot.parts[part])[row])
        assert not acknowledged or ids <= known
        DONE["retractions of crashed seals"] += len((ids & known) - self.model.retracted) * (not acknowledged)
        self.model.retracted |= ids & known

    def in_fork(self, samples, number, k, retracted):
        read_end, write_end = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside the threads of writers is the point
            child = os.fork()
        if child == 0:
            try:
                killing_at(k, CALLS)()
                writer = self.open_writer(part_names=lambda: self.names[number], on_duplicate="skip")
                for sample in samples:
                    writer.write(sample.sample_id, *sample.arrays(), source_index=sample.source_index)
                writer.commit()
                REAL["write"](write_end, b"committed ")
                if retracted is not None:
                    seal(self.url, retract=retracted)
                    REAL["write"](write_end, b"sealed ")
                writer.close()
            except BaseException as error:  # noqa: BLE001 - told to the parent
                REAL["write"](write_end, f"error:{error!r}".encode()[:4000])
            os._exit(0)
        os.close(write_end)
        said = b""
        while data := os.read(read_end, 4096):
            said += data
        os.close(read_end)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGKILL)
        DONE["processes killed"] += code != 0
        nothing = not self.model.parts and b"committed" in said and b"committed parts" in said
        assert b"error" not in said or nothing, said
        return said.decode()

    # --- seals and readers

    def snapshot_now(self):
        return self.model.served(), self.model.counts(), dict(self.model.attachments)

    @precondition(lambda self: self.model.parts)
    @rule(ids=st.one_of(st.just(set()), st.sets(IDS, max_size=3)), attach=st.sampled_from([None, "d2t", "t2d"]),
          value=st.integers(0, 2), wrong=st.booleans())  # fmt: skip
    def seal(self, ids, attach, value, wrong):
        ids &= set(self.model.copies())
        retracted = self.model.retracted | ids
        served = {sample.sample_id for sample in self.model.served(retracted)}
        arrays = {attach: np.array([value, 9])} if attach else {}
        if attach and self.model.attachments.get(attach, [value, 9]) != [value, 9]:
            with pytest.raises(UsageError):
                seal(self.url, attachments=arrays)
            self.check()
            return
        if wrong:
            with pytest.raises(ExpectationError):
                seal(self.url, retract=ids, expect=served | {"nowhere"})
            self.check()
        sealed = seal(self.url, retract=ids, expect=served, attachments=arrays)
        self.model.retracted = retracted
        self.model.attachments.update({name: array.tolist() for name, array in arrays.items()})
        self.sealed = self.snapshot_now()
        assert not seal(self.url).changed
        assert sealed.rounds == 1
        DONE["seals"] += 1
        DONE["retractions"] += len(ids)
        self.check()

    @precondition(lambda self: self.model.copies())
    @rule(data=st.data())
    def retract(self, data):
        self.seal({data.draw(st.sampled_from(sorted(self.model.copies())))}, None, 0, wrong=False)

    @precondition(lambda self: self.model.parts)
    @rule(call=st.sampled_from(["write", "rename", "open"]), k=st.integers(1, 6), ids=st.sets(IDS, max_size=6))
    def failing_seal(self, call, k, ids):
        ids &= set(self.model.copies())
        with failing(call, k, errno.EIO, lambda path: "/parts/" not in path) as failed:
            try:
                seal(self.url, retract=ids)
            except HsfmtError:
                assert failed
                DONE["seals that failed"] += 1
        self.learn_retractions(ids, not failed)
        now, pointer = self.snapshot_now(), read_pointer(open_store(self.url))
        if not failed or (pointer is not None and SampleReader(self.url).snapshot.counts == now[1]
                          and pointer.content_digest == dataset_digest(now[0])):  # fmt: skip
            self.sealed = now
        self.check()

    @precondition(lambda self: self.sealed is not None)
    @rule(how=st.sampled_from(["sealed", "live", "pickled", "fingerprint"]))
    def open_reader(self, how):
        samples = self.model.served() if how == "live" else self.sealed[0]
        reader = SampleReader(self.url, snapshot="live" if how == "live" else None)
        if how == "pickled":
            reader = pickle.loads(pickle.dumps(reader))
        elif how == "fingerprint":
            reader = SampleReader(self.url, snapshot=reader.fingerprint)
        self.readers = [*self.readers[-5:], (reader, samples)]
        DONE["readers"] += 1
        self.check()

    @precondition(lambda self: self.readers)
    @rule(number=st.integers(0, 5))
    def pickled_again(self, number):
        reader, samples = self.readers[number % len(self.readers)]
        compare(pickle.loads(pickle.dumps(reader)), samples)

    @precondition(lambda self: any(samples for _, samples in self.readers))
    @rule(data=st.data())
    def window(self, data):
        reader, samples = data.draw(st.sampled_from([pair for pair in self.readers if pair[1]]))
        number = data.draw(st.integers(0, len(samples) - 1))
        start = data.draw(st.integers(0, samples[number].n_tokens))
        stop = data.draw(st.integers(start, samples[number].n_tokens))
        layer = data.draw(st.integers(0, 1))
        ids, states, mask = samples[number].arrays()
        found = reader.read(number, start, stop, layers=[LAYERS[layer]])
        assert found.hidden_states.tobytes() == states[start:stop, [layer]].tobytes()
        assert found.input_ids.tolist() == ids[start:stop].tolist()
        assert found.loss_mask.tolist() == mask[start:stop].astype(bool).tolist()
        assert reader.index_of(samples[number].sample_id) == number
