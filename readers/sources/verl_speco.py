"""Source `verl-speco`: the feature store of verl-SpeCo (`TorchShardFeatureStore`, schema version 1).

`metadata.json`, `manifest.jsonl` with a line a shard, and shards `{prefix}_{i:06d}.pt` of up to 1024 samples; see
`verl_speco_sample` for what a sample is. A shard without a line was written just before a crash and is overwritten by
the next run: it is a stray. The line's `num_tokens`, the sum of the loss masks, has to be that of the file.

Neither layers nor norm are fixed by the format. Samples may name `target_layer_ids`, but in the numbering of the engine
that took the states.

Sample id: the shard's name without extension, a slash and the number in the shard. Items come in the manifest's order.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, ClassVar

from hsfmt.errors import Problem, SourceError
from hsfmt.readers.sources.base import CONTAINER, Claim, Source, SourceItem, SourceSample, Stray, SupportFile
from hsfmt.readers.sources.file_stamp import FileStamp
from hsfmt.readers.sources.json_document import Document, parse_object, read_bounded, read_file
from hsfmt.readers.sources.meaning import SourceMeaning
from hsfmt.readers.sources.sample_names import stray_reason

if TYPE_CHECKING:
    from hsfmt.readers.sources.folder import Folder
    from hsfmt.readers.sources.look import Look
    from hsfmt.readers.sources.verl_speco_sample import LoadedShard

MANIFEST = "manifest.jsonl"
METADATA = "metadata.json"
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,250}\.pt")
_MANIFEST_NBYTES = 16 << 20
_LINE_NBYTES = 64 << 10
# A sample has three tensors or more, each a member of the zip file.
_SAMPLE_NBYTES = 256
_MAX_MISSING = 1 << 16
_FACTS = ("algorithm", "created_by", "drafter_model_path", "format", "schema_version", "source")
_LAYERS_FROM = (
    "count them like HF hidden_states (k is the state after k layers, n after the last): target_layer_ids of states "
    "from transformers or old log-probs are outputs of layers, each + 1 here, those from vLLM are such counts already; "
    "the layouts *_plus_last end with layer n"
)
_NORM_FROM = (
    "post if the last state is after the model's final norm (transformers, old log-probs, SGLang), pre if before it "
    "(vLLM's hidden states as they come)"
)
_REMEDY = "give the folder of the feature store (training.feature_store.path), whole"
_COPY = "copy the store again, whole"


class VerlSpecoSource(Source):
    """A feature store of verl-SpeCo."""

    name: ClassVar[str] = "verl-speco"
    summary: ClassVar[str] = "verl-SpeCo feature store: manifest.jsonl and {prefix}_{i}.pt with many samples each"

    @classmethod
    def claim(cls, look: Look) -> Claim | None:
        """Take a folder whose metadata.json names the store, or whose manifest.jsonl has its lines."""
        if MANIFEST not in look.names:
            return None
        document = look.document(METADATA)
        if isinstance(document, dict) and "verl_speco" in (document.get("created_by"), document.get("source")):
            return Claim(f"{MANIFEST} with {METADATA} of verl_speco", certain=True)
        try:
            with (look.folder.root / MANIFEST).open("rb") as file:
                line = json.loads(file.readline(_LINE_NBYTES))
        except (OSError, ValueError, RecursionError):
            return None
        found = isinstance(line, dict) and {"path", "num_samples"} <= set(line)
        return Claim(f"{MANIFEST} whose lines have path and num_samples", certain=True) if found else None

    def _list(self, folder: Folder) -> None:
        self._shard: LoadedShard | None = None
        self._broken: tuple[FileStamp, tuple[Problem, ...]] | None = None
        self._read_metadata(folder)
        self._lines = lines = self._read_manifest(folder)
        sizes = {file.path: file.nbytes for file in folder.files}
        broken = {file.path: file.problem for file in folder.broken}
        missing = "no such file: it was never copied, or removed"
        for name, line in lines.items():
            problem = broken.get(name)
            if name not in sizes:
                problem = problem or Problem(name, f"the shard that {MANIFEST} names", missing, _COPY)
            self._add_items(name, line, sizes.get(name, 0), problem)
        roles = {MANIFEST: "manifest", METADATA: "metadata", **dict.fromkeys(lines, CONTAINER)}
        for file in folder.files:
            if file.path in roles:
                self.support.append(SupportFile(file.path, roles[file.path]))
                continue
            orphan = f"a shard that {MANIFEST} does not name: verl-SpeCo died before it wrote the line"
            otherwise = orphan if file.path.endswith(".pt") else "no part of the feature store"
            self.strays.append(Stray(file.path, stray_reason(file.path, otherwise)))

    def _read_metadata(self, folder: Folder) -> None:
        self._facts: dict[str, Any] = {}
        self._model: str | None = None
        if all(file.path != METADATA for file in folder.files):
            self.notes.append(f"{METADATA} is missing: the store does not say which model its states are of")
            return
        metadata = parse_object(read_bounded(self.root / METADATA, METADATA, _LINE_NBYTES * 16), METADATA)
        for name, value in (("schema_version", 1), ("format", "torch_shard")):
            if name in metadata.members:
                metadata.choice(name, (value,))
        model = metadata.get("target_model_path")
        self._model = model if isinstance(model, str) and model else None
        self._facts = metadata.facts(*_FACTS)

    def _read_manifest(self, folder: Folder) -> dict[str, Document]:
        data = read_file(folder, MANIFEST, _MANIFEST_NBYTES, _REMEDY)
        if not data.strip():
            raise SourceError.at(MANIFEST, expected="a line for each shard", got="none", remedy=_REMEDY)
        lines: dict[str, Document] = {}
        for number, text in enumerate(data.split(b"\n"), 1):
            if not text.strip():
                continue
            line = parse_object(text, f"{MANIFEST}:{number}")
            name = line.get("path")
            if not isinstance(name, str) or not _SHARD.fullmatch(name):
                raise line.refuse("path", "the name of a .pt file in the same folder")
            line.integer("num_samples", 0, 1 << 40)
            if name in lines:
                self.notes.append(
                    f"{lines[name].where} and {line.where} name one shard, {name}: the samples of the first were "
                    "overwritten, as happens when two processes write with one prefix"
                )
            lines[name] = line
        return lines

    def _add_items(self, name: str, line: Document, nbytes: int, problem: Problem | None) -> None:
        n = line.integer("num_samples", 0, 1 << 40)
        if problem is None and n * _SAMPLE_NBYTES > nbytes:
            expected = f"a shard of {n} samples, as {line.where} says"
            problem = Problem(name, expected, f"{nbytes} bytes, too few for so many", _COPY)
        stem, first = name.removesuffix(".pt"), len(self.items)
        for i in range(n if problem is None or n <= _MAX_MISSING else 1):
            key = f"{name}:{i}"
            found = None if problem is None else Problem(key, problem.expected, problem.got, problem.remedy)
            share = 0 if problem is not None else nbytes // n + (i < nbytes % n)
            shared = (name,) if nbytes else ()
            self.items.append(SourceItem(key, first + i, f"{stem}/{i}", (), share, found, shared=shared))
        if not n:
            self.notes.append(f"{line.where} gives {name} no samples")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_shard": None}

    def _open(self, item: SourceItem) -> tuple[LoadedShard, int]:
        """The item's shard, which stays loaded until another one is asked for, and the sample's number in it."""
        from hsfmt.readers.sources.verl_speco_sample import load_shard

        name, _, number = item.key.rpartition(":")
        stamp = FileStamp.take(self.root / name, name)
        if self._broken is not None and self._broken[0] == stamp:
            # Its other samples need not be read to be refused.
            raise SourceError(self._broken[1])
        if self._shard is None or self._shard.stamp != stamp:
            self._shard = None  # before the next one: memory is bounded by one
            try:
                self._shard = load_shard(self.root / name, name, self._lines[name])
            except SourceError as error:
                self._broken = stamp, error.problems
                raise
        return self._shard, int(number)

    def _look(self, item: SourceItem) -> SourceMeaning:
        from hsfmt.readers.sources.verl_speco_sample import read_states_meaning

        shard, number = self._open(item)
        found = read_states_meaning(shard, number, item.key, self.options)
        ids = "" if found.target_layer_ids is None else f"; target_layer_ids here are {found.target_layer_ids}"
        facts = {"target_layer_ids": found.target_layer_ids, "hidden_states_layout": found.layout}
        facts = self._facts | {name: value for name, value in facts.items() if value is not None}
        return SourceMeaning(
            hidden_size=found.hidden_size,
            n_layers=found.n_layers,
            dtype=found.dtype,
            layers=None,
            layers_from=_LAYERS_FROM + ids,
            final_norm=None if found.has_last else "unknown",
            final_norm_from=_NORM_FROM if found.has_last else "the state after the last layer is not in the store",
            model=self._model or found.model,
            producer={"source_format": "verl-speco feature store", "verl_speco": facts},
            extras=found.extras,
        )

    def _load(self, item: SourceItem) -> SourceSample:
        from hsfmt.readers.sources.verl_speco_sample import read_sample

        shard, number = self._open(item)
        return read_sample(shard, number, item, self.meaning(), self.options)
