"""`hsfmt capture` with a real SGLang server that is killed on the way."""

import json
import os
import signal

import pytest
from sglang_server import PROMPTS, check_sample, reference, serving

from hsfmt.cli.main import main
from hsfmt.readers.dataset import HiddenStateDataset

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.torch]
NUMBERS = range(15)
OPTIONS = ("--speculative-algorithm", "EAGLE3", "--return-aux-hidden-state-layer-ids", "1", "3", "6")


def capture(capsys, *words: object) -> tuple[int, dict]:
    with pytest.raises(SystemExit) as ended:
        main(["capture", *map(str, words), "--json", "--quiet"])
    return ended.value.code, json.loads(capsys.readouterr().out)


def test_a_killed_server_costs_nothing_that_was_durable(models, tmp_path, capsys):
    """What was captured stays, what is missing has its reason, and the same command completes it."""
    out, file, first = tmp_path / "dataset", tmp_path / "prompts.jsonl", tmp_path / "first.jsonl"
    records = [
        {
            "id": f"p{number}",
            "input_ids": PROMPTS[number],
            "loss_mask": [1] * len(PROMPTS[number]),
            "metadata": {"n": number},
        }
        for number in NUMBERS
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    first.write_text("".join(json.dumps(record) + "\n" for record in records[:7]))
    with serving(models / "llama", out, tmp_path, *OPTIONS, "--dtype", "float32") as server:
        code, report = capture(capsys, first, out, "--server", server.url, "--no-seal")
        assert (code, report["durable"], report["failed"]) == (0, 7, {})
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()
        code, report = capture(capsys, file, out, "--server", server.url)
        assert code == 3
        assert "an answer" in report["error"][0]["expected"]
    main(["verify", str(out)], standalone_mode=False)
    capsys.readouterr()
    with serving(models / "llama", out, tmp_path, *OPTIONS, "--dtype", "float32") as server:
        code, report = capture(capsys, file, out, "--server", server.url)
    assert (code, report["lines"], report["present"], report["durable"]) == (0, 15, 7, 8)
    dataset = HiddenStateDataset(out)
    assert list(dataset.sample_ids) == [record["id"] for record in records]
    expected = reference(models, "llama", "float32")
    for number, item in enumerate(dataset):
        check_sample(item, number, expected, dataset.header.layers)
        assert item["loss_mask"].all()
