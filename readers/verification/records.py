"""What earlier runs found to be fine, so that a later one need not read it again.

A record lies in a file of this machine, never in the dataset: a dataset may be read-only, and a record that travels
with a copy would vouch for bytes that nobody read. Nothing in it can make damage look clean for longer than the caller
allows: it counts only for the same dataset, part, manifest digest, file digests, size and (locally) times of change.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash

from hsfmt.errors import HsfmtError
from hsfmt.readers.verification.report import REMEDIES, Finding, Findings
from hsfmt.readers.verification.selection import Unit
from hsfmt.storage import Store

_FORMAT = "hsfmt-verified-1"
_MAX_NBYTES = 1 << 30
_RANKS = {"complete": 0, "full": 1}
_MAX_FINDINGS = 100
_NEVER = 1 << 40  # seconds since the epoch: no record is that young
# Two changes within a tick of the storage's clock leave the same time of change. Kernels tick every 1 to 10 ms; file
# systems and object stores that keep whole seconds every 1 or 2 s.
_TICK_SECONDS, _COARSE_TICK_SECONDS = 0.1, 2.0
_SKEW_SECONDS = 3600.0


def default_state(url: str) -> Path:
    """Return the file that keeps the records of the dataset at `url` unless another is named."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (
        (Path(cache) if cache else Path("~/.cache").expanduser())
        / "hsfmt"
        / "verified"
        / f"{xxhash.xxh3_128_hexdigest(url.encode())}.json"
    )


class Records:
    """The records of one dataset.

    Parameters
    ----------
    file
        Where they are kept.
    store
        The dataset.
    findings
        Told, as an info, of a file that can't be used; it is then as if there were none.
    key
        What the run was asked for; a pass that was interrupted goes on only under the same one.
    """

    def __init__(self, file: Path, store: Store, findings: Findings, key: str) -> None:
        self._file = file
        self._store = store
        self._findings = findings
        self._records: dict[str, dict[str, Any]] = {}
        self._pass = secrets.token_hex(8)
        self._seed: int | None = None
        self._key = key
        self._unwritable = False
        problem = self._load()
        if problem:
            self._tell("records of this dataset by an earlier verification", problem)

    def _tell(self, expected: str, got: str) -> None:
        self._findings.add("info", "records", "verified records", expected=expected, got=got)

    def _load(self) -> str:
        try:
            if self._file.stat().st_size > _MAX_NBYTES:
                return "a file too large to be one; ignored"
            document = json.loads(self._file.read_bytes())
        except FileNotFoundError:
            return ""
        except (OSError, ValueError, RecursionError) as error:
            return f"{type(error).__name__}; ignored"
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            return "another document; ignored"
        body = document.get("body")
        if document.get("digest") != _digest(body) or not isinstance(body, dict):
            return "a document that does not have its digest; ignored"
        if body.get("url") != self._store.url:
            return "records of another dataset; ignored"
        records = body.get("records")
        if isinstance(records, dict) and all(isinstance(record, dict) for record in records.values()):
            self._records = records
        if body.get("key") == self._key and isinstance(body.get("pass"), str):
            self._pass = body["pass"]
            seed = body.get("seed")
            self._seed = seed if type(seed) is int and 0 <= seed < 1 << 64 else None
        return ""

    def seed_of_pass(self, drawn: int) -> int:
        """Return the seed of the pass that was interrupted, or `drawn` for a new one."""
        self._seed = drawn if self._seed is None else self._seed
        return self._seed

    def binding(self, unit: Unit, manifest_digest: str) -> dict[str, Any]:
        """Return what a record of this unit is bound to, as it is now; taken before the unit is read."""
        return {
            "digest": unit.digest,
            "manifest": manifest_digest,
            "name": unit.name,
            "nbytes": unit.nbytes,
            "part": unit.part,
            "paths": list(unit.paths),
            "stat": _stat(self._store, unit.paths),
        }

    def settle(self, bindings: Iterable[dict[str, Any]]) -> None:
        """Wait until any change to come has another time than those in `bindings`; called before their units are read.

        What was changed a moment ago could else be read, changed again within the same tick, and be taken for what was
        read. Whether it was a moment ago is not left to the storage's clock, which may be some minutes off.
        """
        times = [at for binding in bindings for at in map(_changed, binding["stat"]) if at is not None]
        now = time.time()
        if any(abs(now - at) < _SKEW_SECONDS for at in times):
            time.sleep(_COARSE_TICK_SECONDS if all(at == int(at) for at in times) else _TICK_SECONDS)

    def holds(self, unit: Unit, binding: dict[str, Any], level: str, now: float, max_age: float | None) -> str:
        """Return why the unit need not be read ("" if it must be).

        Parameters
        ----------
        unit, binding
            The unit, and `binding` of it.
        level
            Tier now asked for.
        now
            Seconds since the epoch; a record of the future is not believed.
        max_age
            In seconds; None: only what the interrupted pass has read counts.
        """
        record = self._records.get(unit.name)
        if (
            record is None
            or record.get("binding") != binding
            or _RANKS.get(str(record.get("level")), -1) < _RANKS[level]
        ):
            return ""
        at = _time(record)
        if not 0 <= at <= now:
            return ""
        if max_age is not None:
            return "verified within max-age" if now - at <= max_age else ""
        return "read earlier in this pass" if record.get("pass") == self._pass else ""

    def turn(self, unit: Unit, binding: dict[str, Any]) -> tuple[int, float]:
        """Return what sorts the units: never read as they are now, then the longest ago, what is not fine last."""
        record = self._records.get(unit.name)
        if record is None or record.get("binding") != binding:
            return 0, 0.0
        return (1 if str(record.get("level")) in _RANKS else 2), _time(record)

    def in_pass(self, unit: Unit, binding: dict[str, Any]) -> bool:
        """Say whether this pass has read the unit, whatever it found."""
        record = self._records.get(unit.name)
        return record is not None and record.get("binding") == binding and record.get("pass") == self._pass

    def damage(self, unit: Unit, binding: dict[str, Any]) -> list[Finding]:
        """Return what was found wrong with the unit when it was read last, if it has not changed since."""
        record = self._records.get(unit.name)
        if record is None or record.get("binding") != binding:
            return []
        items = record.get("findings")
        return [found for item in (items if isinstance(items, list) else []) if (found := _finding(item)) is not None]

    def add(self, unit: Unit, binding: dict[str, Any], level: str, now: float, items: Iterable[Finding] = ()) -> None:
        """Record that the unit was read; level "doubtful": not fine, with the errors of `items`."""
        errors = [asdict(item) for item in items if item.severity == "error"][:_MAX_FINDINGS]
        self._records[unit.name] = {
            "binding": binding,
            "findings": errors,
            "level": level,
            "pass": self._pass,
            "time": now,
        }

    def end_pass(self) -> None:
        """Begin a new pass: the next run reads everything again that max-age does not spare."""
        self._pass, self._seed = secrets.token_hex(8), None

    def save(self) -> None:
        """Write the records atomically; where that is not possible, an info says so."""
        try:
            self._write()
        except OSError as error:
            if not self._unwritable:
                self._unwritable = True
                self._tell("to keep records for the next verification", f"{self._file}: {error}")

    def _write(self) -> None:
        body = {
            "key": self._key,
            "pass": self._pass,
            "records": self._records,
            "seed": self._seed,
            "url": self._store.url,
        }
        data = json.dumps({"body": body, "digest": _digest(body), "format": _FORMAT}).encode()
        temporary = self._file.with_name(f"{self._file.name}.{secrets.token_hex(8)}.tmp")
        self._file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._file)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


def _time(record: dict[str, Any]) -> float:
    at = record.get("time")
    usable = isinstance(at, int | float) and not isinstance(at, bool) and 0 <= at < _NEVER
    return float(at) if usable else -1.0  # type: ignore[arg-type]


def _finding(item: object) -> Finding | None:
    names = ("severity", "code", "where", "expected", "got", "remedy")
    if not isinstance(item, dict) or not all(isinstance(item.get(name), str) for name in names):
        return None
    if item["severity"] != "error" or item["code"] not in REMEDIES:
        return None
    samples = item.get("samples")
    ids = tuple(map(str, samples)) if isinstance(samples, list) else ()
    return Finding(**{name: item[name] for name in names}, samples=ids)


def _digest(body: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


def _stat(store: Store, paths: Iterable[str]) -> list[list[float]]:
    """Return (nbytes, time of change, of status change, inode) a file; if remote, the time of change if it is known."""
    if not store.is_local:
        return [_remote_stat(store, path) for path in paths]
    stats: list[list[float]] = []
    for path in paths:
        try:
            status = Path(store.local_path(path) or "").stat()
        except (OSError, HsfmtError):
            return [[-1, secrets.randbits(62)]]  # equal to no other
        stats.append([status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino])
    return stats


def _changed(stat: list[float]) -> float | None:
    """Return the time of change in seconds, of a file of this machine or of a remote object that has one."""
    return stat[2] / 1e9 if len(stat) == 4 else stat[0] if len(stat) == 1 else None


def _remote_stat(store: Store, path: str) -> list[float]:
    try:
        changed = store.modified(path)
    except HsfmtError:
        return [-1, secrets.randbits(62)]
    return [] if changed is None else [changed]
