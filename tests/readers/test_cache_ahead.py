"""Reading ahead of the order of a remote dataset with a local cache."""

import pytest
import torch
from written import RemoteLikeStore, write_dataset

from hsfmt import HiddenStateDataset
from hsfmt.readers.batches_ahead import Batch
from hsfmt.readers.packing import PackingCollator


@pytest.mark.parametrize("packed", [False, True])
def test_an_order_that_is_cached_is_not_read_ahead(tmp_path, packed):
    """Once that is known: the first batches may be; see test_batches_ahead.py for how soon."""
    written = write_dataset(tmp_path / "dataset")
    n_samples = len(written.ids)
    order = [*range(n_samples)] * 6
    held = []
    for _ in range(2):
        store = RemoteLikeStore(written.path)
        dataset = HiddenStateDataset(store, cache_dir=tmp_path / "cache", cache_size="64MiB")
        source = PackingCollator(dataset, 64, view="raw") if packed else dataset
        source._ahead.max_nbytes = 3 * source._nbytes([7])  # the longest sample
        for at, number in enumerate(order[: len(order) if held else n_samples]):
            asked = Batch([number], [[later] for later in order[at + 1 :]])
            batch = source[asked] if packed else source.__getitems__(asked)
            states = batch["hidden_states"][0, : dataset._length(number)] if packed else batch[0]["hidden_states"]
            wanted = written.content[written.ids[number]].states
            assert states.reshape(wanted.shape).contiguous().view(torch.int16).numpy().tobytes() == wanted.tobytes()
            held.append(source._ahead.held_nbytes)
        dataset.close()
        dataset.reader.cache.drain()
    cold, warm = held[:n_samples], held[n_samples:]
    assert all(cold)
    assert not any(warm[5 * n_samples :])
