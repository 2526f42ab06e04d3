"""The file that vLLM's hidden-states connectors write: `hidden_states`, `token_ids`, for fp8 `hidden_states_scales`."""

from __future__ import annotations

import fcntl
from typing import TYPE_CHECKING, Any

import numpy as np

from hsfmt.errors import SourceError
from hsfmt.readers.sources import columns
from hsfmt.readers.sources.base import SourceSample
from hsfmt.readers.sources.meaning import FP8_SCALING, SourceMeaning
from hsfmt.readers.sources.safetensors_file import TensorEntry, read_header, read_tensor

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

KEYS = frozenset({"hidden_states", "token_ids"})
FP8_KEYS = KEYS | {"hidden_states_scales"}
LOCK_SUFFIX = ".lock"
_STATE_DTYPES = ("bfloat16", "float16", "float32")


def connector_entries(path: Path, where: str) -> dict[str, TensorEntry]:
    """Check the file's header, key set, ranks and lengths.

    Raises
    ------
    SourceError
        It is not such a file, or damaged, or token ids and states differ in length.
    OSError
        The file can't be read.
    """
    return _checked_header(path, where)[0]


def _checked_header(path: Path, where: str) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    entries, strings = read_header(path, where)
    if set(entries) not in (KEYS, FP8_KEYS):
        raise SourceError.at(
            where, expected=f"the tensors {_names(KEYS)} (for fp8 {_names(FP8_KEYS)})", got=_names(entries) or "none"
        )
    states, ids = entries["hidden_states"], entries["token_ids"]
    fp8 = "hidden_states_scales" in entries
    if states.dtype.name not in (("float8_e4m3fn",) if fp8 else _STATE_DTYPES):
        wanted = "float8_e4m3fn beside its scales" if fp8 else ", ".join(_STATE_DTYPES)
        raise SourceError.at(f"{where}[hidden_states]", expected=wanted, got=states.dtype.name)
    if len(states.shape) != 3 or 0 in states.shape[1:]:
        raise SourceError.at(
            f"{where}[hidden_states]", expected="shape [token, layer, hidden]", got=f"shape {list(states.shape)}"
        )
    if len(ids.shape) != 1:
        raise SourceError.at(f"{where}[token_ids]", expected="shape [token]", got=f"shape {list(ids.shape)}")
    layer_first = states.shape[1] == ids.shape[0]
    remedy = "vLLM writes [token, layer, hidden], this looks like [layer, token, hidden]: who wrote it?"
    columns.check_n_tokens(states.shape[0], ids.shape[0], where, remedy if layer_first else columns.CACHED_TOKENS)
    if fp8:
        _check_scales(entries["hidden_states_scales"], states.shape[0], where)
    return entries, strings


def _check_scales(scales: TensorEntry, n_tokens: int, where: str) -> None:
    if scales.dtype.name != "float32" or scales.shape not in ((n_tokens, 1, 1), (n_tokens, 1), (n_tokens,)):
        raise SourceError.at(
            f"{where}[hidden_states_scales]",
            expected=f"float32, shape [{n_tokens}, 1, 1]: a scale for each token",
            got=f"{scales.dtype.name}, shape {list(scales.shape)}",
        )


def _names(names: Any) -> str:
    return ", ".join(sorted(names))


def look(path: Path, where: str, *, layers_from: str, producer: dict[str, Any]) -> SourceMeaning:
    """What a connector file fixes: widths, dtype, and that its final state is taken before the final norm."""
    entries = connector_entries(path, where)
    states = entries["hidden_states"]
    return SourceMeaning(
        hidden_size=states.shape[2],
        n_layers=states.shape[1],
        dtype=states.dtype.name,
        layers=None,
        layers_from=layers_from,
        final_norm="pre",
        final_norm_from="vLLM's connector takes the states before the final norm",
        scaling=dict(FP8_SCALING) if "hidden_states_scales" in entries else None,
        producer=producer,
    )


def load(path: Path, where: str, sample_id: str, ignore: tuple[str, ...] = ()) -> SourceSample:
    """Read a connector file; the strings of its `__metadata__`, but for those to ignore, become the sample's metadata.

    Raises
    ------
    SourceError
        As `connector_entries`.
    OSError
        The file can't be read.
    """
    entries, strings = _checked_header(path, where)
    extras: dict[str, NDArray[Any]] = {}
    if "hidden_states_scales" in entries:
        scales = read_tensor(path, entries["hidden_states_scales"], where)
        extras["hidden_states_scale"] = scales.reshape(-1)
    return SourceSample(
        sample_id,
        input_ids=columns.token_ids(read_tensor(path, entries["token_ids"], where), f"{where}[token_ids]"),
        hidden_states=read_tensor(path, entries["hidden_states"], where),
        metadata={name: text for name, text in strings.items() if name not in ignore},
        extras=extras,
    )


def add_metadata(sample: SourceSample, known: dict[str, Any]) -> None:
    """Add what is known of a sample; a string of the file that says something else goes under `__metadata__`."""
    other = {name: text for name, text in sample.metadata.items() if name in known and known[name] != text}
    sample.metadata |= known
    if other:
        sample.metadata["__metadata__"] = other


def check_same_ids(found: NDArray[np.int64], known: NDArray[np.int64], where: str, known_from: str) -> None:
    """Refuse states whose own token ids are not those that another document gives for this sample.

    Raises
    ------
    SourceError
        They differ, in length or in a token.
    """
    if len(found) != len(known):
        got = f"{len(found)} tokens"
    elif (found != known).any():
        first = int((found != known).argmax())
        got = f"{found[first]} instead of {known[first]} at token {first}"
    else:
        return
    raise SourceError.at(
        f"{where}[token_ids]",
        expected=f"the {len(known)} token ids of {known_from}",
        got=got,
        remedy="the states are of other text (stale files beside newer ones?): extract this sample again",
    )


def check_not_being_written(lock: Path, where: str) -> None:
    """Refuse a file whose `.lock` a live vLLM holds: it is written in place, so what is there may be a part of it.

    Raises
    ------
    SourceError
        The lock is held.
    """
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise SourceError.at(
            where, expected="a finished file", got="one that vLLM still holds locked", remedy="convert when it is done"
        ) from error
    except OSError:
        # No lock file any more, or a file system without locks: then nobody holds one.
        return
