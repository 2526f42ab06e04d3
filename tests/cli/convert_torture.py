"""Kill a conversion again and again, and look what is left; run by test_cli_convert_kill.py in a process of its own.

That process never starts a thread, so that it can fork its victims instead of paying for their imports; whatever reads
a dataset runs in a child too.
"""

import json
import os
import random
import shutil
import sys
import time
from pathlib import Path

import numpy as np
from killing import in_fork, killing_at, no_fsync

from hsfmt.catalog import committed_parts, load_index, load_manifest, read_header, read_pointer
from hsfmt.cli.main import main
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store
from hsfmt.writers.sample_files import FileTensor, write_sample_file

FILES = 12
FLAGS = ["--from", "vllm", "--layer-ids", "1,2", "--part-size", "6KiB", "--quiet"]
CALLS = ("write", "rename", "link", "unlink", "fsync", "open", "close", "posix_fadvise")


def make_source(folder):
    folder.mkdir()
    for number in range(FILES):
        n_tokens = 5 + number * 7 % 11
        states = np.random.default_rng(number).integers(0, 0x7F00, (n_tokens, 2, 32), np.uint16)
        tensors = {
            "hidden_states": FileTensor("bfloat16", states),
            "token_ids": FileTensor("int64", np.arange(n_tokens)),
        }
        write_sample_file(folder / f"r{number}.safetensors", tensors, {})
        if number % 3 == 0:
            (folder / f"r{number}.safetensors.lock").touch()


def in_child(work, seconds=None, hook=lambda: None):
    """Run `work` in a fork, killed after `seconds`, if not None; return (its JSON result or None, whether it died)."""

    def report(pipe):
        hook()
        os.write(pipe, json.dumps(work()).encode())

    text, died = in_fork(report, seconds)
    return (None if died else json.loads(text)), died


def convert(source, dataset, flags):
    def work():
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        return main(["convert", str(source), str(dataset), *FLAGS, *flags], standalone_mode=False)

    return work


def look(dataset):
    """Return the committed ids, all verified by decoding them, and whether and with which digest it is sealed."""

    def work():
        store = open_store(str(dataset))
        if store.size("zarr.json") is None:
            return {"ids": [], "digest": None}
        header = read_header(store)
        ids = []
        for part in committed_parts(store):
            index = load_index(store, load_manifest(store, part, header))
            ids += [index.sample_id(row) for row in range(index.n_samples)]
        if ids:
            assert verify(str(dataset), level="full").errors == ()
        pointer = read_pointer(store)
        return {"ids": ids, "digest": pointer.content_digest if pointer else None}

    return in_child(work)[0]


class Rounds:
    """Conversions of one source that are killed; what is true after each kill is checked, and its phase kept."""

    def __init__(self, folder, flags):
        self.folder, self.flags, self.phases = folder, flags, {}
        self.deletes = "--delete-source" in flags
        self.pristine = folder / "pristine"
        make_source(self.pristine)
        plain = [flag for flag in flags if flag != "--delete-source"]
        started = time.monotonic()
        assert in_child(convert(self.pristine, folder / "whole", plain), hook=no_fsync) == (0, False)
        self.seconds = time.monotonic() - started
        self.whole = look(folder / "whole")
        self.source, self.dataset = folder / "source", folder / "d"
        self.begin()

    def begin(self):
        for path in (self.source, self.dataset):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self.pristine, self.source)

    def kill(self, seconds=None, hook=no_fsync):
        """Run the conversion until it is killed; return whether it was."""
        _, killed = in_child(convert(self.source, self.dataset, self.flags), seconds, hook)
        self.check()
        return killed

    def check(self):
        found = look(self.dataset)
        committed = {sample_id.partition("#")[0] for sample_id in found["ids"]}
        whole = {path.name.partition(".")[0] for path in self.pristine.iterdir()}
        present = {path.name.partition(".")[0] for path in self.source.glob("*.safetensors")}
        assert whole - present <= self.complete(found["ids"]), "a file is gone whose samples are not committed"
        assert self.deletes or present == whole
        for path in self.source.iterdir():
            assert path.read_bytes() == (self.pristine / path.name).read_bytes()
        phase = (
            "nothing" if not committed
            else "done" if found["digest"]
            else "all committed" if committed == whole
            else "some committed"
        ) + (", files left of committed samples" if committed & present else "")  # fmt: skip
        self.phases[phase] = self.phases.get(phase, 0) + 1

    def complete(self, ids):
        """Return the samples all of whose windows are committed."""
        windows = {}
        for sample_id in self.whole["ids"]:
            windows.setdefault(sample_id.partition("#")[0], set()).add(sample_id)
        return {sample for sample, its in windows.items() if its <= set(ids)}

    def finish(self):
        code, killed = in_child(convert(self.source, self.dataset, self.flags), hook=no_fsync)
        assert (code, killed) == (0, False)
        found = look(self.dataset)
        assert found["digest"] == self.whole["digest"]
        assert sorted(set(found["ids"])) == sorted(self.whole["ids"])
        assert not self.deletes or list(self.source.iterdir()) == []


def random_moments(folder, amount, flags):
    rounds, rng, killed, datasets = Rounds(folder, flags), random.Random(0), 0, 0
    while killed < amount:
        # Deleting takes about as long again as converting.
        was_killed = rounds.kill(rng.uniform(0.3, 2 if rounds.deletes else 1.1) * rounds.seconds)
        killed += was_killed
        if not was_killed or rng.random() < 0.3:
            rounds.finish()
            rounds.begin()
            datasets += 1
    rounds.finish()
    return {"killed": killed, "datasets": datasets + 1, "phases": rounds.phases}


def every_call(folder, step, flags):
    rounds = Rounds(folder, flags)
    k, killed = 1, True
    while killed:
        rounds.begin()
        killed = rounds.kill(hook=killing_at(k, CALLS))
        rounds.finish()
        k += step
    return {"calls": k - step, "phases": rounds.phases}


if __name__ == "__main__":
    mode, where, number, *options = sys.argv[1:]
    run = {"random": random_moments, "calls": every_call}[mode]
    print(json.dumps(run(Path(where), int(number), options)))  # noqa: T201 - its result
