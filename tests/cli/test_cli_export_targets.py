"""hsfmt export: what holds for every target. Their bytes are compared in tests/writers."""

import numpy as np
import pytest
from export_sources import every_target, journal_of, native, tree

from hsfmt import DatasetWriter
from hsfmt.cli.exporting.journal import read_journal
from hsfmt.writers.targets.registry import target_class

MORE = {"speculators-fp8": ["--cast", "float8_e4m3fn"], "specforge-dflash": ["--layers", "2,3,5"]}
MORE["eagle-ge"] = ["--layers", "8"]


@pytest.fixture
def source(tmp_path):
    """Make a dataset with a final state as the target wants it."""

    def make(name):
        norm = target_class(name).final_norm or "pre"
        with DatasetWriter(
            tmp_path / "d", layers=[2, 3, 5, 8], hidden_size=16, final_norm=norm, model="tiny"
        ) as writer:
            for i in range(20):
                n_tokens = 4 + 7 * i % 23
                states = np.random.default_rng(i).standard_normal((n_tokens, 4, 16), np.float32)
                mask = np.arange(n_tokens) > 1
                writer.write(f"chat/{i}", np.arange(n_tokens) + i, states.astype(native("bfloat16")), mask, {"n": i})
        return tmp_path / "d"

    return make


@pytest.mark.parametrize("name", every_target())
def test_a_target_is_deterministic_and_resumable(hsfmt, source, tmp_path, name):
    url = source(name)
    flags = ["--to", name, *MORE.get(name, [])]
    first = hsfmt.json("export", url, tmp_path / "one", *flags)
    assert first["counts"] == {"asked": 20, "written": 20, "already_there": 0, "not_reached": 0}
    assert first["complete"]
    whole = tree(tmp_path / "one")
    assert (first["files"], first["nbytes"]) == (
        len(whole), sum(path.stat().st_size for path in (tmp_path / "one").rglob("*") if path.is_file())
    )  # fmt: skip
    done = read_journal(journal_of(tmp_path / "one"))
    listed = [file.path for files in (*done.done.values(), done.finished) for file in files]
    assert sorted(listed) == sorted(whole)

    hsfmt("export", url, tmp_path / "two", *flags)
    assert tree(tmp_path / "two") == whole

    # As if a run had been killed after half of its notes, and before the last of its files.
    journal = journal_of(tmp_path / "two")
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[: 1 + len(lines) // 2]))
    (tmp_path / "two" / listed[-1]).unlink()
    again = hsfmt.json("export", url, tmp_path / "two", *flags)
    assert again["counts"]["not_reached"] == 0
    assert tree(tmp_path / "two") == whole


@pytest.mark.slow
@pytest.mark.parametrize("name", every_target())
def test_two_workers_write_the_bytes_of_one(hsfmt, process, source, tmp_path, name):
    url = source(name)
    flags = ["--to", name, *MORE.get(name, [])]
    hsfmt("export", url, tmp_path / "one", *flags)
    run = process("export", url, tmp_path / "two", *flags, "--workers", "2")
    stderr = run.communicate(timeout=300)[1]
    assert run.returncode == 0, stderr
    assert tree(tmp_path / "two") == tree(tmp_path / "one")
