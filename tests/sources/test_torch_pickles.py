"""Pickles that execute nothing and are hostile all the same: they would fill the memory or never end."""

import io
import pickle
import pickletools
import struct
import zipfile

import pytest
import torch

from hsfmt.errors import SourceError
from hsfmt.readers.sources.torch_file import load_torch_file
from hsfmt.readers.sources.torch_pickle import check_pickle

pytestmark = pytest.mark.torch

ORDERED_DICT = b"ccollections\nOrderedDict\n"
LEGACY_HEAD = b"".join(pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
_COUNT = 20_000


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def put(i: int) -> bytes:
    return b"r" + struct.pack("<I", i)


def get(i: int) -> bytes:
    return b"j" + struct.pack("<I", i)


def listed(*opcodes: bytes) -> bytes:
    """A list of values, each of which may refer to those before it."""
    return b"](" + b"".join(opcodes) + b"e"


# Each of these holds the one before it twice: 2**60 items, were they followed.
LISTS = listed(b"]" + put(0), *[b"](" + get(i) * 2 + b"e" + put(i + 1) for i in range(60)])
TUPLES = [b")" + put(0), *[get(i) * 2 + b"\x86" + put(i + 1) for i in range(60)]]
BIG_DICT = b"}(" + b"".join(b"J" + struct.pack("<i", i) + b"N" for i in range(_COUNT)) + b"u"
# Name of a case -> the opcodes of a value, and the words with which it is refused.
HOSTILE = {
    "a bytearray of any size": (
        b"c__builtin__\nbytearray\n\x8a\x06" + (1 << 40).to_bytes(6, "little") + b"\x85R",
        "bytearray",
    ),
    "a tensor of any size": (b"ctorch\nTensor\n\x8a\x06" + (1 << 40).to_bytes(6, "little") + b"\x85R", "torch.Tensor"),
    "a storage of any size": (
        b"ctorch\nFloatStorage\n\x8a\x06" + (1 << 40).to_bytes(6, "little") + b"\x85R",
        "a call of torch.FloatStorage",
    ),
    "a codec of quadratic time": (
        b"c_codecs\nencode\n" + text("x" * 100_000) + text("idna") + b"\x86R",
        "_codecs.encode",
    ),
    "a dict copied many times": (
        listed(BIG_DICT + put(0), (ORDERED_DICT + get(0) + b"\x85R") * _COUNT),
        "a call of collections.OrderedDict",
    ),
    "a state copied many times": (
        listed(BIG_DICT + put(0), (ORDERED_DICT + b")R" + get(0) + b"b") * _COUNT),
        "the opcode BUILD",
    ),
    "a key whose hash never ends": (
        listed(*TUPLES, b"}" + get(60) + b"Ns"),
        "a dict whose keys are neither text nor numbers",
    ),
    "a key among others": (
        listed(*TUPLES, b"}(" + text("a") + b"N" + get(60) + b"Nu"),
        "a dict whose keys are neither text nor numbers",
    ),
    "an object by its class": (b"ccollections\nOrderedDict\n)\x81", "the opcode NEWOBJ"),
    "a name by two texts": (text("posix") + text("system") + b"\x93", "the opcode STACK_GLOBAL"),
    "an instance": (b"(iposix\nsystem\n", "posix.system"),
    "a name from the registry": (b"\x82\x01", "EXT1"),
    "a function of a value": (b"]" + b")R", "something that is no function"),
    "more than is on the stack": (b"00", "opcode POP"),
    "a reference to nothing": (get(7), "truncated or damaged"),
    "a mark that is not there": (b"t", "truncated or damaged"),
}
# Legal, and only as large as its bytes: what it is used for decides.
SHARED = {"hidden_states": LISTS, "step": LISTS, "input_ids": LISTS, "loss_mask": LISTS}


def zipped(value: bytes, *, name: str = "archive/data.pkl") -> bytes:
    """A file of torch.save whose pickle is made of these opcodes, under the key `x` of a dict."""
    buffer, out = io.BytesIO(), io.BytesIO()
    torch.save({"x": torch.ones(4)}, buffer)
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(out, "w") as new:
        for member in old.infolist():
            is_pickle = member.filename.endswith("data.pkl")
            data = b"\x80\x02" + value + b"." if is_pickle else old.read(member)
            new.writestr(name if is_pickle else member.filename, data)
    return out.getvalue()


def legacy(value: bytes) -> bytes:
    return LEGACY_HEAD + b"\x80\x02" + value + b"." + pickle.dumps([], 2)


def in_dict(value: bytes, key: str = "x") -> bytes:
    return b"}" + put(9_999) + text(key) + value + b"s"


@pytest.mark.parametrize("make", [zipped, legacy])
@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_hostile_is_refused_before_it_is_made(tmp_path, case, make):
    opcodes, words = HOSTILE[case]
    path = tmp_path / "x.pt"
    path.write_bytes(make(in_dict(opcodes)))
    with pytest.raises(SourceError, match=words) as info:
        load_torch_file(path, "x.pt")
    assert info.value.problems[0].where.startswith("x.pt")


def test_they_cost_neither_time_nor_memory(tmp_path, repo_root, run_python):
    for i, (opcodes, _) in enumerate(HOSTILE.values()):
        (tmp_path / f"{i}.pt").write_bytes(zipped(in_dict(opcodes)))
        (tmp_path / f"{i}.ckpt").write_bytes(legacy(in_dict(opcodes)))
    code = f"""
import resource
from pathlib import Path
from hsfmt.errors import SourceError
from hsfmt.readers.sources.torch_file import import_torch, load_torch_file
import_torch()
before = resource.getrusage(resource.RUSAGE_SELF)
n_refused = 0
for path in Path({str(tmp_path)!r}).glob("*.*t"):
    try:
        load_torch_file(path, path.name)
    except SourceError:
        n_refused += 1
after = resource.getrusage(resource.RUSAGE_SELF)
print(n_refused, (after.ru_maxrss - before.ru_maxrss) >> 10, int(after.ru_utime - before.ru_utime))
"""
    n_refused, mebibytes, seconds = map(int, run_python(code, path=repo_root).split())
    assert n_refused == 2 * len(HOSTILE)
    assert mebibytes < 64
    assert seconds < 30


@pytest.mark.parametrize("key", SHARED)
def test_lists_that_hold_each_other_twice_do_not_hang(tmp_path, key, refused):
    """They are small in memory; as states, ids or metadata they are refused without following them."""
    from hsfmt.readers.sources import find_source

    good = {"input_ids": torch.arange(5), "hidden_states": torch.zeros(5, 2, 4)}
    torch.save(good, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(zipped(in_dict(SHARED[key], key)))
    buffer = io.BytesIO()
    torch.save({name: value for name, value in good.items() if name != key}, buffer)
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for member in old.infolist():
            data = old.read(member)
            if member.filename.endswith("data.pkl"):
                # Before the end of the dict of the others.
                data = data[:-1] + text(key) + SHARED[key] + b"s."
            new.writestr(member.filename, data)
    refused(find_source(tmp_path, "pt"), "b.pt")


def test_views_of_the_same_bytes_are_not_copied_to_a_giant(tmp_path, refused):
    from hsfmt.readers.sources import find_source

    state = torch.zeros(1024, 4096)
    ids = torch.arange(1024)
    torch.save({"input_ids": ids, "hidden_states": [state] * 2}, tmp_path / "a.pt")
    torch.save({"input_ids": ids, "hidden_states": [state] * 100}, tmp_path / "b.pt")
    torch.save({"input_ids": ids, "aux": [state[:, :64]] * 5000, "hidden_state": state[:, :64]}, tmp_path / "c.pt")
    source = find_source(tmp_path, "pt")
    assert source.load(source.items[0]).hidden_states.shape == (1024, 2, 4096)
    assert "100 views of 1677721600 bytes together" in str(refused(source, "b.pt"))


def test_a_long_pickle_in_a_small_file(tmp_path):
    for make in (zipped, legacy):
        (tmp_path / "x.pt").write_bytes(make(in_dict(b"](" + b"]" * (3 << 20) + b"e")))
        with pytest.raises(SourceError, match=r"a pickle of 3145\d+ bytes|pickles of more than 10\d+ bytes"):
            load_torch_file(tmp_path / "x.pt", "x.pt")


def test_a_pickle_under_a_name_in_other_case(tmp_path):
    """torch finds it by that name, so that it is looked into as well."""
    opcodes, words = HOSTILE["a bytearray of any size"]
    (tmp_path / "x.pt").write_bytes(zipped(in_dict(opcodes), name="archive/DATA.PKL"))
    with pytest.raises(SourceError, match=words):
        load_torch_file(tmp_path / "x.pt", "x.pt")


@pytest.mark.parametrize("legacy_format", [False, True])
def test_what_people_save_passes(tmp_path, legacy_format):
    from collections import OrderedDict

    value = {
        "a": torch.ones(2, dtype=torch.bfloat16),
        "b": torch.nn.Parameter(torch.ones(2)),
        "c": OrderedDict(x=torch.ones(1)),
        "d": [1, 2.5, None, True, "text", (1, 2), 1 << 70, -5, {"e": {}}],
        3: torch.bfloat16,
        "f": torch.zeros(3, dtype=torch.bool),
    }
    torch.save(value, tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy_format)
    loaded = load_torch_file(tmp_path / "x.pt", "x.pt")[0]
    assert loaded.keys() == value.keys()
    assert loaded["d"] == value["d"]
    assert torch.equal(loaded["b"], value["b"])
    assert loaded[3] is torch.bfloat16


@pytest.mark.parametrize("name", ["uint16", "float8_e4m3fn"])
def test_dtypes_that_torch_saves_in_another_way(tmp_path, name):
    torch.save({"a": torch.ones(2).to(getattr(torch, name))}, tmp_path / "x.pt")
    assert load_torch_file(tmp_path / "x.pt", "x.pt")[0]["a"].dtype == getattr(torch, name)


def test_every_truncation_and_flip_of_a_pickle_ends_as_an_error_or_not_at_all():
    data = pickle.dumps({"a": [1, "b", (2.0, None)], "c": {"d": [True] * 5}}, 2)
    assert any(opcode.name == "SETITEMS" for opcode, _, _ in pickletools.genops(data))
    n_refused = 0
    for position in range(len(data)):
        for broken in (data[:position], data[:position] + bytes([data[position] ^ 0x41]) + data[position + 1 :]):
            try:
                check_pickle(io.BytesIO(broken), "x")
            except SourceError:
                n_refused += 1
    assert n_refused > len(data)


def test_a_checkpoint_of_a_model_is_refused_by_what_it_has_more(tmp_path):
    """Its OrderedDict has attributes."""
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "x.pt")
    with pytest.raises(SourceError, match="a pickle with the opcode BUILD"):
        load_torch_file(tmp_path / "x.pt", "x.pt")


@pytest.mark.parametrize("numel", [17, 1 << 20, 1 << 40, 1 << 61])
def test_sizes_in_legacy_files_are_not_believed(tmp_path, numel):
    """A storage of so many elements before the bytes of sixteen."""
    digits = numel.to_bytes((numel.bit_length() + 8) // 8, "little", signed=True)
    count = b"\x8a" + bytes([len(digits)]) + digits
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + count + b"NtQ"
    view = storage + b"K\x00(K\x04t(K\x01t\x89" + ORDERED_DICT + b")Rt"
    value = in_dict(b"ctorch._utils\n_rebuild_tensor_v2\n(" + view + b"R")
    data = LEGACY_HEAD + b"\x80\x02" + value + b"." + pickle.dumps(["0"], 2)
    path = tmp_path / "x.pt"
    path.write_bytes(data + struct.pack("<q", numel) + bytes(64))
    with pytest.raises(SourceError):
        load_torch_file(path, "x.pt")
    path.write_bytes(data.replace(count, b"\x8a\x01\x10") + struct.pack("<q", 16) + bytes(64))
    assert load_torch_file(path, "x.pt")[0]["x"].tolist() == [0] * 4
