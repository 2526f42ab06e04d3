"""The results as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from ratios import ratio_of, targets
from results import Results

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
CHECKS = ("<!-- checks: begin -->", "<!-- checks: end -->")


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], numeric_from: int = 1) -> str:
    """Return a table, columns from `numeric_from` on aligned right."""
    body = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in body) for i in range(len(header))]
    lines = [
        "| "
        + " | ".join(
            text.rjust(widths[i]) if i >= numeric_from else text.ljust(widths[i]) for i, text in enumerate(row)
        )
        + " |"
        for row in body
    ]
    rule = ["-" * (width + 1) + (":" if i >= numeric_from else "-") for i, width in enumerate(widths)]
    return "\n".join([lines[0], "|" + "|".join(rule) + "|", *lines[1:]])


def _figure(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def speeds(results: Results) -> str:
    """Return the main table: a row for each peer, also for those without figures."""
    columns = [
        (case.title + (f", {n} threads" if n > 1 else ""), name, n)
        for name, case in results.cases.items()
        for n in case.threads
    ]
    columns.insert(2, ("whole samples, cold", "cold", 1))
    header = [
        "GB/s",
        *[title for title, _, _ in columns],
        "CPU s/GB",
        "disk bytes/byte",
        "layer",
        "window",
        "first sample, s",
    ]
    rows = []
    for name in results.peers:
        if name in results.problems:
            rows.append([name, results.problems[name], *[""] * (len(header) - 2)])
            continue
        first = results.first.get(name)
        rows.append(
            [
                name,
                *[_figure(results.speed(name, case, n)) for _, case, n in columns],
                _figure(results.cpu(name, "samples")),
                *[_figure(results.bytes_read(name, case)) for case in ("samples", "layer", "window")],
                _figure(statistics.median(first) if first else None),
            ]
        )
    return markdown(header, rows)


def kinds(results: Results) -> str:
    """Return what each peer checks and hands out."""
    rows = [
        [
            name,
            peer.checks,
            peer.returns,
            "its own" if peer.own_threads else "one a sample",
            _stored(results, peer.files),
        ]
        for name, peer in results.peers.items()
    ]
    return markdown(["reader", "compares with digests", "hands out", "threads", "stored / raw"], rows, 4)


def _stored(results: Results, files: str) -> str:
    stored = results.stored.get(files)
    return "–" if stored is None else f"{stored / results.nbytes('samples'):.3f}"


def ratios(results: Results) -> str:
    """Return a line for each target."""
    return markdown(
        ["ratio", "target", "reached (rounds)", "by CPU seconds", ""], [target.line(results) for target in targets()]
    )


def checks(results: Results) -> str:
    """Return what comparing with digests costs: each codec with and without, in each case."""
    header = ["codec", "read", "threads", "checked, GB/s", "unchecked, GB/s", "checked / unchecked", "by CPU seconds"]
    rows = []
    for with_checks in results.peers:
        without = with_checks.replace("reused buffer", "reused, checks off")
        if with_checks == without or without not in results.peers:
            continue
        codec = with_checks.removeprefix("hsfmt ").partition(",")[0]
        for name, case, n in _measured(results):
            reached = ratio_of((without, n, name), (with_checks, n, name))(results, "seconds")
            cpu = ratio_of((without, n, name), (with_checks, n, name))(results, "cpu")
            if not reached or not cpu:
                continue
            speed = [_figure(results.speed(peer, name, n)) for peer in (with_checks, without)]
            spread = f"{statistics.median(reached):.2f} ({min(reached):.2f}–{max(reached):.2f})"
            rows.append([codec, case, str(n), *speed, spread, _figure(statistics.median(cpu))])
    facts = "\n".join(f"- {fact}" for fact in results.facts)
    return f"{facts}\n\n{markdown(header, rows, 2)}"


def _measured(results: Results) -> list[tuple[str, str, int]]:
    """Return (case, title, threads) of what each reader does warm, and of reading from the disk."""
    warm = [(name, case.title, n) for name, case in results.cases.items() for n in case.threads]
    return [*warm, ("cold", "whole samples, cold", 1)]


def document(results: Results) -> str:
    """Return everything that goes between the marks of the page."""
    parts = [
        "\n".join(f"- {fact}" for fact in results.facts),
        speeds(results),
        "### Ratios",
        ratios(results),
        "### The readers",
        kinds(results),
    ]
    return "\n\n".join(parts)


def write(page: Path, text: str, marks: tuple[str, str] = (BEGIN, END)) -> None:
    """Replace what is between the marks."""
    begin, end = marks
    before, rest = page.read_text().split(begin)
    _, after = rest.split(end)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")
