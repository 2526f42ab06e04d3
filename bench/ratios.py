"""The ratios that the reader must reach, each with its target."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from results import Results

_SAMPLE_TOKENS = 4096  # of the target for windows: shorter samples can't reach it
Rounds = list[float] | None
Ratio = Callable[[Results, str], Rounds]
"""From results and a field of Cost, "seconds" or "cpu", to the ratio of each round; None: a reader is missing."""


@dataclass(frozen=True, slots=True)
class Target:
    """One line: what is compared, the bound, and the ratio of each round.

    Attributes
    ----------
    text
        What it says.
    bound
        What must be reached.
    at_most
        The bound is from above.
    ratio
        What is compared.
    """

    text: str
    bound: float
    at_most: bool
    ratio: Ratio

    def line(self, results: Results) -> tuple[str, str, str, str, str]:
        """Return (text, target, reached with the range of the rounds, by CPU seconds, verdict)."""
        target = f"{'≤' if self.at_most else '≥'} {self.bound:.2f}"
        rounds = self.ratio(results, "seconds")
        if not rounds:
            return self.text, target, "–", "–", "not measured"
        cpu = self.ratio(results, "cpu")
        reached = statistics.median(rounds)
        passed = reached <= self.bound if self.at_most else reached >= self.bound
        spread = f" ({min(rounds):.2f}–{max(rounds):.2f})" if len(rounds) > 1 else ""
        by_cpu = f"{statistics.median(cpu):.2f}" if cpu else "–"
        return self.text, target, f"{reached:.2f}{spread}", by_cpu, "pass" if passed else "MISS"


def _speeds(peer: str, other: str, case: str = "samples", threads: int = 1) -> Ratio:
    """How many times as fast as the other: interleaved rounds, so each is compared with its own."""
    return ratio_of((other, threads, case), (peer, threads, case))


def ratio_of(above: tuple[str, int, str], below: tuple[str, int, str]) -> Ratio:
    """Return the ratio of the costs of two (peer, threads, case), round by round."""

    def rounds(results: Results, field: str) -> Rounds:
        costs = results.costs.get(above), results.costs.get(below)
        if not costs[0] or not costs[1]:
            return None
        # CPU time is counted in ticks: a short read may have none.
        return [getattr(a, field) / max(getattr(b, field), 1e-9) for a, b in zip(*costs, strict=True)]  # type: ignore[arg-type]

    return rounds


def _layer_bytes(peer: str) -> Ratio:
    def rounds(results: Results, field: str) -> Rounds:
        costs = results.costs.get((peer, 1, "layer")), results.costs.get((peer, 1, "samples"))
        if not costs[0] or not costs[1] or field == "cpu":
            return None
        return [costs[0][0].asked / costs[1][0].asked]

    return rounds


def _window(peer: str) -> Ratio:
    """Seconds of a window, over those of its whole sample."""

    def rounds(results: Results, field: str) -> Rounds:
        windows, samples = results.costs.get((peer, 1, "window")), results.costs.get((peer, 1, "samples"))
        longest = results.cases["window"].reads[0][0].sample
        tokens = results.cases["samples"].reads[longest][0].stop
        if not windows or not samples or field == "cpu" or tokens != _SAMPLE_TOKENS:
            return None
        return [statistics.median(w.each) / s.each[longest] for w, s in zip(windows, samples, strict=True)]

    return rounds


def targets() -> list[Target]:
    """Return all lines, in order."""
    raw, none, zstd = "raw preadv, reused buffer", "hsfmt none, reused buffer", "hsfmt zstd, reused buffer"
    unchecked, fresh, zfresh = "hsfmt none, reused, checks off", "hsfmt none, fresh tensor", "hsfmt zstd, fresh tensor"
    bare = "bare Blosc decompression, reused"
    zarrs = "zarr-python + zarrs, hsfmt's {} array, as uint16"
    lines: list[Target] = []

    def least(text: str, bound: float, ratio: Ratio) -> None:
        lines.append(Target(text, bound, at_most=False, ratio=ratio))

    def most(text: str, bound: float, ratio: Ratio) -> None:
        lines.append(Target(text, bound, at_most=True, ratio=ratio))

    for n, name in ((1, "one thread"), (2, "two threads")):
        least(f"none, reused, checks off / raw preadv reused, {name}", 0.85, _speeds(unchecked, raw, threads=n))
        least(f"none, reused / raw preadv reused, {name}", 0.6, _speeds(none, raw, threads=n))
    least("none, packed batches / their samples", 1.0, ratio_of((none, 1, "samples"), (none, 1, "batches")))
    least("zstd, packed batches / their samples", 1.0, ratio_of((zstd, 1, "samples"), (zstd, 1, "batches")))
    least("none, fresh / raw preadv fresh", 0.85, _speeds(fresh, "raw preadv, fresh tensor"))
    for other in ("safetensors load_file, copied out", "safetensors safe_open, get_slice"):
        least(f"none, fresh / {other}", 1.0, _speeds(fresh, other))
    for other in ("torch.load", "torch.load mmap=True, copied out"):
        least(f"none, fresh / {other}", 1.5, _speeds(fresh, other))
    least("none, fresh / zarr-python, same array", 5, _speeds(fresh, "zarr-python, hsfmt's none array"))
    least("none, fresh / tensorstore, same array", 2, _speeds(fresh, "tensorstore, hsfmt's none array"))
    for n, name in ((1, "one thread"), (2, "two threads")):
        least(f"zstd, reused / bare decompression, {name}", 0.8, _speeds(zstd, bare, threads=n))
    least("zstd, reused, two threads / one", 1.6, ratio_of((zstd, 1, "samples"), (zstd, 2, "samples")))
    least(
        "bare decompression, two threads / one (the machine)", 1.6, ratio_of((bare, 1, "samples"), (bare, 2, "samples"))
    )
    least("zstd, fresh / zarr-python, same array", 3, _speeds(zfresh, "zarr-python, hsfmt's zstd array"))
    least("zstd, fresh / zarrs, same array", 1.5, _speeds(zfresh, zarrs.format("zstd")))
    least("zstd, fresh / tensorstore, same array", 1.5, _speeds(zfresh, "tensorstore, hsfmt's zstd array"))
    for codec, peer in (("none", none), ("zstd", zstd)):
        most(f"{codec}, one layer of 4: bytes / whole samples", 0.27, _layer_bytes(peer))
        most(f"{codec}, one layer of 4: time / whole samples", 0.35, ratio_of((peer, 1, "layer"), (peer, 1, "samples")))
        most(f"{codec}, window of 256 tokens / its sample of 4,096", 0.15, _window(peer))
    for other in ("mosaicml-streaming, MDS", "litdata, as int16, copied out"):
        for case, title in (
            ("samples", "whole samples"),
            ("batches", "packed batches"),
            ("cold", "whole samples, cold"),
        ):
            least(f"none, fresh / {other}: {title}", 1.0, _speeds(fresh, other, case))
    return lines
