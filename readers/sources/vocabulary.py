"""Files that a drafter's vocabulary is kept in beside the samples: they go with the dataset as a whole.

* d2t [draft vocabulary] and t2d [target vocabulary]: `d2t.npy`, `t2d-{V}.npy` or `d2t.pt` with one array, or the dict
  of both in a `vocab_mapping.pt`, or in the files of a folder `vocab_mapping`.
* `token_freq.pt`: a dict of token id to the number of its supervised occurrences, which becomes an array [token id].

They are named as the files are: d2t, t2d-64, token_freq; from a file of another name in `vocab_mapping` d2t-NAME.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from hsfmt.attachments import MAX_NBYTES, parse_array
from hsfmt.errors import CorruptionError, SourceError, StorageError
from hsfmt.readers.sources.sample_names import TORCH_SUFFIXES

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from hsfmt.readers.sources.base import Source

_FOLDER = "vocab_mapping"
_ROLES = ("d2t", "t2d", "token_freq", _FOLDER)
_KINDS = {"d2t": "iu", "t2d": "biu"}
# No tokenizer has so many: an array of them all is made of the dict.
_MOST_TOKENS = 1 << 24
_SUFFIX = re.compile(r"[a-z0-9_.-]{1,50}")
_REMEDY = "mend the file, or move it away to convert without it"


def read_vocabulary(source: Source) -> tuple[dict[str, NDArray[Any]], list[str]]:
    """Return the arrays by the name that they get in a dataset, and what the user should know of them.

    Raises
    ------
    SourceError
        A file is damaged or holds something else, or two of them have other values under one name.
    StorageError
        A file can't be read.
    """
    found: dict[str, NDArray[Any]] = {}
    of: dict[str, str] = {}
    left: list[str] = []
    for path, role in [(file.path, file.role) for file in source.support if file.role in _ROLES]:
        is_torch = path.endswith(TORCH_SUFFIXES)
        if role == _FOLDER and not is_torch:
            continue
        if is_torch and find_spec("torch") is None:
            left.append(path)
            continue
        try:
            arrays = _read(source.root / path, path, role)
        except OSError as error:
            raise StorageError.at(path, expected="a readable file", got=str(error)) from error
        for name, array in arrays.items():
            other = found.setdefault(name, array)
            if other.dtype != array.dtype or not np.array_equal(other, array):
                expected = f"the {name} of {of[name]}: a dataset has one"
                raise SourceError.at(path, expected=expected, got="another one", remedy="move one of them away")
            of.setdefault(name, path)
    names = ", ".join(left)
    return found, [f"not kept: {names}. Reading it needs torch: pip install 'hsfmt[convert]'"] if left else []


def _read(path: Path, where: str, role: str) -> dict[str, NDArray[Any]]:
    base = where.rpartition("/")[2].rpartition(".")[0]
    if where.endswith(".npy"):
        with path.open("rb") as file:
            data = file.read(MAX_NBYTES + 1)
        try:
            return {base: _table(parse_array(data, where), base.partition("-")[0], where)}
        except CorruptionError as error:
            problem = error.problems[0]
            raise SourceError.at(where, expected=problem.expected, got=problem.got, remedy=_REMEDY) from error
    from hsfmt.readers.sources.torch_file import read_torch_file
    from hsfmt.readers.sources.torch_states import row_values

    loaded = read_torch_file(path, where)
    if role == "token_freq":
        return {role: _counts(loaded.value, where)}
    if role in _KINDS:
        return {base: _table(row_values(loaded.value, where, loaded.nbytes), role, where)}
    if not isinstance(loaded.value, dict) or set(loaded.value) != set(_KINDS):
        got = f"the keys {sorted(map(str, loaded.value))}" if isinstance(loaded.value, dict) else "something else"
        raise SourceError.at(where, expected="a dict of d2t and t2d", got=got[:200], remedy=_REMEDY)
    if base != _FOLDER and not _SUFFIX.fullmatch(base.lower()):
        expected = "a name of a-z, 0-9, '_', '.' and '-', of at most 50 characters"
        raise SourceError.at(where, expected=expected, got=base[:100], remedy="rename the file")
    suffix = "" if base == _FOLDER else f"-{base.lower()}"
    values = {key: row_values(loaded.value[key], f"{where}[{key}]", loaded.nbytes) for key in _KINDS}
    return {f"{key}{suffix}": _table(array, key, f"{where}[{key}]") for key, array in values.items()}


def _table(array: NDArray[Any], role: str, where: str) -> NDArray[Any]:
    if array.ndim != 1 or not array.size or array.dtype.kind not in _KINDS[role]:
        got = f"{array.dtype.name} of shape {list(array.shape)}"
        raise SourceError.at(where, expected="whole numbers, shape [vocabulary]", got=got, remedy=_REMEDY)
    return np.array(array)


def _counts(value: Any, where: str) -> NDArray[np.int64]:
    """Return an array [token id] of the counts in a dict."""
    ok = isinstance(value, dict) and bool(value)
    for token, count in value.items() if ok else ():
        ok = ok and type(token) is int and 0 <= token < _MOST_TOKENS and type(count) is int and 0 <= count < 1 << 63
    if not ok:
        expected = f"a dict of token ids below {_MOST_TOKENS} to their counts"
        raise SourceError.at(where, expected=expected, got="something else", remedy=_REMEDY)
    counts = np.zeros(max(value) + 1, np.int64)
    counts[list(value)] = list(value.values())
    return counts
