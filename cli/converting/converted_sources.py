"""Sources of which `--delete-source` deleted files already: what they were is known from the dataset that has them."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from hsfmt.catalog import committed_parts, load_index, load_manifest, read_header, superseded_parts
from hsfmt.cli import units
from hsfmt.cli.converting.committed_copies import Origin
from hsfmt.cli.converting.deletion import has_files, stamps
from hsfmt.cli.converting.reshaping import split_of
from hsfmt.errors import HsfmtError, NotFoundError, SourceError, UsageError
from hsfmt.header import Header
from hsfmt.index import PartIndex
from hsfmt.manifest import PartManifest
from hsfmt.readers.sources import (
    Source,
    SourceItem,
    SourceMeaning,
    SourceOptions,
    SourceSample,
    Stray,
    find_source,
)
from hsfmt.readers.sources.detection import source_class
from hsfmt.readers.sources.folder import Folder
from hsfmt.readers.sources.listing import list_folder
from hsfmt.storage import Store

DELETES = "delete_source"
# What a sample's source has behind the path of the file that holds it among others: shard-0.pt:3, data.arrow[3].
_CONTAINED = re.compile(r"(:[0-9]+|\[[0-9]+\])$")


@dataclass(frozen=True, slots=True)
class Opened:
    """A source, and what its data means.

    Attributes
    ----------
    header
        The dataset's header, where the meaning is from there because no file shows it any more.
    """

    source: Source
    meaning: SourceMeaning
    header: Header | None = None


def open_source(
    src: str, name: str | None, options: SourceOptions, store: Store | None, *, deletes: bool = False
) -> Opened:
    """Open a source and find out what its data means.

    Parameters
    ----------
    src, name, options
        As `find_source` takes them.
    store
        The dataset that files of the source are deleted for; None if they never are.
    deletes
        Whether this run deletes files, as one of before may have done with those of samples that were there already.

    Raises
    ------
    UsageError, NotFoundError, SourceError, StorageError
        The source is not understood, and the dataset does not say that it was converted before.
    """
    try:
        source = find_source(src, name, options=options)
        return Opened(source, source.meaning())
    except (UsageError, NotFoundError, SourceError):
        found = None if store is None else _reopened(Path(src), name, options, store, deletes=deletes)
        if found is None:
            raise
        return found


def _reopened(src: Path, name: str | None, options: SourceOptions, store: Store, *, deletes: bool) -> Opened | None:
    """Open what is left of a source that was converted into the dataset; None if it was not."""
    try:
        header = read_header(store)
    except HsfmtError:
        return None
    producers = [load_manifest(store, part, header).producer for part in committed_parts(store)]
    own = [producer for producer in producers if _deletes(producer, str(src.resolve()))]
    if not own and deletes:
        # Its parts know nothing of a deletion that came after them; without all samples, files may be gone otherwise.
        own = [producer for producer in producers if _is_of(producer, str(src.resolve()))]
        own = own if own and _n_missing(own, header, store, of=str(src.resolve())) <= 0 else []
    kinds = {str(producer.get("source_kind")) for producer in own}
    if len(kinds) != 1 or name not in (None, *kinds) or not src.is_dir():
        return None
    kind = kinds.pop()
    try:
        listing = list_folder(src)
    except NotFoundError:
        listing = Folder(src, (), (), ())
    try:
        source = source_class(kind)(listing, options)
    except SourceError:
        if not source_class(kind).needs_all_files or _n_missing(producers, header, store) > 0:
            raise
        return Opened(ConvertedSource(listing, options, kind), _meaning(header, kind), header)
    try:
        return Opened(source, source.meaning())
    except (NotFoundError, SourceError):
        meaning = _meaning(header, kind)
        source.assume(meaning)
        # No file shows what it means, so that none of them can be read.
        source.items = [_with_problem(source, item) for item in source.items]
        return Opened(source, meaning, header)


class ConvertedSource(Source):
    """What is left of a folder that was converted, and can't be listed since some of its files are deleted."""

    name = "converted"
    summary = "a folder whose samples are all committed"

    def __init__(self, folder: Folder, options: SourceOptions, kind: str) -> None:
        super().__init__(folder, options)
        self.name = kind  # type: ignore[misc]  # that of the source that it was

    def _list(self, folder: Folder) -> None:
        reason = "left of a folder whose samples are all committed"
        self.strays.extend(Stray(file.path, reason) for file in folder.files)

    def _look(self, item: SourceItem) -> SourceMeaning:
        raise SourceError.at(item.key, expected="a file", got="none")

    def _load(self, item: SourceItem) -> SourceSample:
        raise SourceError.at(item.key, expected="a file", got="none")


def _n_missing(producers: list[Mapping[str, Any]], header: Header, store: Store, *, of: str | None = None) -> int:
    """Return how many samples of the source are not committed, by the number that its first run found.

    With `of`, only those count that were converted from this folder.
    """
    counted = [n for producer in producers if isinstance(n := producer.get("source_items"), int)]
    committed: set[str] = set()
    manifests = [load_manifest(store, part, header) for part in committed_parts(store)]
    superseded = superseded_parts(manifests)
    for manifest in manifests:
        if manifest.part in superseded or not manifest.counts.samples:
            continue
        if of is None or _is_of(manifest.producer, of):
            committed |= _samples(load_index(store, manifest))
    return max(counted, default=1) - len(committed)


def _samples(index: PartIndex) -> set[str]:
    """Return the ids of a part's samples, that of the whole for windows."""
    ids = ((index.sample_id(row), split_of(index.metadata(row))) for row in range(index.n_samples))
    return {sample_id if split is None else sample_id.rpartition("#")[0] for sample_id, split in ids}


def _deletes(producer: Mapping[str, Any], folder: str) -> bool:
    options = producer.get("options")
    deletes = isinstance(options, Mapping) and options.get(DELETES) is True
    return deletes and _is_of(producer, folder)


def _is_of(producer: Mapping[str, Any], folder: str) -> bool:
    return (producer.get("host"), producer.get("source")) == (platform.node(), folder)


def _meaning(header: Header, kind: str) -> SourceMeaning:
    where = "the dataset that the source was converted into"
    return SourceMeaning(
        hidden_size=header.hidden_size,
        n_layers=header.n_layers,
        dtype=header.dtype,
        layers=header.layers,
        layers_from=where,
        final_norm=header.final_norm,
        final_norm_from=where,
        scaling=dict(header.scaling) if header.scaling else None,
        producer={"source_format": kind},
    )


def _with_problem(source: Source, item: SourceItem) -> SourceItem:
    if item.problem is not None:
        return item
    try:
        source.look(item)
    except SourceError as error:
        return replace(item, problem=error.problems[0])
    return item


@dataclass(frozen=True, slots=True)
class DeletedBefore:
    """What runs of before made of a source's files that are gone now.

    Attributes
    ----------
    ids
        Of the samples as they are committed.
    items
        Ids of the source's items that they were made of, where its files go together.
    containers
        The files that held such samples among others.
    notes
        What the user should know.
    """

    ids: list[str]
    items: set[str]
    containers: set[str]
    notes: list[str]

    def explains(self, item: SourceItem) -> bool:
        """Say whether what an item lacks was deleted: what it held is known then."""
        return (
            item.problem is not None
            and not item.paths
            and (item.key in self.containers or item.sample_id in self.items)
        )


def left_over(
    source: Source, explained: list[SourceItem], manifests: Mapping[str, PartManifest], origin: Origin
) -> tuple[list[str], list[str]]:
    """Return (files, parts): what a run left that was killed while it deleted files that go together, all or none.

    Such files hold nothing but samples that are committed, and are older than the run that committed them.
    """
    if not source.needs_all_files or not explained:
        return [], []
    parts = {name: manifest for name, manifest in manifests.items() if _deletes(manifest.producer, origin.folder)}
    started = [str(manifest.producer.get("started")) for manifest in parts.values()]
    first = min(datetime.fromisoformat(text) for text in started).timestamp() if started else 0.0
    needed = {path for item in source.items for path in item.shared}
    seen = stamps(source.root, dict.fromkeys(path for item in explained for path in item.shared))
    return [path for path, stamp in seen.items() if path not in needed and stamp[3] < first * 1e9], list(parts)


def deleted_before(
    store: Store, manifests: Mapping[str, PartManifest], source: Source, origin: Origin
) -> DeletedBefore:
    """Find out what runs of before made of this source's files that are gone now."""
    present = {path for item in source.items for path in item.paths}
    present |= {item.key for item in source.items if has_files(source, item)}
    deleted: dict[str, None] = {}  # conversions at once may have committed an id twice
    items: set[str] = set()
    windows: dict[tuple[str, int], set[int]] = {}
    containers: set[str] = set()
    committed: set[str] = set()
    n_items = 0
    for manifest in manifests.values():
        if not _deletes(manifest.producer, origin.folder) or manifest.producer.get("source_kind") != source.name:
            continue
        counted = manifest.producer.get("source_items")
        n_items = max(n_items, counted if isinstance(counted, int) else 0)
        committed.update(manifest.holes)
        if not manifest.counts.samples:
            continue
        index = load_index(store, manifest)
        committed |= _samples(index)
        for row in range(index.n_samples):
            metadata, sample_id = index.metadata(row), index.sample_id(row)
            path = metadata.get("source")
            if path not in present and not (source.root / str(path)).exists():
                deleted[sample_id] = None
                window = split_of(metadata)
                if window is None:
                    items.add(sample_id)
                else:
                    windows.setdefault((sample_id.rpartition("#")[0], window[1]), set()).add(window[0])
                container, n_stripped = _CONTAINED.subn("", str(path))
                containers.update([container] * n_stripped)
    notes = []
    if deleted:
        notes.append(f"the files of {units.counted(len(deleted), 'sample')} were deleted once they were committed")
    gone = n_items - len(committed | {item.sample_id for item in source.items})
    if gone > 0:
        notes.append(
            f"the first run found {units.counted(n_items, 'sample')} here: {gone:,} of them are neither in the dataset "
            "nor in the folder now, and were not removed by hsfmt"
        )
    items |= {whole for (whole, n_windows), found in windows.items() if len(found) == n_windows}
    return DeletedBefore(list(deleted), items if source.needs_all_files else set(), containers, notes)
