"""What the operator of a server sets: from the environment, or from a TOML file."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hsfmt.errors import Problem, UsageError

PREFIX = "HSFMT_SGLANG_"
CONFIG = "HSFMT_SGLANG_CONFIG"
MIB, GIB = 1 << 20, 1 << 30
# SGLang's watchdog kills a server whose scheduler stands still for 300 s.
MAX_BLOCK_SECONDS = 60.0
MAX_FLUSH_SECONDS = 240.0
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(|KiB|MiB|GiB|TiB)", re.ASCII)
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """Options of the plugin. Field `queue_nbytes` is HSFMT_SGLANG_QUEUE_NBYTES, or `queue_nbytes` in the TOML file.

    Attributes
    ----------
    out
        Folder or fsspec URL of the dataset.
    capture
        "asked": requests that ask for it (see client.py). "all": every request under its `rid`, health checks excepted.
    final
        Whether the state after the last layer and the final norm is stored after the captured layers.
    queue_nbytes
        Most bytes of states in host memory, between the forward and the dataset writer.
    block_seconds
        How long one forward may wait for room in the queue; then its samples are refused. 0 never waits.
    flush_seconds
        How long a flush may take before it reports that it failed; what it started goes on.
    sample_seconds
        A sample whose next rows do not come for this long is given up.
    part_nbytes, part_seconds, codec, threads, chunk_tokens, writer_queue_nbytes
        As for `DatasetWriter`; `writer_queue_nbytes` is its `queue_nbytes`, and 0 its default.
    retry_seconds
        Longest pause between attempts to go on after the storage failed.
    status_seconds
        A status line is logged this often while samples come in.
    model, model_revision, tokenizer
        Identity in the header; the model is the server's served name unless it is given.
    storage_options
        For fsspec: a JSON object.
    """

    out: str
    capture: str = "asked"
    final: bool = True
    queue_nbytes: int = 8 * GIB
    block_seconds: float = 5.0
    flush_seconds: float = 120.0
    sample_seconds: float = 600.0
    part_nbytes: int = 32 * GIB
    part_seconds: float = 600.0
    codec: str = "zstd"
    threads: int = 0
    chunk_tokens: int = 0
    writer_queue_nbytes: int = 256 * MIB
    retry_seconds: float = 30.0
    status_seconds: float = 60.0
    model: str = ""
    model_revision: str = ""
    tokenizer: str = ""
    storage_options: Mapping[str, Any] = field(default_factory=dict)


def read_options(environment: Mapping[str, str]) -> CaptureOptions:
    """Return the options; the environment beats the file.

    Raises
    ------
    UsageError
        An unknown name or a value that can't be; all problems at once.
    """
    known = {option.name: option for option in fields(CaptureOptions)}
    given: dict[str, tuple[str, Any]] = {}
    if path := environment.get(CONFIG):
        given.update((name, (f"{path}: {name}", value)) for name, value in _read_file(path).items())
    for variable, value in environment.items():
        if variable.startswith(PREFIX) and variable != CONFIG:
            given[variable.removeprefix(PREFIX).lower()] = (variable, value)
    problems, values = [], {}
    for name, (where, value) in given.items():
        if name not in known:
            problems.append(Problem(where, f"one of {', '.join(known)}", "an unknown option"))
            continue
        parse, expected, allowed = _RULES[name]
        try:
            values[name] = parse(value)
            good = allowed(values[name])
        except (TypeError, ValueError, LookupError):
            good = False
        if not good:
            problems.append(Problem(where, expected, repr(value)[:100]))
    if not values.get("out") and not any(where == f"{PREFIX}OUT" for where, *_ in given.values()):
        problems.append(Problem(f"{PREFIX}OUT", "a folder or fsspec URL", "nothing"))
    if problems:
        raise UsageError(problems)
    return CaptureOptions(**values)


def _read_file(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise UsageError.at(f"{CONFIG}: {path}", expected="a TOML file", got=str(error)[:200]) from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _flag(value: Any) -> bool:
    return {"1": True, "true": True, "0": False, "false": False}[str(value).lower()]


def _nbytes(value: Any) -> int:
    match = _SIZE.fullmatch(str(value))
    if match is None:
        raise ValueError
    return int(float(match[1]) * _UNITS[match[2]])


def _seconds(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool | float):
        raise TypeError
    return int(value)


def _object(value: Any) -> Mapping[str, Any]:
    value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise TypeError
    return value


def _positive(value: float) -> bool:
    return 0 < value < float("inf")


def _anything(_: Any) -> bool:
    return True


_Rule = tuple[Callable[[Any], Any], str, Callable[[Any], bool]]
_SIZE_RULE: _Rule = (_nbytes, "a number of bytes such as 8GiB", _positive)
_SECONDS_RULE: _Rule = (_seconds, "seconds above 0", _positive)
_TEXT_RULE: _Rule = (_text, "text", _anything)
_RULES: dict[str, _Rule] = {
    "out": (_text, "a folder or fsspec URL", bool),
    "capture": (_text, "asked or all", ("asked", "all").__contains__),
    "final": (_flag, "1 or 0", _anything),
    "queue_nbytes": _SIZE_RULE,
    "block_seconds": (
        _seconds, f"0 to {MAX_BLOCK_SECONDS:.0f} seconds", lambda seconds: 0 <= seconds <= MAX_BLOCK_SECONDS,
    ),
    "flush_seconds": (
        _seconds, f"seconds above 0, at most {MAX_FLUSH_SECONDS:.0f}", lambda seconds: 0 < seconds <= MAX_FLUSH_SECONDS,
    ),
    "sample_seconds": _SECONDS_RULE,
    "part_nbytes": _SIZE_RULE,
    "part_seconds": _SECONDS_RULE,
    "codec": (_text, "zstd or none", ("zstd", "none").__contains__),
    "threads": (_count, "a number of threads, 0 for one a core", lambda count: count >= 0),
    "chunk_tokens": (_count, "a number of tokens, 0 for the preferred one", lambda count: count >= 0),
    "writer_queue_nbytes": _SIZE_RULE,
    "retry_seconds": _SECONDS_RULE,
    "status_seconds": _SECONDS_RULE,
    "model": _TEXT_RULE,
    "model_revision": _TEXT_RULE,
    "tokenizer": _TEXT_RULE,
    "storage_options": (_object, "a JSON object", _anything),
}  # fmt: skip
