"""JSON documents of vLLM's request outputs, and which data file each request goes with.

The paths in them are those of the machine that ran vLLM. Ranks and runs that were copied into folders of their own have
equal file names, so a request goes with the file whose path ends most like its own, then with the one nearest to its
document. Where that leaves two, it goes with none.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

SUFFIX = ".safetensors"
_DOCUMENT_NBYTES = 1 << 30
# Half of what a sample id may have: the path of a lost file becomes one, below the document's folder.
_TEXT_NBYTES = 2048
_SHOWN = 5
# What speaks for a file, most important first: names at the end, folders shared with the document, the same folder.
Likeness: TypeAlias = tuple[int, int, bool]


@dataclass(frozen=True, slots=True)
class Request:
    """What a request's output says of its file; the ids as length and digest, so that the source stays small.

    Attributes
    ----------
    document
        Path of the document below the folder.
    path
        Where vLLM wrote the file.
    request_id, n_tokens, digest
        Its id, and length and digest of its prompt.
    """

    document: str
    path: str
    request_id: str
    n_tokens: int
    digest: bytes

    def begins(self, input_ids: NDArray[np.int64]) -> bool:
        """Whether token ids begin with the request's prompt."""
        return len(input_ids) >= self.n_tokens and _digest(input_ids[: self.n_tokens]) == self.digest


def read_document(path: Path, where: str, nbytes: int) -> tuple[list[Request], list[str]]:
    """Read the requests of a `.json` or `.jsonl` file, none where it is another file; and what to note about it.

    Raises
    ------
    OSError
        The file can't be read.
    """
    if nbytes > _DOCUMENT_NBYTES or not where.endswith((".json", ".jsonl")):
        return [], []
    text = path.read_bytes()
    try:
        entries = [json.loads(line) for line in text.splitlines()] if where.endswith("l") else json.loads(text)
    except (ValueError, RecursionError):
        return [], []
    found = [_request(entry, where) for entry in entries] if isinstance(entries, list) else []
    requests = [request for request in found if request is not None]
    sound = [request for request in requests if _is_text(request.path) and _is_text(request.request_id)]
    ignored = len(requests) - len(sound)
    if not ignored:
        return sound, []
    named = f"paths or request ids that are no Unicode text of up to {_TEXT_NBYTES} bytes"
    return sound, [f"{where}: {ignored} of {len(requests)} request outputs are ignored, which have {named}"]


def _request(entry: Any, document: str) -> Request | None:
    try:
        path = entry["kv_transfer_params"]["hidden_states_path"]
        token_ids = entry["prompt_token_ids"]
        request_id = entry.get("request_id", "")
        if not isinstance(path, str) or not path.endswith(SUFFIX):
            return None
        if not isinstance(token_ids, list) or any(type(token) is not int for token in token_ids):
            return None
        digest = _digest(np.array(token_ids, dtype=np.int64))
        return Request(document, path, str(request_id), len(token_ids), digest)
    except (KeyError, TypeError, AttributeError, OverflowError):
        return None


def _digest(token_ids: NDArray[np.int64]) -> bytes:
    return hashlib.blake2b(token_ids.tobytes(), digest_size=16).digest()


def _is_text(text: str) -> bool:
    """Whether a text can be kept: JSON escapes also spell halves of surrogate pairs."""
    try:
        return len(text.encode()) <= _TEXT_NBYTES
    except UnicodeEncodeError:
        return False


def join(requests: Iterable[Request], known: Collection[str]) -> tuple[dict[str, Request], set[str], list[str]]:
    """Find out which file each request goes with.

    Parameters
    ----------
    requests
        The requests of all documents.
    known
        Paths below the folder of the files that are there, or whose `.lock` is.

    Returns
    -------
    tuple
        The request of a path, where one goes with it; paths of files that requests name and that are not there; notes.
    """
    claims, lost, unclear = _claims(requests, known)
    joined: dict[str, Request] = {}
    for path, claimants in claims.items():
        best = max(likeness for likeness, _ in claimants)
        first = next(request for likeness, request in claimants if likeness == best)
        others = [(likeness, request) for likeness, request in claimants if not _same(request, first)]
        if any(likeness == best for likeness, _ in others):
            unclear.extend(request for _, request in claimants)
        else:
            joined[path] = first
            lost.extend(request for _, request in others)
    missing = set()
    for path, named in _places(lost, joined).items():
        if path in known or any(not _same(request, named[0]) for request in named):
            unclear.extend(named)
        if path not in known:
            missing.add(path)
    return joined, missing, _notes(unclear)


def _claims(
    requests: Iterable[Request], known: Collection[str]
) -> tuple[dict[str, list[tuple[Likeness, Request]]], list[Request], list[Request]]:
    """The requests that go with a file, those without any of that name, and those that go with several."""
    by_ending: dict[str, list[str]] = defaultdict(list)
    for path in sorted(known):
        for ending in _endings(path):
            by_ending[ending].append(path)
    claims: dict[str, list[tuple[Likeness, Request]]] = defaultdict(list)
    lost: list[Request] = []
    unclear: list[Request] = []
    for request in requests:
        paths, likeness = _likest(request, by_ending)
        if len(paths) == 1:
            claims[paths[0]].append((likeness, request))
        else:
            (unclear if paths else lost).append(request)
    return claims, lost, unclear


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _same(one: Request, other: Request) -> bool:
    """Whether two documents tell of one request."""
    return (one.path, one.request_id, one.digest) == (other.path, other.request_id, other.digest)


def _endings(path: str) -> Iterator[str]:
    """The last name of a path, its last two, and so on."""
    at = len(path)
    while at >= 0:
        at = path.rfind("/", 0, at) if at else -1
        yield path[at + 1 :]


def _likest(request: Request, by_ending: dict[str, list[str]]) -> tuple[list[str], Likeness]:
    """The files for which most speaks: equal names at the end, then folders shared with the document, then its own.

    Parameters
    ----------
    by_ending
        Paths by each of their endings, sorted.
    """
    paths: list[str] = []
    n_names = 0
    for ending in _endings(request.path):
        if ending not in by_ending:
            break
        paths, n_names = by_ending[ending], n_names + 1
    own = folder = request.document.removesuffix(_name(request.document))
    while folder and paths:
        # Sorted, those below the folder follow each other; "0" comes after "/".
        below = paths[bisect_left(paths, folder) : bisect_left(paths, folder[:-1] + "0")]
        if below:
            paths = below
            break
        folder = folder[: folder.rfind("/", 0, -1) + 1]
    beside = own + _name(request.path)
    at = bisect_left(paths, beside)
    if paths[at : at + 1] == [beside]:
        paths = [beside]
    return paths, (n_names, folder.count("/"), paths == [beside])


def _places(lost: list[Request], joined: dict[str, Request]) -> dict[str, list[Request]]:
    """Where the files of requests would be: as others of their document show, else in the document's folder."""
    roots = defaultdict(set)
    for path, request in joined.items():
        ours = set(_endings(path))
        *_, ending = takewhile(ours.__contains__, _endings(request.path))
        roots[request.document].add((request.path.removesuffix(ending), path.removesuffix(ending)))
    places = defaultdict(list)
    for request in lost:
        found = {
            there + request.path.removeprefix(root)
            for root, there in roots.get(request.document, ())
            if request.path.startswith(root)
        }
        place = found.pop() if len(found) == 1 else ""
        if not place or any(name in ("", ".", "..") for name in place.split("/")):
            place = request.document.removesuffix(_name(request.document)) + _name(request.path)
        places[place].append(request)
    return places


def _notes(unclear: list[Request]) -> list[str]:
    if not unclear:
        return []
    names = sorted({f"{request.path} ({request.document})" for request in unclear})
    shown = ", ".join(names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")
    one = len(unclear) == 1
    which = "1 request output fits" if one else f"{len(unclear)} request outputs fit"
    return [f"{which} several files, or a file that others fit as well, and {'is' if one else 'are'} not used: {shown}"]
