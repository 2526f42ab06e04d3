"""Every tensor of every real file comes back as its own reader gives it, with the right layers and norm."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hsfmt import HiddenStateDataset

# folder -> (flags, layers, norm)
VLLM = ("--layer-ids", "2,4,5,8")
FOLDERS = {
    "vllm/vllm032_bf16_prompt": (VLLM, [2, 4, 5, 8], "pre"),
    "vllm/vllm032_inprocess_missing_last_batch": ((*VLLM, "--on-bad", "hole"), [2, 4, 5, 8], "pre"),
    "speculators/0.9.0": (VLLM, [2, 4, 5, 8], "pre"),
    "speculators/0.9.0_fp8": (VLLM, [2, 4, 5, 8], "pre"),
    "speculators/0.6.0": (VLLM, [2, 4, 5, 8], "pre"),
    "speculators/0.4.0": ((), [3, 5, 6, 8], "pre"),
    "speculators/0.3.0": ((), [3, 5, 6, 8], "pre"),
    "speculators/0.2.0_ckpt": (("--model-config", "tests/data/tiny-llama"), [3, 5, 6, 8], "post"),
}
N_FILES = dict(zip(FOLDERS, (8, 4, 24, 24, 12, 12, 12, 6), strict=True))
STEM = {".safetensors", ".pt", ".ckpt"}


def own_reader(path: Path) -> dict[str, torch.Tensor]:
    """Ids, states [token, layer, hidden], mask and scales of a file, as the library that it belongs to reads them."""
    if path.suffix == ".safetensors":
        data = load_file(path)
        return {"input_ids": data.pop("token_ids"), **data}
    data = torch.load(path, weights_only=True)
    if "target" in data:
        n_tokens, hidden = data["target"].shape
        aux = data.pop("hidden_state").view(n_tokens, 3, hidden)
        data["hidden_states"] = torch.cat([aux, data.pop("target")[:, None]], dim=1)
    else:
        data["hidden_states"] = torch.stack(data["hidden_states"], dim=1)
    return data


def arrow_masks(folder: Path) -> list[list[int]]:
    ipc = pytest.importorskip("pyarrow.ipc")
    with ipc.open_stream(str(folder / "data-00000-of-00001.arrow")) as stream:
        return stream.read_all().column("loss_mask").to_pylist()


def samples(folder: Path) -> dict[str, Path]:
    """Sample id -> data file."""
    files = [path for path in folder.rglob("*") if path.suffix in STEM and path.name != "token_freq.pt"]
    if folder.name.startswith(("0.6", "0.9")):
        return {path.stem: path for path in files}
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in files}


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if ours.dtype == torch.float8_e4m3fn:
        return theirs.dtype == ours.dtype and torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("name", FOLDERS)
def test_every_tensor(hsfmt, repo_root, data_dir, tmp_path, monkeypatch, name):
    monkeypatch.chdir(repo_root)
    flags, layers, norm = FOLDERS[name]
    folder = data_dir / name
    hsfmt("convert", folder, tmp_path / "d", *flags)
    facts = hsfmt.json("info", tmp_path / "d")
    assert facts["header"]["layers"] == layers
    assert [layer["decoder_layer_output"] for layer in facts["layers"]] == [k - 1 for k in layers]
    assert facts["header"]["final_norm"] == norm
    assert facts["samples"] == N_FILES[name]
    hsfmt("verify", tmp_path / "d", "--level", "full")

    dataset = HiddenStateDataset(tmp_path / "d", dequantize=True if "fp8" in name else None)
    files = samples(folder)
    assert sorted(dataset.sample_ids) == sorted(files)
    masks = arrow_masks(folder) if "hs_0" in files else None
    for i, sample_id in enumerate(dataset.sample_ids):
        ours, theirs = dataset[i], own_reader(files[sample_id])
        if "hidden_states_scales" in theirs:
            scales = theirs["hidden_states_scales"]
            theirs["hidden_states"] = theirs["hidden_states"].to(torch.bfloat16) * scales.to(torch.bfloat16)
        assert same(ours["hidden_states"], theirs["hidden_states"]), sample_id
        assert same(ours["input_ids"], theirs["input_ids"].long()), sample_id
        mask = theirs.get("loss_mask", torch.ones(len(ours["input_ids"])))
        if masks is not None:
            mask = torch.tensor(masks[int(sample_id.removeprefix("hs_"))])
        assert torch.equal(ours["loss_mask"], mask.bool()), sample_id


def test_fp8_is_stored_as_it_was(hsfmt, data_dir, tmp_path):
    folder = data_dir / "speculators" / "0.9.0_fp8"
    hsfmt("convert", folder, tmp_path / "d", *VLLM)
    dataset = HiddenStateDataset(tmp_path / "d")
    for sample_id, path in samples(folder).items():
        item, theirs = dataset[dataset.index_of(sample_id)], load_file(path)
        assert same(item["hidden_states"], theirs["hidden_states"])
        assert torch.equal(item["hidden_states_scale"], theirs["hidden_states_scales"].reshape(-1))
        out = tmp_path / f"{sample_id}.safetensors"
        hsfmt("cat", tmp_path / "d", sample_id, "-o", out)
        ours = load_file(out)
        assert same(ours["hidden_states"], theirs["hidden_states"])
        assert torch.equal(ours["hidden_states_scale"], theirs["hidden_states_scales"].reshape(-1))


def test_workers_read_torch_files_too(hsfmt, data_dir, tmp_path):
    folder = data_dir / "speculators" / "0.3.0"
    one = hsfmt.json("convert", folder, tmp_path / "one")
    two = hsfmt.json("convert", folder, tmp_path / "two", "--workers", 2)
    assert one["snapshot"]["content_digest"] == two["snapshot"]["content_digest"]
    assert one["snapshot"]["counts"]["samples"] == 12


def test_the_source_names_the_model(hsfmt, data_dir, tmp_path):
    folder = data_dir / "speculators" / "0.3.0"
    assert hsfmt.json("convert", folder, tmp_path / "a", "--dry-run")["header"]["model"] == {"name": "/data/tiny-llama"}
    report = hsfmt.json("convert", folder, tmp_path / "a", "--model", "tiny/llama")
    assert report["header"]["model"] == {"name": "tiny/llama"}
    assert any("/data/tiny-llama" in warning for warning in report["warnings"])
    assert hsfmt.json("info", tmp_path / "a")["producers"][0]["producer"]["source_model"] == "/data/tiny-llama"


@pytest.mark.parametrize("flags", [("--layer-ids", "2,3,4,5"), ("--final-norm", "post")], ids=str)
def test_flags_that_contradict_the_format(hsfmt, data_dir, tmp_path, flags):
    result = hsfmt("convert", data_dir / "speculators" / "0.4.0", tmp_path / "d", *flags, code=2)
    assert "the source fixes" in result.stderr
    assert not (tmp_path / "d").exists()


def test_flags_that_agree_with_the_format(hsfmt, data_dir, tmp_path):
    flags = ("--layer-ids", "3,5,6,8", "--final-norm", "pre")
    hsfmt("convert", data_dir / "speculators" / "0.4.0", tmp_path / "d", *flags)


ADVERSARIAL = ("--from", "pt", "--layer-ids", "2,4,5,8", "--final-norm", "post")
MAP = ("--map", "input_ids=input_ids,aux=aux_hidden_state", "--map", "last=hidden_state")


def test_key_map(hsfmt, data_dir, tmp_path):
    folder = data_dir / "adversarial" / "lexical_order"
    hsfmt("convert", folder, tmp_path / "d", code=2)  # ambiguous keys: the message names the programs
    report = hsfmt.json("convert", folder, tmp_path / "d", *ADVERSARIAL, *MAP)
    assert report["counts"]["sample"] == 5
    ids = [row["id"] for row in hsfmt.json("ls", tmp_path / "d")["samples"]]
    assert ids == ["data_0", "data_1", "data_2", "data_10", "data_11"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bitflip_tensor_data", "CRC-32"),
        ("truncated_ckpt", "truncated"),
        ("length_mismatch", "17 token ids"),
        ("layer_count_mismatch", "6 layers"),
        ("mixed_dtypes", "float16"),
    ],
)
def test_adversarial_files_become_holes(hsfmt, data_dir, tmp_path, name, reason):
    folder = data_dir / "adversarial" / name
    report = hsfmt.json("convert", folder, tmp_path / "d", *ADVERSARIAL, *MAP, "--on-bad", "hole")
    assert reason in report["holes"][0]["reason"]
    assert sum(report["counts"].values()) == report["files"]["total"] == sum(1 for _ in folder.iterdir())
    hsfmt("convert", folder, tmp_path / "e", *ADVERSARIAL, *MAP, code=1)


def test_strays_beside_samples(hsfmt, data_dir, tmp_path):
    report = hsfmt.json("convert", data_dir / "adversarial" / "stray_files", tmp_path / "d", *ADVERSARIAL, *MAP)
    assert {stray["path"] for stray in report["strays"]} == {"data_9.ckpt.tmp", "optimizer.pt"}
    assert report["files"]["support"] == 1


def test_masks_without_a_supervised_token(hsfmt, data_dir, tmp_path):
    folder = data_dir / "adversarial" / "zero_assistant_tokens"
    report = hsfmt.json("convert", folder, tmp_path / "d", *ADVERSARIAL, *MAP)
    assert report["written"]["without_supervised_tokens"] == ["data_0"]
    assert any("1 sample without a supervised token: data_0" in warning for warning in report["warnings"])
    assert hsfmt.json("info", tmp_path / "d")["without_supervised_tokens"] == 1


@pytest.mark.parametrize(("value", "words"), [(0, "all 0"), (1, "all 1")])
def test_most_masks_are_the_same_throughout(hsfmt, data_dir, tmp_path, value, words):
    source = Path(shutil.copytree(data_dir / "speculators" / "0.3.0", tmp_path / "source"))
    for path in sorted(source.glob("data/data_*.pt"))[:7]:
        data = torch.load(path, weights_only=True)
        torch.save({**data, "loss_mask": torch.full_like(data["loss_mask"], value)}, path)
    report = hsfmt.json("convert", source, tmp_path / "d")
    assert any(f"7 of 12 loss masks are {words}" in warning for warning in report["warnings"])


def test_dry_run_of_torch_files_goes_by_their_sizes(hsfmt, data_dir, tmp_path):
    report = hsfmt.json("convert", data_dir / "speculators" / "0.3.0", tmp_path / "d", "--dry-run")
    estimate, raw = report["estimate"], 948 * 4 * 128 * 2
    assert estimate["exact"] is False
    assert raw <= estimate["raw_nbytes"] <= 1.2 * raw
