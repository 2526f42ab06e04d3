"""The hooks around objects shaped like SGLang's: what can't be provoked in a real server on a CPU."""

import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hsfmt import HiddenStateDataset, seal
from hsfmt.errors import UsageError
from hsfmt.writers.capturing.ask import ask_text
from hsfmt.writers.sglang.capture import Capture
from hsfmt.writers.sglang.hooks import Plugin
from hsfmt.writers.sglang.meaning import Meaning
from hsfmt.writers.sglang.options import CaptureOptions

HIDDEN = 4
LAYERS = (1, 3)


class Request(SimpleNamespace):
    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other

    def finished(self):
        return self.is_finished


def request(sample_id, n_tokens=3, **changes):
    params = SimpleNamespace(custom_params={"hsfmt": ask_text(sample_id)} if sample_id else None)
    members = {
        "rid": f"rid-{sample_id}", "origin_input_ids": list(range(n_tokens)), "sampling_params": params,
        "is_finished": False, "to_finish": None, "lora_id": None, "multimodal_inputs": None, "input_embeds": None,
        "positional_embed_overrides": None, "customized_info": None,
    }  # fmt: skip
    return Request(**{**members, **changes})


def forward_of(*pieces, extend=True, dtype=torch.bfloat16, **changes):
    """(batch, result) of a forward of (request, start, n_tokens)."""
    rows = sum(n for _, _, n in pieces)
    batch = SimpleNamespace(
        reqs=[piece[0] for piece in pieces],
        prefix_lens=[piece[1] for piece in pieces],
        extend_lens=[piece[2] for piece in pieces],
        forward_mode=SimpleNamespace(is_extend=lambda: extend),
        return_hidden_states=False,
    )
    values = torch.arange(rows * 3 * HIDDEN, dtype=torch.float32).reshape(rows, 3 * HIDDEN).to(dtype)
    output = SimpleNamespace(
        hidden_states=values[:, : 2 * HIDDEN].contiguous(),
        last_hidden_states=values[:, 2 * HIDDEN :].contiguous(),
        auxiliary_device_output=None,
        hidden_states_token_indices=None,
    )
    result = SimpleNamespace(logits_output=output, can_run_cuda_graph=False, delay_sample_func=None)
    for name, value in changes.items():
        setattr(next(thing for thing in (batch, output, result) if hasattr(thing, name)), name, value)
    return batch, result


@pytest.fixture(autouse=True)
def auxiliary_protocol(monkeypatch):
    """The one function of SGLang that a running hook calls."""
    names = ["sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.managers.auxiliary_output"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[names[-1]].append_auxiliary_output = lambda current, output: [*(current or []), output]


@pytest.fixture
def plugin(tmp_path):
    made = []

    def make(*, writes=True, **settings):
        options = CaptureOptions(out=str(tmp_path / "states"), flush_seconds=60, **settings)
        plugin = Plugin(options)
        plugin._meaning = Meaning(LAYERS, 8, HIDDEN, "bfloat16", final=options.final)
        if writes:
            plugin.capture = Capture(options, plugin._meaning, "tiny", {"engine": "none"})
        made.append(plugin)
        return plugin

    yield make
    for plugin in made:
        if plugin.capture is not None:
            plugin.capture.close()


WORKER = SimpleNamespace(is_draft_worker=False)


def run(plugin, forward, worker=WORKER):
    batch, result = forward
    assert plugin._around_forward(lambda *_: result, worker, batch) is result
    return result.logits_output


def consume(output, copy=lambda tensor: tensor):
    for device in output.auxiliary_device_output:
        device.copy_to_host(copy).consume(None, [])


def stored(plugin):
    assert plugin.capture.flush().ok
    seal(plugin.options.out)
    dataset = HiddenStateDataset(plugin.options.out)
    return {name: dataset[i]["hidden_states"] for i, name in enumerate(dataset.sample_ids)}


def reason(request):
    return request.customized_info["hsfmt"][0].get("reason", "")


def test_rows_go_from_the_device_to_the_dataset(plugin):
    plugin = plugin()
    a, plain, b = request("a", 3), request(None, 5), request("b", 4, customized_info={"other": [1]})
    forward = forward_of((a, 0, 3), (plain, 0, 5), (b, 0, 4))
    expected = torch.cat([forward[1].logits_output.hidden_states, forward[1].logits_output.last_hidden_states], 1)
    output = run(plugin, forward)
    assert output.hidden_states is output.last_hidden_states is None, "not copied a second time"
    consume(output)
    assert a.customized_info == {"hsfmt": [{"id": "a", "accepted": True, "n_tokens": 3}]}
    assert b.customized_info["other"] == [1]
    assert plain.customized_info is None
    states = stored(plugin)
    assert torch.equal(states["a"], expected[:3].view(3, 3, HIDDEN))
    assert torch.equal(states["b"], expected[8:].view(4, 3, HIDDEN))


def test_padding_rows_of_a_forward_are_not_anyones(plugin):
    plugin = plugin()
    a = request("a", 3)
    batch, result = forward_of((a, 0, 3))
    for name in ("hidden_states", "last_hidden_states"):
        tensor = getattr(result.logits_output, name)
        setattr(result.logits_output, name, torch.cat([tensor, tensor.new_zeros(5, tensor.shape[1])]))
    consume(run(plugin, (batch, result)))
    assert stored(plugin)["a"].shape == (3, 3, HIDDEN)


def test_outputs_of_a_graph_are_cloned_before_its_next_replay(plugin):
    plugin = plugin()
    forward = forward_of((request("a"), 0, 3), can_run_cuda_graph=True)
    static = forward[1].logits_output.hidden_states
    expected = static.clone()
    output = run(plugin, forward)
    static.zero_()
    consume(output)
    assert torch.equal(stored(plugin)["a"][:, :2].reshape(3, -1), expected)


def test_a_delayed_sampling_does_not_lose_what_is_attached(plugin):
    plugin = plugin()
    a = request("a")
    batch, result = forward_of((a, 0, 3))

    def sample():
        result.logits_output.auxiliary_device_output = None  # as ModelRunner.sample does
        return result

    result.delay_sample_func = sample
    output = run(plugin, (batch, result))
    assert output.auxiliary_device_output is None
    assert result.delay_sample_func() is result
    consume(output)
    assert reason(a) == ""
    assert list(stored(plugin)) == ["a"]


def test_forwards_that_are_no_prefill_are_left_alone(plugin):
    plugin = plugin()
    for forward, worker in (
        (forward_of((request("a"), 0, 3), extend=False), WORKER),
        (forward_of((request("a"), 0, 3)), SimpleNamespace(is_draft_worker=True)),
    ):
        output = run(plugin, forward, worker)
        assert output.hidden_states is not None
        assert output.auxiliary_device_output is None


def test_a_rank_that_does_not_write_keeps_nothing(plugin):
    output = run(plugin(writes=False), forward_of((request("a"), 0, 3)))
    assert output.hidden_states is output.last_hidden_states is output.auxiliary_device_output is None


def test_states_that_a_client_wants_stay(plugin):
    output = run(plugin(), forward_of((request("a"), 0, 3), return_hidden_states=True))
    assert output.hidden_states is not None
    assert output.last_hidden_states is None


def test_no_memory_for_the_copy_costs_the_sample_alone(plugin):
    plugin = plugin()
    a, b = request("a"), request("b")

    def copy(_):
        raise RuntimeError("no pinned memory")

    consume(run(plugin, forward_of((a, 0, 3))), copy)
    assert reason(a) == "copy_failed"
    consume(run(plugin, forward_of((b, 0, 3))))
    assert list(stored(plugin)) == ["b"]
    assert plugin.capture.counters.errors == 1
    assert plugin.capture.room.used == 0


def test_a_fault_of_the_plugin_never_reaches_the_scheduler(plugin, monkeypatch):
    plugin = plugin()
    a = request("a")
    output = run(plugin, forward_of((a, 0, 3)))
    with monkeypatch.context() as patch:
        patch.setattr(plugin.capture, "receive", lambda *_: 1 / 0)
        consume(output)
        patch.setattr(plugin.capture, "launch", lambda *_: 1 / 0)
        run(plugin, forward_of((request("b"), 0, 3)))
    status = plugin.capture.status()
    assert (status["errors"], status["refused"], status["queue_nbytes"]) == (2, {"error": 1}, 0)


@pytest.mark.parametrize(
    "change",
    [{"dtype": torch.float32}, {"hidden_states": None}, {"hidden_states": torch.zeros(3, HIDDEN, dtype=torch.bfloat16)},
     {"last_hidden_states": None}, {"last_hidden_states": torch.zeros(3, HIDDEN)},
     {"hidden_states_token_indices": [0]}],
    ids=["dtype", "no states", "a layer too few", "no final state", "final state of another dtype", "some rows"],
)  # fmt: skip
def test_the_first_forward_ends_a_server_whose_states_are_not_what_was_resolved(plugin, change):
    plugin = plugin()
    with pytest.raises(UsageError, match="first forward"):
        run(plugin, forward_of((request(None), 0, 3), **change))
    run(plugin, forward_of((request(None), 0, 3)))
    a = request("a")
    consume(run(plugin, forward_of((a, 0, 3), **change)))
    assert reason(a) == "error", "later ones cost the sample"
    assert plugin.capture.counters.accepted == 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [({"is_finished": True}, "aborted"), ({"to_finish": "abort"}, "aborted"), ({"lora_id": "x"}, "lora"),
     ({"multimodal_inputs": 1}, "not_tokens"), ({"input_embeds": 1}, "not_tokens"),
     ({"positional_embed_overrides": 1}, "not_tokens")],
)  # fmt: skip
def test_requests_whose_states_are_not_those_of_their_tokens(plugin, change, expected):
    a = request("a", **change)
    consume(run(plugin(), forward_of((a, 0, 3))))
    assert reason(a) == expected


def test_after_new_weights_nothing_is_captured(plugin):
    plugin = plugin()
    before, after = request("before"), request("after")
    consume(run(plugin, forward_of((before, 0, 3))))
    for target, (_, hook, _) in plugin.hooks.items():
        if "update_weights" in target:
            hook((True, "ok"), None, None)
    consume(run(plugin, forward_of((after, 0, 3))))
    assert (reason(before), reason(after)) == ("", "changed_model")


def test_all_requests_but_health_checks_where_all_are_captured(plugin):
    plugin = plugin(capture="all")
    a, check = request(None, rid="my-request"), request(None, rid="HEALTH_CHECK_1")
    consume(run(plugin, forward_of((a, 0, 3), (check, 0, 3))))
    assert list(stored(plugin)) == ["my-request"]


def test_without_the_final_state(plugin):
    plugin = plugin(final=False)
    consume(run(plugin, forward_of((request("a"), 0, 3), last_hidden_states=None)))
    assert stored(plugin)["a"].shape == (3, 2, HIDDEN)


def test_a_flush_answers_for_what_is_durable(plugin, monkeypatch):
    plugin = plugin()
    consume(run(plugin, forward_of((request("a"), 0, 3))))
    assert plugin._after_flush_cache(True, None) is True
    assert plugin._after_flush_cache(False, None) is False
    plugin._flush(tag="x")
    assert plugin.capture.counters.durable == 1
    with monkeypatch.context() as patch:
        patch.setattr(plugin.capture._writer, "flush", lambda _: SimpleNamespace(ok=False, problem="no disk"))
        assert plugin._after_flush_cache(True, None) is False
        with pytest.raises(RuntimeError, match="hsfmt: no disk"):
            plugin._flush()
    Plugin(plugin.options)._flush()  # a rank that does not write


def test_the_counters_are_in_the_servers_state(plugin):
    plugin = plugin()
    state = SimpleNamespace(internal_state={"x": 1})
    plugin._after_internal_state(state, None, None)
    assert state.internal_state["hsfmt"]["layers"] == [1, 3, 8]
    assert state.internal_state["x"] == 1


@pytest.mark.parametrize("error", [None, ValueError])
def test_what_is_whole_is_committed_when_the_loop_ends(plugin, error):
    plugin = plugin()
    consume(run(plugin, forward_of((request("a"), 0, 3), (request("half", 9), 0, 3))))

    def loop(_):
        if error:
            raise error

    if error:
        with pytest.raises(error):
            plugin._around_event_loop(loop, None)
    else:
        plugin._around_event_loop(loop, None)
    status = plugin.capture.status()
    assert (status["durable"], status["pending"], status["open"], status["refused"]) == (1, 0, 0, {"aborted": 1})


def test_requests_that_end_are_given_up_while_others_come_or_none(plugin):
    plugin = plugin()
    a = request("a", 9)
    consume(run(plugin, forward_of((a, 0, 3))))
    a.is_finished = True
    plugin.capture._swept = 0.0
    plugin._after_idle(None)
    assert plugin.capture.counters.refused["aborted"] == 1


def test_the_status_line(plugin, caplog):
    caplog.set_level("INFO", "hsfmt")
    plugin = plugin(status_seconds=1)
    consume(run(plugin, forward_of((request("a"), 0, 3), (request("b"), 1, 2))))
    assert plugin.capture.flush().ok
    plugin.capture.tend(lambda _: False, now=plugin.capture._logged + 2)
    lines = [record.getMessage() for record in caplog.records if "accepted" in record.getMessage()]
    assert "1 accepted, 1 durable, 0 lost, refused: cache_hit 1; 3 tokens" in lines[-1]
    plugin.capture.tend(lambda _: False, now=plugin.capture._logged + 2)
    again = [record.getMessage() for record in caplog.records if "accepted" in record.getMessage()]
    assert again == lines, "nothing new, nothing said"


def test_ids_of_any_array_kind_are_taken(plugin):
    plugin = plugin()
    consume(run(plugin, forward_of((request("a", origin_input_ids=np.arange(3)), 0, 3))))
    assert list(stored(plugin)) == ["a"]
