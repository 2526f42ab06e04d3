"""Targets vllm, speculators and speculators-fp8: the files of the real programs come back byte for byte."""

import fcntl
import json
import sys
from dataclasses import replace

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner
from exporting import HEADER, NATIVE, convert, export, job_of, made_job, made_samples, stored, tree
from safetensors.numpy import load_file

from hsfmt import DatasetWriter
from hsfmt.cli.main import main as hsfmt
from hsfmt.errors import SampleError
from hsfmt.header import make_header
from hsfmt.writers.targets import arrow_dataset, float8_rows, speculators_rows
from hsfmt.writers.targets.float8_rows import dequantise, quantise
from hsfmt.writers.targets.registry import target_class

LAYERS = (2, 4, 5, 8)
SAMPLE_LIST = "hsfmt_samples.jsonl"
FLOAT8 = make_header(
    layers=[2, 8], hidden_size=8, final_norm="pre", dtype="float8_e4m3fn",
    scaling={"column": "scale", "rule": "bfloat16_product"},
)  # fmt: skip


@pytest.fixture(scope="module")
def datasets(data_dir, tmp_path_factory):
    """Real folders as datasets, converted once."""
    made = {}

    def make(name, source="speculators"):
        if name not in made:
            url = tmp_path_factory.mktemp("converted") / "dataset"
            made[name] = convert(data_dir / name, url, source, LAYERS)
        return made[name]

    return make


def rows_of(folder):
    """The rows of the Arrow files in the order of state.json, by pyarrow alone."""
    names = [entry["filename"] for entry in json.loads((folder / "state.json").read_bytes())["_data_files"]]
    return pa.concat_tables([pa.ipc.open_stream(folder / name).read_all() for name in names])


def test_the_files_of_vllm(datasets, data_dir, tmp_path):
    reader = datasets("vllm/vllm032_bf16_prompt", "vllm")
    target = export("vllm", job_of(reader, tmp_path / "out", masks_given=False), stored(reader))
    real = tree(data_dir / "vllm/vllm032_bf16_prompt")
    del real["manifest_from_request_outputs.json"]  # not vLLM's: the script that ran it kept the requests
    assert tree(tmp_path / "out") == real
    assert target.dropped() == []


def test_vllm_opens_and_locks_each_file(tmp_path):
    """Its load_hidden_states takes a shared lock on the companion before it loads the file."""
    header = replace(HEADER, dtype="float32", layers=(0, 3, 7))
    samples = made_samples([1, 5], header)
    target = export("vllm", made_job(tmp_path, samples, header), samples)
    for unit, sample in zip(target.units(), samples, strict=True):
        path = tmp_path / unit.paths[0]
        assert path.parent == tmp_path
        with path.with_name(f"{path.name}.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            data = load_file(path)
        np.testing.assert_array_equal(data["hidden_states"], sample.hidden_states)
        np.testing.assert_array_equal(data["token_ids"], sample.input_ids)
    assert target.dropped() == ["loss masks"]


@pytest.mark.parametrize(
    ("name", "target", "options"),
    [
        ("0.9.0", "speculators", {}),
        ("0.6.0", "speculators", {"loss_mask": "bool"}),
        ("0.9.0_fp8", "speculators-fp8", {}),
    ],
)
def test_the_files_of_speculators(datasets, data_dir, tmp_path, name, target, options):
    reader = datasets(f"speculators/{name}")
    export(target, job_of(reader, tmp_path, options=options), stored(reader))
    real, found = tree(data_dir / "speculators" / name), tree(tmp_path)
    documents = ("dataset_info.json", "state.json")
    states = [path for path in real if path.startswith("hidden_states/")]
    assert len(states) == len(reader)
    for path in (*states, "data-00000-of-00001.arrow"):
        assert found[path] == real[path], path
    assert set(found) == {*states, "data-00000-of-00001.arrow", *documents, SAMPLE_LIST}
    infos, states = ([json.loads(files[path]) for files in (found, real)] for path in documents)
    assert infos[0]["features"] == infos[1]["features"]
    assert states[0] == states[1] | {"_fingerprint": states[0]["_fingerprint"]}
    assert int(states[0]["_fingerprint"], 16) < 2**64
    listed = [json.loads(line) for line in found[SAMPLE_LIST].splitlines()]
    assert [line["id"] for line in listed] == list(reader.sample_ids)
    assert [line["n_tokens"] for line in listed] == rows_of(tmp_path)["seq_len"].to_pylist()


def test_the_vocabulary_files_of_speculators(datasets, data_dir, tmp_path):
    real = data_dir / "speculators/0.9.0"
    arrays = {role: np.load(real / f"{role}-64.npy") for role in ("d2t", "t2d")}
    attachments = {**arrays, "t2d": arrays["t2d"].astype(np.uint8), "other": np.zeros(3)}
    reader = datasets("speculators/0.9.0")
    target = export("speculators", job_of(reader, tmp_path, attachments=attachments), stored(reader))
    for role in arrays:
        assert (tmp_path / f"{role}-64.npy").read_bytes() == (real / f"{role}-64.npy").read_bytes()
    assert target.dropped() == ["attachment other"]


@pytest.mark.torch
def test_the_token_frequencies_of_speculators(datasets, data_dir, tmp_path):
    import torch

    known = torch.load(data_dir / "speculators/0.9.0/token_freq.pt", weights_only=True)
    counts = np.zeros(512, np.int64)
    counts[list(known)] = list(known.values())
    reader = datasets("speculators/0.9.0")
    for folder in ("a", "b"):
        job = job_of(reader, tmp_path / folder, attachments={"token_freq": counts})
        export("speculators", job, stored(reader))
    assert torch.load(tmp_path / "a/token_freq.pt", weights_only=True) == known
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_many_arrow_files(tmp_path, monkeypatch):
    samples = made_samples([3, 1, 4, 40, 2, 2])
    monkeypatch.setattr(speculators_rows, "_TOKEN_NBYTES", 1)
    monkeypatch.setattr(speculators_rows, "_ROW_NBYTES", 0)
    monkeypatch.setattr(speculators_rows, "_SHARD_NBYTES", 8 * 32)  # eight tokens of two layers of eight bfloat16
    units = export("speculators", made_job(tmp_path, samples), samples).units()
    assert [list(unit.numbers) for unit in units] == [[0, 1, 2], [3], [4, 5]]
    assert units[2].paths == ("data-00002-of-00003.arrow", "hidden_states/hs_4.safetensors",
                              "hidden_states/hs_5.safetensors")  # fmt: skip
    rows = rows_of(tmp_path)
    assert rows["input_ids"].to_pylist() == [sample.input_ids.tolist() for sample in samples]
    assert rows["loss_mask"].to_pylist() == [sample.loss_mask.tolist() for sample in samples]


@pytest.mark.parametrize(
    ("hidden_size", "n_tokens", "most"),
    [(7168, 1730, 10), (7168, 80_000, 1), (8, 100, 2259), (8, 1, 15420)],
)
def test_the_shards_of_a_large_export_are_bounded(tmp_path, hidden_size, n_tokens, most):
    """By states; and by tokens and rows, for their ids and masks wait in memory."""
    header = replace(HEADER, hidden_size=hidden_size, layers=(3, 31, 59, 61))
    job = replace(made_job(tmp_path, [], header), n_tokens=np.full(70_000, n_tokens))
    assert max(len(unit.numbers) for unit in target_class("speculators")(job).units()) == most
    assert most == 1 or most * n_tokens <= 1 << 20


def test_batches_of_a_thousand_rows():
    rows = [(np.arange(n % 3 + 1, dtype=np.int32), np.ones(n % 3 + 1, np.uint8)) for n in range(2500)]
    sink = pa.BufferOutputStream()
    arrow_dataset.write_rows(sink, rows, "bool")
    batches = list(pa.ipc.open_stream(sink.getvalue()))
    assert [batch.num_rows for batch in batches] == [1000, 1000, 500]
    assert pa.Table.from_batches(batches)["input_ids"].to_pylist() == [ids.tolist() for ids, _ in rows]


def test_other_rows_have_another_fingerprint(tmp_path):
    samples = made_samples([2, 3])
    jobs = {
        "same": made_job(tmp_path / "same", samples),
        "again": made_job(tmp_path / "again", samples),
        "subset": made_job(tmp_path / "subset", samples[:1]),
        "order": made_job(tmp_path / "order", [replace(s, number=i) for i, s in enumerate(samples[::-1])]),
        "mask": made_job(tmp_path / "mask", samples, options={"loss_mask": "bool"}),
        "content": replace(made_job(tmp_path / "content", samples), fingerprint="xxh3_128:01"),
    }
    found = {}
    for name, job in jobs.items():
        kept = {"subset": samples[:1], "order": [replace(s, number=i) for i, s in enumerate(samples[::-1])]}
        export("speculators", job, kept.get(name, samples))
        found[name] = json.loads((tmp_path / name / "state.json").read_bytes())["_fingerprint"]
    assert tree(tmp_path / "same") == tree(tmp_path / "again")
    del found["again"]
    assert len(set(found.values())) == len(found)


def test_quantising_makes_the_files_of_the_fp8_connector(datasets, data_dir, tmp_path):
    """The two folders are of the same requests: hs_connectors quantised the states that the other one holds."""
    reader = datasets("speculators/0.9.0")
    rows = [(sample, quantise(sample.hidden_states)) for sample in stored(reader)]
    samples = [replace(s, hidden_states=rows.states, extras={"scale": rows.scales}) for s, rows in rows]
    header = replace(reader.header, dtype="float8_e4m3fn", scaling=FLOAT8.scaling)
    export("speculators-fp8", job_of(reader, tmp_path, header=header, extras={"scale": "float32"}), samples)
    real = tree(data_dir / "speculators/0.9.0_fp8")
    found = tree(tmp_path)
    for path in real:
        if path.endswith((".safetensors", ".arrow")):
            assert found[path] == real[path], path


def test_the_command_quantises_and_says_what_that_lost(datasets, data_dir, tmp_path):
    reader = datasets("speculators/0.9.0")
    words = ["export", reader.store.url, str(tmp_path / "out"), "--to", "speculators-fp8", "--cast", "float8_e4m3fn"]
    report = json.loads(CliRunner().invoke(hsfmt, [*words, "--json"], catch_exceptions=False).stdout)
    real, found = tree(data_dir / "speculators/0.9.0_fp8"), tree(tmp_path / "out")
    for path in real:
        if path.endswith((".safetensors", ".arrow")):
            assert found[path] == real[path], path
    made = [quantise(sample.hidden_states) for sample in stored(reader)]
    assert report["cast"] == {
        "from": "bfloat16",
        "to": "float8_e4m3fn",
        "max_error": max(rows.max_error for rows in made),
        "max_relative_error": max(rows.max_relative_error for rows in made),
    }
    assert 0 < report["cast"]["max_relative_error"] < 0.05
    assert report["dropped"] == []
    text = CliRunner().invoke(hsfmt, [*words[:2], str(tmp_path / "again"), *words[3:]]).stdout
    assert "lossy" in text
    assert f"{report['cast']['max_error']:.4g}" in text


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_quantising_in_blocks_and_its_error(monkeypatch, dtype):
    states = made_samples([50], replace(HEADER, dtype=dtype))[0].hidden_states
    states[3] = 0
    states[4] *= 1e-6
    whole = quantise(states)
    monkeypatch.setattr(float8_rows, "_BLOCK_NBYTES", 7 * 64)  # seven tokens
    parts = quantise(states)
    np.testing.assert_array_equal(parts.states.view(np.uint8), whole.states.view(np.uint8))
    np.testing.assert_array_equal(parts.scales, whole.scales)
    error = np.abs(dequantise(whole.states, whole.scales).astype(np.float32) - states.astype(np.float32))
    assert (parts.max_error, whole.max_error) == (error.max(), error.max())
    largest = np.abs(states.astype(np.float32)).max(axis=(1, 2))
    relative = (error.max(axis=(1, 2))[largest > 0] / largest[largest > 0]).max()
    assert parts.max_relative_error == whole.max_relative_error == relative
    assert 0 < relative < 0.05


@pytest.mark.torch
def test_quantising_as_torch_computes_it():
    import torch

    rng = np.random.default_rng(5)
    states = rng.standard_normal((400, 3, 64), np.float32) * np.exp(rng.uniform(-60, 60, (400, 1, 1))).astype(
        np.float32
    )
    states[0], states[1, 0, 0], states[2, 0, 0], states[3] = 0, np.nan, np.inf, 1e-40
    for dtype in (np.float32, ml_dtypes.bfloat16):
        given = states.astype(dtype)
        found = quantise(given)
        wide = torch.from_numpy(given.astype(np.float32))
        scale = (wide.abs().amax(dim=(1, 2), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max).clamp(min=1e-12)
        values = (wide / scale).to(torch.float8_e4m3fn)
        np.testing.assert_array_equal(found.scales, scale.view(-1).numpy())
        theirs, ours = values.view(torch.uint8).numpy(), found.states.view(np.uint8)
        finite = np.ones(len(states), bool)
        finite[1:3] = False
        np.testing.assert_array_equal(ours[finite], theirs[finite])
        np.testing.assert_array_equal(ours[~finite] & 0x7F, theirs[~finite] & 0x7F)  # the sign of a NaN is no one's
        restored = values.to(torch.bfloat16) * scale.to(torch.bfloat16)
        ours = dequantise(found.states, found.scales)
        np.testing.assert_array_equal(
            ours[finite].view(np.uint16), restored[torch.from_numpy(finite)].view(torch.int16).numpy().view(np.uint16)
        )
        assert np.isnan(found.max_error)


@pytest.mark.torch  # without it, token_freq.pt is a problem of its own
def test_what_is_refused_before_anything_is_written(tmp_path):
    samples = made_samples([2, 3])

    def refused(name="speculators", header=HEADER, **settings):
        problems = target_class(name)(replace(made_job(tmp_path, samples, header), **settings)).problems()
        return [(problem.where, problem.got) for problem in problems]

    assert refused(options={"loss_mask": "int8"}) == [("--option loss_mask", "'int8'")]
    long = np.array([2, 2**31])
    assert refused(n_tokens=long) == [(samples[1].sample_id, str(2**31))]
    assert refused("vllm", n_tokens=long) == []
    for name in ("vllm", "speculators-fp8"):
        assert refused(name, FLOAT8) == [("column scale", "no such column")]
        assert refused(name, FLOAT8, extras={"scale": "float16"}) == [("column scale", "float16")]
        assert refused(name, FLOAT8, extras={"scale": "float32"}) == []
    d2t, t2d = np.zeros(2, np.int64), np.array([1, 1, 0], bool)
    assert refused(attachments={"d2t": d2t}) == [("attachment d2t", "one of them")]
    assert refused(attachments={"d2t": d2t, "t2d": t2d}) == []
    assert refused(attachments={"d2t": d2t, "t2d": ~t2d}) == [("attachments d2t, t2d", "1 of t2d and 2 of d2t")]
    assert refused(attachments={"token_freq": np.zeros((2, 2))}) == [("attachment token_freq", "float64 [2, 2]")]
    assert list(tmp_path.iterdir()) == []


def test_missing_packages(tmp_path, monkeypatch):
    target = target_class("speculators")(made_job(tmp_path, [], attachments={"token_freq": np.ones(2, np.int64)}))
    monkeypatch.setattr("hsfmt.writers.targets.speculators_vocab.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert [problem.where for problem in target.problems()] == ["pyarrow", "token_freq.pt"]
    assert {problem.remedy for problem in target.problems()} == {"pip install 'hsfmt[convert]'"}


@pytest.mark.parametrize("token", [-1, 2**31])
def test_token_ids_beyond_int32(tmp_path, token):
    (sample,) = made_samples([3])
    sample.input_ids[1] = token
    target = target_class("speculators")(made_job(tmp_path, [sample]))
    with pytest.raises(SampleError, match=f"{token} at token 1"):
        target.write(target.units()[0], iter([sample]))
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("scales", [None, np.ones(2, np.float32), np.ones((3, 2), np.float32)])
def test_float8_states_without_their_scales(tmp_path, scales):
    (sample,) = made_samples([3], FLOAT8)
    sample = replace(sample, extras={"scale": scales})
    target = target_class("speculators-fp8")(made_job(tmp_path, [sample], FLOAT8, extras={"scale": "float32"}))
    with pytest.raises(SampleError, match="a scale for each of 3 tokens"):
        target.write(target.units()[0], iter([sample]))


@pytest.fixture
def command(tmp_path):
    """Run `hsfmt export` of a dataset of two samples with layers 2, 4, 8; return its exit code and what it said."""

    def run(target, *options, final_norm="pre", dtype="bfloat16"):
        url, folder = tmp_path / f"{final_norm}-{dtype}", tmp_path / "out"
        header = replace(HEADER, layers=(2, 4, 8), final_norm=final_norm, dtype=dtype, scaling=None)
        if not url.exists():
            facts = {"hidden_size": 8, "final_norm": final_norm, "dtype": dtype, "model": "tiny"}
            with DatasetWriter(str(url), layers=header.layers, **facts) as writer:
                for sample in made_samples([3, 4], replace(header, dtype="float32")):
                    scales = {"hidden_states_scale": np.ones(len(sample.input_ids), np.float32)}
                    arrays = sample.hidden_states.astype(NATIVE.get(dtype, dtype)), sample.loss_mask
                    writer.write(str(sample.number), sample.input_ids, *arrays, **(scales if "float8" in dtype else {}))
        words = ["export", str(url), str(folder), "--to", target, *options]
        result = CliRunner().invoke(hsfmt, words, prog_name="hsfmt")
        assert folder.exists() == (result.exit_code == 0)
        return result.exit_code, result.stderr

    return run


@pytest.mark.parametrize(
    ("target", "options", "dataset", "said"),
    [
        ("vllm", [], {"final_norm": "post"}, "final state before the final norm, got one after it"),
        ("speculators", [], {"final_norm": "post"}, "final state before the final norm, got one after it"),
        ("speculators", [], {"final_norm": "unknown"}, "final_norm unknown"),
        ("speculators", ["--layers", "2,4"], {}, "layer 8 among the layers"),
        ("speculators", ["--option", "loss_mask=int8"], {}, "--option loss_mask: expected int64 or bool"),
        ("speculators", [], {"dtype": "float8_e4m3fn"}, "--cast bfloat16"),
        ("speculators-fp8", [], {}, "states of float8_e4m3fn, got bfloat16 — add --cast float8_e4m3fn"),
        ("speculators", ["--cast", "float8_e4m3fn"], {}, "states of bfloat16, float16, float32, got float8_e4m3fn"),
        ("deepspec", [], {}, "final state after the final norm, got one before it"),
        ("deepspec", ["--layers", "2,4"], {"final_norm": "post"}, "layer 8 among the layers"),
        ("deepspec", ["--layers", "8"], {"final_norm": "post"}, "target_layer_ids can't be empty"),
        ("deepspec", [], {"final_norm": "post", "dtype": "float16"}, "states of bfloat16, got float16"),
        ("deepspec", ["--option", "shard_size=big"], {"final_norm": "post"}, "a size like 64GiB"),
    ],
)
def test_the_command_refuses(command, target, options, dataset, said):
    code, text = command(target, *options, **dataset)
    assert code == 2
    assert said in text


@pytest.mark.parametrize(
    ("target", "options", "dataset"),
    [
        ("vllm", ["--layers", "2,4"], {"final_norm": "post"}),  # the state that was normed is not among them
        ("vllm", [], {"dtype": "float8_e4m3fn"}),
        ("speculators", ["--cast", "bfloat16"], {"dtype": "float8_e4m3fn"}),
        ("speculators-fp8", [], {"dtype": "float8_e4m3fn"}),
        ("vllm", ["--cast", "float8_e4m3fn"], {"dtype": "float16"}),
        ("deepspec", ["--cast", "bfloat16", "--option", "shard_size=1KiB"], {"final_norm": "post", "dtype": "float16"}),
    ],
)
def test_the_command_writes(command, target, options, dataset):
    assert command(target, *options, **dataset)[0] == 0


def test_what_the_driver_refuses_for_these_targets():
    for name in ("vllm", "speculators", "speculators-fp8"):
        kind = target_class(name)
        assert (kind.name, kind.final_norm, kind.needs_final_state) == (name, "pre", name != "vllm")
    assert target_class("speculators-fp8").dtypes == ("float8_e4m3fn",)
    assert "float8_e4m3fn" not in target_class("speculators").dtypes
