"""A file system that is really full: a small tmpfs in a mount namespace of its own; and files that may not grow.

No quota is set here, since few kernels and file systems take one: EDQUOT is injected, in test_fault_injection.py.
"""

import shutil
import subprocess

import pytest
from scenarios import SCENARIOS
from test_fault_injection import hunted

MOUNT = 'mount -t tmpfs tmpfs "$0" && exec "$@"'
ALONE = ["unshare", "--mount", "--map-root-user", "sh", "-c", MOUNT]
MAKING = [name for name, scenario in SCENARIOS.items() if scenario.makes]
SOME = ["commit", "convert --delete-source", "export npz", "merge --move"]


def full(repo_root, kind, folder, step, *names, timeout=600):
    """Run full_disk.py; of a kind that needs one, on a tmpfs."""
    inside = ()
    if kind != "length":
        tried = [*ALONE, folder, "true"]
        if shutil.which("unshare") is None or subprocess.run(tried, capture_output=True, check=False).returncode:
            pytest.skip("NOT TESTED HERE: nobody may mount a small tmpfs; test_fault_injection.py has ENOSPC")
        inside = [*ALONE, folder]
    report = hunted(repo_root, "full_disk.py", kind, folder, step, *names, timeout=timeout, inside=inside)
    assert all(found["refused"] == found["runs"] - 1 for found in report.values())
    assert sum(found["errno"] for found in report.values()) >= len(report), "most errors name the reason"
    return report


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "step"), [("size", 17), ("inodes", 17), ("length", 1200)])
def test_a_full_disk_takes_nothing_that_was_committed(repo_root, tmp_path, kind, step):
    report = full(repo_root, kind, tmp_path, step, *SOME)
    assert list(report) == SOME


@pytest.mark.deep
@pytest.mark.parametrize(("kind", "step"), [("size", 1), ("inodes", 1), ("length", 16)])
def test_whatever_room_is_left(repo_root, tmp_path, kind, step):
    # A copy asks for 64 MiB to spare before it begins.
    names = [name for name in MAKING if name != "merge --copy" or kind != "size"]
    report = full(repo_root, kind, tmp_path, step, *names, timeout=20_000)
    assert list(report) == names
    assert sum(found["refused"] for found in report.values()) > 200
