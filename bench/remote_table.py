"""The results of the remote bench as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from remote_results import Results, cpu, ratios, speed
from table import markdown

MARKS = ("<!-- bench remote: begin -->", "<!-- bench remote: end -->")
MARKS_UNLIMITED = ("<!-- bench remote unlimited: begin -->", "<!-- bench remote unlimited: end -->")
_LIMIT = "raw GETs, {}, of the {} ranges"


def _spread(values: Sequence[float]) -> str:
    """Return the median and the range."""
    median = f"{statistics.median(values):.2f}"
    return f"{median} ({min(values):.2f}–{max(values):.2f})" if len(values) > 1 else median


def _limit_of(name: str) -> str:
    """Return the raw client that a reader is compared with: of the same client and the same ranges, if it is hsfmt."""
    client = "aiobotocore" if name.endswith(", fsspec") else "obstore"
    return _LIMIT.format(client, "zstd" if name.startswith("hsfmt zstd") else "none")


def readers(results: Results) -> str:
    """Return the table of readers: a row for each, also for those without figures."""
    header = ["reader", "order", "compares with digests", "MiB/s", "of the limit", "CPU s/GB"]
    rows = []
    for name, peer in results.peers.items():
        if name in results.problems:
            rows.append([name, results.problems[name], "", "", "", ""])
            continue
        costs = results.costs.get(name)
        if not costs:
            continue
        limit = results.costs.get(_limit_of(name))
        share = "1" if name.startswith("raw") else _spread(ratios(costs, limit)) if limit else "–"
        rows.append([name, peer.order, peer.checks, f"{speed(costs):,.0f}", share, f"{cpu(costs):.2f}"])
    return markdown(header, rows, 3)


def targets(results: Results) -> str:
    """Return a line for each target."""
    rows = [*_reading_targets(results), *_request_targets(results), *_flow_targets(results)]
    rows = [row for row in rows if row[3] != "not measured"]
    return markdown(["target", "at", "reached (rounds)", ""], rows)


def _at_least(title: str, target: float, values: Sequence[float]) -> list[str]:
    if not values:
        return [title, f"≥ {target:.2f}", "–", "not measured"]
    return [title, f"≥ {target:.2f}", _spread(values), "pass" if statistics.median(values) >= target else "MISS"]


def _reading_targets(results: Results) -> list[list[str]]:
    rows = []
    for name in ("hsfmt none, BatchOrder", "hsfmt zstd, BatchOrder"):
        for reader in (name, f"{name}, fsspec"):
            costs, limit = results.costs.get(reader), results.costs.get(_limit_of(reader))
            found = ratios(costs, limit) if costs and limit else []
            rows.append(_at_least(f"{reader} / {_limit_of(reader)}", 0.85, found))
    return rows


def _request_targets(results: Results) -> list[list[str]]:
    rows = []
    for client in ("obstore", "fsspec"):
        counts = results.requests.get(client)
        for place, title, most, unit in (
            (0, "opening a sealed dataset", 4, "requests"),
            (1, "the first sample after it", 2, "round trips"),
        ):
            text, verdict = "–", "not measured"
            if counts:
                n_requests, rounds = counts[place]
                text = f"{n_requests} requests in {rounds} round trips"
                verdict = "pass" if counts[place][place] <= most else "MISS"
            rows.append([f"{title}, {client}", f"≤ {most} {unit}", text, verdict])
    return rows


def _flow_targets(results: Results) -> list[list[str]]:
    rows = []
    for (codec, method), epochs in results.loaders.items():
        found = ratios([cost for cost, _, _ in epochs], [raw for _, raw, _ in epochs])
        rows.append(_at_least(f"DataLoader, 2 workers by {method}, {codec} / raw GETs, obstore", 0.85, found))
    for codec, rounds in results.cached.items():
        found = ratios([cached for cached, _, _ in rounds], [local for _, local, _ in rounds])
        rows.append(_at_least(f"2 processes from the cache, {codec} / from a local folder", 0.8, found))
    return rows


def loaders(results: Results) -> str:
    """Return the table of DataLoaders."""
    header = [
        "workers",
        "MiB/s",
        "raw GETs, MiB/s",
        "CPU s/GB",
        "RSS of a worker after each epoch, MiB",
        "private, MiB",
    ]
    rows = []
    for (codec, method), epochs in results.loaders.items():
        rss, private = (
            ", ".join(f"{max(worker[kind] for worker in memory) / 2**20:,.0f}" for _, _, memory in epochs)
            for kind in (0, 1)
        )
        costs = [cost for cost, _, _ in epochs]
        raw = f"{speed([raw for _, raw, _ in epochs]):,.0f}"
        rows.append([f"2 by {method}, {codec}", f"{speed(costs):,.0f}", raw, f"{cpu(costs):.2f}", rss, private])
    return markdown(header, rows)


def cache(results: Results) -> str:
    """Return the table of the local cache."""
    header = ["2 processes", "MiB/s", "CPU s/GB", "of a local folder", "chunks that the cache lacked"]
    rows = []
    for codec, rounds in results.cached.items():
        for number, (cost, misses) in enumerate(results.filling[codec], 1):
            title = f"{codec}, epoch {number}, filling the cache"
            rows.append([title, f"{speed([cost]):,.0f}", f"{cpu([cost]):.2f}", "–", f"{misses:,}"])
        cached, local = [one for one, _, _ in rounds], [one for _, one, _ in rounds]
        share, misses = _spread(ratios(cached, local)), sum(n for _, _, n in rounds)
        title = f"{codec}, from the cache"
        rows.append([title, f"{speed(cached):,.0f}", f"{cpu(cached):.2f}", share, f"{misses:,}"])
        rows.append([f"{codec}, local folder", f"{speed(local):,.0f}", f"{cpu(local):.2f}", "1", "–"])
    return markdown(header, rows)


def writing(results: Results) -> str:
    """Return the table of writing."""
    header = ["writing", "MiB/s of states", "of raw", "CPU s/GB", "memory beyond the start, MiB"]
    rows = []
    for name in results.ways:
        costs = [one.cost for one in results.written[name]]
        n_objects = 4 if "4 objects" in name or "push" in name else 1
        raw = [one.cost for one in results.written[results.ways[n_objects // 4]]]
        share = "1" if name.startswith("raw") else _spread(ratios(costs, raw))
        most = max(one.memory for one in results.written[name]) / 2**20
        rows.append([name, f"{speed(costs):,.0f}", share, f"{cpu(costs):.2f}", f"{most:,.0f}"])
    return markdown(header, rows)


def document(results: Results) -> str:
    """Return everything that goes between the marks of the page."""
    parts = ["\n".join(f"- {fact}" for fact in results.facts)]
    if results.costs:
        parts += [readers(results)]
    parts += [targets(results)]
    if results.loaders:
        parts += ["### DataLoader over S3", loaders(results)]
    if results.cached:
        parts += ["### From the local cache", cache(results)]
    if results.written:
        parts += ["### Writing to S3", writing(results)]
    return "\n\n".join(parts)
