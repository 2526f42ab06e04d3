"""A writer that nobody closes does not lose what it accepted without a word."""

import re

import numpy as np
import pytest

from hsfmt import DatasetWriter
from hsfmt.errors import SampleError

SCRIPT = """
import logging, sys
import numpy as np
from hsfmt import DatasetWriter
logging.basicConfig(stream=sys.stdout, format="%(message)s")
writer = DatasetWriter(sys.argv[1], layers=[1], hidden_size=8, final_norm="pre", part_seconds=None)
writer.write("a", np.arange(3), np.zeros((3, 1, 8), np.uint16))
writer.write("b", np.arange(3), np.zeros((3, 1, 8), np.uint16))
{end}
"""


def test_what_is_lost_at_exit_is_said(run_python, repo_root, tmp_path):
    said = run_python(SCRIPT.format(end=""), str(tmp_path / "d"), path=repo_root)
    assert re.search(r"never closed: 2 accepted samples are lost", said)


@pytest.mark.parametrize("end", ["writer.abort()", "writer.__exit__(ValueError, ValueError(), None)"])
def test_what_an_exception_discards_is_said(run_python, repo_root, tmp_path, end):
    said = run_python(SCRIPT.format(end=end), str(tmp_path / "d"), path=repo_root)
    assert re.search(r"2 accepted samples were not committed\n$", said)


@pytest.mark.parametrize("end", ["writer.close()", "writer.commit()"])
def test_nothing_is_said_when_nothing_is_lost_unasked(run_python, repo_root, tmp_path, end):
    assert run_python(SCRIPT.format(end=end), str(tmp_path / "d"), path=repo_root) == ""


def test_masked_arrays_are_refused(tmp_path):
    states = np.ma.masked_array(np.zeros((2, 1, 8), np.float32), mask=True)
    with DatasetWriter(tmp_path / "d", layers=[1], hidden_size=8, final_norm="pre", dtype="float32") as writer:
        with pytest.raises(SampleError, match=r"hidden_states: expected a plain array, got a masked array"):
            writer.write("a", np.arange(2), states)
        with pytest.raises(SampleError, match=r"loss_mask: expected a plain array"):
            writer.write("a", np.arange(2), states.data, loss_mask=np.ma.masked_array([1, 0], mask=[0, 1]))
        writer.write("a", np.arange(2), states.data)
        assert writer.commit() == ["a"]
