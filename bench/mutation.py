"""Change one thing at a time in the code that commits and checks, and count how many changes some test notices.

    python bench/mutation.py --every 9 --results RESULTS          one mutant in nine
    python bench/mutation.py --again --results RESULTS            those that survived, with the tests of now
    python bench/mutation.py --results RESULTS --only-table --write docs/reliability.md

A mutant is the module with one operator, constant, condition, returned value or statement changed (bench/mutants.py).
The tests run in a copy of the tree: first once, to learn which test runs which lines; then for each mutant those that
run its lines, the quickest first, until one fails. A mutant is killed when a test fails or hangs, and survives when all
pass. Every fate is a line of RESULTS; a later one of the same mutant takes its place.

Of its own, since setuptools' package-dir gives modules other names (`hsfmt.readers.verification.full`) than their paths
have (`readers.verification.full`), from which mutmut derives them.
"""

from __future__ import annotations

import argparse
import compileall
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import table
from lines_of_tests import LinesOfTests
from mutants import Mutant, mutants, n_mutants

ROOT = Path(__file__).resolve().parent.parent
MARKS = ("<!-- mutation: begin -->", "<!-- mutation: end -->")
CORE = ("manifest", "digests", "canonical", "pointer", "catalog", "sealing", "rival_seals", "retractions", "lost_parts",
        "idset", "index", "snapshot", "snapshot_builder", "stored_snapshots", "tables", "attachments")  # fmt: skip
WRITERS = ("part_writer", "part_sequence")
TESTS = ["tests/core", "tests/spec", "tests/verification", "tests/storage", "tests/concurrency/test_seal_overlap.py",
         "tests/writers"]  # fmt: skip
THIRD_PARTY = ("click", "fsspec", "google_crc32c", "hypothesis", "jsonschema", "ml_dtypes", "numcodecs", "numpy",
               "rich", "xxhash", "zarr")  # fmt: skip
_SECONDS_OF_TESTS = 12.0  # a mutant's tests, at most, as timed by the first run
_HANGS_AFTER = 120.0
Fates = dict[tuple[str, int], dict[str, Any]]


def all_modules() -> list[str]:
    """Return the modules that are mutated."""
    verification = sorted((ROOT / "readers" / "verification").glob("[!_]*.py"))
    return [
        *(f"hsfmt/{name}.py" for name in CORE),
        *(f"writers/{name}.py" for name in WRITERS),
        *(path.relative_to(ROOT).as_posix() for path in verification),
    ]


def run_tests(tree: Path, arguments: list[str], seconds: float, plugin: LinesOfTests | None = None) -> str:
    """Run pytest in a forked process; return "passed", "failed" or "hung"."""
    child = os.fork()
    if child == 0:
        os.setsid()
        with (tree / "output").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        common = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={tree.parent / 'base'}"]
        common += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # zarr brings a plugin, and is imported already
        code = pytest.main([*common, *arguments], plugins=[plugin] if plugin else [])
        if plugin:
            plugin.save()
        os._exit(int(code))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return "passed" if status == 0 else "failed"
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hung"


def tests_of(tree: Path, mutant: Mutant, module: str, found: dict[str, Any]) -> list[str]:
    """Return the tests that run a mutant's lines, the quickest first, for as long as the budget allows.

    What runs at import only is left to tests that name the module, and to those that run most of it.
    """
    name = module.removesuffix(".py").replace("/", ".")
    imported = name if name.startswith("hsfmt.") else f"hsfmt.{name}"
    chosen = []
    for test, about in found.items():
        lines = about["lines"].get(module, [])
        if mutant.at_import:
            is_about = imported in _text(tree / test.partition("::")[0])
            if lines or is_about:
                chosen.append(((not is_about, -len(lines)), about["seconds"], test))
        elif any(mutant.first <= line <= mutant.last for line in lines):
            chosen.append(((False, 0), about["seconds"], test))
    total, names = 0.0, []
    for _, seconds, test in sorted(chosen):
        total += seconds
        if total > _SECONDS_OF_TESTS and names:
            break
        names.append(test)
    return names


@cache
def _text(path: Path) -> str:
    return path.read_text()


def copied(folder: Path) -> Path:
    """Return a copy of what the tests need, compiled."""
    tree = folder / "tree"
    for name in ("hsfmt", "readers", "writers", "cli", "maintenance", "spec", "tests", "docs", "bench"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "Makefile"):
        shutil.copy(ROOT / name, tree / name)
    for name in ("hsfmt", "readers", "writers", "cli", "maintenance"):
        compileall.compile_dir(tree / name, quiet=1)
    return tree


def learned(tree: Path, options: argparse.Namespace, modules: list[str]) -> dict[str, Any]:
    """Return the tests that pass in the copy, with the lines that each runs."""
    lines = options.lines or tree.parent / "lines.json"
    if not lines.exists():
        marks = ["-m", "not torch and not slow and not engine and not deep"]
        run_tests(tree, [*options.tests, *marks], 7200, LinesOfTests(tree, modules, lines))
    found = json.loads(lines.read_text())
    bad = {name.removeprefix("failed ") for name, about in found.items() if not about["passed"]}
    print(f"{len(found) - len(bad)} tests, without {len(bad)} that were skipped or failed in the copy", flush=True)
    return {name: about for name, about in found.items() if about["passed"] and name not in bad}


def fate_of(tree: Path, module: str, found: dict[str, Any], mutant: Mutant) -> dict[str, Any]:
    """Put a mutant in the place of its module, run its tests, put the module back; return what became of it."""
    path = tree / module
    source = path.read_text()
    for pyc in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        pyc.unlink()  # it may have the same size and second
    names = tests_of(tree, mutant, module, found)
    path.write_text(mutant.text)
    fate = run_tests(tree, ["-x", *names], _HANGS_AFTER) if names else "no test"
    path.write_text(source)
    compileall.compile_file(path, quiet=1)
    about = {"line": mutant.first, "label": mutant.label, "fate": fate, "tests": len(names)}
    return {"module": module, "number": mutant.number, **about}


def recorded(results: Path) -> Fates:
    """Return the last fate of each mutant."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {(fate["module"], fate["number"]): fate for fate in map(json.loads, lines)}


def survived(fate: dict[str, Any]) -> bool:
    """Tell whether no test noticed."""
    return fate["fate"] in ("passed", "no test")


def as_table(fates: Fates) -> str:
    """Return the table: a row for each module, and one for each group of them."""
    rows, groups = [], {"hsfmt": Counter[str](), "writers": Counter[str](), "readers": Counter[str]()}
    for module in all_modules():
        counts = Counter(fate["fate"] for (name, _), fate in fates.items() if name == module)
        counts["all"] = n_mutants((ROOT / module).read_text())
        groups[module.split("/")[0]] += counts
        rows.append(_row(f"`{module}`", counts))
    names = {"hsfmt": "manifests, digests, seals", "writers": "commits", "readers": "verify"}
    rows += [_row(f"**{names[group]}**", counts) for group, counts in groups.items()]
    rows.append(_row("**all**", sum(groups.values(), Counter())))
    return table.markdown(["module", "mutants", "run", "killed", "of these hung", "survived", "killed, %"], rows)


def _row(name: str, counts: Counter[str]) -> list[str]:
    killed, alive = counts["failed"] + counts["hung"], counts["passed"] + counts["no test"]
    run = killed + alive
    figures = (counts["all"], run, killed, counts["hung"], alive)
    return [name, *map(str, figures), f"{100 * killed / run:.0f}" if run else "–"]


def run(options: argparse.Namespace) -> None:
    """Run the mutants that were asked for, and record their fates."""
    for name in THIRD_PARTY:
        importlib.import_module(name)
    known = recorded(options.results)
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder, options.results.open("a") as log:
        tree = copied(Path(folder))
        found = learned(tree, options, all_modules())
        run_tests(tree, ["--collect-only", *options.tests], 600)  # keeps the tests compiled
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        chosen = [
            (module, mutant)
            for module in options.module or all_modules()
            for mutant in mutants((tree / module).read_text(), partial(_is_chosen, options, known, module))
        ]
        random.Random(0).shuffle(chosen)  # a run that is stopped has then seen some of everything
        for module, mutant in chosen:
            fate = fate_of(tree, module, found, mutant)
            print(json.dumps(fate), file=log, flush=True)
            if survived(fate):
                print(f"survived {fate['tests']} tests: {module}:{fate['line']}: {fate['label']}", flush=True)


def _is_chosen(options: argparse.Namespace, known: Fates, module: str, number: int) -> bool:
    fate = known.get((module, number))
    if options.again:
        return fate is not None and survived(fate)
    return bool(number % options.every == options.offset) and fate is None


def main() -> None:
    """Run mutants, print the table, write it."""
    parser = argparse.ArgumentParser(description="mutation testing of the code that commits and checks")
    parser.add_argument("--results", type=Path, required=True, help="file that keeps each mutant's fate")
    parser.add_argument("--every", type=int, default=1, help="take every nth mutant of each module")
    parser.add_argument("--offset", type=int, default=0, help="beginning with this one")
    parser.add_argument("--again", action="store_true", help="only those that survived, of an unchanged tree")
    parser.add_argument("--module", action="append", help="only these modules")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="tests to choose from")
    parser.add_argument("--lines", type=Path, help="keeps which test runs which lines; used again if it is there")
    parser.add_argument("--only-table", action="store_true", help="run nothing")
    parser.add_argument("--write", type=Path, help="the page whose table is replaced")
    options = parser.parse_args()
    if not options.only_table:
        run(options)
    text = as_table(recorded(options.results))
    print(text)
    if options.write:
        table.write(options.write, text, MARKS)


if __name__ == "__main__":
    main()
