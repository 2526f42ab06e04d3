"""`push` and `pull`: make another place hold the same dataset, by copying what it lacks.

Spec: rules TRN-2 to TRN-4. Part by part: data, folders, manifest; then the snapshot's files; the pointer at
the very end. Whatever kills it, the destination is the dataset that it was before, with some more parts, and the next
run goes on from there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal

from hsfmt import layout
from hsfmt.catalog import ensure_dataset, read_pointer
from hsfmt.errors import CorruptionError, StorageError, UsageError
from hsfmt.header import check_same_header
from hsfmt.maintenance.hub_limits import check_hub_limits
from hsfmt.maintenance.part_copies import FILE_NBYTES, IN_FLIGHT_NBYTES, Copied, Copies
from hsfmt.maintenance.transfer_plan import TransferPlan, plan_transfer
from hsfmt.maintenance.transfer_report import TransferReport
from hsfmt.manifest import FileEntry, PartManifest
from hsfmt.storage import Store, open_store

Progress = Callable[[int, int, str], None]
_RESERVE_NBYTES = 64 << 20
_MAX_CONNECTIONS = 64


def transfer(  # noqa: PLR0913  each is an option of the commands
    source: str | os.PathLike[str] | Store,
    destination: str | os.PathLike[str] | Store,
    *,
    snapshot: str | None = None,
    verify: Literal["quick", "full"] = "quick",
    connections: int = 4,
    dry_run: bool = False,
    progress: Progress | None = None,
    source_options: Mapping[str, Any] | None = None,
    destination_options: Mapping[str, Any] | None = None,
) -> TransferReport:
    """Make `destination` hold the dataset that a snapshot of `source` is; it may be new, or hold some of it already.

    Parameters
    ----------
    source, destination
        Folders or URLs. The source may be a web server; it is only read, and nothing of it is listed unless the
        destination holds parts that the source no longer counts.
    snapshot
        The fingerprint of a stored snapshot; None is the one that the source's pointer names.
    verify
        Each file's digest is compared while it is copied, and its size after that, in both cases. "full" also reads
        back from the destination, what was there before too, and compares the digests once more. Files that the
        server of both copied by itself were compared by nobody unless it is "full".
    connections
        Files at a time. Each takes up to 40 MiB of memory, and what is on its way 64 MiB together.
    dry_run
        Only say what would be copied.
    progress
        Called as (bytes done, bytes in all, part).
    source_options, destination_options
        For fsspec URLs.

    Raises
    ------
    HeaderMismatchError
        The destination means something else; each member that differs is named.
    UsageError
        The destination has samples, retractions or attachments that the source lacks, is the source, or has no space
        for it; or a setting out of range.
    NotFoundError
        The source is no sealed dataset, or has no such snapshot.
    CorruptionError
        The source is damaged: what is committed by then in the destination is sound.
    StorageError
        A storage failed, or the destination was sealed by another process meanwhile. Run it again.
    """
    _check_settings(verify, connections)
    origin = source if isinstance(source, Store) else open_store(source, source_options)
    target = destination if isinstance(destination, Store) else open_store(destination, destination_options)
    plan = plan_transfer(origin, target, snapshot, connections)
    warnings = check_hub_limits(target.url, plan.paths())
    _check_space(target, plan.missing_nbytes)
    run = _Transfer(origin, target, plan, progress or (lambda *_: None))
    changed = plan.before != plan.snapshot.fingerprint
    if not dry_run:
        run.copy(connections, read_back=verify == "full")
        changed = run.point()
    missing = {manifest.part: plan.missing(manifest) for manifest in plan.parts}
    return TransferReport(
        source=origin.url,
        destination=target.url,
        fingerprint=plan.snapshot.fingerprint,
        content_digest=plan.snapshot.content_digest,
        counts=dict(plan.snapshot.counts),
        parts=tuple(manifest.part for manifest in plan.parts if manifest.part not in plan.present),
        present=tuple(manifest.part for manifest in plan.parts if manifest.part in plan.present),
        restored=tuple(sorted(part for part in plan.present if missing[part])),
        files=sum(map(len, missing.values())) + len(plan.missing_documents),
        missing_nbytes=plan.missing_nbytes,
        present_nbytes=plan.nbytes - plan.missing_nbytes,
        copied_nbytes=run.copied.copied,
        server_copied_nbytes=run.copied.by_server,
        read_back_nbytes=run.copied.read_back,
        rewritten=run.copied.again,
        changed=changed,
        warnings=tuple(warnings),
        most_memory_nbytes=connections * FILE_NBYTES + IN_FLIGHT_NBYTES,
        dry_run=dry_run,
    )


def _check_settings(verify: str, connections: int) -> None:
    if verify not in {"quick", "full"}:
        raise UsageError.at("verify", expected="quick or full", got=repr(verify)[:60])
    if not 1 <= connections <= _MAX_CONNECTIONS:
        raise UsageError.at("connections", expected=f"1 to {_MAX_CONNECTIONS}", got=str(connections))


def _check_space(destination: Store, nbytes: int) -> None:
    free = destination.free_nbytes()
    if free is not None and nbytes and free < nbytes + _RESERVE_NBYTES:
        expected = f"{nbytes + _RESERVE_NBYTES} bytes of free space"
        raise UsageError.at(destination.url, expected=expected, got=str(free), remedy="free space")


class _Transfer:
    def __init__(self, source: Store, destination: Store, plan: TransferPlan, progress: Progress) -> None:
        self._source = source
        self._destination = destination
        self._plan = plan
        self._progress = progress
        self._total = plan.missing_nbytes
        self._done = 0
        self._part = ""
        self.copied = Copied()

    def copy(self, connections: int, *, read_back: bool) -> None:
        """Commit the parts one after another, the files of the next ones being copied meanwhile."""
        plan, store = self._plan, self._destination
        joined = ensure_dataset(store, plan.header)
        check_same_header(joined, plan.header, self._source.url)  # somebody may have been faster
        with Copies(self._source, store, connections=connections, read_back=read_back, advance=self._advance) as copies:
            self.copied = copies.done
            started = [
                (manifest, self._start(copies, manifest.files, plan.missing(manifest), read_back=read_back))
                for manifest in plan.parts
            ]
            for manifest, futures in started:
                self._part = manifest.part
                copies.wait(futures)
                self._commit(manifest)
            for entry in plan.documents:
                missing = [entry] if entry in plan.missing_documents else []
                copies.wait(self._start(copies, [entry], missing, read_back=read_back))
        store.sync(sorted({entry.path.rpartition("/")[0] for entry in plan.documents}))

    def point(self) -> bool:
        """Replace the pointer; return whether it named another snapshot before."""
        plan, store = self._plan, self._destination
        now = read_pointer(store)
        found = now.fingerprint if now else None
        if found == plan.snapshot.fingerprint:
            return False
        if found != plan.before:
            expected, got = f"a pointer to {plan.before or 'no snapshot'}, as at the beginning", f"one to {found}"
            remedy = "another process sealed it meanwhile; all parts are there: run it again"
            raise StorageError.at(f"{store.url}: {layout.POINTER}", expected=expected, got=got, remedy=remedy)
        store.replace(layout.POINTER, plan.pointer.to_bytes())
        store.sync(["hsfmt"])
        return True

    @staticmethod
    def _start(
        copies: Copies,
        files: Iterable[FileEntry],
        missing: Sequence[FileEntry],
        *,
        read_back: bool,
    ) -> list[Future[None]]:
        paths = {entry.path for entry in missing}
        there = [entry for entry in files if entry.path not in paths] if read_back else []
        return copies.start(missing) + copies.start_checks(there)

    def _commit(self, manifest: PartManifest) -> None:
        """Commit one part: its files are there (rules WRITE-3 to WRITE-5)."""
        store, path, data = self._destination, layout.manifest_path(manifest.part), manifest.to_bytes()
        if manifest.part in self._plan.present and not self._plan.missing(manifest):
            return
        store.sync(sorted({entry.path.rpartition("/")[0] for entry in manifest.files}))
        _check_sizes(store, manifest)
        if not store.create(path, data) and store.read(path, len(data) + 1) != data:
            raise UsageError.at(path, expected="a part name that is free", got="another part, committed meanwhile")
        store.sync([layout.MANIFESTS])

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress(min(self._done, self._total), self._total, self._part)


def _check_sizes(store: Store, manifest: PartManifest) -> None:
    """Compare what the destination lists of a part with its manifest."""
    sizes = dict(store.walk(layout.part_folder(manifest.part)))

    def stored(entry: FileEntry) -> int | None:
        return sizes[entry.path] if entry.path in sizes else store.size(entry.path)

    for entry in manifest.files:
        nbytes = stored(entry)
        if nbytes != entry.nbytes:
            where = f"{store.url}: {entry.path}"
            got = "nothing" if nbytes is None else f"{nbytes} bytes"
            remedy = "another process removed or replaced it: run again"
            raise CorruptionError.at(where, expected=f"{entry.nbytes} bytes, just copied", got=got, remedy=remedy)
