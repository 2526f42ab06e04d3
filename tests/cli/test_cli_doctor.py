"""`hsfmt doctor`: what a folder holds and what convert would do, held to what convert then does."""

import json
import shlex
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

LAYERS = "2,4,5,8"
needs_torch = pytest.mark.torch


@pytest.fixture
def folder(vllm, tmp_path) -> Path:
    """A copy of the real vLLM folder: 8 samples of 1 to 301 tokens."""
    return Path(shutil.copytree(vllm, tmp_path / "source"))


def data_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_a_good_folder(hsfmt, vllm):
    facts = hsfmt.json("doctor", vllm, "--layer-ids", LAYERS)
    assert facts["source"]["format"] == "vllm"
    assert (facts["layers"], facts["final_norm"]) == ([2, 4, 5, 8], "pre")
    assert (facts["dtype"], facts["hidden_size"], facts["n_layers"]) == ("bfloat16", 128, 4)
    assert facts["lengths"] == {"max": 301, "median": 25, "min": 1, "samples": 8, "total": 537}
    assert (facts["items"], facts["items_read"]) == (8, 8)
    assert facts["masks"] == {"all_one": 0, "all_zero": 0, "given": 0, "samples": 8, "supervised_share": None}
    empty = ("absent", "duplicates", "missing", "nonfinite", "padding", "problems", "strays")
    assert {name: facts[name] for name in empty} == {name: [] for name in empty}
    assert facts["exit_code"] == 0
    assert facts["convert"].startswith("convert 8 samples")


def test_the_command_that_it_names_converts(hsfmt, vllm, tmp_path):
    facts = hsfmt.json("doctor", vllm, "--layer-ids", LAYERS)
    words = shlex.split(facts["command"].replace("DST", shlex.quote(str(tmp_path / "d"))))
    assert words[0] == "hsfmt"
    report = hsfmt.json(*words[1:])
    assert report["counts"]["sample"] == facts["items"]
    assert report["written"]["tokens"] == facts["lengths"]["total"]
    assert report["header"]["final_norm"] == facts["final_norm"]
    assert report["header"]["layers"] == facts["layers"]


def test_what_the_files_do_not_record_is_a_placeholder(hsfmt, vllm):
    result = hsfmt("doctor", vllm)
    assert "HF layer ids NOT RECORDED" in result.stdout
    assert f"hsfmt convert {vllm} DST --from vllm --layer-ids IDS" in result.stdout
    assert "eagle_aux_hidden_state_layer_ids" in result.stdout
    assert "final norm  pre" in result.stdout
    facts = hsfmt.json("doctor", vllm)
    assert [entry["option"] for entry in facts["missing"]] == ["--layer-ids IDS"]


def test_options_that_contradict_the_files_are_refused(hsfmt, vllm):
    assert "4 ids" not in hsfmt("doctor", vllm, "--layer-ids", LAYERS).stdout
    assert "one for each state" in hsfmt("doctor", vllm, "--layer-ids", "2,4", code=2).stderr
    assert "pre" in hsfmt("doctor", vllm, "--final-norm", "post", code=2).stderr


@needs_torch
def test_layer_ids_and_norm_that_the_user_gave_are_not_the_formats(hsfmt, data_dir, tmp_path):
    text = hsfmt("doctor", data_dir / "specforge" / "v020_eagle3_bs1", "--layer-ids", LAYERS).stdout
    assert "HF layer ids 2,4,5,8, by --layer-ids\n" in text
    np.savez(tmp_path / "a.npz", input_ids=np.arange(5), hidden_states=np.ones((5, 2, 4), np.float32))
    text = hsfmt("doctor", tmp_path, "--from", "npz", "--layer-ids", "1,2", "--final-norm", "pre").stdout
    assert "HF layer ids 1,2, by --layer-ids\n" in text
    assert "pre: as --final-norm says" in text


def test_damage_is_found_and_named(hsfmt, folder):
    first, second, third = data_files(folder)[:3]
    first.write_bytes(first.read_bytes()[:-100])
    second.write_bytes(b"<!DOCTYPE html><title>404</title>")
    facts = hsfmt.json("doctor", folder, "--layer-ids", LAYERS, code=1)
    assert {entry["file"] for entry in facts["problems"]} == {first.name, second.name}
    assert "web page" in str(facts["problems"])
    assert facts["exit_code"] == 1
    assert "stop at the first of 2 files" in facts["convert"]
    assert third.name not in str(facts["problems"])
    text = hsfmt("doctor", folder, "--layer-ids", LAYERS, code=1).stdout
    assert "damaged (2)" in text
    assert "--on-bad hole" in text


def test_nan_is_damage(hsfmt, folder):
    path = max(data_files(folder), key=lambda file: file.stat().st_size)
    data = bytearray(path.read_bytes())
    (size,) = struct.unpack_from("<Q", data)
    start = json.loads(data[8 : 8 + size])["hidden_states"]["data_offsets"][0]
    data[8 + size + start : 8 + size + start + 2] = b"\xc0\x7f"
    path.write_bytes(data)
    facts = hsfmt.json("doctor", folder, code=1)
    assert facts["nonfinite"] == [{"file": path.name, "values": 1}]
    assert hsfmt.json("convert", folder, folder.parent / "d", "--layer-ids", LAYERS, code=1)["exit_code"] == 1


def test_a_storage_that_fails_is_no_damage(hsfmt, folder, monkeypatch):
    from hsfmt.readers.sources.vllm import VllmSource

    def fail(self, item):
        raise OSError(5, "Input/output error", item.key)

    monkeypatch.setattr(VllmSource, "_load", fail)
    facts = hsfmt.json("doctor", folder, code=3)
    assert len(facts["problems"]) == 8
    assert "Input/output error" in str(facts["problems"])
    assert facts["lengths"]["total"] == 537, "by the files' heads"


def test_a_sample_of_files_is_read_unless_all_are_asked_for(hsfmt, folder, monkeypatch):
    from hsfmt.cli import examination

    monkeypatch.setattr(examination, "SAMPLE_ITEMS", 3)
    facts = hsfmt.json("doctor", folder)
    assert (facts["items"], facts["items_read"]) == (8, 3)
    assert facts["lengths"]["samples"] == 8, "the files' heads say how long all of them are"
    assert "--full" in hsfmt("doctor", folder).stdout
    assert hsfmt.json("doctor", folder, "--full")["items_read"] == 8


def test_few_large_files_bound_what_is_read(hsfmt, folder, monkeypatch):
    from hsfmt.cli import examination

    monkeypatch.setattr(examination, "SAMPLE_NBYTES", 1)
    assert hsfmt.json("doctor", folder)["items_read"] == examination.LEAST_ITEMS


def test_equal_contents_under_two_names(hsfmt, folder):
    longest = max(data_files(folder), key=lambda file: file.stat().st_size)
    shutil.copy(longest, folder / "again.safetensors")
    facts = hsfmt.json("doctor", folder)
    assert [sorted(names) for names in facts["duplicates"]] == [sorted(["again.safetensors", longest.name])]
    assert "the same content (1)" in hsfmt("doctor", folder).stdout


@needs_torch
def test_what_belongs_to_the_dataset_as_a_whole(hsfmt, data_dir, tmp_path):
    source = Path(shutil.copytree(data_dir / "speculators" / "0.9.0", tmp_path / "source"))
    facts = hsfmt.json("doctor", source)
    assert facts["attachments"] == ["d2t-64", "t2d-64", "token_freq"]
    path = source / "token_freq.pt"
    path.write_bytes(path.read_bytes()[:-40])
    facts = hsfmt.json("doctor", source, "--layer-ids", LAYERS, code=1)
    assert [entry["file"] for entry in facts["problems"]] == ["token_freq.pt"]
    assert facts["convert"].startswith("stop")
    hsfmt("convert", source, tmp_path / "d", "--layer-ids", LAYERS, code=1)


def test_strays_are_listed(hsfmt, folder):
    (folder / "notes.txt").write_text("hello")
    facts = hsfmt.json("doctor", folder)
    assert [stray["path"] for stray in facts["strays"]] == ["notes.txt"]


def test_nothing_is_written(hsfmt, folder):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    hsfmt("doctor", folder, "--full")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert list(folder.parent.iterdir()) == [folder]


def test_the_size_is_that_of_the_dataset(hsfmt, vllm, tmp_path):
    facts = hsfmt.json("doctor", vllm, "--layer-ids", LAYERS)
    report = hsfmt.json("convert", vllm, tmp_path / "d", "--layer-ids", LAYERS)
    assert facts["estimate"]["exact_lengths"]
    assert facts["estimate"]["states_nbytes"] == report["written"]["raw_nbytes"]
    assert facts["estimate"]["tokens"] == 537


@pytest.mark.parametrize("what", ["nothing", "dataset", "empty"])
def test_no_folder_of_a_source(hsfmt, dataset, tmp_path, what):
    (tmp_path / "empty").mkdir()
    path, code = {"nothing": (tmp_path / "no", 3), "dataset": (dataset, 2), "empty": (tmp_path / "empty", 3)}[what]
    result = hsfmt("doctor", path, code=code)
    assert "an hsfmt dataset already" in result.stderr or what != "dataset"
    assert hsfmt.json("doctor", path, code=code)["exit_code"] == code
    assert ("--delete-source` emptied it" in result.stderr) == (what == "empty")


def test_a_config_that_is_not_there_is_no_empty_source(hsfmt, vllm, tmp_path):
    result = hsfmt("doctor", vllm, "--model-config", tmp_path / "no.json", code=3)
    assert "no.json" in result.stderr
    assert "--delete-source" not in result.stderr


@needs_torch
def test_several_programs_may_have_written_it(hsfmt, data_dir):
    source = data_dir / "modelopt" / "hf_answer_only"
    facts = hsfmt.json("doctor", source, code=2)
    commands = [candidate["command"] for candidate in facts["candidates"]]
    assert any("--from modelopt-hf" in command for command in commands)
    assert any("--from modelopt-vllm" in command for command in commands)
    assert all(command.startswith(f"hsfmt convert {source} DST --from ") for command in commands)
    evidence = {candidate["what"]: candidate["evidence"] for candidate in facts["candidates"]}
    assert "aux_hidden_states [17, 192]" in evidence["to read as modelopt-hf"]
    assert facts["exit_code"] == 2
    assert facts["error"]
    result = hsfmt("doctor", source, code=2)
    assert all(command in result.stdout for command in commands)
    chosen = hsfmt.json("doctor", source, "--from", "modelopt-hf", "--layer-ids", LAYERS)
    assert (chosen["final_norm"], chosen["layers"]) == ("post", [2, 4, 5, 8])


@needs_torch
def test_candidates_keep_what_was_given(hsfmt, data_dir):
    source = data_dir / "modelopt" / "hf_answer_only"
    facts = hsfmt.json("doctor", source, "--layer-ids", LAYERS, "--final-norm", "post", code=2)
    start = f"hsfmt convert {source} DST --from "
    assert [candidate["command"].removeprefix(start) for candidate in facts["candidates"]] == [
        "modelopt-hf --layer-ids 2,4,5,8 --final-norm post",
        "modelopt-vllm --layer-ids 2,4,5,8 --final-norm post",
        "pt --map aux=KEY,last=KEY --layer-ids 2,4,5,8 --final-norm post",
    ]


@needs_torch
def test_a_width_that_only_the_user_knows(hsfmt, data_dir):
    source = data_dir / "specforge" / "v020_dflash"
    facts = hsfmt.json("doctor", source, code=2)
    assert facts["source"]["format"] == "specforge-dflash"
    assert facts["items"] > 0
    assert "--hidden-size" in json.dumps(facts["error"])
    result = hsfmt("doctor", source, code=2)
    assert "specforge-dflash" in result.stdout
    assert "--hidden-size" in result.stderr
    start = f"hsfmt convert {source} DST --from specforge-dflash"
    assert result.stdout.endswith(f"\n  {start} --hidden-size N --layer-ids IDS\n")
    assert facts["command"] == f"{start} --hidden-size N --layer-ids IDS"
    assert "unreadable" not in result.stdout
    assert "not read" not in result.stdout
    given = hsfmt.json("doctor", source, "--layer-ids", "2,3,4,5,8", code=2)
    assert given["command"] == f"{start} --layer-ids 2,3,4,5,8 --hidden-size N"
    facts = hsfmt.json("doctor", source, "--hidden-size", 64)
    assert (facts["n_layers"], facts["final_norm"]) == (5, "unknown")
    assert "--hidden-size 64" in facts["command"]


@needs_torch
def test_masks_and_padding(hsfmt, data_dir, tmp_path):
    source = data_dir / "specforge" / "v020_eagle3_bs4_padded_droplast"
    facts = hsfmt.json("doctor", source)
    assert facts["masks"]["given"] == facts["masks"]["samples"] == 2
    assert 0 < facts["masks"]["supervised_share"] < 0.2
    assert [entry["tokens"] for entry in facts["padding"]] == [270, 226]
    report = hsfmt.json("convert", source, tmp_path / "d", "--layer-ids", LAYERS, "--trim-padding")
    assert report["written"]["trimmed_tokens"] == 270 + 226
    assert report["written"]["tokens"] == facts["lengths"]["total"] - 270 - 226


# Each folder of tests/data/adversarial, with what doctor says of it that is not empty, and the exit code.
FAULTS = {
    "truncated_ckpt": (1, {"problems": ["data_2.ckpt"]}),
    "bitflip_tensor_data": (1, {"problems": ["data_2.ckpt"]}),
    "both_ckpt_and_gz": (0, {"notes": "duplicate"}),
    "lexical_order": (0, {"notes": "holes, 7 without a file"}),
    "zero_assistant_tokens": (0, {}),
    "length_mismatch": (1, {"problems": ["data_0.ckpt"]}),
    "nan_inf_rows": (1, {"nonfinite": ["data_0.ckpt", "data_1.ckpt"]}),
    "mixed_dtypes": (1, {"problems": ["data_1.ckpt", "data_2.ckpt"], "mixture": "the folder mixes kinds"}),
    "layer_count_mismatch": (1, {"problems": ["data_1.ckpt"]}),
    "pickle_reduce_call": (1, {}),
    "padded_tail": (0, {"padding": ["data_0.ckpt"]}),
}


@needs_torch
@pytest.mark.parametrize("name", sorted(FAULTS))
def test_faults_of_every_kind(hsfmt, data_dir, name):
    code, expected = FAULTS[name]
    facts = hsfmt.json("doctor", data_dir / "adversarial" / name, code=code)
    assert facts["exit_code"] == code
    for key, value in expected.items():
        found = facts[key]
        if isinstance(value, list):
            assert [entry["file"] for entry in found] == value
        else:
            assert value in " ".join(found)


@needs_torch
def test_no_pickle_is_executed(hsfmt, data_dir):
    folder = data_dir / "adversarial" / "pickle_reduce_call"
    for source in (folder, next(folder.glob("*.*"))):
        text = json.dumps(hsfmt.json("doctor", source, code=1))
        assert "executing" in text or "not executed" in text


@needs_torch
def test_a_mask_of_zeros_is_counted(hsfmt, data_dir):
    facts = hsfmt.json("doctor", data_dir / "adversarial" / "zero_assistant_tokens")
    assert facts["masks"]["all_zero"] == 1
    assert "1 are all 0" in hsfmt("doctor", data_dir / "adversarial" / "zero_assistant_tokens").stdout


def test_a_single_safetensors_file(hsfmt, vllm):
    path = data_files(vllm)[0]
    facts = hsfmt.json("doctor", path)
    assert facts["what"] == "a safetensors file"
    assert "hidden_states bfloat16" in facts["holds"]
    assert (facts["folder"], list(facts["sources"])) == (str(vllm), ["vllm"])
    assert facts["command"] == f"hsfmt doctor {vllm}"
    assert "a single file" in hsfmt("doctor", path).stdout


def test_a_single_damaged_file(hsfmt, folder):
    path = data_files(folder)[0]
    path.write_bytes(path.read_bytes()[:-1])
    assert len(hsfmt.json("doctor", path, code=1)["problems"]) == 1
    path.write_bytes(b"")
    assert "an empty file" in hsfmt("doctor", path, code=1).stdout


@needs_torch
@pytest.mark.parametrize(
    ("file", "folder", "sources"),
    [
        ("specforge/v020_eagle3_gz/rows_0-2000/data_0.ckpt.gz", "specforge/v020_eagle3_gz", ["specforge-eagle3"]),
        ("speculators/0.9.0/hidden_states/hs_0.safetensors", "speculators/0.9.0", ["speculators"]),
        ("modelopt/hf_answer_only/conv-0001.pt", "modelopt/hf_answer_only", ["modelopt-hf", "modelopt-vllm"]),
    ],
)
def test_the_folder_of_a_single_file(hsfmt, data_dir, file, folder, sources):
    facts = hsfmt.json("doctor", data_dir / file)
    assert facts["folder"] == str(data_dir / folder)
    assert list(facts["sources"]) == sources
    assert facts["holds"]


def test_a_file_of_another_kind(hsfmt, tmp_path):
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1")
    facts = hsfmt.json("doctor", path)
    assert facts["what"] == "a file of a kind that no source reads"
    assert facts["sources"] == {}


def test_npz_files(hsfmt, tmp_path):
    np.savez(tmp_path / "a.npz", input_ids=np.arange(5), hidden_states=np.ones((5, 2, 4), np.float32))
    facts = hsfmt.json("doctor", tmp_path / "a.npz")
    assert facts["what"] == "an archive of NumPy arrays"
    assert "hidden_states float32 [5, 2, 4]" in facts["holds"]


@pytest.mark.parametrize("options", [[], ["--from", "vllm"]])
def test_a_url_is_refused_as_one(hsfmt, options):
    stderr = hsfmt("doctor", "s3://bucket/dump", *options, code=2).stderr
    assert "error: s3://bucket/dump: expected a local folder of files, got a URL — copy it here first" in stderr
