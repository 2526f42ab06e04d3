"""A real SGLang server on the CPU, and what it should have captured."""

import json
import random
import socket
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import program

from hsfmt import HiddenStateDataset, seal
from hsfmt.writers.sglang import client

HERE = Path(__file__).parent
VENV = ".venv-sglang"
VOCABULARY = 512
N_LAYERS = 8
START_SECONDS = 400
# In steps of the element's precision at the magnitude of the state: SGLang and transformers round at other places.
BFLOAT16_ULPS = 24


def made_prompts():
    """Prompts of the tests, by number: some fit in one chunk of 64, some do not, some share their beginning."""
    generator = random.Random(1)
    lengths = [5, 3, 200, 70, 33, 64, 65, 128, 1, 150, 17, 90]
    prompts = [[generator.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]
    shared = prompts[9][:40]
    prompts += [shared + [generator.randrange(3, VOCABULARY) for _ in range(length)] for length in (12, 1, 60)]
    prompts += [[generator.randrange(3, VOCABULARY) for _ in range(1200)] for _ in range(6)]
    return prompts


PROMPTS = made_prompts()
SHORT = range(12)
SHARED = range(12, 15)
LONG = range(15, 21)


class Server:
    """A server that runs, and the dataset it writes."""

    def __init__(self, process, url, out, log):
        self.process = process
        self.url = url
        self.out = out
        self.log = log
        self.responses = []  # to the last capture_all

    def post(self, path, body):
        request = urllib.request.Request(
            f"{self.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=200) as response:
                return json.loads(response.read() or b"null")
        except urllib.error.HTTPError as error:
            with error:
                return json.loads(error.read())

    def capture(self, number, sample_id=None, *, salt=True, **asked):
        """Ask for a prompt's states; return the answer."""
        sample_id = sample_id or f"p{number}"
        fields = client.request_fields(sample_id, PROMPTS[number], **asked)
        if not salt:
            del fields["cache_salt"]
        return client.parse_answer(sample_id, self.post("/generate", fields))

    def capture_all(self, samples, **asked):
        """Ask for {id: prompt number} in one request, so that they come together; return the answers by id."""
        fields = [client.request_fields(name, PROMPTS[number], **asked) for name, number in samples.items()]
        body = {name: [each[name] for each in fields] for name in fields[0]}
        self.responses = self.post("/generate", body)
        return {name: client.parse_answer(name, each) for name, each in zip(samples, self.responses, strict=True)}

    def plain(self, number, n_new=1, **fields):
        params = {"max_new_tokens": n_new, "temperature": 0, "ignore_eos": True}
        return self.post("/generate", {"input_ids": PROMPTS[number], "sampling_params": params, **fields})

    def status(self):
        """The counters of all ranks, added up."""
        ranks = client.server_status(self.url)
        total = {
            name: sum(rank[name] for rank in ranks) for name in ("asked", "accepted", "durable", "lost", "pending")
        }
        total["refused"] = {}
        for rank in ranks:
            assert rank["asked"] == rank["accepted"] + rank["open"] + sum(rank["refused"].values()) - rank["dropped"]
            for reason, count in rank["refused"].items():
                total["refused"][reason] = total["refused"].get(reason, 0) + count
            assert rank["errors"] == 0
        return total

    def samples(self):
        """All that is in the dataset now, by id."""
        return samples_of(self.out)


def samples_of(out):
    seal(out)
    dataset = HiddenStateDataset(out)
    return {name: dataset[i] for i, name in enumerate(dataset.sample_ids)}


def command(checkpoint, port, *arguments):
    return [
        program.python_of(VENV), "-m", "sglang.launch_server", "--model-path", checkpoint, "--host", "127.0.0.1",
        "--port", port, "--device", "cpu", "--attention-backend", "torch_native", "--skip-tokenizer-init",
        "--mem-fraction-static", "0.5", "--random-seed", "0", *arguments,
    ]  # fmt: skip


CAPTURE = ("--enable-return-aux-hidden-states", "--chunked-prefill-size", "64", "--max-total-tokens", "8192")


def environment(out, *paths, **options):
    given = {f"HSFMT_SGLANG_{name.upper()}": str(value) for name, value in options.items()}
    if out is not None:
        given["HSFMT_SGLANG_OUT"] = str(out)
    # SGLang takes no CPU for granted, and compiles an embedding that its tensor parallelism needs no compiler for.
    return program.environment(*paths, SGLANG_USE_CPU_ENGINE="1", TORCHDYNAMO_DISABLE="1", **given)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serving(checkpoint, out, folder, *arguments, paths=(), env=(), **options):
    """Start a server and wait until it serves; it is gone at the end, with all its processes."""
    port = free_port()
    log = folder / f"server-{port}.log"
    url = f"http://127.0.0.1:{port}"
    env = {**environment(out, *paths, **options), **dict(env)}
    with program.started(command(checkpoint, port, *CAPTURE, *arguments), log, env) as process:
        deadline = time.monotonic() + START_SECONDS
        while "The server is fired up" not in (text := log.read_text(errors="replace")):
            assert process.poll() is None, text[-6000:]
            assert time.monotonic() < deadline, text[-6000:]
            time.sleep(0.3)
        yield Server(process, url, out, log)


def quietly(function, *arguments, **options):
    """Call what a killed server does not answer."""
    try:
        return function(*arguments, **options)
    except (OSError, ValueError):
        return None


def reference(folder, model, dtype):
    """What transformers computes: {prompt number: float32 [layer, token, hidden]}."""
    with np.load(folder / f"{model}-{dtype}.npz") as states:
        return {int(number): states[number] for number in states.files}


def check_rows(item, expected, layers, *, tolerance=1e-4):
    """A sample's states are those of transformers, layer by layer, and of no other layer."""
    states = item["hidden_states"].float().numpy()
    assert states.shape[:2] == (expected.shape[1], len(layers))
    for position, layer in enumerate(layers):
        error = np.abs(states[:, position] - expected[layer]).max()
        scale = 1.0 if tolerance else np.abs(expected[layer]).max() * 2**-8 * BFLOAT16_ULPS
        assert error <= (tolerance or scale), f"layer {layer}: {error}"
        others = [
            np.abs(states[:, position] - expected[other]).max() for other in range(len(expected)) if other != layer
        ]
        assert error < min(others)


def check_sample(item, number, expected, layers, **options):
    assert item["input_ids"].tolist() == PROMPTS[number]
    check_rows(item, expected[number], layers, **options)
