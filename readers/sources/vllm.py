"""Source `vllm`: the folder that vLLM's ExampleHiddenStatesConnector writes (0.17 and later).

Sample id: the data file's path below the folder without `.safetensors`, which is the request id that vLLM gave it.
A `.lock` beside a data file is its normal companion; a `.lock` alone is a request whose states never came.
A JSON document of request outputs (`kv_transfer_params.hidden_states_path`, `prompt_token_ids`) is used to check ids;
`request_outputs` says which file each of them goes with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hsfmt.errors import Problem, SourceError
from hsfmt.readers.sources import connector_file, request_outputs
from hsfmt.readers.sources.base import Claim, Source, SourceItem, SourceSample, Stray, SupportFile
from hsfmt.readers.sources.folder import natural_key, stem
from hsfmt.readers.sources.sample_names import stray_reason
from hsfmt.readers.sources.speculators import ROW_FILE

if TYPE_CHECKING:
    from hsfmt.readers.sources.folder import Folder
    from hsfmt.readers.sources.look import Look
    from hsfmt.readers.sources.meaning import SourceMeaning
    from hsfmt.readers.sources.request_outputs import Request

SUFFIX = request_outputs.SUFFIX
_PEEKS = 16
LAYERS_FROM = (
    "they are the eagle_aux_hidden_state_layer_ids of the vLLM command line (--speculative-config, ascending); "
    "each counts the layers passed, as --layer-ids does"
)


class VllmSource(Source):
    """A vLLM connector folder."""

    name: ClassVar[str] = "vllm"
    summary: ClassVar[str] = "folder of vLLM's hidden-states connector: {request}.safetensors with .lock companions"

    @classmethod
    def claim(cls, look: Look) -> Claim | None:
        """Claim a folder with locks beside data files, or with the connector's tensors in one of the first files."""
        if any(ROW_FILE.fullmatch(path) for path in look.names):
            return None  # rows of speculators, which need their dataset
        options = "--layer-ids IDS"
        for path in look.names:
            if path.endswith(SUFFIX + connector_file.LOCK_SUFFIX):
                return Claim(path, certain=True, options=options)
        for path in [path for path in look.names if path.endswith(SUFFIX)][:_PEEKS]:
            try:
                look.folder.check(path)
                connector_file.connector_entries(look.folder.root / path, path)
            except SourceError as error:
                look.problems.extend(error.problems)
            else:
                return Claim(f"{path} with hidden_states and token_ids", certain=True, options=options)
        return None

    def _list(self, folder: Folder) -> None:
        sizes = {file.path: file.nbytes for file in folder.files}
        data = {path for path in sizes if path.endswith(SUFFIX)}
        broken = {file.path: file.problem for file in folder.broken if file.path.endswith(SUFFIX)}
        locked = {path.removesuffix(connector_file.LOCK_SUFFIX) for path in sizes if path.endswith(SUFFIX + ".lock")}
        requests: list[Request] = []
        for path, nbytes in sizes.items():
            if path in data or path.removesuffix(connector_file.LOCK_SUFFIX) in locked:
                continue
            found, notes = request_outputs.read_document(self.root / path, path, nbytes)
            requests.extend(found)
            self.notes.extend(notes)
            if found:
                self.support.append(SupportFile(path, "request outputs"))
            else:
                self.strays.append(Stray(path, stray_reason(path, f"not a {SUFFIX} file", data)))
        known = data | locked | set(broken)
        self._requests, missing, notes = request_outputs.join(requests, known)
        self.notes.extend(notes)
        for index, path in enumerate(sorted(known | missing, key=natural_key)):
            self.items.append(_item(path, index, sizes, broken.get(path)))

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
        ignore = self.options.key_map.ignore
        sample = connector_file.load(self.root / item.key, item.key, item.sample_id, ignore)
        request = self._requests.get(item.key)
        if request is not None:
            # With include_output_tokens the file goes on after the prompt.
            if not request.begins(sample.input_ids):
                raise SourceError.at(
                    f"{item.key}[token_ids]",
                    expected=f"to begin with the {request.n_tokens} prompt tokens of request {request.request_id!r}",
                    got=f"{len(sample.input_ids)} tokens that do not",
                    remedy="the states are of another text: send the request again",
                )
            if request.request_id:
                connector_file.add_metadata(sample, {"request_id": request.request_id})
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
