"""Source `vllm`: the folder that vLLM's ExampleHiddenStatesConnector writes (0.17 and later).

Sample id: the data file's path below the folder without `.safetensors`, which is the request id that vLLM gave it.
A `.lock` beside a data file is its normal companion; a `.lock` alone is a request whose states never came.
A JSON document of request outputs (`kv_transfer_params.hidden_states_path`, `prompt_token_ids`) is used to check ids.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hsfmt.errors import Problem, SourceError
from hsfmt.readers.sources import connector_file
from hsfmt.readers.sources.base import Source, SourceItem, SourceSample, Stray, SupportFile
from hsfmt.readers.sources.folder import natural_key, stem
from hsfmt.readers.sources.sample_names import stray_reason

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hsfmt.readers.sources.folder import Folder
    from hsfmt.readers.sources.meaning import SourceMeaning

SUFFIX = ".safetensors"
LAYERS_FROM = (
    "they are the eagle_aux_hidden_state_layer_ids of the vLLM command line (--speculative-config, ascending); "
    "each counts the layers passed, as --layer-ids does"
)
_MANIFEST_NBYTES = 1 << 30


class VllmSource(Source):
    """A vLLM connector folder."""

    name: ClassVar[str] = "vllm"
    summary: ClassVar[str] = "folder of vLLM's hidden-states connector: {request}.safetensors with .lock companions"

    def _list(self, folder: Folder) -> None:
        sizes = {file.path: file.nbytes for file in folder.files}
        data = {path for path in sizes if path.endswith(SUFFIX)}
        broken = {file.path: file.problem for file in folder.broken if file.path.endswith(SUFFIX)}
        locked = {path.removesuffix(connector_file.LOCK_SUFFIX) for path in sizes if path.endswith(SUFFIX + ".lock")}
        self._prompts: dict[str, _Prompt] = {}
        for path, nbytes in sizes.items():
            if path in data or path.removesuffix(connector_file.LOCK_SUFFIX) in locked:
                continue
            prompts = self._read_manifest(path, nbytes) if path.endswith((".json", ".jsonl")) else {}
            self._prompts.update(prompts)
            if prompts:
                self.support.append(SupportFile(path, "request outputs"))
            else:
                self.strays.append(Stray(path, stray_reason(path, f"not a {SUFFIX} file", data)))
        known = data | locked | set(broken)
        for index, path in enumerate(sorted(known | self._place_prompts(known), key=natural_key)):
            self.items.append(_item(path, index, sizes, broken.get(path)))

    def _read_manifest(self, path: str, nbytes: int) -> dict[str, _Prompt]:
        if nbytes > _MANIFEST_NBYTES:
            return {}
        text = (self.root / path).read_bytes()
        try:
            entries = [json.loads(line) for line in text.splitlines()] if path.endswith("l") else json.loads(text)
        except (ValueError, RecursionError):
            return {}
        prompts = {}
        for entry in entries if isinstance(entries, list) else []:
            prompt = _prompt(entry)
            if prompt is not None:
                prompts[prompt.path] = prompt
        return prompts

    def _place_prompts(self, known: set[str]) -> set[str]:
        """Join the request outputs to files by name; return the paths that they name and nothing else does."""
        by_name: dict[str, list[str]] = {}
        for path in known:
            by_name.setdefault(path.rpartition("/")[2], []).append(path)
        placed: dict[str, _Prompt] = {}
        for prompt in self._prompts.values():
            name = prompt.path.rpartition("/")[2]
            for path in by_name.get(name, [name]):
                placed[path] = prompt
        self._prompts = placed
        return set(placed) - known

    def _look(self, item: SourceItem) -> SourceMeaning:
        return connector_file.look(
            self.root / item.key,
            item.key,
            layers_from=LAYERS_FROM,
            producer={"source_format": "vllm connector"},
        )

    def _load(self, item: SourceItem) -> SourceSample:
        if len(item.paths) > 1:
            connector_file.check_not_being_written(self.root / item.paths[1], item.key)
        sample = connector_file.load(self.root / item.key, item.key, item.sample_id)
        prompt = self._prompts.get(item.key)
        if prompt is not None:
            # With include_output_tokens the file goes on after the prompt.
            if len(sample.input_ids) < prompt.n_tokens or _digest(sample.input_ids[: prompt.n_tokens]) != prompt.digest:
                raise SourceError.at(
                    f"{item.key}[token_ids]",
                    expected=f"to begin with the {prompt.n_tokens} prompt tokens of request {prompt.request_id!r}",
                    got=f"{len(sample.input_ids)} tokens that do not",
                    remedy="the states are of another text: send the request again",
                )
            if prompt.request_id:
                sample.metadata["request_id"] = prompt.request_id
        return sample


def _item(path: str, index: int, sizes: dict[str, int], problem: Problem | None) -> SourceItem:
    lock = path + connector_file.LOCK_SUFFIX
    paths = tuple(p for p in (path, lock) if p in sizes or (p == path and problem is not None))
    if not paths or paths[0] != path:
        got = "only its .lock: the request was aborted or the write never happened"
        problem = Problem(
            path,
            "the states of this request",
            got if lock in sizes else "no file, though the request outputs name it",
            "send the request again; in-process vLLM never writes its last batch",
        )
    return SourceItem(path, index, stem(path), paths, sum(sizes.get(p, 0) for p in paths), problem)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What a request's output says of its file; the ids as length and digest, so that the source stays small."""

    path: str
    request_id: str
    n_tokens: int
    digest: bytes


def _digest(token_ids: NDArray[np.int64]) -> bytes:
    return hashlib.blake2b(token_ids.tobytes(), digest_size=16).digest()


def _prompt(entry: Any) -> _Prompt | None:
    try:
        path = entry["kv_transfer_params"]["hidden_states_path"]
        token_ids = entry["prompt_token_ids"]
        request_id = entry.get("request_id", "")
        if not isinstance(path, str) or not path.endswith(SUFFIX):
            return None
        if not isinstance(token_ids, list) or any(type(token) is not int for token in token_ids):
            return None
        return _Prompt(path, str(request_id), len(token_ids), _digest(np.array(token_ids, dtype=np.int64)))
    except (KeyError, TypeError, AttributeError, OverflowError):
        return None
