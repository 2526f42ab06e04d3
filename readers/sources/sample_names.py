"""Which files are samples by their names, which only look like some, and what is said of those that are left aside."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from hsfmt.readers.sources.sample_list import SAMPLE_LIST

if TYPE_CHECKING:
    from hsfmt.readers.sources.base import Stray

TORCH_SUFFIXES = (".pt", ".ckpt", ".pth")
SIDE_FILES = {"token_freq.pt": "token_freq", "vocab_mapping.pt": "vocab_mapping", "d2t.pt": "d2t", "t2d.pt": "t2d"}
HIDDEN = "hidden files are not read"
_TWIN = "the compressed twin of a file that is there too"
_TRAINING = "the state of a training run"
_CHECKPOINT = re.compile(r"(optimizer|scheduler|trainer_state|training_state|rng_state.*|scaler)\.(pt|pth|ckpt)")
_UNPACK = {".gz": "gunzip", ".zst": "unzstd", ".xz": "unxz", ".bz2": "bunzip2", ".lz4": "unlz4", ".zip": "unzip"}
_ENDINGS = r"\.(?:gz|zst|xz|bz2|lz4|zip|tmp|temp|part|partial|incomplete|crdownload|bak|old|orig|[0-9]+)|~"
_LOOKS_LIKE = re.compile(rf"(.+\.(?:pt|ckpt|pth|safetensors))({_ENDINGS})?", re.IGNORECASE | re.DOTALL)
_SHOWN = 5


def is_torch_name(name: str) -> bool:
    """Whether a file is read as a sample by its name; one that gzip packed has `.gz` after it."""
    name = name.removesuffix(".gz")
    return name.endswith(TORCH_SUFFIXES) and name not in SIDE_FILES and _CHECKPOINT.fullmatch(name) is None


def stray_reason(path: str, otherwise: str, samples: Collection[str] = ()) -> str:
    """Say why a file is no sample, and what to do where it may be one.

    Parameters
    ----------
    path
        The file.
    otherwise
        What to say where its name does not tell.
    samples
        Paths of the files that are samples.
    """
    name = path.rpartition("/")[2]
    if _CHECKPOINT.fullmatch(name):
        return _TRAINING
    if name == SAMPLE_LIST:
        return "the ids of an export: convert its folder by itself, as the format that it was exported to, to keep them"
    match = _LOOKS_LIKE.fullmatch(name)
    if match is None:
        return otherwise
    base, ending = match[1], (match[2] or "").lower()
    if ending in _UNPACK:
        twin = path[: len(path) - len(ending)] in samples
        return _TWIN if twin else f"compressed: unpack it first ({_UNPACK[ending]})"
    if ending:
        return f"by its name a copy or an unfinished write: rename it to {_lower(base)} if it is a whole sample"
    if base != _lower(base):
        return f"extensions are read in lower case only: rename it to {_lower(base)}"
    return otherwise


def note_left_aside(strays: Iterable[Stray]) -> list[str]:
    """Name the files that may be samples, by their names, and are not read: none or one line."""
    left = [stray.path for stray in strays if _may_be_sample(stray)]
    if not left:
        return []
    files = "1 file looks like a sample but is" if len(left) == 1 else f"{len(left)} files look like samples but are"
    shown = ", ".join(left[:_SHOWN]) + (" …" if len(left) > _SHOWN else "")
    return [f"{files} not read: {shown} (the reasons are listed under files not read)"]


def _may_be_sample(stray: Stray) -> bool:
    name = stray.path.rpartition("/")[2]
    # macOS leaves a ._NAME beside every NAME that it copies.
    known = name.startswith("._") or name in SIDE_FILES or stray.reason in (_TWIN, _TRAINING)
    return not known and _CHECKPOINT.fullmatch(name) is None and _LOOKS_LIKE.fullmatch(name) is not None


def _lower(name: str) -> str:
    base, _, extension = name.rpartition(".")
    return f"{base}.{extension.lower()}"
