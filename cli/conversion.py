"""A conversion: from a foreign folder to committed parts and a seal. Puts sources and writers together."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hsfmt import layout
from hsfmt.catalog import committed_parts, find_dataset, load_manifest
from hsfmt.cli import units
from hsfmt.cli.conversion_report import Report
from hsfmt.cli.estimate import estimate
from hsfmt.cli.progress import open_progress
from hsfmt.cli.slices import Task, run_slices
from hsfmt.errors import ExpectationError, HsfmtError, SourceError, StorageError, UsageError
from hsfmt.header import Header, make_header
from hsfmt.idset import CommittedIds
from hsfmt.manifest import PartManifest
from hsfmt.readers.sources import (
    Source,
    SourceMeaning,
    SourceOptions,
    find_source,
    settle_final_norm,
    settle_layers,
)
from hsfmt.sealing import seal
from hsfmt.storage import Store, open_store

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for; the names are those of the command's options.

    Attributes
    ----------
    src, dst
        Folder of the source, and the dataset.
    from_
        Name of the source format, or None to find it.
    options
        What the source needs to know.
    """

    src: str
    dst: str
    from_: str | None = None
    options: SourceOptions = field(default_factory=SourceOptions)
    final_norm: str | None = None
    model: str | None = None
    tokenizer: str | None = None
    codec: str = "zstd"
    part_nbytes: int = 32 * GIB
    workers: int = 1
    resume: bool = True
    dry_run: bool = False
    force: bool = False
    on_bad: str = "raise"
    nonfinite: str | None = None
    seal: bool = True
    expect: int | None = None
    command: Sequence[str] = ()


@dataclass(slots=True)
class Plan:
    """A conversion about to run: what is where, and which items are to be read."""

    request: Request
    source: Source
    meaning: SourceMeaning
    store: Store
    header: Header
    existing: Header | None
    pending: list[int]
    manifests: Mapping[str, PartManifest]


def plan(request: Request) -> Plan:
    """Look at source and destination; writes nothing.

    Raises
    ------
    UsageError, NotFoundError, SourceError
        The source is not understood, or the user has to say more.
    HeaderMismatchError
        The dataset exists and means something else.
    """
    store = open_store(request.dst)
    _check_apart(request.src, store)
    source = find_source(request.src, request.from_, options=request.options)
    meaning = source.meaning()
    header = make_header(
        layers=settle_layers(meaning, request.options.layer_ids),
        hidden_size=meaning.hidden_size,
        final_norm=settle_final_norm(meaning, request.final_norm),
        dtype=meaning.dtype,
        model=request.model or meaning.model,
        tokenizer=request.tokenizer,
        scaling=meaning.scaling,
    )
    existing = find_dataset(store, header)
    if existing is not None and not request.resume and committed_parts(store):
        raise UsageError.at(
            store.url,
            expected="an empty dataset, as --no-resume asks",
            got=units.counted(len(committed_parts(store)), "committed part"),
            remedy="leave --no-resume out to add what is missing, or choose another destination",
        )
    committed = _committed(store, existing)
    pending = [n for n, item in enumerate(source.items) if committed is None or item.sample_id not in committed]
    return Plan(request, source, meaning, store, header, existing, pending, _manifests(store, existing))


def run(plan: Plan, *, show_progress: bool) -> Report:
    """Convert what is pending and seal. What goes wrong on the way is in the report's `error`.

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
    total = sum(plan.source.items[n].nbytes for n in plan.pending)
    try:
        with open_progress("converting", total, shown=show_progress) as progress:
            for tally in run_slices(_task(plan), _slices(plan, total), request.workers, progress):
                report.tally.add(tally)
        report.error = report.tally.error
    except (HsfmtError, OSError, KeyboardInterrupt) as error:
        report.error = error
    _settle(plan, report)
    report.seconds = time.monotonic() - started
    _warn(report)
    if report.error is None:
        _finish(plan, report)
    return report


def _check_apart(src: str, store: Store) -> None:
    """Refuse a file, and a dataset within its source or around it: each would see the other's files as its own."""
    if not store.is_local:
        return
    source, dataset = Path(src).resolve(), Path(store.url).resolve()
    if dataset.exists() and not dataset.is_dir():
        raise UsageError.at(store.url, expected="a folder, or a name for one", got="a file")
    if source.is_relative_to(dataset) or dataset.is_relative_to(source):
        raise UsageError.at(store.url, expected="a folder apart from the source", got=f"{store.url} beside {src}")


def _committed(store: Store, header: Header | None) -> CommittedIds | None:
    if header is None:
        return None
    ids = CommittedIds(store, header)
    ids.refresh()
    return ids


def _manifests(store: Store, header: Header | None) -> dict[str, PartManifest]:
    return {part: load_manifest(store, part, header) for part in committed_parts(store)} if header else {}


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
    )
    bad = [n for n in plan.pending if outcomes[n] == "failed"]
    if bad:
        first = plan.source.items[bad[0]].problem
        text = f"{units.counted(len(bad), 'file')} can't be taken, which listing them shows; the first: {first}"
        report.warnings.append(f"{text}. --on-bad hole records such files and goes on")
    there = len(outcomes) - len(plan.pending)
    sources = {manifest.producer.get("source") for manifest in plan.manifests.values()}
    if there and _source_path(plan) not in sources:
        text = f"{units.counted(there, 'id')} of this source are in the dataset already, written from another place"
        report.warnings.append(
            f"{text} ({', '.join(sorted(map(str, sources))[:3])}): if those are other samples, "
            "convert the folder that holds both, or into a dataset of its own"
        )
    if plan.meaning.model and plan.request.model and plan.meaning.model != plan.request.model:
        report.warnings.append(
            f"the source names the model {plan.meaning.model!r}; --model {plan.request.model!r} is kept"
        )
    return report


def _task(plan: Plan) -> Task:
    request, header, meaning = plan.request, plan.header, plan.meaning
    producer = {
        **meaning.producer,
        "command": list(request.command),
        "options": {"on_bad": request.on_bad, "part_nbytes": request.part_nbytes, "workers": request.workers},
        "source": _source_path(plan),
        "source_files": sum(len(item.paths) for item in plan.source.items),
        "source_kind": plan.source.name,
        "source_nbytes": sum(item.nbytes for item in plan.source.items),
    }
    if meaning.model:
        producer["source_model"] = meaning.model
    nonfinite = request.nonfinite or request.on_bad
    cores = os.cpu_count() or 1
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
        "threads": None if request.workers == 1 else max(1, min(8, cores // request.workers)),
    }
    return Task(plan.source, plan.store.url, writer, request.on_bad, nonfinite, _holes(plan.manifests))


def _source_path(plan: Plan) -> str:
    return str(Path(plan.request.src).resolve())


def _slices(plan: Plan, total: int) -> list[list[int]]:
    """Cut the pending items into runs of about equal bytes, no larger than a part, at least one a worker."""
    if not plan.pending:
        return []
    if plan.request.workers == 1:
        return [plan.pending]
    target = min(plan.request.part_nbytes, max(1, -(-total // plan.request.workers)))
    slices: list[list[int]] = [[]]
    filled = 0
    for number in plan.pending:
        nbytes = plan.source.items[number].nbytes
        if slices[-1] and filled + nbytes > target:
            slices.append([])
            filled = 0
        slices[-1].append(number)
        filled += nbytes
    return slices


def _settle(plan: Plan, report: Report) -> None:
    """Say of each item what became of it by what is committed now, not by what the slices believe."""
    header = find_dataset(plan.store, plan.header)
    committed = _committed(plan.store, header)
    manifests = _manifests(plan.store, header)
    holes = _holes(manifests)
    fresh = [manifest for part, manifest in manifests.items() if part not in plan.manifests]
    report.n_parts, report.stored_nbytes = len(fresh), sum(entry.nbytes for part in fresh for entry in part.files)
    report.reasons.clear()
    for number in plan.pending:
        item = plan.source.items[number]
        outcome = "not_reached"
        if number == report.tally.failed:
            outcome = "failed"
        elif committed is not None and item.sample_id in committed:
            outcome = "sample"
        elif item.sample_id in holes:
            outcome = "hole"
            report.reasons[number] = report.tally.holes.get(number, holes[item.sample_id])
        report.outcomes[number] = outcome
    if report.error is None:
        counts, tally = report.counts(), report.tally
        assert (counts["not_reached"], counts["failed"]) == (0, 0), counts
        # Another writer may have filled a hole of ours meanwhile, but nobody takes a sample away.
        assert counts["sample"] >= tally.samples + tally.already, (counts, tally)


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
            report.snapshot = seal(plan.store, expect=plan.request.expect).snapshot
        except HsfmtError as error:
            report.error = error
    elif plan.request.expect not in (None, len(committed)):
        report.error = ExpectationError.at(
            layout.MANIFESTS, expected=f"{plan.request.expect} samples", got=f"{len(committed)} committed"
        )
