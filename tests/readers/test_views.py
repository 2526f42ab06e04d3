"""The items against what was written, and the view of speculators against a reference written by hand."""

import numpy as np
import pytest
import torch
from written import as_written

from hsfmt import HiddenStateDataset
from hsfmt.errors import CorruptionError, SampleNotFoundError, UsageError
from hsfmt.readers.views import as_array, as_tensor

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


def tensor(states, name):
    """An independent way from bit patterns to a tensor."""
    return torch.frombuffer(bytearray(states.tobytes()), dtype=DTYPES[name]).reshape(states.shape)


def speculators_reference(states, sample):
    """What ArrowDataset.__getitem__ of speculators 0.9 returns (engines.md, section 2)."""
    n_tokens = states.shape[0]
    return {
        "hidden_states": states[:, :-1].flatten(1),
        "input_ids": torch.tensor(sample.input_ids.tolist(), dtype=torch.int64),
        "verifier_last_hidden_states": states[:, -1],
        "loss_mask": torch.tensor(sample.loss_mask.tolist()).to(torch.int64),
        "lengths": torch.tensor([n_tokens]),
        "position_ids": torch.tensor(list(range(n_tokens))),
    }


def assert_items_equal(got, wanted):
    assert list(got) == list(wanted), "the keys, in order"
    for key, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert (got[key].dtype, got[key].shape) == (value.dtype, value.shape), key
            same = got[key].contiguous().view(torch.uint8), value.contiguous().view(torch.uint8)
            assert torch.equal(*same), key
        else:
            assert got[key] == value


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_raw(write, dtype):
    written = write(dtype=dtype)
    dataset = HiddenStateDataset(written.url)
    assert len(dataset) == 10
    for got, wanted in zip(dataset, written.content.values(), strict=True):
        reference = {
            "hidden_states": tensor(wanted.states, dtype),
            "input_ids": torch.tensor(wanted.input_ids),
            "loss_mask": torch.tensor(wanted.loss_mask),
            "sample_id": wanted.sample_id,
        }
        assert_items_equal(got, reference)
    assert dataset.hidden_states_dtype == DTYPES[dtype]


def test_raw_float8_keeps_values_and_scales(write):
    written = write(dtype="float8_e4m3fn")
    for dequantize in (None, False):
        for got, wanted in zip(
            HiddenStateDataset(written.url, dequantize=dequantize), written.content.values(), strict=True
        ):
            assert list(got) == ["hidden_states", "hidden_states_scale", "input_ids", "loss_mask", "sample_id"]
            assert got["hidden_states"].dtype == torch.float8_e4m3fn
            assert got["hidden_states"].view(torch.uint8).numpy().tobytes() == wanted.states.tobytes()
            assert torch.equal(got["hidden_states_scale"], torch.tensor(wanted.extras["hidden_states_scale"]))


def test_dequantised_float8_is_the_product_in_bfloat16(write):
    written = write(dtype="float8_e4m3fn")
    dataset = HiddenStateDataset(written.url, dequantize=True)
    assert dataset.hidden_states_dtype == torch.bfloat16
    in_float32_differs = False
    for got, wanted in zip(dataset, written.content.values(), strict=True):
        assert list(got) == ["hidden_states", "input_ids", "loss_mask", "sample_id"]
        values = tensor(wanted.states, "float8_e4m3fn")
        scale = torch.tensor(wanted.extras["hidden_states_scale"])[:, None, None]
        assert torch.equal(got["hidden_states"], values.to(torch.bfloat16) * scale.to(torch.bfloat16))
        in_float32_differs |= not torch.equal(got["hidden_states"], (values.float() * scale).to(torch.bfloat16))
    assert in_float32_differs


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_speculators(write, dtype):
    written = write(dtype=dtype, layers=(2, 4, 5, 8))
    dataset = HiddenStateDataset(written.url, view="speculators")
    for number, wanted in enumerate(written.content.values()):
        states = tensor(wanted.states, dtype)
        if dtype == "float8_e4m3fn":
            scale = torch.tensor(wanted.extras["hidden_states_scale"])[:, None, None]
            states = states.to(torch.bfloat16) * scale.to(torch.bfloat16)
        assert_items_equal(dataset[number], speculators_reference(states, wanted))
    assert dataset.approx_lengths == [len(sample.input_ids) for sample in written.content.values()]
    assert all(type(length) is int for length in dataset.approx_lengths)
    assert dataset.hidden_states_dtype == (torch.bfloat16 if dtype == "float8_e4m3fn" else DTYPES[dtype])
    assert dataset.max_len is None
    cut = HiddenStateDataset(written.url, view="speculators", max_length=20, layers=[4, 8])
    assert cut.max_len == 20
    assert max(cut.approx_lengths) == 20
    assert cut[5]["hidden_states"].shape == (20, 8)


@pytest.mark.parametrize("norm", ["post", "unknown"])
def test_speculators_refuses_a_final_state_that_its_trainer_would_norm_again(write, norm):
    written = write(final_norm=norm)
    with pytest.raises(UsageError, match=f'before the final norm.*got final_norm {norm}.*allow_final_norm="{norm}"'):
        HiddenStateDataset(written.url, view="speculators")
    other = {"post": "unknown", "unknown": "post"}[norm]
    with pytest.raises(UsageError, match="final_norm"):
        HiddenStateDataset(written.url, view="speculators", allow_final_norm=other)
    dataset = HiddenStateDataset(written.url, view="speculators", allow_final_norm=norm)
    assert_items_equal(
        dataset[3],
        speculators_reference(tensor(written.content["id-003"].states, "bfloat16"), written.content["id-003"]),
    )
    assert len(HiddenStateDataset(written.url)) == 10, "the raw view takes any"


def test_speculators_needs_the_last_layer(write):
    written = write()
    with pytest.raises(UsageError, match="the final layer 5 among the layers"):
        HiddenStateDataset(written.url, view="speculators", layers=[1, 3])


def test_arguments_are_checked_when_opening(write):
    url = write().url
    with pytest.raises(UsageError, match=r"HF ids in ascending order out of \[1, 3, 5\], got \[2\]"):
        HiddenStateDataset(url, layers=[2])
    with pytest.raises(UsageError, match="view: expected one of raw, speculators"):
        HiddenStateDataset(url, view="specforge")
    with pytest.raises(UsageError, match="max_length"):
        HiddenStateDataset(url, max_length=0)
    with pytest.raises(TypeError, match="no_such"):
        HiddenStateDataset(url, no_such=1)


@pytest.mark.parametrize(
    "options",
    [
        *({"layers": wrong} for wrong in ("25", [2.9], [5.0], 5, ["5"], [True])),
        *({"max_length": wrong} for wrong in (10.5, 0, -1, "10", True)),
        *({"n_threads": wrong} for wrong in (0, -1, 2.0)),
        *({"extras": wrong} for wrong in ("weight", ["nothing"], ["hidden_states"])),
    ],
)
def test_an_option_of_another_kind_is_refused_when_opening(write, options):
    url = write(layers=(1, 2, 5)).url
    (name,) = options
    with pytest.raises(UsageError, match=f"{name}: expected"):
        HiddenStateDataset(url, **options)


def test_options_of_numpy_are_taken(write):
    dataset = HiddenStateDataset(write().url, layers=np.array([1, 5]), max_length=np.int64(9), n_threads=np.int32(2))
    assert (dataset.layers, dataset.max_length) == ((1, 5), 9)
    assert type(dataset.max_length) is int
    assert dataset[5]["hidden_states"].shape == (9, 2, 8)


@pytest.mark.parametrize("dequantize", [False, True])
def test_reads_of_another_kind_are_refused(write, dequantize):
    dataset = HiddenStateDataset(write(dtype="float8_e4m3fn").url, dequantize=dequantize)
    for window in ((1.7, 3.9), (0, 3.9), (0, "3"), (0.0, None)):
        with pytest.raises(UsageError, match="tokens of sample 5: expected"):
            dataset.read(5, *window)
    for layers in ("13", [1.5], 3):
        with pytest.raises(UsageError, match="layers: expected"):
            dataset.read(5, layers=layers)
    expanded = torch.zeros(1, 3, 8, dtype=dataset.hidden_states_dtype).expand(33, 3, 8)
    with pytest.raises(UsageError, match="out: expected elements that do not overlap"):
        dataset.read(5, out=expanded)
    assert not expanded.view(torch.uint8).any()
    with pytest.raises(UsageError, match="out: expected a CPU tensor, got ndarray"):
        dataset.read(5, out=np.zeros((33, 3, 8), np.uint8))


def test_map_style(write):
    written = write()
    dataset = HiddenStateDataset(written.url, layers=[1, 5], max_length=9)
    assert dataset.lengths.dtype == np.int64
    assert dataset.lengths.tolist() == [min(len(sample.input_ids), 9) for sample in written.content.values()]
    assert dataset[-1]["sample_id"] == written.ids[-1]
    assert [item["sample_id"] for item in dataset.__getitems__([4, -2, 4])] == [written.ids[at] for at in (4, -2, 4)]
    for number, wanted in enumerate(written.content.values()):
        item = dataset[number]
        assert len(item["input_ids"]) == dataset.lengths[number]
        assert torch.equal(item["hidden_states"], tensor(wanted.states[:9, [0, 2]], "bfloat16"))
    for bad in (10, -11):
        with pytest.raises(IndexError):
            dataset[bad]
    assert list(dataset.sample_ids) == written.ids
    assert dataset.index_of("id-004") == 4
    with pytest.raises(SampleNotFoundError):
        dataset.index_of("nobody")
    assert dataset.layers == (1, 5)
    assert dataset.header.layers == (1, 3, 5)
    assert dataset.fingerprint.startswith("xxh3_128:")
    assert dataset.content_digest.startswith("xxh3_128:")


def test_items_are_writable_and_own_their_memory(write):
    dataset = HiddenStateDataset(write().url)
    kept = {key: value.clone() for key, value in dataset[3].items() if key != "sample_id"}
    item = dataset[3]
    for value in kept:
        item[value].zero_()
    for key, value in kept.items():
        assert torch.equal(dataset[3][key], value)


def test_read_windows_and_out(write):
    written = write()
    dataset = HiddenStateDataset(written.url, layers=[1, 5])
    states = tensor(written.content["id-007"].states, "bfloat16")
    item = dataset.read(7, 10, 50)
    assert torch.equal(item["hidden_states"], states[10:50, [0, 2]])
    assert torch.equal(item["input_ids"], torch.tensor(written.content["id-007"].input_ids[10:50]))
    assert torch.equal(dataset.read(7, 10, layers=[3])["hidden_states"], states[10:, [1]])
    batch = torch.zeros(2, 100, 2, 8, dtype=torch.bfloat16)
    out = batch[1, 30:70]
    item = dataset.read(7, 10, 50, out=out)
    assert item["hidden_states"] is out
    assert torch.equal(batch[1, 30:70], states[10:50, [0, 2]])
    assert not batch[0].any()
    assert not batch[1, :30].any()
    assert not batch[1, 70:].any()
    for bad in (
        torch.zeros(40, 2, 8),
        torch.zeros(40, 2, 8, dtype=torch.float16),
        torch.zeros(39, 2, 8, dtype=torch.bfloat16),
        torch.zeros(40, 2, 8, dtype=torch.bfloat16, device="meta"),
    ):
        with pytest.raises(UsageError, match="out: expected"):
            dataset.read(7, 10, 50, out=bad)
    cut = HiddenStateDataset(written.url, max_length=20)
    assert cut.read(7)["hidden_states"].shape[0] == 20
    with pytest.raises(UsageError, match="stop of at most 20"):
        cut.read(7, 0, 21)
    with pytest.raises(UsageError):
        cut.read(7, 21)


def test_read_dequantised_into_out(write):
    written = write(dtype="float8_e4m3fn")
    dataset = HiddenStateDataset(written.url, dequantize=True)
    out = torch.zeros(33, 3, 8, dtype=torch.bfloat16)
    assert dataset.read(5, out=out)["hidden_states"] is out
    assert torch.equal(out, dataset[5]["hidden_states"])
    stored = HiddenStateDataset(written.url)
    eight = torch.zeros(33, 3, 8, dtype=torch.float8_e4m3fn)
    stored.read(5, out=eight)
    assert eight.view(torch.uint8).numpy().tobytes() == written.content["id-005"].states.tobytes()


def test_extras_come_when_asked_for(write):
    extras = {"weight": {"kind": "token", "dtype": "bfloat16"}, "score": {"kind": "sample", "dtype": "float32"}}

    def values(number, n_tokens):
        weight = np.arange(n_tokens, dtype=np.uint16)
        return {"weight": as_written(weight, "bfloat16"), "score": None if number == 1 else np.float32(number)}

    written = write(extras=extras, values=values)
    assert list(HiddenStateDataset(written.url)[0]) == ["hidden_states", "input_ids", "loss_mask", "sample_id"]
    dataset = HiddenStateDataset(written.url, extras=["weight", "score"])
    item = dataset[4]
    assert list(item) == ["hidden_states", "input_ids", "loss_mask", "sample_id", "weight", "score"]
    assert item["weight"].dtype == torch.bfloat16
    assert item["weight"].view(torch.int16).tolist() == list(range(16))
    assert item["score"].item() == 4
    assert dataset[1]["score"] is None
    with pytest.raises(UsageError, match="extras: expected extra columns of this dataset: score, weight, got nothing"):
        HiddenStateDataset(written.url, extras=["weight", "nothing"])


def test_tensors_share_memory_with_what_was_read():
    array = np.arange(6, dtype=np.uint16).reshape(2, 3)
    made = as_tensor(array, "bfloat16")
    assert made.data_ptr() == array.ctypes.data
    assert as_array(made, "bfloat16").ctypes.data == array.ctypes.data
    strided = torch.zeros(4, 6, dtype=torch.bfloat16)[::2, 1::2]
    as_array(strided, "bfloat16")[:] = 0x3F80
    assert strided.eq(1).all()


def test_speculators_states_are_one_buffer(write):
    item = HiddenStateDataset(write().url, view="speculators")[3]
    storages = {item[key].untyped_storage().data_ptr() for key in ("hidden_states", "verifier_last_hidden_states")}
    assert len(storages) == 1


def test_all_bit_patterns(tmp_path):
    from hsfmt import DatasetWriter

    patterns = np.arange(1 << 16, dtype=np.uint16).reshape(256, 1, 256)
    for codec in ("none", "zstd"):
        with DatasetWriter(
            tmp_path / codec, layers=[0], hidden_size=256, final_norm="pre", codec=codec, nonfinite="keep"
        ) as writer:
            writer.write("all", np.arange(256), as_written(patterns, "bfloat16"))
        got = HiddenStateDataset(tmp_path / codec)[0]["hidden_states"]
        assert got.view(torch.int16).numpy().tobytes() == patterns.tobytes()


def test_a_broken_sample_raises_and_nothing_takes_its_place(write):
    written = write([5] * 4, parts=4)
    path = written.shards()[2]
    path.write_bytes(b"\0" * path.stat().st_size)
    dataset = HiddenStateDataset(written.url)
    broken = {number for number in range(4) if f"/{dataset.reader.locate(number)[0].name}/" in str(path)}
    for number in range(4):
        if number in broken:
            with pytest.raises(CorruptionError, match=written.ids[number]):
                dataset[number]
        else:
            assert dataset[number]["sample_id"] == written.ids[number]
    assert len(broken) == 1
    with pytest.raises(CorruptionError):
        dataset.__getitems__(range(4))


def test_a_view_without_auxiliary_layers_is_refused(write):
    written = write()
    last = HiddenStateDataset(written.url).header.layers[-1]
    with pytest.raises(UsageError, match="at least one auxiliary layer"):
        HiddenStateDataset(written.url, view="speculators", layers=[last], allow_final_norm="unknown")


@pytest.mark.parametrize(
    "arguments", [{"layers": 5}, {"max_length": 0}, {"max_length": 1.5}, {"n_threads": 0}, {"n_threads": -3}]
)
def test_arguments_of_another_kind_are_refused(write, arguments):
    with pytest.raises(UsageError, match=next(iter(arguments))):
        HiddenStateDataset(write().url, **arguments)
