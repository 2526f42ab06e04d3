"""Reading a folder of another program as convert would, and keeping what was found instead of the samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hsfmt.cli.converting.reshaping import real_tokens
from hsfmt.cli.converting.slices import BAD_FILE
from hsfmt.cli.estimate import implied_header
from hsfmt.errors import HsfmtError, Problem, SourceError, StorageError
from hsfmt.readers.sources import AbsentSampleError, Source, SourceItem, SourceMeaning, SourceSample
from hsfmt.readers.sources.vocabulary import read_vocabulary
from hsfmt.writers.extras import check_scale, extra_values, parse_extras, with_scale
from hsfmt.writers.samples import make_sample, scan

# What is read unless all of it is to be: so many items, and no more bytes than these once there are a few.
SAMPLE_ITEMS, SAMPLE_NBYTES, LEAST_ITEMS = 48, 2 << 30, 4


@dataclass(slots=True)
class Examination:
    """What reading some items of a source showed.

    Attributes
    ----------
    read
        Numbers of the items that were read, or that listing the folder already refused.
    problems
        Item number to what is wrong with it.
    nonfinite
        Item number to its NaN and Inf values.
    absent
        Numbers of items that are not there, which their format allows.
    lengths, supervised
        Item number to tokens, and to those with a loss.
    masks, all_zero, all_one
        Items with a loss mask, those where it is 0, and 1, throughout.
    padded
        Item number to (tokens of padding at its end, what shows it).
    contents
        Content digest to the numbers of the items that have it.
    own_nbytes, own_tokens
        Of the items that have files of their own.
    attachments
        Names of what belongs to the dataset as a whole.
    attachment_problems
        What is wrong with it.
    storage_failed
        A file could not be read for reasons that are not in its data.
    """

    read: list[int] = field(default_factory=list)
    problems: dict[int, tuple[Problem, ...]] = field(default_factory=dict)
    nonfinite: dict[int, int] = field(default_factory=dict)
    absent: list[int] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    supervised: dict[int, int] = field(default_factory=dict)
    masks: int = 0
    all_zero: int = 0
    all_one: int = 0
    padded: dict[int, tuple[int, str]] = field(default_factory=dict)
    contents: dict[bytes, list[int]] = field(default_factory=dict)
    own_nbytes: int = 0
    own_tokens: int = 0
    attachments: list[str] = field(default_factory=list)
    attachment_problems: tuple[Problem, ...] = ()
    storage_failed: bool = False

    @property
    def is_damaged(self) -> bool:
        """Whether convert would refuse a file for its data."""
        return bool(self.problems or self.nonfinite or self.attachment_problems)

    def duplicates(self) -> list[list[int]]:
        """Return the numbers of items that have one content: lists of at least two."""
        return [numbers for numbers in self.contents.values() if len(numbers) > 1]

    def take_attachments(self, source: Source) -> list[str]:
        """Take down what belongs to the dataset as a whole; return what the user should know of it."""
        try:
            arrays, notes = read_vocabulary(source)
        except (SourceError, StorageError) as error:
            self.attachment_problems = error.problems
            return []
        self.attachments = sorted(arrays)
        return notes

    def refuse(self, number: int, error: HsfmtError) -> None:
        """Take down why an item can't be taken."""
        if isinstance(error, AbsentSampleError):
            self.absent.append(number)
        else:
            self.problems[number] = error.problems

    def take(self, number: int, item: SourceItem, sample: SourceSample, pad_id: int) -> None:
        """Take down what a sample is like."""
        n_tokens, mask = len(sample.input_ids), sample.loss_mask
        self.lengths[number] = n_tokens
        if mask is not None:
            n = self.supervised[number] = int(np.count_nonzero(mask))
            self.masks += 1
            self.all_zero += n == 0
            self.all_one += n == n_tokens
        kept, evidence = real_tokens(sample, pad_id)
        if kept < n_tokens:
            self.padded[number] = n_tokens - kept, evidence
        if item.paths and not item.shared:
            self.own_nbytes += item.nbytes
            self.own_tokens += n_tokens


def examine(
    source: Source, meaning: SourceMeaning, numbers: Sequence[int], pad_id: int, advance: Callable[[int], None]
) -> Examination:
    """Read items, each checked as a conversion would; one sample is in memory at a time.

    Parameters
    ----------
    source, meaning
        The folder, and what its data means as far as that is known.
    numbers
        Which items to read. What listing the folder showed is taken down for all.
    pad_id
        Token id of padding, where there is no attention mask.
    advance
        Told the bytes of each item that was read.

    Raises
    ------
    UsageError
        An item shows that the source was understood wrongly.
    """
    found, header = Examination(), implied_header(meaning)
    declared = with_scale(parse_extras(meaning.extras), header)
    chosen = set(numbers)
    for number, item in enumerate(source.items):
        if item.problem is None and number not in chosen:
            continue
        found.read.append(number)
        try:
            sample = source.load(item)
            found.take(number, item, sample, pad_id)
            checked = make_sample(header, sample.sample_id, sample.input_ids, sample.hidden_states, sample.loss_mask)
            values = extra_values(declared, sample.extras, checked.n_tokens, f"sample {sample.sample_id!r}")
            content, bad = scan(checked, header, count_nonfinite=True)
            bad += check_scale(header, values, sample.sample_id, count_nonfinite=True)
        except BAD_FILE as error:
            found.refuse(number, error)
        except StorageError as error:
            found.storage_failed = True
            found.problems[number] = error.problems
        else:
            found.contents.setdefault(content, []).append(number)
            if bad:
                found.nonfinite[number] = bad
        advance(item.nbytes)
    return found


def spread(items: Sequence[SourceItem]) -> list[int]:
    """Return the numbers of some items, spread evenly from the first to the last."""
    good = [number for number, item in enumerate(items) if item.problem is None]
    n = min(SAMPLE_ITEMS, len(good))
    if not n:
        return []
    total = sum(items[number].nbytes for number in good)
    if total * n > SAMPLE_NBYTES * len(good):
        n = min(n, max(LEAST_ITEMS, SAMPLE_NBYTES * len(good) // total))
    places: Any = np.unique(np.linspace(0, len(good) - 1, n).round().astype(int))
    return [good[place] for place in places]
