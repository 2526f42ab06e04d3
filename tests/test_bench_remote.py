"""The remote bench on tiny data: all deliver the same bits, and the page gets its tables. Nothing is timed."""

import json
import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]

INSTALLED = ("raw", "hsfmt", "zarr", "tensorstore", "safetensors")
NUMBER = re.compile(r"[\d,]+(\.\d\d)?( \([\d.]+–[\d.]+\))?")


@pytest.fixture(scope="module")
def run(repo_root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    page = folder / "page.md"
    page.write_text("before\n<!-- bench remote: begin -->\nold\n<!-- bench remote: end -->\nafter\n")
    # Through the proxy: packets can be delayed by root alone.
    command = [sys.executable, "bench/remote.py", "--tiny", "--inline", "--link", "proxy", "--rtt-ms", "4"]
    done = subprocess.run(
        [*command, "--folder", folder, "--json", folder / "figures.json", "--write", page],
        cwd=repo_root, capture_output=True, text=True, check=False, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, page.read_text(), json.loads((folder / "figures.json").read_text()), folder


def rows(text: str, first: str) -> dict[str, list[str]]:
    """The rows of the table whose first header cell is `first`, by their first cell."""
    lines = text[re.search(rf"^\| {first} +\|", text, re.MULTILINE).start() :].split("\n\n", maxsplit=1)[0].splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if not line.startswith("|-")]
    assert len({len(row) for row in cells}) == 1
    return {row[0]: row[1:] for row in cells[1:]}


def test_every_reader_delivers_the_bits_that_were_written(run):
    stdout, _, figures, _ = run
    table = rows(stdout, "reader")
    installed = [name for name in table if name.startswith(INSTALLED)]
    assert len(installed) == 4 + 8 + 3 + 1 + 2
    # A reader whose bits differ, or that fails, is a problem with its reason.
    assert {name: figures["problems"].get(name) for name in installed} == dict.fromkeys(installed)
    for name in installed:
        assert all(NUMBER.fullmatch(cell) for cell in table[name][2:]), (name, table[name])
        assert float(table[name][4]) > 0


def test_a_reader_without_its_package_stays_in_the_table(run):
    stdout, _, figures, _ = run
    table = rows(stdout, "reader")
    assert {"mosaicml-streaming, MDS", "mosaicml-streaming, MDS, in its own order"} <= set(table)
    assert {"litdata", "litdata, in its own order"} <= set(table)
    for name, problem in figures["problems"].items():
        assert table[name][0] == problem
        assert problem.startswith("not installed (")


def test_the_raw_clients_read_what_hsfmt_asks_for(run):
    *_, figures, _ = run
    for codec in ("none", "zstd"):
        (raw,), (other,) = (
            figures["costs"][f"raw GETs, {client}, of the {codec} ranges"] for client in ("obstore", "aiobotocore")
        )
        assert raw["nbytes"] == other["nbytes"] > 0
    delivered = {cost["nbytes"] for name, costs in figures["costs"].items() if name[:3] != "raw" for cost in costs}
    assert len(delivered) == 1 + ("litdata, in its own order" in figures["costs"])


def test_opening_takes_4_requests_and_a_sample_2_round_trips(run):
    *_, figures, _ = run
    assert set(figures["requests"]) == {"obstore", "fsspec"}
    for (n_requests, _), (_, round_trips) in figures["requests"].values():
        assert 1 <= n_requests <= 4
        assert 1 <= round_trips <= 2


def test_what_else_is_measured_has_its_rows(run):
    stdout, _, figures, _ = run
    assert set(rows(stdout, "workers")) == {"2 by fork, zstd", "2 by spawn, zstd"}
    assert [len(memory) for epochs in figures["loaders"].values() for *_, memory in epochs] == [2, 2]
    cache = rows(stdout, "2 processes")
    assert {"zstd, epoch 1, filling the cache", "zstd, from the cache", "zstd, local folder"} <= set(cache)
    assert cache["zstd, from the cache"][3] == "0"  # all of it came from there
    written = rows(stdout, "writing")
    assert len(written) == 4
    assert all(NUMBER.fullmatch(cell) for row in written.values() for cell in row)


def test_every_target_says_what_was_reached(run):
    stdout, *_ = run
    table = rows(stdout, "target")
    assert len(table) == 4 + 4 + 2 + 1
    assert all(row[2] in ("pass", "MISS") for row in table.values())


def test_the_page_keeps_what_is_around_the_marks(run):
    stdout, page, _, folder = run
    assert page.startswith("before\n<!-- bench remote: begin -->\n\n- ")
    assert page.endswith("\n<!-- bench remote: end -->\nafter\n")
    assert stdout.strip() in page
    assert str(folder) not in page


def test_the_data_is_gone_afterwards(run):
    *_, folder = run
    assert sorted(entry.name for entry in folder.iterdir()) == ["figures.json", "page.md"]
