"""What the sources share whose files are each a torch dict of one sample, by the keys that one program writes.

A subclass says which keys they are, which layers and norm the program means, and when a folder is its own.

Sample id: the file's path below the folder without its extensions. Where a file can hold a batch of more than one, its
samples are `{path}/{number in the batch}`. Where the program numbers its files data_{i}, `hsfmt_samples.jsonl` may say
the id of each number.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from hsfmt.errors import Problem, SourceError, UsageError
from hsfmt.readers.sources.base import CONTAINER, Claim, Source, SourceItem, SourceSample, Stray, SupportFile
from hsfmt.readers.sources.folder import file_items
from hsfmt.readers.sources.meaning import SourceMeaning
from hsfmt.readers.sources.numbering import numbering_notes
from hsfmt.readers.sources.sample_names import SIDE_FILES, TORCH_SUFFIXES, is_torch_name, stray_reason
from hsfmt.readers.sources.twins import load_with_twin, twin_notes

if TYPE_CHECKING:
    from hsfmt.readers.sources.folder import Folder
    from hsfmt.readers.sources.look import Look
    from hsfmt.readers.sources.options import KeyMap
    from hsfmt.readers.sources.torch_columns import FurtherColumns
    from hsfmt.readers.sources.torch_record import Record

_VOCAB_FOLDER = "vocab_mapping"
_DATA = re.compile(r"(?:.*/)?data_(0|[1-9][0-9]{0,11})\.(?:ckpt|pt)(?:\.gz)?")


class TorchDictSource(Source):
    """A folder of torch dicts with one key set.

    Attributes
    ----------
    roles
        The key sets of all known ages of the format.
    columns
        Keys of further columns that the program may write.
    program
        What messages and the producer call it.
    layers_from, default_layers
        Where the layer ids are to be found, and which they are unless the program was told otherwise: terms in n.
    final_norm, final_norm_from
        What the format fixes of the last state, and why.
    has_batches
        A file may hold more than one sample, on a first axis.
    """

    program: ClassVar[str]
    roles: ClassVar[tuple[KeyMap, ...]]
    columns: ClassVar[tuple[str, ...]] = ()
    layers_from: ClassVar[str]
    default_layers: ClassVar[str]
    final_norm: ClassVar[str]
    final_norm_from: ClassVar[str]
    has_batches: ClassVar[bool] = False

    @classmethod
    def claim(cls, look: Look) -> Claim | None:
        """Claim the folder if one of the first samples is of this source."""
        claims = [claim for record in look.samples if (claim := cls.claim_record(record)) is not None]
        return claims[0] if claims else None

    @classmethod
    def claim_record(cls, record: Record) -> Claim | None:
        """Say whether a record is of this source."""
        raise NotImplementedError

    @classmethod
    def claim_keys(cls, record: Record, *, certain: bool = True, how: str = "") -> Claim | None:
        """The claim of a record that has the keys, `how` being what else shows it; None if it does not have them."""
        from hsfmt.readers.sources.key_sets import describe

        if cls.roles_of(record) is None:
            return None
        evidence = f"{record.where} with {describe(record)}" + (f"; {how}" if how else "")
        return Claim(evidence, certain, f"--layer-ids {cls.default_layers}")

    @classmethod
    def roles_of(cls, record: Record, ignore: tuple[str, ...] = ()) -> KeyMap | None:
        """The roles whose keys are those of the record's states, without the ignored ones; None if there are none."""
        from hsfmt.readers.sources.key_sets import state_keys

        keys = state_keys(record) - set(cls.columns) - set(ignore)
        return next((roles for roles in cls.roles if keys == _keys(roles)), None)

    def _list(self, folder: Folder) -> None:
        if self.options.key_map.states or self.options.key_map.input_ids is not None:
            remedy = "leave all but ignore=KEY out of --map, or read the files with --from pt"
            raise UsageError.at("--map", expected=f"the keys of source {self.name!r}", got="others", remedy=remedy)
        from hsfmt.readers.sources.torch_containers import TorchContainers

        self._state: Any = None
        self._sizes: dict[str, int] = {}
        self._containers = TorchContainers()
        files = file_items(folder.select(lambda file: is_torch_name(file.name) and not _in_vocab_folder(file.path)))
        samples = {path for item in files for path in item.paths}
        for file in folder.files:
            if file.path in samples:
                continue
            role = _VOCAB_FOLDER if _in_vocab_folder(file.path) else SIDE_FILES.get(file.name)
            if role is not None:
                self.support.append(SupportFile(file.path, role))
            else:
                otherwise = f"not a {', '.join(TORCH_SUFFIXES)} file"
                self.strays.append(Stray(file.path, stray_reason(file.path, otherwise, samples)))
        self.notes.extend(twin_notes(files))
        self.notes.extend(numbering_notes((item.key for item in files), self.root.resolve().name))
        self.items = self._split_batches(files) if self.has_batches else files

    def _sample_number(self, item: SourceItem) -> int | None:
        match = _DATA.fullmatch(item.key)
        return int(match[1]) if match and not item.shared else None

    def _split_batches(self, files: list[SourceItem]) -> list[SourceItem]:
        """Make an item of each sample in a batch. The first file and the largest tell whether there are batches."""
        likely = {item.key: item for item in (*files[:1], *sorted(files, key=lambda item: -item.nbytes)[:1])}
        sizes = {key: self._batch_size(item) for key, item in likely.items()}
        if max(sizes.values(), default=1) <= 1:
            return files
        items: list[SourceItem] = []
        for item in files:
            size = sizes[item.key] if item.key in sizes else self._batch_size(item)
            if size <= 1:
                items.append(replace(item, index=len(items)))
                continue
            self._sizes[item.key] = size
            self.support.extend(SupportFile(path, CONTAINER) for path in item.paths)
            for row in range(size):
                nbytes = item.nbytes // size + (item.nbytes % size if row == 0 else 0)
                sample_id = f"{item.sample_id}/{row}"
                key = f"{item.key}:{row}"
                items.append(SourceItem(key, len(items), sample_id, (), nbytes, item.problem, shared=item.paths))
        return _refuse_same_ids(items)

    def _batch_size(self, item: SourceItem) -> int:
        from hsfmt.readers.sources.torch_batches import batch_size
        from hsfmt.readers.sources.torch_containers import map_torch_file
        from hsfmt.readers.sources.torch_file import read_torch_file
        from hsfmt.readers.sources.torch_record import as_record

        if item.problem is not None:
            return 1
        try:
            path = self.root / item.key
            return batch_size(as_record(map_torch_file(path, item.key) or read_torch_file(path, item.key)))
        except SourceError:
            return 1

    def _look(self, item: SourceItem) -> SourceMeaning:
        from hsfmt.readers.sources import torch_columns, torch_record

        record = self._record(item, (item.paths or item.shared)[0])
        roles = self._roles(record)
        n_tokens = len(torch_record.token_ids(record, roles))
        width = torch_record.check_width(record, roles, n_tokens, self.options.state_width())
        blocks = torch_record.state_blocks(record, roles, n_tokens, hidden_size=width)
        self._state = self._state_of(record)
        sample = torch_record.read_sample(record, roles, item.sample_id, blocks[0].shape[2], further=self._further())
        keys = [roles.hidden_states] if roles.hidden_states else [roles.aux, roles.last]
        layers, layers_from = self._layers(roles)
        return SourceMeaning(
            hidden_size=blocks[0].shape[2],
            n_layers=sum(block.shape[1] for block in blocks),
            dtype=str(blocks[0].dtype).removeprefix("torch."),
            layers=layers,
            layers_from=layers_from,
            final_norm=self.final_norm,
            final_norm_from=self.final_norm_from,
            producer={"source_format": self.program, "source_keys": [key for key in keys if key]},
            extras={name: torch_columns.declared(column) for name, column in sorted(sample.extras.items())},
        )

    def _layers(self, roles: KeyMap) -> tuple[tuple[int, ...] | None, str]:
        """The layer ids, where the format fixes them, and where they are from or to be found."""
        n = self.options.model_layers()
        if roles.aux is None and roles.hidden_states is None:
            known = f"{self.program} with these keys stores the state after the last layer alone: n of a model of n"
            return None if n is None else (n,), known
        return None, self.layers_from

    def _load(self, item: SourceItem) -> SourceSample:
        paths = item.paths or item.shared
        return load_with_twin(replace(item, paths=paths), lambda path: self._read(item, path))

    def _read(self, item: SourceItem, path: str) -> SourceSample:
        from hsfmt.readers.sources.torch_record import read_sample

        meaning = self.meaning()
        record = self._record(item, path)
        roles = self._roles(record)
        self._check_state(record)
        sample = read_sample(record, roles, item.sample_id, meaning.hidden_size, further=self._further())
        _check_columns(meaning, sample, path)
        return sample

    def _record(self, item: SourceItem, path: str) -> Record:
        """Load a file, of a batch only the item's row."""
        from hsfmt.readers.sources.torch_batches import batch_size, take_row
        from hsfmt.readers.sources.torch_record import as_record, load_record

        if item.shared:
            record = as_record(self._containers.load(self.root / path, path))
        else:
            record = load_record(self.root / path, path)
        if not self.has_batches:
            return record
        size = batch_size(record)
        self._check_size(item, path, size)
        return take_row(record, int(item.sample_id.rpartition("/")[2]), size) if item.shared else record

    def _check_size(self, item: SourceItem, path: str, size: int) -> None:
        """Refuse a file with another number of samples than was listed: some would be of no item, and lost."""
        first = (item.paths or item.shared)[0]
        listed = self._sizes.get(first, 1)
        if size == listed:
            return
        if path != first:
            since, remedy = f"in {first}, its twin", "move away the one that is not wanted, or rename it"
        elif self._sizes:
            since, remedy = "when the folder was listed", "convert when the program that writes it is done"
        else:
            since, remedy = "in the first and the largest file", "convert files with batches from a folder of their own"
        expected = f"{'one sample' if listed == 1 else f'a batch of {listed}'}, as {since}"
        raise SourceError.at(path, expected=expected, got=f"a batch of {size}", remedy=remedy)

    def _roles(self, record: Record) -> KeyMap:
        from hsfmt.readers.sources.key_sets import describe, empty_keys

        ignore = (*self.options.key_map.ignore, *empty_keys(record))
        roles = self.roles_of(record, ignore)
        if roles is None:
            wanted = " or ".join(", ".join(sorted(_keys(roles))) for roles in self.roles)
            raise SourceError.at(
                record.where,
                expected=f"states under {wanted}, as {self.program} writes them",
                got=describe(record),
                remedy=self._advice(record, ignore),
            )
        mask = self.options.key_map.loss_mask or ("loss_mask" if "loss_mask" in record.entries else None)
        return replace(roles, input_ids="input_ids", loss_mask=None if mask in ignore else mask, ignore=ignore)

    def _advice(self, record: Record, ignore: tuple[str, ...]) -> str:
        """How to read a record with more keys of states than the source knows."""
        from hsfmt.readers.sources.key_sets import state_keys

        found = state_keys(record) - set(self.columns) - set(ignore)
        others = next((found - _keys(roles) for roles in self.roles if _keys(roles) < found), None)
        if others is None:
            return "convert files of another kind from a folder of their own"
        return f"leave out what is not wanted with --map {','.join(f'ignore={key}' for key in sorted(others))}"

    def _further(self) -> FurtherColumns:
        from hsfmt.readers.sources.torch_columns import FurtherColumns

        return FurtherColumns(self.columns, self.options.loss_weights)

    def _state_of(self, record: Record) -> Any:
        """What all files of a folder have in common beside keys and shapes; None where there is nothing such."""
        del record

    def _check_state(self, record: Record) -> None:
        """Refuse a record that differs in it from the first one."""


def _keys(roles: KeyMap) -> set[str]:
    return {key for key in (roles.hidden_states, roles.aux, roles.last) if key is not None}


def _refuse_same_ids(items: list[SourceItem]) -> list[SourceItem]:
    """Refuse samples of a batch whose id another file has: `x/0` may be the first of `x.ckpt`, or `x/0.ckpt`."""
    claims = Counter(item.sample_id for item in items)
    return [
        replace(
            item, problem=Problem(item.key, "an id of its own", f"{item.sample_id}, as another has", "rename the file")
        )
        if claims[item.sample_id] > 1 and item.problem is None
        else item
        for item in items
    ]


def _in_vocab_folder(path: str) -> bool:
    return path.rpartition("/")[0].rpartition("/")[2] == _VOCAB_FOLDER


def _check_columns(meaning: SourceMeaning, sample: SourceSample, path: str) -> None:
    """Refuse columns that the first readable file does not have, or has otherwise; one that is absent is null."""
    from hsfmt.readers.sources.torch_columns import declared

    problems = []
    for name, column in sample.extras.items():
        wanted, found = meaning.extras.get(name), declared(column)
        if found != wanted:
            expected = f"{_words(wanted)} as in the source's first readable file"
            remedy = f"leave the column out with --map ignore={name}, or convert each kind from a folder of its own"
            problems.append(Problem(f"{path}[{name}]", expected, _words(found), remedy))
    if problems:
        raise SourceError(problems)


def _words(column: dict[str, Any] | None) -> str:
    return (
        "no such entry" if column is None else f"{column['dtype']} [token{''.join(f', {n}' for n in column['shape'])}]"
    )
