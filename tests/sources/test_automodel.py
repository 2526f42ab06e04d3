"""NeMo Automodel's EAGLE-3 cache: imitated caches bit for bit, put back into place, and caches that lie or are torn."""

import json
import pickle
import shutil
import struct
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from hsfmt.cli.estimate import estimate
from hsfmt.cli.main import main
from hsfmt.errors import SourceError, UsageError
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.sources import SourceOptions, find_source, parse_key_map, settle_final_norm, settle_layers
from hsfmt.readers.sources.automodel import AutomodelSource
from hsfmt.readers.sources.listing import list_folder
from hsfmt.readers.sources.look import Look
from hsfmt.storage import open_store

HIDDEN, LENGTH, N_AUX = 16, 24, 3
LENGTHS = (9, 24, 2, 17, 11)
DTYPES = {"BF16": "<u2", "I64": "<i8", "I32": "<i4", "BOOL": "?"}
NAMES = {"uint16": "BF16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "bool": "BOOL", "float32": "F32"}


@pytest.fixture
def cache(copy_of) -> Path:
    return copy_of("automodel/dense")


def open_cache(folder: Path, **options: object) -> AutomodelSource:
    return find_source(folder, "automodel", options=SourceOptions(**options))


def tensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file, decoded by hand; bfloat16 as bits."""
    data = path.read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    found = {}
    for name, entry in json.loads(data[8 : 8 + n]).items():
        begin, end = entry["data_offsets"]
        values = np.frombuffer(data[8 + n + begin : 8 + n + end], DTYPES[entry["dtype"]])
        found[name] = values.reshape(entry["shape"])
    return found


def save(path: Path, values: dict[str, np.ndarray]) -> None:
    header, blobs, at = {}, [], 0
    for name, array in values.items():
        blob = np.ascontiguousarray(array).tobytes()
        shape = list(array.shape)
        header[name] = {"dtype": NAMES[array.dtype.name], "shape": shape, "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def edit_shard(folder: Path, shard: int, change) -> None:
    path = folder / f"shard-{shard:06d}.safetensors"
    values = {name: array.copy() for name, array in tensors(path).items()}
    change(values)
    save(path, values)


def edit_manifest(folder: Path, **members: object) -> None:
    path = folder / "manifest.json"
    document = json.loads(path.read_text()) | members
    path.write_text(json.dumps({name: value for name, value in document.items() if value is not ...}))


def refusals(source: AutomodelSource) -> dict[int, str]:
    errors = {}
    for item in source.items:
        try:
            source.load(item)
        except SourceError as error:
            errors[item.index] = item.key, error
    for key, error in errors.values():
        assert all(problem.where.startswith(key) for problem in error.problems)
    return {number: str(error) for number, (_, error) in errors.items()}


@pytest.mark.parametrize("name", ["dense", "topk"])
def test_every_sample_is_what_was_fed_to_the_model(data_dir, name):
    """States, ids and masks as they were before Automodel shifted and padded them, without the first token."""
    folder = data_dir / "automodel" / name
    originals = tensors(data_dir / "automodel" / f"{name}_originals.safetensors")
    source = open_cache(folder)
    assert [item.sample_id for item in source.items] == [str(n) for n in range(5)]
    assert [source.n_tokens(item) for item in source.items] == [n - 1 for n in LENGTHS]
    for i, item in enumerate(source.items):
        sample = source.load(item)
        assert (sample.input_ids.dtype, sample.hidden_states.dtype) == (np.int64, ml_dtypes.bfloat16)
        np.testing.assert_array_equal(sample.hidden_states.view(np.uint16), originals[f"{i}.states"][1:])
        np.testing.assert_array_equal(sample.input_ids, originals[f"{i}.input_ids"][1:])
        np.testing.assert_array_equal(sample.loss_mask, originals[f"{i}.loss_mask"][1:])
        assert sample.metadata == {"padding": LENGTH - LENGTHS[i]}


@pytest.mark.parametrize("name", ["dense", "topk"])
def test_the_columns_beside_the_states(data_dir, name):
    folder = data_dir / "automodel" / name
    source = open_cache(folder)
    fields = {0: "target_probs"} if name == "dense" else {0: "target_probs_values", 1: "target_probs_indices"}
    for item in source.items:
        shard = tensors(folder / item.shared[0])
        row, n_tokens = item.index % 2, LENGTHS[item.index] - 1
        sample = source.load(item)
        assert set(sample.extras) == {"position_mask", *fields.values()} == set(source.meaning().extras)
        for field in fields.values():
            found = sample.extras[field]
            found = found.view(np.uint16) if found.dtype == ml_dtypes.bfloat16 else found
            np.testing.assert_array_equal(found, shard[field][row, :n_tokens])
        np.testing.assert_array_equal(sample.extras["position_mask"], shard["position_mask"][row, :n_tokens, 0])
    source = open_cache(folder, key_map=parse_key_map("ignore=target_probs"))
    assert set(source.load(source.items[0]).extras) == {"position_mask"} == set(source.meaning().extras)


def test_meaning(data_dir, tmp_path):
    for name in ("dense", "topk"):
        meaning = open_cache(data_dir / "automodel" / name).meaning()
        assert (settle_layers(meaning, None), settle_final_norm(meaning, None)) == ((2, 4, 5), "unknown")
        assert (meaning.hidden_size, meaning.n_layers, meaning.dtype) == (HIDDEN, 3, "bfloat16")
        assert meaning.model == "example/target"
        assert meaning.producer["automodel"]["input_data"] == "example/conversations"
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"num_hidden_layers": 5, "hidden_size": HIDDEN}))
    meaning = open_cache(data_dir / "automodel" / "dense", model_config=str(config)).meaning()
    assert settle_final_norm(meaning, None) == "pre"
    with pytest.raises(UsageError, match="2,4,5"):
        settle_layers(meaning, (1, 3, 4))


def test_files_and_shares_add_up(cache):
    (cache / "shard-000003.safetensors").write_bytes(b"x")
    (cache / "shard-000001.safetensors.tmp").write_bytes(b"x")
    source = open_cache(cache)
    names = [f"shard-{n:06d}.safetensors" for n in range(3)]
    assert {(support.path, support.role) for support in source.support} == {
        ("manifest.json", "manifest"),
        ("target_embeddings.safetensors", "target_embeddings"),
        *((name, "container") for name in names),
    }
    assert [stray.path for stray in source.strays] == ["shard-000001.safetensors.tmp", "shard-000003.safetensors"]
    assert sum(item.nbytes for item in source.items) == sum((cache / name).stat().st_size for name in names)
    assert [item.key for item in source.items] == [f"{names[n // 2]}:{n % 2}" for n in range(5)]
    assert any("second token" in note for note in source.notes)


def test_padding_on_the_left(cache):
    """Automodel pads on the right; where rows are padded on the left the real tokens are one run all the same."""

    def roll(values: dict[str, np.ndarray]) -> None:
        for field in values.values():
            field[0] = np.roll(field[0], LENGTH - LENGTHS[0], axis=0)
        values["input_ids"][0, -1] = 0

    before = open_cache(cache)
    expected = before.load(before.items[0])
    edit_shard(cache, 0, roll)
    source = open_cache(cache)
    sample = source.load(source.items[0])
    np.testing.assert_array_equal(sample.hidden_states.view(np.uint16), expected.hidden_states.view(np.uint16))
    np.testing.assert_array_equal(sample.input_ids, expected.input_ids)


@pytest.mark.parametrize(
    ("field", "place", "value", "words"),
    [
        ("attention_mask", 3, 0, "zeros between"),
        ("attention_mask", 3, 2, "2 at token 3"),
        ("attention_mask", slice(None), 0, "0 ones"),
        ("attention_mask", slice(1, None), 0, "1 ones"),
        ("loss_mask", 3, 7, "7 at token 3"),
        ("loss_mask", LENGTHS[0] - 1, 1, "one place to the left"),
        ("loss_mask", LENGTH - 1, 1, "one place to the left"),
        ("input_ids", LENGTH - 1, 5, "one place to the left"),
    ],
)
def test_samples_that_do_not_fit(cache, field, place, value, words):
    edit_shard(cache, 0, lambda values: values[field][0].__setitem__(place, value))
    found = refusals(open_cache(cache))
    assert list(found) == [0]
    assert words in found[0]


def test_fields_that_were_not_shifted_are_refused(cache, data_dir):
    originals = tensors(data_dir / "automodel" / "dense_originals.safetensors")

    def unshift(values: dict[str, np.ndarray]) -> None:
        values["input_ids"][1] = originals["1.input_ids"]
        values["loss_mask"][1] = originals["1.loss_mask"]

    edit_shard(cache, 0, unshift)
    assert list(refusals(open_cache(cache))) == [1]


def test_missing_shards(cache):
    (cache / "shard-000001.safetensors").unlink()
    source = open_cache(cache)
    found = refusals(source)
    assert list(found) == [2, 3]
    assert "no such file" in found[2]
    assert [item.sample_id for item in source.items] == [str(n) for n in range(5)]


def test_swapped_and_foreign_shards(cache, data_dir):
    one, last = cache / "shard-000000.safetensors", cache / "shard-000002.safetensors"
    a, b = one.read_bytes(), last.read_bytes()
    one.write_bytes(b)
    last.write_bytes(a)
    assert sorted(refusals(open_cache(cache))) == [0, 1, 4]
    one.write_bytes(a)
    last.write_bytes(b)
    shutil.copyfile(data_dir / "automodel" / "topk" / one.name, one)
    found = refusals(open_cache(cache))
    assert list(found) == [0, 1]


def test_a_shard_of_another_number_of_samples_than_listed(cache):
    """The last shard has fewer samples; a longer one in its place is refused, though all that was listed is there."""
    source = open_cache(cache)
    source.load(source.items[-1])
    shutil.copyfile(cache / "shard-000000.safetensors", cache / "shard-000002.safetensors")
    with pytest.raises(SourceError, match=r"shard-000002\.safetensors:0.*as the manifest says"):
        source.load(source.items[-1])


@pytest.mark.parametrize("damage", ["truncated", "longer", "html", "empty", "header"])
def test_damaged_shards(cache, damage):
    path = cache / "shard-000001.safetensors"
    data = path.read_bytes()
    changed = {"truncated": data[:-1], "longer": data + b"\0", "html": b"<html>".ljust(len(data)), "empty": b""}
    changed["header"] = struct.pack("<Q", 2**40) + data[8:]
    path.write_bytes(changed[damage])
    assert list(refusals(open_cache(cache))) == [2, 3]


def test_shapes_and_offsets_that_lie(cache):
    path = cache / "shard-000001.safetensors"
    data = path.read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    for change in (
        lambda entry: entry | {"shape": [2**40, LENGTH]},
        lambda entry: entry | {"shape": [2, 2**40]},
        lambda entry: entry | {"shape": [-2, -LENGTH]},
        lambda entry: entry | {"data_offsets": [entry["data_offsets"][0] + 8, entry["data_offsets"][1] + 8]},
        lambda entry: entry | {"data_offsets": [-8, entry["data_offsets"][1]]},
        lambda entry: entry | {"dtype": "F64"},
    ):
        header = json.loads(data[8 : 8 + n])
        header["input_ids"] = change(header["input_ids"])
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + n :])
        assert list(refusals(open_cache(cache))) == [2, 3]


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"format_version": 1}, "format_version"),
        ({"num_samples": -1}, "num_samples"),
        ({"num_samples": 2**50}, "num_samples"),
        ({"shard_size": 0}, "shard_size"),
        ({"shard_size": ...}, "shard_size"),
        ({"seq_length": 2**40}, "seq_length"),
        ({"dtype": "fp64"}, "bf16"),
        ({"aux_layer_ids": [1, 3]}, r"weight \[64, 16\]"),
        ({"aux_layer_ids": [1, 3, 4, 6]}, r"weight \[64, 16\]"),
        ({"aux_layer_ids": [1, 3, 4, 6, 7]}, "multiple of 5"),
        ({"aux_layer_ids": [1, 3, 3]}, "different"),
        ({"aux_layer_ids": [-1, 3, 4]}, "from 0"),
        ({"aux_hidden_dim": 49}, "multiple of 3"),
        ({"aux_hidden_dim": 2**60}, "aux_hidden_dim"),
        ({"draft_vocab_size": "8"}, "draft_vocab_size"),
        ({"target_probs_topk": -1}, "target_probs_topk"),
        ({"seq_length": 12}, None),
        ({"dtype": "fp16"}, None),
        ({"target_probs_topk": 3}, None),
    ],
)
def test_lies_of_the_manifest(cache, members, words):
    edit_manifest(cache, **members)
    if words is None:
        assert list(refusals(open_cache(cache))) == list(range(5))
        return
    with pytest.raises(SourceError, match=words):
        open_cache(cache)


@pytest.mark.parametrize("members", [{"num_samples": 2**40}, {"num_samples": 2**40, "shard_size": 1}])
def test_a_giant_number_of_samples_costs_nothing(cache, members):
    edit_manifest(cache, **members)
    tracemalloc.start()
    try:
        source = open_cache(cache)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert any("samples are missing" in text for text in refusals(source).values())


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"<!DOCTYPE html>", "web page"),
        (b"", "empty"),
        (b'{"format_version": 2', "JSON object"),
        (b"[" * 100_000, "JSON object"),
        (b" " * (17 << 20), "at most 16777216 bytes"),
    ],
)
def test_a_manifest_that_is_none(cache, data, words):
    (cache / "manifest.json").write_bytes(data)
    with pytest.raises(SourceError, match=words):
        open_cache(cache)


def test_a_shard_that_changes_while_it_is_read(cache, monkeypatch):
    source = open_cache(cache)
    source.meaning()
    from hsfmt.readers.sources import automodel_fields

    original = automodel_fields.real_tokens

    def change(*args: object) -> tuple[int, int]:
        path = cache / "shard-000000.safetensors"
        path.write_bytes(path.read_bytes())
        return original(*args)

    monkeypatch.setattr(automodel_fields, "real_tokens", change)
    with pytest.raises(SourceError, match="stays as it is"):
        source.load(source.items[0])


def test_claim(data_dir, cache):
    assert find_source(data_dir / "automodel" / "topk").name == "automodel"
    edit_manifest(cache, aux_layer_ids=...)
    assert find_claim(cache) is None
    (cache / "manifest.json").write_text("[1]")
    assert find_claim(cache) is None
    (cache / "manifest.json").write_text("<html>")
    with pytest.raises(SourceError, match="web page"):
        find_source(cache)
    (cache / "target_embeddings.safetensors").unlink()
    assert find_claim(cache) is None


def find_claim(folder: Path):
    return AutomodelSource.claim(Look(list_folder(folder)))


def test_it_pickles(data_dir):
    source = pickle.loads(pickle.dumps(open_cache(data_dir / "automodel" / "dense")))
    assert len(source.load(source.items[4]).input_ids) == LENGTHS[4] - 1


def test_the_estimate_is_exact(data_dir, tmp_path):
    source = open_cache(data_dir / "automodel" / "dense")
    found = estimate(source, range(5), source.meaning(), "none", open_store(str(tmp_path / "dst")))
    row = N_AUX * HIDDEN * 2 + 5 + 1 + 8 * 2
    assert (found.exact, found.raw_nbytes) == (True, row * sum(n - 1 for n in LENGTHS))


def convert(source: Path, dataset: Path, *args: str) -> dict:
    argv = ["convert", str(source), str(dataset), "--from", "automodel", "--json", *args]
    result = CliRunner().invoke(main, argv)
    assert result.stdout, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", ["dense", "topk"])
def test_conversion_keeps_columns_and_resumes(copy_of, tmp_path, name):
    folder = copy_of(f"automodel/{name}")
    report = convert(folder, tmp_path / "dataset")
    assert report["counts"]["sample"] == 5
    assert report["files"]["total"] == 5
    reader, source = SampleReader(str(tmp_path / "dataset")), open_cache(folder)
    for i, item in enumerate(source.items):
        stored, theirs = reader.read(i), source.load(item)
        assert set(stored.extras) == set(theirs.extras)
        for column, values in theirs.extras.items():
            assert stored.extras[column].tobytes() == values.tobytes()
    assert convert(folder, tmp_path / "dataset")["counts"]["skipped"] == 5


def test_resuming_after_a_shard_was_written(cache, tmp_path):
    whole = convert(cache, tmp_path / "whole")["snapshot"]["content_digest"]
    path = cache / "shard-000002.safetensors"
    data = path.read_bytes()
    path.unlink()
    report = convert(cache, tmp_path / "dataset", "--on-bad", "hole")
    assert (report["counts"]["hole"], report["counts"]["sample"]) == (1, 4)
    path.write_bytes(data)
    report = convert(cache, tmp_path / "dataset")
    assert (report["counts"]["sample"], report["counts"]["skipped"]) == (1, 4)
    assert report["snapshot"]["content_digest"] == whole
