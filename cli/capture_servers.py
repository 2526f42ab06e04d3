"""Servers that capture: how a prompt is sent to each kind, what it answers, and how samples become durable."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hsfmt.cli.capture_prompts import Prompt
from hsfmt.errors import StorageError, UsageError
from hsfmt.writers import vllm_client
from hsfmt.writers.sglang import client as sglang_client

TAKEN, REFUSED, AGAIN = "taken", "refused", "again"
# What another try can mend; the rest is about the sample itself.
_PASSING = {"aborted", "cache_hit", "copy_failed", "gap", "queue_full", "timed_out", "error"}
_BUSY = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a prompt that was sent: TAKEN (not durable yet), REFUSED for good, or to be tried AGAIN."""

    state: str
    reason: str = ""
    detail: str = ""


class CaptureServer(Protocol):
    """A server that captures hidden states into a dataset."""

    url: str

    def send(self, prompt: Prompt) -> Outcome:
        """Send a prompt and return what became of it; network trouble is AGAIN."""

    def flush(self) -> None:
        """Ask for all that was taken to be made durable."""


class VllmServer:
    """vLLM with hsfmt's connector.

    Parameters
    ----------
    url
        Of the server, without /v1.
    api_key
        Its key, or "".
    timeout
        Seconds for an answer.
    """

    def __init__(self, url: str, api_key: str = "", timeout: float = 600.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key, self._timeout = api_key, timeout

    def send(self, prompt: Prompt) -> Outcome:
        """Send a prompt to /v1/completions."""
        body = vllm_client.capture_request(
            prompt.token_ids,
            prompt.sample_id,
            loss_mask=prompt.loss_mask,
            metadata=prompt.metadata,
            source_index=prompt.number,
        )
        answer = self._post(body)
        if isinstance(answer, Outcome):
            return answer
        told = (answer.get("kv_transfer_params") or {}).get("hsfmt")
        if not told:
            raise _no_capture(self.url, "start it with HsfmtConnector, as docs/vllm.md shows")
        if told["state"] == "pending":
            return Outcome(TAKEN)
        return _refusal(told.get("reason", told["state"]), told.get("detail", ""))

    def flush(self) -> None:
        """Send a request that makes durable what came before.

        Raises
        ------
        StorageError
            The server does not answer.
        """
        answer = self._post(vllm_client.flush_request())
        if isinstance(answer, Outcome):
            raise StorageError.at(self.url, expected="to take a flush", got=answer.detail)

    def _post(self, body: Mapping[str, Any]) -> dict[str, Any] | Outcome:
        return _post(f"{self.url}/v1/completions", body, self._key, self._timeout)


class SglangServer:
    """SGLang with hsfmt's plugin; parameters as for `VllmServer`."""

    def __init__(self, url: str, api_key: str = "", timeout: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self._key, self._timeout = api_key, timeout

    def send(self, prompt: Prompt) -> Outcome:
        """Send a prompt to /generate."""
        fields = sglang_client.request_fields(
            prompt.sample_id,
            prompt.token_ids,
            loss_mask=prompt.loss_mask,
            metadata=prompt.metadata,
            source_index=prompt.number,
        )
        answer = _post(f"{self.url}/generate", fields, self._key, self._timeout)
        if isinstance(answer, Outcome):
            return answer
        said = sglang_client.parse_answer(prompt.sample_id, answer)
        if said.accepted:
            return Outcome(TAKEN)
        if said.reason == "no_plugin":
            raise _no_capture(self.url, "start it with HSFMT_SGLANG_OUT set, as docs/sglang.md shows")
        return _refusal(said.reason, said.detail)

    def flush(self) -> None:
        """Make durable what was accepted.

        Raises
        ------
        StorageError
            Some of it is lost, or the server does not answer.
        """
        sglang_client.flush(self.url, api_key=self._key, timeout=self._timeout)


def find_server(url: str, api_key: str = "", timeout: float = 600.0) -> CaptureServer:
    """Return the server at a URL, by what it says about itself.

    Raises
    ------
    StorageError
        Nothing answers there.
    UsageError
        It is neither vLLM nor SGLang.
    """
    base = url.rstrip("/").removesuffix("/v1")
    if _answers(f"{base}/version", api_key, timeout):
        return VllmServer(base, api_key, timeout)
    if _answers(f"{base}/server_info", api_key, timeout):
        return SglangServer(base, api_key, timeout)
    raise UsageError.at(base, expected="a server of SGLang or vLLM", got="another, or another path")


def _refusal(reason: str, detail: str) -> Outcome:
    return Outcome(AGAIN if reason in _PASSING else REFUSED, reason, detail)


def _no_capture(url: str, remedy: str) -> UsageError:
    return UsageError.at(url, expected="a server that captures hidden states", got="one that does not", remedy=remedy)


def _request(url: str, api_key: str, body: Mapping[str, Any] | None = None) -> urllib.request.Request:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    return urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)  # noqa: S310  the user's own server


def _post(url: str, body: Mapping[str, Any], api_key: str, timeout: float) -> dict[str, Any] | Outcome:
    """Return the answer, or what its failure means for the prompt."""
    try:
        with urllib.request.urlopen(_request(url, api_key, body), timeout=timeout) as response:  # noqa: S310  likewise
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        state = AGAIN if error.code in _BUSY else REFUSED
        return Outcome(state, f"http_{error.code}", error.read(1000).decode(errors="replace"))
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Outcome(AGAIN, "no_answer", f"{url}: {error}")


def _answers(url: str, api_key: str, timeout: float) -> bool:
    try:
        with urllib.request.urlopen(_request(url, api_key), timeout=min(timeout, 30.0)) as response:  # noqa: S310  likewise
            return bool(response.status == 200)
    except urllib.error.HTTPError:
        return False
    except OSError as error:
        remedy = "start the server first, and give the URL without a path"
        raise StorageError.at(url, expected="an answer", got=str(error), remedy=remedy) from None
