"""A real server whose dataset lies in a bucket: killed with samples on their way, and started again."""

import os
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers.seaweed import KEY, SECRET
from sglang_server import check_sample, quietly, reference, serving

from hsfmt.catalog import committed_parts
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.torch]
LAYERS = [1, 4, 6, 8]
ARGUMENTS = (
    "--dtype", "float32", "--speculative-algorithm", "DFLASH", "--return-aux-hidden-state-layer-ids", "0", "3", "5",
)  # fmt: skip
NUMBERS = (3, 4, 5, 6, 7, 9, 11)


@pytest.fixture
def out(s3_server, bucket, monkeypatch):
    """URL of a dataset that servers and this process find by their environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    return f"s3://{bucket}/states"


def test_killed_while_it_writes_into_a_bucket_then_a_second_run_that_completes(models, out, tmp_path):
    expected = reference(models, "qwen3", "float32")
    first = {f"p{number}": number for number in NUMBERS}
    second = {f"again{number}": number for number in NUMBERS}
    with serving(models / "qwen3", out, tmp_path, *ARGUMENTS) as server:
        answers = server.capture_all(first)
        assert all(answer.accepted for answer in answers.values())
        urllib.request.urlopen(f"{server.url}/flush_cache?timeout=60", timeout=100).close()
        assert server.status()["durable"] == len(first)
        # One accepted, and not durable; then killed with more on their way.
        assert server.capture(NUMBERS[0], f"again{NUMBERS[0]}").accepted
        with ThreadPoolExecutor(1) as pool:
            pool.submit(quietly, server.capture_all, second)
            os.killpg(server.process.pid, signal.SIGKILL)
    assert sorted(server.samples()) == sorted(first)
    with serving(models / "qwen3", out, tmp_path, *ARGUMENTS) as server:
        answers = server.capture_all(first | second)
        assert {name: answer.reason for name, answer in answers.items() if not answer.accepted} == dict.fromkeys(
            first, "duplicate"
        )
        # SIGTERM: the server commits what it holds by itself.
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(120)
    stored = server.samples()
    assert sorted(stored) == sorted(first | second)
    for name, number in (first | second).items():
        check_sample(stored[name], number, expected, LAYERS)
    store = open_store(out)
    assert len(committed_parts(store)) == 2
    assert verify(store, level="full").ok
