"""What a conversion is asked for, and what it finds at its source and destination. Nothing is written here."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt import attachments
from hsfmt.catalog import committed_parts, find_dataset, load_manifest, read_pointer
from hsfmt.cli import units
from hsfmt.cli.converting.committed_copies import Copies, Origin, check_windows, find_copies
from hsfmt.cli.converting.converted_sources import Opened, deleted_before, left_over, open_source
from hsfmt.cli.converting.deletion import Stamp, all_stamps, check_deletable, has_files
from hsfmt.cli.converting.reshaping import Reshaping, check_cast, check_split
from hsfmt.cli.converting.retracted_items import retracted_items
from hsfmt.cli.storage_options import open_place
from hsfmt.errors import HeaderMismatchError, SampleError, UsageError
from hsfmt.header import Header, make_header
from hsfmt.manifest import PartManifest
from hsfmt.readers.sources import (
    Source,
    SourceItem,
    SourceMeaning,
    SourceOptions,
    settle_final_norm,
    settle_layers,
)
from hsfmt.readers.sources.vocabulary import read_vocabulary
from hsfmt.root import header_of_manifests
from hsfmt.storage import Store
from hsfmt.stored_snapshots import read_current
from hsfmt.writers.samples import check_id

GIB = 1 << 30
PART_NBYTES = 32 * GIB
# One shard: what a worker takes on the disk beside the files that it will delete.
DELETING_PART_NBYTES = 4 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for; the names are those of the command's options.

    Attributes
    ----------
    src, dst
        Folder of the source, and the dataset.
    from_
        Name of the source format, or None to find it.
    options
        What the source needs to know.
    part_nbytes
        None for the default.
    memory_nbytes
        What the samples that are in memory at once may take together, None for any size.
    reshaping
        What is to be changed about the samples.
    storage_options
        For the dataset's URL.
    """

    src: str
    dst: str
    from_: str | None = None
    options: SourceOptions = field(default_factory=SourceOptions)
    final_norm: str | None = None
    model: str | None = None
    tokenizer: str | None = None
    id_prefix: str | None = None
    codec: str = "zstd"
    part_nbytes: int | None = None
    memory_nbytes: int | None = None
    reshaping: Reshaping = field(default_factory=Reshaping)
    delete_source: bool = False
    workers: int = 1
    resume: bool = True
    dry_run: bool = False
    force: bool = False
    on_bad: str = "raise"
    nonfinite: str | None = None
    seal: bool = True
    expect: int | None = None
    command: Sequence[str] = ()
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def part_size(self) -> int:
        """Raw bytes of a part."""
        return self.part_nbytes or (DELETING_PART_NBYTES if self.delete_source else PART_NBYTES)


@dataclass(slots=True)
class Plan:
    """A conversion about to run: what is where, and which items are to be read.

    Attributes
    ----------
    existing
        The dataset's header, None where there is no dataset yet.
    manifests
        Of all parts that are committed.
    started
        Before the source was listed.
    origin
        Where the source is and how it is read.
    copies
        What is committed under the ids of the items.
    pending
        Numbers of the items whose id is not committed.
    compared
        Numbers of the items that are committed and read all the same: those that came from elsewhere, and those whose
        files are to be deleted.
    deleted_before
        Ids of samples that earlier runs committed, and whose files they deleted.
    left_over
        Files that an earlier run should have deleted with others, and the parts that hold what was in them.
    attachments
        What belongs to the dataset as a whole, by name.
    notes
        What the user should know of all that.
    retracted
        Numbers of the items whose id is retracted in the dataset: no reader gets them, so that their files stay.
    listed
        Stamps of the files that hold several samples, from before the source was listed.
    """

    request: Request
    source: Source
    meaning: SourceMeaning
    store: Store
    header: Header
    existing: Header | None
    manifests: Mapping[str, PartManifest]
    started: datetime
    origin: Origin
    copies: Copies
    pending: list[int]
    compared: list[int]
    deleted_before: list[str]
    left_over: tuple[list[str], list[str]]
    attachments: Mapping[str, npt.NDArray[Any]]
    notes: list[str]
    retracted: frozenset[int]
    listed: Mapping[str, Stamp]


def make_plan(request: Request) -> Plan:
    """Look at source and destination; writes nothing.

    Raises
    ------
    UsageError, NotFoundError, SourceError
        The source is not understood, or the user has to say more.
    HeaderMismatchError
        The dataset exists and means something else.
    CorruptionError, StorageError
        The dataset's snapshot is damaged, or a file can't be read.
    """
    started = datetime.now(UTC)
    store = open_place(request.dst, request.storage_options)
    _check_apart(request.src, store)
    listed = all_stamps(Path(request.src)) if request.delete_source else {}
    opened = open_source(request.src, request.from_, request.options, store, deletes=request.delete_source)
    source = opened.source
    listed = {path: listed[path] for item in source.items for path in item.shared if path in listed}
    if request.id_prefix is not None:
        source.items = _prefixed(source, request.id_prefix)
    meaning = opened.meaning
    header = _header(request, opened)
    existing = _find_dataset(store, header)
    if existing is not None and not request.resume and committed_parts(store):
        raise UsageError.at(
            store.url,
            expected="an empty dataset, as --no-resume asks",
            got=units.counted(len(committed_parts(store)), "committed part"),
            remedy="leave --no-resume out to add what is missing, or choose another destination",
        )
    manifests = committed_manifests(store, existing)
    origin = Origin(str(Path(request.src).resolve()), source.name, _reading(request), platform.node())
    before = deleted_before(store, manifests, source, origin)
    # A source may list a file that it misses; what it held is known.
    explained = [item for item in source.items if before.explains(item)]
    source.items = [item for item in source.items if not before.explains(item)]
    left_behind: tuple[list[str], list[str]] = [], []
    if request.delete_source:
        left_behind = left_over(source, explained, manifests, origin)
    attached, more = read_vocabulary(source)
    _check_attachments(store, attached)
    copies = find_copies(store, manifests, source, origin, range(len(source.items)))
    check_windows(source, request.reshaping.split_long, copies)
    compared = copies.elsewhere()
    retracted, note = retracted_items(store, source, deletes=request.delete_source)
    if request.delete_source:
        left = [n for n in np.flatnonzero(copies.part >= 0).tolist() if n not in retracted]
        left = [n for n in left if has_files(source, source.items[n])]
        compared = copies.by_part(sorted({*compared, *left}))
        check_deletable(source, [*copies.missing(), *compared])
    return Plan(
        request, source, meaning, store, header, existing, manifests, started, origin, copies, copies.missing(),
        compared, before.ids, left_behind, attached, [*before.notes, *more, *note], retracted, listed,
    )  # fmt: skip


def _check_attachments(store: Store, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Refuse what belongs to the dataset as a whole, if the dataset has another one of the name."""
    pointer = read_pointer(store)
    if pointer is None:
        return
    listed = read_current(store, pointer).attachments
    attachments.merge(listed, [attachments.encode(name, array)[0] for name, array in arrays.items()], (), store.url)


def _header(request: Request, opened: Opened) -> Header:
    """Return what the dataset means, from what the source says and the user said.

    Raises
    ------
    UsageError
        Something is left open, or contradicts the files.
    """
    meaning, known = opened.meaning, opened.header
    check_cast(request.reshaping.cast, meaning.dtype)
    check_split(request.reshaping.split_long, meaning.extras)
    model = request.model or (known.model if known else meaning.model)
    return make_header(
        layers=settle_layers(meaning, request.options.layer_ids),
        hidden_size=meaning.hidden_size,
        final_norm=settle_final_norm(meaning, request.final_norm),
        dtype=request.reshaping.cast or meaning.dtype,
        model=model,
        tokenizer=request.tokenizer or (known.tokenizer if known else None),
        scaling=meaning.scaling,
    )


def committed_manifests(store: Store, header: Header | None) -> dict[str, PartManifest]:
    """Return the manifests of all committed parts; none where there is no dataset."""
    return {part: load_manifest(store, part, header) for part in committed_parts(store)} if header else {}


def _find_dataset(store: Store, header: Header) -> Header | None:
    try:
        return find_dataset(store, header)
    except HeaderMismatchError as error:
        found = header_of_manifests(store, committed_parts(store))
        if any(manifest.counts.samples for manifest in committed_manifests(store, found).values()):
            raise
        remedy = f"it holds no samples: if no writer is at work there, remove the folder {store.url} and begin anew"
        raise HeaderMismatchError(replace(problem, remedy=remedy) for problem in error.problems) from None


def _check_apart(src: str, store: Store) -> None:
    """Refuse a file, and a dataset within its source or around it: each would see the other's files as its own."""
    if not store.is_local:
        return
    source, dataset = Path(src).resolve(), Path(store.url).resolve()
    if dataset.exists() and not dataset.is_dir():
        raise UsageError.at(store.url, expected="a folder, or a name for one", got="a file")
    if source.is_relative_to(dataset) or dataset.is_relative_to(source):
        raise UsageError.at(store.url, expected="a folder apart from the source", got=f"{store.url} beside {src}")


def _prefixed(source: Source, prefix: str) -> list[SourceItem]:
    """Return the source's items under ids that begin with the prefix."""
    if not prefix or not prefix.isprintable():
        remedy = "rank1/ is a good one" if prefix else "leave the option out for none"
        raise UsageError.at("--id-prefix", expected="printable text", got=ascii(prefix), remedy=remedy)
    items = [replace(item, sample_id=prefix + item.sample_id) for item in source.items]
    try:
        for item in items:
            check_id(item.sample_id)
    except SampleError as error:
        raise UsageError(replace(problem, where=f"--id-prefix: {item.key}") for problem in error.problems) from None
    return items


def _reading(request: Request) -> dict[str, Any]:
    """Return the options that decide what a file is read as."""
    key_map = {role: list(key) if role == "ignore" else key for role, key in asdict(request.options.key_map).items()}
    reshaped = request.reshaping.to_json()
    named = {role: key for role, key in key_map.items() if key}
    weights = request.options.loss_weights or None
    return {"hidden_size": request.options.hidden_size, "loss_weights": weights, "map": named, **reshaped}
