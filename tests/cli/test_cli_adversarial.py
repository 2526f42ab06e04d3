"""Each broken or hostile folder through `hsfmt convert`: the exit code, the message and the fates (EXPECT.json)."""

import json
import posixpath
from dataclasses import dataclass, field

import pytest

pytestmark = pytest.mark.torch


@dataclass(frozen=True)
class Ending:
    """How a folder ends: exit codes under `--on-bad raise` and `hole`, then what the two reports say.

    `error` is (file, text) of the error that stops the run, `holes` are the files that become holes otherwise.
    """

    codes: tuple[int, int]
    samples: list[str]
    error: tuple[str, str] | None = None
    holes: dict[str, str] = field(default_factory=dict)
    warning: str = ""
    layers: str = "2,4,5,8"
    tokens: int | None = None
    fates: dict[str, str] = field(default_factory=dict)


def data(*numbers: int) -> list[str]:
    return [f"data_{number}" for number in numbers]


ENDINGS = {
    "truncated_ckpt": Ending(
        (1, 0), data(0, 1, 3, 4, 5), ("data_2.ckpt", "truncated"), {"data_2.ckpt": "its end is missing"}, tokens=553
    ),
    "bitflip_tensor_data": Ending(
        (1, 0), data(0, 1, 3, 4, 5), ("data_2.ckpt", "CRC-32"), {"data_2.ckpt": "CRC-32"}, tokens=553
    ),
    "both_ckpt_and_gz": Ending(
        (0, 0), data(0, 1, 2, 3, 4, 5), warning="1 file is a duplicate", fates={"data_0.ckpt.gz": "duplicate"}
    ),
    "lexical_order": Ending((0, 0), data(0, 1, 2, 10, 11), warning="holes, 7 without a file"),
    "zero_assistant_tokens": Ending((0, 0), data(0, 1), warning="1 sample without a supervised token: data_0"),
    "length_mismatch": Ending(
        (1, 0), data(1), ("data_0.ckpt", "16 tokens"), {"data_0.ckpt": "a state for each of the 17 token ids"}
    ),
    "nan_inf_rows": Ending(
        (1, 1),
        [],
        ("data_0.ckpt", "1 NaN or Inf values in 17 tokens"),
        {"data_0.ckpt": "1 NaN or Inf values", "data_1.ckpt": "192 NaN or Inf values in 61 tokens"},
    ),
    "mixed_dtypes": Ending(
        (1, 0),
        data(0),
        ("data_1.ckpt", "float16 states"),
        {"data_1.ckpt": "float16 states", "data_2.ckpt": "float32 states"},
        warning="1 file with 4 layers of width 64, float32, data_2.ckpt the first",
    ),
    "layer_count_mismatch": Ending(
        (1, 0),
        data(0),
        ("data_1.ckpt", "6 layers"),
        {"data_1.ckpt": "got 6 layers"},
        warning="1 file with 6 layers of width 64, bfloat16, data_1.ckpt the first",
    ),
    "shared_storage_strided": Ending((0, 0), ["conv-0003"], tokens=287),
    "none_value": Ending((0, 0), data(0), layers="8", tokens=17),
    "list_of_dict": Ending((0, 0), ["dp_0_1"], warning="no loss masks"),
    "pickle_reduce_call": Ending((1, 1), [], ("data_0.ckpt", "refused, not executed")),
    "stray_files": Ending(
        (0, 0), data(0, 1, 2, 3, 4, 5), warning="data_9.ckpt.tmp", fates={"data_9.ckpt.tmp": "stray"}
    ),
    "padded_tail": Ending((0, 0), data(0), tokens=287),
}


def test_every_folder_is_tested_here(data_dir):
    assert set(json.loads((data_dir / "adversarial" / "EXPECT.json").read_text())) == set(ENDINGS)


@pytest.mark.parametrize("name", ENDINGS)
def test_it_ends_as_expected(hsfmt, data_dir, tmp_path, name):
    ending, folder = ENDINGS[name], data_dir / "adversarial" / name
    stopped, held = (
        hsfmt.json("convert", folder, tmp_path / on_bad, "--layer-ids", ending.layers, "--on-bad", on_bad, code=code)
        for on_bad, code in zip(("raise", "hole"), ending.codes, strict=True)
    )
    if ending.error is not None:
        file, text = ending.error
        assert stopped["error"][0]["where"].startswith(file)
        assert text in stopped["error"][0]["got"]
        assert stopped.get("snapshot") is None
    if "counts" not in held:  # refused before anything was read as a sample
        assert not ending.samples
        assert not (tmp_path / "hole").exists()
        return
    reasons = {hole["file"]: hole["reason"] for hole in held["holes"]}
    assert reasons.keys() == ending.holes.keys()
    assert all(ending.holes[file] in reason for file, reason in reasons.items())
    for report in (stopped, held):
        assert report["files"]["total"] == len(report["fates"]) == len(list(folder.iterdir()))
        assert any(ending.warning in warning for warning in ["", *report["warnings"]])
    assert {path: held["fates"][path] for path in ending.fates} == ending.fates
    if ending.samples:
        rows = hsfmt.json("ls", tmp_path / "hole")["samples"]
        assert [row["id"] for row in rows] == ending.samples
        assert ending.tokens in (None, sum(row["tokens"] for row in rows))


def test_a_cast_takes_the_mixed_folder(hsfmt, data_dir, tmp_path):
    folder = data_dir / "adversarial" / "mixed_dtypes"
    flags = ("--layer-ids", "2,4,5,8", "--cast", "float32")
    report = hsfmt.json("convert", folder, tmp_path / "d", *flags)
    assert report["counts"]["sample"] == 3
    assert report["written"]["cast_samples"] == 2


def test_a_mask_of_zeros_can_be_left_out(hsfmt, data_dir, tmp_path):
    folder = data_dir / "adversarial" / "zero_assistant_tokens"
    report = hsfmt.json("convert", folder, tmp_path / "d", "--layer-ids", "2,4,5,8", "--min-loss-tokens", 1)
    assert [hole["id"] for hole in report["holes"]] == ["data_0"]
    assert report["written"]["too_few_loss_tokens"] == 1


def test_the_padded_tail_can_be_trimmed(hsfmt, data_dir, tmp_path):
    folder = data_dir / "adversarial" / "padded_tail"
    report = hsfmt.json("convert", folder, tmp_path / "d", "--layer-ids", "2,4,5,8", "--trim-padding")
    assert (report["written"]["tokens"], report["written"]["trimmed_tokens"]) == (17, 270)
    assert report["written"]["trimmed_samples"] == 1


def test_no_hostile_file_runs(hsfmt, data_dir, tmp_path, monkeypatch):
    """The file would have `posixpath.join` called with a word of its own."""
    called, real = [], posixpath.join
    monkeypatch.setattr(posixpath, "join", lambda *parts: called.append(parts) or real(*parts))
    hsfmt("convert", data_dir / "adversarial" / "pickle_reduce_call", tmp_path / "d", "--layer-ids", "8", code=1)
    assert called, "the trap is laid"
    assert not any("PWNED" in str(part) for parts in called for part in parts)


def test_what_specforge_padded_is_trimmed_to_its_texts(hsfmt, data_dir, tmp_path):
    """Real files: a batch of conversations, padded to the longest; those of 17 and 61 tokens came first."""
    folder = data_dir / "specforge" / "v020_eagle3_bs4_padded_droplast"
    report = hsfmt.json("convert", folder, tmp_path / "d", "--layer-ids", "2,4,5,8", "--trim-padding")
    rows = hsfmt.json("ls", tmp_path / "d")["samples"]
    assert sorted(row["tokens"] for row in rows) == [17, 61]
    assert report["written"]["trimmed_tokens"] == 2 * 287 - 17 - 61
