"""`info`, `ls`, `seal`, `verify` and `cat` on small datasets, and what all commands share."""

import json
import re
import subprocess

import click
import ml_dtypes
import numpy as np
import pytest

import hsfmt as package
from hsfmt import layout
from hsfmt.cli import main as cli
from hsfmt.cli import units
from hsfmt.errors import Problem, SourceError
from hsfmt.sealing import seal

COMMANDS = ["convert", "verify", "info", "ls", "seal", "cat"]


@pytest.fixture
def small(tmp_path, write):
    """Samples of 1 to 3 tokens: no mask, a mixed one, one of zeros; and a hole."""
    url = tmp_path / "small"
    write(url, {"a": None, "b": [0, 1], "c": [0, 0, 0]}, holes=[("d", "it failed")])
    return url


# --- what all commands share -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [(), *[(name,) for name in COMMANDS]], ids=str)
def test_help(hsfmt, command):
    result = hsfmt(*command, "--help")
    assert result.stdout.startswith("Usage: hsfmt")
    assert result.stderr == ""


def test_help_names_every_command_and_the_exit_codes(hsfmt):
    text = hsfmt("--help").stdout
    assert all(f"\n  {name}" in text for name in COMMANDS)
    assert "Exit codes" in text


def test_the_documentation_names_every_command(repo_root):
    text = (repo_root / "docs" / "cli.md").read_text()
    names = list(cli._COMMANDS)
    assert re.findall(r"^\| \[`([a-z-]+)`\]\(#hsfmt-", text, re.MULTILINE) == names
    assert re.findall(r"^## hsfmt ([a-z-]+)$", text, re.MULTILINE) == names
    assert (len(names), " has twenty-one commands" in text) == (21, True)


def test_every_command_is_a_module_of_that_name(repo_root):
    for name in COMMANDS:
        assert (repo_root / "cli" / f"{name}.py").is_file()


def test_version(hsfmt):
    assert hsfmt("--version").stdout == f"hsfmt {package.__version__} (format 1.0)\n"


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["nothing"], 2),
        (["info"], 2),
        (["info", "--wrong", "x"], 2),
        (["verify", "x", "--level", "deep"], 2),
        (["verify", "x", "--workers", "0"], 2),
        (["verify", "x", "--workers", "-1"], 2),
        (["convert", "x", "y", "--workers", "0"], 2),
        (["convert", "x", "y", "--workers", "-2"], 2),
        (["convert", "x", "y", "--workers", "two"], 2),
        (["convert", "x", "y", "--expect", "0"], 2),
        (["convert", "x", "y", "--part-size", "0"], 2),
        (["ls", "x", "--limit", "-1"], 2),
        *[([name, "x", "--snapshot", "bad"], 2) for name in ("info", "ls")],
        (["cat", "x", "a", "--snapshot", "bad"], 2),
        (["cat", "x"], 2),
        (["cat", "x", "a", "--index", "1"], 2),
        (["cat", "x", "a", "--layers", "two"], 2),
        (["convert", "x", "y", "--part-size", "big"], 2),
        (["convert", "x", "y", "--part-size", "4"], 2),
        (["convert", "x", "y", "--pad-id", "3"], 2),
        (["convert", "x", "y", "--map", "ids=z"], 2),
        (["seal", "x", "--expect-ids", "none.txt"], 2),
        *[([name, "no/such/dataset"], 3) for name in ("info", "ls", "seal", "verify")],
        (["cat", "no/such/dataset", "a"], 3),
        (["convert", "no/such/folder", "y"], 3),
    ],
    ids=str,
)
def test_exit_codes(hsfmt, tmp_path, monkeypatch, argv, code):
    monkeypatch.chdir(tmp_path)
    hsfmt(*argv, code=code)
    document = hsfmt.json(*argv, code=code)
    assert document["exit_code"] == code
    assert set(document["error"][0]) == {"where", "expected", "got", "remedy", "samples"}
    assert list(tmp_path.iterdir()) == []


def raising(monkeypatch, error: BaseException) -> None:
    @click.command()
    @click.argument("url")
    @click.option("--json", is_flag=True)
    def command(**_):
        raise error

    monkeypatch.setattr("hsfmt.cli.info.command", command)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (PermissionError(13, "Permission denied", "/some/file"), 3, "/some/file"),
        (OSError("odd"), 3, "odd"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 2, "pip install"),
        (ModuleNotFoundError("No module named 'pyarrow.ipc'", name="pyarrow.ipc"), 2, "hsfmt[convert]"),
        (ZeroDivisionError("a bug"), 70, "HSFMT_TRACEBACK"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_errors(hsfmt, monkeypatch, error, code, words):
    raising(monkeypatch, error)
    assert words in hsfmt("info", "x", code=code).stderr
    assert hsfmt.json("info", "x", code=code)["exit_code"] == code


def test_one_problem_a_line(hsfmt, monkeypatch):
    problems = [Problem("a\nfile", "this", "that"), Problem("b", "this", "that", "do it")]
    raising(monkeypatch, SourceError(problems))
    lines = hsfmt("info", "x", code=1).stderr.splitlines()
    assert lines == [
        "error: a\\nfile: expected this, got that",
        "error: b: expected this, got that — do it",
    ]
    assert len(hsfmt.json("info", "x", code=1)["error"]) == 2


def test_alike_problems_share_a_line(hsfmt, monkeypatch):
    problems = [Problem(f"f{n}", "this", "that", "do it") for n in range(30)]
    problems[1:1] = [Problem("other", "this", "more")]
    raising(monkeypatch, SourceError(problems))
    assert hsfmt("info", "x", code=1).stderr.splitlines() == [
        "error: f0: expected this, got that (and 29 more like it; --json lists all) — do it",
        "error: other: expected this, got more",
    ]
    assert [problem["where"] for problem in hsfmt.json("info", "x", code=1)["error"]] == [p.where for p in problems]


def test_many_problems_are_cut_openly(hsfmt, monkeypatch):
    raising(monkeypatch, SourceError([Problem(f"f{n}", "this", str(n)) for n in range(33)]))
    lines = hsfmt("info", "x", code=1).stderr.splitlines()
    assert len(lines) == 21
    assert lines[-1] == "error: and 13 more problems; --json lists all"
    assert len(hsfmt.json("info", "x", code=1)["error"]) == 33


@pytest.mark.parametrize("place", ["parts", "hsfmt/manifests", "nothing"])
@pytest.mark.parametrize("argv", [["ls"], ["info"], ["seal"], ["verify"], ["cat", "--index", "0"]], ids=str)
def test_a_place_within_a_dataset(hsfmt, small, place, argv):
    result = hsfmt(argv[0], small / place, *argv[1:], code=3)
    assert f"name the dataset, which lies further up: {small}" in result.stderr


def test_a_snapshot_that_can_not_be(hsfmt, small):
    result = hsfmt("ls", small, "--snapshot", "bad", code=2)
    assert "neither live nor a fingerprint" in result.stderr
    assert "None" not in result.stderr


def test_traceback_on_demand(process, tmp_path):
    for value, shown in (("", False), ("1", True)):
        running = process("info", tmp_path / "none", env={"HSFMT_TRACEBACK": value})
        _, stderr = running.communicate(timeout=300)
        assert running.returncode == 3
        assert ("Traceback" in stderr) is shown


def test_a_reader_that_goes_away(process, tmp_path, write):
    write(tmp_path / "d", {f"{'x' * 1000}{i}": None for i in range(300)})
    with process("ls", tmp_path / "d") as running:
        head = subprocess.run(["head", "-n", "1"], stdin=running.stdout, capture_output=True, check=True, timeout=300)
        running.stdout.close()
        assert running.stderr.read() == ""
    assert head.stdout.count(b"\n") == 1
    assert running.returncode == 141


def test_not_standalone(small, capsys):
    assert cli.main(["ls", str(small)], standalone_mode=False) is None
    assert capsys.readouterr().out.count("\n") == 3


@pytest.mark.parametrize("argv", [["info"], ["ls", "-l"], ["seal"], ["cat", "--index", "0"], ["verify"]], ids=str)
def test_light_commands_import_neither_torch_nor_zarr(small, run_python, repo_root, argv):
    code = (
        "import sys\nfrom hsfmt.cli.main import main\nmain(sys.argv[1:], standalone_mode=False)\n"
        "assert not {'torch', 'zarr', 'rich', 'pyarrow'} & set(sys.modules)"
    )
    run_python(code, argv[0], str(small), *argv[1:], path=repo_root)


# --- info ------------------------------------------------------------------------------------------------------------


def test_info(hsfmt, small):
    facts = hsfmt.json("info", small)
    assert facts["layers"] == [
        {"decoder_layer_output": None, "hf_hidden_states_index": 0, "position": 0},
        {"decoder_layer_output": 2, "hf_hidden_states_index": 3, "position": 1},
    ]
    assert (facts["samples"], facts["tokens"], facts["supervised_tokens"]) == (3, 6, 2)
    assert (facts["masks_given"], facts["without_supervised_tokens"]) == (2, 1)
    assert facts["holes"] == [{"id": "d", "reason": "it failed"}]
    assert facts["states"]["raw_nbytes"] == 6 * 2 * 8 * 2
    assert facts["newer"] == {"holes": 0, "parts": [], "samples": 0}
    assert facts["live"] is False
    assert facts["sealed"]
    text = hsfmt("info", small).stdout
    for words in ("embeddings", "output of decoder layer 2", "unknown", "it failed", facts["snapshot"], "loss masks"):
        assert words in text


def test_info_counts_the_files_that_are_there(hsfmt, dataset):
    facts = hsfmt.json("info", dataset)
    on_disk = [path for path in dataset.rglob("*") if path.is_file()]
    part_files = [path for path in on_disk if "snapshots" not in path.parts and path.parent != dataset]
    part_files = [path for path in part_files if path not in (dataset / layout.POINTER, dataset / "parts/zarr.json")]
    assert facts["files"] == len(part_files)
    assert facts["stored_nbytes"] == sum(path.stat().st_size for path in part_files)


def test_info_of_what_was_never_sealed(hsfmt, tmp_path, write):
    write(tmp_path / "d", {"a": None}, seal=False)
    facts = hsfmt.json("info", tmp_path / "d")
    assert (facts["live"], facts["sealed"], facts["samples"], facts["newer"]) == (True, None, 1, None)
    assert "never" in hsfmt("info", tmp_path / "d").stdout


def test_info_of_an_empty_dataset(hsfmt, tmp_path, write):
    write(tmp_path / "d", {})
    facts = hsfmt.json("info", tmp_path / "d")
    assert (facts["samples"], facts["parts"], facts["tokens_a_sample"]) == (0, 0, None)
    assert "samples     0" in hsfmt("info", tmp_path / "d").stdout


def test_info_says_what_is_newer_than_the_seal(hsfmt, small, write):
    write(small, {"e": None, "f": None}, seal=False, holes=[("g", "no")])
    facts = hsfmt.json("info", small)
    assert (facts["samples"], facts["newer"]["samples"], facts["newer"]["holes"]) == (3, 2, 1)
    assert "1 part with 2 samples, 1 hole committed since" in hsfmt("info", small).stdout
    live = hsfmt.json("info", small, "--snapshot", "live")
    assert (live["samples"], live["live"]) == (5, True)
    old = facts["snapshot"]
    hsfmt("seal", small)
    assert hsfmt.json("info", small)["samples"] == 5
    assert hsfmt.json("info", small, "--snapshot", old)["samples"] == 3


def test_info_of_shadowed_retracted_and_filled(hsfmt, small, write, tmp_path):
    write(tmp_path / "other", {"a": None, "b": [1, 1], "d": None})
    for folder in ("parts", "hsfmt/index", "hsfmt/manifests"):
        for path in (tmp_path / "other" / folder).iterdir():
            if path.name != "zarr.json":
                path.rename(small / folder / path.name)
    seal(str(small), retract=["c"])
    facts = hsfmt.json("info", small)
    assert facts["shadowed"] == {"different": 1, "same": 1}
    assert facts["retracted"] == 1
    assert facts["holes"] == [], "a sample beats the hole of its id"
    text = hsfmt("info", small).stdout
    assert "2 later copies of an id, not served: 1 of the same content, 1 of another" in text
    # Samples a, b and d are served, of 1, 2 and 3 tokens; c of 3 is retracted, and a and b are there twice.
    assert facts["states"]["raw_nbytes"] == (6 + 6) * 2 * 8 * 2
    assert facts["tokens"] == 6
    assert facts["states"]["unserved_raw_nbytes"] == 6 * 2 * 8 * 2
    assert "192 bytes raw of it in samples that are not served" in text


def test_info_of_runs_of_one_producer(hsfmt, small, write):
    for n in range(5):
        producer = {
            "started": f"2026-0{n + 1}",
            "command": ["run", str(n)],
            "source_files": n,
            "source_nbytes": n << 20,
        }
        write(small, {f"e{n}": None}, producer={"engine": "e", "cache_nbytes": 3 << 30, **producer})
    first, second = sorted(hsfmt.json("info", small)["producers"], key=lambda entry: entry["parts"])
    assert (first["parts"], second["parts"], len(second["runs"])) == (1, 5, 5)
    text = hsfmt("info", small).stdout
    assert "producer of 5 parts" in text
    assert "cache size" in text
    assert "3.0 GiB" in text
    assert text.count("engine") == 1
    assert " files, " in text
    assert ".0 MiB: run " in text
    assert "and 2 more runs" in text
    assert "unserved" not in text
    assert "not served" not in text


def test_info_of_a_damaged_snapshot(hsfmt, small):
    (index,) = (small / layout.SNAPSHOTS).glob("*/index.safetensors")
    index.write_bytes(index.read_bytes()[:-1] + b"x")
    assert "hsfmt repair" in hsfmt("info", small, code=1).stderr
    assert hsfmt.json("info", small, code=1)["error"]


# --- ls --------------------------------------------------------------------------------------------------------------


def test_ls(hsfmt, small):
    lines = hsfmt("ls", small).stdout.splitlines()
    assert [line.split() for line in lines] == [["0", "1", "1", "a"], ["1", "2", "1", "b"], ["2", "3", "0", "c"]]
    assert hsfmt("ls", small, "--limit", 2).stdout.splitlines() == lines[:2]
    assert hsfmt.json("ls", small, "--limit", 0)["samples"] == []
    long = hsfmt("ls", small, "--long").stdout.splitlines()
    assert long[2].endswith('{"n":3}')
    assert all(line.startswith(short) for line, short in zip(long, lines, strict=True))


def test_ls_has_a_head_line_on_a_terminal(small, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    cli.main(["ls", str(small)], standalone_mode=False)
    cli.main(["ls", str(small), "-l"], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["index", "tokens", "superv.", "id"]
    assert lines[4].split() == ["index", "tokens", "superv.", "id", "part:row", "metadata"]


def test_ls_json(hsfmt, small):
    document = hsfmt.json("ls", small, "-l")
    part = document["samples"][1].pop("part")
    assert (small / "parts" / part).is_dir()
    assert document["samples"][1] == {
        "id": "b", "index": 1, "loss_mask_given": True, "metadata": {"n": 2}, "row": 1, "source_index": 1,
        "supervised_tokens": 1, "tokens": 2,
    }  # fmt: skip


def test_ls_holes(hsfmt, small):
    assert hsfmt("ls", small, "--holes").stdout == "d\tit failed\n"
    assert hsfmt.json("ls", small, "--holes")["holes"] == [{"id": "d", "reason": "it failed"}]


def test_ls_keeps_to_one_line_a_sample(hsfmt, tmp_path, write):
    write(tmp_path / "d", {"two\nlines\x1b[31m": None, "é 🙂": None})
    assert hsfmt("ls", tmp_path / "d").stdout.splitlines()[0].endswith("two\\nlines\\x1b[31m")
    assert hsfmt.json("ls", tmp_path / "d")["samples"][0]["id"] == "two\nlines\x1b[31m"


def test_ls_of_what_was_never_sealed(hsfmt, tmp_path, write):
    write(tmp_path / "d", {"a": None}, seal=False)
    result = hsfmt("ls", tmp_path / "d")
    assert "never sealed" in result.stderr
    assert result.stdout.endswith("  a\n")


def test_ls_json_is_valid_when_it_breaks_on_the_way(hsfmt, small):
    (index,) = (small / layout.INDEXES).iterdir()
    index.write_bytes(index.read_bytes()[:-1])
    document = hsfmt.json("ls", small, "-l", code=1)
    assert (document["samples"], len(document["error"])) == ([], 1)


# --- seal ------------------------------------------------------------------------------------------------------------


def test_seal(hsfmt, tmp_path, write):
    write(tmp_path / "d", {"a": None, "b": None}, seal=False)
    document = hsfmt.json("seal", tmp_path / "d", "--expect", 2)
    assert (document["changed"], document["counts"]["samples"]) == (True, 2)
    assert hsfmt.json("seal", tmp_path / "d")["changed"] is False
    assert "already sealed" in hsfmt("seal", tmp_path / "d").stdout


@pytest.mark.parametrize("text", ["a\nb\n", '["a", "b"]', "b\r\na"], ids=repr)
def test_seal_expecting_ids(hsfmt, tmp_path, write, text):
    write(tmp_path / "d", {"a": None, "b": None}, seal=False)
    (tmp_path / "ids").write_text(text)
    hsfmt("seal", tmp_path / "d", "--expect-ids", tmp_path / "ids")


def test_seal_that_expects_others(hsfmt, tmp_path, write):
    write(tmp_path / "d", {"a": None, "b": None}, seal=False)
    hsfmt("seal", tmp_path / "d", "--expect", 3, code=1)
    (tmp_path / "ids").write_text("a\nc\n")
    error = hsfmt.json("seal", tmp_path / "d", "--expect-ids", tmp_path / "ids", code=1)["error"]
    assert [problem["samples"] for problem in error] == [["c"], ["b"]]
    (tmp_path / "ids").write_text("")
    hsfmt("seal", tmp_path / "d", "--expect-ids", tmp_path / "ids", code=2)
    (tmp_path / "ids").write_text("[1]")
    hsfmt("seal", tmp_path / "d", "--expect-ids", tmp_path / "ids", code=2)
    hsfmt("seal", tmp_path / "d", "--expect", 2, "--expect-ids", tmp_path / "ids", code=2)
    assert hsfmt.json("info", tmp_path / "d")["sealed"] is None


def test_seal_where_a_part_is_gone(hsfmt, small, write):
    write(small, {"e": None, "f": None})
    part = next(row["part"] for row in hsfmt.json("ls", small, "-l")["samples"] if row["id"] == "e")
    (small / layout.manifest_path(part)).unlink()
    write(small, {"g": None}, seal=False)
    assert "--drop-missing" in hsfmt("seal", small, code=1).stderr
    assert len(hsfmt.json("ls", small)["samples"]) == 5, "the snapshot is as it was"
    document = hsfmt.json("seal", small, "--drop-missing")
    assert (document["samples_before"], document["counts"]["samples"]) == (5, 4)
    assert part in document["warnings"][0]
    assert hsfmt.json("seal", small)["warnings"] == []


def test_seal_says_how_many_samples_less(hsfmt, small, write):
    write(small, {"e": None, "f": None})
    part = next(row["part"] for row in hsfmt.json("ls", small, "-l")["samples"] if row["id"] == "e")
    (small / layout.manifest_path(part)).unlink()
    result = hsfmt("seal", small, "--drop-missing")
    assert "2 samples fewer than in the snapshot before" in result.stdout
    assert part in result.stderr
    assert "fewer" not in hsfmt("seal", small).stdout


def test_seal_says_that_ids_have_two_contents(hsfmt, small, write, tmp_path):
    write(tmp_path / "other", {"a": None, "b": [1, 1]})
    for folder in ("parts", "hsfmt/index", "hsfmt/manifests"):
        for path in (tmp_path / "other" / folder).iterdir():
            if path.name != "zarr.json":
                path.rename(small / folder / path.name)
    result = hsfmt("seal", small)
    assert "warning: " in result.stderr
    assert "different content" in result.stderr
    assert len(hsfmt.json("seal", small)["warnings"]) == 1


def test_seal_of_nothing(hsfmt, tmp_path, write):
    write(tmp_path / "d", {})
    assert "committed parts" in hsfmt("seal", tmp_path / "d", code=3).stderr


# --- verify ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["quick", "complete", "full"])
def test_verify_what_is_fine(hsfmt, dataset, level):
    text = hsfmt("verify", dataset, "--level", level).stdout
    assert text.startswith("fine: no problems")
    report = hsfmt.json("verify", dataset, "--level", level)
    assert (report["ok"], report["level"], report["problems"]) == (True, level, [])


def test_verify_is_complete_by_default(hsfmt, dataset):
    assert hsfmt.json("verify", dataset)["level"] == "complete"


def test_verify_finds_damage(hsfmt, dataset):
    (shard,) = dataset.glob("parts/*/hidden_states/c/0/0/0")
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    (dataset / "stray.bin").touch()
    hsfmt("verify", dataset, "--level", "quick")
    result = hsfmt("verify", dataset, code=1)
    assert "DAMAGED: 2 errors" in result.stdout
    for words in ("hidden_states/c/0/0/0", "stray.bin"):
        assert words in result.stdout
    report = hsfmt.json("verify", dataset, code=1)
    assert {problem["code"] for problem in report["problems"]} == {"digest", "unexpected"}


def test_verify_takes_what_is_in_flight(hsfmt, dataset):
    (dataset / "parts" / "20260101t000000z-0000000000000000").mkdir()
    (dataset / "parts" / "20260101t000000z-0000000000000000" / "zarr.json").touch()
    text = hsfmt("verify", dataset).stdout
    assert "info[uncommitted]" in text
    assert "fine: 1 info" in text


# --- cat -------------------------------------------------------------------------------------------------------------


def test_cat(hsfmt, small):
    document = hsfmt.json("cat", small, "c")
    assert (document["index"], document["shape"], document["first_ids"]) == (2, [3, 2, 8], [0, 1, 2])
    assert [layer["hf_hidden_states_index"] for layer in document["layers"]] == [0, 3]
    assert hsfmt.json("cat", small, "--index", -1) == document
    text = hsfmt("cat", small, "c", "--layers", "3").stdout
    assert "3 x 1 x 8" in text
    assert "mean |x|" in text


def test_cat_figures(hsfmt, tmp_path):
    values = np.array([[[1, -3, 0, np.nan]], [[2, np.inf, 0, 0]]], np.float32).astype(ml_dtypes.bfloat16)
    settings = {"layers": [1], "hidden_size": 4, "final_norm": "pre", "nonfinite": "keep"}
    with package.DatasetWriter(str(tmp_path / "d"), **settings) as writer:
        writer.write("a", [1, 2], values)
    (layer,) = hsfmt.json("cat", tmp_path / "d", "a")["layers"]
    assert (layer["nonfinite"], layer["zeros"], layer["max_abs"]) == (2, 3, 3.0)
    assert layer["mean_abs"] == 1.0
    assert layer["rms"] == pytest.approx((14 / 6) ** 0.5)


def test_cat_of_scaled_states_says_so(hsfmt, data_dir, small, tmp_path):
    hsfmt("convert", data_dir / "speculators" / "0.9.0_fp8", tmp_path / "d", "--layer-ids", "2,4,5,8")
    assert "not multiplied by their scales" in hsfmt("cat", tmp_path / "d", "--index", 0).stdout
    assert hsfmt.json("cat", tmp_path / "d", "--index", 0)["unscaled"] is True
    assert "scales" not in hsfmt("cat", small, "b").stdout


def test_cat_of_what_is_not_there(hsfmt, small):
    assert "hsfmt ls" in hsfmt("cat", small, "z", code=3).stderr
    hsfmt("cat", small, "--index", 3, code=3)
    hsfmt("cat", small, "a", "--layers", "2", code=2)


def test_cat_npz(hsfmt, small, tmp_path):
    out = tmp_path / "b.npz"
    document = hsfmt.json("cat", small, "b", "-o", out)
    assert document == {"id": "b", "index": 1, "nbytes": out.stat().st_size, "path": str(out)}
    with np.load(out) as data:
        assert str(data["hidden_states.dtype"]) == "bfloat16"
        states = data["hidden_states"].view(ml_dtypes.bfloat16)
        assert states.astype(np.float32).ravel().tolist() == [i - 100 for i in range(32)]
        assert (data["input_ids"].dtype, data["loss_mask"].dtype) == (np.int64, np.bool_)
        assert json.loads(str(data["hsfmt"]))["layers"] == [0, 3]


def test_cat_replaces_no_file_unasked(hsfmt, small, tmp_path):
    out = tmp_path / "b.npz"
    out.write_text("precious")
    assert "--force" in hsfmt("cat", small, "b", "-o", out, code=2).stderr
    assert out.read_text() == "precious"
    hsfmt("cat", small, "b", "-o", out, "--force")
    assert out.read_bytes()[:2] == b"PK"
    hsfmt("cat", small, "b", "-o", tmp_path / "b.txt", code=2)
    hsfmt("cat", small, "b", "-o", tmp_path / "none" / "b.npz", code=3)
    hsfmt("cat", small, "b", "-o", tmp_path, code=2)
    hsfmt("cat", small, "b", "-o", tmp_path / "b.npz", "--format", "pt", code=2)


@pytest.mark.parametrize("sample_id", ["../../x", "/etc/passwd", "a/b", "x" * 4000, ".hidden", "é\n"])
def test_cat_into_a_folder_stays_in_it(hsfmt, tmp_path, write, sample_id):
    write(tmp_path / "d", {sample_id: None})
    (tmp_path / "out").mkdir()
    hsfmt("cat", tmp_path / "d", sample_id, "-o", tmp_path / "out", "--format", "npz")
    (path,) = (tmp_path / "out").iterdir()
    assert path.suffix == ".npz"
    assert not path.name.startswith(".")
    assert {path.name for path in tmp_path.iterdir()} == {"d", "out"}


def test_cat_reads_what_was_never_sealed(hsfmt, tmp_path, write):
    write(tmp_path / "d", {"a": None}, seal=False)
    assert hsfmt.json("cat", tmp_path / "d", "a")["tokens"] == 1


def test_cat_of_a_number_that_is_no_id(hsfmt, small):
    assert "--index 1 is the sample of that number" in hsfmt("cat", small, "1", code=3).stderr
    for other in ("3", "e", "1" * 5000):
        assert "--index" not in hsfmt("cat", small, other, code=3).stderr


def test_cat_of_a_damaged_sample(hsfmt, small):
    (shard,) = small.glob("parts/*/hidden_states/c/0/0/0")
    data = bytearray(shard.read_bytes())
    data[20] ^= 1
    shard.write_bytes(data)
    error = hsfmt.json("cat", small, "b", code=1)["error"]
    assert error[0]["samples"] == ["b"]


# --- figures ---------------------------------------------------------------------------------------------------------


def test_units():
    assert [units.nbytes(n) for n in (0, 1023, 1024, 924 << 30)] == ["0 bytes", "1023 bytes", "1.0 KiB", "924.0 GiB"]
    assert [units.seconds(n) for n in (0.04, 9.96, 59.6, 125, 4320)] == [
        "0.0 s", "10.0 s", "1 min 0 s", "2 min 5 s", "1 h 12 min",
    ]  # fmt: skip
    assert units.aligned([("a", "1\n2"), ("long", "3")], " ") == " a     1\n       2\n long  3"


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1", 1), ("32GiB", 32 << 30), ("1.5 kb", 1500), ("2M", 2 << 20), ("7B", 7)]
)
def test_sizes(text, nbytes):
    from hsfmt.cli.options import size

    assert size(None, None, text) == nbytes


@pytest.mark.parametrize(("given", "meant"), [("4", "4GiB"), ("2000", "2000MiB"), ("1048575", "1048575MiB")])
def test_a_part_size_without_a_unit_is_no_number_of_bytes(hsfmt, given, meant):
    assert f"did you mean {meant}?" in hsfmt("convert", "x", "y", "--part-size", given, code=2).stderr


@pytest.mark.parametrize("given", ["6KiB", "4B", "1048576", "4.5 GiB"])
def test_part_sizes_that_are_meant(hsfmt, tmp_path, given):
    assert "part-size" not in hsfmt("convert", tmp_path / "none", tmp_path / "d", "--part-size", given, code=3).stderr


def test_a_pad_id_goes_with_trim_padding(hsfmt, tmp_path):
    words = ["convert", tmp_path / "none", tmp_path / "d", "--pad-id", "0"]
    assert "goes with --trim-padding" in hsfmt(*words, code=2).stderr
    assert "pad-id" not in hsfmt(*words, "--trim-padding", code=3).stderr


def test_an_attachment_that_is_not_there_is_named_by_the_option(hsfmt, small):
    stderr = hsfmt("seal", small, "--drop-attachment", "zz", code=2).stderr
    assert stderr.startswith("error: --drop-attachment: expected names of attachments")


def test_a_configuration_of_specforge_that_is_not_there(hsfmt, tmp_path):
    for path, got in ((tmp_path / "nope.yaml", "no such file"), (tmp_path, "a folder")):
        stderr = hsfmt("specforge-train", "-c", path, "training.seed=1", code=3).stderr
        assert stderr.startswith(f"error: --config {path}: expected SpecForge's YAML or JSON configuration, got {got}")
        assert stderr.count("\n") == 1


@pytest.mark.parametrize("word", ["training.seed", "=1"])
def test_an_override_of_specforge_that_is_none(hsfmt, tmp_path, word):
    (tmp_path / "run.yaml").write_text("run_id: a\n")
    stderr = hsfmt("specforge-train", "-c", tmp_path / "run.yaml", "output_dir=b", word, code=2).stderr
    assert f"expected SECTION.FIELD=VALUE, got {word!r}" in stderr
