"""What a snapshot says against the parts that it names: rows, counts, ids, order, duplicates, content digest.

Spec: rules VFY-12, SNAP-2 to SNAP-8, SNAP-11, DIG-6.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import xxhash

from hsfmt import layout
from hsfmt.errors import AccessError, HsfmtError
from hsfmt.readers.verification.documents import LoadedSnapshot
from hsfmt.readers.verification.parts import PartOutcome, PartRows
from hsfmt.readers.verification.report import Findings
from hsfmt.snapshot import PartRef, Snapshot
from hsfmt.storage import Store

_DATASET_TAG = b"hsfmt:dataset:1\0"
_SHOWN = 1000

Rows = npt.NDArray[np.int64]


class SnapshotCheck:
    """Compares one snapshot with the outcomes of its parts.

    Parameters
    ----------
    store, findings
        The dataset, and where findings go.
    loaded
        The snapshot and its ids.
    outcomes
        By part name; of every committed part.
    old
        Another snapshot is the current one: what only this one lacks is a warning (rule VFY-14).
    """

    def __init__(
        self,
        store: Store,
        findings: Findings,
        loaded: LoadedSnapshot,
        outcomes: Mapping[str, PartOutcome],
        *,
        old: bool = False,
    ) -> None:
        self._store = store
        self._findings = findings
        self._loaded = loaded
        self._snapshot: Snapshot = loaded.snapshot
        self._outcomes = outcomes
        self._old = old
        self._path = loaded.path
        self._rows: dict[int, PartRows] = {}
        self._n_unlisted = 0
        self._n_repeated = 0
        order = np.argsort(self._snapshot.part, kind="stable")
        ends = np.searchsorted(self._snapshot.part[order], np.arange(len(self._snapshot.parts) + 1))
        self._places = [order[ends[i] : ends[i + 1]] for i in range(len(self._snapshot.parts))]

    def check(self) -> None:
        """Check all that the outcomes allow."""
        self._check_ids()
        self._check_absent()
        if self._old:
            self._report_lost()
        for number, ref in enumerate(self._snapshot.parts):
            outcome = self._outcomes.get(ref.name)
            if self._part_agrees(number, ref, outcome):
                assert outcome is not None
                self._check_part(number, ref.name, outcome)
        self._report_selection()
        complete = all(
            number in self._rows or not self._n_listed(number) for number in range(len(self._snapshot.parts))
        )
        if self._rows and complete:
            self._check_served()
            self._check_shadowed()
            self._check_holes()

    def ids_of(self, number: int) -> list[str]:
        """Return the ids of the samples served from a part, as the snapshot's ids file has them."""
        return self._ids_at(self._places[number])

    def _error(self, code: str, member: str, expected: str, got: str, samples: list[str] | None = None) -> None:
        self._findings.error(code, f"{self._path}: {member}", expected=expected, got=got, samples=samples or ())

    def _check_ids(self) -> None:
        ids, hashes = self._loaded.ids, self._snapshot.id_hash
        if ids is None:
            return
        wrong = [
            i
            for i in range(len(ids))
            if xxhash.xxh3_64_intdigest(ids.ids[ids.offsets[i] : ids.offsets[i + 1]].tobytes()) != int(hashes[i])
        ]
        if wrong:
            got = f"others for {len(wrong)} samples, the first at {wrong[0]}"
            self._error("snapshot_rows", "id_hash", "xxh3_64 of each id in the ids file", got)

    def _check_absent(self) -> None:
        """Check the ids that are retracted and have no sample (rule SNAP-11)."""
        listed = self._snapshot.absent_ids
        ids = [listed.ids[listed.offsets[i] : listed.offsets[i + 1]].tobytes() for i in range(len(listed))]
        if ids != sorted(set(ids)):
            self._error("snapshot_rows", "absent_ids", "ids that ascend", "another order")
        hashes = np.array([xxhash.xxh3_64_intdigest(sample_id) for sample_id in ids], np.uint64)
        served = [ids[i].decode() for i in np.flatnonzero(np.isin(hashes, self._snapshot.id_hash))]
        if served:
            got = f"{len(served)} that are served"
            self._error("snapshot_rows", "absent_ids", "retracted ids without a sample", got, served[:_SHOWN])

    def _n_listed(self, number: int) -> int:
        snapshot = self._snapshot
        others = (snapshot.shadowed_part, snapshot.retracted_part)
        return len(self._places[number]) + sum(int(np.count_nonzero(parts == number)) for parts in others)

    def _part_agrees(self, number: int, ref: PartRef, outcome: PartOutcome | None) -> bool:
        """Compare the part's documents with the digests that the snapshot names."""
        path = layout.manifest_path(ref.name)
        if outcome is None:
            expected = f"the manifest of a part that snapshot {self._snapshot.fingerprint} names"
            if not self._old and not self._findings.has_error(path) and not self._came_later(path):
                self._findings.error("missing", path, expected=expected, got="nothing", samples=self.ids_of(number))
            return False
        for damaged in (path, layout.index_path(ref.name)):
            if self._findings.has_error(damaged):
                self._findings.fill_samples(damaged, self.ids_of(number))
        manifest = outcome.manifest
        if manifest is None:
            return False
        index = manifest.index_file if manifest.columns else None
        pairs = (
            ("manifest", (ref.manifest_nbytes, ref.manifest_digest), (outcome.manifest_nbytes, manifest.digest())),
            ("index", (ref.index_nbytes, ref.index_digest), (index.nbytes, index.digest) if index else (0, None)),
        )
        for what, wanted, got in pairs:
            if wanted != got:
                expected = f"the {what} of {wanted[0]} bytes, {wanted[1]}, that the snapshot names"
                found = f"{got[0]} bytes, {got[1]}"
                self._findings.error("snapshot_part", path, expected=expected, got=found, samples=self.ids_of(number))
                return False
        return True

    def _report_lost(self) -> None:
        lost = [ref.name for ref in self._snapshot.parts if ref.name not in self._outcomes]
        lost = [name for name in lost if not self._came_later(layout.manifest_path(name))]
        if lost:
            got = f"none of {len(lost)}: {', '.join(lost[:3])}{', …' if len(lost) > 3 else ''}"
            expected = f"the manifest of each of its {len(self._snapshot.parts)} parts"
            self._findings.add("warning", "old_snapshot", self._path, expected=expected, got=got)

    def _came_later(self, path: str) -> bool:
        """Say whether a manifest is there now: a snapshot sealed while we look names younger parts than our listing."""
        try:
            return self._store.size(path) is not None
        except AccessError:
            raise
        except HsfmtError:
            return False

    def _check_part(self, number: int, name: str, outcome: PartOutcome) -> None:
        manifest, rows, snapshot = outcome.manifest, outcome.rows, self._snapshot
        assert manifest is not None
        served = snapshot.row[self._places[number]].astype(np.int64)
        listed = np.concatenate([
            served,
            snapshot.shadowed_row[snapshot.shadowed_part == number],
            snapshot.retracted_row[snapshot.retracted_part == number],
        ])  # fmt: skip
        n = manifest.counts.samples
        if np.any(listed < 0) or np.any(listed >= n):
            got = f"rows {int(listed.min())} to {int(listed.max())}"
            self._error("snapshot_rows", "row", f"rows 0 to {n - 1} of part {name}", got)
            return
        n_different = len(np.unique(listed))
        self._n_unlisted += n - n_different
        self._n_repeated += len(listed) - n_different
        if rows is None:
            return
        self._rows[number] = rows
        places = self._places[number]
        for member, wanted in (
            ("n_tokens", rows.n_tokens),
            ("n_supervised", rows.n_supervised),
            ("id_hash", rows.id_hash),
        ):
            wrong = np.flatnonzero(getattr(snapshot, member)[places] != wanted[served])
            if len(wrong):
                first = int(wrong[0])
                got = (
                    f"{getattr(snapshot, member)[places[first]]} for row {served[first]} ({len(wrong)} samples differ)"
                )
                expected = f"{wanted[served[first]]}, as the index of part {name} has"
                self._error("snapshot_rows", member, expected, got, self._ids_at(places[wrong[:_SHOWN]]))

    def _report_selection(self) -> None:
        """Report samples listed more than once, or not at all in a snapshot that says it is complete (rule SNAP-4)."""
        if not self._snapshot.complete:
            self._n_unlisted = 0
        if self._n_unlisted or self._n_repeated:
            got = f"{self._n_unlisted} left out, {self._n_repeated} listed again"
            expected = "every sample of the parts once: served, shadowed or retracted"
            self._error("snapshot_rows", "row", expected, got)

    def _gather(self, name: str, parts: npt.NDArray[np.int32], rows: npt.NDArray[np.int32]) -> npt.NDArray[np.generic]:
        """Return an array of `PartRows` for (part, row) pairs."""
        sample = getattr(next(iter(self._rows.values())), name)
        result = np.empty((len(parts), *sample.shape[1:]), sample.dtype)
        order = np.argsort(parts, kind="stable")
        ends = np.searchsorted(parts[order], np.arange(len(self._snapshot.parts) + 1))
        for number, source in self._rows.items():
            at = order[ends[number] : ends[number + 1]]
            result[at] = getattr(source, name)[rows[at]]
        return result

    def _check_served(self) -> None:
        snapshot = self._snapshot
        keys = _words(self._gather("id_key", snapshot.part, snapshot.row))
        by_key = np.lexsort((snapshot.row, snapshot.part, keys[:, 1], keys[:, 0]))
        before, after = by_key[:-1], by_key[1:]
        same_id = np.all(keys[before] == keys[after], axis=1)
        same_row = (snapshot.part[before] == snapshot.part[after]) & (snapshot.row[before] == snapshot.row[after])
        twice = after[same_id & ~same_row]
        if len(twice):
            got = f"{len(twice)} more samples of an id that is served already"
            self._error("snapshot_rows", "row", "one sample an id", got, self._ids_at(twice[:_SHOWN]))
        self._check_order()
        pairs = _words(self._gather("pair_key", snapshot.part, snapshot.row))
        pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
        state = xxhash.xxh3_128(_DATASET_TAG + struct.pack("<Q", len(pairs)))
        state.update(np.ascontiguousarray(pairs).tobytes())
        actual = f"xxh3_128:{state.hexdigest()}"
        if actual != snapshot.content_digest:
            self._error("dataset_digest", "content_digest", actual, snapshot.content_digest)

    def _ids_at(self, places: npt.NDArray[np.int64]) -> list[str]:
        ids = self._loaded.ids
        if ids is None:
            return []
        return [ids.ids[ids.offsets[i] : ids.offsets[i + 1]].tobytes().decode("utf-8", "replace") for i in places]

    def _check_order(self) -> None:
        snapshot, ids = self._snapshot, self._loaded.ids
        ranks = self._gather("source_index", snapshot.part, snapshot.row)
        wrong = [int(i) for i in np.flatnonzero(ranks[1:] < ranks[:-1])]  # type: ignore[operator]
        if ids is not None and not wrong:
            ties = np.flatnonzero(ranks[1:] == ranks[:-1])
            raw = [ids.ids[ids.offsets[i] : ids.offsets[i + 2]].tobytes() for i in ties]
            cuts = [int(ids.offsets[i + 1] - ids.offsets[i]) for i in ties]
            wrong = [int(i) for i, data, cut in zip(ties, raw, cuts, strict=True) if data[cut:] < data[:cut]]
        if wrong:
            got = f"another order from sample {wrong[0]} on"
            where = f"{self._path}: row"
            self._findings.add("warning", "snapshot_order", where, expected="source_index, then id", got=got)

    def _check_shadowed(self) -> None:
        snapshot = self._snapshot
        if not len(snapshot.shadowed_part):
            return
        winners = {}
        for parts, rows in (
            (snapshot.part, snapshot.row),
            (snapshot.retracted_part, snapshot.retracted_row),
        ):
            for i, key in enumerate(_as_bytes(self._gather("id_key", parts, rows))):
                winners[key] = (int(parts[i]), int(rows[i]))
        shadowed = list(zip(snapshot.shadowed_part.tolist(), snapshot.shadowed_row.tolist(), strict=True))
        keys = _as_bytes(self._gather("id_key", snapshot.shadowed_part, snapshot.shadowed_row))
        for place, (key, later, same) in enumerate(zip(keys, shadowed, snapshot.shadowed_same.tolist(), strict=True)):
            winner = winners.get(key)
            if winner is None or winner >= later:
                got = "none" if winner is None else f"row {winner[1]} of part {winner[0]}"
                self._error("snapshot_rows", "shadowed_row", f"an earlier sample of the same id for entry {place}", got)
                continue
            equal = [self._rows[number].pair_key[row].tobytes() for number, row in (winner, later)]
            if (equal[0] == equal[1]) != bool(same):
                expected = f"{int(equal[0] == equal[1])} for entry {place}, as the content digests have"
                self._error("snapshot_rows", "shadowed_same", expected, str(same))

    def _check_holes(self) -> None:
        outcomes = [self._outcomes.get(ref.name) for ref in self._snapshot.parts]
        manifests = [outcome.manifest for outcome in outcomes if outcome is not None and outcome.manifest is not None]
        if len(manifests) < len(outcomes):
            return  # the parts that can't be counted are findings of their own
        some = any(manifest.holes for manifest in manifests)
        present = {key for rows in self._rows.values() for key in _as_bytes(rows.id_key)} if some else set()
        holes = {
            key
            for manifest in manifests
            for key in manifest.holes
            if xxhash.xxh3_128_digest(key.encode()) not in present
        }
        if self._snapshot.counts.get("holes") != len(holes):
            self._error("counts", "counts.holes", str(len(holes)), repr(self._snapshot.counts.get("holes")))


def _words(keys: npt.NDArray[np.generic]) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(keys).view(">u8").reshape(-1, 2)


def _as_bytes(keys: npt.NDArray[np.generic]) -> list[bytes]:
    data = keys.tobytes()
    return [data[i : i + 16] for i in range(0, len(data), 16)]
