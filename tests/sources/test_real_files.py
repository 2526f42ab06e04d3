"""Every tensor of every file that a real program wrote, against what the program's own way of reading gives."""

import pickle
from pathlib import Path

import numpy as np
import pyarrow.ipc
import pytest
import safetensors.torch
import torch

from hsfmt.readers.sources import SourceOptions, find_source

FOLDERS = [
    ("vllm/vllm032_bf16_prompt", "vllm", 8, None, "pre"),
    ("speculators/0.9.0", "speculators", 24, None, "pre"),
    ("speculators/0.9.0_fp8", "speculators", 24, None, "pre"),
    ("speculators/0.6.0", "speculators", 12, None, "pre"),
    ("speculators/0.4.0", "speculators-pt", 12, (3, 5, 6, 8), "pre"),
    ("speculators/0.4.0/data", "speculators-pt", 12, (3, 5, 6, 8), "pre"),
    ("speculators/0.3.0", "speculators-pt", 12, (3, 5, 6, 8), "pre"),
    ("speculators/0.2.0_ckpt", "speculators-pt", 6, (3, 5, 6, 8), "post"),
]
by_folder = pytest.mark.parametrize(("name", "kind", "n_items", "layers", "norm"), FOLDERS, ids=[f[0] for f in FOLDERS])


def open_source(data_dir: Path, name: str):
    return find_source(data_dir / name, options=SourceOptions(model_config=str(data_dir / "tiny-llama")))


def tensor(array: np.ndarray) -> torch.Tensor:
    """The array as torch has it, bit for bit."""
    kinds = {"bfloat16": (np.int16, torch.bfloat16), "float8_e4m3fn": (np.uint8, torch.float8_e4m3fn)}
    bits, dtype = kinds[array.dtype.name]
    return torch.from_numpy(array.view(bits)).view(dtype)


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.uint8)


def own_reading(root: Path, kind: str, key: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Token ids, states [token, layer, hidden] and mask as the program's own reader has them."""
    if kind in {"vllm", "speculators"}:
        tensors = safetensors.torch.load_file(root / key)
        return tensors["token_ids"], tensors["hidden_states"], None
    record = torch.load(root / key, weights_only=True)
    if "target" in record:
        size = record["target"].shape[1]
        parts = [*record["hidden_state"].split(size, dim=1), record["target"]]
    else:
        parts = record["hidden_states"]
    return record["input_ids"], torch.stack(parts, dim=1), record["loss_mask"]


@by_folder
def test_every_tensor_comes_as_it_is(data_dir, accounted_for, name, kind, n_items, layers, norm):
    source = open_source(data_dir, name)
    accounted_for(source)
    assert (source.name, len(source.items)) == (kind, n_items)
    assert source.strays == []
    for item in source.items:
        sample = source.load(item)
        input_ids, states, mask = own_reading(source.root, kind, item.key)
        assert sample.sample_id == item.sample_id
        assert sample.input_ids.dtype == np.int64
        assert torch.equal(torch.from_numpy(sample.input_ids), input_ids)
        assert tensor(sample.hidden_states).dtype == states.dtype
        assert torch.equal(bits(tensor(sample.hidden_states)), bits(states))
        assert sample.hidden_states.flags.c_contiguous
        assert sample.hidden_states.base is None or sample.hidden_states.base.nbytes == sample.hidden_states.nbytes
        if mask is not None:
            assert torch.equal(torch.from_numpy(sample.loss_mask).to(mask.dtype), mask)
    assert [item.index for item in source.items] == list(range(n_items))


@by_folder
def test_meaning(data_dir, name, kind, n_items, layers, norm):
    meaning = open_source(data_dir, name).meaning()
    assert (meaning.hidden_size, meaning.n_layers) == (128, 4)
    assert meaning.dtype == ("float8_e4m3fn" if "fp8" in name else "bfloat16")
    assert (meaning.layers, meaning.final_norm) == (layers, norm)
    assert (meaning.scaling is not None) == ("fp8" in name)
    if layers is None:
        assert "eagle_aux_hidden_state_layer_ids" in meaning.layers_from


@pytest.mark.parametrize(("name", "mask_kind"), [("0.9.0", "int64"), ("0.9.0_fp8", "int64"), ("0.6.0", "bool")])
def test_arrow_rows(data_dir, name, mask_kind):
    root = data_dir / "speculators" / name
    table = pyarrow.ipc.open_stream(root / "data-00000-of-00001.arrow").read_all()
    assert str(table.schema.field("loss_mask").type.value_type) == mask_kind
    source = find_source(root)
    for row, item in enumerate(source.items):
        sample = source.load(item)
        assert (item.sample_id, item.index, sample.metadata) == (f"hs_{row}", row, {"row": row})
        assert sample.input_ids.tolist() == table["input_ids"][row].as_py()
        assert sample.loss_mask.tolist() == [int(value) for value in table["loss_mask"][row].as_py()]


def test_fp8_scales(data_dir):
    source = find_source(data_dir / "speculators" / "0.9.0_fp8")
    assert source.meaning().scaling == {"column": "hidden_states_scale", "rule": "bfloat16_product"}
    for item in source.items:
        scale = source.load(item).extras["hidden_states_scale"]
        scales = safetensors.torch.load_file(source.root / item.key)["hidden_states_scales"]
        assert scale.dtype == np.float32
        assert torch.equal(torch.from_numpy(scale), scales.flatten())


@pytest.mark.parametrize("name", [folder[0] for folder in FOLDERS])
def test_a_pickled_source_reads_the_same(data_dir, name):
    source = open_source(data_dir, name)
    source.meaning()
    there = pickle.loads(pickle.dumps(source))
    for item in source.items[:3]:
        here, copy = source.load(item), there.load(pickle.loads(pickle.dumps(item)))
        assert here.hidden_states.tobytes() == copy.hidden_states.tobytes()
        assert (here.sample_id, here.metadata) == (copy.sample_id, copy.metadata)


def test_known_side_files(data_dir):
    roles = {file.path: file.role for file in open_source(data_dir, "speculators/0.4.0/data").support}
    assert roles == {
        "data_config.json": "data_config",
        "sample_lengths.json": "sample_lengths",
        "../token_freq.pt": "token_freq",
    }
    roles = {file.path: file.role for file in open_source(data_dir, "speculators/0.9.0").support}
    assert roles["d2t-64.npy"] == "d2t"
    assert roles["token_freq.pt"] == "token_freq"
    assert roles["data-00000-of-00001.arrow"] == "arrow"
