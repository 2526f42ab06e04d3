"""SpecForge trains on a dataset: a feature store for its data plane, and the references to what is in it.

The store takes the place of SpecForge's own over folders of .ckpt files. SpecForge calls it by its methods alone, so
that none of its classes is a base of ours and this module imports without it.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hsfmt.columns import IDS, MASK
from hsfmt.errors import UsageError
from hsfmt.readers.dataset import HiddenStateDataset
from hsfmt.readers.specforge_layers import Target, captured_layers
from hsfmt.readers.token_columns import token_columns

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("hsfmt")
_CONTRACTS = "specforge.runtime.contracts"
# Of SpecForge's own reader: whether references say shapes and types, which its loader then compares within a batch.
_SPECS = "SPECFORGE_VALIDATE_OFFLINE_FEATURES"


class DatasetFeatureStore:
    """A FeatureStore of SpecForge over a dataset: read-only, and picklable.

    `refs` gives what its loaders and builders take beside the store. Records have the keys, shapes, data types and
    values of the .ckpt files that SpecForge prepares for the algorithm. Any number of threads may read at once.

    Parameters
    ----------
    url
        The dataset.
    algorithm
        Registration of SpecForge's: `builtin_algorithm_registry().resolve("eagle3")`.
    layers
        HF ids of the drafter's layers, without the final one: SpecForge's are one lower on most targets (`hf_layers`).
    target
        The model whose states these are.
    max_length
        Longer samples are cut to their first `max_length` tokens, as the trainer does anyway.
    snapshot
        None: the sealed one; "live", or a fingerprint.
    modality
        Of the algorithm's offline data.

    Raises
    ------
    UsageError
        Layers or width that the drafter is not made for, or a final state that is not after the final norm.
    NotFoundError
        No dataset or snapshot.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        algorithm: Any,
        *,
        layers: Sequence[int],
        target: Target,
        max_length: int | None = None,
        snapshot: str | None = None,
        modality: str = "text",
    ) -> None:
        self._provider = algorithm.providers.offline_for(modality)
        self._mask_filter = algorithm.providers.model.loss_mask_filter
        self._layout = self._provider.capture_layout
        self._n_final = int(self._layout.last_hidden_feature is not None)
        self.dataset = HiddenStateDataset(url, max_length=max_length, snapshot=snapshot, dequantize=True)
        header = self.dataset.header
        self.layers = captured_layers(header, target, layers, with_final=bool(self._n_final))

    def __repr__(self) -> str:
        return f"DatasetFeatureStore({self.dataset.reader.store.url!r}, snapshot={self.dataset.fingerprint!r})"

    def refs(self, *, run_id: str, ttt_length: int = 7) -> list[Any]:
        """Return a SampleRef for each sample, in the dataset's order; no state is read.

        They are those of SpecForge's own reader over the same samples, but for the URI and the number of tokens, which
        is known here. Samples that SpecForge would not have prepared for the algorithm are left out, and it is said how
        many: for the DFlash family those without two supervised tokens in a row, which its trainer fails on.

        Raises
        ------
        CorruptionError, NotFoundError, StorageError
            Loss masks can't be read as they were committed.
        """
        contracts = import_module(_CONTRACTS)
        lengths = self.dataset.lengths
        max_length = int(lengths.max(initial=0)) if self.dataset.max_length is None else self.dataset.max_length
        # Opens nothing: it is asked only for what its references say.
        own = self._provider.build_reader(
            self.dataset.reader.store.url, run_id=run_id, ttt_length=ttt_length, max_len=max_length
        )
        metadata = {
            "format": f"offline_{own.strategy}",
            "target_repr": own.target_repr,
            "schema_version": contracts.SCHEMA_VERSION,
            "ttt_length": ttt_length,
            "max_len": max_length,
        }
        with_specs = os.environ.get(_SPECS, "0") == "1"
        refs = []
        for number in self._trainable().tolist():
            n_tokens = int(lengths[number])
            specs = self._specs(contracts.FeatureSpec, n_tokens) if with_specs else {}
            refs.append(
                contracts.SampleRef(
                    sample_id=f"{run_id}:{number:08d}",
                    run_id=run_id,
                    source_task_id=None,
                    feature_store_uri=f"{self._prefix}{number}",
                    feature_keys={name: name for name in own.feature_keys},
                    feature_specs=specs,
                    strategy=own.strategy,
                    schema_version=contracts.SCHEMA_VERSION,
                    num_tokens=n_tokens,
                    estimated_bytes=n_tokens * self._nbytes_per_token,
                    metadata={**metadata, "file_index": number},
                )
            )
        return refs

    def get(
        self, sample_ref: Any, *, device: torch.device | str = "cpu", names: Sequence[str] | None = None
    ) -> tuple[dict[str, torch.Tensor], Any]:
        """Return the record of a reference, and the handle that SpecForge gives back after use.

        Returns
        -------
        dict
            Token ids and loss mask int64 [token], auxiliary states [1, token, layer * hidden] and the final state
            [1, token, hidden], under the names that the reference asks for, in its order. The states are views of one
            buffer that nothing else uses.

        Raises
        ------
        UsageError
            The reference is to another snapshot, or asks for what the algorithm does not have.
        CorruptionError, NotFoundError, StorageError
            The sample can't be read as it was committed; no other one takes its place.
        """
        uri = str(sample_ref.feature_store_uri)
        number = uri.removeprefix(self._prefix)
        if number == uri or not number.isdecimal():
            raise UsageError.at(f"sample {sample_ref.sample_id}", expected=f"{self._prefix}NUMBER", got=uri)
        item = self.dataset.read(int(number), layers=self.layers)
        states, n_auxiliary = item["hidden_states"], len(self.layers) - self._n_final
        sources = {
            "input_ids": item["input_ids"],
            "loss_mask": item["loss_mask"].long(),
            "aux_hidden_states": states[None, :, :n_auxiliary].flatten(2),
        }
        if self._n_final:
            sources["last_hidden_states"] = states[None, :, -1]
        record = self._layout.materialize(sources)
        wanted = list(names or sample_ref.feature_keys)
        if not set(wanted) <= set(record):
            expected = f"names out of {list(record)}"
            raise UsageError.at(f"sample {item['sample_id']}", expected=expected, got=f"{wanted}")
        handle = import_module(_CONTRACTS).FeatureHandle(sample_ref.sample_id, 0, f"{sample_ref.sample_id}:0")
        return {name: record[name].to(device) for name in wanted}, handle

    def release(self, handle: Any, *, reason: str = "consumed") -> None:
        """Do nothing: the memory is free when the tensors are."""

    def abort(self, sample_id: str, *, reason: str) -> None:
        """Do nothing: what is stored stays."""

    def put(
        self,
        tensors: Mapping[str, torch.Tensor],  # noqa: ARG002  as SpecForge's interface has it
        *,
        sample_id: str,
        metadata: Mapping[str, Any],  # noqa: ARG002  likewise
    ) -> Any:
        """Refuse to write.

        Raises
        ------
        UsageError
            Always.
        """
        remedy = "write with hsfmt.DatasetWriter, or capture"
        raise UsageError.at(sample_id, expected="reading alone", got="put", remedy=remedy)

    def estimate_bytes(self, specs: Mapping[str, Any]) -> int:
        """Return the bytes of tensors of these shapes and types."""
        import torch

        return sum(int(np.prod(spec.shape)) * getattr(torch, spec.dtype).itemsize for spec in specs.values())

    def health(self) -> dict[str, Any]:
        """Return what SpecForge's own store says of itself; nothing is held here."""
        return {"store_id": self.dataset.fingerprint, "resident_samples": 0, "resident_bytes": 0, "release_pending": 0}

    def token_counts(self, vocab_size: int | None = None) -> Counter[int]:
        """Return how often each token is supervised, as SpecForge counts it for a drafter's vocabulary.

        Also in its order, which decides between tokens that are equally frequent: by first sample, then by id.

        Raises
        ------
        UsageError
            A token that the target's vocabulary does not have.
        CorruptionError, NotFoundError, StorageError
            Token ids or loss masks can't be read as they were committed.
        """
        found: dict[int, npt.NDArray[np.int64]] = {}
        for number, columns in token_columns(self.dataset.reader, [IDS, MASK]):
            cut = slice(self.dataset.max_length)
            selected = columns[IDS][cut][columns[MASK][cut].astype(bool)]
            found[number] = np.stack(np.unique(selected, return_counts=True))
        counts: Counter[int] = Counter()
        for number in sorted(found):
            for token, count in found[number].T.tolist():
                counts[token] += count
        if counts and vocab_size is not None and max(counts) >= vocab_size:
            url = self.dataset.reader.store.url
            raise UsageError.at(url, expected=f"tokens below {vocab_size}, the target's", got=f"token {max(counts)}")
        return counts

    @property
    def _prefix(self) -> str:
        return f"hsfmt:{self.dataset.fingerprint}/"

    @property
    def _nbytes_per_token(self) -> int:
        states = len(self.layers) * self.dataset.header.hidden_size * self.dataset.hidden_states_dtype.itemsize
        return int(states) + 2 * 8  # token id and mask are int64 there

    def _specs(self, make: Any, n_tokens: int) -> dict[str, Any]:
        hidden = self.dataset.header.hidden_size
        width = (len(self.layers) - self._n_final) * hidden
        dtype = str(self.dataset.hidden_states_dtype).removeprefix("torch.")
        specs = {name: make(name=name, shape=(n_tokens,), dtype="int64") for name, _ in self._layout.passthrough}
        for name, size in ((self._layout.aux_feature, width), (self._layout.last_hidden_feature, hidden)):
            if name is not None:
                specs[name] = make(name=name, shape=(1, n_tokens, size), dtype=dtype)
        return specs

    def _trainable(self) -> npt.NDArray[np.int64]:
        """Return the numbers of the samples that the algorithm can be trained on, ascending."""
        keep = np.ones(len(self.dataset), bool)
        if self._mask_filter is not None:
            for number, columns in token_columns(self.dataset.reader, [MASK]):
                keep[number] = self._mask_filter(columns[MASK][: self.dataset.max_length])
        numbers = np.flatnonzero(keep)
        if len(numbers) < len(keep):
            left_out = np.flatnonzero(~keep)
            names = ", ".join(self.dataset.sample_ids[int(number)] for number in left_out[:5])
            text = "%s: %d of %d samples are left out, without enough supervised tokens in a row: %s%s"
            url, more = self.dataset.reader.store.url, " …" if len(left_out) > 5 else ""
            _log.warning(text, url, len(left_out), len(keep), names, more)
        if not len(numbers):
            url = self.dataset.reader.store.url
            raise UsageError.at(url, expected="at least one sample to train on", got=f"none of {len(keep)}")
        return numbers
