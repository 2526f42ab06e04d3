"""Source `memmap`: activation caches, joined by sequence ranges. The files imitate those of ActivationCache.collect."""

import json
import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch

from hsfmt.errors import SourceError, UsageError
from hsfmt.readers.sources import (
    AbsentSampleError,
    SourceOptions,
    find_source,
    parse_key_map,
    settle_final_norm,
    settle_layers,
)
from hsfmt.readers.sources.listing import list_folder
from hsfmt.readers.sources.look import Look
from hsfmt.readers.sources.memmap_store import MemmapSource

H, N = 8, 23
SHARDS = (9, 14)
STARTS = (0, 4, 9, 9, 20, 23)
TOKENS = torch.arange(N) * 3
NAMES = ("layer_5_out", "layer_10_out")


def values(layer: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(N * H).reshape(N, H) / 9 + 100 * layer).to(dtype)


def save_shard(folder, k, activations):
    """As dictionary_learning's: bfloat16 viewed as int16, through numpy.memmap."""
    bits = activations.view(torch.int16) if activations.dtype == torch.bfloat16 else activations
    target = np.memmap(folder / f"shard_{k}.memmap", dtype=bits.numpy().dtype, mode="w+", shape=tuple(bits.shape))
    target[:] = bits.numpy()
    target.flush()
    meta = {"shape": list(activations.shape), "dtype": str(activations.dtype)}
    (folder / f"shard_{k}.meta").write_text(json.dumps(meta))


@pytest.fixture
def collect(tmp_path):
    """Write a cache, and open it."""

    def write(path="", *, dtype=torch.bfloat16, names=NAMES, config=None, ranges=STARTS, tokens=TOKENS, key_map=""):
        root = tmp_path / path
        for layer, name in enumerate(names):
            folder = root / name
            folder.mkdir(parents=True)
            for k, rows in enumerate(values(layer, dtype).split(SHARDS)):
                save_shard(folder, k, rows)
            document = {
                "batch_size": 4, "context_len": 16, "shard_size": 8, "d_model": H, "shuffle_shards": False, "io": "out",
                "total_size": N, "shard_count": len(SHARDS), "store_tokens": True, "store_sequence_ranges": True,
            }  # fmt: skip
            (folder / "config.json").write_text(json.dumps(document | (config or {})))
            torch.save(torch.zeros(H), folder / "mean.pt")
            torch.save(torch.ones(H), folder / "std.pt")
        if tokens is not None:
            torch.save(tokens, root / "tokens.pt")
        if ranges is not None:
            torch.save(torch.tensor(ranges), root / "sequence_ranges.pt")
        return lambda: find_source(tmp_path, "memmap", options=SourceOptions(key_map=parse_key_map(key_map)))

    return write


def check(source, dtype=torch.bfloat16, layers=(0, 1)):
    wanted = torch.stack([values(layer, dtype) for layer in layers], dim=1)
    for item in source.items:
        if item.problem is not None:
            continue
        i = int(item.sample_id.rpartition("/")[2])
        start, stop = STARTS[i], STARTS[i + 1]
        sample = source.load(item)
        assert sample.hidden_states.tobytes() == wanted[start:stop].contiguous().view(torch.uint8).numpy().tobytes()
        assert sample.input_ids.tolist() == TOKENS[start:stop].tolist()
        assert source.n_tokens(item) == stop - start


def load_first(source):
    return source.load(source.items[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_cache(collect, accounted_for, dtype, monkeypatch):
    source = collect(dtype=dtype)()
    meaning = source.meaning()
    assert (meaning.hidden_size, meaning.n_layers, meaning.dtype) == (H, 2, str(dtype).removeprefix("torch."))
    assert [item.sample_id for item in source.items] == ["0", "1", "2", "3", "4"]
    check(source, dtype)
    check(pickle.loads(pickle.dumps(source)), dtype)
    # Sequence 3 goes on in the second shard of each submodule.
    assert source.items[1].shared == ("layer_5_out/shard_0.memmap", "layer_10_out/shard_0.memmap")
    roles = {support.path: support.role for support in source.support}
    assert {roles[path] for item in source.items for path in item.shared} == {"container"}
    assert not source.strays
    assert len(roles) == len([path for path in source.root.rglob("*") if path.is_file()])


def test_a_sequence_across_shards(collect, monkeypatch):
    monkeypatch.setattr("test_memmap_store.STARTS", (0, 6, 23))
    source = collect(ranges=(0, 6, 23))()
    assert len(source.items[1].shared) == 4
    check(source)


def test_an_empty_sequence_is_no_failure(collect):
    source = collect()()
    with pytest.raises(AbsentSampleError, match="an empty sequence"):
        source.load(source.items[2])


def test_ranges_as_pairs(collect):
    check(collect(ranges=[list(pair) for pair in pairwise(STARTS)])())


def test_caches_below_the_folder(collect):
    collect("train")
    source = collect("validation")()
    assert source.items[0].sample_id == "train/0"
    assert source.items[5].sample_id == "validation/0"
    check(source)


def test_other_submodules_in_another_cache(collect):
    collect("train")
    with pytest.raises(SourceError, match=r"layer_5_out, layer_10_out in train/ and layer_5_out in validation/"):
        collect("validation", names=NAMES[:1])()


def test_layers_and_norm_are_demanded(collect):
    meaning = collect()().meaning()
    with pytest.raises(UsageError, match=r"the submodules layer_5_out, layer_10_out, in this order"):
        settle_layers(meaning, None)
    assert settle_layers(meaning, (6, 11)) == (6, 11)
    with pytest.raises(UsageError, match="pre if the submodules are decoder layers"):
        settle_final_norm(meaning, None)


def test_a_submodule_is_left_out(collect):
    source = collect(key_map="ignore=layer_5_out")()
    check(source, layers=(1,))
    assert {stray.path.partition("/")[0] for stray in source.strays} == {"layer_5_out"}
    with pytest.raises(UsageError, match="ignore=FOLDER alone"):
        find_source(source.root, "memmap", options=SourceOptions(key_map=parse_key_map("hidden_states=x")))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"config": {"shuffle_shards": True, "store_tokens": False}, "tokens": None}, "no sample can be put together"),
        ({"config": {"store_tokens": False}, "tokens": None}, r"tokens\.pt: .*store_tokens is False"),
        ({"ranges": None}, r"sequence_ranges\.pt: .*got none"),
        ({"ranges": (0, 9, 4, 23)}, r"sequence_ranges\.pt\[1\]: expected ranges within 23 rows.*\[9, 4\]"),
        ({"ranges": (0, 9, 24)}, r"\[9, 24\] after \[0, 9\]"),
        ({"ranges": (-1, 9, 23)}, r"\[-1, 9\]"),
        ({"ranges": (0, 9)}, "ranges of 9 rows together"),
        ({"ranges": (2, 23)}, "ranges of 21 rows together"),
        ({"ranges": [[0, 9], [8, 23]]}, r"\[8, 23\] after \[0, 9\]"),
        ({"ranges": [[0, 9], [9, 1 << 62]]}, "within 23 rows"),
        ({"ranges": [[0, 9, 23]]}, "starts, or pairs"),
        ({"ranges": (0.0, 23.0)}, "a tensor of integers"),
        ({"ranges": []}, "a tensor of integers"),
        ({"config": {"total_size": 24}}, "expected 23, the rows of its shards, got 24"),
        ({"config": {"shard_count": 3}}, r"shard_2\.meta"),
        ({"config": {"shard_count": 1 << 40}}, "an integer from 1 to"),
        ({"config": {"d_model": 7}}, "rows of 7, the d_model"),
    ],
)
def test_caches_that_are_none(collect, options, words):
    opening = collect(**options)
    with pytest.raises(SourceError, match=words):
        opening()


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({"shape": [1 << 40, H], "dtype": "torch.bfloat16"}, f"{(1 << 40) + 14}, the rows of its shards, got 23"),
        ({"shape": [-1, H], "dtype": "torch.bfloat16"}, r"\[rows, hidden\]"),
        ({"shape": [72], "dtype": "torch.bfloat16"}, r"\[rows, hidden\]"),
        ({"shape": [9, H], "dtype": "torch.int8"}, "bfloat16, float16, float32"),
        ({"shape": [9, H]}, "shards of one dtype, got bfloat16, float32"),
        ([], "a JSON object"),
    ],
)
def test_metas_that_are_none(collect, tmp_path, meta, words):
    opening = collect()
    (tmp_path / "layer_5_out/shard_0.meta").write_text(json.dumps(meta))
    with pytest.raises(SourceError, match=words):
        load_first(opening())


@pytest.mark.parametrize("data", [b"", b"<html>", b"[" * 100000])
@pytest.mark.parametrize("name", ["config.json", "shard_0.meta", "shard_0.memmap"])
def test_files_that_are_none(collect, tmp_path, name, data):
    opening = collect()
    (tmp_path / "layer_10_out" / name).write_bytes(data)
    with pytest.raises(SourceError, match=rf"layer_10_out/{name}"):
        load_first(opening())


@pytest.mark.parametrize("name", ["tokens.pt", "sequence_ranges.pt"])
@pytest.mark.parametrize("data", [b"", b"<html>", b"PK\x03\x04"])
def test_broken_torch_files(collect, tmp_path, name, data):
    opening = collect()
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SourceError, match=name):
        load_first(opening())


@pytest.mark.parametrize("tokens", [TOKENS[:-1], TOKENS.float(), TOKENS[None]])
def test_tokens_of_another_number(collect, tokens):
    source = collect(tokens=tokens)()
    with pytest.raises(SourceError, match=r"tokens\.pt"):
        source.load(source.items[0])


def test_a_missing_shard(collect, tmp_path):
    """The sequences of the other shards are there, under the same ids, as after a conversion that deleted a part."""
    opening = collect()
    (tmp_path / "layer_5_out/shard_1.memmap").unlink()
    source = opening()
    for item in source.items[:2]:
        assert source.load(item).input_ids.tolist() == TOKENS[slice(*STARTS[int(item.sample_id) :][:2])].tolist()
    for item in source.items[3:]:
        with pytest.raises(SourceError, match=r"layer_5_out/shard_1\.memmap: expected 224 bytes.*no such file"):
            source.load(item)


def test_a_submodule_whose_shards_are_gone(collect, tmp_path):
    """The other one alone is not what was collected."""
    opening = collect()
    for path in (tmp_path / "layer_5_out").glob("*.memmap"):
        path.unlink()
    with pytest.raises(SourceError, match=r"layer_5_out/shard_0\.memmap: .*no such file"):
        opening().meaning()


def test_submodules_that_differ(collect, tmp_path):
    opening = collect()
    folder = tmp_path / "layer_10_out"
    for k, rows in enumerate(values(1, torch.float16).split(SHARDS)):
        save_shard(folder, k, rows)
    with pytest.raises(SourceError, match="dtype bfloat16 as in layer_5_out, got float16"):
        opening()
    save_shard(folder, 0, values(1, torch.bfloat16)[:9])
    with pytest.raises(SourceError, match="shards of one dtype, got bfloat16, float16"):
        opening()


def test_a_shard_that_is_cut_or_grows_meanwhile(collect, tmp_path):
    source = collect()()
    source.meaning()
    path = tmp_path / "layer_5_out/shard_0.memmap"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(
        SourceError,
        match=r"layer_5_out/shard_0\.memmap: expected 144 bytes, as when the folder was listed, got 40 bytes",
    ):
        source.load(source.items[0])


def test_the_folder_of_one_submodule(collect, tmp_path):
    collect("cache")
    folder = tmp_path / "cache/layer_5_out"
    assert MemmapSource.claim(Look(list_folder(folder))).certain
    with pytest.raises(UsageError, match=r"the folder with tokens\.pt, got shard_0\.me[a-z]+ itself .*cache"):
        find_source(folder)


def test_claims(collect, tmp_path):
    collect("a/b")
    assert MemmapSource.claim(Look(list_folder(tmp_path))).certain
    (tmp_path / "a/b/layer_5_out/config.json").unlink()
    assert not MemmapSource.claim(Look(list_folder(tmp_path))).certain
