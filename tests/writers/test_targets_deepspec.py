"""Target deepspec, read back by a decoder written from the description of the format: manifest, index, shards."""

import json
import struct
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from exporting import HEADER, convert, export, job_of, made_job, made_samples, stored, tree

from hsfmt.errors import SampleError
from hsfmt.header import make_header
from hsfmt.readers.sources import SourceOptions, find_source
from hsfmt.writers.targets.registry import target_class

POST = make_header(layers=[0, 3, 8], hidden_size=8, final_norm="post", model="org/tiny")
TOKEN_NBYTES = 4 + 1 + 1 + 3 * 8 * 2
SHARD = "shard_size"


def decode(folder):
    """All samples of a cache as (input_ids, attention_mask, loss_mask, aux bits, last bits), as its reader finds them.

    A record is sample_id u64, shard_id u32, seq_len u32 and five offsets u64, little-endian, 56 bytes.
    """
    manifest = json.loads((folder / "manifest.json").read_bytes())
    assert manifest["version"] == 2
    assert (manifest["index_record_size"], manifest["hidden_dtype"]) == (56, "bfloat16")
    assert (manifest["token_dtype"], manifest["mask_dtype"]) == ("int32", "uint8")
    assert [shard["shard_id"] for shard in manifest["shards"]] == list(range(manifest["num_shards"]))
    assert manifest["target_layer_ids"] == sorted(manifest["target_layer_ids"]) != []
    shards = [(folder / shard["file_name"]).read_bytes() for shard in manifest["shards"]]
    index = (folder / "samples.idx").read_bytes()
    assert len(index) == 56 * manifest["num_samples"]
    width, n_aux = manifest["hidden_size"], len(manifest["target_layer_ids"])
    samples, used = [], [0] * len(shards)
    for number in range(manifest["num_samples"]):
        sample_id, shard, n, *offsets = struct.unpack_from("<QIIQQQQQ", index, 56 * number)
        assert sample_id == number
        assert n > 0
        layout = ("<i4", (n,)), ("u1", (n,)), ("u1", (n,)), ("<u2", (n, n_aux * width)), ("<u2", (n, width))
        tensors = []
        for (dtype, shape), offset in zip(layout, offsets, strict=True):
            assert offset == used[shard]
            tensors.append(np.frombuffer(shards[shard], dtype, int(np.prod(shape)), offset).reshape(shape))
            used[shard] += tensors[-1].nbytes
        samples.append(tensors)
    assert used == list(map(len, shards))
    return manifest, samples


def assert_decoded(found, sample):
    """Compare what a cache holds with the sample that was to be written."""
    ids, attention, mask, aux, last = found
    bits = sample.hidden_states.view(np.uint16)
    np.testing.assert_array_equal(ids, sample.input_ids)
    np.testing.assert_array_equal(attention, 1)
    np.testing.assert_array_equal(mask, sample.loss_mask)
    np.testing.assert_array_equal(aux, bits[:, :-1].reshape(len(ids), -1))
    np.testing.assert_array_equal(last, bits[:, -1])


def test_the_real_cache(data_dir, tmp_path):
    real = data_dir / "deepspec/target_cache"
    reader = convert(real, tmp_path / "dataset", "deepspec", (2, 4, 5, 8))
    target = export("deepspec", job_of(reader, tmp_path / "out"), stored(reader))
    found, original = tree(tmp_path / "out"), tree(real)
    shards = sorted(name for name in original if name.endswith(".bin"))
    assert len(shards) == 3  # of two ranks
    assert found["shard-00000.bin"] == b"".join(original[name] for name in shards)
    documents = [json.loads(files["manifest.json"]) for files in (found, original)]
    same = set(documents[0]) & set(documents[1]) - {"num_shards", "shards"}
    assert {"target_layer_ids", "target_model_name_or_path", "num_samples", "hidden_size"} <= same
    assert {key: documents[0][key] for key in same} == {key: documents[1][key] for key in same}
    ours, theirs = (decode(folder)[1] for folder in (tmp_path / "out", real))
    for ours_, theirs_ in zip(ours, theirs, strict=True):
        for a, b in zip(ours_, theirs_, strict=True):
            np.testing.assert_array_equal(a, b)
    listed = [json.loads(line)["id"] for line in found["hsfmt_samples.jsonl"].splitlines()]
    assert listed == list(reader.sample_ids)
    assert target.dropped() == []


def test_shards_of_a_size_and_our_own_source(tmp_path):
    lengths = [3, 1, 4, 40, 2, 2]
    samples = made_samples(lengths, POST)
    job = made_job(tmp_path / "a", samples, POST, options={SHARD: str(8 * TOKEN_NBYTES + 7)})
    units = export("deepspec", job, samples).units()
    assert [list(unit.numbers) for unit in units] == [[0, 1, 2], [3], [4, 5]]
    manifest, found = decode(tmp_path / "a")
    assert manifest["target_layer_ids"] == [-1, 2]
    assert manifest["target_model_name_or_path"] == "org/tiny"
    assert manifest["hsfmt"] == {"layers": [0, 3, 8], "snapshot": job.fingerprint}
    for tensors, sample in zip(found, samples, strict=True):
        assert_decoded(tensors, sample)
    export("deepspec", replace(job, folder=tmp_path / "b"), samples)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    source = find_source(tmp_path / "a", "deepspec", options=SourceOptions(layer_ids=POST.layers))
    for item, sample in zip(source.items, samples, strict=True):
        read = source.load(item)
        np.testing.assert_array_equal(read.hidden_states.view(np.uint16), sample.hidden_states.view(np.uint16))
        np.testing.assert_array_equal(read.input_ids, sample.input_ids)
    assert source.meaning().layers == POST.layers


def test_the_model_is_named_as_the_trainer_wants(tmp_path):
    samples = made_samples([2], POST)
    export("deepspec", made_job(tmp_path, samples, POST, options={"target_model": "/models/tiny"}), samples)
    assert decode(tmp_path)[0]["target_model_name_or_path"] == "/models/tiny"


def test_the_index_of_a_huge_cache(tmp_path):
    """Offsets beyond 32 bits, and shards of 4 GiB unless another size is said; nothing but the index is written."""
    header = replace(POST, hidden_size=7168, layers=(3, 31, 59, 61))
    n_tokens = np.full(500, 1730)
    job = replace(made_job(tmp_path, [], header), n_tokens=n_tokens, sample_ids=list(map(str, range(500))))
    nbytes = 1730 * (6 + 4 * 7168 * 2)
    for size, per_shard in ((None, (4 << 30) // nbytes), ("40 GiB", (40 << 30) // nbytes)):
        target = target_class("deepspec")(replace(job, options={SHARD: size} if size else {}))
        assert [len(unit.numbers) for unit in target.units()][:2] == [per_shard, min(per_shard, 500 - per_shard)]
        target.finish()
        records = list(struct.iter_unpack("<QIIQQQQQ", (tmp_path / "samples.idx").read_bytes()))
        for number in (0, 1, per_shard - 1, per_shard, 499):
            start = number % per_shard * nbytes
            masks = start + 1730 * 4, start + 1730 * 5
            states = start + 1730 * 6, start + 1730 * (6 + 3 * 7168 * 2)
            assert records[number] == (number, number // per_shard, 1730, start, *masks, *states)
    assert records[400][3] > 2**32


def test_a_long_sample_takes_no_second_copy(tmp_path):
    (sample,) = made_samples([1], replace(POST, hidden_size=4096))
    sample = replace(
        sample,
        input_ids=np.zeros(4000, np.int64),
        loss_mask=np.ones(4000, np.uint8),
        hidden_states=np.repeat(sample.hidden_states, 4000, axis=0),
    )
    header = replace(POST, hidden_size=4096)
    target = target_class("deepspec")(made_job(tmp_path, [sample], header))
    tracemalloc.start()
    target.write(target.units()[0], iter([sample]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sample.hidden_states.nbytes > 90 << 20
    assert peak < 24 << 20


def test_what_is_refused_before_anything_is_written(tmp_path):
    samples = made_samples([2, 3], POST)

    def refused(header=POST, **settings):
        job = replace(made_job(tmp_path, samples, header), **settings)
        return [(problem.where, problem.got) for problem in target_class("deepspec")(job).problems()]

    assert refused() == []
    assert refused(replace(POST, layers=(8,))) == [("--to deepspec", "layers [8]")]
    for model in (None, {"revision": "abc"}):
        assert refused(replace(POST, model=model)) == [("--to deepspec", "none")]
        assert refused(replace(POST, model=model), options={"target_model": "x"}) == []
    for size in ("0", "-1", "many", "4 parsecs", "1e9"):
        assert refused(options={SHARD: size}) == [(f"--option {SHARD}", repr(size))]
    assert refused(n_tokens=np.array([2**32 - 1, 2**32])) == [(samples[1].sample_id, str(2**32))]
    assert refused(n_tokens=np.array([0, 1])) == [(samples[0].sample_id, "0")]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("token", [-1, 2**31])
def test_token_ids_beyond_int32(tmp_path, token):
    (sample,) = made_samples([3], POST)
    sample.input_ids[2] = token
    target = target_class("deepspec")(made_job(tmp_path, [sample], POST))
    with pytest.raises(SampleError, match=f"{token} at token 2"):
        target.write(target.units()[0], iter([sample]))
    assert list(tmp_path.iterdir()) == []


def test_a_sample_of_another_length_than_the_index_says(tmp_path):
    (sample,) = made_samples([3], POST)
    target = target_class("deepspec")(replace(made_job(tmp_path, [sample], POST), n_tokens=np.array([4])))
    with pytest.raises(SampleError, match="4 tokens, as the index says"):
        target.write(target.units()[0], iter([sample]))
    assert list(tmp_path.iterdir()) == []


def test_what_the_driver_refuses_for_this_target():
    kind = target_class("deepspec")
    assert (kind.name, kind.final_norm, kind.needs_final_state, kind.dtypes) == (
        "deepspec",
        "post",
        True,
        ("bfloat16",),
    )
    assert set(kind.option_help) == {SHARD, "target_model"}
    assert HEADER.final_norm != kind.final_norm
