"""DeepSpec's target cache: the values of the real one, bit for bit, and every lie that its index can tell."""

import json
import pickle
import struct
import time
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from hsfmt.cli.estimate import estimate
from hsfmt.cli.main import main
from hsfmt.errors import NotFoundError, SourceError, UsageError
from hsfmt.readers.sources import SourceOptions, find_source, settle_layers
from hsfmt.readers.sources.deepspec import DeepSpecSource
from hsfmt.readers.sources.listing import list_folder
from hsfmt.readers.sources.look import Look
from hsfmt.storage import open_store

NAME = "deepspec/target_cache"
OPTIONS = SourceOptions(layer_ids=(2, 4, 5, 8))
RECORD = struct.Struct("<QIIQQQQQ")
HIDDEN, N_AUX = 64, 3
TOKENS = (17, 61, 287, 30, 101, 344)
# Of the real cache, however it is converted.
DIGEST = "xxh3_128:590a9ad49501267875e4f3a926e8ebc7"
ROW = 4 + 1 + 1 + (N_AUX + 1) * HIDDEN * 2


@pytest.fixture
def cache(copy_of) -> Path:
    """A copy of the real cache that a test may change."""
    return copy_of(NAME)


def open_cache(folder: Path, options: SourceOptions = OPTIONS) -> DeepSpecSource:
    return find_source(folder, "deepspec", options=options)


def records(folder: Path) -> list[list[int]]:
    data = (folder / "samples.idx").read_bytes()
    return [list(RECORD.unpack_from(data, at)) for at in range(0, len(data), RECORD.size)]


def write_records(folder: Path, values: list[list[int]]) -> None:
    (folder / "samples.idx").write_bytes(b"".join(RECORD.pack(*value) for value in values))


def edit_manifest(folder: Path, **members: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | members))


def decode(folder: Path, number: int) -> dict[str, np.ndarray]:
    """A sample as DeepSpec's own reader cuts it out of the shard, in 16-bit patterns."""
    _, shard, n, ids, attention, loss, aux, last = records(folder)[number]
    data = (folder / f"shard-{shard:05d}.bin").read_bytes()
    return {
        "input_ids": np.frombuffer(data, "<i4", n, ids),
        "attention_mask": np.frombuffer(data, "u1", n, attention),
        "loss_mask": np.frombuffer(data, "u1", n, loss),
        "aux": np.frombuffer(data, "<u2", n * N_AUX * HIDDEN, aux).reshape(n, N_AUX, HIDDEN),
        "last": np.frombuffer(data, "<u2", n * HIDDEN, last).reshape(n, HIDDEN),
    }


def refusals(source: DeepSpecSource) -> dict[int, str]:
    """Item number to the message with which it is refused; every message names the item."""
    errors = {}
    for number, item in enumerate(source.items):
        try:
            source.load(item)
        except SourceError as error:
            errors[number] = error
    for number, error in errors.items():
        assert all(problem.where.startswith(source.items[number].key) for problem in error.problems)
    return {number: str(error) for number, error in errors.items()}


def test_the_real_cache_comes_bit_for_bit(data_dir):
    source = open_cache(data_dir / NAME)
    assert [item.sample_id for item in source.items] == [str(n) for n in range(6)]
    assert [source.n_tokens(item) for item in source.items] == list(TOKENS)
    assert sum(item.nbytes for item in source.items) == sum(
        path.stat().st_size for path in (data_dir / NAME).glob("*.bin")
    )
    for number, item in enumerate(source.items):
        sample, own = source.load(item), decode(data_dir / NAME, number)
        assert own["attention_mask"].all()
        assert (sample.input_ids.dtype, sample.hidden_states.dtype) == (np.int64, ml_dtypes.bfloat16)
        np.testing.assert_array_equal(sample.input_ids, own["input_ids"])
        np.testing.assert_array_equal(sample.loss_mask, own["loss_mask"])
        np.testing.assert_array_equal(sample.hidden_states[:, :N_AUX].view(np.uint16), own["aux"])
        np.testing.assert_array_equal(sample.hidden_states[:, N_AUX].view(np.uint16), own["last"])
        assert sample.metadata == {}
    assert {(support.path, support.role) for support in source.support} == {
        ("manifest.json", "manifest"),
        ("samples.idx", "index"),
        *((f"shard-0000{n}.bin", "container") for n in range(3)),
    }
    assert source.strays == []


def test_meaning(data_dir):
    meaning = open_cache(data_dir / NAME).meaning()
    assert (meaning.hidden_size, meaning.n_layers, meaning.dtype, meaning.final_norm) == (64, 4, "bfloat16", "post")
    assert (meaning.layers, meaning.model) == ((2, 4, 5, 8), "tiny")
    facts = meaning.producer["deepspec"]
    assert facts["source_jsonl_paths"] == ["convs.jsonl"]
    assert (facts["chat_template"], facts["max_length"], facts["git_sha"]) == ("tiny", 4096, "afdfa7c")


def test_the_number_of_layers_is_never_guessed(data_dir, tmp_path):
    source = open_cache(data_dir / NAME, SourceOptions())
    assert source.meaning().layers is None
    with pytest.raises(UsageError, match=r"2,4,5.*--model-config"):
        settle_layers(source.meaning(), None)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"num_hidden_layers": 8, "hidden_size": 64}))
    source = open_cache(data_dir / NAME, SourceOptions(model_config=str(config)))
    assert settle_layers(source.meaning(), None) == (2, 4, 5, 8)
    with pytest.raises(UsageError, match="2,4,5,N"):
        open_cache(data_dir / NAME, SourceOptions(layer_ids=(1, 3, 4, 8))).meaning()


def test_the_embedding_is_layer_0(cache):
    edit_manifest(cache, target_layer_ids=[-1, 3, 4])
    assert open_cache(cache, SourceOptions(layer_ids=(0, 4, 5, 8))).meaning().layers == (0, 4, 5, 8)


def test_the_last_state_twice_is_refused(cache):
    edit_manifest(cache, target_layer_ids=[1, 3, 7])
    with pytest.raises(UsageError, match="twice"):
        open_cache(cache, SourceOptions(layer_ids=(2, 4, 8, 8))).meaning()


def test_padding_at_the_end_is_kept_and_counted(cache):
    shard, record = cache / "shard-00000.bin", records(cache)[1]
    data = bytearray(shard.read_bytes())
    data[record[4] + 58 : record[4] + 61] = bytes(3)
    shard.write_bytes(data)
    source = open_cache(cache)
    sample = source.load(source.items[1])
    assert (len(sample.input_ids), sample.metadata) == (61, {"padded_tokens": 3})


@pytest.mark.parametrize("place", [0, 30])
def test_padding_elsewhere_is_refused(cache, place):
    shard, record = cache / "shard-00000.bin", records(cache)[1]
    data = bytearray(shard.read_bytes())
    data[record[4] + place] = 0
    shard.write_bytes(data)
    found = refusals(open_cache(cache))
    assert list(found) == [1]
    assert f"the first at token {place}" in found[1]


def test_fp8_states_have_scales_of_one(tmp_path):
    rng = np.random.default_rng(0)
    ids, aux = np.arange(5, dtype="<i4"), rng.integers(0, 120, (5, 2 * 8), np.uint8)
    last = rng.integers(0, 120, (5, 8), np.uint8)
    blobs = [ids.tobytes(), b"\1" * 5, b"\0\0\1\1\1", aux.tobytes(), last.tobytes()]
    offsets = np.cumsum([0, *map(len, blobs)])
    (tmp_path / "shard-00000.bin").write_bytes(b"".join(blobs))
    write_records(tmp_path, [[0, 0, 5, *offsets[:5].tolist()]])
    manifest = {"version": 2, "num_samples": 1, "num_shards": 1, "target_layer_ids": [0, 1], "hidden_size": 8}
    manifest |= {"hidden_dtype": "float8_e4m3fn", "token_dtype": "int32", "mask_dtype": "uint8"}
    manifest |= {"index_record_size": 56, "shards": [{"shard_id": 0, "file_name": "shard-00000.bin"}]}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    source = open_cache(tmp_path, SourceOptions(layer_ids=(1, 2, 9)))
    sample = source.load(source.items[0])
    assert source.meaning().scaling == {"column": "hidden_states_scale", "rule": "bfloat16_product"}
    np.testing.assert_array_equal(sample.hidden_states.view(np.uint8)[:, :2].reshape(5, 16), aux)
    np.testing.assert_array_equal(sample.hidden_states.view(np.uint8)[:, 2], last)
    assert sample.extras["hidden_states_scale"].tolist() == [1.0] * 5
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"hidden_dtype": "float8_e5m2"}))
    with pytest.raises(SourceError, match="float8_e5m2"):
        open_cache(tmp_path)


def test_a_truncated_shard_is_refused_whole(cache):
    shard = cache / "shard-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    found = refusals(open_cache(cache))
    assert list(found) == [0, 1, 2]
    assert "offset" in found[2]
    assert "189069 bytes" in found[0]


def test_a_longer_shard_is_refused(cache):
    with (cache / "shard-00001.bin").open("ab") as file:
        file.write(b"\0")
    found = refusals(open_cache(cache))
    assert list(found) == [3, 4]
    assert "67858 bytes" in found[3]
    assert "67859" in found[3]


def test_swapped_shards_are_refused(cache):
    one, other = cache / "shard-00000.bin", cache / "shard-00002.bin"
    a, b = one.read_bytes(), other.read_bytes()
    one.write_bytes(b)
    other.write_bytes(a)
    assert sorted(refusals(open_cache(cache))) == [0, 1, 2, 5]


def test_a_missing_shard(cache):
    (cache / "shard-00001.bin").unlink()
    source = open_cache(cache)
    found = refusals(source)
    assert list(found) == [3, 4]
    assert all("no such file" in text for text in found.values())
    assert [item.shared for item in source.items[2:5]] == [("shard-00000.bin",), (), ()]


@pytest.mark.parametrize(
    ("field", "value", "words", "numbers"),
    [
        (1, 3, "shard 3", [1]),
        (1, 2**32 - 1, "shard 4294967295", [1]),
        (2, 0, "0 tokens", [0, 1, 2]),
        (2, 2**32 - 1, "4294967295 tokens", [0, 1, 2]),
        (3, 2**64 - 1, "offset 18446744073709551615", [0, 1, 2]),
        (3, 0, "overlaps", [0, 1, 2]),
        (6, 2**63, "offset 9223372036854775808", [0, 1, 2]),
        (7, 189070 - 7807, "offset", [0, 1, 2]),
        (7, 2**40, "1099511627776", [0, 1, 2]),
    ],
)
def test_lies_of_the_index(cache, field, value, words, numbers):
    values = records(cache)
    values[1][field] = value
    write_records(cache, values)
    found = refusals(open_cache(cache))
    assert set(numbers) <= set(found)
    assert words in found[1]
    assert not {3, 4, 5} & set(found)


def test_two_samples_in_one_place(cache):
    values = records(cache)
    values[4][3:] = values[3][3:]
    values[4][2] = values[3][2]
    write_records(cache, values)
    assert sorted(refusals(open_cache(cache))) == [3, 4]
    (cache / "shard-00001.bin").write_bytes((cache / "shard-00001.bin").read_bytes()[: 2 * 30 * ROW])
    found = refusals(open_cache(cache))
    assert sorted(found) == [3, 4]
    assert "overlaps" in found[3]


def test_ids_that_do_not_count_up(cache):
    values = records(cache)
    values[3], values[4] = values[4], values[3]
    write_records(cache, values)
    found = refusals(open_cache(cache))
    assert list(found) == [3, 4]
    assert "sample id 3" in found[3]


def test_negative_ids_and_masks_that_are_none(cache):
    shard, values = cache / "shard-00000.bin", records(cache)
    data = bytearray(shard.read_bytes())
    data[values[0][3] : values[0][3] + 4] = b"\xff" * 4
    data[values[1][5] + 7] = 2
    shard.write_bytes(data)
    found = refusals(open_cache(cache))
    assert list(found) == [0, 1]
    assert "-1 at token 0" in found[0]
    assert "2 at token 7" in found[1]


def test_a_shard_that_changes_after_listing(cache):
    source = open_cache(cache)
    with (cache / "shard-00001.bin").open("ab") as file:
        file.write(b"\0")
    assert list(refusals(source)) == [3, 4]


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"version": 1}, "version"),
        ({"version": True}, "version"),
        ({"num_samples": 7}, "392 bytes"),
        ({"num_samples": 2**40}, "samples.idx"),
        ({"num_samples": -1}, "num_samples"),
        ({"num_samples": "6"}, "num_samples"),
        ({"num_shards": 2}, "2 shards"),
        ({"num_shards": 2**40}, "num_shards"),
        ({"shards": []}, "shards"),
        ({"hidden_size": 2**40}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_dtype": "float32"}, "float32"),
        ({"target_layer_ids": [4, 3, 1]}, "ascending"),
        ({"target_layer_ids": [1, 1, 3]}, "different"),
        ({"target_layer_ids": [-2, 1, 3]}, "from -1"),
        ({"target_layer_ids": []}, "target_layer_ids"),
        ({"target_layer_ids": "1,3,4"}, "target_layer_ids"),
        ({"index_record_size": 64}, "56"),
        ({"shards": [{"shard_id": i, "file_name": "../shard-00000.bin"} for i in range(3)]}, "file name"),
        ({"shards": [{"shard_id": i, "file_name": "shard-00000.bin"} for i in range(3)]}, "once"),
        ({"shards": [{"shard_id": 2 - i, "file_name": f"shard-0000{i}.bin"} for i in range(3)]}, "shard_id 0"),
    ],
)
def test_lies_of_the_manifest(cache, members, words):
    edit_manifest(cache, **members)
    with pytest.raises(SourceError, match=words):
        open_cache(cache)


@pytest.mark.parametrize("ids", [[1, 3], [1, 3, 4, 6]])
def test_layer_ids_of_another_number_do_not_fit_the_shards(cache, ids):
    edit_manifest(cache, target_layer_ids=ids)
    try:
        found = refusals(open_cache(cache, SourceOptions(layer_ids=(*(i + 1 for i in ids), 8))))
    except SourceError as error:
        found = dict.fromkeys(range(6), str(error))
    assert len(found) == 6


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("manifest.json", b"<!DOCTYPE html><html></html>", "web page"),
        ("manifest.json", b"", "empty"),
        ("manifest.json", b'{"version": 2', "JSON object"),
        ("manifest.json", b"[" * 100_000, "JSON object"),
        ("manifest.json", b'{"version":' + b"1" * 100_000 + b"}", "JSON object"),
        ("manifest.json", b"[2]", "list"),
        ("manifest.json", b" " * (5 << 20), "at most 4194304 bytes"),
        ("samples.idx", b"<html>", "336 bytes"),
        ("samples.idx", bytes(335), "335 bytes"),
    ],
)
def test_documents_that_are_none(cache, name, data, words):
    (cache / name).write_bytes(data)
    with pytest.raises(SourceError, match=words):
        open_cache(cache)


def test_an_index_of_nothing_costs_no_memory(cache):
    n = 1 << 20
    (cache / "samples.idx").write_bytes(bytes(56 * n))
    edit_manifest(cache, num_samples=n)
    tracemalloc.start()
    try:
        with pytest.raises(SourceError, match=rf"samples in shards of .* got {n}"):
            open_cache(cache)
        assert tracemalloc.get_traced_memory()[1] < 3 * 56 * n
    finally:
        tracemalloc.stop()


def test_a_shard_without_samples_is_named(cache):
    values = records(cache)[:5]
    write_records(cache, values)
    edit_manifest(cache, num_samples=5)
    assert any("shard-00002.bin" in note for note in open_cache(cache).notes)


def test_claim(data_dir, cache):
    assert find_source(data_dir / NAME).name == "deepspec"
    (cache / "manifest.json").write_text("<html>")
    assert find_claim(cache).certain
    (cache / "manifest.json").write_text('{"format_version": 2}')
    assert find_claim(cache) is None
    (cache / "samples.idx").unlink()
    assert find_claim(cache) is None


def find_claim(folder: Path):
    return DeepSpecSource.claim(Look(list_folder(folder)))


def test_other_files_are_strays_and_a_folder_without_a_manifest_is_refused(cache):
    (cache / "samples.idx.tmp").write_bytes(b"x")
    (cache / "shard-00003.bin").write_bytes(b"x")
    assert [stray.path for stray in open_cache(cache).strays] == ["samples.idx.tmp", "shard-00003.bin"]
    (cache / "manifest.json").unlink()
    with pytest.raises((SourceError, NotFoundError), match="no such file"):
        open_cache(cache)


def test_it_pickles(data_dir):
    source = pickle.loads(pickle.dumps(open_cache(data_dir / NAME)))
    assert len(source.load(source.items[5]).input_ids) == 344


def test_the_estimate_is_exact(data_dir, tmp_path):
    source = open_cache(data_dir / NAME)
    found = estimate(source, range(6), source.meaning(), "none", open_store(str(tmp_path / "dst")))
    assert found.exact
    assert found.raw_nbytes == sum(TOKENS) * ((N_AUX + 1) * HIDDEN * 2 + 5)


def convert(source: Path, dataset: Path, *args: str) -> dict:
    argv = ["convert", str(source), str(dataset), "--from", "deepspec", "--layer-ids", "2,4,5,8", "--json", *args]
    result = CliRunner().invoke(main, argv)
    assert result.stdout, result.stderr
    return json.loads(result.stdout)


def test_counts_add_up_and_resuming_reads_nothing_again(cache, tmp_path):
    report = convert(cache, tmp_path / "dataset")
    assert report["counts"] == {"failed": 0, "hole": 0, "not_reached": 0, "sample": 6, "skipped": 0}
    files = report["files"]
    assert (files["container"], files["support"], files["stray"], files["total"]) == (3, 2, 0, 5)
    assert report["snapshot"]["content_digest"] == DIGEST
    again = convert(cache, tmp_path / "dataset")
    assert (again["counts"]["skipped"], again["snapshot"]["content_digest"]) == (6, DIGEST)
    assert not any("another place" in text for text in again["warnings"])


def test_a_changed_shard_is_compared_again(cache, tmp_path):
    convert(cache, tmp_path / "dataset")
    time.sleep(0.05)
    shard, record = cache / "shard-00001.bin", records(cache)[3]
    data = bytearray(shard.read_bytes())
    data[record[6]] ^= 1
    shard.write_bytes(data)
    report = convert(cache, tmp_path / "dataset")
    assert [conflict["id"] for conflict in report["conflicts"]] == ["3"]


def test_resuming_after_a_shard_came_back(cache, tmp_path):
    shard = cache / "shard-00001.bin"
    data = shard.read_bytes()
    shard.unlink()
    report = convert(cache, tmp_path / "dataset", "--on-bad", "hole")
    assert (report["counts"]["hole"], report["counts"]["sample"]) == (2, 4)
    shard.write_bytes(data)
    report = convert(cache, tmp_path / "dataset")
    assert (report["counts"]["sample"], report["snapshot"]["content_digest"]) == (2, DIGEST)


def test_a_shard_goes_only_when_all_its_samples_are_committed(cache, tmp_path):
    shard, record = cache / "shard-00000.bin", records(cache)[1]
    good = shard.read_bytes()
    data = bytearray(good)
    data[record[4]] = 0
    shard.write_bytes(data)
    report = convert(cache, tmp_path / "dataset", "--delete-source", "--on-bad", "hole")
    assert (report["counts"]["sample"], report["counts"]["hole"]) == (5, 1)
    assert [path.name for path in sorted(cache.glob("*.bin"))] == ["shard-00000.bin"]
    shard.write_bytes(good)
    report = convert(cache, tmp_path / "dataset", "--delete-source")
    assert (report["counts"]["sample"], report["counts"]["skipped"]) == (1, 5)
    assert sorted(path.name for path in cache.iterdir()) == ["manifest.json", "samples.idx"]
    assert report["snapshot"]["content_digest"] == DIGEST
