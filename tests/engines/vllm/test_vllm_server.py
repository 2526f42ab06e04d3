"""A real vLLM server writes into a dataset: what its clients see, what a kill leaves, and training from it."""

import json
import os
import random
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from program import environment, python_of, run
from safetensors.torch import load_file
from server import serving

from hsfmt import HiddenStateDataset, seal
from hsfmt.cli.main import main as hsfmt
from hsfmt.readers.sources.arrow_rows import ArrowRows
from hsfmt.writers.vllm_client import capture_request, flush_request, wait_durable

pytestmark = [pytest.mark.engine, pytest.mark.slow]
LONG_SECONDS = 120.0


def prompt_of(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(5, 470) for _ in range(rng.randrange(3, 300))]


@pytest.fixture(scope="module")
def half(data_dir, tmp_path_factory):
    """A dataset of every other row of the folder that speculators made."""
    source = tmp_path_factory.mktemp("half") / "source"
    shutil.copytree(data_dir / "speculators" / "0.9.0", source)
    for row in range(0, 24, 2):
        (source / "hidden_states" / f"hs_{row}.safetensors").unlink()
    hsfmt(["convert", str(source), str(source.parent / "dataset"), "--layer-ids", "2,4,5,8"], standalone_mode=False)
    return source.parent / "dataset"


def train(data_dir, folder, how: str, *more: object) -> str:
    script = data_dir.parent / "engines" / "speculators" / "train_on_cpu.py"
    words = (
        f"--verifier-name-or-path {data_dir / 'tiny-llama'} --data-path {data_dir / 'speculators' / '0.9.0'}"
        " --speculator-type eagle3 --target-layer-ids 2 4 5 --total-seq-len 256 --epochs 1 --max-steps 2 --seed 1"
        f" --draft-attn-impl eager --loss-implementation eager --num-workers 0 --save-path {folder / how}"
    )
    command = [python_of(".venv-speculators"), script, how, *words.split(), *more]
    return run(command, folder / f"{how}.log", environment(OMP_NUM_THREADS="1"))


def losses(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"(?:train/loss|val/loss_epoch)=([.\d]+)", text)]


def test_clients_training_and_a_kill(data_dir, half, tmp_path):
    """One server, since it takes long to start: files for online training, and a dataset of all it computed."""
    dataset, files = tmp_path / "dataset", tmp_path / "files"
    extra = {"hsfmt_path": str(dataset), "shared_storage_path": str(files), "hsfmt_options": {"part_seconds": 3600}}
    with serving(data_dir / "tiny-llama", extra, tmp_path) as server:
        check_online_training(data_dir, half, server, tmp_path)
        prompts = {f"s{number}": prompt_of(number) for number in range(24)}
        with ThreadPoolExecutor(8) as pool:
            told = list(pool.map(lambda name: server.post(capture_request(prompts[name], name)), prompts))
        assert [answer["hsfmt"]["id"] for answer in told] == list(prompts)
        assert {answer["hsfmt"]["state"] for answer in told} == {"pending"}
        assert wait_durable(dataset, prompts, 0) == list(prompts)  # part_seconds has not passed, and no one flushed
        assert server.post(flush_request())["hsfmt"] == {"dataset": str(dataset), "state": "none", "flush": True}
        assert wait_durable(dataset, prompts, LONG_SECONDS) == []

        bad = {
            "prompt": [1, 2, 3],
            "max_tokens": 1,
            "kv_transfer_params": {"hsfmt": {"id": "x", "loss_mask": [[2, 9]]}},
        }
        refused = server.post(bad)["hsfmt"]
        assert (refused["state"], refused["reason"]) == ("refused", "bad_request")
        server.post(capture_request([1, 2, 3], "late"))
        server.post(capture_request([4, 5, 6], "s3"))
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()

    hsfmt(["verify", str(dataset)], standalone_mode=False)
    seal(dataset)
    stored = HiddenStateDataset(dataset)
    assert {"late", "x"}.isdisjoint(stored.sample_ids)
    for name, answer in zip(prompts, told, strict=True):
        item = stored[stored.index_of(name)]
        file = load_file(answer["hidden_states_path"])
        assert item["input_ids"].tolist() == prompts[name] == file["token_ids"].tolist()
        assert torch.equal(item["hidden_states"], file["hidden_states"])
    check_generated_rows(data_dir, stored)


def check_online_training(data_dir, half, server, tmp_path) -> None:
    """Half the rows out of a dataset, half from the server: the losses are those of the whole folder of files."""
    options = ["--hidden-states-backend", "hsfmt", "--hsfmt-path", half, "--vllm-endpoint", f"{server.url}/v1"]
    mixed = train(data_dir, tmp_path, "hsfmt", *options, "--on-missing", "generate")
    assert "12 of 24 rows" in mixed
    assert "train/error_records=0.00e+00" in mixed
    whole = train(data_dir, tmp_path, "file", "--on-missing", "raise")
    assert len(losses(whole)) == 3
    # The server batches otherwise than it did for the files, and bfloat16 rounds.
    assert losses(mixed) == pytest.approx(losses(whole), abs=0.01)
    assert list((tmp_path / "files").glob("*.safetensors")) == []  # taken, and deleted


def check_generated_rows(data_dir, stored) -> None:
    """What was generated for the trainer is in the server's dataset, as the offline run had it but for rounding."""
    by_tokens = {tuple(item["input_ids"].tolist()): item["hidden_states"] for item in stored}
    found = 0
    for row in range(0, 24, 2):
        file = load_file(data_dir / "speculators" / "0.9.0" / "hidden_states" / f"hs_{row}.safetensors")
        states = by_tokens.get(tuple(file["token_ids"].tolist()))
        if states is not None:
            found += 1
            assert relative_error(states, file["hidden_states"]) < 0.05
    assert found > 0
    assert found == len(stored) - 24  # beside the prompts of this test


def test_captured_conversations_and_a_server_that_ends_in_order(data_dir, tmp_path):
    """`hsfmt capture` against two tensor-parallel ranks that store what is asked for alone; then SIGTERM."""
    dataset, part = tmp_path / "dataset", tmp_path / "some.jsonl"
    conversations = data_dir / "tiny-llama" / "convs.jsonl"
    part.write_text("".join(conversations.read_text().splitlines(keepends=True)[:5]))
    extra = {"hsfmt_path": str(dataset), "hsfmt_options": {"part_seconds": 4, "capture": "asked"}}
    more = ["--shutdown-timeout", "20", "--tensor-parallel-size", "2"]
    with serving(data_dir / "tiny-llama", extra, tmp_path, *more) as server:
        first = capture(data_dir, part, dataset, server.url)
        assert (first["lines"], first["durable"], first["failed"], first["bad"]) == (5, 5, {}, {})
        whole = capture(data_dir, conversations, dataset, server.url)
        assert (whole["lines"], whole["present"], whole["durable"]) == (12, 5, 7)
        assert "hidden_states_path" not in server.post(capture_request(prompt_of(1), "kept"))
        told = server.post({"prompt": [1, 2, 3], "max_tokens": 1})
        assert told == {"hsfmt": {"dataset": str(dataset), "state": "none"}}
        # Its engine closes our writer, or sleeps through the signal: then the part ends by age before the timeout.
        server.process.terminate()
        server.process.wait(LONG_SECONDS)
    assert wait_durable(dataset, ["kept"], 0) == []
    seal(dataset)
    stored = HiddenStateDataset(dataset)
    assert list(stored.sample_ids)[:12] == [f"s{number}" for number in range(12)]
    # What speculators prepared of these conversations has a row for each assistant turn, with the same tokens and mask.
    prepared = data_dir / "speculators" / "0.9.0"
    rows = ArrowRows([prepared / "data-00000-of-00001.arrow"])
    row_of = {tuple(rows.input_ids(row)): row for row in range(rows.n_rows)}
    for number in range(12):
        item = stored[number]
        row = row_of[tuple(item["input_ids"].tolist())]
        assert item["loss_mask"].tolist() == rows.loss_mask(row, len(item["loss_mask"])).astype(bool).tolist()
        expected = load_file(prepared / "hidden_states" / f"hs_{row}.safetensors")["hidden_states"]
        assert relative_error(item["hidden_states"], expected) < 0.05


def relative_error(states: torch.Tensor, expected: torch.Tensor) -> float:
    return float((states.float() - expected.float()).norm() / expected.float().norm())


def capture(data_dir, prompts, dataset, url) -> dict:
    """Run `hsfmt capture` where transformers is; return its report."""
    words = ["capture", prompts, dataset, "--server", url, "--tokenizer", data_dir / "tiny-llama", "--mask", "last"]
    command = [python_of(".venv-vllm"), "-m", "hsfmt.cli", *words, "--json", "--quiet", "--no-seal"]
    log = dataset.parent / f"{prompts.stem}.log"
    return json.loads(run(command, log, environment()))
