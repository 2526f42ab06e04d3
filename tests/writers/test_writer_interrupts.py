"""Interrupts, exits and bad settings at awkward moments: nothing that was accepted goes without a word."""

import re
import threading

import numpy as np
import pytest

from hsfmt import DatasetWriter
from hsfmt.catalog import committed_parts
from hsfmt.errors import SampleError, UsageError, WriterClosedError
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.storage import open_store
from hsfmt.writers import part_sequence
from hsfmt.writers.sample_files import FileTensor, write_sample_file

STATES = np.zeros((3, 1, 8), np.uint16)


def writer_of(url, **options):
    return DatasetWriter(url, layers=[1], hidden_size=8, final_norm="pre", **options)


def ids(url):
    return sorted(SampleReader(url, snapshot="live").sample_ids)


def test_interrupt_while_a_part_ends_closes_the_writer_and_says_so(tmp_path, monkeypatch, caplog):
    writer = writer_of(tmp_path / "d")
    writer.write("a", np.arange(3), STATES)

    cancel = threading.Timer.cancel

    def interrupted_once(self):
        monkeypatch.setattr(threading.Timer, "cancel", cancel)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Timer, "cancel", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        writer.commit()
    with pytest.raises(WriterClosedError):
        writer.write("b", np.arange(3), STATES)
    with pytest.raises(WriterClosedError):
        writer.close()
    assert ids(tmp_path / "d") == ["a"]  # it had been handed over; what is durable is there, and no retry is refused


def test_part_that_can_not_be_handed_over_is_not_forgotten(tmp_path, monkeypatch, caplog):
    writer = writer_of(tmp_path / "d")
    writer.write("a", np.arange(3), STATES)
    with monkeypatch.context() as patch:
        patch.setattr(writer._parts._executor, "submit", lambda *_: (_ for _ in ()).throw(RuntimeError("no thread")))
        with pytest.raises(RuntimeError, match="no thread"):
            writer.commit()
    assert "1 accepted samples were not committed" in caplog.text
    with pytest.raises(WriterClosedError):
        writer.close()
    assert committed_parts(open_store(tmp_path / "d")) == []
    with writer_of(tmp_path / "d") as again:
        assert again.write("a", np.arange(3), STATES)


SCRIPT = """
import logging, sys
import numpy as np
from hsfmt import DatasetWriter
logging.basicConfig(stream=sys.stdout, format="%(message)s")
writer = DatasetWriter(sys.argv[1], layers=[1], hidden_size=8, final_norm="pre", part_nbytes=1)
for i in range(3):
    writer.write(f"s{i}", np.arange(3), np.zeros((3, 1, 8), np.uint16))
"""


def test_parts_that_ended_by_size_are_committed_at_exit(run_python, repo_root, tmp_path):
    assert run_python(SCRIPT, str(tmp_path / "d"), path=repo_root) == ""
    assert ids(tmp_path / "d") == ["s0", "s1", "s2"]


def test_parts_that_fail_at_exit_are_counted(run_python, repo_root, tmp_path):
    # As in a Python that has no such hook: executors refuse the work that a commit needs.
    script = SCRIPT + "from hsfmt.writers import part_sequence\npart_sequence._LIVE.clear()\n"
    said = run_python(script, str(tmp_path / "d"), path=repo_root)
    lost = re.search(r"never closed: (\d) accepted samples are lost", said)
    there = len(ids(tmp_path / "d")) if committed_parts(open_store(tmp_path / "d")) else 0
    assert there + (int(lost[1]) if lost else 0) == 3


def test_hook_is_there():
    assert part_sequence._register is not None


@pytest.mark.parametrize(
    "option", [{"threads": -1}, {"threads": 0}, {"part_nbytes": "1GiB"}, {"queue_nbytes": 0}, {"part_seconds": 0}]
)
def test_settings_out_of_range_create_nothing(tmp_path, option):
    with pytest.raises(UsageError, match=next(iter(option))):
        writer_of(tmp_path / "d", **option)
    assert not (tmp_path / "d").exists()


def test_a_reason_too_long_to_read_back_is_refused(tmp_path):
    with writer_of(tmp_path / "d") as writer:
        writer.write("a", np.arange(3), STATES)
        with pytest.raises(SampleError, match="a reason of at most 65536 bytes"):
            writer.hole("b", "x" * 65537)
        writer.hole("b", "x" * 65536)
    assert ids(tmp_path / "d") == ["a"]


def test_columns_named_like_parameters_of_numpy_are_written(tmp_path):
    tensors = {
        name: FileTensor("int32", np.arange(3, dtype=np.int32) + i) for i, name in enumerate(("file", "allow_pickle"))
    }
    write_sample_file(tmp_path / "x.npz", tensors, {"id": "x"})
    with np.load(tmp_path / "x.npz") as data:
        assert data["file"].tolist() == [0, 1, 2]
        assert data["allow_pickle"].tolist() == [1, 2, 3]
    with pytest.raises(UsageError, match="no such column"):
        write_sample_file(tmp_path / "y.npz", {"hsfmt": tensors["file"]}, {})
