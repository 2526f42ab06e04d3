"""The bench on tiny data: what it compares delivers the same bits, and the page gets its tables. Nothing is timed."""

import json
import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]

INSTALLED = ("raw", "hsfmt", "Blosc", "memmap", "safetensors", "torch.load", "zarr", "tensorstore")


@pytest.fixture(scope="module")
def run(repo_root, tmp_path_factory):
    """One run in a process of its own: its libraries are set up as tests of others would not want them."""
    folder = tmp_path_factory.mktemp("bench")
    page = folder / "page.md"
    page.write_text("before\n<!-- bench: begin -->\nold\n<!-- bench: end -->\nafter\n")
    (folder / "checks.md").write_text("<!-- checks: begin -->\n<!-- checks: end -->\n")
    command = [sys.executable, "bench/run.py", "--tiny", "--inline", "--rounds", "1", "--folder", str(folder)]
    done = subprocess.run(
        [*command, "--json", folder / "figures.json", "--write", page, "--checks", folder / "checks.md"],
        cwd=repo_root, capture_output=True, text=True, check=False, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, page.read_text(), json.loads((folder / "figures.json").read_text()), folder


def rows(text: str, first: str) -> dict[str, list[str]]:
    """The rows of the table whose first header cell is `first`, by their first cell."""
    lines = text[text.index(f"| {first} ") :].split("\n\n", maxsplit=1)[0].splitlines()
    cells = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines if not line.startswith("|-")
    ]
    assert len({len(row) for row in cells}) == 1
    return {row[0]: row[1:] for row in cells[1:]}


def test_every_reader_delivers_the_bits_that_were_written(run):
    stdout, _, figures, _ = run
    names = list(rows(stdout, "GB/s"))
    installed = [name for name in names if any(part in name for part in INSTALLED)]
    assert len(installed) > 15
    # A reader whose bits differ, or that fails, is a problem with its reason.
    assert {name: figures["problems"].get(name) for name in installed} == dict.fromkeys(installed)


def test_a_reader_without_its_package_stays_in_the_table(run):
    stdout, _, figures, _ = run
    table = rows(stdout, "GB/s")
    assert {"mosaicml-streaming, MDS", "litdata, as int16, copied out"} <= set(table)
    for name, problem in figures["problems"].items():
        assert table[name][0] == problem
        assert problem.startswith("not installed (")


def test_every_reader_has_a_figure_in_every_case(run):
    stdout, _, figures, _ = run
    table = rows(stdout, "GB/s")
    for name, cells in table.items():
        if name not in figures["problems"] and "bare" not in name:
            assert all(re.fullmatch(r"\d+\.\d\d", cell) for cell in cells[:10]), (name, cells)
    keys = {(cost["peer"], cost["threads"], cost["case"]) for cost in figures["costs"]}
    assert {case for _, _, case in keys} == {"samples", "batches", "layer", "window", "cold"}
    assert {threads for _, threads, _ in keys} == {1, 2}


def test_every_ratio_says_target_and_verdict(run):
    stdout, _, figures, _ = run
    lines = rows(stdout, "ratio")
    assert len(lines) > 20
    for text, (target, reached, _, verdict) in lines.items():
        assert re.fullmatch(r"[≥≤] \d+\.\d\d", target)
        missing = "4,096" in text or any(name in text for name in figures["problems"])
        assert verdict == "not measured" if missing else verdict in ("pass", "MISS")
        assert (reached == "–") == missing


def test_one_layer_of_four_asks_for_a_quarter_of_the_bytes(run):
    _, _, figures, _ = run
    asked = {(cost["peer"], cost["case"]): cost["asked"] for cost in figures["costs"] if cost["threads"] == 1}
    for peer in ("hsfmt none, reused buffer", "hsfmt zstd, reused buffer"):
        assert 0 < asked[peer, "layer"] <= 0.27 * asked[peer, "samples"]


def test_the_page_keeps_what_is_around_the_marks(run):
    stdout, page, _, folder = run
    assert page.startswith("before\n<!-- bench: begin -->\n\n- ")
    assert page.endswith("\n<!-- bench: end -->\nafter\n")
    assert stdout.strip() in page
    assert str(folder) not in page
    assert "| old" not in page


def test_what_the_checks_cost_is_told_of_each_codec_in_each_case(run):
    *_, folder = run
    lines = (folder / "checks.md").read_text().splitlines()
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith(("| none", "| zstd"))
    ]
    assert len({tuple(row[:3]) for row in cells}) == len(cells) == 2 * 7
    assert {row[0] for row in cells} == {"none", "zstd"}
    assert all(re.fullmatch(r"\d+\.\d\d", cell) for row in cells for cell in (*row[3:5], row[6]))


def test_the_data_is_gone_afterwards(run):
    *_, folder = run
    assert sorted(entry.name for entry in folder.iterdir()) == ["checks.md", "figures.json", "page.md"]
