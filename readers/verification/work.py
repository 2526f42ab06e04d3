"""The work on data: which units are due, in this process or in a pool, until all is done or the time is up."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from hsfmt import layout
from hsfmt.columns import STATES
from hsfmt.interruptions import interruptions_wait
from hsfmt.manifest import PartManifest
from hsfmt.readers.verification.complete import shard_entries
from hsfmt.readers.verification.full import SampleFaults, owned_shards
from hsfmt.readers.verification.parts import DataResult, DataTask, PartOutcome, check_data
from hsfmt.readers.verification.records import Records
from hsfmt.readers.verification.report import Counts, Coverage, Finding, Findings
from hsfmt.readers.verification.selection import Sample, Unit
from hsfmt.storage import Store
from hsfmt.worker_process import end_with_parent

_SAVE_SECONDS = 1.0
_POLL_SECONDS = 0.2
_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Limits:
    """What of the data a run is to read; see `verify`."""

    sample: Sample | None = None
    seed: int = 0
    seed_given: bool = True
    parts: tuple[str, ...] = ()
    max_duration: float | None = None
    max_age: float | None = None
    state: Path | None = None

    @property
    def recorded(self) -> bool:
        """Whether records of earlier runs count."""
        return self.max_duration is not None or self.max_age is not None

    def to_json(self) -> dict[str, Any]:
        """Return what was asked for, {} if everything."""
        asked: dict[str, Any] = {}
        if self.sample is not None:
            asked |= {"sample": self.sample.text, "seed": self.seed}
        if self.parts:
            asked["parts"] = list(self.parts)
        if self.max_duration is not None:
            asked["max_duration_s"] = self.max_duration
        if self.max_age is not None:
            asked["max_age_s"] = self.max_age
        return asked

    def key(self, level: str) -> str:
        """Return what a pass must have in common to be gone on with."""
        seed = self.seed if self.sample is not None and self.seed_given else None
        return f"{level} {self.sample.text if self.sample else ''} {seed} {','.join(self.parts)}"


def spread(
    run: Callable[[_T], _R], tasks: list[_T], workers: int, go_on: Callable[[], bool] = lambda: True
) -> Generator[tuple[_T, _R | None], None, None]:
    """Yield (task, result) as they end, None for a process that died; begin no more once `go_on` says no."""
    # Not fork: threads of the caller's libraries may hold locks that a forked child would wait for forever.
    context = multiprocessing.get_context("spawn")
    workers = min(workers, len(tasks))
    with (
        interruptions_wait() as interrupt,
        ProcessPoolExecutor(workers, context, initializer=end_with_parent) as pool,
    ):
        waiting: dict[Future[_R], _T] = {}
        left = iter(tasks)
        more = True
        try:
            while more or waiting:
                while more and len(waiting) < 2 * workers:
                    task = next(left, None) if go_on() else None
                    more = task is not None
                    if task is not None:
                        try:
                            waiting[pool.submit(run, task)] = task
                        except BrokenProcessPool:
                            yield task, None
                finished, _ = wait(waiting, _POLL_SECONDS, FIRST_COMPLETED) if waiting else (set(), set())
                interrupt()
                for future in finished:
                    task = waiting.pop(future)
                    try:
                        yield task, future.result()
                    except BrokenProcessPool:
                        yield task, None
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def died(findings: Findings, part: str) -> None:
    """Report a worker process that died over a part."""
    got = "a worker process that died; out of memory, perhaps: verify with fewer workers"
    findings.error("not_checked", layout.manifest_path(part), expected="the part verified", got=got)


@dataclass(slots=True)
class DataWork:
    """Reads the data of the parts whose documents were judged.

    Attributes
    ----------
    store, level, limits
        The dataset, the tier and what to read.
    outcomes
        Of the documents, by part.
    findings, counts
        Where findings and figures go.
    progress
        Called as (nbytes done, nbytes in all, part).
    """

    store: Store
    level: str
    limits: Limits
    outcomes: Mapping[str, PartOutcome]
    findings: Findings
    counts: Counts
    progress: Callable[[int, int, str], None]
    _skipped: dict[str, list[int]] = field(default_factory=dict)
    _known: int = 0
    _bindings: dict[Unit, dict[str, Any]] = field(default_factory=dict)
    _results: dict[Unit, DataResult | None] = field(default_factory=dict)

    def run(self, workers: int, started: float) -> Coverage:
        """Read what is due; `started` is the time.monotonic() from which max_duration counts."""
        units = self._units()
        records = None
        if self.limits.recorded and self.limits.state is not None:
            records = Records(self.limits.state, self.store, self.findings, self.limits.key(self.level))
            if self.limits.max_duration is not None and not self.limits.seed_given:
                # A pass over a sample that stopped goes on with the same one.
                self.limits = replace(self.limits, seed=records.seed_of_pass(self.limits.seed))
        limits = self.limits
        due = [unit for unit in units if not limits.parts or unit.part in limits.parts]
        self._skip("not among the parts asked for", set(units) - set(due))
        if limits.sample is not None:
            chosen = limits.sample.choose(due, limits.seed)
            left = set(due) - set(chosen)
            never = {unit for unit in left if limits.sample.is_too_large(unit, due)}
            self._skip("not in the sample", left - never)
            self._skip("in no sample of this size, being larger", never)
            due = chosen
        if records is not None:
            due = self._without_known(due, records)
        results = self._read(due, workers, started, records)
        self._merge(unit for unit in units if unit in results)
        self._skip_rest([unit for unit in due if unit not in results], records)
        return Coverage(
            limits.to_json(),
            sum(len(unit.paths) for unit in units),
            sum(unit.nbytes for unit in units),
            sum(len(unit.paths) for unit, result in results.items() if result is not None),
            sum(unit.nbytes for unit, result in results.items() if result is not None),
            self._skipped,
            self._known,
        )

    def _units(self) -> list[Unit]:
        units = []
        for part, outcome in self.outcomes.items():
            manifest = outcome.manifest
            if manifest is None or not manifest.columns:
                continue
            entries = {entry.path: entry for entry in shard_entries(manifest)}
            if self.level == "complete":
                units += [Unit(part, (path,), entry.nbytes, entry.digest) for path, entry in entries.items()]
                continue
            n_slices = manifest.columns[STATES].n_shards
            for number in range(n_slices):
                paths = tuple(
                    f"{layout.column_folder(part, name)}/{column.shard_key(shard)}"
                    for name, column in manifest.columns.items()
                    for shard in owned_shards(column, number, n_slices)
                )
                nbytes = sum(entries[path].nbytes for path in paths)
                units.append(Unit(part, paths, nbytes, manifest.digest(), number, n_slices))
        return units

    def _manifest(self, unit: Unit) -> PartManifest:
        manifest = self.outcomes[unit.part].manifest
        assert manifest is not None
        return manifest

    def _skip(self, reason: str, units: Collection[Unit]) -> None:
        if units:
            files, nbytes = self._skipped.get(reason, [0, 0])
            files += sum(len(unit.paths) for unit in units)
            self._skipped[reason] = [files, nbytes + sum(unit.nbytes for unit in units)]

    def _skip_rest(self, units: list[Unit], records: Records | None) -> None:
        """State what was not read any more; what an earlier run found wrong with it stays an error."""
        for unit in units:
            damage = records.damage(unit, self._bindings[unit]) if records is not None else []
            reason = "max-duration was over" + (", and found damaged by an earlier run" if damage else "")
            self._skip(reason, [unit])
            self.findings.items += [
                replace(item, got=f"{item.got} (by an earlier run, not read again by this one)") for item in damage
            ]

    def _without_known(self, due: list[Unit], records: Records) -> list[Unit]:
        left, now = [], time.time()
        for unit in due:
            self._bindings[unit] = records.binding(unit, self._manifest(unit).digest())
            missing = self.outcomes[unit.part].unusable & set(unit.paths)
            reason = "" if missing else records.holds(unit, self._bindings[unit], self.level, now, self.limits.max_age)
            if reason:
                self._skip(reason, [unit])
                self._known += unit.nbytes
            else:
                left.append(unit)
        records.settle(self._bindings[unit] for unit in left)
        # A short limit must get everywhere, and not stay with what it finds damaged again and again.
        return sorted(left, key=lambda unit: records.turn(unit, self._bindings[unit]))

    def _read(
        self, due: list[Unit], workers: int, started: float, records: Records | None
    ) -> dict[Unit, DataResult | None]:
        """Return what was read, None where a worker process died over it."""
        limit = self.limits.max_duration
        tasks = [self._task(unit) for unit in due]
        total, nbytes, saved = sum(unit.nbytes for unit in due), 0, time.monotonic()
        begun = False

        def go_on() -> bool:
            nonlocal begun
            first, begun = not begun, True  # one at least, or a short limit would never get anywhere
            return first or limit is None or time.monotonic() - started < limit

        in_pool = workers > 1 and len(tasks) > 1
        ended = self._in_pool(tasks, workers, go_on) if in_pool else self._here(tasks, total, go_on)
        results = self._results
        try:
            with closing(ended):
                for task, result in ended:
                    unit = task.unit
                    results[unit] = result
                    nbytes += unit.nbytes
                    self.progress(min(nbytes, total), total, unit.part)
                    if records is not None:
                        self._record(unit, result, records)
                        if time.monotonic() - saved >= _SAVE_SECONDS:
                            records.save()
                            saved = time.monotonic()
            if records is not None and all(records.in_pass(unit, self._bindings[unit]) for unit in due):
                records.end_pass()
        finally:
            if records is not None:
                records.save()
        return results

    def _record(self, unit: Unit, result: DataResult | None, records: Records) -> None:
        binding, now = self._bindings[unit], time.time()
        if result is None or not result.is_fine:
            judged = Findings()
            if result is not None:
                judged.items += [*result.findings.items, *result.elsewhere.items]
                result.faults.report(judged)
            else:
                died(judged, unit.part)
            records.add(unit, binding, "doubtful", now, judged.items)
        else:
            records.add(unit, binding, self.level, now)

    def _merge(self, units: Iterable[Unit]) -> None:
        """Put together what was found, in the order of the units: it does not depend on how the work was spread."""
        elsewhere: list[Finding] = []
        faults: dict[str, SampleFaults] = {}
        for unit in units:
            result = self._results[unit]
            if result is None:
                died(self.findings, unit.part)
                self._skip("a worker process died", [unit])
                continue
            new = [
                item for item in result.findings.items if item.code != "not_checked" or item not in self.findings.items
            ]
            self.findings.items += new
            self.counts.add(result.counts)
            elsewhere += result.elsewhere.items
            faults.setdefault(unit.part, SampleFaults()).extend(result.faults)
        known = {(item.severity, item.path) for item in self.findings.items}
        for item in elsewhere:
            if (item.severity, item.path) not in known:
                known.add((item.severity, item.path))
                self.findings.items.append(item)
        for each in faults.values():
            each.report(self.findings)

    def _task(self, unit: Unit) -> _Keyed:
        unusable = self.outcomes[unit.part].unusable
        paths = frozenset(unit.paths)
        task = DataTask(
            self.store, self._manifest(unit), self.level, paths, unusable, unit.number, max(1, unit.n_slices)
        )
        return _Keyed(unit, task)

    def _here(
        self, tasks: list[_Keyed], total: int, go_on: Callable[[], bool]
    ) -> Generator[tuple[_Keyed, DataResult | None], None, None]:
        done = 0

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            self.progress(min(done, total), total, task.unit.part)

        for task in tasks:
            if not go_on():
                return
            yield task, check_data(task.task, advance)

    def _in_pool(
        self, tasks: list[_Keyed], workers: int, go_on: Callable[[], bool]
    ) -> Generator[tuple[_Keyed, DataResult | None], None, None]:
        return spread(_checked, tasks, workers, go_on)


@dataclass(frozen=True, slots=True, eq=False)
class _Keyed:
    """A unit and the task of it, which may hold what can't be hashed."""

    unit: Unit
    task: DataTask


def _checked(task: _Keyed) -> DataResult:
    return check_data(task.task)
