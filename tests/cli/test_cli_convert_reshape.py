"""What `hsfmt convert` changes about samples when it is asked to: padding, length, dtype; and what it records of it."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from hsfmt.cli.converting.reshaping import Reshaping, TooFewLossTokensError, pieces, real_tokens
from hsfmt.errors import SourceError
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.sources import SourceItem, SourceSample
from hsfmt.readers.sources.base import Source
from hsfmt.writers.dataset_writer import DatasetWriter
from hsfmt.writers.sample_files import FileTensor, write_sample_file

LAYERS = ("--from", "vllm", "--layer-ids", "1,2")
ITEM = SourceItem("a.bin", 0, "a", ("a.bin",), 1)


def sample(ids, mask=None, *, dtype=ml_dtypes.bfloat16, **extras) -> SourceSample:
    values = np.random.default_rng(0).standard_normal((len(ids), 2, 4), np.float32).astype(dtype)
    masks = None if mask is None else np.array(mask, np.uint8)
    extras = {name: np.array(value, np.uint8) for name, value in extras.items()}
    return SourceSample("a", np.array(ids), values, masks, {"row": 3}, extras)


def connector_file(path: Path, n_tokens: int, dtype: str = "bfloat16", scale: float = 1.0) -> np.ndarray:
    values = scale * np.random.default_rng(n_tokens).standard_normal((n_tokens, 2, 4), np.float32)
    states = values.astype(getattr(ml_dtypes, dtype, dtype))
    patterns = states.view(np.uint16) if dtype == "bfloat16" else states
    tensors = {"hidden_states": FileTensor(dtype, patterns), "token_ids": FileTensor("int64", np.arange(n_tokens))}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_sample_file(path, tensors, {}, overwrite=True)
    return states


def read_all(dataset: Path) -> dict:
    reader = SampleReader(dataset)
    return {reader.sample_ids[n]: reader.read(n) for n in range(len(reader))}


@pytest.mark.parametrize(
    ("ids", "mask", "extras", "kept"),
    [
        ([5, 6, 7, 0, 0, 0], [0, 1, 1, 0, 0, 0], {}, 3),
        ([5, 6, 7, 0], [0, 1, 1, 0], {}, 4),  # a single one may be the text's last token
        ([5, 0, 0, 7, 0, 0], [0, 1, 0, 0, 0, 0], {}, 4),  # only what lies at the end
        ([5, 6, 0, 0, 0, 0], [0, 1, 0, 1, 0, 0], {}, 4),  # a supervised token is no padding, nor any before it
        ([5, 6, 0, 0, 0, 0], [0, 1, 0, 0, 0, 1], {}, 6),
        ([0, 0, 0], [0, 0, 0], {}, 3),  # nothing says that any of these is a token
        ([5, 6, 0, 0], None, {}, 4),  # without a mask there is no evidence
        ([5, 6, 7, 0], [0, 1, 1, 0], {"attention_mask": [1, 1, 1, 0]}, 3),
        ([5, 6, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0], {"attention_mask": [1, 1, 1, 1, 0, 0]}, 4),
        ([5, 6, 0, 0], None, {"attention_mask": [1, 1, 0, 0]}, 2),
        ([5, 6, 7, 8], [0, 1, 1, 1], {"attention_mask": [1, 1, 0, 0]}, 4),  # never a supervised token
        ([0, 0, 5, 6], [0, 0, 1, 1], {"attention_mask": [0, 0, 1, 1]}, 4),  # padding in front is left
        ([5, 6], [0, 1], {"attention_mask": [0, 0]}, 2),
        ([5, 6], [0, 0], {"attention_mask": [0, 0]}, 2),
    ],
)
def test_what_is_padding(ids, mask, extras, kept):
    given = sample(ids, mask, **extras)
    assert real_tokens(given, 0)[0] == kept
    (piece,) = pieces(ITEM, given, Reshaping(trim_padding=True))
    assert piece.sample.input_ids.tolist() == ids[:kept]
    assert np.array_equal(piece.sample.hidden_states, given.hidden_states[:kept])
    assert piece.trimmed == len(ids) - kept
    assert ("conversion" in piece.metadata) == (kept < len(ids))
    assert all(len(value) == kept for value in piece.sample.extras.values())


def test_another_pad_id():
    given = sample([5, 6, 9, 9, 9], [0, 1, 0, 0, 0])
    assert real_tokens(given, 0)[0] == 5
    assert real_tokens(given, 9) == (2, "pad_id 9")


def test_min_loss_tokens_of_a_sample_without_a_mask():
    given = sample([1, 2, 3])
    assert len(list(pieces(ITEM, given, Reshaping(min_loss_tokens=3)))) == 1
    with pytest.raises(TooFewLossTokensError, match="at least 4 supervised tokens"):
        list(pieces(ITEM, given, Reshaping(min_loss_tokens=4)))


def test_windows_lose_nothing():
    given = sample(range(10), [0, 1] * 5, weight=range(10))
    found = list(pieces(ITEM, given, Reshaping(split_long=4)))
    assert [piece.sample.sample_id for piece in found] == ["a#0", "a#1", "a#2"]
    for name in ("input_ids", "hidden_states", "loss_mask"):
        joined = np.concatenate([getattr(piece.sample, name) for piece in found])
        assert np.array_equal(joined, getattr(given, name))
    assert np.concatenate([piece.sample.extras["weight"] for piece in found]).tolist() == list(range(10))
    assert [piece.metadata["conversion"]["split"] for piece in found] == [
        {"offset": offset, "tokens": 10, "window": n, "windows": 3} for n, offset in enumerate((0, 4, 8))
    ]
    assert all(piece.metadata["row"] == 3 and piece.metadata["source"] == "a.bin" for piece in found)


def test_a_sample_of_just_the_length_is_no_window():
    (piece,) = pieces(ITEM, sample(range(4)), Reshaping(split_long=4))
    assert (piece.sample.sample_id, piece.window) == ("a", None)


def test_padding_goes_before_the_windows_are_cut():
    given = sample([1, 2, 3, 4, 5, 0, 0, 0], [0, 1, 1, 1, 1, 0, 0, 0])
    found = list(pieces(ITEM, given, Reshaping(trim_padding=True, split_long=3)))
    assert [piece.sample.input_ids.tolist() for piece in found] == [[1, 2, 3], [4, 5]]
    assert [piece.trimmed for piece in found] == [3, 0]


def test_metadata_of_the_names_that_the_conversion_uses():
    given = sample(range(4))
    given.metadata = {"source": "sharegpt", "row": 3}
    (piece,) = pieces(ITEM, given, Reshaping())
    assert piece.metadata == {"source": "a.bin", "columns": {"source": "sharegpt", "row": 3}}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_casting_rounds_to_nearest_and_is_recorded(dtype):
    given = sample(range(1000), dtype=dtype)
    (piece,) = pieces(ITEM, given, Reshaping(cast="bfloat16"))
    assert piece.sample.hidden_states.tobytes() == given.hidden_states.astype(ml_dtypes.bfloat16).tobytes()
    assert piece.metadata["conversion"] == {"cast_from": dtype}


def test_casting_to_the_same_dtype_records_nothing():
    given = sample(range(3))
    (piece,) = pieces(ITEM, given, Reshaping(cast="bfloat16"))
    assert piece.sample.hidden_states is given.hidden_states
    assert "conversion" not in piece.metadata


def test_casting_keeps_nan_and_inf_and_makes_none():
    given = sample(range(3), dtype=np.float32)
    given.hidden_states[0, 0, :2] = np.nan, np.inf
    (piece,) = pieces(ITEM, given, Reshaping(cast="float16"))
    assert np.isnan(piece.sample.hidden_states[0, 0, 0])
    assert np.isinf(piece.sample.hidden_states[0, 0, 1])
    given.hidden_states[2, 1, 3] = 70000
    with pytest.raises(SourceError, match="70000 in token 2, which would become infinite"):
        list(pieces(ITEM, given, Reshaping(cast="float16")))


@pytest.fixture
def long_source(tmp_path) -> Path:
    for n in (3, 10, 25):
        connector_file(tmp_path / "source" / f"r{n}.safetensors", n)
    return tmp_path / "source"


def test_split_through_the_command(hsfmt, long_source, tmp_path):
    report = hsfmt.json("convert", long_source, tmp_path / "d", *LAYERS, "--split-long", 8)
    assert report["counts"]["sample"] == 3
    assert (report["written"]["split_samples"], report["written"]["windows"]) == (2, 6)
    whole = hsfmt("convert", long_source, tmp_path / "whole", *LAYERS)
    assert "windows" not in whole.stdout
    found, expected = read_all(tmp_path / "d"), read_all(tmp_path / "whole")
    assert list(found) == ["r3", "r10#0", "r10#1", *(f"r25#{n}" for n in range(4))]
    joined = np.concatenate([found[f"r25#{n}"].hidden_states for n in range(4)])
    assert np.array_equal(joined, expected["r25"].hidden_states)
    again = hsfmt.json("convert", long_source, tmp_path / "d", *LAYERS, "--split-long", 8)
    assert again["counts"] == {"sample": 0, "skipped": 3, "hole": 0, "failed": 0, "not_reached": 0}
    assert hsfmt.json("info", tmp_path / "d")["producers"][0]["producer"]["options"]["split_long"] == 8


def test_windows_stay_in_order_beyond_ten(hsfmt, long_source, tmp_path):
    hsfmt("convert", long_source, tmp_path / "d", *LAYERS, "--split-long", 2)
    ids = [sample_id for sample_id in read_all(tmp_path / "d") if sample_id.startswith("r25#")]
    assert ids == [f"r25#{n:02}" for n in range(13)]


@pytest.mark.parametrize("delete", [(), ("--delete-source",)], ids=["keep", "delete"])
@pytest.mark.parametrize("n", range(7))
def test_split_is_resumed_within_a_sample(hsfmt, long_source, tmp_path, monkeypatch, n, delete):
    whole = hsfmt.json("convert", long_source, tmp_path / "whole", *LAYERS, "--split-long", 8)
    real, calls = DatasetWriter.write, iter(range(n))

    def write(self, *args, **kwargs):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        written = real(self, *args, **kwargs)
        self.commit()  # a part for each window
        return written

    flags = (*LAYERS, "--split-long", 8, *delete)
    with monkeypatch.context() as patch:
        patch.setattr(DatasetWriter, "write", write)
        hsfmt("convert", long_source, tmp_path / "d", *flags, code=130)
    assert len(list(long_source.iterdir())) == 3
    report = hsfmt.json("convert", long_source, tmp_path / "d", *flags)
    assert report["snapshot"]["content_digest"] == whole["snapshot"]["content_digest"]
    assert report["counts"]["sample"] + report["counts"]["skipped"] == 3
    assert report["counts"]["skipped"] == (0 if n == 0 else 1 if n < 3 else 2), "whole samples that were there"
    assert list(long_source.iterdir()) == [] or not delete


@pytest.mark.parametrize("on_bad", ["raise", "hole"])
def test_another_window_size_is_a_conflict(hsfmt, long_source, tmp_path, on_bad):
    hsfmt("convert", long_source, tmp_path / "d", *LAYERS, "--split-long", 8)
    for flags in (("--split-long", 4), ()):
        report = hsfmt.json("convert", long_source, tmp_path / "d", *LAYERS, *flags, "--on-bad", on_bad, code=1)
        ids = [conflict["id"] for conflict in report["conflicts"]]
        assert ids == (["r10", "r25"] if on_bad == "hole" else ids[:1])
    # A sample that is short enough for both is the same one.
    assert hsfmt.json("convert", long_source, tmp_path / "d", *LAYERS, "--split-long", 8)["counts"]["skipped"] == 3


def test_a_whole_sample_is_no_window(hsfmt, long_source, tmp_path):
    hsfmt("convert", long_source, tmp_path / "d", *LAYERS)
    report = hsfmt.json("convert", long_source, tmp_path / "d", *LAYERS, "--split-long", 8, "--on-bad", "hole", code=1)
    assert [conflict["id"] for conflict in report["conflicts"]] == ["r10", "r25"]
    assert "as --split-long makes it now" in report["conflicts"][0]["reason"]


def test_other_windows_of_an_unfinished_sample_are_a_conflict(hsfmt, long_source, tmp_path, monkeypatch):
    real, calls = DatasetWriter.write, iter(range(2))

    def write(self, *args, **kwargs):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        written = real(self, *args, **kwargs)
        self.commit()
        return written

    with monkeypatch.context() as patch:
        patch.setattr(DatasetWriter, "write", write)
        hsfmt("convert", long_source, tmp_path / "d", *LAYERS, "--split-long", 8, code=130)
    connector_file(long_source / "r10.safetensors", 10, scale=2)
    report = hsfmt.json("convert", long_source, tmp_path / "d", *LAYERS, "--split-long", 8, "--on-bad", "hole", code=1)
    assert [conflict["id"] for conflict in report["conflicts"]] == ["r10"]
    assert "r10#1" not in [row["id"] for row in hsfmt.json("ls", tmp_path / "d", "--snapshot", "live")["samples"]]


def test_a_bad_window_keeps_the_whole_sample_out(hsfmt, long_source, tmp_path):
    states = connector_file(long_source / "r25.safetensors", 25)
    states[-1, 0, 0] = np.inf
    tensors = {
        "hidden_states": FileTensor("bfloat16", states.view(np.uint16)),
        "token_ids": FileTensor("int64", np.arange(25)),
    }
    write_sample_file(long_source / "r25.safetensors", tensors, {}, overwrite=True)
    report = hsfmt.json("convert", long_source, tmp_path / "d", *LAYERS, "--split-long", 8, "--on-bad", "hole")
    assert [hole["id"] for hole in report["holes"]] == ["r25"]
    assert list(read_all(tmp_path / "d")) == ["r3", "r10#0", "r10#1"]


def test_few_supervised_tokens_become_holes(hsfmt, long_source, tmp_path):
    report = hsfmt.json("convert", long_source, tmp_path / "d", *LAYERS, "--min-loss-tokens", 5)
    assert report["counts"]["hole"] == report["written"]["too_few_loss_tokens"] == 1
    assert report["holes"] == [
        {
            "id": "r3",
            "file": "r3.safetensors",
            "reason": "expected at least 5 supervised tokens (--min-loss-tokens), got 3",
        }
    ]
    assert (
        "1 sample with too few" in hsfmt("convert", long_source, tmp_path / "d", *LAYERS, "--min-loss-tokens", 5).stdout
    )
    # Whoever wants it after all gets it.
    assert hsfmt.json("convert", long_source, tmp_path / "d", *LAYERS)["counts"]["sample"] == 1


@pytest.fixture
def mixed(tmp_path) -> Path:
    for n, dtype in enumerate(("bfloat16", "float16", "float32", "float16"), 3):
        connector_file(tmp_path / "source" / f"r{n}.safetensors", n, dtype)
    return tmp_path / "source"


def test_mixed_dtypes_are_refused_with_names_and_numbers(hsfmt, mixed, tmp_path):
    report = hsfmt.json("convert", mixed, tmp_path / "d", *LAYERS, code=1)
    assert "r4.safetensors" in report["error"][0]["where"]
    kinds = [text for text in report["warnings"] if "the folder mixes kinds" in text]
    assert len(kinds) == 3
    assert any("2 files with 2 layers of width 4, float16, r4.safetensors the first" in text for text in kinds)


def test_cast_takes_them_all(hsfmt, mixed, tmp_path):
    report = hsfmt.json("convert", mixed, tmp_path / "d", *LAYERS, "--cast", "float32")
    assert report["counts"]["sample"] == 4
    assert report["written"]["cast_samples"] == 3
    assert report["header"]["dtype"] == "float32"
    found = read_all(tmp_path / "d")
    casts = {key: found[key].metadata.get("conversion", {}).get("cast_from") for key in found}
    assert casts == {"r3": "bfloat16", "r4": "float16", "r5": None, "r6": "float16"}
    producer = hsfmt.json("info", tmp_path / "d")["producers"][0]["producer"]
    assert producer["options"]["cast"] == "float32"
    again = hsfmt.json("convert", mixed, tmp_path / "d", *LAYERS, "--cast", "float32")
    assert again["counts"]["skipped"] == 4


def test_an_overflow_names_the_file(hsfmt, mixed, tmp_path):
    connector_file(mixed / "r5.safetensors", 5, "float32", scale=1e6)
    report = hsfmt.json("convert", mixed, tmp_path / "d", *LAYERS, "--cast", "float16", code=1)
    assert report["error"][0]["where"] == "r5.safetensors"
    assert "which would become infinite" in report["error"][0]["got"]
    hole = hsfmt.json("convert", mixed, tmp_path / "d", *LAYERS, "--cast", "float16", "--on-bad", "hole")
    assert [h["id"] for h in hole["holes"]] == ["r5"]


def test_without_cast_nothing_is_converted(hsfmt, mixed, tmp_path):
    loaded = []
    real = Source.load

    def load(self, item, **how):
        loaded.append(how)
        return real(self, item, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Source, "load", load)
        hsfmt("convert", mixed, tmp_path / "d", *LAYERS, "--on-bad", "hole")
    assert all(how == {"any_dtype": False} for how in loaded)
    assert list(read_all(tmp_path / "d")) == ["r3"]


def test_cast_of_scaled_states_is_refused(hsfmt, data_dir, tmp_path):
    source = data_dir / "speculators" / "0.9.0_fp8"
    flags = ("--from", "speculators", "--layer-ids", "2,4,5,8", "--cast", "bfloat16")
    result = hsfmt("convert", source, tmp_path / "d", *flags, code=2)
    assert "leave --cast out" in result.stderr


@pytest.mark.torch
def test_the_padded_tail(hsfmt, data_dir, tmp_path):
    source = data_dir / "adversarial" / "padded_tail"
    flags = ("--from", "pt", "--map", "aux=aux_hidden_state,last=hidden_state", "--layer-ids", "2,4,5,8")
    flags = (*flags, "--final-norm", "post")
    report = hsfmt.json("convert", source, tmp_path / "d", *flags, "--trim-padding")
    assert report["written"]["tokens"] == 17
    assert report["written"]["trimmed_tokens"] == 270
    (found,) = read_all(tmp_path / "d").values()
    assert found.metadata["conversion"] == {"trimmed": {"by": "pad_id 0", "tokens": 270}}
    hsfmt("convert", source, tmp_path / "whole", *flags)
    (whole,) = read_all(tmp_path / "whole").values()
    assert len(whole.input_ids) == 287
    assert np.array_equal(found.hidden_states, whole.hidden_states[:17])


@pytest.mark.torch
@pytest.mark.parametrize("delete", [(), ("--delete-source",)], ids=["keep", "delete"])
def test_loss_weights_are_a_column(hsfmt, tmp_path, delete):
    import torch

    source = tmp_path / "source"
    source.mkdir()
    weights = [0.0, 0.5, 1.0, 0.25, 0.0, 0.0]
    for n in range(3):
        states = [torch.full((6, 4), float(n + layer)) for layer in range(2)]
        mask = torch.tensor(weights) * (n + 1)
        torch.save({"input_ids": torch.arange(6), "hidden_states": states, "loss_mask": mask}, source / f"data_{n}.pt")
    flags = ("--from", "pt", "--layer-ids", "1,2", "--final-norm", "post")
    result = hsfmt("convert", source, tmp_path / "refused", *flags, code=1)
    assert "--loss-weights" in result.stderr
    flags = (*flags, "--loss-weights", *delete)
    report = hsfmt.json("convert", source, tmp_path / "d", *flags, "--split-long", 4)
    assert report["counts"]["sample"] == 3
    found = read_all(tmp_path / "d")
    assert found["data_2#0"].loss_mask.tolist() == [0, 1, 1, 1]
    assert np.asarray(found["data_2#0"].extras["loss_weight"]).tolist() == [0, 1.5, 3, 0.75]
    assert np.asarray(found["data_2#1"].extras["loss_weight"]).tolist() == [0, 0]
    assert len(list(source.iterdir())) == (0 if delete else 3)
    if not delete:
        # Committed before: read again with its column, and deleted then.
        hsfmt("convert", source, tmp_path / "d", *flags, "--split-long", 4, "--delete-source")
        assert list(source.iterdir()) == []
