"""Source `automodel`: the offline EAGLE-3 cache, format version 2, of NVIDIA NeMo Automodel's precompute_eagle3.py.

`manifest.json` and `shard-{i:06d}.safetensors`, whose fields hold `shard_size` samples each (the last shard fewer),
padded to one length S: input_ids, attention_mask, loss_mask int64 [n, S], aux_hidden_states [n, S, A*H], position_mask
bool [n, S, 1], and the target's distribution over the draft vocabulary, whole as target_probs [n, S, V] or its largest
values as target_probs_values and target_probs_indices [n, S, k]. `automodel_fields` says how a sample is taken out.

The states are the outputs of the layers `aux_layer_ids` (HF index id + 1), taken by hooks, in the order in which they
were asked for: layers are put into ascending order here. The state after the last layer and the final norm is not
stored.

Sample id: the number of the sample in the cache in decimal. `source_index` is the same number.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hsfmt.errors import Problem, SourceError
from hsfmt.readers.sources.automodel_fields import PROBS, Fields, open_fields, real_tokens, take_sample
from hsfmt.readers.sources.base import CONTAINER, Claim, Source, SourceItem, SourceSample, Stray, SupportFile
from hsfmt.readers.sources.json_document import Document, parse_object, read_file
from hsfmt.readers.sources.meaning import SourceMeaning
from hsfmt.readers.sources.safetensors_file import DTYPES, read_entries
from hsfmt.readers.sources.sample_names import stray_reason

if TYPE_CHECKING:
    from hsfmt.readers.sources.folder import Folder, SourceFile
    from hsfmt.readers.sources.look import Look

MANIFEST = "manifest.json"
EMBEDDINGS = "target_embeddings.safetensors"
_SHARD = re.compile(r"shard-([0-9]{6})\.safetensors")
_DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
_MANIFEST_NBYTES = 16 << 20
# More samples than these, of shards that are not there, are one problem together.
_MAX_MISSING = 1 << 16
_FACTS = (
    *("aux_layer_ids", "draft_vocab_size", "input_data", "mask_generation_prompt", "mask_reasoning_content"),
    *("seq_length", "shuffle_seed", "split", "target_probs_topk", "target_vocab_size"),
)
_REMEDY = "give the folder that precompute_eagle3.py made (--output-dir), whole"
_RESUME = "run precompute_eagle3.py again with --resume to write it, or copy the cache again"


class AutomodelSource(Source):
    """An offline EAGLE-3 cache of NeMo Automodel."""

    name: ClassVar[str] = "automodel"
    summary: ClassVar[str] = "NeMo Automodel EAGLE-3 cache: manifest.json and shard-{i}.safetensors of padded samples"

    @classmethod
    def claim(cls, look: Look) -> Claim | None:
        """Take a folder whose manifest has Automodel's members, or can't be read beside its embeddings and shards."""
        document = look.document(MANIFEST)
        if document is None and EMBEDDINGS in look.names and any(map(_SHARD.fullmatch, look.names)):
            return Claim(f"{EMBEDDINGS} with shards", certain=True)
        if not isinstance(document, dict) or not {"format_version", "aux_layer_ids", "shard_size"} <= set(document):
            return None
        return Claim(f"{MANIFEST} with aux_layer_ids and shard_size", certain=True)

    def _list(self, folder: Folder) -> None:
        manifest = parse_object(read_file(folder, MANIFEST, _MANIFEST_NBYTES, _REMEDY), MANIFEST)
        self._read_manifest(manifest)
        self._check_embeddings(folder)
        files = {file.path: file for file in folder.select(lambda file: _SHARD.fullmatch(file.path) is not None)}
        last = -(-self._n_samples // self._shard_size) - 1
        shards = [shard for shard in map(_number, files) if shard <= last]
        for shard in shards:
            file = files[_name(shard)]
            if file.problem is None:
                self.support.append(SupportFile(file.path, CONTAINER))
            self.items.extend(self._items(shard, file))
        self._add_missing(set(shards), last)
        self.items.sort(key=lambda item: item.index)
        claimed = {support.path for support in self.support}
        roles = {MANIFEST: "manifest", EMBEDDINGS: "target_embeddings"}
        for file in folder.files:
            if file.path in roles:
                self.support.append(SupportFile(file.path, roles[file.path]))
            elif file.path not in claimed:
                otherwise = f"a shard beyond the {self._n_samples} samples of {MANIFEST}"
                otherwise = otherwise if file.path in files else "no part of the cache"
                self.strays.append(Stray(file.path, stray_reason(file.path, otherwise)))
        self.notes.append(
            "samples begin with their second token and end with their last real one: Automodel stores token ids, masks "
            "and target probabilities one place to the left of the states, so that the first token's id is lost"
        )
        if not set(PROBS) & set(self.options.key_map.ignore):
            self.notes.append(
                f"target probabilities are kept as columns; which tokens they are of is in selected_token_ids of "
                f"{MANIFEST}, which is not converted: keep that file, or leave the columns out with --from automodel "
                "--map ignore=target_probs"
            )

    def _read_manifest(self, manifest: Document) -> None:
        manifest.choice("format_version", (2,))
        self._n_samples = manifest.integer("num_samples", 0, 1 << 40)
        self._shard_size = manifest.integer("shard_size", 1, 1 << 40)
        ids = manifest.integers("aux_layer_ids", 0)
        dim = manifest.integer("aux_hidden_dim", len(ids), len(ids) << 20)
        if dim % len(ids):
            raise manifest.refuse("aux_hidden_dim", f"a multiple of {len(ids)}, the number of aux_layer_ids")
        self._order = np.argsort(ids)
        self._layers = tuple(sorted(i + 1 for i in ids))
        vocab = manifest.integer("draft_vocab_size", 1, 1 << 24)
        topk = manifest.get("target_probs_topk")
        topk = 0 if topk is None else manifest.integer("target_probs_topk", 0, 1 << 24)
        self._fields = Fields(
            length=manifest.integer("seq_length", 2, 1 << 24),
            n_layers=len(ids),
            hidden_size=dim // len(ids),
            dtype=DTYPES[_DTYPES[manifest.choice("dtype", tuple(_DTYPES))]],
            vocab=vocab,
            topk=topk if 0 < topk < vocab else 0,
        )
        model = manifest.get("target_model")
        self._model = model if isinstance(model, str) and model else None
        self._producer = {"source_format": "automodel eagle-3 cache v2", "automodel": manifest.facts(*_FACTS)}

    def _check_embeddings(self, folder: Folder) -> None:
        """Hold the width of a state to that of the target's embeddings: the manifest has only that of all layers."""
        if all(file.path != EMBEDDINGS for file in folder.files):
            return
        entry = read_entries(self.root / EMBEDDINGS, EMBEDDINGS).get("weight")
        shape = [] if entry is None else list(entry.shape)
        if len(shape) != 2 or shape[1] != self._fields.hidden_size:
            n_layers, width = self._fields.n_layers, self._fields.hidden_size
            expected = (
                f"weight [token, {width}]: aux_hidden_dim in {MANIFEST} is {n_layers * width}, of {n_layers} layers"
            )
            raise SourceError.at(EMBEDDINGS, expected=expected, got=f"weight {shape}", remedy=_REMEDY)

    def _count(self, shard: int) -> int:
        return min(self._shard_size, self._n_samples - shard * self._shard_size)

    def _items(self, shard: int, file: SourceFile) -> list[SourceItem]:
        """The samples of a shard that is there; one item alone where they can't all be in it."""
        n, problem = self._count(shard), file.problem
        least = n * self._fields.nbytes
        if problem is None and file.nbytes < least:
            expected = f"at least {least} bytes for {n} samples of {self._fields.nbytes}, as {MANIFEST} says"
            problem = Problem(file.path, expected, f"{file.nbytes} bytes: truncated, or another shard", _RESUME)
        if problem is not None and n > _MAX_MISSING:
            return [self._broken(shard, 0, problem)]
        if problem is not None:
            return [self._broken(shard, i, problem) for i in range(n)]
        first, share = shard * self._shard_size, file.nbytes // n
        rest = file.nbytes - share * n
        return [
            SourceItem(f"{file.path}:{i}", first + i, str(first + i), (), share + (i < rest), shared=(file.path,))
            for i in range(n)
        ]

    def _broken(self, shard: int, i: int, problem: Problem) -> SourceItem:
        number, key = shard * self._shard_size + i, f"{_name(shard)}:{i}"
        return SourceItem(key, number, str(number), (), 0, Problem(key, problem.expected, problem.got, problem.remedy))

    def _add_missing(self, present: set[int], last: int) -> None:
        """Add an item for each sample of the shards that are not there, or one for a great many."""
        n_missing = self._n_samples - sum(map(self._count, present))
        expected = f"a shard: {MANIFEST} has {self._n_samples} samples, {self._shard_size} a shard"
        if n_missing > _MAX_MISSING:
            first = next(shard for shard in range(len(present) + 1) if shard not in present)
            got = f"no such file: {n_missing} samples are missing, of this shard and others"
            self.items.append(self._broken(first, 0, Problem(_name(first), expected, got, _RESUME)))
            return
        for shard in sorted(set(range(last + 1)) - present) if n_missing else ():
            problem = Problem(_name(shard), expected, "no such file", _RESUME)
            self.items.extend(self._broken(shard, i, problem) for i in range(self._count(shard)))

    def _open(self, item: SourceItem) -> tuple[Any, int]:
        shard, row = divmod(item.index, self._shard_size)
        return open_fields(self.root / _name(shard), item.key, self._fields, self._count(shard)), row

    def n_tokens(self, item: SourceItem) -> int | None:
        """Tokens of a sample, by its attention mask."""
        if item.problem is not None:
            return 0
        try:
            shard, row = self._open(item)
            begin, end = real_tokens(shard, row)
        except (SourceError, OSError):
            return 0
        return end - begin - 1

    def _look(self, item: SourceItem) -> SourceMeaning:
        self._open(item)
        n = self.options.model_layers()
        return SourceMeaning(
            hidden_size=self._fields.hidden_size,
            n_layers=self._fields.n_layers,
            dtype=self._fields.dtype.name,
            layers=self._layers,
            layers_from=f"aux_layer_ids in {MANIFEST}, each + 1, in ascending order",
            final_norm="pre" if n == self._layers[-1] else "unknown",
            final_norm_from="Automodel takes its states by hooks on the layers, before the final norm; whether that of "
            "the last layer is among them shows only with --model-config",
            model=self._model,
            producer=self._producer,
            extras=self._fields.extras(self.options.key_map.ignore),
        )

    def _load(self, item: SourceItem) -> SourceSample:
        shard, row = self._open(item)
        return take_sample(shard, row, item.sample_id, self._order, self.options.key_map.ignore)


def _name(shard: int) -> str:
    return f"shard-{shard:06d}.safetensors"


def _number(path: str) -> int:
    match = _SHARD.fullmatch(path)
    assert match is not None
    return int(match[1])
