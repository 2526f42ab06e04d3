"""`repair`: what can be proven stays, in new parts; what can't is set aside and reported.

Spec: rules MAN-8, WRITE-1, WRITE-10, SEAL-8. Each step leaves a dataset that can be repaired again: documents first,
then new parts, whose names follow from what they hold, then quarantine, and the pointer last.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hsfmt import layout
from hsfmt.catalog import committed_parts, load_index
from hsfmt.errors import CorruptionError, FormatError, HsfmtError, NotFoundError, StorageError, UsageError
from hsfmt.header import MAX_HEADER_NBYTES, Header
from hsfmt.maintenance.repair_report import DocumentFate, RepairReport
from hsfmt.maintenance.repair_snapshots import (
    plan_snapshots,
    readable_snapshots,
    retracted_in,
    was_sealed,
    witness_of,
)
from hsfmt.maintenance.salvage import (
    SalvagePlan,
    plan_part,
    plan_superseded,
    plan_without_manifest,
    usable_manifest,
)
from hsfmt.maintenance.salvage_copies import OtherParts
from hsfmt.maintenance.salvage_evidence import Witness, check_not_newer, read_if_there
from hsfmt.manifest import PartManifest, parse_manifest
from hsfmt.sealing import seal
from hsfmt.snapshot import Snapshot
from hsfmt.snapshot_builder import LoadedPart
from hsfmt.storage import Store, open_store
from hsfmt.zarr_metadata import group_document, parse_root, root_document

Progress = Callable[[int, int, str], None]
_RETRACT_THEN = "retract them then (hsfmt retract URL ID)"
_SHOWN = 10


def repair(
    url: str | os.PathLike[str] | Store,
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> RepairReport:
    """Repair a dataset as far as its digests prove what it was.

    Parameters
    ----------
    url
        The dataset.
    dry_run
        Only say what is broken, what would become of it, and how many bytes that takes.
    progress
        Called as (parts done, parts in all, part).
    storage_options
        For fsspec URLs.

    Returns
    -------
    RepairReport
        Every part and document that was broken, and the samples that are lost.

    Raises
    ------
    NotFoundError
        There is nothing of a dataset.
    CorruptionError
        What the data means can't be told: the documents disagree.
    FormatVersionError
        It needs a newer library.
    UsageError
        Not enough space for the new parts.
    StorageError
        The storage fails, which is never taken for damage.
    """
    store = url if isinstance(url, Store) else open_store(url, storage_options)
    if not {layout.ROOT_METADATA, "hsfmt", "parts"} & set(store.list("")):
        raise NotFoundError.at(store.url, expected="an hsfmt dataset", got="nothing of one")
    return _Repair(store, progress or (lambda *_: None)).run(dry_run=dry_run)


class _Repair:
    def __init__(self, store: Store, progress: Progress) -> None:
        self._store = store
        self._progress = progress
        self._witness: Witness = witness_of(store)
        self._documents: list[DocumentFate] = []
        self._writes: dict[str, bytes] = {}

    def run(self, *, dry_run: bool) -> RepairReport:
        store = self._store
        header = self._header()
        manifests = {part: usable_manifest(store, part, header, self._witness) for part in committed_parts(store)}
        plans = self._plan_parts(header, manifests)
        snapshots = plan_snapshots(store, header, self._loaded(manifests))
        self._documents += snapshots.fates
        must_seal = snapshots.must_seal or self._is_stale(manifests) or any(plan.fate.new_part for plan in plans)
        warnings = (*snapshots.warnings, *self._forgotten(plans), *self._lost_holes(plans, manifests))
        fingerprint = None
        if not dry_run:
            self._check_space(plans)
            for path, data in self._writes.items():
                store.write(path, data)
            # What is set aside may have replaced what another plan writes anew.
            for plan in sorted(plans, key=lambda plan: not plan.set_aside):
                plan.carry_out(store, header, self._others)
            sealed_before = was_sealed(store)
            snapshots.carry_out(store)
            if must_seal and sealed_before and committed_parts(store):
                fingerprint = seal(store, drop_attachments=snapshots.dropped).snapshot.fingerprint
            else:
                pointer = readable_snapshots(store)[0]
                fingerprint = pointer.fingerprint if pointer else None
        return RepairReport(
            url=store.url,
            dry_run=dry_run,
            parts=tuple(plan.fate for plan in plans),
            documents=tuple(self._documents),
            warnings=warnings,
            snapshot=fingerprint,
        )

    def _header(self) -> Header:
        """Return what the data means, and plan to write the root document again if it is not the one of all others."""
        store = self._store
        path = layout.ROOT_METADATA
        root: Header | None = None
        problem = ""
        try:
            root = parse_root(store.read(path, MAX_HEADER_NBYTES), path)
        except (CorruptionError, FormatError, NotFoundError) as error:
            problem = str(error.problems[0])
        others = self._headers()
        digests = {header.digest() for header in others}
        if root is not None and (not others or root.digest() in digests):
            header = root
        elif len(digests) == 1:
            header = others[0]
            problem = problem or f"{path}: expected header {header.digest()}, as all other documents have, got another"
            self._documents.append(DocumentFate(path, problem, "restored"))
            self._writes[path] = root_document(header)
        else:
            got = f"{problem or 'another header than theirs'}; {len(digests)} different ones elsewhere"
            remedy = f"restore {path} from a copy"
            raise CorruptionError.at(path, expected="one header in all documents", got=got, remedy=remedy)
        if read_if_there(store, layout.PARTS_METADATA) != group_document():
            problem = f"{layout.PARTS_METADATA}: expected the document of a Zarr group, got another or none"
            self._documents.append(DocumentFate(layout.PARTS_METADATA, problem, "restored"))
            self._writes[layout.PARTS_METADATA] = group_document()
        return header

    def _headers(self) -> list[Header]:
        """Return the headers of all documents that carry a digest of their own."""
        found = [snapshot.header for snapshot in self._witness.snapshots]
        pointer = readable_snapshots(self._store)[0]
        if pointer is not None:
            found.append(pointer.header)
        for part in committed_parts(self._store):
            path = layout.manifest_path(part)
            data = read_if_there(self._store, path)
            try:
                found.append(parse_manifest(data, part, path).header)
            except (CorruptionError, FormatError) as error:
                check_not_newer(data, path, error)
        return found

    def _plan_parts(self, header: Header, manifests: Mapping[str, PartManifest | str]) -> list[SalvagePlan]:
        store = self._store
        sound = {part: each for part, each in manifests.items() if isinstance(each, PartManifest)}
        replaced = {name: digest for manifest in sound.values() for name, digest in manifest.replaces.items()}
        nothing = "expected the manifest that a snapshot names, got nothing"
        lost = {part: f"{layout.manifest_path(part)}: {nothing}" for part in sorted(self._named_parts())}
        lost |= {part: each for part, each in manifests.items() if isinstance(each, str)}
        lost = {part: problem for part, problem in lost.items() if part not in sound}
        n_all = len(sound) + len(lost)
        self._others = OtherParts(store, header, sound, replaced)
        plans: list[SalvagePlan | None] = []
        for done, (part, problem) in enumerate(lost.items()):
            self._progress(done, n_all, part)
            if part in replaced:
                known = self._witness, self._others
                plans.append(plan_superseded(store, part, problem, replaced[part], known))
            else:
                plans.append(plan_without_manifest(store, part, header, problem, self._witness, self._others))
        # What the lost ones had replaced is not to be served, or repaired, again.
        replaced |= {name: digest for plan in plans if plan for name, digest in plan.replaces.items()}
        self._others = self._others.without(replaced)
        for done, (part, manifest) in enumerate(sound.items(), len(lost)):
            self._progress(done, n_all, part)
            if part in replaced:
                known = self._witness, self._others
                plans.append(plan_superseded(store, part, manifest, replaced[part], known))
            else:
                plans.append(plan_part(store, part, header, manifest, self._witness, self._others))
        return sorted((plan for plan in plans if plan is not None), key=lambda plan: plan.fate.part)

    def _named_parts(self) -> set[str]:
        """Return the parts that must be there: those of the current snapshot; without one, of all."""
        snapshots = self._witness.snapshots
        pointer = readable_snapshots(self._store)[0]
        if pointer is not None and snapshots and snapshots[0].fingerprint == pointer.fingerprint:
            snapshots = snapshots[:1]
        return {ref.name for snapshot in snapshots for ref in snapshot.parts}

    def _loaded(self, manifests: Mapping[str, PartManifest | str]) -> dict[str, LoadedPart]:
        loaded = {}
        for part, manifest in manifests.items():
            if isinstance(manifest, str):
                continue
            try:
                loaded[part] = LoadedPart(manifest, load_index(self._store, manifest) if manifest.columns else None)
            except StorageError:
                raise
            except HsfmtError:
                continue
        return loaded

    def _is_stale(self, manifests: Mapping[str, PartManifest | str]) -> bool:
        """Say whether a repair that was stopped left a part that the current snapshot does not know."""
        pointer = readable_snapshots(self._store)[0]
        known = [manifest for manifest in manifests.values() if isinstance(manifest, PartManifest)]
        replaced = {name for manifest in known for name in manifest.replaces}
        repaired = {each.part for each in known if "repair" in each.producer and each.part not in replaced}
        current = [each for each in self._witness.snapshots if pointer and each.fingerprint == pointer.fingerprint]
        return any(not repaired <= {ref.name for ref in each.parts} for each in current)

    def _forgotten(self, plans: list[SalvagePlan]) -> list[str]:
        """Warn of retracted samples whose ids went with their part's index: a producer may make them again."""
        snapshot = self._witness.current
        if snapshot is None:
            return []
        unknown = {plan.fate.part for plan in plans if plan.fate.n_unknown}
        counts = np.bincount(snapshot.retracted_part, minlength=len(snapshot.parts)).tolist()
        forgotten = [
            f"part {ref.name} is lost with the ids of {n} retracted sample(s), which producers may make again: "
            f"{_RETRACT_THEN}"
            for ref, n in zip(snapshot.parts, counts, strict=True)
            if n and ref.name in unknown
        ]
        lost = {sample_id for plan in plans for sample_id in plan.fate.lost}
        named = sorted(retracted_in(self._store, snapshot) & lost) if lost else []
        if named:
            shown = ", ".join(named[:_SHOWN]) + (", …" if len(named) > _SHOWN else "")
            forgotten.append(
                f"{len(named)} of the lost samples were retracted, and stay so if they are made again: {shown}"
            )
        return forgotten

    def _lost_holes(self, plans: list[SalvagePlan], manifests: Mapping[str, PartManifest | str]) -> list[str]:
        """Warn of holes that went with their manifest: nothing else has their ids and reasons."""
        sound = {part for part, manifest in manifests.items() if isinstance(manifest, PartManifest)}
        lost = sorted({plan.fate.part for plan in plans if not plan.superseded} - sound)
        if not lost:
            return []
        snapshot = self._witness.current
        named = {ref.name for ref in snapshot.parts} if snapshot is not None else set()
        n = self._n_lost_holes(snapshot, manifests) if snapshot is not None and named.issuperset(lost) else None
        if n == 0:
            return []
        holes = "the holes of" if n is None else f"{n} hole(s) of"
        what = "if it had any, with their reasons" if n is None else "with their reasons"
        shown = ", ".join(lost[:_SHOWN]) + (", …" if len(lost) > _SHOWN else "")
        return [f"{holes} part {shown} went with the manifest, {what}: producers try these samples again"]

    def _n_lost_holes(self, snapshot: Snapshot, manifests: Mapping[str, PartManifest | str]) -> int | None:
        """Return how many holes of a snapshot no manifest has any more, None if that can't be told."""
        served = self._witness.all_ids(snapshot)
        if served is None:
            return None
        named = [manifests.get(ref.name) for ref in snapshot.parts]
        known = {key for each in named if isinstance(each, PartManifest) for key in each.holes}
        known -= {served[i] for i in range(len(served))} | retracted_in(self._store, snapshot)
        return max(0, snapshot.counts["holes"] - len(known))

    def _check_space(self, plans: list[SalvagePlan]) -> None:
        free = self._store.free_nbytes()
        needed = sum(plan.fate.nbytes for plan in plans)
        if free is not None and needed > free:
            remedy = "make room first: nothing was changed"
            raise UsageError.at(self._store.url, expected=f"{needed} bytes for new parts", got=f"{free}", remedy=remedy)
