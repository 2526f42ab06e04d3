"""A real server with prefix cache, chunked prefill, mixed chunks and the overlap scheduler on stores exact rows."""

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from sglang_server import LONG, PROMPTS, SHARED, SHORT, check_sample, reference, serving

from hsfmt import DatasetWriter, HiddenStateDataset
from hsfmt.catalog import committed_parts, load_manifest, read_header
from hsfmt.storage import open_store

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.torch]
LAYERS = [2, 4, 7, 8]


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("serving")
    arguments = [
        "--dtype", "float32", "--enable-mixed-chunk",
        "--speculative-algorithm", "EAGLE3", "--return-aux-hidden-state-layer-ids", "6", "1", "3",
    ]  # fmt: skip
    with serving(models / "llama", folder / "states", folder, *arguments, model="tiny-llama") as server:
        yield server


@pytest.fixture(scope="module")
def expected(models):
    return reference(models, "llama", "float32")


def flushed(server):
    with urllib.request.urlopen(f"{server.url}/flush_cache?timeout=60", timeout=100) as response:
        assert response.status == 200


def test_every_row_is_that_of_transformers(server, expected):
    """Prompts within one chunk, over several, and several in one forward."""
    answers = server.capture_all({f"p{number}": number for number in SHORT})
    assert {name: (answer.accepted, answer.reason) for name, answer in answers.items()} == {
        f"p{number}": (True, "") for number in SHORT
    }
    flushed(server)
    samples = server.samples()
    for number in SHORT:
        check_sample(samples[f"p{number}"], number, expected, LAYERS)


def test_the_header_says_what_the_model_resolved(server):
    server.capture(0, "for-the-header")
    flushed(server)
    store = open_store(server.out)
    header = read_header(store)
    assert (header.layers, header.final_norm, header.dtype, header.hidden_size) == (
        tuple(LAYERS),
        "post",
        "float32",
        64,
    )
    assert header.model == {"name": "tiny-llama"}
    producer = load_manifest(store, committed_parts(store)[0], header).producer
    assert producer["engine"] == "sglang 0.5.23"
    assert producer["attention_backend"] == "torch_native"
    assert (producer["layer_convention"], producer["requested_layers"]) == ("eagle3", [6, 1, 3])
    assert (producer["resolved_layers"], producer["final_norm"]) == ([2, 4, 7], "post")


def test_masks_metadata_and_order_are_stored_beside_the_states(server):
    mask = np.arange(len(PROMPTS[4])) % 3 == 1
    answer = server.capture(4, "masked", loss_mask=mask.astype(int), metadata={"turn": [1, None]}, source_index=10**6)
    assert answer.accepted
    flushed(server)
    item = server.samples()["masked"]
    assert item["loss_mask"].tolist() == mask.tolist()
    dataset = HiddenStateDataset(server.out)
    assert dataset.sample_ids[-1] == "masked", "by its place in the order"


def test_only_what_is_asked_for_is_stored(server):
    before = server.status()
    server.plain(3)
    with urllib.request.urlopen(f"{server.url}/health_generate", timeout=60) as response:
        assert response.status == 200
    after = server.status()
    assert after["asked"] == before["asked"]


def test_prefixes_from_the_cache_are_refused_and_salted_ones_are_whole(server, expected):
    server.plain(9)  # its first 40 tokens are those of SHARED
    unsalted = [server.capture(number, f"unsalted-{number}", salt=False) for number in SHARED]
    assert {answer.reason for answer in unsalted} == {"cache_hit"}
    assert "40 of 52 tokens came from the prefix cache" in unsalted[0].detail
    salted = [server.capture(number, f"salted-{number}") for number in SHARED]
    assert all(answer.accepted for answer in salted)
    flushed(server)
    samples = server.samples()
    assert not [name for name in samples if name.startswith("unsalted")]
    for number in SHARED:
        check_sample(samples[f"salted-{number}"], number, expected, LAYERS)


def test_prefills_beside_decoding_requests(server, expected):
    with ThreadPoolExecutor(3) as pool:
        decoding = [pool.submit(server.plain, number, 12) for number in (1, 4, 10)]
        answers = server.capture_all({f"mixed-{number}": number for number in SHORT})
    assert all(answer.accepted for answer in answers.values())
    assert all(len(future.result()["output_ids"]) == 12 for future in decoding)
    flushed(server)
    samples = server.samples()
    for number in SHORT:
        check_sample(samples[f"mixed-{number}"], number, expected, LAYERS)


def test_requests_that_generate_store_their_prompt_alone(server, expected):
    params = {"max_new_tokens": 4, "ignore_eos": True}
    answers = server.capture_all({f"generated-{number}": number for number in SHORT}, sampling_params=params)
    assert all(answer.accepted for answer in answers.values())
    flushed(server)
    samples = server.samples()
    for number in SHORT:
        check_sample(samples[f"generated-{number}"], number, expected, LAYERS)


def test_an_id_is_taken_once(server):
    assert server.capture(4, "once").accepted
    assert server.capture(4, "once").reason == "duplicate"
    flushed(server)
    assert server.capture(4, "once").reason == "duplicate"


def test_a_request_that_can_not_be_read_is_refused_and_served(server):
    params = {"max_new_tokens": 2, "custom_params": {"hsfmt": "{}"}}
    response = server.post("/generate", {"input_ids": PROMPTS[0], "sampling_params": params})
    assert len(response["output_ids"]) == 2
    assert response["meta_info"]["hsfmt"][0]["reason"] == "bad_request"


def test_clients_that_want_the_states_themselves_still_get_them(server):
    response = server.plain(4, return_hidden_states=True, cache_salt="states")
    states = np.array(response["meta_info"]["hidden_states"][0])
    assert states.shape == (len(PROMPTS[4]), 3 * 64)


def test_aborted_requests_leave_nothing(server, expected):
    before = server.status()
    samples = {f"aborted-{i}-{number}": number for i in range(2) for number in LONG}
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(server.capture_all, samples)
        while server.status()["asked"] == before["asked"]:
            time.sleep(0.05)
        server.post("/abort_request", {"rid": "", "abort_all": True})
        answers = answers.result()
    accepted = {name for name, answer in answers.items() if answer.accepted}
    assert len(accepted) < len(samples)
    assert {answer.reason for answer in answers.values() if not answer.accepted} == {"aborted"}
    deadline = time.monotonic() + 60
    while (after := server.status())["refused"].get("aborted", 0) + after["accepted"] - before["accepted"] < (
        after["asked"] - before["asked"]
    ):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    flushed(server)
    stored = server.samples()
    assert {name for name in stored if name.startswith("aborted")} == accepted
    for name in accepted:
        check_sample(stored[name], samples[name], expected, LAYERS)


def test_a_flush_makes_all_that_was_accepted_durable(server):
    assert server.capture(2, "flushed").accepted
    assert server.status()["pending"] >= 1
    flushed(server)
    status = server.status()
    assert (status["pending"], status["lost"]) == (0, 0)
    with DatasetWriter(
        server.out, layers=LAYERS, hidden_size=64, final_norm="post", dtype="float32", seal=False
    ) as reader:
        assert "flushed" in reader.committed_ids()
    assert json.dumps(status)
