"""What requests ask for and what is told, without vLLM."""

import types

import numpy as np
import pytest

from hsfmt import DatasetWriter
from hsfmt.errors import SampleError, UsageError
from hsfmt.writers.vllm_client import capture_request, flush_request, wait_durable
from hsfmt.writers.vllm_request import check_layers, plan_save, read_options


def finished(value=None, *, status="FINISHED_LENGTH_CAPPED", computed=None, n_tokens=5, **more):
    pending = types.SimpleNamespace(req_id="r1", filename="f", token_ids=list(range(n_tokens)), block_ids=[3])
    request = types.SimpleNamespace(
        kv_transfer_params=None if value is None else {"hsfmt": value},
        status=types.SimpleNamespace(name=status),
        num_computed_tokens=n_tokens if computed is None else computed,
        **more,
    )
    return pending, request


def test_every_request_is_stored_under_its_own_id_unless_only_asked_ones_are():
    save = plan_save(*finished(), "all")
    assert (save.sample_id, save.ask.sample_id, save.reason, save.flush) == ("r1", "r1", "", False)
    assert save.answer("d") == {"dataset": "d", "id": "r1", "state": "pending"}
    save = plan_save(*finished(), "asked")
    assert save.ask is None
    assert save.answer("d") == {"dataset": "d", "state": "none"}


def test_what_a_client_sends_is_what_is_asked_for():
    body = capture_request(
        [4, 5, 6, 7, 8], "a", loss_mask=[0, 1, 1, 0, 1], metadata={"k": 1}, source_index=9, flush=True
    )
    assert body["prompt"] == [4, 5, 6, 7, 8]
    assert body["max_tokens"] == 1
    save = plan_save(*finished(body["kv_transfer_params"]["hsfmt"]), "asked")
    assert save.flush
    assert save.sample_id == "a"
    assert save.ask.source_index == 9
    assert save.ask.metadata == {"k": 1}
    assert save.ask.loss_mask(5).tolist() == [0, 1, 1, 0, 1]


def test_a_flush_alone_stores_nothing():
    save = plan_save(*finished(flush_request()["kv_transfer_params"]["hsfmt"]), "all")
    assert save.flush
    assert save.ask is None
    assert not save.sample_id
    assert save.answer("d") == {"dataset": "d", "state": "none", "flush": True}


@pytest.mark.parametrize(
    ("value", "detail"),
    [
        ({"id": ""}, "sample id"),
        ({"id": "a", "mask": []}, "unknown member"),
        ({"id": "a", "loss_mask": [[3, 9]]}, "runs within 5 tokens"),
        ({"id": "a", "n_tokens": 4}, "hsfmt: n_tokens"),
        ("no object", "a JSON object"),
        (["a"], "a JSON object"),
    ],
)
def test_a_request_that_can_not_be_read_is_refused_with_the_reason(value, detail):
    save = plan_save(*finished(value), "all")
    told = save.answer("d")
    assert save.ask is None
    assert told["state"] == "refused"
    assert told["reason"] == "bad_request"
    assert detail in told["detail"]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"status": "FINISHED_ABORTED"}, "aborted"),
        ({"status": "FINISHED_ERROR"}, "aborted"),
        ({"computed": 4}, "gap"),
        ({"n_tokens": 0}, "not_tokens"),
        ({"mm_features": ["an image"]}, "not_tokens"),
        ({"prompt_embeds": object()}, "not_tokens"),
        ({"lora_request": object()}, "lora"),
    ],
)
def test_states_that_are_not_those_of_the_tokens_are_refused(how, reason):
    save = plan_save(*finished({"id": "a"}, **how), "all")
    assert save.ask is None
    assert save.answer("d")["reason"] == reason
    assert save.sample_id == "a"


def test_options_are_read():
    options = read_options({"hsfmt_path": "d", "shared_storage_path": "f", "hsfmt_options": {"part_seconds": 5}})
    assert (options.path, options.part_seconds, options.capture) == ("d", 5, "all")


@pytest.mark.parametrize(
    ("extra", "where"),
    [
        ({}, ["hsfmt_path"]),
        ({"hsfmt_path": "d", "hsfmt_options": []}, ["hsfmt_options"]),
        ({"hsfmt_path": "", "hsfmt_options": {"parts": 1}}, ["hsfmt_path", "hsfmt_options: parts"]),
        ({"hsfmt_path": "d", "hsfmt_options": {"block_seconds": 90}}, ["hsfmt_options: block_seconds"]),
        ({"hsfmt_path": "d", "hsfmt_options": {"queue_nbytes": "1G"}}, ["hsfmt_options: queue_nbytes"]),
        ({"hsfmt_path": "d", "hsfmt_options": {"capture": "some"}}, ["hsfmt_options: capture"]),
        ({"hsfmt_path": "d", "hsfmt_options": {"path": "e"}}, ["hsfmt_options: path"]),
    ],
)
def test_options_that_can_not_be_are_refused_all_at_once(extra, where):
    with pytest.raises(UsageError) as caught:
        read_options(extra)
    assert [problem.where for problem in caught.value.problems] == where


def test_layers_are_those_of_the_model_in_the_order_of_the_cache():
    assert check_layers([8, 2, 5], 8) == [2, 5, 8]
    for layers in ([], [2, 2], [9], [-1, 3]):
        with pytest.raises(UsageError, match="eagle_aux_hidden_state_layer_ids"):
            check_layers(layers, 8)


def test_a_mask_of_another_length_does_not_leave_the_client():
    with pytest.raises(SampleError, match="loss_mask"):
        capture_request([1, 2, 3], "a", loss_mask=[1, 0])


def test_a_client_learns_what_is_durable(tmp_path):
    with DatasetWriter(tmp_path, layers=[1], hidden_size=4, final_norm="pre", dtype="float32", seal=False) as writer:
        assert wait_durable(tmp_path, ["a", "b"], 0) == ["a", "b"]
        writer.write("a", [1, 2], np.zeros((2, 1, 4), np.float32))
        assert wait_durable(tmp_path, ["a", "b"], 0) == ["a", "b"]
        writer.commit()
        assert wait_durable(tmp_path, ["a", "b"], 0) == ["b"]
