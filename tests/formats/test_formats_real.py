"""Every folder that a real program wrote, converted and exported to its own format: the same tensors, bit by bit.

Both ways by the commands; the files are opened as their program does it, not by a source of ours. The layout of
speculators/0.2.0_ckpt has no target, so that it is not among them.
"""

import gzip
import re
import struct
from pathlib import Path

import numpy as np
import pyarrow.ipc
import pytest
import safetensors.torch
import torch

IDS = ("--layer-ids", "2,4,5,8")
FIVE = ("--layer-ids", "2,3,4,5,6", "--hidden-size", "64")
HF, TRT = (("--from", f"modelopt-{name}", *IDS) for name in ("hf", "trtllm"))
SPARSE = ("--option", "sparse_masks=keep")  # a conversation in these has no assistant token
# Folder, flags of convert, target, flags of export, keys that our files have besides.
FOLDERS = [
    ("specforge/v020_eagle3_bs1", IDS, "specforge-eagle3", (), set()),
    ("specforge/v020_eagle3_bs4_padded_droplast", IDS, "specforge-eagle3", (), set()),
    ("specforge/v020_eagle3_gz", IDS, "specforge-eagle3", ("--option", "compression=gzip"), set()),
    ("specforge/v020_dflash", FIVE, "specforge-dflash", SPARSE, set()),
    ("specforge/v020_dspark", ("--layer-ids", "2,3,4,5,6,8"), "specforge-dspark", SPARSE, set()),
    ("modelopt/hf_answer_only", HF, "modelopt", (), set()),
    ("modelopt/trtllm_dump", TRT, "modelopt", (), set()),
    # Its files do not say that the last state is before the norm.
    ("modelopt/vllm_dump", IDS, "modelopt", (), {"hidden_states_prenorm"}),
    ("angelslim/eagle3", IDS, "angelslim-eagle3", ("--option", "rows=3"), set()),
    ("eagle_ge", ("--layer-ids", "8"), "eagle-ge", (), set()),
    ("speculators/0.4.0", (), "speculators-pt", (), set()),
    ("speculators/0.3.0", (), "speculators-pt", (), set()),
    ("speculators/0.6.0", IDS, "speculators", ("--option", "loss_mask=bool"), set()),
    ("speculators/0.9.0", IDS, "speculators", (), set()),
    ("speculators/0.9.0_fp8", IDS, "speculators-fp8", (), set()),
    ("vllm/vllm032_bf16_prompt", IDS, "vllm", (), set()),
    ("vllm/vllm032_inprocess_missing_last_batch", (*IDS, "--on-bad", "hole"), "vllm", (), set()),
]
by_folder = pytest.mark.parametrize(
    ("folder", "flags", "target", "more", "keys"), FOLDERS, ids=[folder[0].replace("/", "-") for folder in FOLDERS]
)
VOCABULARY = ("vocab_mapping.pt", "token_freq.pt")


def load(path: Path):
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        return torch.load(file, weights_only=True)


def data_files(folder: Path) -> list[Path]:
    """The files of samples, 2 before 10."""
    found = [path for path in folder.rglob("*") if re.search(r"\.(pt|ckpt|ckpt\.gz|safetensors)$", path.name)]
    found = [path for path in found if path.name not in VOCABULARY]
    return sorted(found, key=lambda path: [int(word) if word.isdigit() else word for word in words(path)])


def words(path: Path) -> list[str]:
    return re.split(r"(\d+)", path.as_posix())


def assert_equal(ours, theirs):
    """The same structure, dtypes, shapes and bits; ours contiguous."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_equal(one, other)
    elif torch.is_tensor(theirs):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(ours.reshape(-1).view(torch.uint8), theirs.contiguous().reshape(-1).view(torch.uint8))
        assert ours.is_contiguous()
    else:
        assert ours == theirs


@pytest.fixture
def there_and_back(hsfmt, data_dir, tmp_path):
    """Convert a folder and export it; the folder of the export."""

    def run(folder, flags, target, more=()):
        hsfmt("convert", data_dir / folder, tmp_path / "dataset", *flags)
        hsfmt("verify", tmp_path / "dataset", "--level", "full")
        hsfmt("export", tmp_path / "dataset", tmp_path / "out", "--to", target, *more)
        return tmp_path / "out"

    return run


@by_folder
def test_a_real_folder_comes_back(there_and_back, data_dir, folder, flags, target, more, keys):
    out, original = there_and_back(folder, flags, target, more), data_dir / folder
    ours, theirs = data_files(out), data_files(original)
    assert len(ours) == len(theirs) > 1
    for one, other in zip(ours, theirs, strict=True):
        found, wanted = load(one), load(other)
        assert set(found) - set(wanted) == keys
        for key, value in wanted.items():
            assert_equal(found[key], value)
        if one.suffix == ".safetensors":
            assert one.read_bytes() == other.read_bytes()
            assert one.relative_to(out) == other.relative_to(original)


@pytest.mark.parametrize(
    ("folder", "target", "mask"),
    [("0.6.0", "speculators", "bool"), ("0.9.0", "speculators", "int64"), ("0.9.0_fp8", "speculators-fp8", "int64")],
)
def test_the_rows_of_speculators(there_and_back, data_dir, folder, target, mask):
    out = there_and_back(f"speculators/{folder}", IDS, target, ("--option", f"loss_mask={mask}"))
    ours, theirs = (
        pyarrow.ipc.open_stream(path / "data-00000-of-00001.arrow").read_all()
        for path in (out, data_dir / "speculators" / folder)
    )
    for name in ("input_ids", "loss_mask", "seq_len"):
        assert ours.schema.field(name).type == theirs.schema.field(name).type
        assert ours[name].to_pylist() == theirs[name].to_pylist()


def test_a_real_target_cache_comes_back(there_and_back, data_dir):
    """Every byte of every sample, in the order of the index; ours all lie in one shard."""
    out = there_and_back("deepspec/target_cache", IDS, "deepspec")
    ours, theirs = (cached(folder) for folder in (out, data_dir / "deepspec" / "target_cache"))
    assert len(ours) == len(theirs) == 6
    assert ours == theirs


def cached(folder: Path) -> list[tuple[bytes, ...]]:
    """The tensors of each sample: ids, two masks, states, last state (width 64, four layers in all)."""
    found = []
    for record in struct.iter_unpack("<QIIQQQQQ", (folder / "samples.idx").read_bytes()):
        _, shard, n, *offsets = record
        data = (folder / f"shard-{shard:05d}.bin").read_bytes()
        sizes = (4 * n, n, n, 3 * 64 * 2 * n, 64 * 2 * n)
        found.append(tuple(data[at : at + size] for at, size in zip(offsets, sizes, strict=True)))
    return found


@pytest.mark.parametrize(
    ("folder", "target", "names"),
    [
        ("specforge/v020_eagle3_bs1", "specforge-eagle3", ["vocab_mapping/vocab_mapping.pt"]),
        ("angelslim/eagle3", "angelslim-eagle3", ["vocab_mapping.pt"]),
        ("speculators/0.9.0", "speculators", ["d2t-64.npy", "t2d-64.npy", "token_freq.pt"]),
    ],
)
def test_a_real_vocabulary_comes_back(there_and_back, data_dir, folder, target, names):
    out = there_and_back(folder, IDS, target)
    for name in names:
        found, wanted = (
            {"": torch.from_numpy(np.load(path))} if path.suffix == ".npy" else load(path)
            for path in (out / name, data_dir / folder / name)
        )
        assert set(found) == set(wanted)
        for key, value in wanted.items():
            assert_equal(found[key], value)
