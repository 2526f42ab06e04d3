"""Real folders as datasets, exported to the format they came from: the same files, bit by bit."""

import gzip

import numpy as np
import pytest
import torch
from exporting import convert, export, job_of, stored

from hsfmt.readers.sources import SourceOptions, find_source

LAYERS = (2, 4, 5, 8)
# Folder, source, target, layers, options, and keys that our file has beside the original's.
CASES = [
    ("specforge/v020_eagle3_bs1", "specforge-eagle3", "specforge-eagle3", LAYERS, {}, set()),
    ("specforge/v020_eagle3_bs4_padded_droplast", "specforge-eagle3", "specforge-eagle3", LAYERS, {}, set()),
    ("specforge/v020_eagle3_gz", "specforge-eagle3", "specforge-eagle3", LAYERS, {"compression": "gzip"}, set()),
    # A conversation in them has no assistant token.
    ("specforge/v020_dflash", "specforge-dflash", "specforge-dflash", (2, 3, 4, 5, 6), {"sparse_masks": "keep"}, set()),
    (
        "specforge/v020_dspark", "specforge-dspark", "specforge-dspark", (2, 3, 4, 5, 6, 8), {"sparse_masks": "keep"},
        set(),
    ),
    ("modelopt/hf_answer_only", "modelopt-hf", "modelopt", LAYERS, {}, set()),
    ("modelopt/trtllm_dump", "modelopt-trtllm", "modelopt", LAYERS, {}, set()),
    # Its files do not say that the last state is before the norm, and ours do.
    ("modelopt/vllm_dump", "modelopt-vllm", "modelopt", LAYERS, {}, {"hidden_states_prenorm"}),
    ("angelslim/eagle3", "angelslim-eagle3", "angelslim-eagle3", LAYERS, {"rows": "3"}, set()),
    ("eagle_ge", "eagle-ge", "eagle-ge", (8,), {}, set()),
    ("speculators/0.4.0/data", "speculators-pt", "speculators-pt", (3, 5, 6, 8), {}, set()),
    ("speculators/0.3.0/data", "speculators-pt", "speculators-pt", (3, 5, 6, 8), {}, set()),
]  # fmt: skip


def load(path):
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        return torch.load(file, weights_only=True)


def assert_equal(ours, theirs):
    """The same structure, dtypes, shapes and bits; ours contiguous and in storages of their own."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_equal(one, other)
    elif torch.is_tensor(theirs):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        width = {1: torch.uint8, 2: torch.int16, 8: torch.int64}[ours.element_size()]
        assert torch.equal(ours.view(width), theirs.contiguous().view(width))
        assert ours.is_contiguous()
        assert ours.untyped_storage().nbytes() == ours.numel() * ours.element_size()
    else:
        assert ours == theirs


@pytest.mark.parametrize("case", CASES, ids=[case[0].replace("/", "-") for case in CASES])
def test_a_real_folder_comes_back(data_dir, tmp_path, case):
    folder, source, name, layers, options, more = case
    original = data_dir / folder
    items = find_source(original, source, options=SourceOptions(layer_ids=layers)).items
    width = {"hidden_size": 64} if name == "specforge-dflash" else {}  # which its files don't say
    reader = convert(original, tmp_path / "dataset", source, layers, **width)
    samples = stored(reader)
    job = job_of(reader, tmp_path / "out", options=options, masks_given=source != "modelopt-trtllm")
    target = export(name, job, samples)
    assert [sample.sample_id for sample in samples] == [item.sample_id for item in items]
    for unit, item in zip(target.units(), items, strict=True):
        ours, theirs = load(tmp_path / "out" / unit.paths[0]), load(original / item.key)
        assert set(ours) - set(theirs) == more
        for key, value in theirs.items():
            assert_equal(ours[key], value)
        if name in ("modelopt", "speculators-pt") or name.startswith("specforge"):
            assert unit.paths[0] == item.key


@pytest.mark.parametrize(
    ("folder", "name"), [("specforge/v020_eagle3_bs1", "specforge-eagle3"), ("angelslim/eagle3", "angelslim-eagle3")]
)
def test_a_real_vocabulary_comes_back(data_dir, tmp_path, folder, name):
    (original,) = (data_dir / folder).rglob("vocab_mapping.pt")
    tables = load(original)
    reader = convert(data_dir / folder, tmp_path / "dataset", name, LAYERS)
    attachments = {key: table.numpy().astype(np.int64) for key, table in tables.items()}
    export(name, job_of(reader, tmp_path / "out", attachments=attachments), stored(reader))
    found = load(tmp_path / "out" / original.relative_to(data_dir / folder))
    assert set(found) == {"d2t", "t2d"}
    for key, table in tables.items():
        assert_equal(found[key], table)


def test_a_real_speculators_config_says_the_same_layers(data_dir, tmp_path):
    """What speculators' own source finds in the export: ids, lengths, norm and width as in the original."""
    original = data_dir / "speculators/0.4.0/data"
    reader = convert(original, tmp_path / "dataset", "speculators-pt", (3, 5, 6, 8))
    export("speculators-pt", job_of(reader, tmp_path / "out"), stored(reader))
    ours, theirs = (find_source(folder, "speculators-pt").meaning() for folder in (tmp_path / "out", original))
    for name in ("layers", "final_norm", "hidden_size", "dtype", "model"):
        assert getattr(ours, name) == getattr(theirs, name)
    lengths = "sample_lengths.json"
    assert (tmp_path / "out" / lengths).read_bytes() == (original / lengths).read_bytes()
