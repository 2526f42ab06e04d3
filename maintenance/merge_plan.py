"""What a merge takes from where, and what stands against it; nothing is written here.

Spec: rules MRG-1 to MRG-5, MRG-8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt import attachments as attached
from hsfmt import digests, layout
from hsfmt.catalog import committed_parts, load_current, read_header, superseded_parts
from hsfmt.errors import CorruptionError, FormatError, HeaderMismatchError, NotFoundError, UsageError
from hsfmt.header import Header, check_same_header
from hsfmt.index import PartIndex
from hsfmt.lost_parts import check_none_lost, snapshots_to_keep
from hsfmt.manifest import PartManifest
from hsfmt.retractions import retracted_ids
from hsfmt.snapshot import Snapshot, parse_snapshot
from hsfmt.snapshot_builder import LoadedPart, build_snapshot
from hsfmt.storage import Store
from hsfmt.stored_snapshots import stored_snapshots

_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Source:
    """A dataset to be merged, as it was at one listing.

    Attributes
    ----------
    store, header
        Where, and what it means.
    loaded
        All committed parts by name; superseded ones without index.
    retracted
        Ids that its snapshot took out.
    snapshots
        The current one; without a pointer all.
    newer
        Parts that no such snapshot names.
    """

    store: Store
    header: Header
    loaded: Mapping[str, LoadedPart]
    retracted: frozenset[str]
    snapshots: tuple[Snapshot, ...]

    @property
    def superseded(self) -> set[str]:
        """Parts that another one here replaces."""
        return superseded_parts(part.manifest for part in self.loaded.values())

    @property
    def parts(self) -> dict[str, PartManifest]:
        """The parts that count."""
        gone = self.superseded
        return {name: part.manifest for name, part in self.loaded.items() if name not in gone}

    @property
    def newer(self) -> tuple[str, ...]:
        """Parts that were committed after the seal."""
        named = {ref.name for snapshot in self.snapshots for ref in snapshot.parts}
        return tuple(sorted(self.parts.keys() - named)) if self.snapshots else ()

    def objects(self) -> set[str]:
        """Return the paths of everything that a merge carries over, or that only names it."""
        paths = {layout.ROOT_METADATA, layout.PARTS_METADATA, layout.POINTER}
        for part, manifest in self.parts.items():
            paths |= {layout.manifest_path(part), *(entry.path for entry in manifest.files)}
        for snapshot in self.snapshots:
            paths |= {layout.snapshot_path(snapshot.fingerprint, file) for file in ("index", "ids")}
            paths |= {attached.entry_path(entry, self.store.url) for entry in snapshot.attachments}
        return paths


@dataclass(frozen=True, slots=True)
class MergePlan:
    """What a merge does.

    Attributes
    ----------
    taken
        Part to its manifest and the source that it comes from, in the order to commit them.
    present, superseded
        Parts that are in the destination already; that another part here or there replaces.
    newer
        Source to its parts that are newer than its seal; they are taken too.
    same
        How many samples have an id and content that is there twice.
    conflicts
        (id, part that is served, part that is not) of ids with different content.
    retracted
        Ids that stay retracted.
    absent
        Ids that stay retracted though no part has a sample of them.
    attachments
        Name to array.
    """

    taken: Mapping[str, tuple[PartManifest, Source]]
    present: frozenset[str]
    superseded: frozenset[str]
    newer: Mapping[str, tuple[str, ...]]
    same: int
    conflicts: tuple[tuple[str, str, str], ...]
    retracted: frozenset[str]
    absent: frozenset[str]
    attachments: Mapping[str, npt.NDArray[Any]]


def read_source(store: Store) -> Source:
    """Return what is committed in a dataset.

    Raises
    ------
    NotFoundError, CorruptionError, HeaderMismatchError
        There is none, it is damaged, or it has lost parts that its snapshot names.
    """
    try:
        header = read_header(store)
        snapshots = snapshots_to_keep(store)
        names = committed_parts(store)
        loaded = load_current(store, names, header, {})
        manifests = [part.manifest for part in loaded.values()]
        check_none_lost(snapshots, names, manifests, drop=False)
        replaced = {name for manifest in manifests for name in manifest.replaces}
        retracted = retracted_ids(store, snapshots, stored_snapshots(store), replaced)
    except (CorruptionError, FormatError, HeaderMismatchError, NotFoundError) as error:
        # Of several datasets, which one it is.
        where = (each.where if store.url in each.where else f"{store.url}: {each.where}" for each in error.problems)
        problems = [replace(each, where=place) for each, place in zip(error.problems, where, strict=True)]
        raise type(error)(problems) from error
    return Source(store, header, loaded, frozenset(retracted), tuple(snapshots))


def plan_merge(store: Store, found: Header | None, sources: Sequence[Source], *, on_duplicate: str) -> MergePlan:
    """Return what to do.

    Parameters
    ----------
    store, found
        The destination, and its header if it is there.
    sources
        As read.
    on_duplicate
        "refuse" or "first".

    Raises
    ------
    HeaderMismatchError, CorruptionError, UsageError
        As `merge`.
    """
    header = found or sources[0].header
    for source in sources:
        check_same_header(header, source.header, source.store.url)
    there = read_source(store) if found is not None else None
    loaded = dict(there.loaded) if there else {}
    origin = dict.fromkeys(loaded, store.url)
    owner: dict[str, Source] = {}
    for source in sources:
        for name, part in source.loaded.items():
            known = loaded.get(name)
            if known is not None and known.manifest.digest() != part.manifest.digest():
                raise UsageError.at(
                    f"part {name}",
                    expected=f"one part of this name, as in {origin[name]}",
                    got=f"another one in {source.store.url}",
                    remedy="parts can't be renamed: `hsfmt compact` one of the datasets first, which makes new ones",
                )
            # One that is superseded in a single dataset comes without its index; it is so in all of them.
            if known is None or (known.index is None and part.index is not None):
                loaded[name] = part
            if known is None:
                owner[name], origin[name] = source, source.store.url
    superseded = superseded_parts(part.manifest for part in loaded.values())
    live = {name: part for name, part in loaded.items() if name not in superseded}
    present = frozenset(there.loaded) if there else frozenset()
    retracted = frozenset().union(*(source.retracted for source in (*sources, *([there] if there else []))))
    same, conflicts = _duplicates(live, header, retracted)
    mine = there.parts if there else {}
    before = set(_duplicates({name: loaded[name] for name in mine if name in live}, header, retracted)[1])
    if on_duplicate == "refuse" and set(conflicts) - before:
        _refuse_conflicts([conflict for conflict in conflicts if conflict not in before], origin)
    taken = {name for name in live if name not in present} | _links(loaded, owner, superseded, present)
    here = retracted & _ids(live) if retracted else retracted
    return MergePlan(
        taken={name: (loaded[name].manifest, owner[name]) for name in _in_order(taken, loaded)},
        present=frozenset(present & {name for source in sources for name in source.loaded}),
        superseded=frozenset(superseded - present - taken) & frozenset(loaded),
        newer={source.store.url: source.newer for source in sources if source.newer},
        same=same,
        conflicts=conflicts,
        retracted=frozenset(here),
        absent=retracted - here,
        attachments=_attachments(there, sources),
    )


def _duplicates(
    live: Mapping[str, LoadedPart], header: Header, retracted: frozenset[str]
) -> tuple[int, tuple[tuple[str, str, str], ...]]:
    """Return the number of copies that are the same, and the ids with another content or other extras (rule SNAP-3)."""
    if not live:
        return 0, ()
    snapshot = parse_snapshot(build_snapshot(list(live.values()), header, retracted)[0], "snapshot")

    def index(number: int) -> PartIndex:
        found = live[snapshot.parts[number].name].index
        assert found is not None
        return found

    shadowed = list(zip(snapshot.shadowed_part.tolist(), snapshot.shadowed_row.tolist(), strict=True))
    hashes = [digests.id_hash(index(part).sample_id(row).encode()) for part, row in shadowed]
    served = {}
    for i in np.flatnonzero(np.isin(snapshot.id_hash, np.array(hashes, np.uint64))):
        place = int(snapshot.part[i]), int(snapshot.row[i])
        served[index(place[0]).sample_id(place[1])] = place
    same, conflicts = 0, []
    for part, row in shadowed:
        sample_id = index(part).sample_id(row)
        if sample_id in retracted:
            continue
        winner, at = served[sample_id]
        mine, other = index(part), index(winner)
        if np.array_equal(mine.content_digest[row], other.content_digest[at]) and np.array_equal(
            mine.extra_digest[row], other.extra_digest[at]
        ):
            same += 1
        else:
            conflicts.append((sample_id, snapshot.parts[winner].name, snapshot.parts[part].name))
    return same, tuple(sorted(conflicts))


def _refuse_conflicts(conflicts: Sequence[tuple[str, str, str]], origin: Mapping[str, str]) -> None:
    sample_id, winner, loser = conflicts[0]
    raise UsageError.at(
        "merge",
        expected="the same content, metadata and extra columns under the same id",
        got=f"{len(conflicts)} ids with different ones; of {sample_id!r}, part {winner} of {origin[winner]} would "
        f"be served, and part {loser} of {origin[loser]} not",
        remedy="retract the ones that are not wanted in their dataset, or say --on-duplicate first (the part with the "
        "smallest name wins)",
        samples=tuple(sorted({conflict[0] for conflict in conflicts})[:_SHOWN]),
    )


def _ids(live: Mapping[str, LoadedPart]) -> set[str]:
    return {part.index.sample_id(row) for part in live.values() if part.index for row in range(part.index.n_samples)}


def _attachments(there: Source | None, sources: Sequence[Source]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays to add; of one name they must be the same values, however their files are written."""
    listed: list[Mapping[str, Any]] = []
    arrays: dict[str, npt.NDArray[Any]] = {}
    for source in (*([there] if there else []), *sources):
        for snapshot in source.snapshots:
            found = attached.load(source.store, snapshot.attachments, source.store.url)
            entries = [attached.encode(name, array)[0] for name, array in found.items()]
            listed = attached.merge(listed, entries, (), source.store.url)
            arrays |= found
    known = {str(entry["name"]) for snapshot in (there.snapshots if there else ()) for entry in snapshot.attachments}
    return {name: array for name, array in arrays.items() if f"{name}{attached.SUFFIX}" not in known}


def _links(
    loaded: Mapping[str, LoadedPart], owner: Mapping[str, Source], superseded: set[str], present: frozenset[str]
) -> set[str]:
    """Return the superseded parts of sources that come along, because they replace others in their turn.

    Without such a part, what it replaces would be served again, here or when that is merged later.

    Raises
    ------
    NotFoundError, CorruptionError
        One is damaged, and the destination has what it replaces.
    """
    found = set()
    for name in sorted(superseded & owner.keys()):
        manifest, source = loaded[name].manifest, owner[name].store
        if not manifest.replaces:
            continue
        if all(source.size(entry.path) == entry.nbytes for entry in manifest.files):
            found.add(name)
            continue
        others = {old for other in loaded.values() if other.manifest.part != name for old in other.manifest.replaces}
        served = sorted(manifest.replaces.keys() & present - others)
        if served:
            raise CorruptionError.at(
                f"{source.url}: part {name}",
                expected=f"all its files, as only it says that {', '.join(served)} is replaced",
                got="some that are missing",
                remedy="restore them from a copy, or merge into a new dataset",
            )
    return found


def _in_order(taken: set[str], loaded: Mapping[str, LoadedPart]) -> list[str]:
    """Return the parts, those that others of them replace first: each state on the way was one of a source."""
    order: list[str] = []
    while left := taken - set(order):
        ready = sorted(name for name in left if not loaded[name].manifest.replaces.keys() & left)
        if not ready:
            got = f"a circle: {', '.join(sorted(left)[:_SHOWN])}"
            raise CorruptionError.at(layout.MANIFESTS, expected="parts that replace older ones", got=got)
        order += ready
    return order
