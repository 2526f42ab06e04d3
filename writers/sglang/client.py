"""The client's side: the fields that ask for a sample, what the server answered, and how to make samples durable.

Standard library only, and pure but for `server_status` and `flush`.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from hsfmt.errors import StorageError, UsageError
from hsfmt.writers.capturing.ask import KEY, ask_text


def request_fields(
    sample_id: str,
    input_ids: Sequence[int],
    *,
    loss_mask: Sequence[int] | npt.NDArray[Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    source_index: int | None = None,
    sampling_params: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the fields of a `/generate` request (or keywords of `Engine.generate`) that capture one prompt.

    The salt is new with each call, so that no token of the prompt comes from the prefix cache: make new fields for a
    retry.

    Parameters
    ----------
    sample_id
        Id in the dataset.
    input_ids
        Token ids of the prompt.
    loss_mask
        0 or 1 [token].
    metadata, source_index
        As for `DatasetWriter.write`.
    sampling_params
        Others than the defaults: nothing is generated unless `max_new_tokens` says so.

    Raises
    ------
    SampleError
        A loss mask that does not fit the prompt.
    """
    ids = [int(token) for token in input_ids]
    text = ask_text(sample_id, n_tokens=len(ids), loss_mask=loss_mask, metadata=metadata, source_index=source_index)
    params = {"max_new_tokens": 0, "temperature": 0, **(sampling_params or {})}
    params["custom_params"] = {**(params.get("custom_params") or {}), KEY: text}
    return {"input_ids": ids, "sampling_params": params, "cache_salt": uuid.uuid4().hex}


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a sample that was asked for.

    Attributes
    ----------
    accepted
        Whether the server holds all of it; it is durable only once a flush says so.
    reason, detail
        Why not: one of the reasons in docs/sglang.md, or "no_plugin", "not_served".
    """

    sample_id: str
    accepted: bool
    reason: str = ""
    detail: str = ""


def parse_answer(sample_id: str, response: Mapping[str, Any]) -> Answer:
    """Return what a `/generate` response says about the sample that its request asked for."""
    if "error" in response:
        return Answer(sample_id, accepted=False, reason="not_served", detail=str(response["error"])[:500])
    info = response.get("meta_info") or {}
    said = info.get(KEY) or []
    if not said:
        finish = info.get("finish_reason") or {}
        if isinstance(finish, dict) and finish.get("type") == "abort":
            return Answer(sample_id, accepted=False, reason="aborted", detail=str(finish.get("message", ""))[:500])
        detail = "the server says nothing about hidden states: is the plugin loaded, and HSFMT_SGLANG_OUT set?"
        return Answer(sample_id, accepted=False, reason="no_plugin", detail=detail)
    last = said[-1]
    return Answer(sample_id, bool(last["accepted"]), last.get("reason", ""), last.get("detail", ""))


def server_status(url: str, *, api_key: str = "", timeout: float = 30.0) -> list[dict[str, Any]]:
    """Return the plugin's counters, one object for each data-parallel rank, in their order.

    Parameters
    ----------
    url
        The server's.
    api_key
        Its key, where it has one.
    timeout
        Seconds for the answer.

    Raises
    ------
    StorageError
        The server can't be reached.
    UsageError
        It has no capture.
    """
    _, body = _http(f"{url}/server_info", "GET", api_key, timeout)
    ranks = [state.get(KEY) for state in json.loads(body).get("internal_states") or []]
    if not ranks or not all(ranks):
        remedy = "install hsfmt beside SGLang 0.5.23 or newer, and start it with HSFMT_SGLANG_OUT set"
        raise UsageError.at(
            url, expected="a server that captures hidden states", got="one that does not", remedy=remedy
        )
    return sorted(ranks, key=lambda rank: int(rank["rank"]))  # they answer in any order


def flush(url: str, *, api_key: str = "", timeout: float = 300.0) -> list[dict[str, Any]]:
    """Make all accepted samples durable, on every rank; return the counters after it.

    Parameters
    ----------
    url, api_key
        The server's.
    timeout
        How long the server may take, first to finish requests that run, then to write.

    Raises
    ------
    StorageError
        Some are not durable: lost, or not written in time. What is there is in the dataset's `committed_ids`.
    """
    before = server_status(url, api_key=api_key)
    code, body = _http(f"{url}/flush_cache?timeout={timeout / 2:g}", "POST", api_key, timeout)
    ranks = server_status(url, api_key=api_key)
    # The reply is the first rank's alone.
    problems = [text for then, now in zip(before, ranks, strict=True) if (text := _unfinished(then, now))]
    if code != 200 or problems:
        got = "; ".join(problems) or f"HTTP {code}: {body[:300]}"
        remedy = "see the server's log; call again once the storage works"
        raise StorageError.at(url, expected="all accepted samples durable", got=got, remedy=remedy)
    return ranks


def _unfinished(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    n_left = then["accepted"] - (now["accepted"] - now["pending"])
    lost = f"{now['lost']} lost since the server started" if now["lost"] > then["lost"] else ""
    return "; ".join(filter(None, [f"{n_left} not durable" if n_left > 0 else "", lost, now["problem"]]))


def _http(url: str, method: str, api_key: str, timeout: float) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(url, headers=headers, method=method)  # noqa: S310  the caller's own server
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:  # noqa: S310
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(errors="replace")
    except OSError as error:
        raise StorageError.at(url, expected="an answer", got=str(error)) from None
