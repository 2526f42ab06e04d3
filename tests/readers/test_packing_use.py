"""PackingCollator in DataLoaders, its memory, and what it refuses."""

import pickle
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from written import CountingStore, RemoteLikeStore

from hsfmt import HiddenStateDataset
from hsfmt.errors import CorruptionError, UsageError
from hsfmt.readers.packing import PackingCollator

LENGTHS = (1, 7, 8, 9, 16, 33, 3, 64, 5, 31)
BATCHES = [[5, 1, 2], [7], [0, 3, 4, 8], [9, 6, 2]]

# Python 3.12 and later warn of any fork in a process with threads; that it works all the same is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")


def bits(batch):
    """A batch as something that compares."""
    return {key: value.view(torch.uint8).numpy().tobytes() for key, value in tensors_of(batch).items()}


def tensors_of(batch):
    return {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize(
    ("n_workers", "method"),
    [(0, None), (2, "fork"), pytest.param(1, "spawn", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("used_first", [False, True])
def test_loaders_give_the_same_batches(write, n_workers, method, used_first):
    dataset = HiddenStateDataset(write(LENGTHS).url)
    collator = PackingCollator(dataset, 64, view="eagle3")
    wanted = [bits(PackingCollator(HiddenStateDataset(dataset.reader.store), 64, view="eagle3")(b)) for b in BATCHES]
    if used_first:
        assert bits(collator(BATCHES[0])) == wanted[0]
    loader = DataLoader(
        range(len(dataset)), batch_sampler=BATCHES, collate_fn=collator, num_workers=n_workers,
        multiprocessing_context=method, timeout=300 if n_workers else 0,
    )  # fmt: skip
    batches = list(loader)
    assert [bits(batch) for batch in batches] == wanted
    for batch in batches:
        assert batch["error_records"] == 0
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(batch).values()}
        assert len(storages) == 1, "a batch travels as one piece of memory"
        assert all(tensor.is_shared() == (n_workers > 0) for tensor in tensors_of(batch).values())


def test_lists_of_windows_and_of_batches(write):
    dataset = HiddenStateDataset(write(LENGTHS).url)
    collator = PackingCollator(dataset, 64, view="dflash")
    windows = [(7, start, start + 16) for start in range(0, 64, 16)]
    wanted = [bits(collator(windows[:2])), bits(collator(windows[2:]))]
    assert [bits(batch) for batch in DataLoader(windows, batch_size=2, collate_fn=collator)] == wanted
    rows = np.array(windows)
    assert [bits(batch) for batch in DataLoader(rows, batch_size=2, collate_fn=collator)] == wanted
    batches = [windows[:2], windows[2:]]
    assert [bits(batch) for batch in DataLoader(batches, batch_size=None, collate_fn=collator)] == wanted
    first = collator(windows[1:2])
    assert first["position_ids"][0, :16].tolist() == list(range(16, 32))


def test_an_error_in_a_worker_names_the_sample(write):
    written = write([20] * 3, parts=1)
    shard = written.shards()[0]
    shard.write_bytes(bytes(shard.stat().st_size))
    collator = PackingCollator(HiddenStateDataset(written.url), 64, view="eagle3")
    with pytest.raises(CorruptionError, match="id-000"):
        list(DataLoader(range(3), batch_size=2, num_workers=1, collate_fn=collator, timeout=300))


def test_a_damaged_layer_fails_only_who_reads_it(write):
    written = write([8] * 2, parts=1, layers=(1, 3, 5), codec="none", chunk_tokens=8)
    shard = written.shards()[0]
    data = bytearray(shard.read_bytes())
    data[5] ^= 1  # layer 1 of the first chunk
    shard.write_bytes(data)
    dataset = HiddenStateDataset(written.url)
    assert PackingCollator(dataset, 16, view="mtp")([0, 1])["hidden_states"].shape == (1, 16, 8)
    with pytest.raises(CorruptionError, match="id-000"):
        PackingCollator(dataset, 16, view="dflash")([0, 1])


def test_a_batch_is_one_plan_of_what_it_needs(write):
    """Chunks of 8 tokens x 16 bytes, each with 4 bytes behind it; samples share those at their borders."""
    written = write(LENGTHS, parts=1, codec="none", layers=(2, 4, 5, 8), chunk_tokens=8, shard_tokens=1024)

    def states_read(indices, n_tokens, **settings):
        store = RemoteLikeStore(written.path)
        PackingCollator(HiddenStateDataset(store), n_tokens, **settings)(indices)
        (reads,) = store.batches
        return sum(nbytes for path, _, nbytes in reads if "hidden_states" in path)

    n_chunks = 4 * -(-sum(LENGTHS) // 8)
    assert n_chunks * 128 <= states_read(range(10), 200, view="dflash") <= n_chunks * 132
    assert states_read([7, 5, 9], 8, view="dflash", overflow="cut") <= 2 * 4 * 132, "nothing of what is cut"


def test_buffers_are_reused_and_only_what_is_padding_is_cleared(write):
    dataset = HiddenStateDataset(write(LENGTHS).url)
    collator = PackingCollator(dataset, 64, view="eagle3")
    buffers = collator.allocate()
    assert list(buffers) == list(tensors_of(collator([1])))
    for indices in ([7], [1], [5, 1, 2], [0], []):
        batch = collator(indices, out=buffers)
        assert bits(batch) == bits(collator(indices))
        n_filled = int((batch["document_ids"] >= 0).sum())
        for key, tensor in tensors_of(batch).items():
            assert tensor is buffers[key]
            if key != "document_ids":
                assert not tensor[:, n_filled:].view(torch.uint8).any()
    again = collator([5], out=batch)
    assert again["hidden_states"] is buffers["hidden_states"], "a batch serves as out, too"


def test_out_is_checked(write):
    dataset = HiddenStateDataset(write(LENGTHS).url)
    collator = PackingCollator(dataset, 64, view="eagle3")
    good = collator.allocate()
    wrong = {
        "hidden_states": [
            torch.zeros(1, 64, 16),
            torch.zeros(1, 64, 8, dtype=torch.bfloat16),
            torch.zeros(1, 63, 16, dtype=torch.bfloat16),
            torch.zeros(2, 64, 16, dtype=torch.bfloat16),
            torch.zeros(64, 16, dtype=torch.bfloat16),
            torch.zeros(1, 64, 32, dtype=torch.bfloat16)[:, :, ::2],
            torch.zeros(1, 1, 16, dtype=torch.bfloat16).expand(1, 64, 16),
            torch.zeros(1, 64, 16, dtype=torch.bfloat16, device="meta"),
            np.zeros((1, 64, 16), np.uint16),
            None,
        ],
        "loss_mask": [torch.zeros(1, 64, dtype=torch.bool), torch.zeros(1, 64, dtype=torch.int32)],
    }
    for key, values in wrong.items():
        for value in values:
            with pytest.raises(UsageError, match=rf"out\['{key}'\]: expected a contiguous CPU tensor \(1, 64"):
                collator([1], out={**good, key: value})
    del good["position_ids"]
    with pytest.raises(UsageError, match="position_ids"):
        collator([1], out=good)
    good = collator.allocate()
    with pytest.raises(UsageError, match="do not overlap"):
        collator([1], out={**good, "input_ids": good["loss_mask"]})
    for other in (PackingCollator(dataset, 65, view="eagle3"), PackingCollator(dataset, 64, view="mtp")):
        with pytest.raises(UsageError, match="out"):
            collator([1], out=other.allocate())


def test_samples_that_do_not_fit(write):
    collator = PackingCollator(HiddenStateDataset(write(LENGTHS).url), 40, view="eagle3")
    expected = "batch: expected at most 40 tokens, got 47, of which sample 5 has 32.*overflow"
    with pytest.raises(UsageError, match=expected):
        collator([5, 4])
    with pytest.raises(UsageError, match="got 63, of which sample 7 has 63"):
        collator([7])
    assert int(collator([5, 3])["document_ids"].max()) == 1, "32 + 8 tokens fit exactly"
    assert collator([5, 3, 0])["document_ids"][0, -1] == 1


def test_indices_of_another_kind(write):
    collator = PackingCollator(HiddenStateDataset(write(LENGTHS).url, max_length=20), 64, view="eagle3")
    same = bits(collator([7, 2]))
    for spelled in ([-3, 2], np.array([7, 2]), torch.tensor([7, 2]), [(7, None, None), (2, 0, 8)], [[7, 0, 20], 2]):
        assert bits(collator(spelled)) == same
    for bad in (10, -11, (10, 0, 1)):
        with pytest.raises(IndexError, match="snapshot of 10"):
            collator([bad])
    for bad in ("id-000", 1.0, None, ("3", 0, 1)):
        with pytest.raises(TypeError):
            collator([bad])
    for bad in ((7, 0, 21), (7, -1, 3), (7, 5, 4), (7, 1.0, 3), (7, True, 3)):
        with pytest.raises(UsageError, match=r"tokens of sample 7: expected a window within \[0, 20\)"):
            collator([bad])
    for bad in ((7, 0), (7,), (), (7, 0, 1, 2)):
        with pytest.raises(UsageError, match="indices: expected numbers or"):
            collator([bad])


@pytest.mark.parametrize(
    ("where", "settings"),
    [
        ("n_tokens", {"n_tokens": 0}),
        ("n_tokens", {"n_tokens": 1.5}),
        ("view", {"view": "speculators"}),
        ("view", {"view": None}),
        ("overflow", {"overflow": "drop"}),
        ("hidden_states_dtype", {"hidden_states_dtype": torch.int16}),
        ("hidden_states_dtype", {"hidden_states_dtype": "bfloat16"}),
        ("pad_to_multiple_of", {"pad_to_multiple_of": 8}),
        ("pad_to_multiple_of", {"pad_to_multiple_of": 0, "n_tokens": None}),
    ],
)
def test_settings_are_checked(write, where, settings):
    dataset = HiddenStateDataset(write().url)
    with pytest.raises(UsageError, match=f"{where}: expected"):
        PackingCollator(dataset, **({"n_tokens": 64, "view": "eagle3"} | settings))


@pytest.mark.parametrize("index", [0, np.int64(0), None, "01", {0: 1}])
def test_what_is_no_batch(write, index):
    with pytest.raises(UsageError, match="indices: expected a batch"):
        PackingCollator(HiddenStateDataset(write().url), 64, view="raw")(index)


def test_the_tensors_of_a_batch_share_an_allocation(write):
    """So says the documentation, with what follows for torch.save."""
    batch = PackingCollator(HiddenStateDataset(write().url), 64, view="raw")([0])
    tensors = [value for value in batch.values() if torch.is_tensor(value)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


def test_allocate_needs_a_length(write):
    with pytest.raises(UsageError, match="n_tokens: expected a number"):
        PackingCollator(HiddenStateDataset(write().url), None, view="raw").allocate()


def test_float8_without_its_scales_is_not_converted(write):
    dataset = HiddenStateDataset(write(dtype="float8_e4m3fn").url)
    with pytest.raises(UsageError, match=r"hidden_states_dtype.*dequantize=True"):
        PackingCollator(dataset, 64, view="raw", hidden_states_dtype=torch.bfloat16)


@pytest.mark.parametrize("norm", ["post", "unknown"])
def test_a_final_state_that_the_trainer_would_norm_again_is_refused(write, norm):
    url = write(final_norm=norm).url
    raw = HiddenStateDataset(url)
    for view in ("eagle3", "dflash", "mtp"):
        with pytest.raises(UsageError, match=f'view="{view}".*got final_norm {norm}.*allow_final_norm="{norm}"'):
            PackingCollator(raw, 64, view=view)
        PackingCollator(raw, 64, view=view, allow_final_norm=norm)
        PackingCollator(HiddenStateDataset(url, view="speculators", allow_final_norm=norm), 64, view=view)
    assert PackingCollator(raw, 64, view="raw")([1])["hidden_states"].shape == (1, 64, 3, 8)


def test_layers_that_the_view_needs(write):
    url = write(layers=(1, 3, 5)).url
    for view in ("eagle3", "mtp"):
        with pytest.raises(UsageError, match="the final layer 5 among the layers"):
            PackingCollator(HiddenStateDataset(url, layers=[1, 3]), 64, view=view)
    last = HiddenStateDataset(url, layers=[5])
    with pytest.raises(UsageError, match="at least one auxiliary layer"):
        PackingCollator(last, 64, view="dflash")
    both = (PackingCollator(dataset, 64, view="mtp") for dataset in (last, HiddenStateDataset(url)))
    assert len({bits(collator([5]))["hidden_states"] for collator in both}) == 1


def test_who_is_in_the_batch(write):
    written = write(LENGTHS)
    dataset = HiddenStateDataset(written.url)
    collator = PackingCollator(dataset, 40, view="eagle3", overflow="cut", with_samples=True)
    batch = collator([0, 5, 1, 9])
    assert batch["lengths"].tolist() == [0, 32, 6, 2]
    assert batch["sample_ids"] == [written.ids[number] for number in (0, 5, 1, 9)]
    assert collator([7, 5])["sample_ids"] == [written.ids[7]]
    assert list(batch)[:-2] == list(PackingCollator(dataset, 40, view="eagle3")([0]))


def test_pickles_are_small_and_read_the_same_snapshot(write):
    dataset = HiddenStateDataset(write(LENGTHS).url)
    collator = PackingCollator(dataset, 64, view="eagle3")
    wanted = bits(collator([5, 1]))
    data = pickle.dumps(collator)
    assert len(data) < 3000
    copy = pickle.loads(data)
    assert (copy.view, copy.shift, copy.n_tokens) == ("eagle3", 1, 64)
    assert bits(copy([5, 1])) == wanted


def test_threads_share_a_collator(write):
    store = CountingStore(write(LENGTHS, codec="zstd", dtype="float8_e4m3fn").path)
    collator = PackingCollator(HiddenStateDataset(store, n_threads=2), 64, view="eagle3")
    wanted = [bits(collator(batch)) for batch in BATCHES]
    failures = []

    def work(seed):
        buffers = collator.allocate()
        numbers = np.random.default_rng(seed).integers(0, len(BATCHES), 20).tolist()
        failures.extend(number for number in numbers if bits(collator(BATCHES[number], out=buffers)) != wanted[number])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
