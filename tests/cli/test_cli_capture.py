"""`hsfmt capture` against a server of the test's own, which writes what it is sent with DatasetWriter."""

import json
import signal
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from hsfmt import DatasetWriter
from hsfmt.cli import capture_run
from hsfmt.cli.capture_prompts import BadLine, Prompt, PromptFile, conversation
from hsfmt.cli.capture_run import CaptureRun, RunOptions
from hsfmt.cli.capture_servers import AGAIN, REFUSED, TAKEN, Outcome, VllmServer, find_server
from hsfmt.cli.main import main
from hsfmt.errors import StorageError, UsageError
from hsfmt.readers.sample_reader import SampleReader


class Words:
    """A chat template of words: <role, the words, end>."""

    def __init__(self, *, rewrites: bool = False) -> None:
        self.rewrites = rewrites

    def tokens(self, messages, *, generation):
        ids = []
        for place, message in enumerate(messages):
            # Like templates that drop what was thought in earlier turns.
            dropped = self.rewrites and place + 1 < len(messages) and message["role"] == "assistant"
            words = [] if dropped else [100 + len(word) for word in message["content"].split()]
            ids += [{"system": 1, "user": 2, "assistant": 3}[message["role"]], *words, 9]
        return [*ids, 3] if generation else ids


CHAT = [
    {"role": "user", "content": "a bb"},
    {"role": "assistant", "content": "ccc"},
    {"role": "user", "content": "d"},
    {"role": "assistant", "content": "ee f"},
]
TOKENS = [2, 101, 102, 9, 3, 103, 9, 2, 101, 9, 3, 102, 101, 9]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("assistant", [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1]),
        ("last", [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1]),
        ("none", None),
    ],
)
def test_the_mask_marks_what_the_assistant_said(mask, expected):
    assert conversation(Words(), CHAT, mask) == (TOKENS, expected)


def test_a_template_that_changes_what_came_before_is_refused():
    with pytest.raises(ValueError, match="only adds to what came before"):
        conversation(Words(rewrites=True), CHAT, "assistant")
    assert conversation(Words(rewrites=True), CHAT, "last")[1][-3:] == [1, 1, 1]


def lines(tmp_path, *records) -> PromptFile:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in records))
    return PromptFile(path, Words(), max_tokens=20)


def test_every_form_of_a_line_is_read(tmp_path):
    sharegpt = [{"from": "human", "value": "a bb"}, {"from": "gpt", "value": "ccc"}]
    file = lines(
        tmp_path,
        {"id": "a", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "metadata": {"k": [1]}},
        "",
        {"token_ids": [1, 2, 3]},
        {"id": 7, "messages": CHAT},
        {"conversations": sharegpt},
        {"prompt_token_ids": [1, 2, 3]},
    )
    found = list(file)
    assert file.count() == 5
    assert [prompt.number for prompt in found] == [0, 1, 2, 3, 4]
    assert found[0] == Prompt(0, "a", [1, 2, 3], [0, 1, 1], {"k": [1]})
    assert found[1].loss_mask is None
    assert found[1].sample_id == found[4].sample_id  # made of what it is
    assert (found[2].sample_id, found[2].token_ids) == ("7", TOKENS)
    assert found[3].loss_mask == [0, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting"),
        ("[1]", "an object"),
        ({"id": "a"}, "one of input_ids"),
        ({"input_ids": []}, "a list of integers"),
        ({"input_ids": [1, "2"]}, "a list of integers"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "2 values of 0 or 1"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "2 values of 0 or 1"),
        ({"input_ids": list(range(21))}, "at most 20"),
        ({"input_ids": [1], "id": ""}, "sample id"),
        ({"input_ids": [1], "metadata": 1}, "metadata"),
        ({"messages": [{"role": "user", "content": "a"}]}, "an assistant's turn"),
        ({"conversations": [{"from": "robot", "value": "a"}]}, "robot"),
    ],
)
def test_a_line_that_is_no_prompt_says_why(tmp_path, line, reason):
    (found,) = lines(tmp_path, line)
    assert isinstance(found, BadLine)
    assert reason in found.reason


class Fake:
    """A server that does with each id what it was told to, as often as it was told."""

    url = "fake"

    def __init__(self, **plans: list[str]) -> None:
        self.plans = {name: list(plan) for name, plan in plans.items()}
        self.sent: Counter[str] = Counter()
        self.pending: set[str] = set()
        self.durable: set[str] = set()
        self.flush_fails = False
        self.lock = threading.Lock()

    def send(self, prompt):
        with self.lock:
            self.sent[prompt.sample_id] += 1
            plan = self.plans.get(prompt.sample_id) or [TAKEN]
            step = plan.pop(0) if len(plan) > 1 else plan[0]
            if step == TAKEN:
                self.pending.add(prompt.sample_id)
                return Outcome(TAKEN)
            return Outcome(TAKEN) if step == "lost" else Outcome(step, "why", "more")

    def flush(self):
        if self.flush_fails:
            raise StorageError.at("fake", expected="to flush", got="no")
        self.durable |= self.pending


OPTIONS = RunOptions(concurrency=4, tries=3, rounds=2, pause_seconds=0.001, durable_seconds=0.3)


def prompts(*names: str) -> list[Prompt | BadLine]:
    return [Prompt(number, name, [1, 2, 3]) for number, name in enumerate(names)]


def test_everything_ends_durable_or_with_a_reason():
    server = Fake(b=[AGAIN, AGAIN, TAKEN], c=[REFUSED], d=[AGAIN], e=["lost", TAKEN], f=["lost"])
    server.durable = {"g"}
    run = CaptureRun(server, lambda: set(server.durable), OPTIONS)
    tally = run.run([*prompts("a", "b", "c", "d", "e", "f", "g", "a"), BadLine(8, "no")])
    assert (tally.lines, tally.durable, tally.present, tally.repeated, tally.tokens) == (9, 3, 1, 1, 9)
    assert list(tally.bad) == [8]
    assert server.sent == {"a": 1, "b": 3, "c": 1, "d": 3, "e": 2, "f": 2}
    assert {name: text.partition(":")[0] for name, text in tally.failed.items()} == {
        "c": "why", "d": "why", "f": "not_durable",
    }  # fmt: skip


def test_a_failing_flush_is_the_reason():
    server = Fake()
    server.flush_fails = True
    tally = CaptureRun(server, lambda: set(server.durable), OPTIONS).run(prompts("a", "b"))
    assert tally.durable == 0
    assert set(tally.failed) == {"a", "b"}
    assert all(text.startswith("flush: ") for text in tally.failed.values())


def test_an_interruption_keeps_what_was_taken():
    server = Fake()
    names = [f"p{number}" for number in range(50)]

    def interrupted():
        yield from prompts(*names)[:20]
        raise KeyboardInterrupt

    run = CaptureRun(server, lambda: set(server.durable), OPTIONS)
    with pytest.raises(KeyboardInterrupt):
        run.run(interrupted())
    run.tally.check()
    assert run.tally.lines == 20
    assert run.tally.durable == len(server.pending)
    resumed = CaptureRun(server, lambda: set(server.durable), OPTIONS).run(prompts(*names))
    assert resumed.present + resumed.durable == 50
    assert set(server.sent) == set(names)


def test_ctrl_c_does_not_strike_in_the_locks_of_the_threads(monkeypatch):
    wait = capture_run.wait
    steps = []

    def struck(*args, **options):
        signal.raise_signal(signal.SIGINT)
        steps.append("went on")
        return wait(*args, **options)

    monkeypatch.setattr(capture_run, "wait", struck)
    server = Fake()
    run = CaptureRun(server, lambda: set(server.durable), OPTIONS)
    with pytest.raises(KeyboardInterrupt):
        run.run(prompts("a", "b"))
    assert steps == ["went on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    run.tally.check()


@pytest.fixture
def vllm(tmp_path):
    """What vLLM with the connector looks like from outside; every third request finds it busy."""
    writer = DatasetWriter(
        tmp_path / "dataset", layers=[1], hidden_size=4, final_norm="pre", dtype="float32", seal=False
    )
    count = iter(range(1000))

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def answer(self, code, document):
            data = json.dumps(document).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self.answer(200 if self.path == "/version" else 404, {})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            ask, ids = body["kv_transfer_params"]["hsfmt"], body["prompt"]
            if ask.get("flush"):
                writer.commit()
                self.answer(200, {"kv_transfer_params": {"hsfmt": {"state": "none"}}})
                return
            if next(count) % 3 == 0:
                self.answer(503, {"error": "busy"})
                return
            if 666 in ids:
                told = {"state": "refused", "reason": "bad_request", "detail": "no"}
                self.answer(200, {"kv_transfer_params": {"hsfmt": told}})
                return
            mask = np.zeros(len(ids), np.uint8)
            for start, stop in ask.get("loss_mask", []):
                mask[start:stop] = 1
            states = np.full((len(ids), 1, 4), len(ids), np.float32)
            more = {"metadata": ask.get("metadata"), "source_index": ask["source_index"]}
            writer.write(ask["id"], ids, states, mask if "loss_mask" in ask else None, **more)
            self.answer(200, {"kv_transfer_params": {"hsfmt": {"state": "pending", "id": ask["id"]}}})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()
    writer.close()


def capture(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["capture", *map(str, words)])
    return ended.value.code


def test_the_command_captures_seals_and_resumes(tmp_path, vllm, capsys):
    lines(
        tmp_path,
        *({"id": f"s{n}", "input_ids": [n, n, n], "loss_mask": [0, 1, 1], "metadata": {"n": n}} for n in range(10)),
    )
    words = [tmp_path / "prompts.jsonl", tmp_path / "dataset", "--server", vllm, "--concurrency", 3]
    assert capture(*words) == 0
    assert "10 samples of 30 tokens, durable" in capsys.readouterr().out
    reader = SampleReader(tmp_path / "dataset")
    assert list(reader.sample_ids) == [f"s{n}" for n in range(10)]  # in the order of the file
    sample = reader.read(4)
    assert (sample.input_ids.tolist(), sample.loss_mask.tolist(), sample.metadata) == (
        [4] * 3,
        [False, True, True],
        {"n": 4},
    )
    assert capture(*words, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["present"], document["durable"], document["failed"]) == (10, 0, {})


def test_the_command_ends_with_1_and_the_reasons_where_something_is_not_there(tmp_path, vllm, capsys):
    lines(tmp_path, {"id": "good", "input_ids": [1]}, {"id": "refused", "input_ids": [666]}, "no json")
    assert capture(tmp_path / "prompts.jsonl", tmp_path / "dataset", "--server", vllm) == 1
    text = capsys.readouterr()
    assert "1; 1 bad_request" in text.out
    assert "line 3: " in text.err
    assert "sealed" not in text.out


def test_a_server_without_capture_is_named(vllm, monkeypatch):
    server = find_server(vllm + "/v1/")
    assert isinstance(server, VllmServer)
    monkeypatch.setattr(server, "_post", lambda _: {"choices": []})
    with pytest.raises(UsageError, match="HsfmtConnector"):
        server.send(Prompt(0, "a", [1]))


def test_no_server_is_named():
    with pytest.raises(StorageError, match="an answer"):
        find_server("http://127.0.0.1:1")
