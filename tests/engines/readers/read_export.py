"""Load an export with the real program's reader, and save what it made of it: read_export.py READER FOLDER RESULT.

It runs in the environment of engines/readers.sh. Two packages can't be imported there as a whole, but their readers
can: speculators 0.4 is made for transformers 4, and the wheel of angelslim 0.5.0 lacks a module that its top imports.
The code of their packages' tops is left out; every module that is loaded is theirs, unchanged.
"""

import importlib
import sys
import types
from pathlib import Path

import torch

MAX_LEN = 4096
_ANGELSLIM = "angelslim.compressor.speculative.train.data.dataset_builder"


def bare(package):
    """Make a package and those above it importable without running their __init__.py."""
    names = package.split(".")
    root = next(Path(place) for place in sys.path if (Path(place) / names[0]).is_dir())
    for stop in range(1, len(names) + 1):
        module = types.ModuleType(".".join(names[:stop]))
        module.__path__ = [str(root.joinpath(*names[:stop]))]
        sys.modules[module.__name__] = module


def specforge_loader(folder, reader, normalizer, collator, strategy):
    """Everything between a folder and the trainer: list, check, load, normalise, collate; two samples a batch."""
    from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore

    reader.validate_files = True
    refs = reader.read()
    paths = [ref.feature_store_uri.removeprefix("file://") for ref in refs]
    settings = {"per_sample_transform": normalizer, "collate_fn": collator, "strategy": strategy, "drop_last": False}
    singles = list(FeatureDataLoader(LocalFeatureStore(), refs=refs, batch_size=1, **settings))
    pairs = list(FeatureDataLoader(LocalFeatureStore(), refs=refs, batch_size=2, **settings))
    return paths, [batch.tensors for batch in singles], [batch.tensors for batch in pairs]


def specforge_eagle3(folder):
    from specforge.algorithms.eagle3 import data

    reader = data.build_offline_reader(folder, run_id="run", ttt_length=7, max_len=MAX_LEN)
    return specforge_loader(
        folder, reader, data.build_offline_normalizer(MAX_LEN), data.build_offline_collator(), "eagle3"
    )


def specforge_dataset(folder):
    """The dataset of earlier releases, which the wheel still has; for a file that it can't load it gives file 0."""
    from specforge.data import preprocessing, utils

    paths = preprocessing.list_local_files(folder)
    dataset = preprocessing.build_offline_eagle3_dataset(folder, max_len=MAX_LEN)
    samples = [dataset[i] for i in range(len(dataset))]
    return paths, samples, [utils.DataCollatorWithPadding()(samples[:2])]


def specforge_dflash(folder):
    from specforge.algorithms.common import dflash_family_data as data

    reader = data.build_offline_reader("dflash", folder, run_id="run", ttt_length=1, max_len=MAX_LEN)
    return specforge_loader(folder, reader, data.build_offline_normalizer(MAX_LEN), data.build_collator(), "dflash")


def specforge_dspark(folder):
    from specforge.algorithms.common import dflash_family_data as data

    reader = data.build_dspark_offline_reader("dspark", folder, run_id="run", ttt_length=1, max_len=MAX_LEN)
    return specforge_loader(
        folder, reader, data.build_dspark_offline_normalizer(MAX_LEN), data.build_dspark_collator(), "dspark"
    )


def angelslim(folder, kind="OfflineLLMDatasetBuilder"):
    bare(_ANGELSLIM)
    builder = getattr(importlib.import_module(f"{_ANGELSLIM}.offline_dataset_builder"), kind)()
    dataset = builder.build_dataset(folder)
    samples = [dataset[i] for i in range(len(dataset))]
    return list(map(str, dataset.ckpt_files)), samples, [builder.get_data_collator()(samples[:2])]


def angelslim_vlm(folder):
    return angelslim(folder, "OfflineVLMDatasetBuilder")


def modelopt(folder):
    from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset

    paths = sorted(map(str, Path(folder).rglob("*.pt")))  # its trainer lists them so, unsorted
    masked = all("loss_mask" in torch.load(path, weights_only=True) for path in paths)
    dataset = OfflineSupervisedDataset(paths, answer_only_loss=masked)
    samples = [dataset[i] for i in range(len(dataset))]
    return paths, samples, [EagleOfflineDataCollator(64)(samples)]


def speculators(folder):
    bare("speculators")
    data = importlib.import_module("speculators.train.data")
    dataset = data.Eagle3SampleFileDataset(MAX_LEN, datapath=folder, hidden_states_dtype=torch.bfloat16)
    samples = [dataset[i] for i in range(len(dataset))]
    for sample, length in zip(samples, dataset.approx_lengths, strict=True):
        sample["stated_length"] = torch.tensor([length])
    collated = [{k: v for k, v in sample.items() if k != "stated_length"} for sample in samples]
    return list(map(str, dataset.data)), samples, [data.create_collate_fn(512)(collated)]


READERS = {
    "specforge-eagle3": specforge_eagle3,
    "specforge-dataset": specforge_dataset,
    "specforge-dflash": specforge_dflash,
    "specforge-dspark": specforge_dspark,
    "angelslim": angelslim,
    "angelslim-vlm": angelslim_vlm,
    "modelopt": modelopt,
    "speculators": speculators,
}

if __name__ == "__main__":
    which, where, result = sys.argv[1:]
    found = READERS[which](where)
    torch.save(dict(zip(("paths", "samples", "batches"), found, strict=True)), result)
    print(f"{len(found[0])} files")  # noqa: T201  the log of the test
