"""A dataset through our connector equals, state for state, what vLLM's own connector writes for the same prompts."""

import json
import random
import re
from pathlib import Path

import pytest
import torch
from program import environment, python_of, run
from safetensors.torch import load_file

from hsfmt import HiddenStateDataset, seal

pytestmark = [pytest.mark.engine, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("extract.py")
LAYERS = [2, 4, 5, 8]
# Chunks of 64 tokens over several requests in one step; blocks of 32, so that the last prompts hit the prefix cache.
ENGINE = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "enable_prefix_caching": True, "block_size": 32}
CLOSED = re.compile(r"hsfmt: closed, (\d+) samples durable .*(\{\"asked.*\})")


def prompts() -> list[list[int]]:
    rng = random.Random(1)

    def words(n: int) -> list[int]:
        return [rng.randrange(5, 470) for _ in range(n)]

    shared = words(150)
    return [[0, *words(n - 1)] for n in (1, 5, 16, 17, 33, 64, 100, 301)] + [shared + words(n) for n in (3, 30, 90, 1)]


@pytest.fixture(scope="module")
def extract(data_dir, tmp_path_factory):
    """Run the prompts through vLLM with a connector; return (what it printed, the answers, the folder)."""

    def go(connector: str, extra: dict, asks: list[dict] | None = None):
        folder = tmp_path_factory.mktemp("vllm")
        wanted = prompts()
        config = {"kv_connector": connector, "kv_connector_extra_config": extra}
        if connector == "HsfmtConnector":
            config["kv_connector_module_path"] = "hsfmt.writers.vllm"
        job = {
            "model": str(data_dir / "tiny-llama"), "layers": LAYERS[::-1], "prompts": wanted, "engine": ENGINE,
            "connector": config, "asks": asks or [{}] * len(wanted), "answers": str(folder / "answers.json"),
        }  # fmt: skip
        (folder / "job.json").write_text(json.dumps(job))
        text = run(
            [python_of(".venv-vllm"), SCRIPT, folder / "job.json"], folder / "log", environment(OMP_NUM_THREADS="1")
        )
        return text, json.loads((folder / "answers.json").read_text()), folder

    return go


@pytest.fixture(scope="module")
def stock(extract) -> list[dict[str, torch.Tensor]]:
    """The files of vLLM's own connector, in the order of the prompts."""
    _, answers, folder = extract("ExampleHiddenStatesConnector", {"shared_storage_path": "files"})
    assert max(answer["cached"] for answer in answers) >= 128
    return [load_file(folder / answer["params"]["hidden_states_path"]) for answer in answers]


@pytest.fixture(scope="module")
def ours(extract):
    """The same prompts into a dataset."""
    asks = [{"hsfmt": {"id": f"p{i}", "loss_mask": [[0, 1]], "metadata": {"row": i}}} for i in range(len(prompts()))]
    text, answers, folder = extract("HsfmtConnector", {"hsfmt_path": "dataset"}, asks)
    seal(folder / "dataset")
    return text, answers, HiddenStateDataset(folder / "dataset")


def test_every_state_is_the_same(stock, ours):
    _, _, dataset = ours
    assert sorted(dataset.sample_ids) == sorted(f"p{i}" for i in range(len(stock)))
    for number, (prompt, file) in enumerate(zip(prompts(), stock, strict=True)):
        item = dataset[dataset.index_of(f"p{number}")]
        assert item["input_ids"].tolist() == file["token_ids"].tolist() == prompt
        assert torch.equal(item["hidden_states"], file["hidden_states"]), number
        assert item["loss_mask"].tolist() == [True] + [False] * (len(prompt) - 1)


def test_the_header_and_the_producer_say_what_the_states_are(ours):
    _, _, dataset = ours
    header = dataset.header
    assert (list(header.layers), header.hidden_size, header.final_norm, header.dtype) == (
        LAYERS,
        128,
        "pre",
        "bfloat16",
    )
    (part,) = [dataset.reader.parts.get(0)]
    producer = part.manifest.producer
    assert producer["engine"] == "vllm 0.32.0"
    assert producer["attention_backend"] == ["CPU_ATTN"]
    assert producer["requested_layers"] == LAYERS[::-1]
    assert producer["prefix_caching"] is True


def test_the_client_is_told_where_its_sample_goes(ours):
    _, answers, _ = ours
    told = answers[3]["params"]["hsfmt"]
    assert told == {"dataset": "dataset", "id": "p3", "state": "pending"}
    assert "hidden_states_path" not in answers[3]["params"]


def test_what_has_no_room_is_refused_and_counted(extract, stock):
    """Serving goes on, each sample is stored whole or counted with its reason, and none waits longer than it may."""
    options = {"queue_nbytes": 100 * 1024, "block_seconds": 0.01}
    text, answers, folder = extract("HsfmtConnector", {"hsfmt_path": "dataset", "hsfmt_options": options})
    assert len(answers) == len(stock)
    durable, counts = re.findall(CLOSED, text)[-1]
    counted = json.loads(counts)
    seal(folder / "dataset")
    dataset = HiddenStateDataset(folder / "dataset")
    assert counted["asked"] == len(stock) == counted["accepted"] + sum(counted["refused"].values())
    assert len(dataset) == int(durable) == counted["accepted"]
    assert counted["refused"]["too_large"] == sum(len(prompt) > 100 for prompt in prompts())
    by_tokens = {tuple(file["token_ids"].tolist()): file["hidden_states"] for file in stock}
    for item in dataset:
        assert torch.equal(item["hidden_states"], by_tokens[tuple(item["input_ids"].tolist())])
