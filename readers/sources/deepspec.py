"""Source `deepspec`: the target cache, version 2, that deepseek-ai/DeepSpec's prepare_target_cache.py writes.

`manifest.json`, `samples.idx` (see `deepspec_index`) and `shard-{i:05d}.bin`. A sample's tensors are input_ids int32
[T], attention_mask and loss_mask uint8 [T], target_hidden_states [T, A*H] and target_last_hidden_states [T, H]. The
first are the outputs of the layers `target_layer_ids` (HF index id + 1; -1 is the embedding, 0), the last one is
the model's last hidden state, after its final norm. How many layers the model has is not recorded.

An attention mask with zeros at its end marks padding, which DeepSpec itself never stores: it is kept, and counted in
the sample's metadata.

Sample id: the record's sample_id in decimal, or what `hsfmt_samples.jsonl` says of that number. `source_index` is the
number.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

import ml_dtypes
import numpy as np

from hsfmt.errors import Problem, SourceError, UsageError
from hsfmt.readers.sources import columns
from hsfmt.readers.sources.base import CONTAINER, Claim, Source, SourceItem, SourceSample, Stray, SupportFile
from hsfmt.readers.sources.deepspec_index import INDEX, RECORD, TENSORS, Shard, find_problems
from hsfmt.readers.sources.file_stamp import FileStamp
from hsfmt.readers.sources.json_document import Document, parse_object, read_file
from hsfmt.readers.sources.meaning import FP8_SCALING, SourceMeaning
from hsfmt.readers.sources.safetensors_file import TensorEntry, read_tensor
from hsfmt.readers.sources.sample_names import stray_reason

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hsfmt.readers.sources.folder import Folder
    from hsfmt.readers.sources.look import Look

MANIFEST = "manifest.json"
_DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,250}")
_MANIFEST_NBYTES = 4 << 20
_INDEX_NBYTES = 1 << 30
_FACTS = (
    *("chat_template", "exp_name", "git_sha", "max_length", "min_loss_tokens", "project_name", "source_jsonl_paths"),
    "target_layer_ids",
)
_REMEDY = "give the folder that prepare_target_cache.py made, whole"


class DeepSpecSource(Source):
    """A target cache of DeepSpec."""

    name: ClassVar[str] = "deepspec"
    summary: ClassVar[str] = "DeepSpec target cache v2: manifest.json, samples.idx and shard-{i}.bin"
    numbered: ClassVar[bool] = True

    @classmethod
    def claim(cls, look: Look) -> Claim | None:
        """Take a folder with samples.idx, and a manifest that is DeepSpec's or can't be read at all."""
        if INDEX not in look.names or MANIFEST not in look.names:
            return None
        document = look.document(MANIFEST)
        if isinstance(document, dict) and not {"index_record_size", "target_layer_ids"} & set(document):
            return None
        return Claim(f"{MANIFEST} with {INDEX}", certain=True)

    def _list(self, folder: Folder) -> None:
        manifest = parse_object(read_file(folder, MANIFEST, _MANIFEST_NBYTES, _REMEDY), MANIFEST)
        self._read_manifest(manifest)
        self._shards = _shards(manifest, folder)
        self._records = self._read_index(manifest, folder)
        problems = find_problems(self._records, self._shards, self._widths)
        present = {file.path for file in folder.files}
        row = int(self._widths.sum())
        places = zip(self._records["shard"].tolist(), self._records["n_tokens"].tolist(), strict=True)
        for number, (shard, n_tokens) in enumerate(places):
            name = self._shards[shard].name if shard < len(self._shards) else INDEX
            problem = problems.get(number)
            shared = (name,) if name in present and name != INDEX else ()
            nbytes = n_tokens * row if problem is None else 0
            self.items.append(SourceItem(f"{name}:{number}", number, str(number), (), nbytes, problem, shared=shared))
        self._place_files(folder)
        for shard in np.setdiff1d(np.arange(len(self._shards)), self._records["shard"]).tolist():
            name, nbytes = self._shards[shard].name, self._shards[shard].nbytes
            self.notes.append(f"{name} is of {nbytes} bytes, and {INDEX} has no sample in it")

    def _read_manifest(self, manifest: Document) -> None:
        manifest.choice("version", (2,))
        manifest.choice("index_record_size", (RECORD.itemsize,))
        manifest.choice("token_dtype", ("int32",))
        manifest.choice("mask_dtype", ("uint8",))
        self._dtype = _DTYPES[manifest.choice("hidden_dtype", tuple(_DTYPES))]
        self._hidden_size = manifest.integer("hidden_size", 1, 1 << 20)
        ids = manifest.integers("target_layer_ids", -1)
        if ids != sorted(ids):
            raise manifest.refuse("target_layer_ids", "ascending layer ids")
        self._aux_layers = tuple(i + 1 for i in ids)
        model = manifest.get("target_model_name_or_path")
        self._model = model if isinstance(model, str) and model else None
        self._producer = {"source_format": "deepspec target cache v2", "deepspec": manifest.facts(*_FACTS)}
        state = self._hidden_size * self._dtype.itemsize
        self._widths = np.array([4, 1, 1, len(ids) * state, state], np.uint64)

    def _read_index(self, manifest: Document, folder: Folder) -> NDArray[Any]:
        n_samples = manifest.integer("num_samples")
        data = read_file(folder, INDEX, _INDEX_NBYTES, _REMEDY)
        if len(data) != n_samples * RECORD.itemsize:
            expected = f"{n_samples * RECORD.itemsize} bytes: {n_samples} records, as {MANIFEST} says"
            raise SourceError.at(INDEX, expected=expected, got=f"{len(data)} bytes", remedy=_REMEDY)
        nbytes = sum(shard.nbytes for shard in self._shards)
        if all(shard.problem is None for shard in self._shards) and n_samples * int(self._widths.sum()) > nbytes:
            # Records of nothing would otherwise cost more memory than they take on disk.
            expected = f"at most {nbytes // int(self._widths.sum())} samples in shards of {nbytes} bytes"
            raise SourceError.at(INDEX, expected=expected, got=str(n_samples), remedy=_REMEDY)
        return np.frombuffer(data, RECORD)

    def _place_files(self, folder: Folder) -> None:
        names = {shard.name for shard in self._shards}
        roles = {MANIFEST: "manifest", INDEX: "index", **dict.fromkeys(names, CONTAINER)}
        for file in folder.files:
            if file.path in roles:
                self.support.append(SupportFile(file.path, roles[file.path]))
            else:
                self.strays.append(Stray(file.path, stray_reason(file.path, f"not named by {MANIFEST}")))

    def _sample_number(self, item: SourceItem) -> int | None:
        return item.index

    def _count_samples(self) -> int | None:
        return len(self._records)

    def n_tokens(self, item: SourceItem) -> int | None:
        """Tokens of a sample, from the index."""
        return 0 if item.problem is not None else int(self._records["n_tokens"][item.index])

    def _look(self, item: SourceItem) -> SourceMeaning:
        del item
        known = ",".join(map(str, self._aux_layers))
        return SourceMeaning(
            hidden_size=self._hidden_size,
            n_layers=len(self._aux_layers) + 1,
            dtype=self._dtype.name,
            layers=self._layers(),
            layers_from=f"target_layer_ids in {MANIFEST}, each + 1 ({known}), then the number of the model's layers, "
            "which the cache does not record: give its config.json with --model-config, or all ids with --layer-ids",
            final_norm="post",
            final_norm_from="DeepSpec stores transformers' last_hidden_state, which is after the final norm",
            scaling=FP8_SCALING if self._dtype.itemsize == 1 else None,
            model=self._model,
            producer=self._producer,
        )

    def _layers(self) -> tuple[int, ...] | None:
        known, given, n = self._aux_layers, self.options.layer_ids, self.options.model_layers()
        if given is not None and given[: len(known)] != known:
            raise UsageError.at(
                "--layer-ids",
                expected=f"{','.join(map(str, known))},N: target_layer_ids in {MANIFEST}, each + 1, and N layers",
                got=",".join(map(str, given)),
                remedy="leave it out and give the model's config.json with --model-config",
            )
        last = n if n is not None else given[len(known)] if given is not None and len(given) == len(known) + 1 else None
        if last is not None and last <= known[-1]:
            raise UsageError.at(
                f"{MANIFEST}[target_layer_ids]",
                expected=f"layers before the last one of {last}, whose state after the norm is stored too",
                got=f"{known[-1] - 1}, that is HF layer {known[-1]}",
                remedy="one dataset can't hold the last state twice, before and after the norm"
                if last == known[-1]
                else "give the config of the model that made the states",
            )
        return None if last is None else (*known, last)

    def _load(self, item: SourceItem) -> SourceSample:
        record = self._records[item.index]
        shard = self._shards[int(record["shard"])]
        path = self.root / shard.name
        stamp = FileStamp.take(path, item.key)
        if stamp.nbytes != shard.nbytes:
            expected = f"{shard.name} of {shard.nbytes} bytes, as when the folder was listed"
            raise SourceError.at(item.key, expected=expected, got=f"{stamp.nbytes} bytes")
        n_tokens, n_aux, width = int(record["n_tokens"]), len(self._aux_layers), self._hidden_size
        shapes = (n_tokens,), (n_tokens,), (n_tokens,), (n_tokens, n_aux, width), (n_tokens, width)
        dtypes: list[np.dtype[Any]] = [np.dtype("<i4"), np.dtype("u1"), np.dtype("u1"), self._dtype, self._dtype]
        ids, attention, loss, aux, last = (
            read_tensor(path, TensorEntry(dtype, shape, int(offset)), item.key)
            for dtype, shape, offset in zip(dtypes, shapes, record["offsets"], strict=True)
        )
        stamp.check_unchanged()
        states = np.empty((n_tokens, n_aux + 1, width), self._dtype)
        states[:, :-1] = aux
        states[:, -1] = last
        where = {name: f"{item.key}[{name}]" for name in TENSORS}
        sample = SourceSample(
            item.sample_id,
            _token_ids(ids, where["input_ids"]),
            states,
            columns.loss_mask(loss, n_tokens, where["loss_mask"]),
            _padding(attention, where["attention_mask"]),
        )
        if self._dtype.itemsize == 1:
            # The cache has no scales: its values are what they are.
            sample.extras[FP8_SCALING["column"]] = np.ones(n_tokens, np.float32)
        return sample


def _token_ids(values: NDArray[Any], where: str) -> NDArray[np.int64]:
    ids = columns.token_ids(values, where)
    if ids.min() < 0:
        first = int((ids < 0).argmax())
        raise SourceError.at(where, expected="token ids from 0 on", got=f"{ids[first]} at token {first}")
    return ids


def _padding(values: NDArray[Any], where: str) -> dict[str, Any]:
    mask = columns.loss_mask(values, len(values), where)
    n_real = int(mask.sum())
    if not mask[:n_real].all() or not n_real:
        first = int(mask.argmin())
        raise SourceError.at(
            where,
            expected="ones, then the zeros of padding",
            got=f"{len(mask) - n_real} zeros in {len(mask)} tokens, the first at token {first}",
            remedy="rows that were padded on the left are cut wrongly by DeepSpec: prepare the cache again",
        )
    return {"padded_tokens": len(mask) - n_real} if n_real < len(mask) else {}


def _shards(manifest: Document, folder: Folder) -> list[Shard]:
    """The shards that the manifest names, in its order."""
    entries = manifest.get("shards")
    if not isinstance(entries, list) or len(entries) != manifest.integer("num_shards", 0, 1 << 20):
        raise manifest.refuse("shards", f"a list of the {manifest.get('num_shards')} shards of num_shards")
    sizes = {file.path: file.nbytes for file in folder.files}
    broken = {file.path: file.problem for file in folder.broken}
    shards: list[Shard] = []
    for number, entry in enumerate(entries):
        name = entry.get("file_name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not _SHARD.fullmatch(name) or entry.get("shard_id") != number:
            got = repr(entry)[:120]
            raise SourceError.at(f"{MANIFEST}[shards][{number}]", expected=f"shard_id {number}, a file name", got=got)
        missing = Problem(name, f"the shard that {MANIFEST} names", "no such file", "copy the cache again, whole")
        problem = None if name in sizes else broken.get(name) or missing
        shards.append(Shard(name, sizes.get(name, 0), problem))
    names = [shard.name for shard in shards]
    if len(set(names)) != len(names):
        raise manifest.refuse("shards", "each file once")
    return shards
