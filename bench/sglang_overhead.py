r"""What capturing costs a real SGLang engine: prefill tokens a second with and without, in turns, in one process.

Runs in SGLang's environment, on the CPU unless told otherwise:

    .venv-sglang/bin/python bench/sglang_overhead.py
    python bench/sglang_overhead.py --device cuda --attention triton --dtype bfloat16 \
        --hidden 4096 --layers 32 --chunk 8192 --prompts 64 --tokens 2048

The model has random weights. `plain` is the same engine, asked for the same prompts without a capture; `bare` is an
engine without the capture's flags and without the plugin.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--attention", default="torch_native")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--codec", default="zstd")
    return parser.parse_args()


def write_config(folder: Path, args: argparse.Namespace) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": args.hidden,
        "intermediate_size": args.hidden * 7 // 2, "num_hidden_layers": args.layers,
        "num_attention_heads": args.hidden // 128, "num_key_value_heads": max(1, args.hidden // 512), "head_dim": 128,
        "vocab_size": 32000, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "dtype": args.dtype,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def start(folder: Path, args: argparse.Namespace, *, capture: bool) -> Any:
    import sglang

    for name in [name for name in os.environ if name.startswith("HSFMT_SGLANG_")]:
        del os.environ[name]
    flags = {}
    if capture:
        os.environ["HSFMT_SGLANG_OUT"] = str(folder / "states")
        os.environ["HSFMT_SGLANG_MODEL"] = "random"
        os.environ["HSFMT_SGLANG_CODEC"] = args.codec
        flags = {
            "speculative_algorithm": "EAGLE3", "enable_return_aux_hidden_states": True,
            "return_aux_hidden_state_layer_ids": [1, args.layers // 2 - 1, args.layers - 4],
        }  # fmt: skip
    return sglang.Engine(
        model_path=str(folder), load_format="dummy", device=args.device, attention_backend=args.attention,
        sampling_backend="pytorch", skip_tokenizer_init=True, mem_fraction_static=0.5, dtype=args.dtype,
        max_total_tokens=2 * args.prompts * args.tokens, chunked_prefill_size=args.chunk, random_seed=0,
        log_level="error", disable_cuda_graph=True, disable_radix_cache=True, **flags,
    )  # fmt: skip


class Rounds:
    """Prompts that are never the same twice, and how long an engine takes for them."""

    def __init__(self, engine: Any, args: argparse.Namespace) -> None:
        self.engine, self.args = engine, args
        self.random = random.Random(1)
        self.n = 0

    def run(self, *, ask: bool) -> tuple[float, float]:
        """Return the tokens a second of one round, and the CPU seconds of all processes until it is durable."""
        from hsfmt.writers.sglang.client import parse_answer, request_fields

        self.n += 1
        prompts = [[self.random.randrange(3, 32000) for _ in range(self.args.tokens)] for _ in range(self.args.prompts)]
        fields = [request_fields(f"{self.n}-{i}", prompt) for i, prompt in enumerate(prompts)]
        for each in fields:
            if not ask:
                del each["sampling_params"]["custom_params"]
        body = {name: [each[name] for each in fields] for name in fields[0]}
        started, cpu = time.perf_counter(), cpu_seconds()
        responses = self.engine.generate(**body)
        seconds = time.perf_counter() - started
        if ask and not all(parse_answer("", response).accepted for response in responses):
            sys.exit("a sample was refused: the figures would be of something else")
        if ask:
            self.engine.collective_rpc("hsfmt_flush")
        return self.args.prompts * self.args.tokens / seconds, cpu_seconds() - cpu


def cpu_seconds() -> float:
    """CPU time of this process and all that live below it."""
    import psutil

    me = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (me, *me.children(recursive=True)))


def main() -> None:
    args = options()
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if args.device == "cpu":
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_config(folder, args)
        figures = {"bare": [], "plain": [], "captured": []}
        engine = start(folder, args, capture=False)
        rounds = Rounds(engine, args)
        rounds.run(ask=False)
        figures["bare"] = [rounds.run(ask=False) for _ in range(args.rounds)]
        engine.shutdown()
        engine = start(folder, args, capture=True)
        rounds = Rounds(engine, args)
        rounds.run(ask=False)
        for _ in range(args.rounds):
            figures["plain"].append(rounds.run(ask=False))
            figures["captured"].append(rounds.run(ask=True))
        status = engine.get_server_info()["internal_states"][0]["hsfmt"]
        engine.shutdown()
    for name, values in figures.items():
        rates = [rate for rate, _ in values]
        cpu = statistics.median(seconds for _, seconds in values)
        print(f"{name:9} {statistics.median(rates):9.0f} tokens/s, best {max(rates):.0f}, CPU {cpu:.2f} s a round")
    pairs = list(zip(figures["plain"], figures["captured"], strict=True))
    for i, name in enumerate(("tokens/s", "CPU seconds")):
        ratios = [after[i] / before[i] for before, after in pairs]
        print(f"captured / plain, {name}: {statistics.median(ratios):.3f}, median of {[round(r, 3) for r in ratios]}")
    for name in ("accepted", "durable", "refused", "nbytes", "queue_high_water", "waited_seconds", "longest_wait"):
        print(f"{name:17} {status[name]}")


if __name__ == "__main__":
    main()
