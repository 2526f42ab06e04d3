r"""What capturing costs a real vLLM: prefill tokens a second without, by its own connector, and by ours, in turns.

Runs in vLLM's environment, on the CPU:

    .venv-vllm/bin/python bench/vllm_overhead.py

Three engines are up at once, each in a process of its own, and take turns: `bare` without an extraction, `stock` with
vLLM's own hidden-states connector (a safetensors file a request), `hsfmt` with the connector of this project (a
dataset). The model has random weights, the prompts are never the same twice.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

KINDS = ("bare", "stock", "hsfmt")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--codec", default="zstd")
    parser.add_argument("--engine", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def write_config(folder: Path, args: argparse.Namespace) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": args.hidden,
        "intermediate_size": args.hidden * 7 // 2, "num_hidden_layers": args.layers,
        "num_attention_heads": args.hidden // 128, "num_key_value_heads": max(1, args.hidden // 512), "head_dim": 128,
        "vocab_size": 32000, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "rope_theta": 10000.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def engine(args: argparse.Namespace, kind: str) -> Any:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR",
    )  # fmt: skip
    from vllm import LLM

    folder, more = Path(args.folder), {}
    connectors = {
        "stock": {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_connector_extra_config": {"shared_storage_path": str(folder / "files")},
        },
        "hsfmt": {
            "kv_connector": "HsfmtConnector",
            "kv_connector_module_path": "hsfmt.writers.vllm",
            "kv_connector_extra_config": {
                "hsfmt_path": str(folder / "states"),
                "hsfmt_options": {"codec": args.codec},
            },
        },
    }
    if kind in connectors:
        ids = [2, args.layers // 2, args.layers - 3, args.layers]
        more = {
            "kv_transfer_config": {"kv_role": "kv_producer", **connectors[kind]},
            "speculative_config": {
                "method": "extract_hidden_states", "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
            },
        }  # fmt: skip
    return LLM(
        model=str(folder), load_format="dummy", dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True,
        max_model_len=2 * args.tokens, max_num_batched_tokens=args.chunk, max_num_seqs=args.prompts, seed=0,
        enable_prefix_caching=False, **more,
    )  # fmt: skip


def serve(args: argparse.Namespace) -> None:
    """One engine, which does a round for each line that it reads and answers with wall and CPU seconds."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    llm = engine(args, args.engine)
    from vllm import SamplingParams

    numbers = random.Random(KINDS.index(args.engine))
    sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        prompts = [
            {"prompt_token_ids": [numbers.randrange(3, 32000) for _ in range(args.tokens)]} for _ in range(args.prompts)
        ]
        started, cpu = time.perf_counter(), time.process_time()
        llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        if args.engine == "hsfmt":
            flush = SamplingParams(
                max_tokens=1, detokenize=False, extra_args={"kv_transfer_params": {"hsfmt": {"flush": True}}}
            )
            for _ in range(2):
                llm.generate([{"prompt_token_ids": [1]}], flush, use_tqdm=False)
        print(seconds, time.process_time() - cpu, file=answers, flush=True)
    llm.llm_engine.engine_core.shutdown()


def main() -> None:
    args = options()
    if args.engine:
        serve(args)
        return
    with tempfile.TemporaryDirectory() as name:
        write_config(Path(name), args)
        command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--folder", name]
        engines = {
            kind: subprocess.Popen(
                [*command, "--engine", kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=name
            )
            for kind in KINDS
        }
        try:
            for process in engines.values():
                if process.stdout.readline().strip() != "ready":
                    sys.exit("an engine did not start")
            figures = {kind: [] for kind in KINDS}
            for number in range(args.rounds + 1):
                for kind, process in engines.items():
                    process.stdin.write("round\n")
                    process.stdin.flush()
                    seconds, cpu = map(float, process.stdout.readline().split())
                    if number:  # the first one warms up
                        figures[kind].append((seconds, cpu))
            for process in engines.values():
                process.stdin.close()
                process.wait(60)
        finally:
            for process in engines.values():
                process.kill()
    report(args, figures)


def report(args: argparse.Namespace, figures: dict[str, list[tuple[float, float]]]) -> None:
    tokens = args.prompts * args.tokens
    for kind, rounds in figures.items():
        rates = [tokens / seconds for seconds, _ in rounds]
        cpu = statistics.median(cpu for _, cpu in rounds)
        print(f"{kind:6} {statistics.median(rates):8.0f} tokens/s, best {max(rates):.0f}, CPU {cpu:.2f} s a round")
    for base in ("bare", "stock"):
        wall, cpu = (
            [before[i] / after[i] for before, after in zip(figures[base], figures["hsfmt"], strict=True)]
            for i in range(2)
        )
        print(f"hsfmt / {base}: tokens/s {statistics.median(wall):.3f}, CPU seconds {1 / statistics.median(cpu):.3f}")


if __name__ == "__main__":
    main()
