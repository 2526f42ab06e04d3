"""From made-up forwards to whole samples: any split, any order that an engine may come up with, no short sample."""

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsfmt.writers.capturing.ask import Ask, ask_text
from hsfmt.writers.capturing.assembler import Assembler, Slice
from hsfmt.writers.capturing.counters import Counters
from hsfmt.writers.capturing.room import Room
from hsfmt.writers.sglang.auxiliary import runs

HIDDEN = 2
ROW_NBYTES = 2 * HIDDEN * 4
PLENTY = 1 << 20


class Request(SimpleNamespace):
    """A request of the engine: hashed by identity, like SGLang's."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other


class Engine:
    """Launches forwards and receives their rows; a row's values say which request and position it is."""

    def __init__(self, *, limit=PLENTY, block_seconds=0.0, sample_seconds=60.0):
        self.room = Room(limit)
        self.counters = Counters()
        self.taken = set()
        self.accepted = {}
        self.assembler = Assembler(
            ROW_NBYTES, self.room, self.counters, self.taken.__contains__,
            block_seconds=block_seconds, sample_seconds=sample_seconds,
        )  # fmt: skip

    def request(self, sample_id, length, number=0, **asked):
        prompt = [1000 * number + position for position in range(length)]
        return Request(id=sample_id, prompt=prompt, number=number, ask=ask_text(sample_id, **asked), obstacle="")

    def launch(self, *pieces):
        """Launch a forward of (request, start, n_tokens) pieces; return what `receive` needs."""
        slices, offset, tokens = [], 0, []
        for request, start, n_tokens in pieces:
            slices.append(Slice(request, request.ask, request.prompt, start, n_tokens, offset, request.obstacle))
            tokens += [1000 * request.number + position for position in range(start, start + n_tokens)]
            offset += n_tokens
        spans, assemblies = self.assembler.launch(slices)
        tensor = np.array(tokens, np.float32)[:, None] + np.array([0.25, 0.5], np.float32)
        return tensor, spans, assemblies

    def receive(self, forward):
        tensor, spans, assemblies = forward
        for span in spans:
            rows = tensor[span.offset : span.offset + span.n_tokens]
            sample = self.assembler.receive(span, [rows, -rows])
            if sample is not None:
                self.taken.add(sample.sample_id)
                self.accepted[sample.sample_id] = sample
        return [assembly.acknowledgement() for assembly in assemblies]

    def step(self, *pieces):
        return self.receive(self.launch(*pieces))

    def check(self, request):
        """The sample of a request is exactly its prompt."""
        sample = self.accepted[request.id]
        aux = np.concatenate([piece[0] for piece in sample.pieces])
        final = np.concatenate([piece[1] for piece in sample.pieces])
        expected = np.array(request.prompt, np.float32)[:, None] + np.array([0.25, 0.5], np.float32)
        np.testing.assert_array_equal(aux, expected)
        np.testing.assert_array_equal(final, -expected)
        assert sample.input_ids.tolist() == request.prompt
        assert sample.nbytes == len(request.prompt) * ROW_NBYTES


def refusal(answer):
    assert answer["accepted"] is False
    return answer["reason"]


def test_a_prompt_in_one_forward_is_whole():
    engine = Engine()
    request = engine.request("a", 5)
    assert engine.step((request, 0, 5)) == [{"id": "a", "accepted": True, "n_tokens": 5}]
    engine.check(request)
    assert engine.room.used == 5 * ROW_NBYTES, "given back by whoever writes it"


def test_chunks_of_several_prompts_in_one_forward():
    engine = Engine()
    short, long = engine.request("short", 3, 1), engine.request("long", 200, 2)
    assert engine.step((short, 0, 3), (long, 0, 61))[1] is None
    assert engine.step((long, 61, 64)) == [None]
    assert engine.step((long, 125, 64)) == [None]
    assert engine.step((long, 189, 11))[0]["accepted"]
    engine.check(short)
    engine.check(long)


def test_the_overlap_scheduler_launches_before_it_receives():
    engine = Engine()
    request = engine.request("a", 10)
    first = engine.launch((request, 0, 4))
    second = engine.launch((request, 4, 6))
    third = engine.launch((request, 10, 1))  # a decode step beside a prefill
    assert [engine.receive(forward)[0] for forward in (first, second, third)][1:] == [
        {"id": "a", "accepted": True, "n_tokens": 10}
    ] * 2
    engine.check(request)


def test_a_prefix_from_the_cache_is_refused():
    engine = Engine()
    request = engine.request("a", 52)
    (answer,) = engine.step((request, 40, 12))
    assert refusal(answer) == "cache_hit"
    assert answer["detail"] == "the first 40 of 52 tokens came from the prefix cache"
    assert engine.room.used == 0
    assert engine.step((request, 51, 1)) == [answer], "it stays refused"


def test_even_one_cached_token_is_refused():
    engine = Engine()
    assert refusal(engine.step((engine.request("a", 52), 1, 51))[0]) == "cache_hit"


def test_a_gap_between_chunks_is_refused():
    engine = Engine()
    request = engine.request("a", 30)
    engine.step((request, 0, 10))
    assert refusal(engine.step((request, 12, 18))[0]) == "gap"
    assert engine.room.used == 0


def test_rows_that_were_lost_between_launch_and_receive_are_missed():
    engine = Engine()
    request = engine.request("a", 30)
    engine.launch((request, 0, 10))
    assert refusal(engine.step((request, 10, 20))[0]) == "gap"


def test_retracted_before_it_was_whole_then_computed_from_the_start():
    engine = Engine()
    request = engine.request("a", 30)
    engine.step((request, 0, 20))
    engine.step((request, 0, 16))
    assert engine.step((request, 16, 14))[0]["accepted"]
    engine.check(request)


def test_retracted_while_generating_its_prompt_is_not_taken_twice():
    engine = Engine()
    request = engine.request("a", 8)
    engine.step((request, 0, 8))
    engine.step((request, 0, 6))
    assert engine.step((request, 6, 14))[0]["accepted"], "prompt and output together"
    engine.check(request)
    assert engine.counters.accepted == engine.counters.asked == 1


def test_output_rows_are_not_taken():
    engine = Engine()
    request = engine.request("a", 8)
    engine.step((request, 0, 12))
    engine.check(request)


def test_an_aborted_request_gets_a_prompt_of_one_token():
    """SGLang's set_finish_with_abort: a one-token prefill, which must not become a sample."""
    engine = Engine()
    request = engine.request("a", 30)
    engine.step((request, 0, 10))
    request.prompt = [0]
    assert refusal(engine.step((request, 0, 1))[0]) == "aborted"
    at_once = engine.request("b", 30)
    at_once.prompt, at_once.obstacle = [0], "aborted"
    assert refusal(engine.step((at_once, 0, 1))[0]) == "aborted"
    assert engine.accepted == {}


@pytest.mark.parametrize("obstacle", ["lora", "not_tokens", "changed_model"])
def test_what_is_no_prompt_of_the_model_is_refused(obstacle):
    engine = Engine()
    request = engine.request("a", 3)
    request.obstacle = obstacle
    assert refusal(engine.step((request, 0, 3))[0]) == obstacle


def test_requests_that_end_or_go_are_swept():
    engine = Engine()
    ended, gone, going = (engine.request(name, 30) for name in ("ended", "gone", "going"))
    engine.step((ended, 0, 5), (gone, 0, 5), (going, 0, 5))
    ended.is_finished = True
    del gone
    engine.assembler.sweep(lambda request: getattr(request, "is_finished", False))
    assert dict(engine.counters.refused) == {"aborted": 2}
    assert engine.assembler.n_open == 1
    assert engine.room.used == 30 * ROW_NBYTES
    assert engine.step((going, 5, 25))[0]["accepted"]


def test_a_sample_whose_rows_stop_coming_is_given_up():
    engine = Engine(sample_seconds=1e-9)
    request = engine.request("a", 30)
    engine.step((request, 0, 5))
    time.sleep(0.01)
    engine.assembler.sweep(lambda _: False)
    assert engine.counters.refused["timed_out"] == 1
    assert refusal(engine.step((request, 5, 25))[0]) == "timed_out"


def test_rows_that_come_after_a_refusal_are_dropped():
    engine = Engine()
    request = engine.request("a", 30)
    forward = engine.launch((request, 0, 30))
    engine.assembler.refuse_all("aborted")
    assert refusal(engine.receive(forward)[0]) == "aborted"
    assert engine.room.used == 0
    assert engine.accepted == {}


def test_an_id_that_is_taken_is_refused():
    engine = Engine()
    engine.taken.add("a")
    assert refusal(engine.step((engine.request("a", 3), 0, 3))[0]) == "duplicate"


def test_of_two_requests_of_one_id_the_first_that_is_whole_is_taken():
    """A client's retry may run beside what it retries."""
    engine = Engine()
    first, second = engine.request("a", 30, 1), engine.request("a", 30, 2)
    engine.step((first, 0, 10), (second, 0, 10))
    assert engine.step((second, 10, 20))[0]["accepted"]
    assert refusal(engine.step((first, 10, 20))[0]) == "duplicate"
    engine.check(second)
    assert engine.room.used == 30 * ROW_NBYTES


def test_a_prompt_that_the_server_cut_is_refused():
    engine = Engine()
    request = engine.request("a", 30, n_tokens=40)
    answer = engine.step((request, 0, 30))[0]
    assert refusal(answer) == "length"
    assert answer["detail"] == "the prompt has 30 tokens here, and 40 by the request"


@pytest.mark.parametrize(
    "ask",
    ["", "no json", "[]", "{}", '{"id": 3}', '{"id": ""}', '{"id": "a", "what": 1}', '{"id": "a", "n_tokens": 0}',
     '{"id": "a", "n_tokens": true}', '{"id": "a", "loss_mask": [1, 0]}', '{"id": "a", "loss_mask": [[2, 2]]}',
     '{"id": "a", "loss_mask": [[1, 3], [2, 4]]}', '{"id": "a", "loss_mask": [[0, 4]]}',
     '{"id": "a", "metadata": [1]}', '{"id": "a", "source_index": -1}', 7],
)  # fmt: skip
def test_what_can_not_be_read_is_refused(ask):
    engine = Engine()
    request = engine.request("a", 3)
    request.ask = ask
    assert refusal(engine.step((request, 0, 3))[0]) == "bad_request"


def test_the_ask_of_a_client_is_what_is_read():
    mask = np.array([0, 1, 1, 0, 0, 1], np.uint8)
    engine = Engine()
    request = engine.request("ä", 6, n_tokens=6, loss_mask=mask, metadata={"turn": [1, {"x": None}]}, source_index=4)
    assert json.loads(request.ask)["loss_mask"] == [[1, 3], [5, 6]]
    engine.step((request, 0, 6))
    ask = engine.accepted["ä"].ask
    assert ask.loss_mask(6).tolist() == mask.tolist()
    assert (ask.metadata, ask.source_index) == ({"turn": [1, {"x": None}]}, 4)
    assert Ask("b").loss_mask(6) is None


def test_without_room_a_sample_is_refused_and_the_next_one_taken():
    engine = Engine(limit=10 * ROW_NBYTES)
    first, second, third = engine.request("1", 6), engine.request("2", 6), engine.request("3", 4)
    answers = engine.step((first, 0, 6), (second, 0, 6), (third, 0, 4))
    assert [answer["accepted"] for answer in answers] == [True, False, True]
    assert refusal(answers[1]) == "queue_full"
    assert engine.room.high_water == engine.room.used == 10 * ROW_NBYTES


def recorded_takes(engine, monkeypatch):
    deadlines, take = [], engine.room.take

    def recording(nbytes, deadline):
        deadlines.append(deadline)
        return take(nbytes, deadline)

    monkeypatch.setattr(engine.room, "take", recording)
    return deadlines


def test_what_can_never_fit_is_refused_without_waiting(monkeypatch):
    engine = Engine(limit=10 * ROW_NBYTES, block_seconds=60)
    deadlines = recorded_takes(engine, monkeypatch)
    assert refusal(engine.step((engine.request("a", 11), 0, 11))[0]) == "too_large"
    assert deadlines == []


def test_one_wait_for_all_requests_of_a_forward(monkeypatch):
    engine = Engine(limit=4 * ROW_NBYTES, block_seconds=0.2)
    engine.step((engine.request("full", 4), 0, 4))
    deadlines = recorded_takes(engine, monkeypatch)
    requests = [engine.request(str(i), 4) for i in range(20)]
    answers = engine.step(*[(request, 0, 4) for request in requests])
    assert {refusal(answer) for answer in answers} == {"queue_full"}
    assert len(deadlines) == 20
    assert len(set(deadlines)) == 1
    assert engine.room.longest_wait >= 0.15


def test_rows_of_prompts_that_go_on_are_copied_by_themselves():
    engine = Engine()
    a, b, c, d = (engine.request(name, 4) for name in "abcd")
    other = engine.request("d2", 9)
    _, spans, _ = engine.launch((a, 0, 4), (b, 0, 4), (other, 0, 2), (c, 0, 4), (d, 0, 4))
    assert [(run.offset, run.n_rows, len(run.spans)) for run in runs(spans)] == [(0, 8, 2), (8, 2, 1), (10, 8, 2)]


def test_rows_between_that_nobody_wants_are_not_copied():
    engine = Engine()
    a, b = engine.request("a", 4), engine.request("b", 4)
    cached = engine.request("c", 9)
    _, spans, _ = engine.launch((a, 0, 4), (cached, 3, 6), (b, 0, 4))
    assert [(run.offset, run.n_rows) for run in runs(spans)] == [(0, 4), (10, 4)]


@st.composite
def schedules(draw):
    """Requests, and forwards that serve them as an engine may: any split, cache hits, retraction, output, aborts."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    ids = [draw(st.sampled_from(["x", "y", str(i)])) for i in range(len(lengths))]
    done = [0] * len(lengths)
    forwards = []
    for _ in range(draw(st.integers(1, 14))):
        forward = []
        for i, length in enumerate(lengths):
            action = draw(st.sampled_from(["wait", "go", "go", "go", "hit", "retract", "abort"]))
            if action == "wait":
                continue
            if action == "hit":
                done[i] = min(length + 1, done[i] + draw(st.integers(1, 3)))
            elif action == "retract":
                done[i] = draw(st.integers(0, done[i]))
            n = draw(st.integers(1, 6)) if done[i] < length else 1
            forward.append((i, done[i], n, action == "abort"))
            done[i] += n
        forwards.append(forward)
    return lengths, ids, forwards, draw(st.booleans()), draw(st.integers(4, 40))


@given(schedules())
def test_whatever_an_engine_does_only_whole_samples_come_out(schedule):
    lengths, ids, forwards, overlap, limit = schedule
    engine = Engine(limit=limit * ROW_NBYTES)
    requests = [engine.request(ids[i], length, i) for i, length in enumerate(lengths)]
    in_flight = []
    covered = [set() for _ in lengths]
    for forward in forwards:
        for i, start, n_tokens, aborted in forward:
            requests[i].obstacle = requests[i].obstacle or ("aborted" if aborted else "")
            covered[i].update(range(start, start + n_tokens))
        in_flight.append(engine.launch(*[(requests[i], start, n) for i, start, n, _ in forward]))
        if not overlap or len(in_flight) > 1:
            engine.receive(in_flight.pop(0))
    for forward in in_flight:
        engine.receive(forward)
    for sample_id, sample in engine.accepted.items():
        number = int(sample.pieces[0][0][0, 0]) // 1000
        assert ids[number] == sample_id
        engine.check(requests[number])
        assert set(range(lengths[number])) <= covered[number]
    held = sum(sample.nbytes for sample in engine.accepted.values())
    n_open = engine.assembler.n_open
    engine.assembler.refuse_all("aborted")
    assert engine.room.used == held
    counters = engine.counters
    assert counters.accepted == len(engine.accepted)
    assert counters.asked == counters.accepted + counters.n_refused
    assert counters.refused["aborted"] >= n_open
    assert engine.room.high_water <= engine.room.limit


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 16), st.booleans())
def test_every_prompt_of_a_well_behaved_engine_is_taken(lengths, budget, overlap):
    """Chunked prefill as SGLang does it: a token budget a forward, requests in order."""
    engine = Engine()
    requests = [engine.request(str(i), length, i) for i, length in enumerate(lengths)]
    queue = [(request, 0) for request in requests]
    in_flight = []
    while queue:
        left, forward = budget, []
        while queue and left:
            request, start = queue.pop(0)
            n_tokens = min(left, len(request.prompt) - start)
            forward.append((request, start, n_tokens))
            left -= n_tokens
            if start + n_tokens < len(request.prompt):
                queue.insert(0, (request, start + n_tokens))
        in_flight.append(engine.launch(*forward))
        if not overlap or len(in_flight) > 1:
            engine.receive(in_flight.pop(0))
    for forward in in_flight:
        engine.receive(forward)
    assert list(engine.accepted) == [request.id for request in requests]
    for request in requests:
        engine.check(request)
