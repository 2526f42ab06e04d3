"""Packed batches against those of speculators' own collator, and against samples put together one by one."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from written import as_written

from hsfmt import DatasetWriter, HiddenStateDataset
from hsfmt.readers.packed_views import PACKED_VIEWS
from hsfmt.readers.packing import PackingCollator

SHIFTED = ("eagle3", "peagle")
STATES = ("hidden_states", "verifier_last_hidden_states")


@pytest.fixture(scope="module")
def foreign(data_dir):
    """Samples, and the real collator's batches of them: (layout, cases, tensors)."""
    with safe_open(data_dir / "packed_batches" / "packed_batches.safetensors", "pt") as file:
        said = file.metadata()
        return json.loads(said["layout"]), json.loads(said["cases"]), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  no dict


@pytest.fixture(scope="module", params=["none", "zstd"])
def foreign_dataset(request, foreign, tmp_path_factory):
    """The same samples in a dataset of two parts."""
    layout, _, tensors = foreign
    path = tmp_path_factory.mktemp("foreign") / "dataset"
    for part in (range(3), range(3, 6)):
        with DatasetWriter(
            path, layers=layout["layers"], hidden_size=layout["hidden_size"], final_norm="pre", codec=request.param,
            chunk_tokens=8, shard_tokens=32,
        ) as writer:  # fmt: skip
            for number in part:
                states = tensors[f"item/{number}/hidden_states"].view(torch.int16).numpy().view(np.uint16)
                ids, mask = (tensors[f"item/{number}/{key}"].numpy() for key in ("input_ids", "loss_mask"))
                writer.write(f"{number}", ids, as_written(states, "bfloat16"), mask.astype(bool))
    return HiddenStateDataset(path)


def test_the_fixture_covers_what_it_says(foreign):
    _, cases, tensors = foreign
    assert {case["view"] for case in cases.values()} == {"eagle3", "peagle", "dflash", "mtp"}
    paddings = {name: int((tensors[f"{name}/document_ids"] == -1).sum()) for name in cases}
    assert paddings["eagle3_padding"] == 10
    assert paddings["eagle3_nothing_left"] == cases["eagle3_nothing_left"]["n_tokens"]
    assert paddings["dflash_full"] == paddings["mtp_last_is_cut"] == 0
    assert tensors["eagle3_one_token_each/document_ids"].unique().tolist() == [-1, 1, 3]


def test_batches_are_those_of_the_real_collator(foreign, foreign_dataset):
    _, cases, tensors = foreign
    for name, case in cases.items():
        dtype = getattr(torch, case["dtype"])
        collator = PackingCollator(
            foreign_dataset, case["n_tokens"], view=case["view"], overflow="cut", hidden_states_dtype=dtype
        )
        batch = collator(case["indices"])
        assert list(batch) == case["keys"], name
        for key, got in batch.items():
            if key == "error_records":
                assert got == case[key]
                assert type(got) is int
                continue
            wanted = tensors[f"{name}/{key}"]
            assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), (name, key)
            assert torch.equal(got, wanted), (name, key)
            assert got.is_contiguous()


def item_of(dataset, index):
    """Tokens of a sample as an item of view "raw", and the position of the first."""
    number, start, stop = index if isinstance(index, tuple) else (index, None, None)
    return dataset.read(number, start, stop), start or 0


def put_together(dataset, indices, view, n_tokens):
    """The batch, made from items one by one."""
    columns = {key: [] for key in (*STATES, "input_ids", "loss_mask", "position_ids", "document_ids")}
    scales = []
    for document, index in enumerate(indices):
        item, first = item_of(dataset, index)
        here, ahead = (slice(None, -1), slice(1, None)) if view in SHIFTED else (slice(None), slice(None))
        states = item["hidden_states"]
        if view == "mtp":
            columns["hidden_states"].append(states[:, -1])
        else:
            columns["hidden_states"].append(states if view == "raw" else states[:, :-1].flatten(1)[here])
        columns["verifier_last_hidden_states"].append(states[:, -1][ahead])
        columns["input_ids"].append(item["input_ids"][ahead])
        columns["loss_mask"].append(item["loss_mask"][ahead] if view == "raw" else item["loss_mask"][ahead].long())
        columns["position_ids"].append(torch.arange(first, first + len(states))[ahead])
        columns["document_ids"].append(torch.full_like(columns["input_ids"][-1], document))
        scales.append(item.get("hidden_states_scale"))
    if view in ("mtp", "raw"):
        del columns["verifier_last_hidden_states"]
    if view == "raw" and scales[0] is not None:
        columns["hidden_states_scale"] = scales
    batch = {}
    for key, values in columns.items():
        joined = torch.cat([value.view(torch.uint8) if value.itemsize == 1 else value for value in values])
        padding = torch.full((max(n_tokens - len(joined), 0), *joined.shape[1:]), -1 if key == "document_ids" else 0)
        batch[key] = torch.cat([joined, padding.to(joined.dtype)])[:n_tokens].view(values[0].dtype)[None]
    return batch


def assert_same_batch(got, wanted):
    assert set(got) - {"error_records"} == set(wanted)
    for key, value in wanted.items():
        assert (got[key].dtype, got[key].shape) == (value.dtype, value.shape), key
        if value.numel():
            assert torch.equal(got[key].view(torch.uint8), value.contiguous().view(torch.uint8)), key


LENGTHS = (1, 7, 8, 9, 16, 33, 3, 64, 5, 31)


def some_indices(rng, lengths):
    """A few samples, some as windows."""
    indices = []
    for number in rng.integers(0, len(lengths), rng.integers(1, 6)).tolist():
        start, stop = sorted(rng.integers(0, lengths[number] + 1, 2).tolist())
        indices.append((number, start, stop) if rng.random() < 0.4 else number)
    return indices


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_random_batches(write, dtype, codec):
    """All views, layer subsets, windows, empty samples; fresh memory and memory that held another batch."""
    written = write(LENGTHS, dtype=dtype, codec=codec, layers=(2, 4, 5, 8), parts=3)
    rng = np.random.default_rng(7)
    for layers in (None, (4, 8)):
        reference = HiddenStateDataset(written.url, layers=layers, dequantize=dtype == "float8_e4m3fn")
        stored = HiddenStateDataset(written.url, layers=layers)
        for view in PACKED_VIEWS:
            collator = PackingCollator(stored, 48, view=view, overflow="cut")
            buffers = collator.allocate()
            for tensor in buffers.values():
                tensor.view(torch.uint8).fill_(0xA5)
            items = stored if view == "raw" else reference
            for _ in range(4):
                indices = some_indices(rng, LENGTHS)
                wanted = put_together(items, indices, view, 48)
                assert_same_batch(collator(indices), wanted)
                got = collator(indices, out=buffers)
                assert_same_batch(got, wanted)
                assert all(got[key] is tensor for key, tensor in buffers.items())


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_chunks_of_real_size(write, codec):
    """Large enough to be read, or decoded, straight into the rows of the batch."""
    written = write((300, 1, 700, 900), hidden=512, codec=codec, chunk_tokens=256, shard_tokens=1024, parts=1)
    dataset = HiddenStateDataset(written.url)
    for view in ("eagle3", "mtp", "raw"):
        collator = PackingCollator(dataset, 1700, view=view, overflow="cut")
        for indices in ([3, 1, 0], [2, (3, 200, 800), (0, 256, 300)], [0, 3, 2]):
            assert_same_batch(collator(indices), put_together(dataset, indices, view, 1700))


def test_raw_batches_of_a_dataset_that_dequantises(write):
    dataset = HiddenStateDataset(write(LENGTHS, dtype="float8_e4m3fn").url, dequantize=True)
    batch = PackingCollator(dataset, 100, view="raw")([5, (7, 3, 60), 0])
    assert list(batch) == [
        "hidden_states",
        "input_ids",
        "loss_mask",
        "position_ids",
        "document_ids",
        "error_records",
    ]
    assert_same_batch(batch, put_together(dataset, [5, (7, 3, 60), 0], "raw", 100))
    assert batch["hidden_states"].dtype == torch.bfloat16


@pytest.mark.parametrize(("dtype", "into"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")])
def test_conversion_rounds_as_torch_does(write, dtype, into):
    dataset = HiddenStateDataset(write(LENGTHS, dtype=dtype).url)
    target = getattr(torch, into)
    for view in ("eagle3", "mtp", "raw"):
        wanted = put_together(dataset, [4, 0, 5], view, 64)
        wanted |= {key: wanted[key].to(target) for key in STATES if key in wanted}
        assert_same_batch(PackingCollator(dataset, 64, view=view, hidden_states_dtype=target)([4, 0, 5]), wanted)


def test_dequantised_states_are_rounded_before_they_are_converted(write):
    written = write(LENGTHS, dtype="float8_e4m3fn")
    dataset = HiddenStateDataset(written.url, dequantize=True)
    wanted = put_together(dataset, [4, 5], "eagle3", 64)
    wanted |= {key: wanted[key].float() for key in STATES}
    collator = PackingCollator(dataset, 64, view="eagle3", hidden_states_dtype=torch.float32)
    assert_same_batch(collator([4, 5]), wanted)


def test_max_length_holds(write):
    dataset = HiddenStateDataset(write(LENGTHS).url, max_length=10)
    batch = PackingCollator(dataset, 64, view="eagle3")([7, 1, 5])
    assert_same_batch(batch, put_together(dataset, [7, 1, 5], "eagle3", 64))
    assert (batch["document_ids"] == 0).sum() == 9


@pytest.mark.parametrize(
    ("view", "multiple", "n_tokens", "padded"),
    [("eagle3", 1, 39, 39), ("dflash", 1, 41, 41), ("raw", 16, 41, 48), ("eagle3", 13, 39, 39)],
)
def test_batches_of_any_length(write, view, multiple, n_tokens, padded):
    dataset = HiddenStateDataset(write(LENGTHS).url)
    collator = PackingCollator(dataset, None, view=view, pad_to_multiple_of=multiple)
    batch = collator([2, 5])
    assert (batch["document_ids"] >= 0).sum() == n_tokens
    assert_same_batch(batch, put_together(dataset, [2, 5], view, padded))
    assert_same_batch(collator([5, 2], out=batch), put_together(dataset, [5, 2], view, padded))
