"""The header: what it takes, what it refuses and how."""

import numpy as np
import pytest

from hsfmt.errors import FormatError, FormatVersionError, HeaderMismatchError
from hsfmt.header import (
    MAX_HEADER_NBYTES,
    Header,
    check_same_header,
    check_same_meaning,
    make_header,
    parse_header,
)
from hsfmt.versions import check_readable, check_writable
from hsfmt.zarr_metadata import parse_root, root_document

GOOD = make_header(layers=[3, 31, 59, 61], hidden_size=7168, final_norm="post", model="m", tokenizer={"digest": "d"})


def test_a_header_comes_back():
    for header in (GOOD, make_header(layers=(0,), hidden_size=1, final_norm="unknown", dtype="float32")):
        assert parse_header(header.to_json(), "x") == header
        assert parse_root(root_document(header), "zarr.json") == header
        assert parse_header(header.to_json(), "x").digest() == header.digest()
    assert GOOD.model == {"name": "m"}
    assert GOOD.n_layers == 4


def test_equal_settings_give_equal_bytes():
    again = make_header(
        layers=np.array([3, 31, 59, 61]), hidden_size=np.int32(7168), final_norm="post", dtype="torch.bfloat16",
        model={"name": "m"}, tokenizer={"digest": "d"},
    )  # fmt: skip
    assert root_document(again) == root_document(GOOD)


REFUSED = {
    "layers": [None, [], [1, 1], [2, 1], [-1], [1.0], ["1"], [True], 3, list(range(4097)), {"0": 1}],
    "hidden_size": [None, 0, -1, (1 << 20) + 1, 1 << 40, "8", 8.0, True, [8]],
    "final_norm": [None, "", "Pre", "norm", 1, ["pre"]],
    "dtype": [None, "bf16", "float64", "int8", "bool", 1, ["bfloat16"], {}],
    "model": ["m", [], {}, {"name": 1}, {"name": None}, 1],
    "tokenizer": ["m", [], {}, {"name": 1}],
    "scaling": [{"column": "s", "rule": "bfloat16_product"}, "x", {}],
    "format": [None, 1.0, "1", "1.0.0", "v1.0", "01.0", "1.00000"],
    "writable_from": [None, "", "1.x"],
}


@pytest.mark.parametrize(
    ("member", "value"), [(member, value) for member, values in REFUSED.items() for value in values]
)
def test_each_bad_member_is_named(member, value):
    with pytest.raises(FormatError) as caught:
        parse_header({**GOOD.to_json(), member: value}, "zarr.json")
    assert {problem.where for problem in caught.value.problems} <= {f"zarr.json: {member}", "zarr.json: scaling"}
    assert caught.value.problems[0].where == f"zarr.json: {member}"


@pytest.mark.parametrize("member", [*REFUSED, "readable_from"])
def test_each_missing_member_is_named(member):
    document = GOOD.to_json()
    del document[member]
    with pytest.raises(FormatError, match=f"zarr.json: {member}"):
        parse_header(document, "zarr.json")


def test_all_problems_come_at_once():
    document = {**GOOD.to_json(), "layers": [], "hidden_size": 0, "final_norm": "x", "dtype": "y", "model": 1}
    with pytest.raises(FormatError) as caught:
        parse_header(document, "h")
    assert [problem.where for problem in caught.value.problems] == [
        "h: layers", "h: hidden_size", "h: final_norm", "h: dtype", "h: model",
    ]  # fmt: skip


@pytest.mark.parametrize("document", [None, [], "x", 1])
def test_a_header_is_an_object(document):
    with pytest.raises(FormatError, match=r"an object|a JSON object"):
        parse_header(document, "h")


def test_unknown_members_are_kept_and_ignored():
    document = {**GOOD.to_json(), "later": {"deep": [1]}, "a_flag": True}
    header = parse_header(document, "h")
    assert header.to_json() == document
    assert parse_root(root_document(header), "zarr.json") == header
    check_same_meaning(header, GOOD, "h")
    assert header.digest() != GOOD.digest()


def test_a_later_format_is_refused_with_advice():
    document = {**GOOD.to_json(), "format": "2.3", "readable_from": "2.0", "writable_from": "2.1", "layers": "other"}
    for check, verb, needed in ((check_readable, "read", "2.0"), (check_writable, "appended to", "2.1")):
        with pytest.raises(FormatVersionError) as caught:
            check(document, "zarr.json")
        (problem,) = caught.value.problems
        assert problem.got == f"format 2.3, {verb} from {needed} on"
        assert "supports up to 1.0" in problem.expected
        assert "pip install -U hsfmt" in problem.remedy
        assert caught.value.exit_code == 2
    with pytest.raises(FormatVersionError):
        parse_header(document, "zarr.json")


def test_a_later_format_that_can_still_be_read_is_read():
    document = {**GOOD.to_json(), "format": "1.7", "readable_from": "1.0", "writable_from": "1.5"}
    assert parse_header(document, "h").format == "1.7"
    with pytest.raises(FormatVersionError):
        check_writable(document, "h")


def test_a_header_is_small_enough_for_the_pointer():
    fits = make_header(layers=range(4096), hidden_size=1, final_norm="pre")
    assert len(root_document(fits)) < MAX_HEADER_NBYTES
    with pytest.raises(FormatError, match="at most 32768 bytes"):
        make_header(layers=[1], hidden_size=1, final_norm="pre", model="x" * 33_000)
    with pytest.raises(FormatError, match="at most 32768 bytes"):
        parse_header({**GOOD.to_json(), "later": "x" * 33_000}, "h")


def test_the_float8_scaling():
    scaling = {"column": "s", "rule": "bfloat16_product"}
    header = make_header(layers=[1], hidden_size=8, final_norm="pre", dtype="float8_e4m3fn", scaling=scaling)
    assert parse_header(header.to_json(), "h") == header
    for bad in (
        None,
        {"column": "s"},
        {"rule": "bfloat16_product"},
        {**scaling, "rule": "x"},
        {**scaling, "column": 1},
    ):
        with pytest.raises(FormatError, match="scaling"):
            parse_header({**header.to_json(), "scaling": bad}, "h")


def test_another_meaning_is_refused_member_by_member():
    other = make_header(layers=[1], hidden_size=7168, final_norm="post", dtype="float16")
    with pytest.raises(HeaderMismatchError) as caught:
        check_same_meaning(GOOD, other, "url")
    assert [problem.where for problem in caught.value.problems] == ["url: layers", "url: dtype"], (
        "no model said: no clash"
    )
    with pytest.raises(HeaderMismatchError, match="model: expected None, got"):
        check_same_meaning(
            other, make_header(layers=[1], hidden_size=7168, final_norm="post", dtype="float16", model="m"), "u"
        )


def test_parts_go_under_the_very_same_header_only():
    """Where `check_same_meaning` lets one without a model join."""
    no_model = make_header(
        layers=GOOD.layers, hidden_size=GOOD.hidden_size, final_norm=GOOD.final_norm, dtype=GOOD.dtype
    )
    check_same_header(GOOD, GOOD, "url")
    check_same_meaning(GOOD, no_model, "url")
    with pytest.raises(
        HeaderMismatchError, match=f"url: expected header {GOOD.digest()}, as only datasets with the very"
    ):
        check_same_header(GOOD, no_model, "url")
    with pytest.raises(HeaderMismatchError, match="url: model"):
        check_same_header(no_model, GOOD, "url")


def test_a_root_document_with_anything_else_is_refused():
    data = root_document(GOOD)
    for bad in (
        data.replace(b'"node_type":"group"', b'"node_type":"array"'),
        data.replace(b'"attributes":{', b'"attributes":{"a":1,'),
        data.replace(b'"zarr_format":3', b'"zarr_format":2'),
        data[:-1] + b',"zzz":1}',
        b"[]",
        b"{}",
        b'{"attributes":[]}',
        b'{"attributes":{"hsfmt":1}}',
    ):
        with pytest.raises(FormatError):
            parse_root(bad, "zarr.json")


def test_headers_are_values():
    assert isinstance(GOOD, Header)
    with pytest.raises(AttributeError):
        GOOD.dtype = "float16"
