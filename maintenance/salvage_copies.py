"""Which samples of a broken part verify, there or as copies in other committed parts: of those none is lost.

Copies come of retries, of merges, and of what compactions and repairs replaced and nobody has collected yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from hsfmt.catalog import load_index
from hsfmt.errors import HsfmtError, StorageError
from hsfmt.header import Header
from hsfmt.index import PartIndex
from hsfmt.maintenance.rewriting import PartSamples, declared_extras
from hsfmt.maintenance.salvage_evidence import Witness
from hsfmt.manifest import PartManifest
from hsfmt.storage import Store


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sample can be read from, and its place in the source's order."""

    part: str
    row: int
    source_index: int


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a copy of a sample must have in common with it, and where it belongs in the source's order."""

    content: bytes
    extra: bytes
    mask_given: bool
    source_index: int


def fingerprint(index: PartIndex, row: int) -> Fingerprint:
    """Return what the index says of a sample."""
    content, extra = index.content_digest[row].tobytes(), index.extra_digest[row].tobytes()
    return Fingerprint(content, extra, bool(index.loss_mask_given[row]), int(index.source_index[row]))


class OtherParts:
    """The committed parts whose documents are sound.

    Parameters
    ----------
    store, header
        The dataset.
    manifests
        Part name to its sound manifest, superseded ones included.
    replaced
        Names of those that a committed part supersedes.
    """

    def __init__(
        self, store: Store, header: Header, manifests: Mapping[str, PartManifest], replaced: Collection[str]
    ) -> None:
        self._store = store
        self._header = header
        self.manifests = manifests
        self._replaced = frozenset(replaced)

    def current(self, but: str) -> list[str]:
        """Return the names of the other parts that are served from."""
        return [name for name in self.manifests if name not in self._replaced and name != but]

    def without(self, names: Collection[str]) -> OtherParts:
        """Return the same parts when these are superseded too."""
        return OtherParts(self._store, self._header, self.manifests, self._replaced | set(names))

    def replacing(self, part: str) -> PartManifest | None:
        """Return the manifest of a part that replaces this one."""
        return next((each for each in self.manifests.values() if part in each.replaces), None)

    def replacing_any(self, parts: Collection[str]) -> set[str]:
        """Return the names of all parts that replace one of these, or one that does so."""
        found: set[str] = set()
        while True:
            more = {name for name, each in self.manifests.items() if each.replaces.keys() & {*parts, *found}} - found
            if not more:
                return found
            found |= more

    def holding(self, ids: Collection[str], names: Collection[str]) -> dict[str, str]:
        """Return id to the first of these parts that holds it."""
        found: dict[str, str] = {}
        wanted = set(ids)
        for name in sorted(names):
            index = self._index(name) if wanted else None
            if index is not None:
                for sample_id in wanted.intersection(map(index.sample_id, range(index.n_samples))):
                    found.setdefault(sample_id, name)
        return found

    def copies(self, manifest: PartManifest, wanted: Mapping[str, Fingerprint]) -> Iterator[tuple[str, Place]]:
        """Yield (id, where it is) of whole copies of a broken part's samples; each at most once.

        Parameters
        ----------
        manifest
            That of the broken part, whose extras a copy must have.
        wanted
            Id to what its copy must be.
        """
        left = dict(wanted)
        extras = declared_extras(manifest.columns)
        for name in sorted(self.manifests.keys() - {manifest.part}):
            other = self.manifests[name]
            index = self._index(name) if left and declared_extras(other.columns) == extras else None
            if index is None:
                continue
            samples = PartSamples(self._store, self._header, other, index)
            try:
                for row in range(index.n_samples):
                    sample_id = index.sample_id(row)
                    same = sample_id in left and _matches(fingerprint(index, row), left[sample_id])
                    if same and _whole(samples, row):
                        yield sample_id, Place(name, row, left.pop(sample_id).source_index)
            finally:
                samples.close()

    def former(self, manifest: PartManifest, *, sealed: bool) -> dict[str, Fingerprint]:
        """Return id to what a part must hold whose own index is lost, as the parts that it was made of say.

        Parameters
        ----------
        manifest
            The part's.
        sealed
            Whether a snapshot says which ids are served from it. Else those that a compaction left behind are told by
            the parts that serve them instead (rule SNAP-3): they must not take their place.
        """
        if not _is_faithful(manifest):
            return {}
        found: dict[str, tuple[str, Fingerprint]] = {}
        extras = declared_extras(manifest.columns)
        for name, digest in sorted(manifest.replaces.items()):
            other = self.manifests.get(name)
            if other is None or other.digest() != digest or declared_extras(other.columns) != extras:
                continue
            index = self._index(name)
            if index is not None:
                for row in range(index.n_samples):
                    found.setdefault(index.sample_id(row), (name, fingerprint(index, row)))
        left = {} if sealed or "repair" in manifest.producer else self.holding(found, self.current(manifest.part))
        return {
            sample_id: each
            for sample_id, (name, each) in found.items()
            if sample_id not in manifest.holes and not left.get(sample_id, name) < name
        }

    def _index(self, name: str) -> PartIndex | None:
        manifest = self.manifests[name]
        if not manifest.columns:
            return None
        try:
            return load_index(self._store, manifest)
        except StorageError:
            raise
        except HsfmtError:
            return None


def _is_faithful(manifest: PartManifest) -> bool:
    """Say whether a part was made by a compaction or repair: then it held what those that it replaces held."""
    compaction, repair = manifest.producer.get("compaction"), manifest.producer.get("repair")
    if isinstance(repair, Mapping) and isinstance(part := repair.get("part"), str):
        return dict(manifest.replaces) == {part: repair.get("manifest")}
    return isinstance(compaction, Mapping) and compaction.get("parts") == sorted(manifest.replaces)


def _matches(found: Fingerprint, wanted: Fingerprint) -> bool:
    return (found.content, found.extra, found.mask_given) == (wanted.content, wanted.extra, wanted.mask_given)


def _whole(samples: PartSamples, row: int) -> bool:
    try:
        samples.read(row)
    except StorageError:
        raise
    except HsfmtError:
        return False
    return True


def salvage_rows(
    store: Store,
    header: Header,
    manifest: PartManifest,
    index: PartIndex | None,
    known: tuple[Witness, OtherParts],
) -> tuple[dict[str, Place], dict[str, str], int]:
    """Return (id to place of what is proven, id to reason of what is lost, how many more are lost)."""
    witness, others = known
    part = manifest.part
    if index is not None:
        kept, failed = _scan(store, header, manifest, index)
        wanted = {sample_id: fingerprint(index, row) for sample_id, (row, _) in failed.items()}
        lost = {sample_id: reason for sample_id, (_, reason) in failed.items()}
    else:
        kept = {}
        ids, _ = witness.ids(part)
        sealed = witness.ref(part) is not None
        wanted = others.former(manifest, sealed=sealed)
        if sealed:
            # Which of the others are retracted can't be told without the index: they are not to be served again.
            wanted = {sample_id: wanted[sample_id] for sample_id in ids if sample_id in wanted}
        reason = f"part {part}: its index is lost, and with it the samples' digests"
        lost = dict.fromkeys([*ids, *wanted], reason)
    n_all = len(kept) + len(lost) if index is not None else max(manifest.counts.samples, len(lost))
    n_unknown = n_all - len(kept) - len(lost)
    for sample_id, place in others.copies(manifest, wanted) if wanted else ():
        kept[sample_id] = place
        del lost[sample_id]
    return kept, lost, n_unknown


def with_others(lost: dict[str, str], part: str, others: OtherParts) -> dict[str, str]:
    """Say of lost samples whether another part has something under their ids: readers get that one."""
    there = others.holding(lost, others.current(part)) if lost else {}
    return {
        sample_id: f"{reason}; part {there[sample_id]} has an unproven copy or other content, served from now on"
        if sample_id in there
        else reason
        for sample_id, reason in lost.items()
    }


def _scan(
    store: Store, header: Header, manifest: PartManifest, index: PartIndex
) -> tuple[dict[str, Place], dict[str, tuple[int, str]]]:
    """Return (id to place of what is proven, id to row and reason of what is not); the first of an id counts."""
    samples = PartSamples(store, header, manifest, index)
    kept: dict[str, Place] = {}
    failed: dict[str, tuple[int, str]] = {}
    try:
        for row in range(index.n_samples):
            sample_id = index.sample_id(row)
            if sample_id in kept or sample_id in failed:
                continue
            try:
                samples.read(row)
            except StorageError:
                raise
            except HsfmtError as error:
                failed[sample_id] = row, f"lost in a repair of part {manifest.part}: {error_line(error)}"[:1000]
            else:
                kept[sample_id] = Place(manifest.part, row, int(index.source_index[row]))
    finally:
        samples.close()
    return kept, failed


def error_line(error: HsfmtError) -> str:
    """Return the first problem of an error in a line."""
    problem = error.problems[0]
    return f"{problem.where}: expected {problem.expected}, got {problem.got}"
