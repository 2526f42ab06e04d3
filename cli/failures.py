"""What an error means on the command line: an exit code, lines on stderr, and a JSON document."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import click

from hsfmt.cli.termination import Terminated
from hsfmt.errors import HsfmtError, Problem

USAGE, STORAGE, INTERNAL, INTERRUPTED, BROKEN_PIPE, TERMINATED = 2, 3, 70, 130, 141, 143
_SHOWN = 20
_OPTIONAL = {"torch": "hsfmt[torch]", "pyarrow": "hsfmt[convert]", "safetensors": "hsfmt[convert]"}
_TRACEBACK = "HSFMT_TRACEBACK"


def exit_code(error: BaseException) -> int:
    """Return the exit code of an error: 1 data, 2 usage, 3 storage, 70 a bug of ours, 130 or 143 interrupted."""
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return TERMINATED if _is_terminated(error) else INTERRUPTED
    if isinstance(error, HsfmtError | click.ClickException):
        return error.exit_code if isinstance(error, HsfmtError) else USAGE
    if isinstance(error, OSError):
        return STORAGE
    return USAGE if _missing_package(error) else INTERNAL


def problems(error: BaseException) -> tuple[Problem, ...]:
    """Return what an error says, as problems."""
    if isinstance(error, HsfmtError):
        return error.problems
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return (Problem("hsfmt", "to run to its end", "SIGTERM" if _is_terminated(error) else "an interruption"),)
    if isinstance(error, click.ClickException):
        return (Problem("command line", "arguments as --help describes them", error.format_message()),)
    if isinstance(error, OSError):
        where = str(error.filename) if error.filename else "storage"
        return (Problem(where, "the storage to work", error.strerror or str(error) or type(error).__name__),)
    package = _missing_package(error)
    if package:
        return (Problem(package, "the package", "none here", f"pip install '{_OPTIONAL[package]}'"),)
    remedy = f"this is a bug: please report it with the output under {_TRACEBACK}=1"
    return (Problem("hsfmt", "no internal error", f"{type(error).__name__}: {error}", remedy),)


def show(error: BaseException) -> None:
    """Print an error on stderr, one problem a line; with HSFMT_TRACEBACK=1 the traceback before.

    Problems that differ only in where they are share a line: --json is what lists them all.
    """
    if os.environ.get(_TRACEBACK) == "1":
        click.echo("".join(traceback.format_exception(error)), err=True)
    if isinstance(error, click.ClickException):
        error.show()
    elif isinstance(error, click.Abort | KeyboardInterrupt):
        click.echo("terminated (SIGTERM)" if _is_terminated(error) else "interrupted", err=True)
    else:
        for line in _lines(error.shown() if isinstance(error, HsfmtError) else problems(error)):
            click.echo(f"error: {one_line(line)}", err=True)


def _lines(found: Iterable[Problem]) -> list[str]:
    alike: dict[tuple[str, str, str], list[Problem]] = {}
    for problem in found:
        alike.setdefault((problem.expected, problem.got, problem.remedy), []).append(problem)
    lines = []
    for first, *others in list(alike.values())[:_SHOWN]:
        more = f" (and {len(others):,} more like it; --json lists all)" if others else ""
        lines.append(f"{replace(first, remedy='')}{more}" + (f" — {first.remedy}" if first.remedy else ""))
    rest = sum(map(len, list(alike.values())[_SHOWN:]))
    return [*lines, f"and {rest:,} more problems; --json lists all"] if rest else lines


def json_problems(error: BaseException) -> list[dict[str, Any]]:
    """Return an error's problems as JSON objects."""
    return [asdict(problem) for problem in problems(error)]


def as_json(error: BaseException) -> str:
    """Return the JSON document of a command that got nowhere."""
    return dumps({"error": json_problems(error), "exit_code": exit_code(error)})


def dumps(document: Any) -> str:
    """Return a JSON document for stdout; all but ASCII is escaped, so that it can always be printed."""
    return json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False)


def one_line(text: str) -> str:
    """Return text without line breaks and control characters, so that no file or sample name breaks the output."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _is_terminated(error: BaseException) -> bool:
    # click raises its Abort from what interrupted it.
    return isinstance(error, Terminated) or isinstance(error.__cause__, Terminated)


def _missing_package(error: BaseException) -> str | None:
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return name if name in _OPTIONAL else None
