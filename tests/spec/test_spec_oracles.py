"""Software that is not ours reads the vectors; canonical JSON holds for any document."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load as load_safetensors
from vector_cases import VALID, VECTORS

from hsfmt import canonical
from hsfmt.errors import FormatError
from spec.reference.columns import parse_column
from spec.reference.documents import parse_json
from spec.reference.parts import load_part
from spec.reference.refusal import Refused
from spec.vectors.folder import Folder, Table

tensorstore = pytest.importorskip("tensorstore")


@pytest.mark.parametrize("case", VALID)
def test_safetensors_reads_every_table(case):
    for path in sorted((VECTORS / "valid" / case / "dataset/hsfmt").rglob("*.safetensors")):
        ours, theirs = Table(path.read_bytes()).tensors, load_safetensors(path.read_bytes())
        assert set(ours) == set(theirs)
        for name, array in ours.items():
            np.testing.assert_array_equal(array, theirs[name])


@pytest.mark.parametrize("case", VALID)
def test_tensorstore_reads_every_array(case):
    dataset = Folder(VECTORS / "valid" / case / "dataset")
    header = dataset.json("zarr.json")["attributes"]["hsfmt"]
    for path in sorted((dataset / "hsfmt/manifests").glob("*.json")):
        manifest = dataset.manifest(path.stem)
        samples = load_part(dataset.root, path.stem, header).samples
        for name, entry in manifest["columns"].items():
            column = parse_column(name, entry, name)
            base = {"driver": "file", "path": str(dataset / f"parts/{path.stem}/{name}")}
            if not column.shape[0]:
                continue
            array = tensorstore.open({"driver": "zarr3", "kvstore": base}, open=True).result().read().result()
            assert list(array.shape) == entry["shape"]
            if name == "hidden_states":
                states = np.concatenate([sample.hidden_states for sample in samples])
                assert array.tobytes() == states.tobytes()
            if name == "input_ids":
                assert array.tolist() == [token for sample in samples for token in sample.input_ids]


INTEGERS = st.integers(-(1 << 63), (1 << 63) - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | INTEGERS | TEXT,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(TEXT, children, max_size=4),
    max_leaves=20,
)


@given(DOCUMENTS)
def test_any_document_has_one_form_that_both_readers_take(document):
    data = canonical.dumps(document)
    assert canonical.loads(data, "x") == parse_json(data, "x") == document
    loose = json.dumps(document, sort_keys=True, indent=1).encode()
    if loose != data:
        with pytest.raises(FormatError):
            canonical.loads(loose, "x")
        with pytest.raises(Refused):
            parse_json(loose, "x")


@given(st.binary(max_size=40) | st.text().map(lambda text: text.encode(errors="ignore")))
def test_both_readers_agree_on_any_bytes(data):
    def outcome(read, error):
        try:
            return read(data, "x")
        except error:
            return "refused"

    assert outcome(canonical.loads, FormatError) == outcome(parse_json, Refused)


@given(st.dictionaries(TEXT, st.floats() | INTEGERS, max_size=3))
def test_metadata_takes_finite_fractions_and_documents_none(metadata):
    numbers = metadata.values()
    if all(map(math.isfinite, numbers)):
        data = canonical.dumps_metadata(metadata)
        assert canonical.loads(data, "x", metadata=True) == parse_json(data, "x", metadata=True) == metadata
    else:
        with pytest.raises(FormatError):
            canonical.dumps_metadata(metadata)
    if any(isinstance(number, float) for number in numbers):
        with pytest.raises(FormatError):
            canonical.dumps(metadata)
