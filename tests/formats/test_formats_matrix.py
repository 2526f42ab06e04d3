"""Every source into a dataset, and that into every target which can represent it, and back: nothing that stays differs.

What a target can't represent it refuses by name. The table says which is which, so that neither changes unseen.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import ml_dtypes
import numpy as np
import pytest
import zarr
from foreign_folders import FOLDERS

from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.sources import SOURCE_NAMES
from hsfmt.writers.targets.registry import TARGET_NAMES

# Columns, in the order of the cells below.
TARGETS = (
    "safetensors", "npz", "zarr", "vllm", "speculators", "speculators-fp8", "speculators-pt", "modelopt",
    "specforge-eagle3", "specforge-dspark", "specforge-dflash", "angelslim-eagle3", "eagle-ge", "deepspec",
)  # fmt: skip
WITHOUT_TORCH = {"safetensors", "npz", "zarr", "vllm", "speculators", "speculators-fp8", "deepspec"}

# Capital letters: no option makes the target take it, since the state is before the norm (N: but for its weight, see
# test_cli_export_meaning.py), after it (P) or nobody knows (U), is the only one (L), or has no place, and is all (C).
REFUSED = {
    "N": ("got one before it (final_norm pre)", "--norm-weight"),
    "P": ("got one after it (final_norm post)", "the norm can't be undone"),
    "U": ("got final_norm unknown", "pre or post, whichever is true"),
    "L": ("layer beside the final",),
    "C": ("captured layers alone", "choose another --to"),
}
# Small letters: it is taken, or refused for that reason, only with an option, without which it says so.
ASKED = {
    "8": "--cast float8_e4m3fn",
    "b": "--cast bfloat16",
    "f": "captured layers alone",
    "1": "leave the others out: --layers",
    "e": "the embeddings, among layers",
    "a": "--option aux=any",
    "s": "--option sparse_masks=keep",
    "m": "--option target_model=NAME",
}
# "=": as it is.
MATRIX = {
    "vllm":                 "=   =   =   =   =   8   =   =   N   N   fs  N   N   N",
    "speculators":          "=   =   =   =   =   8   =   =   N   N   f   N   N   N",
    "speculators fp8":      "=   =   =   =   b   =   b   b   N   N   bf  N   N   N",
    "speculators-pt":       "=   =   =   =   =   8   =   =   N   N   f   N   N   N",
    "speculators-pt 0.2":   "=   =   =   P   P   P   P   =   =   =   f   =   1   m",
    "specforge-eagle3":     "=   =   =   P   P   P   P   =   =   s   fs  =   1   m",
    "specforge-dflash":     "=   =   =   U   U   U   U   U   U   U   s   U   U   U",
    "specforge-dspark":     "=   =   =   P   P   P   P   =   a   s   fs  a   1   m",
    "eagle-ge":             "=   =   =   P   P   P   P   L   L   L   C   L   =   bL",
    "modelopt-hf":          "=   =   =   P   P   P   P   =   =   s   fs  =   1   m",
    "modelopt-vllm":        "=   =   =   =   =   8   =   =   N   N   fs  N   N   N",
    "modelopt-trtllm":      "=   =   =   P   P   P   P   =   =   =   f   =   1   m",
    "angelslim-eagle3":     "=   =   =   P   P   P   P   =   =   s   fs  =   1   m",
    "angelslim-dflash":     "=   =   =   U   U   U   U   U   U   U   =   U   U   U",
    "deepspec":             "=   =   =   P   P   P   P   =   =   s   fs  =   1   =",
    "verl-speco":           "=   =   =   P   P   P   P   =   =   =   f   =   1   =",
    "automodel":            "=   =   =   U   U   U   U   U   U   U   s   U   U   U",
    "transformers":         "=   =   =   P   P   P   P   e   ea  e   fe  ea  1   m",
    "saelens":              "=   =   =   =   =   8   L   L   N   N   C   N   N   N",
    "saelens 16":           "=   =   =   =   =   8   L   L   N   N   C   N   N   N",
    "activault":            "=   =   =   P   P   P   P   =   a   =   f   a   1   m",
    "memmap":               "=   =   =   =   =   8   a   =   N   N   f   N   N   N",
    "pt":                   "=   =   =   P   P   P   P   =   a   =   f   a   1   m",
    "safetensors":          "=   =   =   P   P   P   P   =   a   =   f   a   1   m",
    "npz":                  "=   =   =   P   P   P   P   =   a   =   f   a   1   m",
}  # fmt: skip


# Targets whose files say which layers they hold; elsewhere `convert` has to be told.
RECORDS_LAYERS = {"safetensors", "npz", "speculators-pt"}
# Where the name of a file is the one place for a sample's id, escaped, and is what comes back.
ESCAPED = {"vllm", "modelopt"}
SCALE = "hidden_states_scale"


@dataclass
class Sample:
    """A sample as it should come back, or did."""

    sample_id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    states: np.ndarray
    extras: dict[str, np.ndarray]
    metadata: dict[str, Any] | None


def pairs(*, taken: bool) -> list[Any]:
    """The pairs that can be represented, or those that can't, each with its cell."""
    found = []
    for source, row in MATRIX.items():
        for target, cell in zip(TARGETS, row.split(), strict=True):
            if (cell[-1] not in REFUSED) == taken:
                marks = [pytest.mark.torch] if FOLDERS[source].torch or target not in WITHOUT_TORCH else []
                found.append(
                    pytest.param(source, target, cell, marks=marks, id=f"{source}-to-{target}".replace(" ", "-"))
                )
    return found


def options(cell: str, layers: list[int]) -> list[str]:
    """The options that the letters of a cell stand for."""
    chosen = layers[1:] if "e" in cell and layers[1:] else layers
    chosen = chosen[:-1] if "f" in cell and chosen[1:] else chosen[-1:] if "1" in cell else chosen
    words = ["--layers", ",".join(map(str, chosen))] if chosen != layers else []
    words += ["--cast", "float8_e4m3fn"] if "8" in cell else ["--cast", "bfloat16"] if "b" in cell else []
    for letter, option in (("a", "aux=any"), ("s", "sparse_masks=keep"), ("m", "target_model=tiny")):
        words += ["--option", option] if letter in cell else []
    return words


@pytest.fixture(scope="module")
def converted(hsfmt, data_dir, tmp_path_factory):
    """The dataset of a folder, made once and verified; and what it means."""
    made: dict[str, tuple[Path, dict[str, Any]]] = {}

    def convert(name):
        if name not in made:
            folder, place = FOLDERS[name], tmp_path_factory.mktemp("matrix")
            path = folder.place(data_dir, place)
            report = hsfmt.json("convert", path, place / "dataset", *folder.flags)
            assert report["source"]["format"] == folder.source
            assert report["counts"]["sample"] > 1
            hsfmt("verify", place / "dataset", "--level", "full")
            made[name] = place / "dataset", report["header"]
        return made[name]

    return convert


def test_the_table_is_complete():
    assert {folder.source for folder in FOLDERS.values()} == set(SOURCE_NAMES)
    assert sorted(TARGETS) == sorted(TARGET_NAMES)
    assert list(MATRIX) == list(FOLDERS)
    assert {len(row.split()) for row in MATRIX.values()} == {len(TARGETS)}
    letters = set("".join(MATRIX.values())) - {" "}
    assert letters == {"=", *REFUSED, *ASKED}


@pytest.mark.parametrize(("source", "target", "cell"), pairs(taken=False))
def test_what_can_not_be_represented_is_refused(hsfmt, converted, tmp_path, source, target, cell):
    url, header = converted(source)
    column = [row.split()[TARGETS.index(target)] for row in MATRIX.values()]
    # Nor do the options help by which the target takes other datasets.
    for letters in {"=", cell[:-1], *column}:
        words = options("".join(filter(ASKED.get, letters)), header["layers"])
        said = hsfmt("export", url, tmp_path / "out", "--to", target, *words, code=2).stderr
        assert f"--to {target}" in said
        if letters == cell[:-1]:
            assert all(text in said for text in REFUSED[cell[-1]])
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("source", "target", "cell"), pairs(taken=True))
def test_what_can_be_represented_comes_back(hsfmt, converted, tmp_path, source, target, cell):
    url, header = converted(source)
    for letter in filter(ASKED.get, cell):
        others = options(cell.replace(letter, ""), header["layers"])
        said = hsfmt("export", url, tmp_path / "out", "--to", target, *others, code=2).stderr
        assert f"--to {target}: " in said
        assert ASKED[letter] in said
        assert not any(tmp_path.iterdir())
    report = hsfmt.json("export", url, tmp_path / "out", "--to", target, *options(cell, header["layers"]))
    wanted = [expected(sample, header, report) for sample in read(url, header["dtype"])]
    if target == "zarr":
        found = read_zarr(tmp_path / "out")
    else:
        again = hsfmt.json("convert", tmp_path / "out", tmp_path / "again", *said_of(target, report["header"]))
        assert again["source"]["format"].startswith(target.removesuffix("-fp8"))
        for name in ("layers", "final_norm", "dtype", "hidden_size"):
            assert again["header"][name] == report["header"][name]
        found = read(tmp_path / "again", report["header"]["dtype"])
        found = renamed(found, [sample.sample_id for sample in wanted], target, report["dropped"])
    assert len(found) == len(wanted) == report["counts"]["written"]
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other, float8="8" in cell)


def said_of(target: str, header: dict[str, Any]) -> list[str]:
    """What `convert` has to be told of an export, which its files do not say."""
    words = [] if target in RECORDS_LAYERS else ["--layer-ids", ",".join(map(str, header["layers"]))]
    if target == "vllm":  # rows of speculators have names that its own files might have
        words += ["--from", "vllm"]
    if target == "modelopt" and header["final_norm"] == "post":  # only the other is told by the files
        words += ["--from", "modelopt-hf"]
    if target == "specforge-dflash":
        words += ["--hidden-size", str(header["hidden_size"])]
    return words


def read(url: Path, dtype: str) -> list[Sample]:
    """All samples of a dataset in order, the states in their own dtype."""
    reader = SampleReader(str(url))
    return [
        Sample(
            sample.sample_id,
            sample.input_ids,
            sample.loss_mask,
            sample.hidden_states.view(getattr(ml_dtypes, dtype, None) or dtype),
            {name: value for name, value in sample.extras.items() if value is not None},
            sample.metadata,
        )
        for sample in reader.read_many(range(len(reader)))
    ]


def read_zarr(folder: Path) -> list[Sample]:
    """The samples of an exported group, by zarr-python: no source of ours reads it."""
    group = zarr.open_group(folder, mode="r")
    arrays = {name: group[name][:] for name in ("input_ids", "loss_mask", "hidden_states")}
    scales = group[SCALE][:] if SCALE in group else None
    tokens, places, ids = group["token_offsets"][:], group["id_offsets"][:], group["ids"][:].tobytes()
    found = []
    for number, (first, stop) in enumerate(pairwise(tokens)):
        name = ids[places[number] : places[number + 1]].decode()
        extras = {} if scales is None else {SCALE: scales[first:stop]}
        found.append(Sample(name, *(array[first:stop] for array in arrays.values()), extras, None))
    return found


def expected(sample: Sample, header: dict[str, Any], report: dict[str, Any]) -> Sample:
    """The sample with the layers and dtype of the export, and without what the target says that it drops."""
    states = sample.states[:, [header["layers"].index(layer) for layer in report["header"]["layers"]]]
    extras = {name: value for name, value in sample.extras.items() if f"extra column {name}" not in report["dropped"]}
    dtype = report["header"]["dtype"]
    if header["dtype"] == "float8_e4m3fn" != dtype:
        factors = extras.pop(SCALE).astype(ml_dtypes.bfloat16).reshape(-1, 1, 1)
        states = states.astype(ml_dtypes.bfloat16) * factors
    elif dtype == "bfloat16":
        states = states.astype(ml_dtypes.bfloat16)
    mask = np.ones_like(sample.loss_mask) if "loss masks" in report["dropped"] else sample.loss_mask
    metadata = None if "metadata" in report["dropped"] else sample.metadata
    return Sample(sample.sample_id, sample.input_ids, mask, states, extras, metadata)


def renamed(found: list[Sample], ids: list[str], target: str, dropped: list[str]) -> list[Sample]:
    """The samples that came back, in the order and under the ids that they had before."""
    if target in ESCAPED:
        names = [quote(sample_id, safe="~") for sample_id in ids]
        by_name = {sample.sample_id: sample for sample in found}
        assert sorted(by_name) == sorted(names)
        found = [by_name[name] for name in names]
    elif "sample ids" not in dropped:
        by_id = {sample.sample_id: sample for sample in found}
        assert sorted(by_id) == sorted(ids)
        return [by_id[sample_id] for sample_id in ids]
    return [replace(sample, sample_id=sample_id) for sample, sample_id in zip(found, ids, strict=True)]


def assert_same(found: Sample, wanted: Sample, *, float8: bool) -> None:
    """The same bits; or float8 values that are as near as float8 can be."""
    assert found.sample_id == wanted.sample_id
    assert np.array_equal(found.input_ids, wanted.input_ids)
    assert np.array_equal(found.loss_mask, wanted.loss_mask)
    if float8:
        scale = found.extras[SCALE].reshape(-1, 1, 1)
        before = wanted.states.astype(np.float32)
        assert np.all(np.abs(found.states.astype(np.float32) * scale - before) <= np.abs(before) / 16 + scale / 512)
        return
    assert found.states.dtype == wanted.states.dtype
    assert found.states.shape == wanted.states.shape
    assert found.states.tobytes() == wanted.states.tobytes()
    for name, value in wanted.extras.items():
        assert found.extras[name].tobytes() == value.tobytes(), name
    if wanted.metadata is not None:
        assert found.metadata is not None
        # Beside `source`, which each conversion notes of its own.
        assert found.metadata["columns"] == wanted.metadata.get("columns", wanted.metadata)
