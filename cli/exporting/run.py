"""An export: from a plan to whole files and a journal of them. Puts readers and targets together."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

from hsfmt.cli import units
from hsfmt.cli.exporting.journal import FileRecord, JournalWriter
from hsfmt.cli.exporting.plan import Plan
from hsfmt.cli.exporting.report import ExportReport
from hsfmt.cli.exporting.units import Task, export_slice, failure
from hsfmt.cli.progress import open_progress
from hsfmt.cli.worker_pool import run_slices
from hsfmt.cores import n_cores
from hsfmt.errors import HsfmtError, StorageError

# Below either a further worker takes longer to start than it saves.
_WORKER_SAMPLES, _WORKER_NBYTES = 8, 64 << 20
# What is written between two notes in the journal: what a kill has to be done again.
_SLICE_UNITS, _SLICE_NBYTES = 64, 128 << 20


def run(plan: Plan, *, show_progress: bool) -> ExportReport:
    """Write what is pending, then what goes with the whole. What goes wrong is in the report's `error`.

    Raises
    ------
    StorageError
        There is no room, and the user did not insist.
    """
    report = _fresh_report(plan)
    request = plan.request
    if not report.fits and not request.force:
        error = StorageError.at(
            plan.place.name,
            expected=f"room for about {units.nbytes(report.estimated_nbytes)}",
            got=f"{units.nbytes(report.free_nbytes or 0)} free",
            remedy="free space, choose another destination, or pass --force to start anyway",
        )
        if not request.dry_run:
            raise error
        report.error = error
    if request.dry_run:
        return report
    started = time.monotonic()
    try:
        with closing(plan.place), plan.place.open_journal() as journal:
            _write(plan, journal, report, shown=show_progress)
    except KeyboardInterrupt as error:
        report.error = error
    except (HsfmtError, OSError) as error:
        report.error = failure(error, plan.place.name)
    report.seconds = time.monotonic() - started
    if report.error is not None:
        _settle(plan, report)
    return report


def _settle(plan: Plan, report: ExportReport) -> None:
    """Say what was written by what the journal has: an interruption may have struck between it and the report."""
    entries = plan.place.entries()
    if entries.job == plan.job:
        for n in plan.pending:
            if plan.units[n].key in entries.done:
                report.written[n] = tuple(entries.done[plan.units[n].key])


def _fresh_report(plan: Plan) -> ExportReport:
    n_tokens = plan.target.job.n_tokens
    left = sum(int(n_tokens[number]) for n in plan.pending for number in plan.units[n].numbers)
    report = ExportReport(plan, warnings=list(plan.notes))
    report.estimated_nbytes = plan.target.estimated_nbytes() * left // max(1, int(n_tokens.sum()))
    report.free_nbytes = plan.place.free_nbytes()
    if plan.destination.redone:
        text = f"{units.counted(plan.destination.redone, 'unit')} of an earlier run had lost or changed files"
        report.warnings.append(f"{text}: written again")
    return report


def _write(plan: Plan, journal: JournalWriter, report: ExportReport, *, shown: bool) -> None:
    # Another export may have come to its end before this one had the lock.
    plan.look_again()
    destination, target = plan.destination, plan.target
    if destination.is_new:
        journal.begin(plan.job)
    plan.place.prepare()
    pending = plan.pending
    if pending:
        _write_units(plan, pending, journal, report, shown=shown)
    if report.error is not None:
        return
    counts = report.counts()
    assert counts["not_reached"] == 0, counts
    if destination.finished is not None and not pending:
        report.final, report.finished_before = tuple(destination.finished), True
        return
    paths = target.finish()
    assert set(paths) <= set(target.final_paths()), f"{target.name} did not announce {paths}"
    report.final = plan.place.settle(paths)
    journal.finish(report.final)


def _write_units(plan: Plan, pending: list[int], journal: JournalWriter, report: ExportReport, *, shown: bool) -> None:
    n_samples = sum(len(plan.units[n].numbers) for n in pending)
    task = Task(
        target=plan.target,
        units=plan.units,
        reader=plan.reader,
        numbers=plan.numbers,
        mask_given=plan.mask_given,
        layers=plan.layers,
        change=plan.change,
        place=plan.place,
    )
    sizes = {n: sum(map(task.sample_nbytes, plan.units[n].numbers)) for n in pending}
    total = sum(sizes.values())
    worthwhile = max(-(-n_samples // _WORKER_SAMPLES), -(-total // _WORKER_NBYTES))
    report.workers = workers = max(1, min(plan.request.workers, worthwhile, len(pending)))
    if not plan.request.force:
        plan.place.check_passing(workers * max(sizes.values()))
    if workers > 1 and plan.change.norm is not None:
        task = replace(task, torch_threads=max(1, n_cores() // workers))
    work, slices = partial(export_slice, task), _slices(sizes, workers)
    with ExitStack() as stack:
        progress = stack.enter_context(open_progress("exporting", total, "samples", shown=shown))
        # The workers have to end before the report is made, wherever an interruption strikes.
        for tally in stack.enter_context(closing(run_slices(work, slices, workers, progress))):
            done: dict[str, tuple[FileRecord, ...]] = {plan.units[n].key: files for n, files in tally.done.items()}
            if done:
                journal.add(done)
            report.written |= tally.done
            report.loss.add(tally.loss)
            report.error = report.error or tally.error


def _slices(sizes: dict[int, int], workers: int) -> list[list[int]]:
    """Cut units into runs that are noted in the journal together, several a worker."""
    target = min(_SLICE_NBYTES, max(1, -(-sum(sizes.values()) // (4 * workers))))
    most = min(_SLICE_UNITS, max(1, -(-len(sizes) // (4 * workers))))
    slices: list[list[int]] = []
    filled = 0
    for number, nbytes in sizes.items():
        if not slices or len(slices[-1]) == most or filled + nbytes > target:
            slices.append([])
            filled = 0
        slices[-1].append(number)
        filled += nbytes
    return slices
