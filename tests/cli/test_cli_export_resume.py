"""hsfmt export: killed, interrupted and resumed, among foreign files and on a full disk."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from export_sources import journal_of, make_dataset, tree

from hsfmt.cli.exporting.journal import Journal, journal_path, read_journal

HERE = Path(__file__).parent
# The whole export takes many seconds: however late a signal comes on a busy machine, it is not over.
SLOW = "import os, time\nreal = os.fsync\nos.fsync = lambda fd: (time.sleep(0.05), real(fd))[1]\n"
FLAGS = {
    "safetensors": ["--to", "safetensors"],
    "zarr": ["--to", "zarr", "--option", "chunk_tokens=8", "--option", "shard_tokens=24"],
}


@pytest.fixture
def source(tmp_path):
    make_dataset(tmp_path / "d", 40)
    return tmp_path / "d"


def torture(repo_root, *args):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [repo_root, HERE, HERE.parent]))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", HERE / "export_torture.py", *map(str, args)],
        env=env, text=True, capture_output=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("name", "step"), [("safetensors", 7), ("zarr", 17)])
def test_killed_before_every_few_calls(repo_root, tmp_path, name, step):
    """Also in `finish`: the same files in the end, and none of another."""
    make_dataset(tmp_path / "d", 8)
    result = torture(repo_root, "calls", tmp_path / "d", tmp_path, step, *FLAGS[name])
    assert result["calls"] > 8 * step
    assert len(result["already"]) > 2, "before, between and after notes in the journal"


def test_killed_at_random_moments(repo_root, source, tmp_path):
    result = torture(repo_root, "random", source, tmp_path, 5, *FLAGS["safetensors"])
    assert result["killed"] >= 5


@pytest.mark.deep
@pytest.mark.parametrize("name", FLAGS)
def test_killed_before_every_third_call(repo_root, tmp_path, name):
    make_dataset(tmp_path / "d", 8)
    result = torture(repo_root, "calls", tmp_path / "d", tmp_path, 3, *FLAGS[name])
    assert len(result["already"]) > 2


@pytest.mark.deep
@pytest.mark.parametrize("name", FLAGS)
def test_killed_at_thirty_random_moments(repo_root, source, tmp_path, name):
    result = torture(repo_root, "random", source, tmp_path, 30, *FLAGS[name])
    assert result["killed"] >= 30
    assert result["partly"] >= 1, "some kill hit a run that had written something, and not all"


@pytest.mark.slow
def test_killed_with_workers(repo_root, source, tmp_path):
    """Workers outlive their parent for a moment: the next run waits for them to end."""
    result = torture(repo_root, "random", source, tmp_path, 8, *FLAGS["safetensors"], "--workers", "2")
    assert result["killed"] >= 8


@pytest.mark.parametrize(
    ("number", "code", "workers"), [(signal.SIGINT, 130, 1), (signal.SIGINT, 130, 2), (signal.SIGTERM, 143, 2)]
)
def test_interrupted_and_gone_on_with(hsfmt, process, repo_root, tmp_path, number, code, workers):
    make_dataset(tmp_path / "d", 200)
    out = tmp_path / "out"
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow/sitecustomize.py").write_text(SLOW)
    env = {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path / "slow", repo_root)))}
    run = process("export", tmp_path / "d", out, *FLAGS["safetensors"], "--workers", workers, env=env)
    journal, until = journal_of(out), time.monotonic() + 300
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 1):
        assert run.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    run.send_signal(number)
    text, err = run.communicate(timeout=300)
    assert run.returncode == code, err
    assert "Traceback" not in err
    assert "not finished" in text
    assert "not reached" in text
    assert "written, and kept." in err
    report = hsfmt.json("export", tmp_path / "d", out, *FLAGS["safetensors"])
    assert report["counts"]["already_there"] > 0
    assert report["counts"]["not_reached"] == 0
    hsfmt("export", tmp_path / "d", tmp_path / "whole", *FLAGS["safetensors"])
    assert tree(out) == tree(tmp_path / "whole")


def test_a_finished_export_is_left_alone(hsfmt, source, tmp_path):
    for name, flags in FLAGS.items():
        out = tmp_path / name
        first = hsfmt.json("export", source, out, *flags)
        before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
        again = hsfmt.json("export", source, out, *flags)
        assert again["counts"] == {"asked": 40, "written": 0, "already_there": 40, "not_reached": 0}
        assert (again["files"], again["nbytes"]) == (first["files"], first["nbytes"])
        assert (again["files_written"], again["complete"]) == (0, True)
        assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


@pytest.mark.parametrize("harm", ["missing", "shorter"])
def test_files_that_were_lost_or_changed_are_written_again(hsfmt, source, tmp_path, harm):
    for name, flags in FLAGS.items():
        out = tmp_path / name
        hsfmt("export", source, out, *flags)
        before = tree(out)
        victim = sorted(path for path in out.rglob("*") if path.is_file())[3]
        if harm == "missing":
            victim.unlink()
        else:
            victim.write_bytes(victim.read_bytes()[:-1])
        report = hsfmt.json("export", source, out, *flags)
        assert tree(out) == before
        assert report["files_written"] < 10 + len(before) // 2


def test_the_journal_names_every_file(hsfmt, source, tmp_path):
    for name, flags in FLAGS.items():
        out = tmp_path / name
        hsfmt("export", source, out, *flags)
        lines = [json.loads(line) for line in journal_of(out).read_text().splitlines()]
        assert lines[0]["kind"] == "hsfmt.export"
        assert lines[0]["job"]["to"] == name
        listed = {file["path"]: file["nbytes"] for line in lines[1:] for file in line["files"]}
        assert listed == {path: (out / path).stat().st_size for path in tree(out)}
        assert lines[-1]["unit"] is None
        assert sorted(path.name for path in out.parent.glob(f"{name}*")) == [name, f"{name}.hsfmt-export.jsonl"]


def test_foreign_files_are_neither_replaced_nor_joined(hsfmt, source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "sample-003.safetensors").write_text("mine")
    result = hsfmt("export", source, out, *FLAGS["safetensors"], code=2)
    assert (
        "expected files of this export only, got 1 other file: sample-003.safetensors — choose an empty"
        in result.stderr
    )
    assert "its journal out.hsfmt-export.jsonl is missing beside it" in result.stderr
    assert (tree(out).keys(), journal_of(out).exists()) == ({"sample-003.safetensors"}, False)
    (out / "sample-003.safetensors").unlink()
    hsfmt("export", source, out, *FLAGS["safetensors"])
    (out / "sub").mkdir()
    (out / "sub" / "notes.txt").write_text("mine")
    result = hsfmt("export", source, out, *FLAGS["safetensors"], code=2)
    assert "got 1 other file: sub/notes.txt" in result.stderr
    (out / "sub" / "notes.txt").unlink()
    (out / "link").symlink_to(tmp_path)
    assert "got 1 other file: link" in hsfmt("export", source, out, *FLAGS["safetensors"], code=2).stderr


def test_another_job_is_refused_by_name(hsfmt, source, tmp_path):
    out = tmp_path / "out"
    hsfmt("export", source, out, "--to", "npz", "--layers", "1,5")
    before = tree(tmp_path)
    for words, says in (
        (["--to", "npz"], "out: layers: expected 1,5, as in the export there, got 1,2,5"),
        (["--to", "zarr", "--layers", "1,5"], "out: to: expected npz, as in the export there, got zarr"),
        (
            ["--to", "npz", "--layers", "1,5", "--cast", "float32"],
            "out: cast: expected None, as in the export there, got float32",
        ),
        (["--to", "npz", "--layers", "1,5", "--range", "0:3"], "out: samples: expected 40 with xxh3_128:"),
    ):
        result = hsfmt("export", source, out, *words, code=2)
        assert says in result.stderr
        assert "remove" in result.stderr
        assert "out.hsfmt-export.jsonl beside it to begin anew" in result.stderr
    assert tree(tmp_path) == before


def test_a_dataset_that_grew_is_another_job(hsfmt, write, tmp_path):
    write(tmp_path / "d", {"a": [1]})
    hsfmt("export", tmp_path / "d", tmp_path / "out", "--to", "npz")
    write(tmp_path / "d", {"b": [1]})
    result = hsfmt("export", tmp_path / "d", tmp_path / "out", "--to", "npz", code=2)
    assert "out: snapshot: expected xxh3_128:" in result.stderr


def test_a_folder_that_was_emptied_begins_anew(hsfmt, source, tmp_path):
    out = tmp_path / "out"
    hsfmt("export", source, out, "--to", "npz")
    shutil.rmtree(out)
    report = hsfmt.json("export", source, out, "--to", "safetensors", "--layers", "2")
    assert report["counts"]["written"] == 40
    assert read_journal(journal_path(out)).job["to"] == "safetensors"


def test_no_resume(hsfmt, source, tmp_path):
    out = tmp_path / "out"
    hsfmt("export", source, out, "--to", "npz", "--no-resume")
    result = hsfmt("export", source, out, "--to", "npz", "--no-resume", code=2)
    assert "expected an empty folder, as --no-resume asks, got 40 files — leave --no-resume out" in result.stderr


def test_leftovers_of_a_killed_run_are_removed(hsfmt, source, tmp_path):
    out = tmp_path / "out"
    hsfmt("export", source, out, *FLAGS["safetensors"])
    before = tree(out)
    (out / ".hsfmt-0123456789abcdef.tmp").write_bytes(b"half")
    hsfmt("export", source, out, *FLAGS["safetensors"])
    assert tree(out) == before


@pytest.mark.parametrize("tail", [b'{"files": [{"nb', b'{"files": []}\n', b"\0" * 100, b"null\n"])
def test_half_a_line_of_the_journal(hsfmt, source, tmp_path, tail):
    out = tmp_path / "out"
    hsfmt("export", source, out, *FLAGS["safetensors"])
    before, journal = tree(out), journal_of(out)
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:11]) + tail)
    report = hsfmt.json("export", source, out, *FLAGS["safetensors"])
    assert report["counts"] == {"asked": 40, "written": 30, "already_there": 10, "not_reached": 0}
    assert tree(out) == before
    assert len(read_journal(journal).done) == 40


def test_a_journal_that_is_none(hsfmt, source, tmp_path):
    for text in ("my notes\n", '{"kind": "other"}\n', "[1]\n"):
        journal_of(tmp_path / "out").write_text(text)
        result = hsfmt("export", source, tmp_path / "out", "--to", "npz", code=2)
        assert "expected the journal of an export, got something else" in result.stderr
        assert journal_of(tmp_path / "out").read_text() == text


def test_two_exports_at_once(hsfmt, source, tmp_path, monkeypatch):
    monkeypatch.setattr("hsfmt.cli.exporting.journal._PATIENCE_SECONDS", 0.2)
    with Journal(journal_of(tmp_path / "out")):
        result = hsfmt("export", source, tmp_path / "out", "--to", "npz", code=2)
    assert "expected no export at work, got one that is running — wait for it to end" in result.stderr
    assert not (tmp_path / "out").exists()
    hsfmt("export", source, tmp_path / "out", "--to", "npz")


MOUNT = 'mount -t tmpfs -o size=256k tmpfs "$0" && exec "$@"'


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_full_disk(source, tmp_path, repo_root, workers):
    """The export ends with what is whole, and goes on once there is room: here, after a file is removed."""
    small = tmp_path / "small"
    small.mkdir()
    may_mount = ["unshare", "--mount", "--map-root-user", "sh", "-c", MOUNT, str(small)]
    if shutil.which("unshare") is None or subprocess.run([*may_mount, "true"], check=False).returncode:
        pytest.skip("NOT TESTED HERE: this system lets nobody mount a small file system; see the next test")
    script = tmp_path / "script.sh"
    flags = f"--to safetensors --force --workers {workers}"
    script.write_text(
        f'head -c 200000 /dev/zero > "{small}/ballast"\n'
        f'"{sys.executable}" -m hsfmt.cli export "{source}" "{small}/out" {flags} --json > "{tmp_path}/full.json"\n'
        'echo "code $?"\n'
        f'ls -A "{small}/out" | grep -c tmp\n'
        f'rm "{small}/ballast"\n'
        f'"{sys.executable}" -m hsfmt.cli export "{source}" "{small}/out" {flags} --json > "{tmp_path}/then.json"\n'
        'echo "code $?"\n'
        f'cp -r "{small}/out" "{tmp_path}/copied"\n'
    )
    env = os.environ | {"PYTHONPATH": str(repo_root)}
    done = subprocess.run([*may_mount, "sh", str(script)], env=env, text=True, capture_output=True, check=False)
    assert done.stdout.split("\n")[:3] == ["code 3", "0", "code 0"], done.stderr
    full, then = (json.loads((tmp_path / name).read_text()) for name in ("full.json", "then.json"))
    assert "No space left" in full["error"][0]["got"]
    assert "free space on this file system, then run the same command again" in full["error"][0]["remedy"]
    assert full["counts"]["not_reached"] > 0
    assert then["counts"]["not_reached"] == 0
    assert then["complete"]
    assert len(tree(tmp_path / "copied")) == 40


def test_a_disk_that_fills_up(hsfmt, source, tmp_path, monkeypatch):
    """The same by a call that fails, where nobody may mount: the files before it stay, nothing half-written does."""
    fsync, calls = os.fsync, []

    def failing(fd):
        calls.append(fd)
        if len(calls) == 30:
            raise OSError(28, "No space left on device")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", failing)
    out = tmp_path / "out"
    document = hsfmt.json("export", source, out, *FLAGS["safetensors"], code=3)
    assert document["error"][0]["remedy"].startswith("free space on this file system, then run the same")
    n = document["counts"]["written"]
    assert 0 < n < 40
    assert not list(out.glob(".*"))
    monkeypatch.setattr(os, "fsync", fsync)
    again = hsfmt.json("export", source, out, *FLAGS["safetensors"])
    assert again["counts"] == {"asked": 40, "written": 40 - n, "already_there": n, "not_reached": 0}
    hsfmt("export", source, tmp_path / "whole", *FLAGS["safetensors"])
    assert tree(out) == tree(tmp_path / "whole")
