"""The main job on files that real programs wrote: convert, verify, look, read, train a drafter head a few steps.

    make demo        (or: python demo/demo.py [FOLDER])

Everything it makes lies in demo-output/, to look at afterwards.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from drafter import DrafterHead, Verifier, agreement, pack, train
from torch.utils.data import DataLoader

from hsfmt import HiddenStateDataset

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
VLLM = DATA / "vllm" / "vllm032_bf16_prompt"
SPECULATORS = DATA / "speculators" / "0.9.0"
MODEL = DATA / "tiny-llama"
STEPS = 60


def heading(text: str) -> None:
    print(f"\n\033[1m== {text}\033[0m" if sys.stdout.isatty() else f"\n== {text}", flush=True)


def hsfmt(*arguments: str | Path, expect: int = 0) -> None:
    """Run the command line as a user would, and insist on its exit code."""
    print("$ hsfmt " + " ".join(shown(word) for word in arguments), flush=True)
    code = subprocess.run([sys.executable, "-m", "hsfmt.cli", *map(str, arguments)], check=False).returncode
    if code != expect:
        sys.exit(f"exit code {code}, expected {expect}")


def shown(word: str | Path) -> str:
    try:
        return str(Path(word).relative_to(Path.cwd())) if isinstance(word, Path) else word
    except ValueError:
        return str(word)


def flip_a_bit(dataset: Path) -> Path:
    """Flip one bit in the middle of a shard of hidden states."""
    shard = next(dataset.glob("parts/*/hidden_states/c/0/0/0"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 3] ^= 0x10
    shard.write_bytes(data)
    return shard


def equal_to_source(dataset: HiddenStateDataset) -> int:
    """Compare every tensor with what the source's own reader gives; return how many were compared."""
    from safetensors.torch import load_file

    for i in range(len(dataset)):
        item = dataset[i]
        source = load_file(SPECULATORS / "hidden_states" / f"hs_{i}.safetensors")
        if not torch.equal(item["hidden_states"], source["hidden_states"]):
            sys.exit(f"sample {i} differs from its source")
        if not torch.equal(item["input_ids"], source["token_ids"]):
            sys.exit(f"the ids of sample {i} differ from its source")
    return len(dataset)


def main() -> None:
    started = time.perf_counter()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path.cwd() / "demo-output"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    data = out / "tiny-llama-eagle3"

    heading("1. Convert what vLLM and speculators wrote")
    ids = ("--layer-ids", "2,4,5,8", "--model", "tiny-llama")
    hsfmt("convert", VLLM, out / "from-vllm", *ids)
    hsfmt("convert", SPECULATORS, data, *ids)

    heading("2. Verify: every file, chunk, offset and sample")
    hsfmt("verify", data, "--level", "full")

    heading("3. What is in it")
    hsfmt("info", data)
    hsfmt("ls", data, "--limit", "5")

    heading("4. One flipped bit does not get through")
    broken = out / "one-flipped-bit"
    shutil.copytree(data, broken)
    print(f"one bit flipped in {shown(flip_a_bit(broken))}", flush=True)
    hsfmt("verify", broken, "--level", "full", expect=1)

    heading("5. Read it back through a DataLoader, train a drafter head")
    compared = equal_to_source(HiddenStateDataset(data))
    print(f"{compared} samples torch.equal to their source files")
    dataset = HiddenStateDataset(data, view="speculators")
    loader = DataLoader(dataset, batch_size=8, shuffle=True, collate_fn=pack, num_workers=2, persistent_workers=True)
    verifier = Verifier(MODEL / "model.safetensors")
    drafter = DrafterHead(verifier, n_aux=len(dataset.header.layers) - 1)
    held = pack([dataset[i] for i in range(len(dataset))])
    before = agreement(drafter, verifier, held)
    losses, tokens, seconds = train(drafter, verifier, loader, STEPS)
    after = agreement(drafter, verifier, held)
    for step in (0, STEPS // 4, STEPS // 2, STEPS - 1):
        print(f"step {step + 1:3}  loss {losses[step]:.4f}")

    heading("Summary")
    files = [path for path in data.rglob("*") if path.is_file()]
    n_tokens = int(dataset.lengths.sum())
    print(f"dataset            {shown(data)}: {len(dataset)} samples, {n_tokens} tokens, {len(files)} files")
    print(f"fingerprint        {dataset.fingerprint}")
    print(f"exact              {compared} of {compared} samples equal to the source, bit for bit")
    fall = f"{losses[0]:.3f} -> {losses[-1]:.3f}"
    print(f"training           {STEPS} steps, {tokens} tokens in {seconds:.1f} s; loss {fall}")
    print(f"drafter's top-1    {before:.1%} -> {after:.1%} of the verifier's choices (on the data trained on)")
    print(f"wall time          {time.perf_counter() - started:.1f} s")
    if not losses[-1] < 0.9 * losses[0]:
        sys.exit("the loss did not fall: something is wrong with the data or the demo")


if __name__ == "__main__":
    main()
