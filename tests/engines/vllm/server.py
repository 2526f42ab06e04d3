"""A vLLM server with hsfmt's connector, started for tests."""

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from program import environment, python_of, started

_START_SECONDS = 400
_SPECULATIVE = {
    "method": "extract_hidden_states",
    "num_speculative_tokens": 1,
    "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5, 8]}},
}


@dataclass
class Server:
    """A server that answers."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def post(self, body: dict[str, Any]) -> dict[str, Any]:
        """Send a completion request; return what the connector told about it."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)["kv_transfer_params"]


@contextmanager
def serving(model: Path, extra: dict[str, Any], folder: Path, *more: str) -> Iterator[Server]:
    """Start a server and wait until it is healthy; all of it is gone afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    connector = {
        "kv_connector": "HsfmtConnector",
        "kv_connector_module_path": "hsfmt.writers.vllm",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": extra,
    }
    command = [
        python_of(".venv-vllm"), "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1",
        "--port", port, "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8",
        "--max-num-batched-tokens", "64", "--enable-prefix-caching", "--speculative-config", json.dumps(_SPECULATIVE),
        "--kv-transfer-config", json.dumps(connector), *more,
    ]  # fmt: skip
    env = environment(
        OMP_NUM_THREADS="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_COLOR="0",
    )
    log = folder / "server.log"
    with started(command, log, env) as process:
        server = Server(f"http://127.0.0.1:{port}", process, log)
        deadline = time.monotonic() + _START_SECONDS
        while not _is_healthy(server.url):
            text = log.read_text(errors="replace")
            assert process.poll() is None, f"the server ended:\n{text[-6000:]}"
            assert time.monotonic() < deadline, f"the server does not answer:\n{text[-6000:]}"
            time.sleep(0.5)
        yield server


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False
