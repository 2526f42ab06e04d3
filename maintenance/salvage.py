"""One broken part: what of it can be proven, and the new part that holds it.

Spec: rules MAN-8, VFY-2. The judge is verification at tier full: what it calls an error is broken, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from hsfmt import __version__, layout
from hsfmt.catalog import load_index, load_manifest
from hsfmt.errors import (
    CorruptionError,
    FormatError,
    HeaderMismatchError,
    HsfmtError,
    NotFoundError,
    StorageError,
    UsageError,
)
from hsfmt.header import Header
from hsfmt.index import PartIndex
from hsfmt.maintenance.repair_report import PartFate
from hsfmt.maintenance.rewriting import (
    PartSamples,
    ProvenSample,
    bare_settings,
    derived_name,
    settings_like,
    total_nbytes,
    write_part,
)
from hsfmt.maintenance.salvage_copies import OtherParts, Place, error_line, fingerprint, salvage_rows, with_others
from hsfmt.maintenance.salvage_evidence import (
    Witness,
    check_not_newer,
    claimed_samples,
    proven_part,
    read_if_there,
    superseded_by_lost,
)
from hsfmt.manifest import PartManifest, implied_documents
from hsfmt.readers.verification.parts import PartTask, check_part
from hsfmt.readers.verification.report import Finding
from hsfmt.storage import Store

_UNREADABLE = "unreadable"
_REPLACED = "replaced"


@dataclass(frozen=True, slots=True)
class SalvagePlan:
    """What to do about one part.

    Attributes
    ----------
    fate
        For the report.
    documents
        Paths and bytes of zarr.json files to write again.
    source
        Columns and index of the part; the index is None where it is lost, all of it where nothing can be read.
    places
        Where the samples are that were proven: in the part, or copies of them elsewhere.
    holes
        Of the new part.
    replaces
        Name to manifest digest of what the new part supersedes.
    producer
        The new part's.
    set_aside
        Whether the manifest goes into quarantine.
    superseded
        Whether another part replaces this one already.
    """

    fate: PartFate
    documents: Mapping[str, bytes] = field(default_factory=dict)
    source: tuple[PartManifest, PartIndex | None] | None = None
    places: tuple[Place, ...] = ()
    holes: Mapping[str, str] = field(default_factory=dict)
    replaces: Mapping[str, str] = field(default_factory=dict)
    producer: Mapping[str, object] = field(default_factory=dict)
    set_aside: bool = False
    superseded: bool = False

    def carry_out(self, store: Store, header: Header, others: OtherParts) -> None:
        """Do it; what was done before is found and not done again.

        Raises
        ------
        HsfmtError
            A sample can't be read now, or the storage fails.
        """
        for path, data in self.documents.items():
            store.write(path, data)
        new = self.fate.new_part
        if new is not None and store.size(layout.manifest_path(new)) is None:
            settings = bare_settings(header, self.producer)
            if self.source is not None and self.places:
                settings = settings_like(self.source[0].columns, header, self.producer)
            samples = self._samples(store, header, others)
            write_part(store, new, settings, samples, holes=self.holes, replaces=self.replaces)
        if self.set_aside:
            set_aside(store, layout.manifest_path(self.fate.part), f"{self.fate.part}.json")

    def _samples(self, store: Store, header: Header, others: OtherParts) -> Iterator[ProvenSample]:
        """Yield the proven samples; those of one part follow each other mostly, so that one part is open at a time."""
        opened: tuple[str, PartSamples] | None = None
        try:
            for place in self.places:
                if opened is None or opened[0] != place.part:
                    if opened is not None:
                        opened[1].close()
                    opened = place.part, self._open(store, header, others, place.part)
                proven = opened[1].read(place.row)
                yield replace(proven, source_index=place.source_index)
        finally:
            if opened is not None:
                opened[1].close()

    def _open(self, store: Store, header: Header, others: OtherParts, part: str) -> PartSamples:
        if self.source is not None and self.source[0].part == part and self.source[1] is not None:
            return PartSamples(store, header, self.source[0], self.source[1])
        manifest = others.manifests[part]
        return PartSamples(store, header, manifest, load_index(store, manifest))


def set_aside(store: Store, path: str, name: str) -> None:
    """Move an object into quarantine: durable there before it goes here."""
    nbytes = store.size(path)
    if nbytes is None:
        return
    data = store.read(path, nbytes)
    target = f"{layout.QUARANTINE}/{name}"
    n = 1
    while (there := read_if_there(store, target)) != data and there:
        n += 1
        stem, dot, suffix = name.rpartition(".")
        target = f"{layout.QUARANTINE}/{stem}.{n}{dot}{suffix}"
    store.write(target, data)
    store.sync([target.rpartition("/")[0]])
    store.remove(path)
    store.sync([path.rpartition("/")[0]])


def usable_manifest(store: Store, part: str, header: Header | None, witness: Witness) -> PartManifest | str:
    """Return the part's manifest, or what is wrong with it.

    Raises
    ------
    FormatVersionError
        It is whole and needs a newer library.
    StorageError
        The storage fails.
    """
    path = layout.manifest_path(part)
    ref = witness.ref(part)
    try:
        if header is None:
            return "no header to compare with"
        return load_manifest(store, part, header, ref.manifest_digest if ref else None)
    except (CorruptionError, FormatError, HeaderMismatchError, NotFoundError) as error:
        check_not_newer(read_if_there(store, path), path, error)
        return error_line(error)


def plan_part(
    store: Store, part: str, header: Header, manifest: PartManifest, witness: Witness, others: OtherParts
) -> SalvagePlan | None:
    """Examine a part whose manifest is sound and that no other one replaces; None where nothing is wrong with it.

    Raises
    ------
    StorageError
        The storage fails: that is not taken for damage.
    UsageError
        A part of its name beside it is in the way.
    """
    errors = _errors(store, part)
    if not errors:
        return None
    problems = tuple(_finding_line(finding) for finding in errors)
    implied = implied_documents(part, manifest.columns)
    broken = {finding.path for finding in errors}
    if broken <= set(implied):
        fate = PartFate(part, problems, "restored", n_saved=0)
        return SalvagePlan(fate, documents={path: implied[path] for path in sorted(broken)})
    try:
        index: PartIndex | None = load_index(store, manifest)
    except StorageError:
        raise
    except HsfmtError:
        index = None
    kept, lost, n_unknown = salvage_rows(store, header, manifest, index, (witness, others))
    digest = manifest.digest()
    fate = PartFate(
        part,
        problems,
        _REPLACED,
        new_part=_new_name(part, (digest, kept, sorted(lost)), kept, others),
        n_saved=len(kept),
        lost=with_others(lost, part, others),
        n_unknown=n_unknown,
        nbytes=total_nbytes(manifest) * len(kept) // max(manifest.counts.samples, 1),
    )
    return SalvagePlan(
        fate,
        source=(manifest, index),
        places=tuple(kept.values()),
        # A sample beats its hole: of what a part made here has holes for, it holds nothing.
        holes={key: why for key, why in {**manifest.holes, **lost}.items() if key not in kept},
        replaces={part: digest},
        producer=_producer(part, digest, manifest.producer),
    )


def plan_superseded(
    store: Store, part: str, manifest: PartManifest | str, digest: str, known: tuple[Witness, OtherParts]
) -> SalvagePlan | None:
    """Return what to do about a part that another one replaces.

    A manifest that stands in the way is set aside. If the part is broken and the current snapshot still serves from it,
    since a repair or compaction was stopped before it sealed, a seal serves from the other one.
    """
    witness, others = known
    served = witness.current is not None and any(ref.name == part for ref in witness.current.parts)
    in_the_way = False
    problems: tuple[str, ...] = ()
    if isinstance(manifest, PartManifest) and manifest.digest() == digest:
        problems = tuple(map(_finding_line, _errors(store, part))) if served else ()
    elif store.size(layout.manifest_path(part)) is not None:
        in_the_way = True
        path = layout.manifest_path(part)
        other = f"{path}: expected digest {digest}, as the part that replaces it says"
        problems = (manifest if isinstance(manifest, str) else other,)
    elif served and isinstance(manifest, str):
        problems = (manifest,)
    if not problems:
        return None
    by = others.replacing(part) if served else None
    lost = with_others(_lost_before(store, part, by, known), part, others) if by is not None else {}
    fate = PartFate(part, problems, "quarantined" if in_the_way else _REPLACED, by.part if by else None, lost=lost)
    return SalvagePlan(fate, set_aside=in_the_way, superseded=True)


def _lost_before(store: Store, part: str, by: PartManifest, known: tuple[Witness, OtherParts]) -> dict[str, str]:
    """Return id to reason of the samples that a repair lost which was stopped, so that no report has named them."""
    witness, others = known
    lost = {sample_id: by.holes[sample_id] for sample_id in witness.ids(part)[0] if sample_id in by.holes}
    manifest = others.manifests.get(part)
    try:
        index = load_index(store, manifest) if manifest is not None and lost else None
    except StorageError:
        raise
    except HsfmtError:
        index = None
    if index is None or manifest is None:
        return lost
    rows = {index.sample_id(row): row for row in range(index.n_samples)}
    wanted = {sample_id: fingerprint(index, rows[sample_id]) for sample_id in lost if sample_id in rows}
    for sample_id, _ in others.copies(manifest, wanted):
        del lost[sample_id]
    return lost


def plan_without_manifest(
    store: Store, part: str, header: Header, problem: str, witness: Witness, others: OtherParts
) -> SalvagePlan:
    """Plan for a part whose manifest is damaged or gone.

    Parameters
    ----------
    problem
        What is wrong with it.

    Raises
    ------
    StorageError, UsageError
        As `plan_part`.
    """
    raw = read_if_there(store, layout.manifest_path(part))
    committed = store.size(layout.manifest_path(part)) is not None
    ref = witness.ref(part)
    digest = ref.manifest_digest if ref else None
    problems: tuple[str, ...] = (problem,)
    source: tuple[PartManifest, PartIndex] | None = None
    kept: dict[str, Place] = {}
    lost: dict[str, str] = {}
    superseded: dict[str, str] = {}
    ids, n_unknown = witness.ids(part)
    try:
        source = proven_part(store, part, header, raw, ref)
    except StorageError:
        raise
    except HsfmtError as error:
        problems += (error_line(error),)
        lost = dict.fromkeys(ids, f"part {part}: its manifest is lost, and its index is not proven")
        if ref is None:
            n_unknown = claimed_samples(store, part)
    else:
        unreplaced = {name: others.manifests[name] for name in others.current(part)}
        named = {ref.name for ref in witness.current.parts} if witness.current is not None else set()
        superseded = superseded_by_lost(source, raw, witness, unreplaced, others.replacing_any(named))
        others = others.without(superseded)
        kept, lost, n_unknown = salvage_rows(store, header, *source, (witness, others))
    new = _new_name(part, (digest, kept, sorted(lost), superseded), kept, others) if ref or kept or superseded else None
    nbytes = 0
    if source is not None and kept:
        stored = sum(int(table[:, 1].sum()) for table in source[1].chunks.values())
        nbytes = stored * len(kept) // source[1].n_samples
    fate = PartFate(
        part,
        problems,
        "quarantined" if committed else _REPLACED,
        new_part=new,
        n_saved=len(kept),
        lost=with_others(lost, part, others),
        n_unknown=n_unknown,
        nbytes=nbytes,
    )
    return SalvagePlan(
        fate,
        source=source,
        places=tuple(kept.values()),
        holes=lost,
        # Of a manifest that no snapshot names the digest is unknown; set aside, it is not committed any more.
        replaces={**superseded, **({part: digest} if digest else {})},
        producer=_producer(part, digest, {}),
        set_aside=committed,
    )


def _new_name(part: str, contents: tuple[object, ...], kept: Mapping[str, Place], others: OtherParts) -> str:
    current = others.current(part)
    try:
        return derived_name(part, "r", *contents, others=current)
    except UsageError:
        rivals = set(others.holding(kept, current).values())
        return derived_name(part, "r", *contents, others=rivals)


def _errors(store: Store, part: str) -> list[Finding]:
    sizes = dict(store.walk(layout.part_folder(part)))
    index = layout.index_path(part)
    nbytes = store.size(index)
    if nbytes is not None:
        sizes[index] = nbytes
    errors = [
        item for item in check_part(PartTask(store, part, "full", sizes)).findings.items if item.severity == "error"
    ]
    for finding in errors:
        if finding.code == _UNREADABLE:
            remedy = "copy the dataset to a storage that works, then repair the copy"
            raise StorageError.at(finding.where, expected=finding.expected, got=finding.got, remedy=remedy)
    return errors


def _producer(part: str, digest: str | None, former: Mapping[str, object]) -> dict[str, object]:
    """Return the producer of a new part: the same in every attempt, so that all make the same bytes."""
    earlier = [*_list(former.get("repairs")), *([former["repair"]] if "repair" in former else [])]
    repairs = {"repairs": earlier} if earlier else {}
    return {**former, **repairs, "repair": {"library": f"hsfmt {__version__}", "manifest": digest, "part": part}}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _finding_line(finding: Finding) -> str:
    return f"{finding.where}: expected {finding.expected}, got {finding.got}"
