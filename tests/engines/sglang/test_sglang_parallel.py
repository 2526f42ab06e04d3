"""Tensor and data parallelism: each sample once, whole, from whichever rank."""

import json
import urllib.request

import program
import pytest
from sglang_server import (
    HERE,
    LONG,
    PROMPTS,
    SHARED,
    SHORT,
    START_SECONDS,
    VENV,
    check_sample,
    environment,
    reference,
    samples_of,
    serving,
)

from hsfmt.catalog import committed_parts, load_manifest, read_header
from hsfmt.storage import open_store
from hsfmt.writers.sglang import client

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.torch]
WANTED = [*SHORT, *SHARED, *LONG[:2]]


def captured(server):
    answers = server.capture_all({f"p{number}": number for number in WANTED})
    assert {answer.reason for answer in answers.values()} == {""}
    urllib.request.urlopen(f"{server.url}/flush_cache?timeout=60", timeout=100).close()
    status = server.status()
    assert (status["asked"], status["durable"], status["pending"]) == (len(WANTED), len(WANTED), 0)
    return server.samples()


def writing_ranks(out):
    store = open_store(out)
    header = read_header(store)
    producers = [load_manifest(store, part, header).producer for part in committed_parts(store)]
    return {(producer["tp_rank"], producer["dp_rank"]) for producer in producers}


def test_one_of_two_tensor_parallel_ranks_writes(models, tmp_path):
    """In an offline engine, flushed by the RPC, which every rank answers; its shutdown kills the ranks."""
    expected = reference(models, "llama", "float32")
    out = tmp_path / "states"
    job = {
        "engine": {
            "model_path": str(models / "llama"), "device": "cpu", "attention_backend": "torch_native",
            "skip_tokenizer_init": True, "mem_fraction_static": 0.5, "max_total_tokens": 8192, "dtype": "float32",
            "chunked_prefill_size": 64, "tp_size": 2, "log_level": "error", "speculative_algorithm": "EAGLE3",
            "enable_return_aux_hidden_states": True, "return_aux_hidden_state_layer_ids": [1, 3, 6],
        },
        "requests": [client.request_fields(f"p{number}", PROMPTS[number]) for number in WANTED],
    }  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(job))
    script = [program.python_of(VENV), HERE / "run_engine.py", tmp_path / "job.json"]
    env = {**environment(out), "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    outcome = json.loads(program.run(script, tmp_path / "log", env, seconds=START_SECONDS).splitlines()[-1])
    answers = [client.parse_answer("", response) for response in outcome["responses"]]
    assert all(answer.accepted for answer in answers)
    (status,) = outcome["status"]
    assert (status["durable"], status["pending"], status["errors"], status["flushes"]) == (len(WANTED), 0, 0, 1)
    samples = samples_of(out)
    for number in WANTED:
        check_sample(samples[f"p{number}"], number, expected, [2, 4, 7, 8])
    assert writing_ranks(out) == {(0, 0)}


def test_each_data_parallel_rank_writes_its_own_samples(models, tmp_path):
    """In bfloat16, whose bit patterns go as they are."""
    expected = reference(models, "qwen3", "bfloat16")
    arguments = [
        "--dtype", "bfloat16", "--dp-size", "2",
        "--speculative-algorithm", "DFLASH", "--return-aux-hidden-state-layer-ids", "0", "3", "5",
    ]  # fmt: skip
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with serving(models / "qwen3", tmp_path / "states", tmp_path, *arguments, env=env) as server:
        samples = captured(server)
        ranks = client.server_status(server.url)
        assert len(ranks) == 2
        assert all(rank["durable"] > 0 for rank in ranks)
        assert client.flush(server.url) == client.server_status(server.url)
    for number in WANTED:
        check_sample(samples[f"p{number}"], number, expected, [1, 4, 6, 8], tolerance=None)
    assert writing_ranks(server.out) == {(0, 0), (0, 1)}
