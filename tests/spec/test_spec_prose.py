"""The prose says what the code does: examples, figures, caps, tables."""

import json
import re

import pytest
from vector_cases import PROSE, VECTORS

from hsfmt import canonical, codecs, columns, dtypes, header, index, layout, manifest, pointer, tables
from hsfmt.storage import base
from hsfmt.zarr_metadata import parse_root
from spec.vectors.folder import Folder

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
CAPS = {
    "root_document_nbytes": header.MAX_HEADER_NBYTES,
    "pointer_nbytes": pointer.MAX_POINTER_NBYTES,
    "manifest_nbytes": manifest.MAX_MANIFEST_NBYTES,
    "table_nbytes": tables.MAX_TABLE_NBYTES,
    "table_header_nbytes": tables._MAX_HEADER_NBYTES,
    "json_depth": canonical.MAX_DEPTH,
    "json_values": canonical.MAX_VALUES,
    "layers": header.MAX_LAYERS,
    "hidden_size": header.MAX_HIDDEN_SIZE,
    "rows": columns.MAX_ROWS,
    "rank": columns.MAX_RANK,
    "chunk_nbytes": columns.MAX_CHUNK_NBYTES,
    "shard_nbytes": columns.MAX_SHARD_NBYTES,
    "shard_chunk_rows": columns.MAX_SHARD_CHUNK_ROWS,
    "id_nbytes": index.MAX_ID_NBYTES,
    "meta_nbytes": index.MAX_META_NBYTES,
    "path_nbytes": base._MAX_PATH_NBYTES,
}


def section(title: str) -> str:
    return PROSE.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def number(text: str) -> int:
    if "^" in text:
        return int(text.split("^", maxsplit=1)[0]) ** int(text.split("^")[1])
    value, _, unit = text.partition(" ")
    return int(value) * UNITS.get(unit, 1)


def test_caps_are_those_of_the_code():
    rows = re.findall(r"^\| (\w+) \| (\d[^|]*?) \|", section("16. Caps"), re.MULTILINE)
    assert {name: number(value) for name, value in rows} == CAPS


def test_element_types_are_those_of_the_code():
    rows = re.findall(r"^\| (`[^|]*) \| ([\d, ]+) \|", section("7. Element types"), re.MULTILINE)
    found = {}
    for listed, figures in rows:
        names, sizes = re.findall(r"`(\w+)`", listed), [int(n) for n in figures.split(",")]
        found |= dict(zip(names, sizes * (len(names) if len(sizes) == 1 else 1), strict=True))
    assert found == {name: d.itemsize for name, d in dtypes.DTYPES.items()}


def test_chunk_sizes_are_those_of_the_code():
    found = re.findall(r"(\d+) (bfloat16|float32|float8_e4m3fn): (\d+)", " ".join(PROSE.split()))
    assert len(found) == 7
    for hidden_size, name, n_tokens in found:
        assert columns.state_chunk_rows(int(hidden_size), dtypes.dtype(name).itemsize) == int(n_tokens)


def test_patterns_are_those_of_the_code():
    for pattern in (layout.PART_PATTERN, columns.NAME_PATTERN):
        assert f"MUST match `{pattern.pattern}`" in PROSE


def test_blosc_configuration_is_that_of_the_code():
    configuration = codecs.zarr_codecs("zstd", 2)[1]["configuration"]
    rule = PROSE.split("- **COD-3**")[1].split("- **COD-4**")[0]
    for key in ("cname", "clevel", "blocksize"):
        assert f"`{key}` {configuration[key]}" in rule


def examples() -> list[tuple[str, str, dict]]:
    blocks = re.findall(r"<!-- example: (\S+) (\S+) -->\n```json\n(.*?)\n```", PROSE, re.DOTALL)
    return [(case, path, json.loads(text)) for case, path, text in blocks]


def test_every_json_block_is_an_example():
    assert PROSE.count("```json") == len(examples()) == 5


@pytest.mark.parametrize(("case", "path", "document"), examples(), ids=lambda value: str(value)[:40])
def test_example_is_a_file_of_the_vectors(case, path, document):
    folder = Folder(VECTORS / "valid" / case / "dataset")
    actual = folder.snapshot_index().metadata if path == "snapshot-metadata" else folder.json(path)
    if document.get("header") == "the header, see section 6":
        document["header"] = folder.json("zarr.json")["attributes"]["hsfmt"]
    assert document == actual


def test_first_example_is_a_root_document():
    _, path, document = examples()[0]
    found = parse_root(canonical.dumps(document), path)
    assert found.layers == (1, 2, 4)
    assert set(found.to_json()) == set(document["attributes"]["hsfmt"])


def test_tree_has_the_places_of_the_code():
    tree = section("2. Places").split("```")[1]
    for path in (layout.ROOT_METADATA, layout.PARTS_METADATA, layout.POINTER):
        assert re.search(rf"^{re.escape(path)} ", tree, re.MULTILINE)
    for folder in (layout.MANIFESTS, layout.INDEXES, layout.SNAPSHOTS, layout.ATTACHMENTS):
        assert re.search(rf"^{folder}/<", tree, re.MULTILINE)


def test_prose_stays_short():
    assert len(PROSE.splitlines()) < 680
