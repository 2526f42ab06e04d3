"""`open_zarr` of a forged dataset: zarr-python decodes, whatever way the array is indexed, and our error comes out."""

import numpy as np
import pytest
import zarr
from dataset_forge import build
from hostile_cases import CASES, PART
from hostile_table import plant

from hsfmt import open_zarr
from hsfmt.errors import CorruptionError
from hsfmt.readers import arrays

WAYS = {
    "[...]": lambda found: found[...],
    "[row]": lambda found: found[1],
    "[rows]": lambda found: found[0:3],
    "oindex": lambda found: found.oindex[[0, 2]],
    "vindex": lambda found: found.vindex[[0, 2], [0, 1], [0, 0]],
    "mask": lambda found: found.get_mask_selection(np.ones(found.shape, bool)),
    "blocks": lambda found: found.blocks[0],
    "asarray": np.asarray,
}


@pytest.fixture
def base(tmp_path):
    return build(tmp_path / "base")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("frame", ["random", "zeros", "nbytes 2147483648", "raw zstd"])
def test_a_frame_that_is_none(base, tmp_path, frame, way):
    root, _ = plant(CASES[f"hidden_states frame: {frame}"], base, tmp_path / "case")
    found = open_zarr(root)
    with pytest.raises(CorruptionError):
        WAYS[way](found.parts[PART]["hidden_states"])
    with pytest.raises(CorruptionError):
        found.hidden_states[:2]
    assert WAYS[way](found.parts["part-1"]["hidden_states"]).size


@pytest.mark.parametrize("way", WAYS)
def test_a_frame_that_only_the_decoder_refuses(base, tmp_path, way):
    """Its header is right: zarr-python is given it, and what its decoder raises is made an error of this package."""
    root, _ = plant(CASES["a zstd bomb"], base, tmp_path / "case")
    found = open_zarr(root).parts[PART]["hidden_states"]
    with pytest.raises(CorruptionError, match=r"parts/part-0/hidden_states: expected chunks of valid Blosc frames"):
        WAYS[way](found)


def test_errors_of_the_caller_stay_as_they_are(base):
    found = open_zarr(base).parts[PART]["hidden_states"]
    assert isinstance(found, zarr.Array)
    with pytest.raises(IndexError):
        found[100]
    with pytest.raises(RuntimeError, match="other reasons"), arrays._typed("x"):
        raise RuntimeError("other reasons")
    with pytest.raises(ExceptionGroup, match="of zarr"), arrays._typed("x"):
        raise ExceptionGroup("of zarr", [ValueError("other reasons")])
    with pytest.raises(CorruptionError, match="x: expected chunks"), arrays._typed("x"):
        raise ExceptionGroup("of zarr", [ExceptionGroup("inner", [RuntimeError("error during blosc decompression")])])


@pytest.mark.parametrize("name", ["row 3", "row 2147483647", "n_tokens one more", "index file: nothing"])
def test_rows_that_a_part_has_not(base, tmp_path, name):
    root, _ = plant(CASES[name], base, tmp_path / "case")
    with pytest.raises(CorruptionError):
        open_zarr(root)
