"""A process forks while it has a writer open: the child commits and removes nothing of its parent's."""

import os
import sys
import warnings

import numpy as np
import pytest

from hsfmt import DatasetWriter
from hsfmt.catalog import committed_parts
from hsfmt.errors import UsageError
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.storage import open_store


def sample(writer, sample_id):
    writer.write(sample_id, [1, 2, 3], np.full((3, 1, 4), ord(sample_id), np.float32))


class Ending(BaseException):
    pass


def use(writer, what):
    if what == "unwinds":
        raise Ending
    if what == "exits":
        sys.exit(3)
    if what in {"close", "commit", "abort"}:
        getattr(writer, what)()
    elif what == "write":
        sample(writer, "x")


def in_fork(writer, what, before):
    """Return the exit status of a child that leaves the parent's `with` in some way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside the threads of a writer is the point
        child = os.fork()
    if child == 0:
        status = 1
        try:
            with writer:
                use(writer, what)
        except UsageError:
            status = 2
        except Ending:
            status = 0
        except SystemExit as error:
            status = error.code
        else:
            status = 0
        finally:
            del writer
            os._exit(status if sorted(committed_parts(open_store(before[0]))) == before[1] else 9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    ("what", "status"),
    [("unwinds", 0), ("exits", 3), ("nothing", 2), ("write", 2), ("commit", 2), ("close", 2), ("abort", 2)],
)
def test_a_child_that_ends_leaves_the_open_part_alone(tmp_path, what, status):
    """The parent has a part that is committed and one that is open, some of it in files already."""
    url = str(tmp_path / "dataset")
    settings = {"layers": [1], "hidden_size": 4, "final_norm": "pre", "dtype": "float32", "threads": 1}
    with DatasetWriter(url, **settings, chunk_tokens=1, shard_tokens=2, part_seconds=None) as writer:
        sample(writer, "a")
        writer.commit()
        sample(writer, "b")
        before = sorted(committed_parts(open_store(url)))
        assert in_fork(writer, what, (url, before)) == status
        sample(writer, "c")
    reader = SampleReader(url)
    assert [reader.sample_ids[i] for i in range(3)] == ["a", "b", "c"]
    assert [float(found.hidden_states[0, 0, 0]) for found in reader.read_many(range(3))] == [97, 98, 99]
    assert len(committed_parts(open_store(url))) == 2
