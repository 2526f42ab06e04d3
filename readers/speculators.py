"""speculators trains on a dataset: as a backend of hs_connectors, or through a Dataset of ours.

The backend takes the place of the folder of hs_{row}.safetensors files. speculators 0.8 and later look for backends in
hs_connectors, 0.7 in a copy of it that it carries; both call what is registered by its attributes alone, so that none
of their classes is a base of ours and this module imports without them.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from hsfmt.errors import UsageError
from hsfmt.header import Header
from hsfmt.readers.dataset import HiddenStateDataset
from hsfmt.readers.row_join import MISSING, join_rows
from hsfmt.readers.sources.arrow_rows import ArrowRows, data_files
from hsfmt.readers.trained_layers import Verifier, trained_layers

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("hsfmt")
NAME = "hsfmt"
# speculators 0.7 asks the copy that it carries, not the package.
_REGISTRIES = ("speculators._vendor.hs_connectors", "hs_connectors")
_RESOLUTION = "speculators.train.config.resolution"


class Transfer:
    """What the backend hands to the trainer: stored states by row, and generated ones from the server's files.

    Picklable; each process opens files for itself.

    Parameters
    ----------
    dataset
        What is stored.
    samples
        Number of the sample of each row, int64 [row]; -1 where there is none.
    layers
        HF ids of the layers that the trainer wants, the final one last.
    """

    def __init__(
        self, dataset: HiddenStateDataset, samples: npt.NDArray[np.int64], layers: Sequence[int] | None = None
    ) -> None:
        self.dataset = dataset
        self.samples = samples
        self.layers = layers

    def setup(self) -> None:
        """Do nothing: all is opened on first use."""

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor] | None:
        """Return the states of a row of the Arrow dataset, or None where the dataset has none.

        Returns
        -------
        dict
            `hidden_states` [token, layer, hidden] and `token_ids` int64 [token].

        Raises
        ------
        UsageError
            There is no such row in the Arrow dataset that was joined.
        CorruptionError, NotFoundError, StorageError
            They can't be read as they were committed: that is no missing row, and no other one takes its place.
        """
        if not 0 <= file_idx < len(self.samples):
            raise UsageError.at(f"row {file_idx}", expected=f"a row of {len(self.samples)}", got="another dataset's")
        number = int(self.samples[file_idx])
        if number == MISSING:
            return None
        item = self.dataset.read(number, layers=self.layers)
        return {"hidden_states": item["hidden_states"], "token_ids": item["input_ids"]}

    def get_generated(self, hs_transfer_params: Mapping[str, Any] | str) -> dict[str, torch.Tensor] | None:
        """Return what the server has just generated, from the file that it names.

        Raises
        ------
        UsageError
            It names none.
        """
        if isinstance(hs_transfer_params, Mapping) and not hs_transfer_params.get("hidden_states_path"):
            remedy = "start vLLM with a shared_storage_path, for the files of its own connector beside the dataset"
            got = f"{dict(hs_transfer_params)}"[:200]
            raise UsageError.at("kv_transfer_params", expected="hidden_states_path", got=got, remedy=remedy)
        found: dict[str, torch.Tensor] | None = _file_transfer().get_generated(hs_transfer_params)
        return found

    def cache(self, handle: str, file_idx: int) -> None:
        """Refuse what speculators up to 0.8 ask for with --on-generate cache.

        Raises
        ------
        UsageError
            Always.
        """
        raise _refuse_caching(f"{handle} for row {file_idx}")

    def delete(self, handle: str) -> None:
        """Remove the server's file."""
        Path(handle).unlink()


class Backend:
    """The backend `hsfmt` of hs_connectors: `--hidden-states-backend hsfmt --hsfmt-path DATASET`."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        """Add the trainer's options."""
        _add(parser, "--hsfmt-path", "The hsfmt dataset to train on: a folder or an fsspec URL.")
        _add(parser, "--hsfmt-snapshot", "A fingerprint, or 'live' for all that is committed. Default: the sealed one.")

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """Add the options of launch_vllm.py, which has one parser for all backends."""
        _add(parser, "--hidden-states-path", "Folder for the files of generated states.", "/tmp/hidden_states")  # noqa: S108  speculators' own default
        _add(parser, "--hsfmt-path", "The hsfmt dataset that generated states go into.")

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> Transfer:
        """Open the dataset and join it with the rows of the Arrow dataset.

        Raises
        ------
        UsageError
            No path; layers, width or norm that the drafter is not made for; no row of the Arrow dataset is in it.
        SourceError
            The Arrow dataset can't be read.
        """
        url = getattr(args, "hsfmt_path", None) or args.hidden_states_path
        if not url:
            remedy = "say --hsfmt-path DATASET (with speculators 0.7: --hidden-states-path DATASET)"
            raise UsageError.at("--hsfmt-path", expected="the dataset", got="nothing", remedy=remedy)
        if getattr(args, "on_generate", None) == "cache":
            raise _refuse_caching("--on-generate cache")
        dataset = HiddenStateDataset(url, snapshot=getattr(args, "hsfmt_snapshot", None), dequantize=True)
        layers = _layers(dataset.header, args)
        samples = _join(dataset, Path(data_path), may_be_empty=args.on_missing == "generate")
        return Transfer(dataset, samples, layers)

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        """Return the connector of a server that generates missing rows: ours if a dataset is to take them too."""
        extra = {"shared_storage_path": args.hidden_states_path}
        config = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
        if getattr(args, "hsfmt_path", None):
            config |= {"kv_connector": "HsfmtConnector", "kv_connector_module_path": "hsfmt.writers.vllm"}
            extra |= {"hsfmt_path": args.hsfmt_path}
        return {**config, "kv_connector_extra_config": extra}


class SpeculatorsDataset:
    """A Dataset for training scripts of one's own, in the place of speculators' ArrowDataset.

    Needs no Arrow dataset: token ids, loss masks and lengths are the stored ones, and rows are the samples of the
    snapshot in its order. speculators' collator, sampler and trainer take it as it is, in workers of any start method.

    Parameters
    ----------
    url
        The dataset.
    max_len
        Tokens of a packed batch. Longer samples are cut by the collator, as they are with ArrowDataset.
    split, train_ratio
        "train": the first `int(n * train_ratio)` samples; "val": the rest.
    layers
        HF ids of the auxiliary layers and the final one, ascending; None: all.
    hidden_states_dtype
        What the collator casts states to; None: as stored.
    snapshot
        None: the sealed one; "live", or a fingerprint.

    Raises
    ------
    UsageError
        A split without samples, layers that are not stored, or a final state that is not before the final norm.
    NotFoundError
        No dataset or snapshot.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        max_len: int,
        split: Literal["train", "val"] = "train",
        train_ratio: float = 1.0,
        layers: Sequence[int] | None = None,
        hidden_states_dtype: torch.dtype | None = None,
        snapshot: str | None = None,
    ) -> None:
        self.dataset = HiddenStateDataset(url, view="speculators", layers=layers, snapshot=snapshot)
        self.max_len = max_len
        self.hidden_states_dtype = hidden_states_dtype or self.dataset.hidden_states_dtype
        self._rows = _split(len(self.dataset), split, train_ratio)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return the items of a batch, read by one plan; DataLoaders call it.

        Raises
        ------
        IndexError
            There is no such row.
        CorruptionError, NotFoundError, StorageError
            A sample can't be read as it was committed; no other one takes its place.
        """
        return self.dataset.__getitems__([self._rows[index] for index in indices])

    @property
    def approx_lengths(self) -> list[int]:
        """Tokens of each row, for the sampler; they are exact."""
        lengths: list[int] = self.dataset.lengths[self._rows.start : self._rows.stop].tolist()
        return lengths


def register() -> None:
    """Make the backend known to speculators; a second call does nothing.

    Has to run before speculators.train.config is imported, which collects the backends' options then.

    Raises
    ------
    UsageError
        speculators is not installed, or has been imported so far that the options would not be known.
    """
    registries = [module.HiddenStatesBackend.registry for module in _registries()]
    if not registries:
        remedy = "pip install speculators (0.7 or later) where this runs"
        raise UsageError.at("speculators", expected="hs_connectors, which comes with it", got="none", remedy=remedy)
    late = getattr(sys.modules.get(_RESOLUTION), "_BACKEND_DESTS", None)
    if late is not None and "hsfmt_path" not in late:
        remedy = "call hsfmt.readers.speculators.register() first, or train by `hsfmt speculators-train`"
        raise UsageError.at(_RESOLUTION, expected="not to be imported yet", got="imported", remedy=remedy)
    for registry in registries:
        registry[NAME] = Backend


def train(arguments: Sequence[str]) -> None:
    """Run speculators' own trainer with the backend registered; `arguments` are those of `speculators train`.

    Raises
    ------
    UsageError
        speculators is not installed.
    """
    register()
    trainer = import_module("speculators.train.cli")
    config = import_module("speculators.train.config")
    trainer.main(config.TrainConfig.resolve(list(arguments)))


def _registries() -> list[Any]:
    """Import what holds a registry of backends."""
    found = []
    for name in _REGISTRIES:
        try:
            found.append(import_module(name))
        except ModuleNotFoundError as error:
            # Something else that is missing inside it must be heard of.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
    return found


def _file_transfer() -> Any:
    """Return the transfer that reads a server's files: it knows their locks, and the scales of fp8 ones."""
    module = _registries()[0]
    return getattr(module, "FP8Transfer", module.FileTransfer)(Path())


def _layers(header: Header, args: argparse.Namespace) -> tuple[int, ...]:
    """Return the layers that the drafter is trained on, in HF numbers, final one last."""
    transformers = import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(
        args.verifier_name_or_path, trust_remote_code=getattr(args, "trust_remote_code", False)
    )
    config = getattr(config, "text_config", config)
    targets = args.target_layer_ids
    if getattr(args, "from_pretrained", None):
        draft, _ = transformers.PretrainedConfig.get_config_dict(args.from_pretrained)
        names = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
        targets = next((draft[name] for name in names if draft.get(name)), targets)
    verifier = Verifier(config.num_hidden_layers, config.hidden_size)
    return trained_layers(header, verifier, targets, final_alone=args.speculator_type == "mtp")


def _join(dataset: HiddenStateDataset, folder: Path, *, may_be_empty: bool) -> npt.NDArray[np.int64]:
    """Return the number of the sample of each row of an Arrow dataset, -1 where there is none."""
    rows = ArrowRows([folder / name for name in data_files(folder, frozenset(path.name for path in folder.iterdir()))])
    samples = join_rows(dataset.reader, (rows.input_ids(row) for row in range(rows.n_rows)))
    n_found = int((samples != MISSING).sum())
    say = _log.info if n_found == rows.n_rows else _log.warning
    url = dataset.reader.store.url
    say("%s: %d of %d rows of %s are stored (%s)", url, n_found, rows.n_rows, folder, dataset.fingerprint)
    if not n_found and not may_be_empty:
        got = f"none among {len(dataset)} samples"
        remedy = "capture the states of this data, or give the --data-path that they were captured for"
        raise UsageError.at(url, expected=f"samples with the token ids of {folder}", got=got, remedy=remedy)
    return samples


def _split(n_rows: int, split: str, train_ratio: float) -> range:
    """Return the rows of a split, as speculators divides them."""
    if split not in ("train", "val") or not 0.0 < train_ratio <= 1.0:
        got = f"{split!r}, {train_ratio!r}"
        raise UsageError.at("split, train_ratio", expected="train or val, and a ratio in (0, 1]", got=got)
    boundary = int(n_rows * train_ratio)
    rows = range(boundary) if split == "train" else range(boundary, n_rows)
    if not rows:
        got = f"no sample of {n_rows} at train_ratio {train_ratio}"
        raise UsageError.at(f"split {split}", expected="at least one sample", got=got)
    return rows


def _add(parser: argparse.ArgumentParser, flag: str, text: str, default: str | None = None) -> None:
    """Add an option unless another backend has: some versions put all of them on one parser."""
    if flag not in parser._option_string_actions:  # noqa: SLF001  as hs_connectors looks
        parser.add_argument(flag, type=str, default=default, help=text)


def _refuse_caching(what: str) -> UsageError:
    remedy = "let the server write into the dataset by hsfmt's connector, and start again to read what it stored"
    expected = "generated states to be deleted after use"
    return UsageError.at("--on-generate", expected=expected, got=what, remedy=remedy)
