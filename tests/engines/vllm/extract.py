"""Prompts through vLLM in this process, into the files of its own connector or into a dataset: extract.py JOB.json.

JOB: {model, layers, connector, prompts: [[id, ...]], asks: [kv_transfer_params, ...], engine, answers}.
In one process and with all prompts there before the first step, two runs batch alike, so that their states may be
compared bit by bit.
"""

import json
import os
import sys
from pathlib import Path

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
)


def main(job: dict) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["model"],
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=512,
        skip_tokenizer_init=True,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": job["layers"]}},
        },
        kv_transfer_config={"kv_role": "kv_producer", **job["connector"]},
        **job["engine"],
    )

    def generate(prompts: list[list[int]], asks: list[dict]) -> list:
        sampling = [
            SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args={"kv_transfer_params": ask})
            for ask in asks
        ]
        return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)

    outputs = generate(job["prompts"], job["asks"])
    # vLLM takes states out with the step that follows, which in one process comes with the next request only.
    for _ in range(2):
        generate([[1]], [{"hsfmt": {"flush": True}}])
    llm.llm_engine.engine_core.shutdown()
    answers = [{"params": o.kv_transfer_params, "cached": o.num_cached_tokens or 0} for o in outputs]
    Path(job["answers"]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
