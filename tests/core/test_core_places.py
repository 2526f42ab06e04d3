"""Where a dataset may be made, when it can't be looked at what there is."""

import errno
import os
import stat

import pytest

from hsfmt.errors import UsageError
from hsfmt.root import refuse_file
from hsfmt.storage import open_store


@pytest.mark.parametrize("code", [errno.EIO, errno.EINTR, errno.EMFILE, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("level", range(3))
def test_what_can_not_be_looked_at_is_left_to_writing(tmp_path, monkeypatch, code, level):
    """An error of the operating system's own would be no error of ours."""
    dataset = tmp_path / "a" / "b"
    there = str([dataset, *dataset.parents][level])
    true_stat, failed = os.stat, []

    def failing(path, *rest, **options):
        if os.fspath(path) == there:
            failed.append(path)
            raise OSError(code, os.strerror(code), there)
        return true_stat(path, *rest, **options)

    monkeypatch.setattr(os, "stat", failing)
    refuse_file(open_store(dataset))
    assert failed


@pytest.mark.parametrize("below", ["", "a/b"])
def test_a_file_is_refused_and_a_fifo_too(tmp_path, below):
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "fifo")
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)
    for name in ("file", "fifo"):
        with pytest.raises(UsageError, match=f"got a file: .*{name}"):
            refuse_file(open_store(tmp_path / name / below))


@pytest.mark.parametrize("url", ["a\0b", "\0", "file:///a\0", "s3://bucket/a\0b"])
def test_a_name_with_nul_is_refused(url):
    with pytest.raises(UsageError, match="NUL"):
        open_store(url)
