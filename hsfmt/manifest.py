"""The part manifest: written last, its presence is the commit of the part.

Spec: rules MAN-1 to MAN-10.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hsfmt import canonical, digests, layout
from hsfmt.columns import CORE_COLUMNS, IDS, MASK, STATES, Column, parse_column
from hsfmt.errors import CorruptionError, FormatError, Problem
from hsfmt.header import Header, parse_header
from hsfmt.versions import FORMAT, READABLE_FROM, check_readable, is_version
from hsfmt.zarr_metadata import array_document, group_document

MAX_MANIFEST_NBYTES = 16 << 20
_KIND = "hsfmt.part"
_KNOWN = {
    "columns", "counts", "digest", "files", "format", "header", "header_digest", "holes", "kind", "part", "producer",
    "readable_from", "replaces",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One object of a part: path inside the dataset, size in bytes, digest of all its bytes."""

    path: str
    nbytes: int
    digest: str

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's entry."""
        return {"digest": self.digest, "nbytes": self.nbytes, "path": self.path}


@dataclass(frozen=True, slots=True)
class Counts:
    """Samples, tokens, supervised tokens and holes of a part."""

    samples: int
    tokens: int
    supervised_tokens: int
    holes: int


@dataclass(frozen=True, slots=True)
class PartManifest:
    """All that a part is.

    Attributes
    ----------
    part
        Its own name; a manifest under another name is refused (rule MAN-3).
    header
        The dataset's header, repeated.
    columns
        By name; empty for a part that holds nothing but holes.
    files
        Every object of the part but the manifest, ascending by path.
    holes
        Id to reason, of samples that failed.
    replaces
        Name to manifest digest of parts that this one supersedes.
    producer
        What varies by run: engine, host, command, codec, times.
    extra
        Members of a later format version, kept and ignored.
    stored
        The file's bytes where the manifest was parsed, which may hold more than this library knows.
    """

    part: str
    header: Header
    columns: Mapping[str, Column]
    files: tuple[FileEntry, ...]
    counts: Counts
    holes: Mapping[str, str] = field(default_factory=dict)
    replaces: Mapping[str, str] = field(default_factory=dict)
    producer: Mapping[str, Any] = field(default_factory=dict)
    format: str = FORMAT
    readable_from: str = READABLE_FROM
    extra: Mapping[str, Any] = field(default_factory=dict)
    stored: bytes | None = field(default=None, repr=False, compare=False)

    @property
    def index_file(self) -> FileEntry:
        """The entry of the part index; CorruptionError without one, as in a part of holes only."""
        path = layout.index_path(self.part)
        for entry in self.files:
            if entry.path == path:
                return entry
        where = layout.manifest_path(self.part)
        raise CorruptionError.at(where, expected=f"an entry of {path}", got=f"{len(self.files)} other files")

    def _body(self) -> dict[str, Any]:
        counts = self.counts
        return {
            **self.extra,
            "columns": {name: column.to_json() for name, column in self.columns.items()},
            "counts": {
                "holes": counts.holes,
                "samples": counts.samples,
                "supervised_tokens": counts.supervised_tokens,
                "tokens": counts.tokens,
            },
            "files": [entry.to_json() for entry in self.files],
            "format": self.format,
            "header": self.header.to_json(),
            "header_digest": self.header.digest(),
            "holes": [{"id": key, "reason": reason} for key, reason in sorted(self.holes.items())],
            "kind": _KIND,
            "part": self.part,
            "producer": dict(self.producer),
            "readable_from": self.readable_from,
            "replaces": [{"digest": value, "part": key} for key, value in sorted(self.replaces.items())],
        }

    def digest(self) -> str:
        """Return the digest of the manifest without its own digest member (rule MAN-2)."""
        body = self._body() if self.stored is None else _without_digest(json.loads(self.stored))
        return digests.digest(canonical.dumps(body))

    def to_bytes(self) -> bytes:
        """Return the manifest file."""
        return self.stored or canonical.dumps({**self._body(), "digest": self.digest()})


def parse_signed(data: bytes, where: str, kind: str) -> dict[str, Any]:
    """Parse a canonical document that carries its own digest, its kind and version.

    Raises
    ------
    CorruptionError
        The digest is not that of the other members.
    FormatError, FormatVersionError
        It is another document, or needs a newer library.
    """
    document = canonical.loads(data, where)
    check_readable(document, where)
    if document.get("kind") != kind:
        raise FormatError.at(where, expected=f"a document of kind {kind}", got=repr(document.get("kind"))[:60])
    claimed = document.get("digest")
    actual = digests.digest(canonical.dumps(_without_digest(document)))
    if claimed != actual:
        raise CorruptionError.at(where, expected=f"digest {actual}", got=repr(claimed)[:60])
    result: dict[str, Any] = document
    return result


def _without_digest(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key != "digest"}


def parse_manifest(data: bytes, part: str, where: str) -> PartManifest:
    """Parse and check the manifest of a part.

    Parameters
    ----------
    data
        The file.
    part
        The name that its path gives it.
    where
        Its path.

    Raises
    ------
    CorruptionError
        Changed bytes, or a manifest of another part under this name.
    FormatError
        It breaks the format; all problems at once.
    """
    document = parse_signed(data, where, _KIND)
    if document.get("part") != part:
        remedy = "a part can't be renamed or copied by hand: remove the copy"
        raise CorruptionError.at(where, expected=f"part {part}", got=repr(document.get("part"))[:100], remedy=remedy)
    header = parse_header(document.get("header"), f"{where}: header")
    try:
        manifest = replace(_build(document, part, header, where), stored=data)
    except (KeyError, TypeError, AttributeError) as error:
        got = f"{type(error).__name__} {error}"[:200]
        raise FormatError.at(where, expected="the members of a part manifest", got=got) from None
    problems = _problems(manifest, document, where)
    if problems:
        raise FormatError(problems)
    return manifest


def _build(document: dict[str, Any], part: str, header: Header, where: str) -> PartManifest:
    files = tuple(
        FileEntry(_text(entry["path"]), _count(entry["nbytes"]), digests.check(entry["digest"], where))
        for entry in _entries(document["files"])
    )
    return PartManifest(
        part=part,
        header=header,
        columns=_columns(document["columns"], where),
        files=files,
        counts=Counts(*(_count(document["counts"][key]) for key in Counts.__slots__)),
        holes={_text(entry["id"]): _text(entry["reason"]) for entry in _entries(document["holes"])},
        replaces={
            layout.check_part_name(entry["part"], where): digests.check(entry["digest"], where)
            for entry in _entries(document["replaces"])
        },
        producer=dict(document["producer"].items()),
        format=document["format"],
        readable_from=document["readable_from"],
        extra={key: value for key, value in document.items() if key not in _KNOWN},
    )  # fmt: skip


def _columns(document: dict[str, Any], where: str) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    problems: list[Problem] = []
    for name, entry in document.items():
        try:
            columns[name] = parse_column(name, entry, f"{where}: columns.{name}")
        except FormatError as error:
            problems += error.problems
    if problems:
        raise FormatError(problems)
    return columns


def _entries(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r} is no count")
    return value


def _problems(manifest: PartManifest, document: dict[str, Any], where: str) -> list[Problem]:
    problems = []

    def expect(ok: bool, member: str, expected: str, got: object) -> None:  # noqa: FBT001  reads as a sentence
        if not ok:
            problems.append(Problem(f"{where}: {member}", expected, repr(got)[:300]))

    header, columns, counts = manifest.header, manifest.columns, manifest.counts
    header_digest = document.get("header_digest")
    expect(header_digest == header.digest(), "header_digest", header.digest(), header_digest)
    expect(is_version(manifest.format), "format", "a format version like 1.0", manifest.format)
    expect(
        counts.holes == len(manifest.holes) == len(document["holes"]),
        "holes",
        f"{counts.holes} ids",
        len(manifest.holes),
    )
    for member, names in (("holes", manifest.holes), ("replaces", manifest.replaces)):
        found = [entry["id" if member == "holes" else "part"] for entry in document[member]]
        expect(found == sorted(names), member, "names ascending, each once", found)
    expect(manifest.part not in manifest.replaces, "replaces", "other parts than itself", manifest.part)
    expect(isinstance(document["producer"], dict), "producer", "an object", document["producer"])
    if columns or counts.samples:
        missing = [name for name in CORE_COLUMNS if name not in columns]
        expect(not missing, "columns", f"{', '.join(CORE_COLUMNS)}", sorted(columns))
        if missing:
            return problems
        states = columns[STATES]
        want = (counts.tokens, header.n_layers, header.hidden_size)
        expect(states.shape == want and states.dtype_name == header.dtype, STATES, f"{want} {header.dtype}", states)
        expect(
            columns[IDS].shape == want[:1] and columns[IDS].dtype_name in ("int32", "int64"),
            IDS,
            "int32 or int64 [token]",
            columns[IDS],
        )
        expect(
            columns[MASK].shape == want[:1] and columns[MASK].dtype_name == "uint8",
            MASK,
            "uint8 [token]",
            columns[MASK],
        )
        rows = {"token": counts.tokens, "sample": counts.samples}
        for name in CORE_COLUMNS:
            expect(columns[name].kind == "token", name, "kind token", columns[name].kind)
        for column in columns.values():
            expect(
                column.n_rows == rows.get(column.kind, column.n_rows),
                column.name,
                f"a row a {column.kind}",
                column.shape,
            )
        expect(0 < counts.samples <= counts.tokens >= counts.supervised_tokens, "counts", "counts that agree", counts)
        if header.scaling is not None:
            scale = columns.get(header.scaling["column"])
            good = (
                scale is not None and (scale.kind, scale.dtype_name) == ("token", "float32") and len(scale.shape) == 1
            )
            expect(good, header.scaling["column"], "a float32 [token] column, as the header's scaling says", scale)
    else:
        expect(not counts.tokens and not counts.supervised_tokens, "counts", "no tokens without columns", counts)
    listed = [entry.path for entry in manifest.files]
    n_expected = sum(column.n_shards + 1 for column in columns.values()) + 2 if columns else 0
    if len(listed) != n_expected:
        # Not compared name by name: the columns of a hostile manifest can imply more shards than fit in memory.
        expect(False, "files", f"{n_expected} files as the columns imply", f"{len(listed)} files")  # noqa: FBT003
        return problems
    expected = expected_paths(manifest.part, columns)
    expect(
        listed == expected,
        "files",
        f"exactly {len(expected)} files as the columns imply",
        sorted(set(listed) ^ set(expected))[:3],
    )
    implied = implied_documents(manifest.part, columns)
    for entry in manifest.files:
        body = implied.get(entry.path)
        good = body is None or (entry.nbytes, entry.digest) == (len(body), digests.digest(body))
        expect(good, entry.path, "the size and digest that the manifest implies", entry)
    return problems


def implied_documents(part: str, columns: Mapping[str, Column]) -> dict[str, bytes]:
    """Return path to bytes of the part's zarr.json files: a function of the manifest (rule ZARR-6)."""
    documents = {f"{layout.part_folder(part)}/zarr.json": group_document()}
    for name, column in columns.items():
        documents[f"{layout.column_folder(part, name)}/zarr.json"] = array_document(column)
    return documents


def expected_paths(part: str, columns: Mapping[str, Column]) -> list[str]:
    """Return the paths of all objects of a part but its manifest, ascending (rule MAN-6)."""
    if not columns:
        return []
    paths = [*implied_documents(part, columns), layout.index_path(part)]
    for name, column in columns.items():
        folder = layout.column_folder(part, name)
        paths += [f"{folder}/{column.shard_key(shard)}" for shard in range(column.n_shards)]
    return sorted(paths)
