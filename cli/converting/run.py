"""A conversion: from a plan to committed parts and a seal. Puts sources and writers together."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

from hsfmt import layout
from hsfmt.catalog import find_dataset
from hsfmt.cli import units
from hsfmt.cli.converting.collisions import clash, compare_slice
from hsfmt.cli.converting.committed_copies import Copies, check_windows, find_copies
from hsfmt.cli.converting.deletion import Containers, delete_left_over, stamps
from hsfmt.cli.converting.dtype_survey import survey
from hsfmt.cli.converting.plan import Plan, committed_manifests
from hsfmt.cli.converting.report import Report, Written
from hsfmt.cli.converting.slices import convert_slice
from hsfmt.cli.converting.tally import Tally
from hsfmt.cli.converting.work import (
    committed_holes,
    comparison,
    conversion_task,
    cut_slices,
    n_workers,
    needed_room,
    total_nbytes,
)
from hsfmt.cli.estimate import Estimate, estimate
from hsfmt.cli.progress import open_progress
from hsfmt.cli.warning_log import collected_warnings
from hsfmt.cli.worker_pool import Work, run_slices
from hsfmt.columns import STATES
from hsfmt.errors import ExpectationError, HsfmtError, SourceError, StorageError
from hsfmt.header import Header
from hsfmt.idset import CommittedIds
from hsfmt.manifest import PartManifest
from hsfmt.sealing import seal
from hsfmt.storage import Store


def run(plan: Plan, *, show_progress: bool) -> Report:
    """Compare what is there from elsewhere, convert what is pending, seal. What goes wrong is in the report's `error`.

    Raises
    ------
    StorageError
        There is no room, and the user did not insist.
    """
    request, store = plan.request, plan.store
    report = _fresh_report(plan)
    assert report.estimate is not None
    try:
        if not request.force:
            needed_room(plan, report.estimate).check(store.url)
    except StorageError as error:
        if not request.dry_run:
            raise
        report.error = error
    if request.dry_run:
        return report
    started = time.monotonic()
    try:
        containers = Containers(plan.source, plan.listed) if request.delete_source else None
        _compare(plan, plan.copies, plan.compared, report, containers, shown=show_progress)
        # One after the other: a conflict that ends the run shows before anything is written.
        if report.tally.error is None:
            work = partial(convert_slice, conversion_task(plan, report.workers))
            _run(plan, plan.pending, "converting", work, report, containers, shown=show_progress)
        if report.tally.already:
            manifests = committed_manifests(plan.store, find_dataset(plan.store, plan.header))
            copies = find_copies(plan.store, manifests, plan.source, plan.origin, report.tally.already)
            check_windows(plan.source, request.reshaping.split_long, copies)
            numbers = copies.by_part(report.tally.already) if request.delete_source else copies.elsewhere()
            _compare(plan, copies, numbers, report, containers, shown=show_progress)
        paths, parts = plan.left_over
        if paths and report.tally.error is None:
            delete_left_over(plan.source, paths, parts, plan.store, plan.header, report.tally.removed)
        report.error = report.tally.error
    except (HsfmtError, OSError, KeyboardInterrupt) as error:
        report.error = error
    _settle(plan, report)
    report.seconds = time.monotonic() - started
    _warn(plan, report)
    if report.error is None:
        _finish(plan, report)
    return report


def _run(
    plan: Plan,
    numbers: list[int],
    label: str,
    work: Work[Tally],
    report: Report,
    containers: Containers | None,
    *,
    shown: bool,
) -> None:
    if not numbers:
        return
    workers, total = n_workers(plan, numbers), total_nbytes(plan, numbers)
    slices = cut_slices(plan, numbers, total, workers)
    with ExitStack() as stack:
        progress = stack.enter_context(open_progress(label, total, shown=shown))
        # The workers have to end before what they committed is counted, wherever an interruption strikes.
        tallies = run_slices(work, slices, workers, progress, plan.request.memory_nbytes)
        for tally in stack.enter_context(closing(tallies)):
            report.tally.add(tally)
            if containers is not None:
                containers.settle(tally.verified, report.tally.removed)


def _compare(
    plan: Plan, copies: Copies, numbers: list[int], report: Report, containers: Containers | None, *, shown: bool
) -> None:
    label = "comparing with samples that " + ("are committed" if containers else "came from another place")
    work = partial(compare_slice, comparison(plan, copies))
    _run(plan, numbers, label, work, report, containers, shown=shown)


def _committed(store: Store, header: Header | None) -> CommittedIds | None:
    if header is None:
        return None
    ids = CommittedIds(store, header)
    ids.refresh()
    return ids


def _fresh_report(plan: Plan) -> Report:
    workers = n_workers(plan, plan.pending)
    outcomes = ["skipped"] * len(plan.source.items)
    reasons = {}
    for number in plan.pending:
        # What listing the folder showed is known before anything is read.
        item = plan.source.items[number]
        known = item.problem if item.normal_hole or plan.request.on_bad == "hole" else None
        if known is not None:
            reasons[number] = f"expected {known.expected}, got {known.got}"
        outcomes[number] = "hole" if known else "failed" if item.problem else "sample"
    report = Report(
        source=plan.source,
        url=plan.store.url,
        header=plan.existing or plan.header,
        dry_run=plan.request.dry_run,
        outcomes=outcomes,
        reasons=reasons,
        estimate=_estimate(plan, workers),
        warnings=[*plan.source.notes, *plan.notes],
        workers=workers,
        workers_asked=plan.request.workers,
        deletes=plan.request.delete_source,
        deleted_before=plan.deleted_before,
        attachments=sorted(plan.attachments),
    )
    bad = [n for n in plan.pending if outcomes[n] == "failed"]
    if bad:
        first = plan.source.items[bad[0]].problem
        text = f"{units.counted(len(bad), 'file')} can't be taken, which listing them shows; the first: {first}"
        report.warnings.append(f"{text}. --on-bad hole records such files and goes on")
    elsewhere = plan.copies.elsewhere()
    if elsewhere:
        parts = {plan.copies.parts[n] for n in set(plan.copies.part[elsewhere].tolist())}
        places = sorted({str(plan.manifests[part].producer.get("source", "an unknown origin")) for part in parts})
        # Of the same place, too: its files changed, or the folder may be another one by now.
        origin = "which may be of other files" if places == [plan.origin.folder] else "from another place"
        text = f"{units.counted(len(elsewhere), 'id')} of this source are in the dataset already, {origin}"
        report.warnings.append(f"{text} ({', '.join(places[:3])}): the files are read and compared with them")
    if plan.meaning.model and plan.request.model and plan.meaning.model != plan.request.model:
        report.warnings.append(
            f"the source names the model {plan.meaning.model!r}; --model {plan.request.model!r} is kept"
        )
    return report


def _estimate(plan: Plan, workers: int) -> Estimate:
    meaning = replace(plan.meaning, dtype=plan.header.dtype)
    # Each worker fills parts of its own.
    share = max(1, total_nbytes(plan, plan.pending) // workers)
    part_nbytes = plan.request.part_size if workers == 1 else min(plan.request.part_size, share)
    return estimate(plan.source, plan.pending, meaning, plan.request.codec, plan.store, part_nbytes=part_nbytes)


def _settle(plan: Plan, report: Report) -> None:
    """Say of each item what became of it by what is committed now, not by what the slices believe."""
    tally = report.tally
    manifests = committed_manifests(plan.store, find_dataset(plan.store, plan.header))
    copies = find_copies(plan.store, manifests, plan.source, plan.origin, plan.pending)
    holes, same = committed_holes(manifests), set(tally.same)
    report.written = _written(plan, manifests)
    report.reasons.clear()
    for number in plan.pending:
        # Conversions that ran at once may both have written the id: readers get one of the two.
        if copies.own[number] and copies.clashing[number]:
            tally.conflicts[number] = clash(comparison(plan, copies), number)
    written = set(tally.written)
    for number in [*plan.pending, *plan.compared]:
        sample_id, outcome = plan.source.items[number].sample_id, "not_reached"
        if number in tally.conflicts or number == tally.failed:
            outcome = "failed"
        elif plan.copies.trusted[number]:
            outcome = "skipped"
        elif number in written and copies.own[number]:
            outcome = "sample"
        elif number in same:
            outcome = "skipped"
        elif copies.own[number]:
            outcome = "sample"
        elif number in tally.holes or (plan.copies.part[number] < 0 and copies.part[number] < 0 and sample_id in holes):
            # Another writer may have filled the hole meanwhile, of which this file knows nothing.
            outcome = "hole"
            report.reasons[number] = tally.holes.get(number) or holes[sample_id]
        report.outcomes[number] = outcome
    if report.deletes:
        _note_deleted(report)
    if report.error is None:
        counts = report.counts()
        assert (counts["not_reached"], counts["failed"]) == (0, len(tally.conflicts)), counts
        # Nobody takes a sample away.
        assert counts["sample"] + counts["failed"] >= len(tally.written), (counts, tally)
        if tally.conflicts:
            report.error = SourceError(tally.conflicts[n] for n in sorted(tally.conflicts))


def _note_deleted(report: Report) -> None:
    """Say which files are gone by looking: slices that were interrupted did not live to say it."""
    source, deleted = report.source, dict.fromkeys(report.tally.removed.deleted)
    for item, outcome in zip(source.items, report.outcomes, strict=True):
        if outcome in ("sample", "skipped"):
            paths = (*item.paths, *item.shared)
            deleted |= dict.fromkeys(path for path in paths if path not in stamps(source.root, paths))
    report.tally.removed.deleted = list(deleted)


def _written(plan: Plan, manifests: Mapping[str, PartManifest]) -> Written:
    """Return what this run committed. Slices that were interrupted did not live to say it; their parts do."""
    run = plan.origin.host, plan.started.isoformat(timespec="microseconds")
    written = Written()
    for part, manifest in manifests.items():
        if part in plan.manifests or (manifest.producer.get("host"), manifest.producer.get("started")) != run:
            continue
        written.parts += 1
        written.samples += manifest.counts.samples
        written.tokens += manifest.counts.tokens
        written.supervised_tokens += manifest.counts.supervised_tokens
        written.raw_nbytes += sum(c.n_rows * c.row_nbytes for name, c in manifest.columns.items() if name == STATES)
        written.stored_nbytes += sum(entry.nbytes for entry in manifest.files)
    return written


def _warn(plan: Plan, report: Report) -> None:
    tally = report.tally
    if tally.samples and not tally.masks:
        report.warnings.append("the source has no loss masks: every token counts as supervised")
    for n, what in ((tally.all_zero, "0 (no token is trained on)"), (tally.all_one, "1 (prompts are trained on too)")):
        if 2 * n > tally.masks:
            report.warnings.append(
                f"{n:,} of {units.counted(tally.masks, 'loss mask')} are all {what}: check the template"
            )
    if tally.all_zero:
        shown = ", ".join(tally.unsupervised[:5]) + (" …" if tally.all_zero > 5 else "")
        report.warnings.append(f"{units.counted(tally.all_zero, 'sample')} without a supervised token: {shown}")
    if tally.blank:
        shown = ", ".join(tally.blank_ids[:5]) + (" …" if tally.blank > 5 else "")
        text = "with states that are zero throughout, as a file that was never filled leaves them"
        report.warnings.append(f"{units.counted(tally.blank, 'sample')} {text}: {shown}")
    removed = tally.removed
    if removed.changed:
        text = f"{units.counted(len(removed.changed), 'file')} changed after they were read, and were kept"
        report.warnings.append(f"{text}: {', '.join(removed.changed[:5])}")
    # Of those that are not alike, the holes do not say how many there are of which kind.
    if tally.holes or (tally.failed is not None and isinstance(report.error, SourceError)):
        report.warnings += survey(report.source)
    holes = report.counts()["hole"]
    if holes:
        report.warnings.append(f"{units.counted(holes, 'hole')} recorded; a later run tries them again")
    if plan.attachments and not plan.request.seal:
        text = f"{', '.join(sorted(plan.attachments))}: kept by a seal: run this command again without --no-seal for it"
        report.warnings.append(text)


def _finish(plan: Plan, report: Report) -> None:
    """Seal, unless there is nothing to seal or the user wants it left."""
    committed = _committed(plan.store, find_dataset(plan.store, plan.header))
    if not committed:
        counts = report.counts()
        got = f"none: {counts['hole']:,} holes, {len(plan.source.strays):,} files not read"
        report.error = SourceError.at(str(plan.source.root), expected="at least one sample", got=got)
        return
    if plan.request.seal:
        try:
            with collected_warnings() as warnings:
                report.snapshot = seal(plan.store, expect=plan.request.expect, attachments=plan.attachments).snapshot
            report.warnings += warnings
        except HsfmtError as error:
            report.error = error
    elif plan.request.expect not in (None, len(committed)):
        report.error = ExpectationError.at(
            layout.MANIFESTS, expected=f"{plan.request.expect} samples", got=f"{len(committed)} committed"
        )
