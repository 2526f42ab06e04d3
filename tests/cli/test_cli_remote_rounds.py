"""Commands that look at every part of a dataset in a bucket: in few round trips, however many parts there are.

The server answers only once as many requests are waiting as should be in flight: else nothing would go on.
"""

import os

import ml_dtypes
import numpy as np
import pytest
from servers.seaweed import KEY, SECRET

from hsfmt import DatasetWriter

N_PARTS = 10
DOCUMENTS = "/hsfmt/(manifests|index)/[^/]"


@pytest.fixture
def many_parts(tmp_path, monkeypatch, no_credentials, s3_server, bucket, s3_faults):
    """Make a dataset of 10 parts, and some more after the seal; return words of a command line that name it."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)

    def write(prefix, n_parts, *, seal):
        with DatasetWriter(
            tmp_path / "dataset", layers=[1], hidden_size=4, final_norm="pre", model="m", seal=seal,
            part_names=iter([f"{prefix}{n:02}" for n in range(n_parts)]).__next__,
        ) as writer:  # fmt: skip
            for number in range(n_parts):
                writer.write(f"{prefix}{number}", np.arange(3), np.ones((3, 1, 4), ml_dtypes.bfloat16))
                writer.commit()

    def make(n_newer=0):
        write("p", N_PARTS, seal=True)
        if n_newer:
            write("q", n_newer, seal=False)
        s3_server.upload(tmp_path / "dataset", f"s3://{bucket}/dataset")
        s3_faults.reset()
        return f"s3://{bucket}/dataset", "--storage-option", f"endpoint_url={s3_faults.url}"

    return make


@pytest.mark.parametrize(
    ("command", "groups"),
    [
        (("info",), (8, 12)),
        (("ls", "-l"), (8, 12)),
        (("card",), (8, 2)),
        (("seal",), (8, 2, 8, 2)),
        (("retract", "p3"), (8, 2, 8, 2)),
    ],
    ids=lambda value: value[0] if isinstance(value[0], str) else "",
)
def test_documents_of_parts_come_together(hsfmt, many_parts, s3_faults, command, groups):
    """Each once, in a round trip or two more than one, since there could be thousands."""
    where = many_parts()
    s3_faults.expect_groups(*groups, match=DOCUMENTS)
    name, *words = command
    hsfmt(name, where[0], *words, *where[1:])
    assert s3_faults.groups_left == 0
    if name != "retract":  # it seals, too
        assert s3_faults.count(DOCUMENTS) == sum(groups)


def test_newer_parts_come_together(hsfmt, many_parts, s3_faults):
    """And what the snapshot names is not read again for them."""
    where = many_parts(n_newer=10)
    s3_faults.expect_groups(8, 12, 8, 2, match=DOCUMENTS)
    newer = hsfmt.json("info", *where)["newer"]
    assert (len(newer["parts"]), newer["samples"]) == (10, 10)
    assert s3_faults.groups_left == 0
    assert s3_faults.count(DOCUMENTS) == 2 * N_PARTS + 10


def test_a_missing_manifest_is_named(hsfmt, many_parts, s3_server):
    where = many_parts()
    s3_server.file_system().rm_file(f"{where[0].removeprefix('s3://')}/hsfmt/manifests/p07.json")
    error = hsfmt("info", *where, code=3).stderr
    assert "hsfmt/manifests/p07.json" in error
