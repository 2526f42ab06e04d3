"""JSON Schemas and parsers agree on one corpus: the documents of the vectors, and each of their members spoilt in turn.

A schema says less than the parser (order, digests, what documents say about each other), never more.
"""

import copy
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from vector_cases import INVALID, SPEC, VALID, VECTORS

from hsfmt import canonical
from hsfmt.errors import HsfmtError
from hsfmt.header import parse_header
from hsfmt.manifest import parse_manifest
from hsfmt.pointer import parse_pointer
from hsfmt.readers.verification.attachments import parse_attachments
from hsfmt.readers.verification.report import Findings
from hsfmt.snapshot import parse_snapshot
from spec.vectors.folder import Folder, Table, signed

KINDS = ("header", "part-manifest", "pointer", "snapshot-metadata")
SPOILT = (None, "x", "", -1, 1 << 62, [], {}, [None], {"x": None}, True)

Document = dict[str, Any]


@cache
def validator(kind: str) -> Draft202012Validator:
    schemas = [json.loads((SPEC / "schemas" / f"{name}.schema.json").read_text()) for name in KINDS]
    registry: Registry = Registry().with_resources([(s["$id"], Resource.from_contents(s)) for s in schemas])
    return Draft202012Validator(schemas[KINDS.index(kind)], registry=registry)


def documents(dataset: Path) -> Iterator[tuple[str, str, Document]]:
    """Yield (kind, path, document) of a dataset, as far as it can be parsed as JSON."""
    paths = [("header", "zarr.json"), ("pointer", "hsfmt/manifest.json")]
    paths += [("part-manifest", p.relative_to(dataset).as_posix()) for p in dataset.glob("hsfmt/manifests/*.json")]
    for kind, path in paths:
        try:
            document = canonical.loads((dataset / path).read_bytes(), path)
            yield kind, path, document["attributes"]["hsfmt"] if kind == "header" else document
        except (HsfmtError, OSError, KeyError):
            continue
    for index in dataset.glob("hsfmt/snapshots/*/index.safetensors"):
        try:
            yield "snapshot-metadata", str(index), Table(index.read_bytes()).metadata
        except (ValueError, KeyError):
            continue


def parses(kind: str, document: Document, dataset: Path) -> bool:
    """Say whether the library takes the document, its own digest made good; any error but ours is a failure."""
    try:
        if kind == "header":
            parse_header(document, "header")
        elif kind == "part-manifest":
            parse_manifest(signed(document), str(document.get("part")), "manifest")
        elif kind == "pointer":
            parse_pointer(signed(document))
        else:
            index = next(dataset.glob("hsfmt/snapshots/*/index.safetensors"))
            table = Table(index.read_bytes())
            table.metadata = document
            parse_snapshot(table.to_bytes(), "snapshot")
            findings = Findings()
            parse_attachments(document.get("attachments"), findings, "snapshot")
            return not findings.ordered()
    except HsfmtError:
        return False
    return True


def test_schemas_are_schemas():
    assert sorted(p.name for p in (SPEC / "schemas").iterdir()) == sorted(f"{kind}.schema.json" for kind in KINDS)
    for kind in KINDS:
        Draft202012Validator.check_schema(validator(kind).schema)
        assert validator(kind).schema["additionalProperties" if kind == "" else "required"]


@pytest.mark.parametrize("case", VALID)
def test_both_take_valid_documents(case):
    dataset = VECTORS / "valid" / case / "dataset"
    kinds = set()
    for kind, path, document in documents(dataset):
        assert [e.message for e in validator(kind).iter_errors(document)] == [], path
        assert parses(kind, document, dataset), path
        kinds.add(kind)
    assert kinds == {"header", "part-manifest"} if case == "unsealed" else kinds == set(KINDS)


REFUSED_BY_SCHEMA = {
    "attachment-name", "codec-unknown", "column-kind", "column-name", "core-column-missing", "count-negative",
    "digest-of-unknown-algorithm", "digest-upper-case", "document-of-other-kind", "dtype-unknown", "final-norm-unclear",
    "format-malformed", "hidden-size-huge", "hidden-size-zero", "layer-negative", "layers-empty", "layers-repeated",
    "model-empty", "model-is-text", "path-outside", "pointer-path", "producer-is-a-list", "scaling-missing",
    "scaling-of-bfloat16", "states-of-integers", "version-malformed",
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID)
def test_what_a_schema_refuses_the_parser_refuses(vector, case):
    dataset = vector(f"invalid/{case}")
    refused = False
    for kind, path, document in documents(dataset):
        if not validator(kind).is_valid(document):
            refused = True
            assert not parses(kind, document, dataset), path
    assert refused == (case in REFUSED_BY_SCHEMA)


def members(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield (*path, key)
        yield from members(child, (*path, key))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["two-parts", "float8", "superseded"])
def test_each_member_spoilt_in_turn(case, kind):
    dataset = VECTORS / "valid" / case / "dataset"
    document = next(document for found, _, document in documents(dataset) if found == kind)
    laxer, n_refused = [], 0
    for path in members(document):
        for value in (*SPOILT, _ABSENT):
            spoilt = copy.deepcopy(document)
            parent = spoilt
            for key in path[:-1]:
                parent = parent[key]
            if value is _ABSENT:
                del parent[path[-1]]
            else:
                parent[path[-1]] = value
            if path == ("digest",) or validator(kind).is_valid(spoilt):
                parses(kind, spoilt, dataset)
                continue
            n_refused += 1
            if parses(kind, spoilt, dataset):
                laxer.append((path, value))
    assert n_refused > 50
    assert laxer == []


_ABSENT = object()


def test_schemas_allow_unknown_members():
    dataset = Folder(VECTORS / "valid" / "two-parts" / "dataset")
    assert np.all([validator("part-manifest").is_valid({**dataset.manifest(part), "new": 1}) for part in ("p-one",)])
