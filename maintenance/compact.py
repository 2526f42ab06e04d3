"""`compact`: few parts of many, sample by sample, each proven by its digests; the old ones stay for `gc`.

Spec: rules MAN-8, SNAP-3, SNAP-4. The set of samples, its order and its content digest stay what they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt import __version__, canonical, layout, tables
from hsfmt.catalog import committed_parts, load_index, load_manifest, read_header, read_pointer
from hsfmt.columns import IDS, STATES
from hsfmt.errors import CorruptionError, NotFoundError, UsageError
from hsfmt.header import Header
from hsfmt.maintenance.rewriting import (
    PartSamples,
    ProvenSample,
    bare_settings,
    declared_extras,
    derived_name,
    settings_like,
    total_nbytes,
    write_part,
)
from hsfmt.manifest import PartManifest
from hsfmt.sealing import build_live, seal
from hsfmt.snapshot import Snapshot, parse_snapshot
from hsfmt.storage import Store, open_store
from hsfmt.storage.read_together import read_together

TARGET_NBYTES = 32 << 30
# What documents and tables of a group may come to: half of the caps, so that no commit fails at its end.
_MAX_MANIFESTS_NBYTES = 32 << 20
_MAX_MANIFEST_VALUES = canonical.MAX_VALUES // 2
_MAX_INDEXES_NBYTES = tables.MAX_TABLE_NBYTES // 2
_OF_REWRITING = {"compaction", "producers", "repair", "repairs"}
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Group:
    """Parts that become one.

    Attributes
    ----------
    parts, new_part
        Their names, ascending, and that of the new one.
    n_samples
        Samples that it holds.
    n_left
        Copies of ids that are served from elsewhere: they stay in the old parts.
    nbytes
        Of the old files.
    """

    parts: tuple[str, ...]
    new_part: str
    n_samples: int
    n_left: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class CompactReport:
    """What a compaction did, or would do.

    Attributes
    ----------
    url, dry_run
        The dataset; whether nothing was done.
    groups
        Which parts became which.
    parts_before, parts_after
        Parts of the snapshot.
    snapshot
        Fingerprint of the snapshot that is current afterwards; of a dry run, of the one that a seal would make first.
    content_digest
        Of the samples; the same before and after.
    """

    url: str
    dry_run: bool
    groups: tuple[Group, ...]
    parts_before: int
    parts_after: int
    snapshot: str
    content_digest: str

    @property
    def nbytes(self) -> int:
        """Bytes that the new parts take, about: the old ones stay until they are collected."""
        return sum(group.nbytes for group in self.groups)

    @property
    def n_left(self) -> int:
        """Copies of ids that are never served: they go with the old parts when these are collected."""
        return sum(group.n_left for group in self.groups)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        groups = [
            {
                "new_part": each.new_part,
                "parts": list(each.parts),
                "samples": each.n_samples,
                "copies_left": each.n_left,
                "nbytes": each.nbytes,
            }
            for each in self.groups
        ]
        return {
            "url": self.url,
            "dry_run": self.dry_run,
            "groups": groups,
            "parts_before": self.parts_before,
            "parts_after": self.parts_after,
            "extra_nbytes": self.nbytes,
            "snapshot": self.snapshot,
            "content_digest": self.content_digest,
        }


def compact(
    url: str | os.PathLike[str] | Store,
    *,
    target_nbytes: int = TARGET_NBYTES,
    dry_run: bool = False,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> CompactReport:
    """Make few parts of many. Seals first and last; who is stopped starts again and goes on.

    Parameters
    ----------
    url
        The dataset.
    target_nbytes
        Raw bytes of states that a new part holds at most.
    dry_run
        Only say which parts would become which.
    progress
        Called as (samples done, samples in all, part).
    storage_options
        For fsspec URLs.

    Raises
    ------
    NotFoundError
        There is no dataset, or it was never sealed.
    CorruptionError
        A part is damaged: repair it first. What was committed so far stays.
    UsageError
        Not enough space.
    StorageError
        The storage fails.
    """
    store = url if isinstance(url, Store) else open_store(url, storage_options)
    if type(target_nbytes) is not int or target_nbytes < 1:
        raise UsageError.at("target_nbytes", expected="a positive number of bytes", got=repr(target_nbytes)[:60])
    header = read_header(store)
    before = _would_be_sealed(store, header) if dry_run else seal(store).snapshot
    work = _Compaction(store, header, before)
    groups = work.groups(target_nbytes)
    report = CompactReport(
        url=store.url,
        dry_run=dry_run,
        groups=tuple(groups),
        parts_before=len(before.parts),
        parts_after=len(before.parts) - sum(len(group.parts) - 1 for group in groups),
        snapshot=before.fingerprint,
        content_digest=before.content_digest,
    )
    if dry_run or not groups:
        return report
    free = store.free_nbytes()
    if free is not None and report.nbytes > free:
        remedy = "make room, or compact by a smaller target; the old parts stay until `hsfmt gc`"
        raise UsageError.at(store.url, expected=f"{report.nbytes} bytes for new parts", got=f"{free}", remedy=remedy)
    done, total = 0, sum(group.n_samples for group in groups)
    for group in groups:
        if progress is not None:
            progress(done, total, group.new_part)
        if store.size(layout.manifest_path(group.new_part)) is None:
            work.write(group)
        done += group.n_samples
    after = seal(store).snapshot
    return CompactReport(
        url=store.url,
        dry_run=False,
        groups=report.groups,
        parts_before=report.parts_before,
        parts_after=len(after.parts),
        snapshot=after.fingerprint,
        content_digest=after.content_digest,
    )


def _would_be_sealed(store: Store, header: Header) -> Snapshot:
    if read_pointer(store) is None:
        remedy = "seal it first: hsfmt seal URL"
        raise NotFoundError.at(store.url, expected="a sealed dataset", got="one that was never sealed", remedy=remedy)
    return parse_snapshot(build_live(store, header)[0], "snapshot")


class _Compaction:
    def __init__(self, store: Store, header: Header, snapshot: Snapshot) -> None:
        self._store = store
        self._header = header
        self._snapshot = snapshot
        committed = set(committed_parts(store))
        refs = [ref for ref in snapshot.parts if ref.name in committed]
        files = read_together(store, [ref.documents[0] for ref in refs])
        self._manifests = {ref.name: load_manifest(files, ref.name, header, ref.manifest_digest) for ref in refs}
        self._number = {ref.name: number for number, ref in enumerate(snapshot.parts)}

    def groups(self, target_nbytes: int) -> list[Group]:
        """Return neighbours by name that fit together, of one kind: other columns or codecs are not mixed."""
        groups: list[Group] = []
        most = np.array([target_nbytes, _MAX_MANIFESTS_NBYTES, _MAX_MANIFEST_VALUES, _MAX_INDEXES_NBYTES], np.float64)
        open_: dict[Any, tuple[list[str], npt.NDArray[np.float64]]] = {}
        for name, manifest in sorted(self._manifests.items()):
            if not manifest.columns and len(manifest.holes) == 0:
                continue
            kind, sizes = _kind(manifest), _sizes(manifest)
            names, so_far = open_.get(kind, ([], np.zeros(len(most))))
            if names and np.any(so_far + sizes > most):
                groups += self._group(names)
                names, so_far = [], np.zeros(len(most))
            open_[kind] = ([*names, name], so_far + sizes)
        for names, _ in open_.values():
            groups += self._group(names)
        return sorted(groups, key=lambda group: group.parts)

    def _group(self, names: list[str]) -> list[Group]:
        if len(names) < 2:
            return []
        manifests = [self._manifests[name] for name in names]
        rows = {name: self._rows(name).tolist() for name in names}
        new = derived_name(names[0], "c", [(each.part, each.digest()) for each in manifests], rows)
        if not self._keeps_winners(set(names), new):
            return []
        n_samples = sum(map(len, rows.values()))
        n_left = sum(each.counts.samples for each in manifests) - n_samples
        return [Group(tuple(names), new, n_samples, n_left, sum(map(total_nbytes, manifests)))]

    def _keeps_winners(self, names: set[str], new: str) -> bool:
        """Say whether the samples that count still do: of one id the smallest part name wins (rule SNAP-3)."""
        snapshot = self._snapshot
        later = {snapshot.parts[number].name for number in set(snapshot.shadowed_part.tolist())} - names
        return all(new < name for name in later if name > min(names))

    def _rows(self, name: str) -> npt.NDArray[np.int64]:
        """Return the rows that count: those served and those retracted; what is shadowed is left behind."""
        snapshot, number = self._snapshot, self._number[name]
        served = snapshot.row[snapshot.part == number]
        retracted = snapshot.retracted_row[snapshot.retracted_part == number]
        return np.sort(np.concatenate([served, retracted])).astype(np.int64)

    def write(self, group: Group) -> None:
        """Write and commit the new part of a group."""
        manifests = [self._manifests[name] for name in group.parts]
        largest = max(manifests, key=lambda each: each.counts.tokens)
        producers = _distinct([dict(each.producer) for each in manifests])
        common = {
            key: value
            for key, value in producers[0].items()
            if key not in _OF_REWRITING and all(each.get(key) == value for each in producers)
        }
        producer = {
            **common,
            "compaction": {"library": f"hsfmt {__version__}", "parts": list(group.parts)},
            "producers": producers,
        }
        filled = self._ids(group)
        holes = {key: why for each in reversed(manifests) for key, why in each.holes.items() if key not in filled}
        replaces = {each.part: each.digest() for each in manifests}
        if group.n_samples:
            settings = settings_like(largest.columns, self._header, producer)
        else:
            settings = bare_settings(self._header, producer)
        write_part(self._store, group.new_part, settings, self._samples(group), holes=holes, replaces=replaces)

    def _ids(self, group: Group) -> set[str]:
        """Return the ids of the samples that a new part will hold: of those it needs no holes."""
        ids: set[str] = set()
        for name in group.parts:
            if self._manifests[name].columns:
                index = load_index(self._store, self._manifests[name])
                ids |= {index.sample_id(int(row)) for row in self._rows(name)}
        return ids

    def _samples(self, group: Group) -> Iterator[ProvenSample]:
        for name in group.parts:
            manifest, rows = self._manifests[name], self._rows(name)
            if not len(rows):
                continue
            samples = PartSamples(self._store, self._header, manifest, load_index(self._store, manifest))
            try:
                for row in rows:
                    try:
                        yield samples.read(int(row))
                    except CorruptionError as error:
                        problem = error.problems[0]
                        remedy = "`hsfmt repair` first; nothing of this part was changed"
                        raise CorruptionError.at(
                            problem.where, expected=problem.expected, got=problem.got, remedy=remedy
                        ) from error
            finally:
                samples.close()


def _kind(manifest: PartManifest) -> Any:
    """Return what parts must have in common: extras belong to the digest of a sample, null ones too.

    Of a source whose files were deleted, the producer tells that it is converted: that must stay to be read there.
    """
    columns, producer = manifest.columns, manifest.producer
    options = producer.get("options")
    deletes = isinstance(options, Mapping) and options.get("delete_source") is True
    origin = tuple(repr(producer.get(key)) for key in ("host", "source", "source_kind")) if deletes else ()
    if not columns:
        return "holes", origin
    extras = tuple((name, each.kind, each.dtype, each.shape) for name, each in declared_extras(columns).items())
    return extras, columns[STATES].codec, columns[IDS].dtype_name, origin


def _sizes(manifest: PartManifest) -> npt.NDArray[np.float64]:
    """Return raw bytes of states, bytes and values of the manifest, and bytes of the index."""
    columns, document = manifest.columns, manifest.to_bytes()
    states = columns[STATES] if columns else None
    row = int(np.prod(states.shape[1:])) * states.dtype.itemsize if states else 0
    n_values = sum(map(document.count, (b",", b"[", b"{")))
    index = manifest.index_file.nbytes if columns else 0
    return np.array([manifest.counts.tokens * row, len(document), n_values, index], np.float64)


def _distinct(producers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the producers that differ; of parts that are compacted already, those of what they were made of."""
    found: dict[bytes, dict[str, Any]] = {}
    for producer in producers:
        former = producer.get("producers")
        flat = isinstance(former, list) and "compaction" in producer and all(isinstance(each, dict) for each in former)
        own = {key: producer[key] for key in ("repair", "repairs") if key in producer}
        for each in [*former, *([own] if own else [])] if flat and isinstance(former, list) else [producer]:
            found.setdefault(canonical.dumps(each), each)
    return list(found.values())
