"""Run where SpecForge is: compare_records.py ALGORITHM FOLDER DATASET, its own reader and store beside ours.

Prints, as one line of JSON, how many records and batches were the same tensor for tensor, and which samples of the
folder SpecForge's loader fails on.
"""

import inspect
import json
import os
import pickle
import sys

import torch
from specforge.algorithms.builtin import builtin_algorithm_registry
from specforge.runtime.data_plane import FeatureDataLoader, FeatureStore, LocalFeatureStore
from specforge.training.vocab_mapping import count_effective_feature_tokens

from hsfmt.readers.specforge import DatasetFeatureStore
from hsfmt.readers.specforge_layers import Target

LAYERS = {"eagle3": [5, 2, 4]}
MAX_LENGTH = 128


def same(ours: dict, theirs: dict) -> bool:
    assert list(ours) == list(theirs), (list(ours), list(theirs))
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(ours[name], tensor), name
    return True


def check_interface() -> None:
    """Every method that SpecForge's interface demands, with its parameters by their names and kinds."""
    for name in FeatureStore.__abstractmethods__ | {"estimate_bytes"}:
        theirs = [(p.name, p.kind) for p in inspect.signature(getattr(FeatureStore, name)).parameters.values()]
        ours = [(p.name, p.kind) for p in inspect.signature(getattr(DatasetFeatureStore, name)).parameters.values()]
        assert ours == theirs, name


def references(provider, folder: str, store: DatasetFeatureStore):
    """Theirs with shapes and sizes, which it reads every file for, and ours, which are the same without."""
    os.environ["SPECFORGE_VALIDATE_OFFLINE_FEATURES"] = "1"
    theirs = provider.build_reader(folder, run_id="run", ttt_length=7, max_len=MAX_LENGTH).read()
    ours = store.refs(run_id="run")
    theirs = [theirs[ref.metadata["file_index"]] for ref in ours]
    for ref, own in zip(ours, theirs, strict=True):
        assert ref.sample_id == own.sample_id
        assert list(ref.feature_keys) == list(own.feature_keys)
        plain = (ref.metadata, ref.strategy, ref.run_id, ref.schema_version)
        assert plain == (own.metadata, own.strategy, own.run_id, own.schema_version)
        if own.num_tokens <= MAX_LENGTH:
            assert (ref.num_tokens, ref.estimated_bytes) == (own.num_tokens, own.estimated_bytes)
            assert ref.feature_specs == own.feature_specs
            assert store.estimate_bytes(ref.feature_specs) == own.estimated_bytes
    return ours, theirs


def failing(loader_of, folder: str, provider) -> list[int]:
    """The numbers of the files that SpecForge's own loader raises for."""
    found = []
    for ref in provider.build_reader(folder, run_id="run", ttt_length=7, max_len=MAX_LENGTH).read():
        try:
            list(loader_of(LocalFeatureStore("own"), [ref], 1, 0))
        except ValueError:
            found.append(ref.metadata["file_index"])
    return found


def main(algorithm_name: str, folder: str, url: str) -> None:
    check_interface()
    algorithm = builtin_algorithm_registry().resolve(algorithm_name)
    provider = algorithm.providers.offline_for("text")
    options = {"layers": LAYERS.get(algorithm_name, [2, 3, 4, 5, 6]), "target": Target(8, 64)}
    whole = DatasetFeatureStore(url, algorithm, **options)
    store = pickle.loads(pickle.dumps(DatasetFeatureStore(url, algorithm, max_length=MAX_LENGTH, **options)))
    own = LocalFeatureStore("own")
    ours, theirs = references(provider, folder, store)
    whole_refs = whole.refs(run_id="run")
    n_records = sum(same(whole.get(ref)[0], own.get(file)[0]) for ref, file in zip(whole_refs, theirs, strict=True))

    def loader(store, refs, batch_size, workers):
        return FeatureDataLoader(
            store,
            refs=refs,
            batch_size=batch_size,
            collate_fn=provider.build_collator(),
            per_sample_transform=provider.build_normalizer(MAX_LENGTH),
            drop_last=False,
            strategy=algorithm_name,
            num_workers=workers,
        )

    n_batches = 0
    for clone in ("1", "0"):
        os.environ["CLONE_ON_FETCH"] = clone
        for workers in (0, 2):
            pairs = zip(loader(store, ours, 2, workers), loader(own, theirs, 2, workers), strict=True)
            n_batches += sum(a.sample_ids == b.sample_ids and same(a.tensors, b.tensors) for a, b in pairs)
    counts = count_effective_feature_tokens(folder, max_length=MAX_LENGTH)
    assert list(store.token_counts(261).items()) == list(counts.items())
    sys.stdout.write(json.dumps([n_records, n_batches, failing(loader, folder, provider)]) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
