"""What a conversion is asked for, and what it finds at its source and destination. Nothing is written here."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hsfmt.catalog import committed_parts, find_dataset, load_manifest
from hsfmt.cli import units
from hsfmt.cli.collisions import Copies, Origin, find_copies
from hsfmt.errors import HeaderMismatchError, SampleError, UsageError
from hsfmt.header import Header, make_header
from hsfmt.manifest import PartManifest
from hsfmt.readers.sources import (
    Source,
    SourceItem,
    SourceMeaning,
    SourceOptions,
    find_source,
    settle_final_norm,
    settle_layers,
)
from hsfmt.root import header_of_manifests
from hsfmt.storage import Store, open_store
from hsfmt.writers.samples import check_id

GIB = 1 << 30


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
    part_nbytes: int = 32 * GIB
    workers: int = 1
    resume: bool = True
    dry_run: bool = False
    force: bool = False
    on_bad: str = "raise"
    nonfinite: str | None = None
    seal: bool = True
    expect: int | None = None
    command: Sequence[str] = ()


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


def make_plan(request: Request) -> Plan:
    """Look at source and destination; writes nothing.

    Raises
    ------
    UsageError, NotFoundError, SourceError
        The source is not understood, or the user has to say more.
    HeaderMismatchError
        The dataset exists and means something else.
    """
    started = datetime.now(UTC)
    store = open_store(request.dst)
    _check_apart(request.src, store)
    source = find_source(request.src, request.from_, options=request.options)
    if request.id_prefix is not None:
        source.items = _prefixed(source, request.id_prefix)
    meaning = source.meaning()
    header = make_header(
        layers=settle_layers(meaning, request.options.layer_ids),
        hidden_size=meaning.hidden_size,
        final_norm=settle_final_norm(meaning, request.final_norm),
        dtype=meaning.dtype,
        model=request.model or meaning.model,
        tokenizer=request.tokenizer,
        scaling=meaning.scaling,
    )
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
    copies = find_copies(store, manifests, source, origin, range(len(source.items)))
    return Plan(request, source, meaning, store, header, existing, manifests, started, origin, copies, copies.missing())


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
    return {"hidden_size": request.options.hidden_size, "map": {role: key for role, key in key_map.items() if key}}
