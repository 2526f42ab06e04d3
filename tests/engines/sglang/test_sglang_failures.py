"""Real servers that are killed, whose storage is slow, or that can't capture: nothing wrong is stored, all is said."""

import os
import signal
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import program
import pytest
from sglang_server import HERE, check_sample, command, environment, quietly, reference, serving

from hsfmt.catalog import committed_parts
from hsfmt.storage import open_store

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.torch]
LAYERS = [1, 4, 6, 8]
# The convention of DFLASH, and of a scheduler that takes one batch after the other.
ARGUMENTS = (
    "--dtype", "float32", "--disable-overlap-schedule",
    "--speculative-algorithm", "DFLASH", "--return-aux-hidden-state-layer-ids", "0", "3", "5",
)  # fmt: skip
NUMBERS = (3, 4, 5, 6, 7, 9, 11)
# As when memory runs out: every few forwards requests that generate are put back, and their prompts computed again.
RETRACTION = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "6"}


@pytest.fixture(scope="module")
def expected(models):
    return reference(models, "qwen3", "float32")


def verified(server):
    """Seal what is committed and verify all of it; return its samples."""
    samples = server.samples()
    program.run([sys.executable, "-m", "hsfmt.cli", "verify", server.out], server.log.with_suffix(".verify"),
                program.environment())  # fmt: skip
    return samples


def test_retraction_then_kill_then_a_second_run_that_completes(models, expected, tmp_path):
    out = tmp_path / "states"
    first = {f"p{number}": number for number in NUMBERS}
    second = {f"again{number}": number for number in NUMBERS}
    with serving(models / "qwen3", out, tmp_path, *ARGUMENTS, env=RETRACTION) as server:
        answers = server.capture_all(first, sampling_params={"max_new_tokens": 10, "ignore_eos": True})
        assert all(answer.accepted for answer in answers.values())
        assert sum(response["meta_info"]["num_retractions"] for response in server.responses) > 0
        urllib.request.urlopen(f"{server.url}/flush_cache?timeout=60", timeout=100).close()
        assert server.status()["durable"] == len(first)
        # One accepted, and not durable; then killed with more on their way.
        assert server.capture(NUMBERS[0], f"again{NUMBERS[0]}").accepted
        with ThreadPoolExecutor(1) as pool:
            pool.submit(quietly, server.capture_all, second)
            os.killpg(server.process.pid, signal.SIGKILL)
    log = server.log
    before = verified(server)
    assert sorted(before) == sorted(first)
    with serving(models / "qwen3", out, tmp_path, *ARGUMENTS) as server:
        assert server.log != log
        answers = server.capture_all(first | second)
        refused = {name for name, answer in answers.items() if not answer.accepted}
        assert refused == set(before)
        assert {answers[name].reason for name in refused} == {"duplicate"}
        # SIGTERM: the server commits what it holds by itself.
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(120)
    stored = verified(server)
    assert sorted(stored) == sorted(first | second)
    for name, number in (first | second).items():
        check_sample(stored[name], number, expected, LAYERS)


def test_a_slow_store_costs_samples_and_not_the_service(models, tmp_path):
    """A store that takes a sample in 20 s: no forward waits longer than it may, what does not fit is refused."""
    options = {
        "queue_nbytes": "700KiB", "writer_queue_nbytes": "64KiB", "block_seconds": 0.2, "chunk_tokens": 16,
        "flush_seconds": 1, "codec": "none",
    }  # fmt: skip
    slow = {"paths": [HERE / "slow_store"], "env": {"HSFMT_TEST_BYTES_PER_SECOND": "10000"}}
    with serving(models / "qwen3", tmp_path / "states", tmp_path, *ARGUMENTS, **slow, **options) as server:
        answers = server.capture_all(dict.fromkeys([f"slow-{i}" for i in range(12)], 2))
        reasons = [answer.reason for answer in answers.values() if not answer.accepted]
        assert set(reasons) == {"queue_full"}
        assert len(reasons) < 12
        status = server.status()
        assert (status["accepted"], status["refused"]) == (12 - len(reasons), {"queue_full": len(reasons)})
        assert len(server.plain(3)["output_ids"]) == 1, "it serves on"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{server.url}/flush_cache?timeout=60", timeout=100)
        assert refused.value.code == 400
        refused.value.close()
        assert "it goes on" in server.log.read_text()
    assert committed_parts(open_store(server.out)) == [], "nothing was said to be durable, and nothing is half there"


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (("--enable-return-aux-hidden-states",), {"block_seconds": 1000}, "HSFMT_SGLANG_BLOCK_SECONDS"),
        ((), {}, "expected --enable-return-aux-hidden-states"),
    ],
    ids=["an option that can't be", "no capture flags"],
)
def test_a_server_that_can_not_capture_does_not_start(models, tmp_path, arguments, options, said):
    log = tmp_path / "server.log"
    env = environment(tmp_path / "states", **options)
    with program.started(command(models / "llama", 1, "--dtype", "float32", *arguments), log, env) as process:
        process.wait(300)
    assert process.returncode != 0
    assert said in log.read_text()
    assert not (tmp_path / "states").exists()
