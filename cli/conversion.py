"""A conversion: from a plan to committed parts and a seal. Puts sources and writers together."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import PurePath

from hsfmt import layout
from hsfmt.catalog import find_dataset
from hsfmt.cli import units
from hsfmt.cli.collisions import Comparison, Copies, clash, compare_slice, find_copies
from hsfmt.cli.conversion_plan import Plan, committed_manifests
from hsfmt.cli.conversion_report import Report, Written
from hsfmt.cli.estimate import estimate
from hsfmt.cli.progress import open_progress
from hsfmt.cli.slices import Task, convert_slice
from hsfmt.cli.warning_log import collected_warnings
from hsfmt.cli.worker_pool import Work, run_slices
from hsfmt.columns import STATES
from hsfmt.cores import n_cores
from hsfmt.errors import ExpectationError, HsfmtError, SourceError, StorageError
from hsfmt.header import Header
from hsfmt.idset import CommittedIds
from hsfmt.manifest import PartManifest
from hsfmt.sealing import seal
from hsfmt.storage import Store

# Below either a further worker takes longer to start than it saves.
_WORKER_ITEMS, _WORKER_NBYTES = 8, 64 << 20


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
            report.estimate.check(store.url)
    except StorageError as error:
        if not request.dry_run:
            raise
        report.error = error
    if request.dry_run:
        return report
    started = time.monotonic()
    try:
        _compare(plan, plan.copies, report, shown=show_progress)
        # One after the other: a conflict that ends the run shows before anything is written.
        if report.tally.error is None:
            task = _task(plan, report.workers)
            _run(plan, plan.pending, "converting", partial(convert_slice, task), report, shown=show_progress)
        if report.tally.already:
            manifests = committed_manifests(plan.store, find_dataset(plan.store, plan.header))
            copies = find_copies(plan.store, manifests, plan.source, plan.origin, report.tally.already)
            _compare(plan, copies, report, shown=show_progress)
        report.error = report.tally.error
    except (HsfmtError, OSError, KeyboardInterrupt) as error:
        report.error = error
    _settle(plan, report)
    report.seconds = time.monotonic() - started
    _warn(report)
    if report.error is None:
        _finish(plan, report)
    return report


def _run(plan: Plan, numbers: list[int], label: str, work: Work, report: Report, *, shown: bool) -> None:
    if not numbers:
        return
    workers, total = _workers(plan, numbers), _nbytes(plan, numbers)
    slices = _slices(plan, numbers, total, workers)
    with ExitStack() as stack:
        progress = stack.enter_context(open_progress(label, total, shown=shown))
        # The workers have to end before what they committed is counted, wherever an interruption strikes.
        for tally in stack.enter_context(closing(run_slices(work, slices, workers, progress))):
            report.tally.add(tally)


def _nbytes(plan: Plan, numbers: list[int]) -> int:
    return sum(plan.source.items[n].nbytes for n in numbers)


def _workers(plan: Plan, numbers: list[int]) -> int:
    """Return how many of the workers asked for are worth their start."""
    worthwhile = max(-(-len(numbers) // _WORKER_ITEMS), -(-_nbytes(plan, numbers) // _WORKER_NBYTES))
    return max(1, min(plan.request.workers, worthwhile, len(numbers)))


def _compare(plan: Plan, copies: Copies, report: Report, *, shown: bool) -> None:
    label = "comparing with samples that came from another place"
    _run(plan, copies.elsewhere(), label, partial(compare_slice, _comparison(plan, copies)), report, shown=shown)


def _comparison(plan: Plan, copies: Copies) -> Comparison:
    request = plan.request
    if request.id_prefix is None:
        name = PurePath(plan.origin.folder).name
        remedy = f"where folders have equal ids, give each its own: --id-prefix {name}/"
    else:
        remedy = f"give this folder another --id-prefix than {request.id_prefix!r}"
    remedy += "; a newer version of the same sample needs a dataset of its own"
    return Comparison(plan.source, plan.store.url, plan.existing or plan.header, copies, request.on_bad, remedy)


def _committed(store: Store, header: Header | None) -> CommittedIds | None:
    if header is None:
        return None
    ids = CommittedIds(store, header)
    ids.refresh()
    return ids


def _holes(manifests: Mapping[str, PartManifest]) -> dict[str, str]:
    return {key: reason for manifest in manifests.values() for key, reason in manifest.holes.items()}


def _fresh_report(plan: Plan) -> Report:
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
        estimate=estimate(plan.source, plan.pending, plan.meaning, plan.request.codec, plan.store),
        warnings=list(plan.source.notes),
        workers=_workers(plan, plan.pending),
        workers_asked=plan.request.workers,
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
        text = f"{units.counted(len(elsewhere), 'id')} of this source are in the dataset already, from another place"
        report.warnings.append(f"{text} ({', '.join(places[:3])}): the files are read and compared with them")
    if plan.meaning.model and plan.request.model and plan.meaning.model != plan.request.model:
        report.warnings.append(
            f"the source names the model {plan.meaning.model!r}; --model {plan.request.model!r} is kept"
        )
    return report


def _task(plan: Plan, workers: int) -> Task:
    request, header, meaning = plan.request, plan.header, plan.meaning
    nonfinite = request.nonfinite or request.on_bad
    producer = {
        **meaning.producer,
        "command": list(request.command),
        "host": plan.origin.host,
        "options": {
            **plan.origin.options,
            "id_prefix": request.id_prefix,
            "nonfinite": nonfinite,
            "on_bad": request.on_bad,
            "part_nbytes": request.part_nbytes,
            "workers": workers,
        },
        "source": plan.origin.folder,
        "source_files": sum(len(item.paths) for item in plan.source.items),
        "source_kind": plan.source.name,
        "source_nbytes": sum(item.nbytes for item in plan.source.items),
        "started": plan.started.isoformat(timespec="microseconds"),
    }
    if meaning.model:
        producer["source_model"] = meaning.model
    cores = n_cores()
    writer = {
        "layers": header.layers,
        "hidden_size": header.hidden_size,
        "final_norm": header.final_norm,
        "dtype": header.dtype,
        "model": header.model,
        "tokenizer": header.tokenizer,
        "scaling": header.scaling,
        "codec": request.codec,
        "part_nbytes": request.part_nbytes,
        "part_seconds": None,
        "producer": producer,
        "on_duplicate": "skip",
        "nonfinite": "keep" if nonfinite == "keep" else "raise",
        "seal": False,
        "threads": None if workers == 1 else max(1, min(8, cores // workers)),
    }
    return Task(plan.source, plan.store.url, header, writer, request.on_bad, nonfinite, _holes(plan.manifests))


def _slices(plan: Plan, numbers: list[int], total: int, workers: int) -> list[list[int]]:
    """Cut the items into runs of about equal bytes, no larger than a part, at least one a worker."""
    if workers == 1:
        return [numbers]
    target = min(plan.request.part_nbytes, max(1, -(-total // workers)))
    slices: list[list[int]] = [[]]
    filled = 0
    for number in numbers:
        nbytes = plan.source.items[number].nbytes
        if slices[-1] and filled + nbytes > target:
            slices.append([])
            filled = 0
        slices[-1].append(number)
        filled += nbytes
    return slices


def _settle(plan: Plan, report: Report) -> None:
    """Say of each item what became of it by what is committed now, not by what the slices believe."""
    tally = report.tally
    manifests = committed_manifests(plan.store, find_dataset(plan.store, plan.header))
    copies = find_copies(plan.store, manifests, plan.source, plan.origin, plan.pending)
    holes, same = _holes(manifests), set(tally.same)
    report.written = _written(plan, manifests)
    report.reasons.clear()
    for number in plan.pending:
        # Conversions that ran at once may both have written the id: readers get one of the two.
        if copies.own[number] and copies.clashing[number]:
            tally.conflicts[number] = clash(_comparison(plan, copies), number)
    for number in [*plan.pending, *plan.copies.elsewhere()]:
        sample_id, outcome = plan.source.items[number].sample_id, "not_reached"
        if number in tally.conflicts or number == tally.failed:
            outcome = "failed"
        elif number in same:
            outcome = "skipped"
        elif copies.own[number]:
            outcome = "sample"
        elif number in tally.holes or (plan.copies.part[number] < 0 and copies.part[number] < 0 and sample_id in holes):
            # Another writer may have filled the hole meanwhile, of which this file knows nothing.
            outcome = "hole"
            report.reasons[number] = tally.holes.get(number) or holes[sample_id]
        report.outcomes[number] = outcome
    if report.error is None:
        counts = report.counts()
        assert (counts["not_reached"], counts["failed"]) == (0, len(tally.conflicts)), counts
        # Nobody takes a sample away.
        assert counts["sample"] + counts["failed"] >= tally.samples, (counts, tally)
        if tally.conflicts:
            report.error = SourceError(tally.conflicts[n] for n in sorted(tally.conflicts))


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


def _warn(report: Report) -> None:
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
    holes = report.counts()["hole"]
    if holes:
        report.warnings.append(f"{units.counted(holes, 'hole')} recorded; a later run tries them again")


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
                report.snapshot = seal(plan.store, expect=plan.request.expect).snapshot
            report.warnings += warnings
        except HsfmtError as error:
            report.error = error
    elif plan.request.expect not in (None, len(committed)):
        report.error = ExpectationError.at(
            layout.MANIFESTS, expected=f"{plan.request.expect} samples", got=f"{len(committed)} committed"
        )
