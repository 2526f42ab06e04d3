"""Damage the same states as each system stores them, read them by its ordinary reader, and count what nobody notices.

    python bench/detection_rates.py --quick                              a few flips of each system
    python bench/detection_rates.py --write docs/detection-rates.md      some ten minutes

A damage is *silent* when the reader returns other states than were written, *detected* when it raises, and *harmless*
when it returns what was written. Each system reads in a process of its own under a limit of memory; one that dies or
does not come back counts as detected, and is listed. docs/detection-rates.md says what was measured.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
import resource
import select
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import machine
import table
from stored_forms import CHUNK_TOKENS, FORMS, SHARD_TOKENS, Bits, Form, edit_shape, swap_inner_chunks
from synth import synth_hidden

MARKS = ("<!-- detection rates: begin -->", "<!-- detection rates: end -->")
SHAPE = TOKENS, LAYERS, HIDDEN = 64, 4, 128
MASKS = (0x01, 0x80, 0xFF)
POSITIONS = {"full": 840, "quick": 20}
HANG_SECONDS, START_SECONDS, ROOM_NBYTES = 30, 300, 4 << 30
BAD_ENDS = ("crash", "hang")


def states() -> Bits:
    """Return the states that all systems store."""
    return synth_hidden(*SHAPE)


def serve(form: Form, folder: Path) -> None:
    """Read whenever a line comes in; say what came out."""
    wanted = states().reshape(-1).tobytes()
    print(judged(form, folder, wanted), flush=True)  # the libraries are loaded before the limit is set
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM_NBYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    for _ in sys.stdin:
        print(judged(form, folder, wanted), flush=True)


def judged(form: Form, folder: Path, wanted: bytes) -> str:
    """Read and compare."""
    try:
        bits = form.read(folder)
    except BaseException as error:  # noqa: BLE001  a panic of Rust is no Exception, and raises all the same
        return f"detected {type(error).__name__}"
    same = bits.shape in (SHAPE, (TOKENS * LAYERS * HIDDEN,)) and bits.dtype == "uint16" and bits.tobytes() == wanted
    return "harmless" if same else "silent"


class Reader:
    """A process that reads what is in a folder as often as it is asked to, and is started again when it has died."""

    def __init__(self, form: Form, folder: Path) -> None:
        self._command = [sys.executable, __file__, "--serve", form.name, str(folder)]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def read(self) -> str:
        """Return silent, detected, harmless, crash or hang."""
        process = self._process
        if process is None:
            process = self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            seconds = START_SECONDS
        else:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.write("read\n")
                process.stdin.flush()
            seconds = HANG_SECONDS
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], seconds)[0]:
            self._end()
            return "hang"
        answer = process.stdout.readline().partition(" ")[0].strip()
        if not answer:
            self._end()
        return answer or "crash"

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@contextmanager
def changed(path: Path, data: bytes | None) -> Iterator[None]:
    """Have another content in a file, or no such file."""
    before = path.read_bytes()
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(before)


def flips(form: Form, folder: Path, n_positions: int) -> Counter[str]:
    """Flip so many bytes of all files, chosen by size, by each mask."""
    files = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    choose = random.Random(0)
    places = [(path, at) for path, data in files.items() for at in range(len(data))]
    found: Counter[str] = Counter()
    with Reader(form, folder) as reader:
        if (first := reader.read()) != "harmless":
            sys.exit(f"{form.name}: reads something else than it wrote: {first}")
        for path, at in choose.sample(places, min(n_positions, len(places))):
            for mask in MASKS:
                data = bytearray(files[path])
                data[at] ^= mask
                with changed(path, bytes(data)):
                    outcome = reader.read()
                found[outcome] += 1
                if outcome in BAD_ENDS:
                    reader.read()  # the new process, on whole files
        assert reader.read() == "harmless", f"{form.name}: the files were not put back"
    return found


FAULTS = ("missing shard", "empty shard", "half a shard", "swapped shards", "duplicated shard", "swapped inner chunks",
          "edited shape")  # fmt: skip


def faults(form: Form, folder: Path) -> dict[str, str]:
    """Do each structural damage to a sharded form; return the outcomes."""
    assert form.shards is not None
    first, second = sorted(path for path in (folder / form.shards / "c").rglob("*") if path.is_file())
    documents = [*(folder / form.shards).glob("zarr.json"), *folder.glob("a/hsfmt/manifests/*")]
    one, two = first.read_bytes(), second.read_bytes()
    n_chunks = SHARD_TOKENS // CHUNK_TOKENS * LAYERS
    damages: dict[str, dict[Path, bytes | None]] = {
        "missing shard": {first: None},
        "empty shard": {first: b""},
        "half a shard": {first: one[: len(one) // 2]},
        "swapped shards": {first: two, second: one},
        "duplicated shard": {second: one},
        "swapped inner chunks": {first: swap_inner_chunks(one, n_chunks)},
        "edited shape": {path: edit_shape(path.read_bytes(), TOKENS, TOKENS - 3) for path in documents},
    }
    outcomes = {}
    with Reader(form, folder) as reader:
        for name, damage in damages.items():
            assert all(data is None or data != path.read_bytes() for path, data in damage.items()), name
            reader.read()
            with _all_changed(damage):
                outcomes[name] = reader.read()
    return outcomes


@contextmanager
def _all_changed(damage: dict[Path, bytes | None]) -> Iterator[None]:
    if not damage:
        yield
        return
    path, data = next(iter(damage.items()))
    with changed(path, data), _all_changed({key: value for key, value in damage.items() if key != path}):
        yield


def version(package: str) -> str | None:
    """Return the installed version, None where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def measure(n_positions: int, scratch: Path | None, names: list[str]) -> list[dict[str, Any]]:
    """Return the outcomes of these forms; of one that is not installed, none."""
    results = []
    for form in (FORMS[name] for name in names):
        result: dict[str, Any] = {"name": form.name, "package": form.package, "version": version(form.package)}
        results.append(result)
        if result["version"] is None:
            continue
        with tempfile.TemporaryDirectory(prefix="hsfmt-bench-", dir=scratch) as name:
            folder = Path(name) / "whole"
            folder.mkdir()
            form.write(folder, states())
            files = [path for path in folder.rglob("*") if path.is_file()]
            result |= {"files": len(files), "nbytes": sum(path.stat().st_size for path in files)}
            result["flips"] = dict(flips(form, folder, n_positions))
            if form.shards:
                copy = Path(name) / "faults"
                shutil.copytree(folder, copy)
                result["faults"] = faults(form, copy)
        print(f"{form.name}: {result['flips']} {result.get('faults', '')}", file=sys.stderr, flush=True)
    return results


def document(results: list[dict[str, Any]], facts: list[str]) -> str:
    """Return everything that goes between the marks of the page."""
    measured = [result for result in results if result["version"]]
    measured.sort(key=lambda result: -result["flips"].get("silent", 0) / sum(result["flips"].values()))
    header = ["flipped bytes", "version", "files, bytes", "flips", "silent", "detected", "harmless", "died, hung"]
    rows = [
        [result["name"], result["version"], f"{result['files']}, {result['nbytes']:,}", *_shares(result["flips"])]
        for result in measured
    ]
    parts = ["\n".join(f"- {fact}" for fact in facts), table.markdown(header, rows, 3)]
    sharded = [result for result in measured if "faults" in result]
    rows = [[result["name"], *[result["faults"][fault] for fault in FAULTS]] for result in sharded]
    parts.append(table.markdown(["sharded", *FAULTS], rows, 1))
    missing = [result["name"] for result in results if not result["version"]]
    if missing:
        parts.append(f"Not installed: {', '.join(missing)}.")
    return "\n\n".join(parts)


def _shares(found: dict[str, int]) -> list[str]:
    n = sum(found.values())
    ends = sum(found.get(end, 0) for end in BAD_ENDS)
    detected = found.get("detected", 0) + ends
    silent = found.get("silent", 0)
    shares = [f"{100 * count / n:.2f} %" for count in (detected, found.get("harmless", 0))]
    return [f"{n:,}", "**0**" if not silent else f"{100 * silent / n:.2f} %", *shares, str(ends) if ends else ""]


def main() -> None:
    """Damage, read, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_const", const="quick", default="full", dest="size")
    parser.add_argument("--positions", type=int, help="bytes of each system, by each of three masks; 840 by default")
    parser.add_argument("--only", action="append", choices=FORMS, metavar="NAME", help="a system; again for more")
    parser.add_argument("--folder", type=Path, help="where to put the data for the time of the run")
    parser.add_argument("--json", type=Path, help="all outcomes")
    parser.add_argument("--write", type=Path, help="the page whose tables are replaced")
    parser.add_argument("--serve", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(FORMS[options.serve[0]], Path(options.serve[1]))
        return
    n_positions = options.positions or POSITIONS[options.size]
    results = measure(n_positions, options.folder, options.only or list(FORMS))
    shape = f"{TOKENS} tokens, {LAYERS} layers of {HIDDEN}, bf16"
    facts = [
        f"{machine.cpu_model()}; Python {sys.version.split()[0]}.",
        f"Data: {shape}, {states().nbytes:,} bytes; chunks of {CHUNK_TOKENS} tokens, shards of {SHARD_TOKENS}.",
        f"{n_positions:,} bytes of each system by masks {', '.join(f'{mask:02X}' for mask in MASKS)}.",
    ]
    text = document(results, facts)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    if options.write:
        table.write(options.write, text, MARKS)


if __name__ == "__main__":
    main()
