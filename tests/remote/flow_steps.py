"""What the flows are made of: commands, something to convert, and what a dataset holds, wherever it lies."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from click.testing import CliRunner

from hsfmt import DatasetWriter
from hsfmt.catalog import committed_parts, load_index, load_manifest, read_header
from hsfmt.cli.main import main
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.storage import open_store
from hsfmt.writers.sample_files import FileTensor, write_sample_file

ROOT = Path(__file__).resolve().parents[2]
LAYERS, HIDDEN = (1, 3), 16
# Every command that reads or changes a dataset, with words for its place and for one of its own.
COMMANDS = {
    "info": ["URL"],
    "ls": ["URL"],
    "cat": ["URL", "s1"],
    "verify": ["URL", "-q"],
    "seal": ["URL"],
    "retract": ["URL", "s1"],
    "compact": ["URL", "-q"],
    "repair": ["URL", "-q"],
    "gc": ["URL", "--older-than", "7d"],
    "card": ["URL"],
    "export": ["URL", "OUT", "--to", "safetensors", "-q"],
    "pull": ["URL", "OUT", "-q"],
    "merge": ["OUT", "URL"],
}


class CommandFailedError(Exception):
    """A command ended with another code than it should."""

    def __init__(self, argv, result):
        super().__init__(f"hsfmt {' '.join(argv)}: exit {result.exit_code}\n{result.stdout}\n{result.stderr}")
        self.code, self.text = result.exit_code, result.output


class Hsfmt:
    """Calls `hsfmt` in this process."""

    def __call__(self, *argv, codes=(0,)):
        argv = [str(word) for word in argv]
        result = CliRunner().invoke(main, argv, prog_name="hsfmt")
        if result.exit_code not in codes:
            raise CommandFailedError(argv, result)
        return result

    def json(self, *argv, codes=(0,)):
        return json.loads(self(*argv, "--json", codes=codes).stdout)


def environment(s3_server, **others):
    """Credentials and endpoint, as the environment has them."""
    options = s3_server.options(**others)
    return {
        "AWS_ACCESS_KEY_ID": options["key"],
        "AWS_SECRET_ACCESS_KEY": options["secret"],
        "AWS_ENDPOINT_URL": options["endpoint_url"],
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def in_a_process(*argv, **env):
    """Run `hsfmt` as a program; nothing but `env` is said to it about any storage."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FSSPEC_", "HF_"))}
    argv = [sys.executable, "-m", "hsfmt.cli", *map(str, argv)]
    env = kept | {"PYTHONPATH": str(ROOT)} | env
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300, env=env)


def states(number, n_tokens):
    rng = np.random.default_rng(number)
    return rng.standard_normal((n_tokens, len(LAYERS), HIDDEN), np.float32).astype(ml_dtypes.bfloat16)


def source_folder(folder, numbers):
    """A folder of files as vLLM's connector writes them."""
    folder.mkdir()
    for number in numbers:
        n_tokens = 3 + 7 * (number % 5)
        tensors = {
            "hidden_states": FileTensor("bfloat16", states(number, n_tokens).view(np.uint16)),
            "token_ids": FileTensor("int64", np.arange(n_tokens, dtype=np.int64) + number),
        }
        write_sample_file(folder / f"s{number}.safetensors", tensors, {}, overwrite=True)
    return folder


def converting(source, url):
    """The arguments that convert such a folder."""
    return "convert", source, url, "--from", "vllm", "--layer-ids", "1,3", "-q"


def write_part(url, part, numbers, *, holes=(), seal=False, **settings):
    """Commit one part of that name, in chunks so small that every border occurs."""
    fixed = {"layers": LAYERS, "hidden_size": HIDDEN, "final_norm": "pre", "codec": "zstd", "seal": seal}
    fixed |= {"part_names": lambda: part, "chunk_tokens": 8, "shard_tokens": 32, "threads": 1}
    with DatasetWriter(url, **fixed | settings) as writer:
        for number in numbers:
            n_tokens = 3 + 7 * (number % 5)
            mask = np.arange(n_tokens) % 3 > 0
            writer.write(f"s{number}", np.arange(n_tokens), states(number, n_tokens), mask, source_index=number)
        for sample_id in holes:
            writer.hole(sample_id, "the engine gave nothing")


def held(url):
    """All that a reader gets of a sealed dataset, bit by bit, in its order."""
    reader = SampleReader(url)
    ids = list(reader.sample_ids)
    samples = [
        (
            sample_id,
            sample.input_ids.tobytes(),
            sample.loss_mask.tobytes(),
            sample.hidden_states.shape,
            sample.hidden_states.tobytes(),
            sample.meta,
        )
        for sample_id, sample in zip(ids, reader.read_many(range(len(ids))), strict=True)
    ]
    found = read_header(reader.store), reader.content_digest, samples
    reader.close()
    return found


def shards(url):
    """Digests of the shards of all committed parts, whatever the parts' names are."""
    store = open_store(url)
    header, found = read_header(store), []
    for part in committed_parts(store):
        files = load_manifest(store, part, header).files
        found += [(entry.path.partition(f"{part}/")[2], entry.nbytes, entry.digest) for entry in files]
    found = [entry for entry in found if "/c/" in entry[0]]
    return sorted(found)


def objects(url, *, without=()):
    """The bytes of every object."""
    store = open_store(url)
    return {
        path: store.read(path, nbytes)
        for path, nbytes in store.walk("")
        if not any(path.startswith(prefix) for prefix in without)
    }


def digests(url):
    """Content digest by id of all that is committed; {} where nothing is."""
    store = open_store(url)
    if store.size("zarr.json") is None:
        assert not committed_parts(store), "parts without a root document"
        return {}
    found, header = {}, read_header(store)
    for part in committed_parts(store):
        manifest = load_manifest(store, part, header)
        if manifest.counts.samples:
            index = load_index(store, manifest)
            found |= {index.sample_id(row): index.content_digest[row].tobytes() for row in range(index.n_samples)}
    return found


def check_damage_is_repaired(hsfmt, url):
    """Flip a byte of a sample: it is found, and left out by a repair."""
    write_part(url, "p-one", range(4), codec="none", seal=True)
    store = open_store(url)
    path = next(path for path, _ in store.walk("parts/p-one/hidden_states/c"))
    data = bytearray(store.read(path, 1 << 20))
    data[5] ^= 0x10
    store.write(path, bytes(data))
    hsfmt("verify", url, "--level", "full", "-q", codes=(1,))
    hsfmt("repair", url, "-q", codes=(1,))
    hsfmt("verify", url, "--level", "full", "-q")


def check_copies_and_merges(hsfmt, url, other, tmp_path):
    """Copy between a folder, a storage and another one of it, by the server where it can; and put both together."""
    source, back = tmp_path / "source", tmp_path / "back"
    write_part(source, "p-one", range(4), holes=["h1"])
    write_part(source, "p-two", range(4, 9), seal=True)
    assert hsfmt.json("push", source, url)["files"] > 0
    assert hsfmt.json("push", url, other, "--verify", "full")["server_copied_nbytes"] > 0
    assert hsfmt.json("pull", other, back)["files"] > 0
    assert objects(url) == objects(other) == objects(back) == objects(source)
    assert held(url) == held(source)
    assert hsfmt.json("push", source, url)["files"] == 0
    write_part(tmp_path / "third", "p-three", range(20, 23), seal=True)
    hsfmt("merge", url, tmp_path / "third")
    hsfmt("merge", source, tmp_path / "third")
    assert held(url) == held(source)
    hsfmt("merge", f"{other}-new", url, other)
    assert held(f"{other}-new") == held(url)
    hsfmt("verify", url, "--level", "full", "-q")
