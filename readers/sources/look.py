"""A first look into a folder, shared by all sources that may claim it: names, small documents, the first dicts."""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hsfmt.errors import Problem, SourceError
from hsfmt.readers.sources.sample_names import is_torch_name

if TYPE_CHECKING:
    from hsfmt.readers.sources.folder import Folder
    from hsfmt.readers.sources.torch_record import Record

_PEEKS = 16
_DOCUMENT_NBYTES = 16 << 20


class Look:
    """What a folder shows at a first look; each thing is read once, when a source asks for it.

    Parameters
    ----------
    folder
        The listed folder.

    Attributes
    ----------
    names
        Paths of all its files, in natural order, those that can't be read among them.
    problems
        What was wrong with the files that were looked into.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.names = tuple(file.path for file in (*folder.files, *folder.broken))
        self.problems: list[Problem] = []
        self._documents: dict[str, Any] = {}

    @cached_property
    def torch_names(self) -> tuple[str, ...]:
        """Paths of the files that are samples of torch.save by their names."""
        return tuple(path for path in self.names if is_torch_name(path.rpartition("/")[2]))

    @cached_property
    def records(self) -> tuple[Record, ...]:
        """The dicts of the first torch files that can be read, of 16 at most: 2 with token ids and 2 without."""
        from hsfmt.readers.sources.key_sets import has_ids
        from hsfmt.readers.sources.torch_record import load_record

        found: list[Record] = []
        for path in self.torch_names[:_PEEKS]:
            try:
                self.folder.check(path)
                record = load_record(self.folder.root / path, path)
            except SourceError as error:
                self.problems.extend(error.problems)
                continue
            alike = sum(has_ids(other) == has_ids(record) for other in found)
            if alike < 2:
                found.append(record)
            if alike == 1 and has_ids(record):
                break
        return tuple(found)

    @cached_property
    def samples(self) -> tuple[Record, ...]:
        """Those of `records` that have token ids."""
        if not self.torch_names:
            return ()
        from hsfmt.readers.sources.key_sets import has_ids

        return tuple(filter(has_ids, self.records))

    def document(self, path: str) -> Any:
        """The JSON value in a file of at most 16 MiB; None where there is no such file, or no JSON in it."""
        if path not in self._documents:
            self._documents[path] = self._read(path)
        return self._documents[path]

    def _read(self, path: str) -> Any:
        sizes = {file.path: file.nbytes for file in self.folder.files}
        if sizes.get(path, _DOCUMENT_NBYTES + 1) > _DOCUMENT_NBYTES:
            return None
        try:
            with (self.folder.root / path).open("rb") as file:
                return json.loads(file.read(_DOCUMENT_NBYTES))
        except (ValueError, RecursionError):
            return None
