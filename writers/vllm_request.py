"""What vLLM's connector is told and what it answers: options of the server, and what each request asks for.

Nothing of vLLM is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from hsfmt.errors import Problem, SampleError, UsageError
from hsfmt.writers.capturing.ask import KEY, Ask, parse_ask

MIB, GIB = 1 << 20, 1 << 30
# vLLM gives a worker 300 s for a step.
MAX_BLOCK_SECONDS = 60.0
_WHOLE = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOptions:
    """Members of `hsfmt_options` in kv_connector_extra_config; `path` is its neighbour `hsfmt_path`.

    Attributes
    ----------
    path
        Folder or fsspec URL of the dataset.
    capture
        "all": every request, as vLLM's own connector does. "asked": those with an `hsfmt` value.
    queue_nbytes
        Most bytes of states in host memory, between the KV cache and the dataset writer.
    block_seconds
        How long a step of the engine may wait for room in the queue; then its samples are refused. 0 never waits.
    flush_seconds
        How long a flush may take before the log says that it failed; what it started goes on.
    part_nbytes, part_seconds, codec, threads
        As for `DatasetWriter`.
    retry_seconds
        Longest pause between attempts to go on after the storage failed.
    status_seconds
        A status line is logged this often while samples come in.
    model, tokenizer
        Identity in the header; by default the names that vLLM was started with.
    storage_options
        For fsspec.
    """

    path: str
    capture: str = "all"
    queue_nbytes: int = 2 * GIB
    block_seconds: float = 20.0
    flush_seconds: float = 120.0
    part_nbytes: int = 32 * GIB
    part_seconds: float = 60.0
    codec: str = "zstd"
    threads: int | None = None
    retry_seconds: float = 30.0
    status_seconds: float = 60.0
    model: str | Mapping[str, str] | None = None
    tokenizer: str | Mapping[str, str] | None = None
    storage_options: Mapping[str, Any] = field(default_factory=dict)


def read_options(extra_config: Mapping[str, Any]) -> ConnectorOptions:
    """Return the options out of kv_connector_extra_config.

    Raises
    ------
    UsageError
        No path, an unknown name, or a value that can't be; all problems at once. What concerns the writer alone is
        checked by it, before the server is up.
    """
    problems = []
    path, given = extra_config.get("hsfmt_path"), extra_config.get("hsfmt_options", {})
    if not isinstance(path, str) or not path:
        problems.append(Problem("hsfmt_path", "the dataset: a folder or fsspec URL", repr(path)[:100]))
    if not isinstance(given, Mapping):
        raise UsageError.at("hsfmt_options", expected="an object", got=repr(given)[:100])
    known = {option.name for option in fields(ConnectorOptions)} - {"path"}
    problems += [
        Problem(f"hsfmt_options: {name}", f"one of {', '.join(sorted(known))}", "an unknown option")
        for name in sorted(set(given) - known)
    ]
    for name in ("queue_nbytes", "block_seconds", "flush_seconds", "retry_seconds", "status_seconds"):
        value = given.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            problems.append(Problem(f"hsfmt_options: {name}", "a number from 0 on", repr(value)[:60]))
        elif name == "block_seconds" and value > MAX_BLOCK_SECONDS:
            problems.append(Problem(f"hsfmt_options: {name}", f"at most {MAX_BLOCK_SECONDS:g}", f"{value}"))
    if given.get("capture", "all") not in ("all", "asked"):
        problems.append(Problem("hsfmt_options: capture", "all or asked", repr(given["capture"])[:60]))
    if problems:
        raise UsageError(problems)
    return ConnectorOptions(path=str(path), **given)


@dataclass(slots=True)
class Save:
    """A finished request on its way from scheduler to worker: the members of vLLM's own PendingSave, and ours.

    Attributes
    ----------
    req_id, filename, token_ids, block_ids
        As in vLLM.
    sample_id
        Id in the dataset; "" when it is not meant to be stored.
    ask
        What goes with the states, None when nothing is stored.
    reason, detail
        Why not, for a sample that was asked for: a word of counters.REASONS, and more.
    flush
        Whether all that came before is to be made durable.
    """

    req_id: str
    filename: str
    token_ids: Any
    block_ids: list[int]
    sample_id: str = ""
    ask: Ask | None = None
    reason: str = ""
    detail: str = ""
    flush: bool = False

    def answer(self, path: str) -> dict[str, Any]:
        """Return what the client is told. "pending": neither accepted nor durable yet."""
        told: dict[str, Any] = {"dataset": path, "id": self.sample_id, "state": "pending" if self.ask else "refused"}
        if self.reason:
            told |= {"reason": self.reason, "detail": self.detail}
        elif not self.ask:
            told = {"dataset": path, "state": "none"}
        return told | ({"flush": True} if self.flush else {})


def plan_save(pending: Any, request: Any, capture: str) -> Save:
    """Return what is to be done for a finished request.

    Parameters
    ----------
    pending
        vLLM's PendingSave of it.
    request
        vLLM's request.
    capture
        The option of that name.
    """
    save = Save(pending.req_id, pending.filename, pending.token_ids, pending.block_ids)
    value = (request.kv_transfer_params or {}).get(KEY)
    if isinstance(value, Mapping):
        value = dict(value)
        save.flush = value.pop("flush", False) is True
        if save.flush and not value:
            return save
        value.setdefault("id", save.req_id)
    elif value is None:
        if capture == "asked":
            return save
        value = {"id": save.req_id}
    save.sample_id = save.req_id
    try:
        ask = parse_ask(value)
        save.sample_id = ask.sample_id
        n_tokens = len(save.token_ids)
        if ask.n_tokens not in (None, n_tokens):
            raise SampleError.at("hsfmt: n_tokens", expected=f"{n_tokens}, as computed", got=str(ask.n_tokens))
        ask.loss_mask(n_tokens)
    except SampleError as error:
        save.reason, save.detail = "bad_request", str(error)
        return save
    save.reason, save.detail = _obstacle(request, n_tokens)
    save.ask = None if save.reason else ask
    return save


def _obstacle(request: Any, n_tokens: int) -> tuple[str, str]:
    """Return why the states of a request are not those of its tokens, ("", "") when they are."""
    if request.status.name not in _WHOLE:
        return "aborted", f"it ended as {request.status.name}"
    if not n_tokens or getattr(request, "mm_features", None) or getattr(request, "prompt_embeds", None) is not None:
        return "not_tokens", "the prompt is more than its token ids"
    if getattr(request, "lora_request", None) is not None:
        return "lora", "the states are those of an adapter"
    if request.num_computed_tokens < n_tokens:
        return "gap", f"states of {request.num_computed_tokens} of {n_tokens} tokens were computed"
    return "", ""


def check_layers(layers: Sequence[int], n_layers: int) -> list[int]:
    """Return the layer ids in the order in which vLLM stores their states.

    Raises
    ------
    UsageError
        None, the same one twice, or one that the model does not have.
    """
    if not layers or len(set(layers)) != len(layers) or not 0 <= min(layers) <= max(layers) <= n_layers:
        expected = f"different layers of 0 to {n_layers}"
        raise UsageError.at("eagle_aux_hidden_state_layer_ids", expected=expected, got=str(list(layers)))
    return sorted(layers)
