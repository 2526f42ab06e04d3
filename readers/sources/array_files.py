"""Folders of files with one sample's arrays each, in whatever container: read as the `pt` source reads its dicts.

A file that hsfmt wrote (`hsfmt cat -o`, `hsfmt export`) says itself what its states are, and keeps its sample's id. Of
any other file, the sample id is the path below the folder without its extension; two files of one id are both refused.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from hsfmt.errors import Problem, SourceError
from hsfmt.readers.sources.array_record import make_record, parse_attributes, split_map
from hsfmt.readers.sources.base import Claim, SourceItem, SourceSample, Stray, SupportFile
from hsfmt.readers.sources.exported_sample import exported_meaning, exported_sample
from hsfmt.readers.sources.folder import file_items
from hsfmt.readers.sources.generic_pt import GenericPtSource
from hsfmt.readers.sources.sample_names import SIDE_FILES, stray_reason

if TYPE_CHECKING:
    from pathlib import Path

    from hsfmt.readers.sources.array_record import ArrayFile
    from hsfmt.readers.sources.folder import Folder
    from hsfmt.readers.sources.look import Look
    from hsfmt.readers.sources.meaning import SourceMeaning
    from hsfmt.readers.sources.torch_record import Record

_PEEKS = 16
_CHOICES = "--map hidden_states=KEY (or aux=KEY,last=KEY) --layer-ids IDS --final-norm NORM"
_NO_STATES = frozenset({"input_ids", "token_ids", "loss_mask", "attention_mask", "position_ids"})


class ArrayFilesSource(GenericPtSource):
    """A folder of such files; subclasses read their container."""

    suffix: ClassVar[str]
    # Key sets that another source reads, and claims.
    foreign_keys: ClassVar[frozenset[frozenset[str]]] = frozenset()
    _exported = False

    @staticmethod
    @abstractmethod
    def shapes(path: Path, where: str) -> tuple[dict[str, tuple[int, ...]], str | None]:
        """Read the header alone: the arrays' shapes, and the text that hsfmt noted, if any."""

    @staticmethod
    @abstractmethod
    def read(path: Path, where: str, ignore: tuple[str, ...]) -> tuple[ArrayFile, dict[str, str]]:
        """Read a file but for the arrays to ignore, and the types of those that hold bit patterns."""

    @classmethod
    def claim(cls, look: Look) -> Claim | None:
        """Claim a folder for what its first readable file shows."""
        paths = [path for path in look.names if path.endswith(cls.suffix)]
        for path in paths[:_PEEKS]:
            try:
                look.folder.check(path)
                shapes, attributes = cls.shapes(look.folder.root / path, path)
            except (SourceError, OSError) as error:
                look.problems.extend(getattr(error, "problems", ()))
                continue
            return cls._claim(path, shapes, attributes)
        return None

    @classmethod
    def _claim(cls, path: str, shapes: dict[str, tuple[int, ...]], attributes: str | None) -> Claim | None:
        evidence = f"{path} with {', '.join(f'{name} {list(shape)}' for name, shape in sorted(shapes.items()))}"
        if attributes is not None:
            return Claim(f"{path}, which hsfmt wrote", certain=True)
        keys = frozenset(shapes)
        if keys in cls.foreign_keys:
            return None
        states = keys - _NO_STATES
        ids = shapes.get("input_ids", shapes.get("token_ids"))
        if ids is not None and states == {"hidden_states"} and len(shapes["hidden_states"]) >= 3:
            n_rows = ids[0] if len(ids) == 2 else 1
            return Claim(evidence, certain=n_rows == 1, options="--layer-ids IDS --final-norm NORM")
        return Claim(evidence, certain=False, options=_CHOICES)

    def _list(self, folder: Folder) -> None:
        self._roles = self._orientation = self._ambiguous = None
        key_map, self._types = split_map(self.options.key_map)
        self.options = replace(self.options, key_map=key_map)
        items = file_items(folder.select(lambda file: file.name.endswith(self.suffix)))
        self.items = self._named(items)
        samples = {item.key for item in items}
        for file in folder.files:
            if file.path in samples:
                continue
            if file.name in SIDE_FILES:
                self.support.append(SupportFile(file.path, SIDE_FILES[file.name]))
            else:
                reason = stray_reason(file.path, f"not a {self.suffix} file", samples)
                self.strays.append(Stray(file.path, reason))

    def _named(self, items: list[SourceItem]) -> list[SourceItem]:
        """Give the items of an export the ids that their files note: file names are escaped and cut."""
        if not any(self._noted_id(item) is not None for item in items[:_PEEKS]):
            return items
        ids = [self._noted_id(item) or item.sample_id for item in items]
        claims = Counter(ids)
        named = []
        for item, sample_id in zip(items, ids, strict=True):
            problem = item.problem
            if problem is None and claims[sample_id] > 1:
                got = f"{claims[sample_id]} files that note this id"
                problem = Problem(item.key, f"one file for the sample {sample_id!r}", got, "move all but one away")
            named.append(replace(item, sample_id=sample_id, problem=problem))
        return named

    def _noted_id(self, item: SourceItem) -> str | None:
        if item.problem is not None:
            return None
        try:
            text = self.shapes(self.root / item.key, item.key)[1]
            found = parse_attributes(text, item.key).get("sample_id") if text is not None else None
        except SourceError:
            return None  # as loading it says
        return found if isinstance(found, str) else None

    def _look(self, item: SourceItem) -> SourceMeaning:
        file, types = self._open(item)
        if file.attributes is None or self._is_mapped:
            return super()._look(item)
        meaning = exported_meaning(file, types, self._producer(file))
        self._exported = True
        ignored = self.options.key_map.ignore
        return replace(meaning, extras={name: extra for name, extra in meaning.extras.items() if name not in ignored})

    def _load(self, item: SourceItem) -> SourceSample:
        meaning = self.meaning()
        if not self._exported:
            return super()._load(item)
        file, types = self._open(item)
        return exported_sample(file, types, meaning, item.sample_id)

    @property
    def _is_mapped(self) -> bool:
        """Whether the user says what the entries are, whatever hsfmt noted."""
        key_map = self.options.key_map
        return key_map.states or key_map.input_ids is not None or key_map.loss_mask is not None

    def _producer(self, file: ArrayFile) -> dict[str, Any]:
        noted = file.attributes or {}
        facts = {name: noted[name] for name in ("snapshot", "tokenizer") if noted.get(name)}
        return {"source_format": f"{self.name}, written by hsfmt", **facts}

    def _open(self, item: SourceItem) -> tuple[ArrayFile, dict[str, str]]:
        file, types = self.read(self.root / item.key, item.key, self.options.key_map.ignore)
        return file, {**types, **self._types}

    def _record(self, item: SourceItem) -> Record:
        file, types = self._open(item)
        if file.attributes is not None and self._meaning is not None and not self._is_mapped:
            raise SourceError.at(
                item.key,
                expected="a file of another program, as the source's first readable file is",
                got="one that hsfmt wrote",
                remedy="convert each kind from a folder of its own",
            )
        return make_record(file, types, self.options.key_map)
