"""What a reader gives beside what the model has; and how often what was done."""

import collections

from model_dataset import dataset_digest

from hsfmt.errors import HsfmtError
from hsfmt.readers.sample_reader import SampleReader

DONE = collections.Counter()


def compare(reader, samples):
    """Every sample of the model in its order and bit by bit, and nothing else."""
    assert [reader.sample_ids[i] for i in range(len(reader))] == [sample.sample_id for sample in samples]
    assert reader.content_digest == dataset_digest(samples)
    for found, sample in zip(reader.read_many(range(len(samples))), samples, strict=True):
        ids, states, mask = sample.arrays()
        assert found.hidden_states.tobytes() == states.tobytes()
        assert found.input_ids.tolist() == ids.tolist()
        assert found.loss_mask.tolist() == mask.astype(bool).tolist()
        DONE["samples compared"] += 1


def silent(url, samples):
    """Whether a fresh reader refuses something; what it does serve is right."""
    try:
        reader = SampleReader(url, snapshot="live")
    except HsfmtError:
        return True
    refused = False
    for number, sample in enumerate(samples):
        try:
            found = reader.read(number)
        except HsfmtError:
            refused = True
        else:
            assert found.hidden_states.tobytes() == sample.arrays()[1].tobytes()
            assert found.input_ids.tolist() == sample.arrays()[0].tolist()
    return refused
