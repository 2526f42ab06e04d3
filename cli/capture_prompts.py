"""Prompts to capture: lines of a JSONL file as token ids with loss masks.

A line is an object with token ids (`input_ids`, `prompt_token_ids` or `token_ids`) and perhaps a `loss_mask`, or with a
conversation: `messages` ([{role, content}, …]) or ShareGPT's `conversations` ([{from, value}, …]). `id` and `metadata`
are kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import xxhash

from hsfmt.errors import HsfmtError, SampleError, UsageError
from hsfmt.writers.samples import check_id

TOKEN_KEYS = ("input_ids", "prompt_token_ids", "token_ids")
MASKS = ("assistant", "last", "none")
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to capture.

    Attributes
    ----------
    number
        Its line, from 0 on: its place in the default order of the dataset.
    sample_id
        Its `id`, or one made of its content.
    token_ids, loss_mask
        Of each token; no mask: None.
    metadata
        Its `metadata`.
    """

    number: int
    sample_id: str
    token_ids: list[int]
    loss_mask: list[int] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no prompt, and why."""

    number: int
    reason: str


class Chat(Protocol):
    """Turns conversations into tokens."""

    def tokens(self, messages: Sequence[Message], *, generation: bool) -> list[int]:
        """Return the token ids of a conversation, with the start of an answer if `generation`."""


class HubChat:
    """The chat template and tokenizer of a model, by transformers.

    Raises
    ------
    UsageError
        transformers is not installed, or the tokenizer has no chat template.
    """

    def __init__(self, model: str) -> None:
        try:
            transformers = import_module("transformers")
        except ImportError:
            raise UsageError.at(
                "transformers", expected="the package, for chat templates", got="none",
                remedy="pip install transformers, or give lines with input_ids",
            ) from None  # fmt: skip
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model)
        if not self._tokenizer.chat_template:
            raise UsageError.at(model, expected="a tokenizer with a chat template", got="one without")

    def tokens(self, messages: Sequence[Message], *, generation: bool) -> list[int]:
        """Return the token ids of a conversation."""
        text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generation)
        found: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return found


class PromptFile:
    """The prompts of a JSONL file; each iteration reads it anew.

    Parameters
    ----------
    path
        The file.
    chat
        For conversations.
    mask
        Tokens that a conversation's mask marks: those of all "assistant" turns, of the "last" one, or "none" is given.
    max_tokens
        Longer prompts are bad lines; None: any length.
    """

    def __init__(self, path: Path, chat: Chat | None, mask: str = "assistant", max_tokens: int | None = None) -> None:
        self._path, self._chat, self._mask, self._max_tokens = path, chat, mask, max_tokens

    def count(self) -> int:
        """Return the number of lines that are not empty."""
        with self._path.open("rb") as file:
            return sum(bool(line.strip()) for line in file)

    def __iter__(self) -> Iterator[Prompt | BadLine]:
        with self._path.open("rb") as file:
            for number, line in enumerate(filter(bytes.strip, file)):
                try:
                    yield self._prompt(number, line)
                except (HsfmtError, ValueError) as error:
                    yield BadLine(number, str(error))

    def _prompt(self, number: int, line: bytes) -> Prompt:
        record = json.loads(line)
        if not isinstance(record, dict):
            raise SampleError.at("line", expected="an object", got=type(record).__name__)
        ids, mask = self._content(record)
        if not ids or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise SampleError.at("token ids", expected="a list of integers from 0 on", got=repr(ids)[:60])
        if self._max_tokens is not None and len(ids) > self._max_tokens:
            raise SampleError.at("token ids", expected=f"at most {self._max_tokens}", got=f"{len(ids)}")
        if mask is not None and (len(mask) != len(ids) or not set(mask) <= {0, 1}):
            raise SampleError.at("loss_mask", expected=f"{len(ids)} values of 0 or 1", got=f"{len(mask)} values")
        metadata = record.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise SampleError.at("metadata", expected="an object", got=type(metadata).__name__)
        sample_id = record.get("id")
        sample_id = content_id(ids, mask) if sample_id is None else check_id(str(sample_id))
        return Prompt(number, sample_id, ids, mask, metadata)

    def _content(self, record: Mapping[str, Any]) -> tuple[list[Any], list[int] | None]:
        for key in TOKEN_KEYS:
            if isinstance(record.get(key), list):
                mask = record.get("loss_mask")
                return record[key], None if mask is None else [int(value) for value in mask]
        messages = _messages(record)
        if self._chat is None:
            raise SampleError.at("line", expected="token ids, or --tokenizer for conversations", got="a conversation")
        return conversation(self._chat, messages, self._mask)


def conversation(chat: Chat, messages: Sequence[Message], mask: str) -> tuple[list[int], list[int] | None]:
    """Return the tokens of a conversation and the mask of the turns that are learned.

    A turn's tokens are found as what it adds to the conversation up to it, which only a template that never changes
    what came before allows.

    Raises
    ------
    SampleError
        The template is none, or there is no assistant's turn to learn.
    """
    ids = chat.tokens(messages, generation=False)
    if mask == "none":
        return ids, None
    marked = [0] * len(ids)
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    for turn in turns[-1:] if mask == "last" else turns:
        start = chat.tokens(messages[:turn], generation=True)
        stop = chat.tokens(messages[: turn + 1], generation=False)
        if ids[: len(start)] != start or ids[: len(stop)] != stop or not len(start) < len(stop):
            raise SampleError.at(
                f"turn {turn}", expected="a chat template that only adds to what came before",
                got="one that changes it",
                remedy="give input_ids and loss_mask made by your own code",
            )  # fmt: skip
        marked[len(start) : len(stop)] = [1] * (len(stop) - len(start))
    if not turns:
        raise SampleError.at("conversation", expected="an assistant's turn", got="none", remedy="or say --mask none")
    return ids, marked


def content_id(token_ids: Sequence[int], loss_mask: Sequence[int] | None) -> str:
    """Return an id that is the same for the same prompt, whatever file and line it stands in."""
    text = json.dumps([list(token_ids), None if loss_mask is None else list(loss_mask)], separators=(",", ":"))
    return f"prompt-{xxhash.xxh3_128_hexdigest(text.encode())}"


def _messages(record: Mapping[str, Any]) -> list[Message]:
    turns = record.get("messages", record.get("conversations"))
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        expected = f"one of {', '.join(TOKEN_KEYS)}, messages, conversations"
        raise SampleError.at("line", expected=expected, got=", ".join(sorted(record))[:100])
    if "from" not in turns[0]:
        if not all(isinstance(turn.get("role"), str) for turn in turns):
            raise SampleError.at("messages", expected="a role in each", got="none")
        return turns
    unknown = {str(turn.get("from")) for turn in turns} - set(_ROLES)
    if unknown:
        raise SampleError.at("conversations", expected=f"from {', '.join(_ROLES)}", got=", ".join(sorted(unknown)))
    return [{"role": _ROLES[turn["from"]], "content": turn.get("value", "")} for turn in turns]
