"""The bench of conversions on tiny data: every case runs to its end, and the page gets its tables. Nothing is timed."""

import json
import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.fixture(scope="module")
def run(repo_root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    page = folder / "page.md"
    page.write_text("before\n<!-- bench convert: begin -->\nold\n<!-- bench convert: end -->\nafter\n")
    command = [sys.executable, "bench/convert.py", "--tiny", "--folder", str(folder), "--write", str(page)]
    done = subprocess.run(
        [*command, "--json", str(folder / "figures.json")],
        cwd=repo_root, capture_output=True, text=True, check=False, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, page.read_text(), json.loads((folder / "figures.json").read_text()), folder


def test_every_case_has_figures(run):
    stdout, _, figures, _ = run
    kinds = [(case["layout"], case["kind"]) for case in figures["cases"]]
    assert len(kinds) == 2 * (3 + 4 + 4)
    for case in figures["cases"]:
        assert len(case["seconds"]) == 1
        assert case["title"] in stdout
    assert all(case["memory"][0] > 0 for case in figures["cases"] if case["kind"] in ("read", "convert", "export"))
    rows = [line for line in stdout.splitlines() if re.match(r"\| `?(hsfmt|cp|torch|load)", line)]
    assert len(rows) == 2 * (3 + 4 + 4)
    assert len({line.count("|") for line in rows}) == 1


def test_the_page_keeps_what_is_around_the_marks(run):
    stdout, page, _, folder = run
    assert page.startswith("before\n<!-- bench convert: begin -->\n\n- ")
    assert page.endswith("\n<!-- bench convert: end -->\nafter\n")
    assert stdout.strip() in page
    assert str(folder) not in page


def test_the_data_is_gone_afterwards(run):
    *_, folder = run
    assert sorted(entry.name for entry in folder.iterdir()) == ["figures.json", "page.md"]
