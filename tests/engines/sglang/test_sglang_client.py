"""The client's side, against a server that answers as SGLang does."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hsfmt.errors import SampleError, StorageError, UsageError
from hsfmt.writers.capturing.ask import parse_ask
from hsfmt.writers.sglang import client


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.ranks.reverse()  # ranks answer in any order
        self.answer(200, json.dumps({"internal_states": self.server.ranks}))

    def do_POST(self):
        self.server.flushed.append((self.path, self.headers.get("Authorization")))
        for state in self.server.ranks:
            state["hsfmt"].update(self.server.changes)
        self.answer(self.server.code, "Cache flushed.\n")

    def answer(self, code, text):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.flushed, server.changes, server.code = [], {"pending": 0, "durable": 5}, 200
        counters = {"accepted": 5, "pending": 5, "durable": 0, "lost": 0, "problem": ""}
        server.ranks = [{"hsfmt": {"rank": rank, **counters}} for rank in range(2)]
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_each_request_has_a_salt_of_its_own():
    first, second = (client.request_fields("a", [1, 2]) for _ in range(2))
    assert first["cache_salt"] != second["cache_salt"]
    assert first["sampling_params"] == second["sampling_params"]


def test_sampling_parameters_of_the_caller_stay():
    params = {"max_new_tokens": 3, "custom_params": {"mine": 1}}
    fields = client.request_fields("a", [1, 2], sampling_params=params)
    assert fields["sampling_params"]["max_new_tokens"] == 3
    assert fields["sampling_params"]["custom_params"]["mine"] == 1
    assert parse_ask(fields["sampling_params"]["custom_params"]["hsfmt"]).n_tokens == 2
    assert params == {"max_new_tokens": 3, "custom_params": {"mine": 1}}


@pytest.mark.parametrize("mask", [[1], [1, 0, 1], [2, 0], [[1], [0]]])
def test_a_mask_that_does_not_fit_is_refused(mask):
    with pytest.raises(SampleError, match="loss_mask"):
        client.request_fields("a", [1, 2], loss_mask=mask)


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ({"meta_info": {"hsfmt": [{"id": "a", "accepted": True, "n_tokens": 2}]}}, ""),
        ({"meta_info": {"hsfmt": [{"id": "a", "accepted": False, "reason": "gap", "detail": "x"}]}}, "gap"),
        ({"meta_info": {"finish_reason": {"type": "abort", "message": "x"}}}, "aborted"),
        ({"meta_info": {"finish_reason": {"type": "length"}}}, "no_plugin"),
        ({"error": {"message": "too long"}}, "not_served"),
    ],
)
def test_answers(response, reason):
    answer = client.parse_answer("a", response)
    assert (answer.sample_id, answer.accepted, answer.reason) == ("a", not reason, reason)


def test_a_flush_looks_at_every_rank(server):
    assert [rank["durable"] for rank in client.flush(server.url, api_key="key", timeout=10)] == [5, 5]
    assert server.flushed == [("/flush_cache?timeout=5", "Bearer key")]


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"pending": 1}, 200, "1 not durable"),
        ({"pending": 0, "lost": 2}, 200, "2 lost"),
        ({"pending": 0, "problem": "the storage failed"}, 200, "the storage failed"),
        ({"pending": 0}, 400, "HTTP 400"),
    ],
)
def test_a_flush_that_did_not_do_it_raises(server, changes, code, said):
    server.changes, server.code = changes, code
    with pytest.raises(StorageError, match=said):
        client.flush(server.url, timeout=10)


def test_what_was_accepted_during_the_flush_does_not_count(server):
    server.changes = {"accepted": 7, "pending": 2, "durable": 5}
    assert len(client.flush(server.url, timeout=10)) == 2


def test_ranks_are_told_apart_whatever_order_they_answer_in(server):
    server.ranks[1]["hsfmt"].update(accepted=9, pending=9)
    server.changes = {"pending": 0}
    for _ in range(2):
        assert [rank["accepted"] for rank in client.server_status(server.url)] == [5, 9]
    assert [rank["accepted"] for rank in client.flush(server.url, timeout=10)] == [5, 9]


def test_servers_without_a_capture_are_named(server):
    server.ranks[1] = {"hsfmt": None}
    with pytest.raises(UsageError, match="one that does not"):
        client.server_status(server.url)
    with pytest.raises(StorageError, match="expected an answer"):
        client.server_status("http://127.0.0.1:1", timeout=5)
