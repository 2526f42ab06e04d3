"""Convert and export the same states, beside `cp -r` and the formats' own readers, and print a table.

    python bench/convert.py --quick                 a minute; folders too small to quote
    python bench/convert.py                         about half an hour, 20 GB of disk
    python bench/convert.py --write docs/benchmarks.md

docs/benchmarks.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import machine
import numpy as np
import numpy.typing as npt
import table
from synth import synth_hidden

MARKS = ("<!-- bench convert: begin -->", "<!-- bench convert: end -->")
LAYERS, LAYER_IDS = 4, "2,30,58,61"
CODECS, WORKERS = ("none", "zstd"), (1, 2)
_POLL_SECONDS = 0.1
_BASE_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Size:
    """How much is converted: samples, their mean length in tokens, channels, and interleaved rounds."""

    samples: int
    tokens: int
    hidden: int
    rounds: int


SIZES = {"full": Size(36, 1730, 7168, 5), "quick": Size(8, 600, 1536, 3), "tiny": Size(3, 40, 64, 1)}


@dataclass(frozen=True, slots=True)
class Layout:
    """A folder that another program wrote: its name, the format that hsfmt knows it by, and how its files are read."""

    name: str
    source: str
    target: str
    pattern: str
    reader: str
    read: str


# As the programs' own readers load a file; what is mapped has to be copied to be read.
_TORCH = "for p in paths: torch.load(p, weights_only=True)"
_SAFETENSORS = "for p in paths: [t.clone() for t in load_file(p).values()]"
LAYOUTS = (
    Layout("`.pt`", "specforge-eagle3", "specforge-eagle3", "*.ckpt", "`torch.load`", _TORCH),
    Layout("safetensors", "vllm", "safetensors", "*.safetensors", "`load_file`", _SAFETENSORS),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A process to measure.

    Attributes
    ----------
    layout
        Name of the layout whose bytes it handles.
    kind
        "copy", "synced copy", "read", "convert" or "export".
    title
        In the table.
    command
        What runs; `{out}` is the folder that it writes.
    """

    layout: str
    kind: str
    title: str
    command: tuple[str, ...]


@dataclass(slots=True)
class Cost:
    """Of each round: seconds, CPU seconds of the process tree, and the most memory of it in bytes."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)


def lengths(size: Size) -> list[int]:
    """Return the tokens of each sample: half to one and a half times the mean."""
    rng = np.random.default_rng(0)
    return [int(n) for n in rng.integers(size.tokens // 2, size.tokens * 3 // 2, size.samples)]


def make_folders(folder: Path, size: Size) -> int:
    """Write each layout's folder; return the bytes of the states."""
    import torch
    from safetensors.torch import save_file

    base = synth_hidden(_BASE_TOKENS, LAYERS, size.hidden)
    nbytes = 0
    (folder / "pt" / "rows_0-2000").mkdir(parents=True)
    (folder / "safetensors").mkdir()
    for number, n in enumerate(lengths(size)):
        states = torch.from_numpy(_sample(base, number, n).view(np.int16)).view(torch.bfloat16)
        nbytes += states.nbytes
        ids = torch.arange(number, number + n)
        save_file({"hidden_states": states, "token_ids": ids}, folder / "safetensors" / f"request-{number}.safetensors")
        record = {
            "input_ids": ids,
            "loss_mask": (ids % 3 > 0).long(),
            "aux_hidden_state": states[None, :, :-1].reshape(1, n, -1).clone(),
            "hidden_state": states[None, :, -1].clone(),
        }
        torch.save(record, folder / "pt" / "rows_0-2000" / f"data_{number}.ckpt")
    return nbytes


def _sample(base: npt.NDArray[np.uint16], number: int, n_tokens: int) -> npt.NDArray[np.uint16]:
    """Return states of a sample of their own: rows of the base, with the channels in another order."""
    channels = np.random.default_rng(number).permutation(base.shape[2])
    rows = (np.arange(n_tokens) + 131 * number) % len(base)
    return np.ascontiguousarray(base[rows][:, :, channels])


def make_cases(folder: Path) -> list[Case]:
    """Return the cases; the data sets that are exported are made by `make_datasets`."""
    cases = []
    for layout in LAYOUTS:
        source = str(folder / ("pt" if layout.pattern == "*.ckpt" else "safetensors"))
        synced = f"cp -r {source} {{out}} && find {{out}} -type f -exec sync {{}} +"
        paths = f"import pathlib; paths = sorted(map(str, pathlib.Path({source!r}).rglob({layout.pattern!r})))"
        read = f"import torch; from safetensors.torch import load_file; {paths}\n{layout.read}"
        cases += [
            Case(layout.name, "copy", "`cp -r`", ("cp", "-r", source, "{out}")),
            Case(layout.name, "synced copy", "`cp -r`, each file synced", ("sh", "-c", synced)),
            Case(layout.name, "read", layout.reader + " of every file", (sys.executable, "-c", read)),
        ]
        for codec in CODECS:
            for workers in WORKERS:
                options = ("--codec", codec, "--workers", str(workers), "--quiet")
                convert = hsfmt(
                    "convert", source, "{out}", "--from", layout.source, "--layer-ids", LAYER_IDS, *options, "--json"
                )
                title = f"`hsfmt convert`, {codec}, {_workers(workers)}"
                cases.append(Case(layout.name, "convert", title, convert))
                dataset = str(folder / f"dataset-{codec}")
                export = hsfmt(
                    "export", dataset, "{out}", "--to", layout.target, "--workers", str(workers), "--quiet", "--json"
                )
                title = f"`hsfmt export`, from {codec}, {_workers(workers)}"
                cases.append(Case(layout.name, "export", title, export))
    return cases


def _workers(n: int) -> str:
    return "1 worker" if n == 1 else f"{n} workers"


def hsfmt(*words: str) -> tuple[str, ...]:
    """Return the command of `hsfmt` under this Python."""
    return (sys.executable, "-m", "hsfmt.cli", *words)


def make_datasets(folder: Path) -> None:
    """Convert the `.pt` folder once for each codec: what is exported is after the final norm."""
    for codec in CODECS:
        where = str(folder / f"dataset-{codec}")
        command = hsfmt("convert", str(folder / "pt"), where, "--from", "specforge-eagle3", "--layer-ids", LAYER_IDS)
        run_checked([*command, "--codec", codec, "--quiet"])


def run_checked(command: Sequence[str]) -> str:
    """Run a command to its end; a failure ends the bench with what it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def measure(case: Case, out: Path) -> tuple[float, float, int, str]:
    """Run a case; return seconds, CPU seconds, the most memory of the process tree in bytes, and its stdout."""
    words = [word.replace("{out}", str(out)) if case.kind != "read" else word for word in case.command]
    os.sync()  # what an earlier case left to be written is not this one's
    before = os.times()
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as stdout:
        process = subprocess.Popen(words, stdout=stdout, stderr=subprocess.DEVNULL)
        most = 0
        while process.poll() is None:
            most = max(most, tree_memory(process.pid))
            time.sleep(_POLL_SECONDS if time.perf_counter() - began > _POLL_SECONDS else 0.01)
        seconds = time.perf_counter() - began
        after = os.times()
        stdout.seek(0)
        if process.returncode:
            sys.exit(f"{' '.join(words)[:300]}: exit code {process.returncode}\n{stdout.read()[-2000:]}")
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        return seconds, cpu, most, stdout.read()


def tree_memory(pid: int) -> int:
    """Return the proportional set size of a process and all below it, in bytes: what they share counts once."""
    total, pids = 0, [pid]
    while pids:
        process = Path("/proc") / str(pids.pop())
        try:
            lines = (process / "smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) << 10
            for task in (process / "task").iterdir():
                pids += map(int, (task / "children").read_text().split())
        except (OSError, StopIteration):
            continue  # it ended meanwhile
    return total


def run(folder: Path, size: Size) -> dict[Case, Cost]:
    """Measure all cases in interleaved rounds."""
    cases = make_cases(folder)
    costs = {case: Cost() for case in cases}
    digests: dict[str, set[str]] = {}
    for number in range(size.rounds):
        for case in random.Random(number).sample(cases, len(cases)):
            out = folder / "out"
            seconds, cpu, most, stdout = measure(case, out)
            cost = costs[case]
            cost.seconds.append(seconds)
            cost.cpu.append(cpu)
            cost.memory.append(most)
            if case.kind == "convert":
                digests.setdefault(case.layout, set()).add(json.loads(stdout)["snapshot"]["content_digest"])
            _remove(out)
            print(f"round {number + 1}: {case.layout} {case.title}: {seconds:.1f} s", file=sys.stderr, flush=True)
    assert all(len(found) == 1 for found in digests.values()), "conversions of one folder differ in their content"
    return costs


def _remove(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    for journal in out.parent.glob(f"{out.name}.hsfmt-export*"):
        journal.unlink()


def document(costs: dict[Case, Cost], nbytes: int, facts: Sequence[str]) -> str:
    """Return everything that goes between the marks of the page."""
    parts = ["\n".join(f"- {fact}" for fact in facts)]
    for layout in LAYOUTS:
        own = {case: cost for case, cost in costs.items() if case.layout == layout.name}
        base = {case.kind: cost for case, cost in own.items() if case.kind in ("copy", "synced copy", "read")}
        header = [layout.name, "GB/s", "to `cp -r`", "to it synced", f"to {layout.reader}", "CPU s/GB", "memory, MiB"]
        rows = [
            [
                case.title,
                f"{nbytes / statistics.median(cost.seconds) / 1e9:.2f}",
                *[_ratio(base[kind], cost) for kind in ("copy", "synced copy", "read")],
                f"{statistics.median(cost.cpu) / nbytes * 1e9:.2f}",
                f"{max(cost.memory) / 2**20:,.0f}",
            ]
            for case, cost in sorted(own.items(), key=lambda entry: _KINDS.index(entry[0].kind))
        ]
        parts.append(table.markdown(header, rows))
    return "\n\n".join(parts)


_KINDS = ("copy", "synced copy", "read", "convert", "export")


def _ratio(base: Cost, cost: Cost) -> str:
    """Return how many times as fast as the base: the median of the rounds, and their range."""
    rounds = [a / b for a, b in zip(base.seconds, cost.seconds, strict=True)]
    if base is cost:
        return "1"
    spread = f" ({min(rounds):.2f}–{max(rounds):.2f})" if len(rounds) > 1 else ""
    return f"{statistics.median(rounds):.2f}{spread}"


def figures(costs: dict[Case, Cost], nbytes: int) -> dict[str, Any]:
    """Return the figures of all rounds."""
    cases = [
        {"layout": case.layout, "kind": case.kind, "title": case.title, "seconds": cost.seconds, "cpu": cost.cpu,
         "memory": cost.memory}
        for case, cost in costs.items()
    ]  # fmt: skip
    return {"nbytes": nbytes, "cases": cases}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_const", const="quick", dest="size", help="under 300 MB of disk")
    size.add_argument("--tiny", action="store_const", const="tiny", dest="size", help="no figures to quote")
    parser.add_argument("--samples", type=int, help="of about 1,730 tokens, 36 by default")
    parser.add_argument("--rounds", type=int, help="interleaved rounds, 5 by default")
    parser.add_argument("--folder", type=Path, help="where to put the data for the time of the run")
    parser.add_argument("--json", type=Path, help="all figures of all rounds")
    parser.add_argument("--write", type=Path, help="the page whose table is replaced")
    options = parser.parse_args()
    chosen = SIZES[options.size or "full"]
    chosen = replace(chosen, samples=options.samples or chosen.samples, rounds=options.rounds or chosen.rounds)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="hsfmt-bench-", dir=options.folder) as name:
        folder = Path(name)
        nbytes = make_folders(folder, chosen)
        make_datasets(folder)
        costs = run(folder, chosen)
        minutes = (time.perf_counter() - began) / 60
        shape = f"{chosen.samples} samples of about {chosen.tokens:,} tokens, {LAYERS} layers of {chosen.hidden}, bf16"
        load = f"load of the machine at the end {os.getloadavg()[1]:.1f}"
        facts = [
            *machine.describe(folder),
            f"Data: {shape}, {nbytes / 1e9:.2f} GB of states in each folder, in the page cache.",
            f"{chosen.rounds} rounds in {minutes:.1f} minutes; {load}.",
        ]
    text = document(costs, nbytes, facts)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(figures(costs, nbytes), indent=1))
    if options.write:
        table.write(options.write, text, MARKS)


if __name__ == "__main__":
    main()
