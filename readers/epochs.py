"""All batches of an epoch: a pure function of the settings, the seed, the epoch and what is known of the samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hsfmt import digests
from hsfmt.errors import UsageError
from hsfmt.readers.packs import equal_batches, pack
from hsfmt.readers.random_keys import RandomKeys
from hsfmt.readers.shuffle import Locality, StoredOrder, entropy_bits, log2_factorial, shuffle, unshuffled

if TYPE_CHECKING:
    from hsfmt.readers.dataset import HiddenStateDataset

# Counted up when the same settings give another sequence of batches.
ORDER_VERSION = 1


@dataclass(frozen=True, slots=True)
class EpochSettings:
    """What the batches of every epoch depend on, beside the samples; as the parameters of BatchOrder."""

    n_tokens: int | None
    n_samples: int | None
    locality: Locality | None
    seed: int
    shift: int
    window: int
    drop_last: bool

    def to_dict(self) -> dict[str, Any]:
        """Return them as JSON values."""
        local = self.locality
        return {
            "order_version": ORDER_VERSION,
            "n_tokens": self.n_tokens,
            "n_samples": self.n_samples,
            "shuffle": local is not None,
            "neighbours": local.neighbours if local else None,
            "parts_at_once": local.parts_at_once if local else None,
            "seed": self.seed,
            "shift": self.shift,
            "window": self.window,
            "drop_last": self.drop_last,
        }


@dataclass(frozen=True, slots=True)
class EpochBatches:
    """The batches of an epoch, for all ranks: a sequence of lists of sample numbers over flat arrays.

    Attributes
    ----------
    epoch
        Number of the epoch.
    samples
        int32 [sample]: numbers, batch by batch.
    offsets
        int64 [batch + 1]: where each batch begins in `samples`.
    digest
        Of both.
    """

    epoch: int
    samples: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    digest: str

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> list[int]:
        number = range(len(self))[number]
        batch: list[int] = self.samples[self.offsets[number] : self.offsets[number + 1]].tolist()
        return batch


class Epochs:
    """The epochs of a set of samples.

    Parameters
    ----------
    settings
        How batches are made.
    numbers
        int32 [sample]: the samples.
    stored
        The same in the order in which they are stored.
    tokens
        int32, of all samples of the dataset: what each needs of a budget, from 1 to `n_tokens`.
    """

    def __init__(
        self,
        settings: EpochSettings,
        numbers: npt.NDArray[np.int32],
        stored: StoredOrder,
        tokens: npt.NDArray[np.int32],
    ) -> None:
        self.settings, self.numbers = settings, numbers
        self._stored, self._tokens = stored, tokens

    def batches(self, epoch: int) -> EpochBatches:
        """Make the batches of an epoch: about two seconds for a million samples."""
        settings = self.settings
        keys = RandomKeys(settings.seed, epoch)
        if settings.locality is None:
            sequence = unshuffled(self.numbers)
        else:
            sequence = shuffle(self._stored, settings.locality, keys)
        if settings.n_tokens is not None:
            tokens = self._tokens[sequence.samples]
            packs = pack(sequence, tokens, settings.n_tokens, settings.window, keys if settings.locality else None)
        else:
            assert settings.n_samples is not None
            packs = equal_batches(len(sequence.samples), settings.n_samples, drop_last=settings.drop_last)
        samples = sequence.samples[packs.order]
        bytes_of_both = samples.astype("<i4").tobytes() + packs.offsets.astype("<i8").tobytes()
        return EpochBatches(epoch, samples, packs.offsets, digests.digest(bytes_of_both))

    def n_tokens_of(self, batch: list[int]) -> int:
        """Return what a batch needs of a budget, in tokens."""
        return int(self._tokens[batch].sum(dtype=np.int64))

    @property
    def least_batches(self) -> int:
        """Batches that every epoch has at least; with `n_samples`, that all have."""
        settings = self.settings
        if settings.n_tokens is not None:
            return -(-self._n_tokens // settings.n_tokens)
        assert settings.n_samples is not None
        n = len(self.numbers)
        return n // settings.n_samples if settings.drop_last else -(-n // settings.n_samples)

    def efficiency(self, n_batches: int) -> float:
        """Return the tokens of all samples as a fraction of `n_batches` budgets; 1.0 without a budget."""
        if self.settings.n_tokens is None or n_batches == 0:
            return 1.0
        return self._n_tokens / (n_batches * self.settings.n_tokens)

    @property
    def _n_tokens(self) -> int:
        return int(self._tokens[self.numbers].sum(dtype=np.int64))

    @property
    def entropy_bits(self) -> float:
        """log2 of the number of orders that the samples can have."""
        return entropy_bits(self._stored, self.settings.locality) if self.settings.locality else 0.0

    @property
    def entropy_fraction(self) -> float:
        """The same as a fraction of log2(n!)."""
        most = log2_factorial(len(self.numbers))
        return self.entropy_bits / most if most else 1.0

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the samples' numbers and of what they need."""
        return {
            "samples": digests.digest(self.numbers.astype("<i4").tobytes()),
            "lengths": digests.digest(self._tokens[self.numbers].astype("<i4").tobytes()),
        }


def epochs_of(dataset: HiddenStateDataset, settings: EpochSettings, samples: Any, *, cut: bool) -> Epochs:
    """Return the epochs of a dataset, or of some of its samples.

    Raises
    ------
    UsageError
        Numbers of samples that are none, or samples too long for a batch that are not to be cut.
    """
    numbers = np.arange(len(dataset), dtype=np.int32) if samples is None else _choose(samples, len(dataset))
    snapshot = dataset.reader.snapshot
    tokens = np.maximum(dataset.lengths - settings.shift, 1).astype(np.int32)
    if settings.n_tokens is not None:
        too_long = numbers[tokens[numbers] > settings.n_tokens]
        if len(too_long) and not cut:
            most = settings.n_tokens + settings.shift
            raise UsageError.at(
                "n_tokens",
                expected=f"samples of at most {most} tokens",
                got=f"{len(too_long)} longer ones, up to {int(dataset.lengths[too_long].max())}",
                remedy=f'open the dataset with max_length={most}, which cuts them, or say too_long="cut"',
                samples=tuple(dataset.sample_ids[int(number)] for number in too_long),
            )
        np.minimum(tokens, min(settings.n_tokens, np.iinfo(np.int32).max), out=tokens)
    return Epochs(settings, numbers, StoredOrder.of(numbers, snapshot.part[numbers], snapshot.row[numbers]), tokens)


def _choose(samples: Any, n_samples: int) -> npt.NDArray[np.int32]:
    numbers = np.asarray(samples)
    if numbers.shape == (0,):
        return np.empty(0, dtype=np.int32)  # NumPy takes an empty list for floats
    expected = f"an array of numbers from 0 to {n_samples - 1}, each once"
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise UsageError.at("samples", expected=expected, got=f"{numbers.dtype}, shape {numbers.shape}")
    outside = numbers[(numbers < 0) | (numbers >= n_samples)]
    if len(outside):
        raise UsageError.at("samples", expected=expected, got=str(outside[:5].tolist()))
    if len(np.unique(numbers)) < len(numbers):
        raise UsageError.at("samples", expected=expected, got="some of them twice")
    return numbers.astype(np.int32)
