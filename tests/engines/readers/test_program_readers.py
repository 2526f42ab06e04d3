"""Exports in the real programs' own readers: what they hand to their trainers is the dataset's, bit by bit."""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from program import environment, python_of, run

from hsfmt import DatasetWriter
from hsfmt.cli.main import main as hsfmt
from hsfmt.readers.sample_reader import SampleReader

pytestmark = [pytest.mark.engine, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("read_export.py")


@pytest.fixture(scope="module")
def datasets(data_dir, tmp_path_factory):
    """Real folders as datasets, by source."""
    folder = tmp_path_factory.mktemp("datasets")
    sources = {"specforge-eagle3": "specforge/v020_eagle3_bs1", "modelopt-vllm": "modelopt/vllm_dump"}
    for source, path in sources.items():
        words = ["convert", str(data_dir / path), str(folder / source), "--from", source, "--layer-ids", "2,4,5,8"]
        hsfmt([*words, "--quiet"], standalone_mode=False)
    return folder


@pytest.fixture
def exported(datasets, tmp_path):
    """Export a dataset; return its samples in order."""

    def export(source, target, *words):
        command = ["export", str(datasets / source), str(tmp_path / "export"), "--to", target, "--quiet", *words]
        assert hsfmt(command, standalone_mode=False) in (None, 0)
        reader = SampleReader(str(datasets / source))
        return [as_torch(sample) for sample in reader.read_many(range(len(reader)))]

    return export


@pytest.fixture
def read(tmp_path):
    """Load the export with a program's reader: its files, samples and batches, in the reader's order."""

    def load(reader, exit_code=0):
        folder, result = tmp_path / "export", tmp_path / "result.pt"
        command = [python_of(".venv-readers"), SCRIPT, reader, folder, result]
        # Not this checkout in PYTHONPATH: its folders are no packages of theirs.
        text = run(command, tmp_path / "log", environment(PYTHONPATH=""), exit_code=exit_code)
        return text if exit_code else torch.load(result, weights_only=True)

    return load


def as_torch(sample):
    """Ids, mask and states [token, layer, hidden] as tensors, and the id."""
    states = torch.from_numpy(np.array(sample.hidden_states).view(np.int16)).view(torch.bfloat16)
    mask = torch.from_numpy(sample.loss_mask.astype(np.int64))
    return {"ids": torch.from_numpy(np.array(sample.input_ids)), "mask": mask, "states": states, "id": sample.sample_id}


def numbered(found, samples):
    """Pairs of what the reader made of a file and the sample whose number the file has; every sample once."""
    numbers = [int(re.fullmatch(r"data_([0-9]+)\.(?:ckpt|ckpt\.gz|pt)", Path(path).name)[1]) for path in found["paths"]]
    assert sorted(numbers) == list(range(len(samples)))
    return [(loaded, samples[number]) for loaded, number in zip(found["samples"], numbers, strict=True)]


def assert_same(found, expected):
    """The same dtype, shape and bits."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def assert_all(found, expected):
    assert set(expected) <= set(found)
    for key, value in expected.items():
        assert_same(found[key], value)


def side_by_side(states):
    return states.flatten(1)


def without_last(mask):
    """What SpecForge does to a mask for EAGLE-3."""
    mask = mask.clone()
    mask[-1] = 0
    return mask


@pytest.mark.parametrize("words", [(), ("--option", "compression=gzip"), ("--option", "rows=4")])
@pytest.mark.parametrize("reader", ["specforge-eagle3", "specforge-dataset"])
def test_specforge_eagle3(exported, read, reader, words):
    samples = exported("specforge-eagle3", "specforge-eagle3", *words)
    found = read(reader)
    for loaded, sample in numbered(found, samples):
        expected = {
            "input_ids": sample["ids"][None],
            "loss_mask": without_last(sample["mask"])[None],
            "hidden_state": side_by_side(sample["states"][:, :-1])[None],
            "target": sample["states"][:, -1][None],
        }
        assert_all(loaded, expected)
    longest = max(loaded["input_ids"].shape[1] for loaded in found["samples"][:2])
    assert found["batches"][0]["hidden_state"].shape == (2, longest, 3 * 64)


@pytest.mark.parametrize(("name", "layers"), [("dflash", "2,4,5"), ("dspark", "2,4,5,8")])
def test_specforge_dflash_and_dspark(datasets, exported, read, tmp_path, name, layers):
    reader = SampleReader(str(datasets / "specforge-eagle3"))
    pairs = [s.sample_id for s in reader.read_many(range(len(reader))) if np.any(s.loss_mask[1:] & s.loss_mask[:-1])]
    assert len(pairs) == len(reader) - 1
    (tmp_path / "ids").write_text("\n".join(pairs))
    words = ["--layers", layers, "--ids", str(tmp_path / "ids")]
    samples = [s for s in exported("specforge-eagle3", f"specforge-{name}", *words) if s["id"] in pairs]
    found = read(f"specforge-{name}")
    for loaded, sample in numbered(found, samples):
        expected = {
            "input_ids": sample["ids"][None],
            "loss_mask": sample["mask"][None],
            "hidden_states": side_by_side(sample["states"][:, :3])[None],
        }
        if name == "dspark":
            expected["target_last_hidden_states"] = sample["states"][:, 3][None]
        assert_all(loaded, expected)
    assert found["batches"][0]["hidden_states"].shape[::2] == (2, 3 * 64)


def test_specforge_stops_at_the_sample_that_an_export_refuses(exported, read):
    """Why it is refused."""
    exported("specforge-eagle3", "specforge-dspark", "--option", "sparse_masks=keep")
    assert "require two consecutive supervised tokens" in read("specforge-dspark", exit_code=1)


def test_angelslim(exported, read):
    samples = exported("specforge-eagle3", "angelslim-eagle3")
    found = read("angelslim")
    for loaded, sample in numbered(found, samples):
        expected = {
            "input_ids": sample["ids"][None],
            "loss_mask": sample["mask"][None],
            "attention_mask": torch.ones_like(sample["ids"])[None],
            "hidden_states": side_by_side(sample["states"][:, :-1])[None],
            "target_hiddens": sample["states"][:, -1][None],
        }
        assert_all(loaded, expected)
        assert set(loaded) == set(expected)
    assert found["batches"][0]["target_hiddens"].shape[::2] == (2, 64)


def test_angelslim_with_images(datasets, exported, read):
    """Columns of models with eyes; one sample is without positions, as AngelSlim's vLLM backend leaves it."""
    extras = {
        "inputs_embeds": {"kind": "token", "dtype": "bfloat16", "shape": [8]},
        "position_ids": {"kind": "token", "dtype": "int64", "shape": [3]},
    }
    url, rng = str(datasets / "images"), np.random.default_rng(0)
    settings = {"layers": [2, 4, 5, 8], "hidden_size": 8, "final_norm": "post", "extras": extras}
    columns = []
    with DatasetWriter(url, **settings) as writer:
        for number, n in enumerate((5, 9)):
            states = rng.standard_normal((n, 4, 8)).astype(ml_dtypes.bfloat16)
            embeds = rng.standard_normal((n, 8)).astype(ml_dtypes.bfloat16)
            columns.append((embeds, np.arange(3 * n).reshape(n, 3) if number else None))
            named = {"inputs_embeds": embeds, "position_ids": columns[-1][1]}
            writer.write(f"image {number}", np.arange(n), states, np.ones(n), source_index=number, **named)
    samples = exported("images", "angelslim-eagle3")
    found = read("angelslim-vlm")
    for loaded, sample in numbered(found, samples):
        assert_same(loaded["hidden_states"], side_by_side(sample["states"][:, :-1])[None])
        embeds, positions = columns[int(sample["id"].split()[1])]
        assert_same(loaded["inputs_embeds"], torch.from_numpy(embeds.view(np.int16)).view(torch.bfloat16)[None])
        if positions is None:
            assert loaded["position_ids"] is None
        else:
            assert_same(loaded["position_ids"], torch.from_numpy(positions.T.copy())[:, None])
    assert found["batches"][0]["inputs_embeds"].shape == (2, 9, 8)


@pytest.mark.parametrize(("source", "is_before_the_norm"), [("specforge-eagle3", False), ("modelopt-vllm", True)])
def test_modelopt(exported, read, source, is_before_the_norm):
    samples = {sample["id"].replace("/", "%2F"): sample for sample in exported(source, "modelopt")}
    found = read("modelopt")
    assert sorted(Path(path).stem for path in found["paths"]) == sorted(samples)
    for path, loaded in zip(found["paths"], found["samples"], strict=True):
        sample = samples[Path(path).stem]
        expected = {
            "input_ids": sample["ids"],
            "loss_mask": sample["mask"],
            "aux_hidden_states": side_by_side(sample["states"][:, :-1]),
            "base_model_hidden_states": sample["states"][:, -1],
        }
        assert_all(loaded, expected)
        assert loaded["base_hidden_prenorm"] is is_before_the_norm
    outputs = found["batches"][0]["base_model_outputs"]
    assert outputs["base_hidden_prenorm"] is is_before_the_norm
    assert outputs["aux_hidden_states"].shape == (len(samples), 64, 3 * 64)


def test_speculators(exported, read):
    """Its reader pairs each token with the states of the one before it."""
    samples = exported("modelopt-vllm", "speculators-pt")
    found = read("speculators")
    for loaded, sample in numbered(found, samples):
        n = len(sample["ids"])
        expected = {
            "input_ids": sample["ids"][1:],
            "loss_mask": sample["mask"][1:],
            "hidden_states": side_by_side(sample["states"][:, :-1])[:-1],
            "verifier_last_hidden_states": sample["states"][1:, -1],
            "position_ids": torch.arange(1, n),
            "lengths": torch.tensor([n - 1]),
            "stated_length": torch.tensor([n]),
        }
        assert_all(loaded, expected)
    assert found["batches"][0]["hidden_states"].shape == (1, 512, 3 * 64)
