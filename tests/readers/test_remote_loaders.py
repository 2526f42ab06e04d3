"""DataLoaders over remote datasets: workers by fork and spawn, whatever the parent did before."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_loader_processes import expected_of
from written import write_dataset

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SCRIPT = Path(__file__).parent / "remote_loader_script.py"
TIMEOUT_SECONDS = 1000


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("written") / "dataset", (70, 3, 64, 130, 5, 31, 90), hidden=64)


@pytest.fixture
def run_workers(written, repo_root, tmp_path):
    """Run the program; return what it prints."""
    expected = expected_of(written, tmp_path)

    def run(url, options, method, **environment):
        done = subprocess.run(
            [sys.executable, SCRIPT, "workers", url, json.dumps(options), expected, method],
            env=os.environ | {"PYTHONPATH": str(repo_root), "OMP_NUM_THREADS": "1"} | environment,
            text=True, capture_output=True, check=False, timeout=TIMEOUT_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


# What workers say: (they use obstore, their parent had used it when it forked them).
FAST, FALLEN_BACK, SLOW = [[True, False]], [[False, True]], [[False, False]]


@pytest.mark.parametrize(
    ("method", "client", "said"),
    [
        ("fork", "obstore", [FAST, FALLEN_BACK]),
        ("spawn", "obstore", [FAST, FAST]),
        ("fork", "fsspec", [SLOW, SLOW]),
    ],
)
def test_workers_over_s3(written, s3_server, bucket, run_workers, method, client, said):
    """After a fork of a process that used obstore, which would hang there, workers read through s3fs."""
    s3_server.upload(written.path, f"s3://{bucket}/dataset")
    assert run_workers(f"s3://{bucket}/dataset", s3_server.options(), method, HSFMT_REMOTE=client) == said


def test_workers_over_http(written, web_server, serve, run_workers):
    url = f"{web_server.url}/{serve(written.path)}"
    assert run_workers(url, {}, "fork") == [SLOW, SLOW]


def test_memory_stays_flat_over_epochs(s3_server, bucket, tmp_path, repo_root):
    """Of two workers that read ahead, and of their parent: of 192 MiB less than a part in six may stay."""
    n_tokens = (256,) * 64
    path = write_dataset(
        tmp_path / "dataset", n_tokens, layers=(1,), hidden=256, chunk_tokens=64, shard_tokens=1024
    ).path
    s3_server.upload(path, f"s3://{bucket}/dataset")
    n_epochs, n_first = 32, 8
    done = subprocess.run(
        [sys.executable, SCRIPT, "epochs", f"s3://{bucket}/dataset", json.dumps(s3_server.options()), f"{n_epochs}"],
        env=os.environ | {"PYTHONPATH": str(repo_root), "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
        text=True, capture_output=True, check=False, timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert sum(row["nbytes"] for row in said[n_first:]) == (n_epochs - n_first) * 64 * 256 * 256 * 2
    for of in ("parent", "workers"):
        first, last = (max(row[of] for row in rows) for rows in (said[:n_first], said[n_first:]))
        assert last - first < 32 << 20
