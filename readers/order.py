"""BatchOrder: which samples make which batch, in which order, on which rank. NumPy only.

The batches of an epoch are one global sequence, a function of the dataset's snapshot, the settings, the seed and the
epoch, and of nothing else: not of the number of ranks, the machine, the Python or the NumPy. So any number of ranks can
take up what any other left.
"""

# ruff: noqa: SLF001  an iterator and its order are two halves of one thing

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from hsfmt.errors import UsageError
from hsfmt.readers.batches_ahead import MAX_BATCHES, Batch
from hsfmt.readers.epochs import EpochBatches, EpochSettings, epochs_of
from hsfmt.readers.order_state import RETRAIN, OrderState, parse_state, refuse_another
from hsfmt.readers.ranks import check_all_ranks_agree, rank_and_world_size
from hsfmt.readers.rounds import Rounds
from hsfmt.readers.sample_requests import integer
from hsfmt.readers.shuffle import Locality

if TYPE_CHECKING:
    from hsfmt.readers.dataset import HiddenStateDataset


class BatchOrder:
    """The batches of each epoch, as lists of sample numbers: `batch_sampler=` of any DataLoader.

    Rank r of W takes batches r, r + W, … of one global sequence, so that all ranks take as many steps by construction.
    The same snapshot, settings, seed and epoch give the same sequence on every machine and with every release of NumPy;
    a library that made another one would refuse the states of this one. With `batch_size=None` it also goes in as
    `sampler=`, over a dataset whose items are batches.

    Each iteration is an epoch: the next one begins when the one before was taken to its end, unless `set_epoch` says
    which. After a loop that is left early always say it: a loader with workers reads ahead, perhaps to the end, so that
    whether the epoch comes once more or the next one depends on how far it got. Iterators have a state of their own,
    with which torchdata's StatefulDataLoader resumes by itself.

    Parameters
    ----------
    dataset
        What the numbers are of. Only its lengths and the places of its samples are looked at.
    n_tokens
        Budget of a batch in tokens: samples near each other in the shuffled order are packed until none fits.
    n_samples
        Instead of a budget: samples of a batch; the last one of an epoch may have fewer.
    shuffle
        True: every order is as likely. A `Locality`: what is stored together is read together. False: the order of the
        snapshot, but for the packing.
    seed
        Any integer from 0 on.
    shift
        Tokens that each sample loses on its way into the batch: 1 where the collator pairs each token with the states
        before it (EAGLE-3). A sample that has no more counts as one token.
    too_long
        What becomes of samples that are longer than `n_tokens`. "refuse": an error names them. "cut": each goes alone,
        for the collator to cut.
    window
        Samples (or runs of neighbours) that packing chooses from: more fill batches better, fewer keep the order.
    drop_last
        Leave out a last batch of fewer than `n_samples`, and a last round of fewer batches than ranks; `dropped` names
        the samples. Else that round is filled with batches from the epoch's beginning, which `padding` names.
    rank, world_size
        None: those of torch.distributed if it is initialised, else 0 and 1. Ranks that differ in the snapshot or the
        settings would take unequal steps. So where torch.distributed has as many processes as there are ranks, the
        constructor compares them over all, which all have to make their order for (with NCCL after
        torch.cuda.set_device). Otherwise say `fingerprint`, or open the dataset with it as `snapshot=`.
    fingerprint
        The snapshot that is meant, compared with the dataset's; said on all ranks or on none. With it nothing is
        compared between ranks. Several ranks need it for a dataset opened with snapshot="live", since each could have
        found another one.
    samples
        Draw from these only, integers [sample], each once (a training split, say); None: from all.

    Raises
    ------
    UsageError
        Settings that contradict each other, too long samples, a live snapshot without its fingerprint, or another one;
        ranks that differ; `drop_last` with fewer batches than ranks, in epoch 0. `len` and iterating raise that last
        one too, since later epochs can have fewer batches with a budget.
    """

    def __init__(  # noqa: PLR0913  the public constructor: each is a setting of its own
        self,
        dataset: HiddenStateDataset,
        *,
        n_tokens: int | None = None,
        n_samples: int | None = None,
        shuffle: bool | Locality = True,
        seed: int = 0,
        shift: int = 0,
        too_long: Literal["refuse", "cut"] = "refuse",
        window: int = 1024,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        fingerprint: str | None = None,
        samples: npt.ArrayLike | None = None,
    ) -> None:
        if (n_tokens is None) == (n_samples is None):
            raise UsageError.at("n_tokens and n_samples", expected="one of them", got=f"{n_tokens} and {n_samples}")
        if too_long not in ("refuse", "cut"):
            raise UsageError.at("too_long", expected='"refuse" or "cut"', got=repr(too_long)[:60])
        if not isinstance(shuffle, bool | Locality):
            raise UsageError.at("shuffle", expected="True, False or a Locality", got=repr(shuffle)[:60])
        settings = EpochSettings(
            n_tokens=None if n_tokens is None else integer(n_tokens, "n_tokens", "an integer from 1 on", 1),
            n_samples=None if n_samples is None else integer(n_samples, "n_samples", "an integer from 1 on", 1),
            locality=shuffle if isinstance(shuffle, Locality) else Locality() if shuffle else None,
            seed=integer(seed, "seed", "an integer from 0 on", 0),
            shift=integer(shift, "shift", "an integer from 0 on", 0),
            window=integer(window, "window", "an integer from 1 on", 1),
            drop_last=bool(drop_last),
        )
        self.rank, self.world_size = rank_and_world_size(rank, world_size)
        self.fingerprint = _check_fingerprint(dataset, fingerprint)
        self._epochs = epochs_of(dataset, settings, samples, cut=too_long == "cut")
        self._settings = {**settings.to_dict(), **self._epochs.digests}
        self._n_tokens_ahead = int(getattr(dataset, "n_tokens_ahead", 0))
        self._batches: EpochBatches | None = None
        self._go_to(0, 0)
        if fingerprint is None:
            check_all_ranks_agree(self.rank, self.world_size, {"fingerprint": self.fingerprint, **self._settings})
            _refuse_live(dataset, self.world_size)
        if settings.drop_last and self._epochs.least_batches < self.world_size:
            self._batches_at(0)

    def __repr__(self) -> str:
        settings = self._epochs.settings
        budget = f"n_tokens={settings.n_tokens}" if settings.n_tokens else f"n_samples={settings.n_samples}"
        return f"BatchOrder({budget}, seed={settings.seed}, epoch={self.epoch}, rank={self.rank} of {self.world_size})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_batches": None}  # made again where they are needed

    def __len__(self) -> int:
        """Batches that each rank takes in the iteration under way: of the epoch, or of its rest after a resume."""
        return self._rounds().n_steps

    def __iter__(self) -> BatchIterator:
        if self._ended:
            self._go_to(self._epoch + 1, 0)
        return BatchIterator(self)

    @property
    def epoch(self) -> int:
        """Number of the epoch that is under way, or comes next."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next.

        The place inside an epoch is kept if it is that very one, so that a training loop may call this before every
        epoch, also after `load_state_dict`. Only where a loop over the rest of that very epoch was left early, load a
        state once more instead: a loader may have read the rest to its end, and then the whole epoch would come.
        """
        epoch = integer(epoch, "epoch", "an integer from 0 on", 0)
        if self._ended or epoch != self._epoch:
            self._go_to(epoch, 0)

    @property
    def batches(self) -> EpochBatches:
        """All batches of the epoch under way, for all ranks."""
        return self._batches_at(self._epoch)

    def batches_of(self, epoch: int) -> EpochBatches:
        """Return all batches of an epoch, for all ranks; how many there are differs between epochs with a budget.

        Raises
        ------
        UsageError
            `drop_last` would leave nothing.
        """
        if self._batches is not None and self._batches.epoch == epoch:
            return self._batches
        batches = self._epochs.batches(epoch)
        if self._epochs.settings.drop_last and len(batches) < self.world_size:
            expected, got = f"a batch for each of {self.world_size} ranks", f"{len(batches)} in epoch {epoch}"
            raise UsageError.at("drop_last", expected=expected, got=got, remedy="make batches smaller")
        return batches

    @property
    def padding(self) -> tuple[int, ...]:
        """Numbers of the batches that the last round takes a second time, so that every rank has one."""
        return self._rounds().padding

    @property
    def dropped(self) -> npt.NDArray[np.int32]:
        """Samples that `drop_last` leaves out of the epoch under way: int32 [sample]."""
        batches = self.batches
        return batches.samples[int(batches.offsets[self._rounds().dropped.start]) :]

    @property
    def efficiency(self) -> float:
        """Tokens in the batches of the epoch under way, as a fraction of their budgets; 1.0 without a budget."""
        return self._epochs.efficiency(len(self.batches))

    @property
    def entropy_bits(self) -> float:
        """log2 of the number of orders that an epoch's samples can have before they are packed."""
        return self._epochs.entropy_bits

    @property
    def entropy_fraction(self) -> float:
        """`entropy_bits` as a fraction of a full shuffle's, log2(n!): 1.0 is fully random, 0.0 a fixed order."""
        return self._epochs.entropy_fraction

    def state_dict(self, n_batches: int | None = None) -> dict[str, Any]:
        """Return where the training is: some JSON values, as few for any number of samples.

        Parameters
        ----------
        n_batches
            Batches that each rank has trained on since the iteration under way began: the i + 1 of
            `enumerate(loader)`. Loaders read ahead of the training, so that the order can't know. With None the state
            is complete only if no batch was taken yet; else `load_state_dict` has to be told, or an iterator's state
            follows, as StatefulDataLoader has it.

        Raises
        ------
        UsageError
            The iteration has fewer batches.
        """
        if n_batches is None and not self._taken:
            n_batches = 0
        return self._state(self._rounds(), self._epoch, n_batches).to_dict()

    def load_state_dict(self, state: Mapping[str, Any], n_batches: int | None = None) -> None:
        """Go on where a training was, with any number of ranks: the next iteration is exactly the rest of its epoch.

        Parameters
        ----------
        state
            What `state_dict` returned, on any rank.
        n_batches
            For a state that does not say it: batches that each rank had trained on.

        Raises
        ------
        UsageError
            It is no state, or that of another dataset, other settings or another seed.
        """
        parsed = self._parse(state)
        if n_batches is not None:
            if parsed.n_batches is not None:
                got = f"one that says {parsed.n_batches}"
                raise UsageError.at("n_batches", expected="a state that does not say it", got=got)
            drop_last = self._epochs.settings.drop_last
            rounds = Rounds(len(self._same_batches(parsed)), parsed.start, parsed.world_size, drop_last)
            parsed = self._state(rounds, parsed.epoch, n_batches)
        self._resume(parsed)

    def _parse(self, document: Mapping[str, Any]) -> OrderState:
        state = parse_state(document)
        refuse_another(state, self.fingerprint, self._settings)
        return state

    def _resume(self, state: OrderState) -> None:
        if state.finished:
            self._go_to(state.epoch + 1, 0)
        else:
            self._go_to(state.epoch, state.consumed)
            self._same_batches(state)

    def _same_batches(self, state: OrderState) -> EpochBatches:
        batches = self._batches_at(state.epoch)
        if batches.digest != state.batches:
            where = f"batches of epoch {state.epoch}"
            raise UsageError.at(where, expected=f"digest {state.batches}", got=batches.digest, remedy=RETRAIN)
        return batches

    def _state(self, rounds: Rounds, epoch: int, n_batches: int | None) -> OrderState:
        if n_batches is not None:
            expected = f"0 to {rounds.n_steps}, the batches of a rank in this iteration"
            n_batches = integer(n_batches, "n_batches", expected, 0)
            if n_batches > rounds.n_steps:
                raise UsageError.at("n_batches", expected=expected, got=str(n_batches))
        return OrderState(
            fingerprint=self.fingerprint,
            settings=self._settings,
            epoch=epoch,
            batches=self._batches_at(epoch).digest,
            start=rounds.start,
            world_size=rounds.world_size,
            n_batches=n_batches,
            finished=n_batches == rounds.n_steps,
        )

    def _rounds(self) -> Rounds:
        return self._rounds_from(self._epoch, self._start)

    def _rounds_from(self, epoch: int, start: int | None) -> Rounds:
        if start is None:
            raise UsageError.at(
                "order state",
                expected="the number of batches that were trained on",
                got="a state that was taken without it while batches were being read",
                remedy="say load_state_dict(state, n_batches=...); and state_dict(n_batches=...) where it is saved",
            )
        return Rounds(len(self._batches_at(epoch)), start, self.world_size, self._epochs.settings.drop_last)

    def _batches_at(self, epoch: int) -> EpochBatches:
        self._batches = self.batches_of(epoch)
        return self._batches

    def _go_to(self, epoch: int, start: int | None) -> None:
        self._epoch, self._start = epoch, start
        self._taken = self._ended = False

    def _note_taken(self, epoch: int, start: int, *, last: bool) -> None:
        if (epoch, start) == (self._epoch, self._start):  # else it is an iterator of an iteration that is over
            self._taken, self._ended = True, last


class BatchIterator:
    """The batches of one rank in one epoch, or in the rest of one; `iter(order)` makes it.

    Parameters
    ----------
    order
        Whose batches.
    """

    def __init__(self, order: BatchOrder) -> None:
        self._order = order
        self._epoch, self._start = order._epoch, order._start
        self._n_taken = 0
        self._finished = False

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        if self._finished:
            raise StopIteration
        order, rounds = self._order, self._rounds()
        number, self._n_taken = self._n_taken, min(self._n_taken + 1, rounds.n_steps)
        self._finished = self._n_taken == rounds.n_steps
        order._note_taken(self._epoch, rounds.start, last=self._finished)
        if number == rounds.n_steps:
            raise StopIteration
        batches = order._batches_at(self._epoch)
        batch = batches[rounds.batch(order.rank, number)]
        return Batch(batch, self._following(batches, rounds, number)) if order._n_tokens_ahead else batch

    def _following(self, batches: EpochBatches, rounds: Rounds, number: int) -> list[list[int]]:
        """Return the batches after one: the next, and more as far as they may be read ahead, by all workers."""
        following: list[list[int]] = []
        left = self._order._n_tokens_ahead
        for later in range(number + 1, min(number + 1 + 2 * MAX_BATCHES, rounds.n_steps)):
            batch = batches[rounds.batch(self._order.rank, later)]
            left -= self._order._epochs.n_tokens_of(batch)
            if left < 0 and following:
                break
            following.append(batch)
        return following

    def state_dict(self) -> dict[str, Any]:
        """Return the place behind the batch taken last."""
        return self._order._state(self._rounds(), self._epoch, self._n_taken).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batch that was taken last when the state was, and let the order go on there.

        Raises
        ------
        UsageError
            As `BatchOrder.load_state_dict`.
        """
        parsed = self._order._parse(state)
        self._order._resume(parsed)
        self._epoch, self._start = parsed.epoch, parsed.consumed
        self._n_taken, self._finished = 0, parsed.finished

    def _rounds(self) -> Rounds:
        return self._order._rounds_from(self._epoch, self._start)


def _check_fingerprint(dataset: HiddenStateDataset, wanted: str | None) -> str:
    if wanted is not None and wanted != dataset.fingerprint:
        remedy = "open the dataset with it as snapshot="
        raise UsageError.at("fingerprint", expected=wanted, got=dataset.fingerprint, remedy=remedy)
    return dataset.fingerprint


def _refuse_live(dataset: HiddenStateDataset, world_size: int) -> None:
    if world_size > 1 and dataset.reader.is_live:
        raise UsageError.at(
            "fingerprint",
            expected=f"the one snapshot that all {world_size} ranks read",
            got='a dataset opened with snapshot="live", which each rank resolves for itself',
            remedy="run `hsfmt seal` and open the sealed one, or give fingerprint= what rank 0 found",
        )
