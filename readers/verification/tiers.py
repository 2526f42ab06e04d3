"""The three tiers put together: listing, parts in this process or in a pool, the snapshot, one report.

Spec: rules VFY-1 to VFY-6, VFY-14.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from hsfmt import layout
from hsfmt.digests import ALGORITHM
from hsfmt.errors import HsfmtError, NotFoundError, UsageError
from hsfmt.header import Header
from hsfmt.pointer import Pointer
from hsfmt.readers.verification.attachments import check_attachments
from hsfmt.readers.verification.complete import check_unexpected
from hsfmt.readers.verification.documents import (
    LoadedSnapshot,
    check_headers,
    check_pointer,
    load_header,
    load_pointer,
    load_snapshot,
)
from hsfmt.readers.verification.duplicates import check_conflicts
from hsfmt.readers.verification.parts import PartOutcome, PartTask, check_part
from hsfmt.readers.verification.records import default_state
from hsfmt.readers.verification.report import Counts, Coverage, Findings, Report
from hsfmt.readers.verification.selection import Sample
from hsfmt.readers.verification.snapshots import SnapshotCheck
from hsfmt.readers.verification.work import DataWork, Limits, died, spread
from hsfmt.storage import Store, open_store

LEVELS = ("quick", "complete", "full")
Level = Literal["quick", "complete", "full"]
Progress = Callable[[int, int, str], None]
_FIXED = frozenset({layout.ROOT_METADATA, layout.PARTS_METADATA, layout.POINTER})
_SNAPSHOT_FILE = re.compile(rf"{layout.SNAPSHOTS}/([0-9a-f]{{32}})/(index|ids)\.safetensors")


def verify(  # noqa: PLR0913 -- all but the dataset by keyword
    url: str | os.PathLike[str] | Store,
    *,
    level: Level = "quick",
    workers: int = 1,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
    sample: str | None = None,
    seed: int | None = None,
    parts: Collection[str] = (),
    max_duration: timedelta | None = None,
    max_age: timedelta | None = None,
    state: str | os.PathLike[str] | None = None,
) -> Report:
    """Verify a dataset: everything that is wrong with it, in one report.

    Parameters
    ----------
    url
        The dataset.
    level
        "quick": documents, part indexes, counts and sizes. "complete": also every file's digest, and nothing missing or
        unexpected.
        "full": also every chunk decoded, every sample's digest, and states that are NaN, Inf or all zero.
    workers
        Processes; files, at tier full slices of parts, are spread over them.
    progress
        Called as (nbytes done, nbytes in all, what is being read).
    storage_options
        For fsspec URLs.
    sample
        "5%" or "5G": files of at most that much data, one at least; "3/10": the third of ten subsets that together
        hold every file once, as long as no part is added. At tier full slices of parts instead of files, with the
        digests of their samples.
    seed
        Of the choice; by default another one each time for a share, 0 for a subset. Below 2^64.
    parts
        Read the data of these parts only.
    max_duration
        Begin no more files (tier full: slices of parts) after this time; the next run with this option goes on from
        there.
    max_age
        Do not read again what was found to be fine within this time.
    state
        File of this machine that keeps what was verified, for the two options before; by default one a dataset in
        the user's cache folder.

    Returns
    -------
    Report
        All problems; `report.ok` says whether none is an error.

    Raises
    ------
    NotFoundError
        There is nothing of a dataset at `url`.
    AccessError
        Nobody is let in, or the server is gone, at the start or later: so nothing is said of what is stored.
    StorageError
        The storage can't even be listed.
    UsageError
        No such level, sample or part; or several workers for a dataset in memory.
    """
    if level not in LEVELS or workers < 1:
        raise UsageError.at(
            "level", expected=f"one of {', '.join(LEVELS)}, by 1 worker or more", got=f"{level}, {workers}"
        )
    store = url if isinstance(url, Store) else open_store(url, storage_options)
    if workers > 1 and any(step.startswith("memory://") for step in store.url.split("::")):
        expected, remedy = "1 for a dataset in this process's memory", "other processes have a memory of their own"
        raise UsageError.at("workers", expected=expected, got=f"{workers}", remedy=remedy)
    if level == "quick" and (sample is not None or max_duration is not None or max_age is not None):
        raise UsageError.at("level", expected="complete or full, to read a share of the data", got="quick")
    chosen = Sample.parse(sample) if sample is not None else None
    # Subsets n/t of different runs must fit together; shares of different runs had better differ.
    drawn = seed is None and chosen is not None and not chosen.subset
    seed = secrets.randbits(32) if drawn else seed or 0
    file = Path(state) if state is not None else default_state(store.url)
    limits = Limits(chosen, seed, not drawn, tuple(sorted(set(parts))), _seconds(max_duration), _seconds(max_age), file)
    return _Verification(store, level, progress or (lambda *_: None), limits).run(workers)


def _seconds(limit: timedelta | None) -> float | None:
    return None if limit is None else limit.total_seconds()


class _Verification:
    def __init__(self, store: Store, level: Level, progress: Progress, limits: Limits) -> None:
        self._limits = limits
        self._coverage: Coverage | None = None
        self._store = store
        self._level = level
        self._progress = progress
        self._findings = Findings()
        self._counts = Counts()
        self._named = set(_FIXED)
        self._listing: dict[str, int] = {}

    def run(self, workers: int) -> Report:
        started = time.monotonic()
        store, findings = self._store, self._findings
        if not {layout.ROOT_METADATA, "hsfmt", "parts"} & set(store.list("")):
            remedy = "check the path; `hsfmt convert SRC DST` or DatasetWriter makes a dataset"
            raise NotFoundError.at(store.url, expected="an hsfmt dataset", got="nothing of one", remedy=remedy)
        header = load_header(store, findings)
        pointer = load_pointer(store, findings)
        current = load_snapshot(store, findings, pointer.fingerprint) if pointer else None
        # In this order: whatever the snapshot names was committed before it, and a manifest comes last of its part's
        # files, so that neither listing can miss what the one before it names.
        committed = self._committed()
        self._list_all(set(committed))
        self._counts.files += len(self._listing.keys() & _FIXED)
        unknown = sorted(set(self._limits.parts) - set(committed))
        if unknown:
            raise UsageError.at("part", expected="committed parts", got=", ".join(unknown))
        outcomes = self._check_parts(committed, workers, started)
        self._settle_superseded(pointer, current, outcomes)
        self._report_quarantine()
        for outcome in outcomes.values():
            findings.items += outcome.findings.items
            self._counts.add(outcome.counts)
        if pointer and current:
            check_pointer(findings, pointer, current)
        self._check_headers(header, pointer, current, outcomes)
        self._check_replaced(outcomes)
        self._check_snapshots(pointer, current, outcomes)
        if current:
            self._check_newer(current, outcomes)
        if self._level != "quick":
            check_unexpected(store, findings, self._listing, self._named, set(committed))
        fingerprint = pointer.fingerprint if pointer else None
        return Report(store.url, self._level, fingerprint, findings.ordered(), self._counts, self._coverage)

    def _committed(self) -> list[str]:
        names = self._store.list(layout.MANIFESTS)
        parts = sorted(part for part in map(layout.part_of_manifest, names) if part is not None)
        self._named |= {layout.manifest_path(part) for part in parts}
        return parts

    def _list_all(self, committed: set[str]) -> None:
        """List every object; what can't be listed is a finding, and looked for by name where something names it."""
        try:
            self._listing.update(self._store.walk(""))
        except HsfmtError as error:
            self._findings.raised(error, error.problems[0].where)
        # Parts committed since are left to the next verification.
        prefix = f"{layout.MANIFESTS}/"
        late = {
            path: layout.part_of_manifest(path.removeprefix(prefix))
            for path in self._listing
            if path.startswith(prefix)
        }
        late = {path: part for path, part in late.items() if part is not None and part not in committed}
        parts = set(late.values())
        for path in [path for path in self._listing if path in late or layout.part_of_path(path) in parts]:
            del self._listing[path]

    def _check_parts(self, parts: list[str], workers: int, started: float) -> dict[str, PartOutcome]:
        sizes: dict[str, dict[str, int]] = {part: {} for part in parts}
        for path, nbytes in self._listing.items():
            part = layout.part_of_path(path)
            if part in sizes:
                sizes[part][path] = nbytes
        chosen = self._limits.parts or parts
        tasks = [PartTask(self._store, part, "documents" if part in chosen else "quick", sizes[part]) for part in parts]
        outcomes = {}
        in_pool = workers > 1 and len(tasks) > 1
        judged = spread(check_part, tasks, workers) if in_pool else ((task, check_part(task)) for task in tasks)
        with closing(judged):
            for task, result in judged:
                outcome = result or PartOutcome(task.part, Findings(), Counts(parts=1))
                if result is None:
                    died(outcome.findings, task.part)
                outcomes[outcome.part] = outcome
                if outcome.manifest is not None:
                    self._named |= {entry.path for entry in outcome.manifest.files}
                else:
                    # Which of its files belong to it can't be known: none is called unexpected.
                    self._named |= sizes[outcome.part].keys()
        outcomes = {part: outcomes[part] for part in parts}
        if self._level != "quick":
            data = DataWork(self._store, self._level, self._limits, outcomes, Findings(), self._counts, self._progress)
            self._coverage = data.run(workers, started)
            for item in data.findings.items:
                part = layout.part_of_path(item.path) or layout.part_of_manifest(item.path.rpartition("/")[2])
                (outcomes[part].findings if part in outcomes else self._findings).items.append(item)
        elif self._limits.parts:
            self._coverage = Coverage(self._limits.to_json(), 0, 0, 0, 0, {}, 0)
        return outcomes

    def _check_headers(
        self,
        root: Header | None,
        pointer: Pointer | None,
        current: LoadedSnapshot | None,
        outcomes: dict[str, PartOutcome],
    ) -> None:
        others = {layout.POINTER: pointer.header} if pointer else {}
        if current:
            others[current.path] = current.snapshot.header
        for part, outcome in outcomes.items():
            if outcome.manifest is not None:
                others[layout.manifest_path(part)] = outcome.manifest.header
        check_headers(self._findings, root, others, sealed=pointer is not None)

    def _settle_superseded(
        self, pointer: Pointer | None, current: LoadedSnapshot | None, outcomes: dict[str, PartOutcome]
    ) -> None:
        """Make warnings of what is wrong with parts that another one replaces, once nothing is served from them."""
        if pointer and current is None:
            return  # what is served can't be known
        served = {ref.name for ref in current.snapshot.parts} if current else set()
        for outcome in outcomes.values():
            for name, digest in outcome.manifest.replaces.items() if outcome.manifest else ():
                other = outcomes.get(name)
                # A name alone proves nothing: the part must be the very one that was replaced.
                if name in served or other is None or other.manifest is None or other.manifest.digest() != digest:
                    continue
                other.findings.about_superseded()
                where, got = layout.manifest_path(name), f"one that part {outcome.part} replaces"
                self._findings.add("info", "superseded", where, expected="a part that is served", got=got)

    def _report_quarantine(self) -> None:
        aside = [path for path in self._listing if path.startswith(f"{layout.QUARANTINE}/")]
        self._named |= set(aside)
        for path in aside:
            part = layout.part_of_manifest(path.removeprefix(f"{layout.QUARANTINE}/"))
            left = [name for name in self._listing if part is not None and layout.part_of_path(name) == part]
            self._named |= set(left)
            nbytes = sum(self._listing[name] for name in (path, *left))
            got = f"a manifest and {len(left)} other files, {nbytes} bytes, that a repair set aside"
            self._findings.add("info", "quarantined", path, expected="nothing set aside", got=got)

    def _check_replaced(self, outcomes: dict[str, PartOutcome]) -> None:
        for outcome in outcomes.values():
            for name, digest in outcome.manifest.replaces.items() if outcome.manifest else ():
                other = outcomes.get(name)
                if other is not None and other.manifest is not None and other.manifest.digest() != digest:
                    expected = f"digest {digest}, as part {outcome.part} replaces it"
                    where = layout.manifest_path(name)
                    self._findings.error("replaces", where, expected=expected, got=other.manifest.digest())

    def _check_snapshots(
        self, pointer: Pointer | None, current: LoadedSnapshot | None, outcomes: dict[str, PartOutcome]
    ) -> None:
        """Check the current snapshot; above tier quick also every other one that is kept."""
        fingerprint = pointer.fingerprint if pointer else None
        if fingerprint:
            self._named |= {layout.snapshot_path(fingerprint, file) for file in ("ids", "index")}
        if current:
            self._check_snapshot(current, outcomes)
            check_conflicts(self._store, self._findings, current)
        if self._level == "quick":
            return
        for kept, files in sorted(_snapshot_files(self._listing).items()):
            self._named |= set(files.values())
            if kept == fingerprint:
                continue
            if "index" not in files:
                expected, got = "an index beside it", "none"
                self._findings.add("warning", "incomplete_snapshot", files["ids"], expected=expected, got=got)
                continue
            own = Findings()
            loaded = load_snapshot(self._store, own, kept)
            own.about_old_snapshot()
            self._findings.items += own.items
            if loaded:
                self._check_snapshot(loaded, outcomes, old=pointer is not None)

    def _check_snapshot(self, loaded: LoadedSnapshot, outcomes: dict[str, PartOutcome], *, old: bool = False) -> None:
        self._counts.files += len(loaded.paths)
        self._named |= set(loaded.paths)
        attached = Findings()
        check_attachments(self._store, attached, loaded.attachments, deep=self._level != "quick")
        if old:
            attached.about_superseded()
        self._findings.items += attached.items
        SnapshotCheck(self._store, self._findings, loaded, outcomes, old=old).check()
        if not old:
            # What is left of a part whose manifest is lost: not to be removed, the manifest may be restored.
            lost = {ref.name for ref in loaded.snapshot.parts} - outcomes.keys()
            self._named |= {path for path in self._listing if layout.part_of_path(path) in lost}

    def _check_newer(self, current: LoadedSnapshot, outcomes: dict[str, PartOutcome]) -> None:
        manifests = [outcome.manifest for outcome in outcomes.values() if outcome.manifest is not None]
        old = {ref.name for ref in current.snapshot.parts}
        old |= {name for manifest in manifests for name in manifest.replaces}
        newer = [manifest for manifest in manifests if manifest.part not in old]
        if newer:
            n_samples = sum(manifest.counts.samples for manifest in newer)
            names = ", ".join(manifest.part for manifest in newer[:3])
            got = f"{len(newer)} newer parts with {n_samples} samples ({names}{', …' if len(newer) > 3 else ''})"
            self._findings.add("info", "newer_parts", layout.POINTER, expected="all committed parts sealed", got=got)


def _snapshot_files(listing: Collection[str]) -> dict[str, dict[str, str]]:
    """Return fingerprint to {"index" or "ids": path} of every snapshot of which there is a file."""
    snapshots: dict[str, dict[str, str]] = {}
    for path in listing:
        if match := _SNAPSHOT_FILE.fullmatch(path):
            snapshots.setdefault(f"{ALGORITHM}:{match[1]}", {})[match[2]] = path
    return snapshots
