"""Documents changed anywhere to anything, and signed: only errors of this package ever come out."""

import shutil

import pytest
from dataset_forge import Forge, build
from hypothesis import given, settings
from hypothesis import strategies as st

from hsfmt.errors import HsfmtError
from hsfmt.readers.sample_reader import ReadOptions, SampleReader
from hsfmt.readers.verification import verify

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([0, -1, 2**31, 2**40, 2**63 - 1, "../x", "xxh3_128:" + "0" * 32, "part-1", "zstd", "token"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=6,
)
DOCUMENTS = ("document", "pointer", "manifest", "index", "snapshot", "ids")


def places(document, path=()):
    yield path
    members = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, member in members:
        yield from places(member, (*path, key))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return build(tmp_path_factory.mktemp("structure") / "base")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_any_value_anywhere(base, tmp_path, name):
    done = {"run": 0, "refused": 0}

    @settings(max_examples=settings().max_examples // 4)
    @given(st.data())
    def try_one(data):
        root = tmp_path / "d"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(base, root)
        forge = Forge(root)
        document = {
            "document": forge.document,
            "pointer": forge.pointer,
            "manifest": forge.manifests["part-0"],
            "index": forge.indexes["part-0"].metadata,
            "snapshot": forge.snapshot.metadata,
            "ids": forge.ids.metadata,
        }[name]
        path = data.draw(st.sampled_from([path for path in places(document) if path]))
        place = document
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = data.draw(VALUES)
        forge.save()
        done["run"] += 1
        try:
            verify(root, level="full")
            reader = SampleReader(root, options=ReadOptions(n_threads=1))
            reader.attachments()
            reader.read_many(range(len(reader)))
            list(reader.sample_ids)
            SampleReader(root, snapshot="live")
        except HsfmtError:
            done["refused"] += 1

    try_one()
    assert done["run"] >= 10
    assert done["refused"] > 0
