"""The small jobs that faults are put into: samples, a writer, commands, files to convert."""

import ml_dtypes
import numpy as np
from click.testing import CliRunner

from hsfmt import DatasetWriter
from hsfmt.cli.main import main
from hsfmt.writers.sample_files import FileTensor, write_sample_file

# Two folders above it that nobody made.
DATASET = "a/b/d"
HIDDEN = 8
LAYERS = (1, 3)
JOB = 6


class CommandError(Exception):
    """A command ended with another code than 0."""

    def __init__(self, result):
        super().__init__(result.output)
        self.code = result.exit_code
        self.text = result.output


def command(*args, codes=(0,)):
    """Run a command of `hsfmt` in this process; return its output."""
    result = CliRunner().invoke(main, [str(arg) for arg in args], prog_name="hsfmt")
    if result.exit_code not in codes or (result.exit_code and "error:" in result.output):
        raise CommandError(result)
    return result.output


def states(number):
    n_tokens = 2 + number % 3
    made = np.random.default_rng(number).standard_normal((n_tokens, len(LAYERS), HIDDEN), np.float32)
    return np.arange(n_tokens), made.astype(ml_dtypes.bfloat16)


def writer(url, **settings):
    fixed = {"layers": LAYERS, "hidden_size": HIDDEN, "final_norm": "pre", "seal": False, "threads": 1}
    fixed |= {"part_seconds": None, "on_duplicate": "skip"}
    return DatasetWriter(url, **{**fixed, **settings})


def put(url, numbers, *, every=100, acknowledged=None, **settings):
    """Write samples, committing after `every`; what commit() returned, and what was skipped, is acknowledged."""
    acknowledged = set() if acknowledged is None else acknowledged
    with writer(url, **settings) as open_writer:
        skipped = set()
        for at, number in enumerate(numbers):
            if not open_writer.write(f"s{number}", *states(number)):
                skipped.add(f"s{number}")
            if at % every == every - 1:
                acknowledged |= set(open_writer.commit()) | skipped
        acknowledged |= set(open_writer.commit()) | skipped


def connector_file(path, number):
    ids, values = states(number)
    tensors = {
        "hidden_states": FileTensor("bfloat16", values.view(np.uint16)),
        "token_ids": FileTensor("int64", ids.astype(np.int64)),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_sample_file(path, tensors, {}, overwrite=True)
