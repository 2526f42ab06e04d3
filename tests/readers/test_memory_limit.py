"""Less memory than a sample takes: an error that says what to read instead, and the reader goes on."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest

from hsfmt import DatasetWriter
from hsfmt.errors import StorageError
from hsfmt.readers.sample_reader import SampleReader

N_TOKENS, HIDDEN = 1 << 20, 64

SCRIPT = textwrap.dedent("""
    import resource, sys
    from pathlib import Path
    from hsfmt.errors import StorageError
    from hsfmt.readers.sample_reader import ReadOptions, SampleReader

    reader = SampleReader(sys.argv[1], options=ReadOptions(n_threads=1))
    before = reader.read(0, 5, 1000).hidden_states.tobytes()
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (64 << 20), resource.RLIM_INFINITY))
    for _ in range(3):
        try:
            reader.read(0)
        except StorageError as error:
            assert f"1 sample(s) of {sys.argv[2]} tokens" in str(error), error
            assert "read a window" in str(error)
        else:
            raise AssertionError("128 MiB within 64")
        assert reader.read(0, 5, 1000).hidden_states.tobytes() == before
    print("went on")
""")


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A sample of 128 MiB that is stored in a few kilobytes."""
    path = tmp_path_factory.mktemp("memory") / "d"
    with DatasetWriter(path, layers=[1], hidden_size=HIDDEN, final_norm="pre", codec="zstd", threads=1) as writer:
        writer.write("large", np.zeros(N_TOKENS, np.int64), np.ones((N_TOKENS, 1, HIDDEN), np.uint16))
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
def test_a_sample_larger_than_memory(large):
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(large), str(N_TOKENS)], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (0, "went on\n"), result.stderr


def test_memory_that_ends_while_samples_are_laid_out(large, monkeypatch):
    def ask(*arguments):
        raise MemoryError("Unable to allocate 32.0 GiB")

    reader = SampleReader(large)
    monkeypatch.setattr("hsfmt.readers.sample_reader.ask", ask)
    with pytest.raises(StorageError, match="Unable to allocate") as caught:
        reader.read_many([0])
    assert isinstance(caught.value.__cause__, MemoryError)
    assert f"1 sample(s) of {N_TOKENS} tokens" in caught.value.problems[0].expected
