"""Maintenance and damage of a dataset, among its writers, readers, seals and crashes, beside the model of it."""

from datetime import timedelta
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from model_comparison import DONE, silent
from model_dataset import Part
from writing_machine import SAMPLES, WritingMachine

from hsfmt import seal
from hsfmt.catalog import committed_parts, load_part, read_header, read_pointer
from hsfmt.maintenance.collect import collect
from hsfmt.maintenance.compact import compact
from hsfmt.maintenance.merge import merge
from hsfmt.maintenance.repair import repair
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store


def has_samples(machine):
    return any(part.samples for part in machine.model.parts.values())


class DatasetMachine(WritingMachine):
    """The whole machine."""

    # --- maintenance

    def absorb(self):
        """Learn which parts there are now: their samples are those of the model, by digests that it made itself."""
        store = open_store(self.url)
        header, names = read_header(store), committed_parts(store)
        copies = [each for copies in self.model.copies().values() for each in copies]
        candidates = {(each.sample_id, each.source_index, each.content()): each for each in copies}
        fresh = [
            load_part(store, name, header) for name in names if name not in {*self.model.parts, *self.model.superseded}
        ]
        self.model.superseded |= {name for part in fresh for name in part.manifest.replaces}
        for name in self.model.superseded:
            self.model.parts.pop(name, None)
        for part in fresh:
            index, rows = part.index, range(part.index.n_samples if part.index is not None else 0)
            keys = [(index.sample_id(i), int(index.source_index[i]), index.content_digest[i].tobytes()) for i in rows]
            found = [candidates[key] for key in keys]
            self.model.parts[part.manifest.part] = Part(found, dict(part.manifest.holes))
        self.model.superseded &= set(names)

    @precondition(lambda self: len(self.model.parts) > 2)
    @rule(nbytes=st.sampled_from([300, 1 << 30]))
    def compact(self, nbytes):
        before, counts = self.model.served(), self.model.counts()
        report = compact(self.url, target_nbytes=nbytes)
        self.absorb()
        self.sealed = self.snapshot_now()
        assert self.sealed[0] == before
        assert {**self.model.counts(), "parts": 0, "shadowed": 0} == {**counts, "parts": 0, "shadowed": 0}
        DONE["compactions"] += bool(report.groups)
        self.check()

    @precondition(lambda self: self.model.superseded and not any(crew.part for crew in self.crews))
    @rule(keep=st.sampled_from([None, 1]))
    def collect(self, keep):
        """Remove what is left over; every reader that was opened still reads, if all snapshots are kept."""
        collect(self.url, older_than=timedelta(0), force=True, keep_snapshots=keep)
        if keep is not None:
            self.readers.clear()
        self.absorb()
        DONE["collections"] += 1
        self.check()

    @rule(samples=st.lists(SAMPLES, min_size=1, max_size=3, unique_by=lambda sample: sample.sample_id),
          clock=st.integers(0, 99), how=st.sampled_from(["auto", "copy", "move"]), retract=st.booleans())  # fmt: skip
    def merge(self, samples, clock, how, retract):
        """Put another dataset into this one, with what it retracts."""
        name, other = self.name(clock), f"{self.folder}/other{len(self.names)}"
        with self.open_writer(url=other, part_names=lambda: name) as writer:
            for sample in samples:
                writer.write(sample.sample_id, *sample.arrays(), source_index=sample.source_index)
        gone = {samples[0].sample_id} if retract else set()
        seal(other, retract=gone)
        merge(self.url, [other], how=how, on_duplicate="first")
        self.model.parts[name] = Part(samples)
        self.model.retracted |= gone
        self.sealed = self.snapshot_now()
        DONE["merges"] += 1
        self.check()

    # --- damage

    def flip(self, data):
        """Return (part, path, what the file holds, where a byte of it is to change, what it holds then)."""
        name = data.draw(st.sampled_from(sorted(name for name, part in self.model.parts.items() if part.samples)))
        root = Path(self.url)
        files = [*sorted((root / "parts" / name).rglob("c/**/*")), *sorted((root / "parts" / name).rglob("zarr.json")),
                 root / f"hsfmt/index/{name}.safetensors", root / f"hsfmt/manifests/{name}.json"]  # fmt: skip
        path = data.draw(st.sampled_from([file for file in files if file.is_file()]))
        whole = path.read_bytes()
        at = data.draw(st.integers(0, len(whole) - 1))
        return name, path, whole, at, whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]

    @precondition(has_samples)
    @rule(data=st.data())
    def damaged(self, data):
        """A flipped byte of any committed file is found, and serves nothing wrong; then it is flipped back."""
        _, path, whole, _, flipped = self.flip(data)
        path.write_bytes(flipped)
        try:
            assert not verify(self.url, level="full").ok
            DONE["damages refused by readers"] += silent(self.url, self.model.served())
        finally:
            path.write_bytes(whole)
        DONE["damages"] += 1
        self.check()

    def at_risk(self, name, path, at):
        """Return the ids of a part's samples that share a chunk with a byte of one of its files."""
        store = open_store(self.url)
        part = load_part(store, name, read_header(store))
        ids = [part.index.sample_id(i) for i in range(part.index.n_samples)]
        if path.name == "zarr.json":
            return set()
        if "c" not in path.parts:
            return set(ids)
        inside = path.relative_to(Path(self.url) / "parts" / name).parts
        column, offsets = part.manifest.columns[inside[0]], part.index.token_offsets
        first, stop = column.shard_chunks(int(inside[2]))
        for number, (start, nbytes, _) in enumerate(part.index.chunks[inside[0]][first:stop].tolist(), first):
            if start <= at < start + nbytes + 4:
                row = number // column.n_planes * column.chunk_rows
                return {
                    ids[i] for i in range(len(ids)) if offsets[i] < row + column.chunk_rows and row < offsets[i + 1]
                }
        return set()  # the shard's own index, which the part's implies

    @precondition(has_samples)
    @rule(data=st.data())
    def repaired(self, data):
        """Of a part with a flipped byte no sample is lost but those that share a chunk with it; those are named."""
        name, path, _, at, flipped = self.flip(data)
        retracted = {sample.sample_id for sample in self.model.parts[name].samples} & self.model.retracted
        if path.parent.name == "index" and retracted:
            return  # which ones are retracted may be known to nobody then; repair says so
        risk, before = self.at_risk(name, path, at), set(self.model.copies())
        others = {other: part for other, part in self.model.parts.items() if other != name}
        path.write_bytes(flipped)
        self.readers.clear()  # their snapshots name what is damaged
        pointer = read_pointer(open_store(self.url))
        report = repair(self.url)
        self.absorb()
        names = committed_parts(open_store(self.url))
        self.model.parts = {each: part for each, part in self.model.parts.items() if each in names}
        assert others.items() <= self.model.parts.items(), "parts that were whole are as they were"
        lost = before - set(self.model.copies())
        assert lost <= risk
        assert lost <= set(report.lost) or any(fate.n_unknown for fate in report.parts)
        if report.snapshot is not None and (pointer is None or report.snapshot != pointer.fingerprint):
            self.sealed = self.snapshot_now()
        assert not repair(self.url, dry_run=True).changed
        DONE["repairs"] += 1
        DONE["samples lost"] += len(lost)
        DONE["samples at risk that were saved"] += len(risk - lost)
        self.check()
