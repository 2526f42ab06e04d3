"""The bench of damage on a few flips and some of the systems: we notice all of it. Nothing is timed."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]

NAMES = ("safetensors", ".npy", "tensorstore, sharded zstd + crc32c", "hsfmt, none", "hsfmt, zstd")


@pytest.fixture(scope="module")
def run(repo_root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    page = folder / "page.md"
    page.write_text("before\n<!-- detection rates: begin -->\nold\n<!-- detection rates: end -->\nafter\n")
    command = [sys.executable, "bench/detection_rates.py", "--positions", "3", "--folder", str(folder)]
    command += [word for name in NAMES for word in ("--only", name)]
    done = subprocess.run(
        [*command, "--json", str(folder / "outcomes.json"), "--write", str(page)],
        cwd=repo_root, capture_output=True, text=True, check=False, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads((folder / "outcomes.json").read_text())
    return {result["name"]: result for result in results if result["version"]}, page.read_text()


def test_every_system_asked_for_is_measured(run):
    results, page = run
    assert results.keys() == set(NAMES)
    for name, result in results.items():
        assert sum(result["flips"].values()) == 9, name
        assert f"| {name} " in page
    assert results[".npy"]["flips"]["silent"]
    assert results["tensorstore, sharded zstd + crc32c"]["faults"]["missing shard"] == "silent"


def test_we_notice_everything(run):
    results, _ = run
    ours = [result for name, result in results.items() if name.startswith("hsfmt")]
    assert len(ours) == 2
    for result in ours:
        assert result["flips"].keys() <= {"detected", "harmless"}
        assert set(result["faults"].values()) <= {"detected", "harmless"}
        assert result["faults"]["swapped shards"] == result["faults"]["missing shard"] == "detected"


def test_the_page_keeps_what_is_around_the_marks(run):
    _, page = run
    assert page.startswith("before\n<!-- detection rates: begin -->\n\n- ")
    assert page.endswith("\n<!-- detection rates: end -->\nafter\n")
    assert "old" not in page.split("begin -->")[1].split("<!--")[0].split()
