"""What a writer refuses, and that nothing of a refused sample stays."""
# ruff: noqa: E501 - one case a line

import ml_dtypes
import numpy as np
import part_oracles as oracles
import pytest

from hsfmt import DatasetWriter
from hsfmt.errors import (
    DuplicateSampleError,
    FormatError,
    FormatVersionError,
    HeaderMismatchError,
    HsfmtError,
    NonFiniteError,
    SampleError,
    UsageError,
    WriterClosedError,
)

IDS, STATES = np.arange(4), np.ones((4, 2, 8), np.float32)
GOOD = {"sample_id": "good", "input_ids": IDS, "hidden_states": STATES}

REFUSED = {
    "no token": ({"input_ids": [], "hidden_states": STATES[:0]}, "at least one token, got an empty sample"),
    "more ids than states": ({"input_ids": np.arange(5)}, "for 5 input_ids, got .4, 2, 8."),
    "fewer ids than states": ({"input_ids": np.arange(3)}, "for 3 input_ids, got .4, 2, 8."),
    "another number of layers": ({"hidden_states": np.ones((4, 3, 8), np.float32)}, "got .4, 3, 8."),
    "another hidden size": ({"hidden_states": np.ones((4, 2, 9), np.float32)}, "got .4, 2, 9."),
    "layers side by side": ({"hidden_states": np.ones((4, 16), np.float32)}, "got .4, 16."),
    "layer-major": ({"hidden_states": np.ones((2, 4, 8), np.float32)}, "got .2, 4, 8."),
    "another dtype": ({"hidden_states": STATES.astype(np.float64)}, "expected dtype float32, got float64"),
    "bfloat16": ({"hidden_states": STATES.astype(ml_dtypes.bfloat16)}, "expected dtype float32, got bfloat16"),
    "too few layers in a list": ({"hidden_states": [STATES[:, 0]]}, "2 arrays of .4 tokens, 8., got 1"),
    "layers of two lengths": ({"hidden_states": [STATES[:, 0], STATES[:3, 1]]}, "2 arrays"),
    "no layers": ({"hidden_states": []}, "2 arrays"),
    "objects": ({"hidden_states": None}, "expected dtype float32, got object"),
    "float ids": ({"input_ids": np.arange(4.0)}, "expected integers .token., got float64"),
    "bool ids": ({"input_ids": np.ones(4, bool)}, "expected integers"),
    "two rows of ids": ({"input_ids": IDS.reshape(2, 2)}, "expected integers"),
    "an id beyond 32 bits": ({"input_ids": [0, 1, 2, 2**31]}, "32 bits"),
    "an id below 32 bits": ({"input_ids": [0, 1, 2, -(2**31) - 1]}, "32 bits"),
    "an unsigned 64-bit id": ({"input_ids": np.array([0, 1, 2, 2**64 - 1], np.uint64)}, "32 bits"),
    "a short mask": ({"loss_mask": [1, 1, 1]}, "one for each input id"),
    "a mask of weights": ({"loss_mask": [0.5, 1, 1, 1]}, "expected 0 or 1"),
    "a mask of 255": ({"loss_mask": np.full(4, 255, np.uint8)}, "expected 0 or 1"),
    "a mask with NaN": ({"loss_mask": [float("nan"), 1, 1, 1]}, "expected 0 or 1"),
    "a mask of words": ({"loss_mask": ["1", "1", "1", "1"]}, "expected 0 or 1"),
    "an id that is no text": ({"sample_id": 7}, "expected text, got int 7"),
    "an id of bytes": ({"sample_id": b"x"}, "expected text, got bytes"),
    "an empty id": ({"sample_id": ""}, "1 to 4096 bytes of UTF-8, got 0 bytes"),
    "a long id": ({"sample_id": "é" * 2049}, "1 to 4096 bytes of UTF-8, got 4098 bytes"),
    "an id outside Unicode": ({"sample_id": "\ud800"}, "Unicode text"),
    "metadata that is no object": ({"metadata": [1]}, "expected a mapping, got list"),
    "metadata with NaN": ({"metadata": {"a": float("nan")}}, "metadata: expected finite numbers"),
    "metadata of NumPy": ({"metadata": {"a": np.int64(1)}}, "metadata: expected JSON"),
    "metadata with odd keys": ({"metadata": {1: 1}}, "metadata: expected string keys"),
    "metadata that is too large": ({"metadata": {"a": "x" * (1 << 20)}}, "at most 1048576 bytes"),
    "metadata that is too deep": ({"metadata": {"a": [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]}}, "nesting"),
    "a negative place": ({"source_index": -1}, "source_index: expected an integer from 0"),
    "a place beyond 64 bits": ({"source_index": 2**63}, "source_index: expected an integer from 0"),
    "a fractional place": ({"source_index": 1.5}, "source_index: expected an integer from 0"),
    "a place that is a word": ({"source_index": "1"}, "source_index: expected an integer from 0"),
    "a flag as place": ({"source_index": True}, "source_index: expected an integer from 0"),
    "an undeclared column": ({"weights": [1, 2, 3, 4]}, "expected extras among .'score'., got .'weights'."),
    "an extra of another dtype": ({"score": np.ones(4)}, "score: expected dtype float32, got float64"),
    "an extra of another length": ({"score": np.ones(3, np.float32)}, "score: expected .4 rows"),
    "NaN": ({"hidden_states": np.full((4, 2, 8), np.nan, np.float32)}, "64 NaN or Inf values in 4 tokens"),
    "Inf": ({"hidden_states": np.where(np.arange(64).reshape(4, 2, 8) == 63, -np.inf, 1).astype("f4")}, "1 NaN or Inf"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_sample_leaves_nothing(url, open_writer, case):
    change, message = REFUSED[case]
    with open_writer(extras={"score": {"kind": "token", "dtype": "float32"}}) as writer:
        writer.write("first", IDS, STATES)
        with pytest.raises(SampleError, match=message):
            writer.write(**{**GOOD, **change})
        assert writer.write(**GOOD) is True, "the id is still free"
    read = oracles.read_samples(url)
    assert sorted(read) == ["first", "good"]
    assert read["first"].states.tobytes() == read["good"].states.tobytes() == STATES.tobytes()
    (part,) = oracles.loaded_parts(url)
    assert part.manifest.counts.tokens == 8
    assert part.manifest.holes == {}


def test_only_refused_samples_leave_no_part(url, open_writer):
    with open_writer() as writer:
        for _ in range(3):
            with pytest.raises(SampleError):
                writer.write("x", [], STATES[:0])
        assert writer.commit() == []
    assert oracles.left_files(url) == oracles.empty_dataset_files()


def test_duplicates_are_errors_by_default(url, open_writer):
    with open_writer() as writer:
        writer.write(**GOOD)
        with pytest.raises(DuplicateSampleError, match="sample 'good': expected a new id"):
            writer.write(**GOOD)
        writer.commit()
        with pytest.raises(DuplicateSampleError):
            writer.write(**GOOD)
    with open_writer() as writer, pytest.raises(DuplicateSampleError):
        writer.write(**GOOD)
    assert len(oracles.read_samples(url)) == 1


def test_duplicates_can_be_skipped(url, open_writer):
    with open_writer(on_duplicate="skip") as writer:
        assert writer.write(**GOOD) is True
        assert writer.write("good", IDS, STATES + 1) is False
        assert writer.write("good", "this is not even looked at", None) is False
    with open_writer(on_duplicate="skip") as writer:
        assert writer.write(**GOOD) is False
    assert oracles.read_samples(url)["good"].states.tobytes() == STATES.tobytes()
    assert len(oracles.loaded_parts(url)) == 1


BAD = np.where(np.arange(64).reshape(4, 2, 8) % 9 == 0, np.inf, 1).astype(np.float32)


def test_nonfinite_states_by_policy(url, open_writer):
    with open_writer(nonfinite="raise") as writer, pytest.raises(NonFiniteError, match="8 NaN or Inf values in 4 tok"):
        writer.write("a", IDS, BAD)
    with open_writer(nonfinite="hole") as writer:
        assert writer.write("a", IDS, BAD) is False
    (part,) = oracles.loaded_parts(url)
    assert part.manifest.holes == {"a": "8 NaN or Inf values in 4 tokens"}
    with open_writer(nonfinite="keep") as writer:
        assert writer.write("a", IDS, BAD) is True, "a hole is no sample: it is retried"
    assert oracles.read_samples(url)["a"].states.tobytes() == BAD.tobytes()


def test_float8_without_scales_is_refused(url, open_writer):
    states = STATES.astype(ml_dtypes.float8_e4m3fn)
    with open_writer(dtype="float8_e4m3fn") as writer:
        with pytest.raises(SampleError, match="hidden_states_scale: expected a scale for each token, got none"):
            writer.write("a", IDS, states)
        with pytest.raises(NonFiniteError, match="1 NaN or Inf"):
            writer.write("a", IDS, states, hidden_states_scale=np.array([1, np.nan, 1, 1], np.float32))
        writer.write("a", IDS, states, hidden_states_scale=np.ones(4, np.float32))
    assert sorted(oracles.read_samples(url)) == ["a"]


SETTINGS = {
    "layers": ([3, 1], FormatError, "layers: expected strictly ascending"),
    "layers twice": ([1, 1], FormatError, "layers: expected strictly ascending"),
    "layers below 0": ([-1, 1], FormatError, "layers"),
    "no layers": ([], FormatError, "layers"),
    "fractional layers": ([1.5], FormatError, "layers: expected integers, got 1.5"),
    "layers as text": (["1"], FormatError, "layers: expected integers, got '1'"),
    "hidden_size": (0, FormatError, "hidden_size"),
    "hidden_size of 2**21": (1 << 21, FormatError, "hidden_size"),
    "hidden_size as float": (8.5, FormatError, "hidden_size"),
    "final_norm": ("none", FormatError, "final_norm: expected pre, post or unknown, got 'none'"),
    "dtype": ("float64", FormatError, "dtype: expected one of bfloat16"),
    "codec": ("lz4", FormatError, "codec: expected one of none, zstd, got 'lz4'"),
    "on_duplicate": ("overwrite", UsageError, "on_duplicate"),
    "nonfinite": ("ignore", UsageError, "nonfinite"),
    "model": ({"name": 3}, FormatError, "model"),
    "model too large": ({"name": "x" * 40_000}, FormatError, "header: expected at most 32768 bytes"),
    "chunk_tokens": (0, UsageError, "chunk_tokens: expected a positive number of tokens"),
    "chunk_tokens below 0": (-4, UsageError, "chunk_tokens"),
    "chunk_tokens beyond 64 MiB": (1 << 22, FormatError, "hidden_states: expected chunks of at most 67108864 bytes"),
    "shard_tokens": (0, UsageError, "shard_tokens"),
    "producer": ({"time": 1.5}, FormatError, "expected JSON of strings, integers"),
    "producer too large": ({"log": "x" * (1 << 20)}, UsageError, "producer: expected at most"),
    "scaling": ({"column": "x", "rule": "bfloat16_product"}, FormatError, "scaling: expected null"),
    "extras": ({"A": {"kind": "token", "dtype": "int8"}}, UsageError, "extras: A: expected a name"),
    "extras of a core name": ({"input_ids": {"kind": "token", "dtype": "int8"}}, UsageError, "no core column"),
    "extras named like a parameter": ({"metadata": {"kind": "token", "dtype": "int8"}}, UsageError, "parameter of write"),
    "extras of no kind": ({"a": {"dtype": "int8"}}, UsageError, "extras: a: expected kind, dtype and shape"),
    "extras of another kind": ({"a": {"kind": "layer", "dtype": "int8"}}, UsageError, "kind of token, sample, ragged"),
    "extras of another dtype": ({"a": {"kind": "token", "dtype": "int4"}}, FormatError, "extras: a: expected one of"),
    "extras of an empty shape": ({"a": {"kind": "token", "dtype": "int8", "shape": [0]}}, UsageError, "positive axes"),
    "extras of eight axes": ({"a": {"kind": "token", "dtype": "int8", "shape": [1] * 8}}, FormatError, "column a"),
    "extras of 64 MiB rows": ({"a": {"kind": "sample", "dtype": "int8", "shape": [65 << 20]}}, FormatError, "column a: .*67108864"),
}  # fmt: skip


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_are_refused_before_anything_is_created(url, tmp_path, open_writer, case):
    value, error, message = SETTINGS[case]
    name = case.split()[0] if case.split()[0] not in ("no", "fractional") else "layers"
    with pytest.raises(error, match=message):
        open_writer(**{name: value})
    assert list(tmp_path.iterdir()) == []


def test_scaling_names_a_float32_token_column(url, tmp_path, open_writer):
    for column in ("hidden_states", "input_ids", "../x", ""):
        with pytest.raises(UsageError, match="extras: "):
            open_writer(dtype="float8_e4m3fn", scaling={"column": column, "rule": "bfloat16_product"})
    with pytest.raises(FormatError, match="scaling"):
        open_writer(dtype="float8_e4m3fn", scaling={"rule": "bfloat16_product"})
    with pytest.raises(UsageError, match="as the scaling says"):
        open_writer(dtype="float8_e4m3fn", extras={"hidden_states_scale": {"kind": "sample", "dtype": "float32"}})
    assert list(tmp_path.iterdir()) == []


OTHER = {
    "layers": [1, 2],
    "hidden_size": 16,
    "final_norm": "post",
    "dtype": "float16",
    "model": "another model",
    "tokenizer": {"name": "another", "digest": "d"},
}


@pytest.mark.parametrize("member", OTHER)
def test_a_dataset_of_another_meaning_is_refused(url, open_writer, member):
    with open_writer(model="a model", tokenizer="a tokenizer") as writer:
        writer.write(**GOOD)
    before = {path: (oracles.Path(url) / path).read_bytes() for path in oracles.left_files(url)}
    with pytest.raises(HeaderMismatchError) as caught:
        open_writer(**{"model": "a model", "tokenizer": "a tokenizer", member: OTHER[member]})
    (problem,) = caught.value.problems
    assert problem.where == f"{url}: {member}"
    assert caught.value.exit_code == 2
    assert {path: (oracles.Path(url) / path).read_bytes() for path in oracles.left_files(url)} == before


def test_all_members_that_differ_are_named_at_once(open_writer):
    open_writer(model="a model", tokenizer="a tokenizer").close()
    with pytest.raises(HeaderMismatchError) as caught:
        open_writer(**OTHER)
    assert {problem.where.rpartition(": ")[2] for problem in caught.value.problems} == set(OTHER)


def test_one_who_says_nothing_about_the_model_joins(open_writer):
    open_writer(model="a model").close()
    assert open_writer().header.model == {"name": "a model"}


def test_a_folder_with_other_things_is_refused(tmp_path, open_writer):
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "data_0.pt").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"a folder with 1 other entries, 'data_0.pt' among them"):
        open_writer()
    assert [path.name for path in (tmp_path / "dataset").iterdir()] == ["data_0.pt"]


def test_a_foreign_zarr_group_is_refused(tmp_path, open_writer):
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "zarr.json").write_text('{"attributes":{},"node_type":"group","zarr_format":3}')
    with pytest.raises(FormatError, match="attribute hsfmt"):
        open_writer()


def test_a_dataset_of_a_later_format_is_refused(url, open_writer):
    open_writer().close()
    path = oracles.Path(url) / "zarr.json"
    text = path.read_text()
    path.write_text(text.replace('"writable_from":"1.0"', '"writable_from":"1.7"'))
    with pytest.raises(FormatVersionError, match=r"appended to from 1.7 on") as caught:
        open_writer()
    assert "supports up to 1.0" in str(caught.value)
    assert "install a newer hsfmt" in str(caught.value)
    path.write_text(text.replace('"readable_from":"1.0"', '"readable_from":"2.0"'))
    with pytest.raises(FormatVersionError, match=r"read from 2.0 on"):
        open_writer()


def test_a_closed_writer_takes_nothing(open_writer):
    writer = open_writer()
    writer.close()
    writer.close()
    writer.abort()
    for call in (lambda: writer.write(**GOOD), lambda: writer.hole("a", "b"), writer.commit):
        with pytest.raises(WriterClosedError, match="open another DatasetWriter"):
            call()


def test_holes_are_checked(url, open_writer):
    with open_writer() as writer:
        writer.write(**GOOD)
        for sample_id, reason in ((3, "x"), ("", "x"), ("a", ""), ("a", None), ("a", "\ud800"), ("good", "x")):
            with pytest.raises(SampleError):
                writer.hole(sample_id, reason)
    (part,) = oracles.loaded_parts(url)
    assert part.manifest.holes == {}


def test_every_refusal_is_an_hsfmt_error_and_a_value_error():
    for error in (SampleError, DuplicateSampleError, NonFiniteError, UsageError, HeaderMismatchError, FormatError):
        assert issubclass(error, HsfmtError)
        assert issubclass(error, ValueError)


def test_part_names_are_checked(url, open_writer):
    for name in ("../x", "A", "", 5, "a" * 65):
        writer = open_writer(part_names=lambda name=name: name)
        with pytest.raises(FormatError, match="a part name"):
            writer.write(**GOOD)
    with open_writer(part_names=lambda: "same") as writer:
        writer.write(**GOOD)
        writer.commit()
        before = {path: (oracles.Path(url) / path).read_bytes() for path in oracles.left_files(url)}
        with pytest.raises(UsageError, match="same, which is committed"):
            writer.write("other", IDS, STATES * 2)
    assert {path: (oracles.Path(url) / path).read_bytes() for path in oracles.left_files(url)} == before


def test_the_constructor_needs_no_guess():
    with pytest.raises(TypeError):
        DatasetWriter("x", hidden_size=8, final_norm="pre")
