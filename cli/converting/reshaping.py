"""What a conversion may change about a sample when it is asked to: padding, length, dtype. Each change is recorded.

Token ids and loss masks are cut, never changed; states change their values by `--cast` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from hsfmt.errors import SourceError, UsageError
from hsfmt.readers.sources import SourceItem, SourceSample

CAST_DTYPES = ("bfloat16", "float16", "float32")
ATTENTION_MASK = "attention_mask"
# What the conversion itself records of a sample, in its metadata.
RECORD = "conversion"
_BLOCK_ROWS = 256
# One pad id may be the text's own last token; two in a row without a loss are taken for padding.
_MIN_RUN = 2


class TooFewLossTokensError(SourceError):
    """The sample has fewer supervised tokens than `--min-loss-tokens`: a hole under any policy."""


@dataclass(frozen=True, slots=True)
class Reshaping:
    """What the user asked to change.

    Attributes
    ----------
    trim_padding
        Leave out padding at the end of samples.
    pad_id
        The token id of padding, where the source has no attention mask.
    min_loss_tokens
        Fewest supervised tokens of a sample; 0 for any number.
    split_long
        Most tokens of a sample: longer ones are cut into windows of so many; None for any number.
    cast
        Name of the dtype that states are changed to, or None.
    """

    trim_padding: bool = False
    pad_id: int = 0
    min_loss_tokens: int = 0
    split_long: int | None = None
    cast: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what decides how a file's samples look, for the producer; None for what was not asked for."""
        return {
            "cast": self.cast,
            "pad_id": self.pad_id if self.trim_padding else None,
            "split_long": self.split_long,
            "trim_padding": self.trim_padding or None,
        }


RESHAPING_OPTIONS = tuple(option.name for option in fields(Reshaping))


@dataclass(frozen=True, slots=True)
class Piece:
    """A sample as it is to be written: a whole one of the source, or a window of it.

    Attributes
    ----------
    sample
        Arrays and id; its metadata are those of the source.
    metadata
        What is stored.
    window
        Number of the window, None for a whole sample.
    trimmed
        Tokens that were left out at the end, counted with the first window.
    """

    sample: SourceSample
    metadata: Mapping[str, Any]
    window: int | None = None
    trimmed: int = 0


def pieces(item: SourceItem, sample: SourceSample, asked: Reshaping) -> Iterator[Piece]:
    """Yield what is to be written of a source's sample, in order. Only one window is copied at a time.

    Raises
    ------
    TooFewLossTokensError
        It has fewer supervised tokens than asked for.
    SourceError
        A value does not fit the dtype that states are cast to.
    """
    _check_loss_tokens(item, sample, asked.min_loss_tokens)
    record: dict[str, Any] = {}
    n_tokens = len(sample.input_ids)
    kept, evidence = real_tokens(sample, asked.pad_id) if asked.trim_padding else (n_tokens, "")
    if kept < n_tokens:
        record["trimmed"] = {"by": evidence, "tokens": n_tokens - kept}
    if asked.cast is not None and sample.hidden_states.dtype.name != asked.cast:
        record["cast_from"] = sample.hidden_states.dtype.name
    step = asked.split_long or kept
    whole = step >= kept
    n_windows = max(1, -(-kept // step))
    for number, start in enumerate(range(0, kept, step)):
        stop = min(start + step, kept)
        key = item.sample_id if whole else window_id(item.sample_id, number, n_windows)
        part = sample if whole and stop == n_tokens else _window(sample, start, stop)
        part = replace(part, sample_id=key, hidden_states=_cast(part.hidden_states, asked.cast, item.key))
        if not whole:
            place = {"offset": start, "tokens": kept, "window": number, "windows": n_windows}
            record = {**record, "split": place}
        yield Piece(
            part, _metadata(item, sample, record), None if whole else number, n_tokens - kept if not number else 0
        )


def window_id(sample_id: str, number: int, n_windows: int) -> str:
    """Return the id of a window of a sample that was split: all of one length, so that they sort by number."""
    return f"{sample_id}#{number:0{len(str(n_windows - 1))}}"


def window_of(sample_id: str) -> tuple[str, int] | None:
    """Return (id of the whole, number) of an id that may be a window's, else None."""
    whole, hash_sign, number = sample_id.rpartition("#")
    return (whole, int(number)) if hash_sign and number.isascii() and number.isdigit() and len(number) < 10 else None


def split_of(metadata: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return (number, number of windows) that a committed sample's metadata records, None for a whole sample."""
    record = metadata.get(RECORD)
    split = record.get("split") if isinstance(record, Mapping) else None
    if not isinstance(split, Mapping):
        return None
    number, n_windows = split.get("window"), split.get("windows")
    return (number, n_windows) if isinstance(number, int) and isinstance(n_windows, int) else None


def real_tokens(sample: SourceSample, pad_id: int) -> tuple[int, str]:
    """Return (tokens before the padding at the end, what shows that it is padding).

    An attention mask is exact. Without one, a run of at least two `pad_id` at the end, none of them supervised, is
    padding. No supervised token is ever counted as padding, nor all tokens of a sample; without a loss mask and an
    attention mask there is no evidence, and nothing is.
    """
    n_tokens, mask = len(sample.input_ids), sample.loss_mask
    attention = sample.extras.get(ATTENTION_MASK)
    supervised = np.flatnonzero(mask) if mask is not None else np.empty(0, np.int64)
    last_supervised = int(supervised[-1]) + 1 if len(supervised) else 0
    if attention is not None and attention.shape == (n_tokens,):
        attended = np.flatnonzero(attention)
        kept = max(int(attended[-1]) + 1 if len(attended) else 0, last_supervised)
        return (kept, ATTENTION_MASK) if kept else (n_tokens, "")
    if mask is None:
        return n_tokens, ""
    others = np.flatnonzero(sample.input_ids != pad_id)
    kept = max(int(others[-1]) + 1 if len(others) else 0, last_supervised)
    if not kept or n_tokens - kept < _MIN_RUN:
        return n_tokens, ""
    return kept, f"pad_id {pad_id}"


def _check_loss_tokens(item: SourceItem, sample: SourceSample, least: int) -> None:
    mask = sample.loss_mask
    found = len(sample.input_ids) if mask is None else int(np.count_nonzero(mask))
    if found < least:
        raise TooFewLossTokensError.at(
            item.key, expected=f"at least {least} supervised tokens (--min-loss-tokens)", got=str(found)
        )


def _window(sample: SourceSample, start: int, stop: int) -> SourceSample:
    mask = sample.loss_mask
    return replace(
        sample,
        input_ids=sample.input_ids[start:stop],
        hidden_states=sample.hidden_states[start:stop],
        loss_mask=None if mask is None else mask[start:stop],
        extras={
            name: value if name in sample.whole_extras else value[start:stop] for name, value in sample.extras.items()
        },
    )


def _metadata(item: SourceItem, sample: SourceSample, record: Mapping[str, Any]) -> dict[str, Any]:
    ours = {"source": item.key, **({RECORD: dict(record)} if record else {})}
    if {"source", RECORD} & sample.metadata.keys():
        return {**ours, "columns": sample.metadata}
    return {**ours, **sample.metadata}


def _cast(states: npt.NDArray[Any], name: str | None, where: str) -> npt.NDArray[Any]:
    """Return the states as another dtype, rounded to nearest even; block by block, so that no second copy is made.

    Raises
    ------
    SourceError
        A finite value becomes infinite.
    """
    if name is None or states.dtype.name == name:
        return states
    if states.dtype.name not in CAST_DTYPES:
        raise SourceError.at(where, expected=f"states of {', '.join(CAST_DTYPES)} to cast", got=states.dtype.name)
    out = np.empty(states.shape, _native(name))
    for start in range(0, len(states), _BLOCK_ROWS):
        block = states[start : start + _BLOCK_ROWS].astype(np.float32)
        with np.errstate(over="ignore"):
            cast = block.astype(out.dtype)
        lost = np.isfinite(block) & ~np.isfinite(cast.astype(np.float32))
        if lost.any():
            token = start + int(np.argwhere(lost)[0][0])
            largest = float(np.abs(block[lost]).max())
            raise SourceError.at(
                where,
                expected=f"values that {name} can hold (--cast)",
                got=f"{largest:g} in token {token}, which would become infinite",
                remedy="cast to bfloat16 or float32" if name == "float16" else "cast to float32",
            )
        out[start : start + _BLOCK_ROWS] = cast
    return out


def _native(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def check_split(split_long: int | None, extras: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse to cut samples that have columns of which nobody knows which rows go with which tokens.

    Raises
    ------
    UsageError
        There are ragged ones; their names.
    """
    ragged = [name for name, column in extras.items() if column.get("kind") == "ragged"]
    if split_long is not None and ragged:
        remedy = " ".join(f"--map ignore={name}" for name in ragged)
        raise UsageError.at(
            "--split-long",
            expected="columns with a row a token, or a row a sample, which each window gets",
            got=f"{', '.join(ragged)}: any number of rows a sample",
            remedy=f"leave them out: {remedy}; or leave --split-long out",
        )


def check_cast(name: str | None, dtype: str) -> None:
    """Refuse to cast states that mean nothing without their scales.

    Raises
    ------
    UsageError
        They are of a scaled dtype.
    """
    if name is not None and dtype not in CAST_DTYPES:
        remedy = "leave --cast out: float8 states are stored as they are, with their scales"
        raise UsageError.at("--cast", expected=f"states of {', '.join(CAST_DTYPES)}", got=dtype, remedy=remedy)
