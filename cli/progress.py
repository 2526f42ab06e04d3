"""Progress: a bar on a terminal, plain lines at intervals in a log, nothing when it was not asked for."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

import click

from hsfmt.cli import units

_INTERVAL_SECONDS = 10.0


class Progress:
    """How far a command is. As a context manager; this one shows nothing.

    Parameters
    ----------
    label
        What is being done.
    total
        Bytes to do, 0 when that is not known.
    noun
        What is counted beside the bytes.
    """

    def __init__(self, label: str, total: int = 0, noun: str = "files") -> None:
        self.label = label
        self.total = total
        self.noun = noun

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Show the end."""

    def update(self, done: int, note: str = "") -> None:
        """Say how many bytes are done, and something about it."""


class LogProgress(Progress):
    """A plain line every ten seconds."""

    def __enter__(self) -> Self:
        self._started = self._shown = time.monotonic()
        return self

    def update(self, done: int, note: str = "") -> None:
        """Print a line if the last one is old."""
        now = time.monotonic()
        if now - self._shown < _INTERVAL_SECONDS:
            return
        self._shown = now
        rate = done / (now - self._started)
        share = f" ({100 * done / self.total:.1f} %)" if self.total else ""
        left = f", {units.seconds((self.total - done) / rate)} left" if self.total > done and rate else ""
        text = f"{self.label}: {units.nbytes(done)}{share}, {units.nbytes(rate)}/s{left}"
        click.echo(f"{text}; {note}" if note else text, err=True)


class BarProgress(Progress):
    """A bar on a terminal."""

    def __enter__(self) -> Self:
        from rich import progress
        from rich.console import Console
        from rich.table import Column

        def one_line(**options: Any) -> Column:
            return Column(no_wrap=True, overflow="ellipsis", **options)

        columns = (
            progress.TextColumn("{task.description}", table_column=one_line(max_width=22)),
            progress.BarColumn(bar_width=None, table_column=one_line(ratio=1)),
            progress.TaskProgressColumn(table_column=one_line()),
            progress.DownloadColumn(binary_units=True, table_column=one_line()),
            progress.TextColumn("{task.fields[rate]}", table_column=one_line()),
            progress.TimeRemainingColumn(compact=True, table_column=one_line()),
            progress.TextColumn("{task.fields[note]}", markup=False, table_column=one_line(max_width=16)),
        )
        self._bar: Any = progress.Progress(*columns, console=Console(stderr=True), transient=True, expand=True)
        self._bar.__enter__()
        self._task = self._bar.add_task(self.label, total=self.total or None, note="", rate="")
        self._started = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)

    def update(self, done: int, note: str = "") -> None:
        """Move the bar."""
        rate = f"{units.nbytes(done / max(time.monotonic() - self._started, 1e-3))}/s" if done else ""
        self._bar.update(self._task, completed=done, total=self.total or None, note=note, rate=rate)


def open_progress(label: str, total: int = 0, noun: str = "files", *, shown: bool) -> Progress:
    """Return the progress that suits stderr."""
    if not shown:
        return Progress(label, total, noun)
    return (BarProgress if sys.stderr.isatty() else LogProgress)(label, total, noun)
