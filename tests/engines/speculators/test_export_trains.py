"""The real trainer of speculators prints the same losses from an exported folder as from the one that was converted."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from program import environment, python_of, run

from hsfmt.cli.main import main as hsfmt
from hsfmt.writers.targets import speculators_rows

pytestmark = [pytest.mark.engine, pytest.mark.slow]
VENV = ".venv-speculators"
SCRIPT = Path(__file__).with_name("train_on_cpu.py")
OPTIONS = (
    "--speculator-type eagle3 --total-seq-len 256 --epochs 1 --max-steps 2 --seed 1 --draft-attn-impl eager"
    " --loss-implementation eager --target-layer-ids 2 4 5 --num-workers 0 --on-missing raise"
)
PRINTED = re.compile(r"\b(train/loss|val/loss_epoch|train/error_records)=([-+.\de]+)")


@pytest.fixture(scope="module")
def datasets(data_dir, tmp_path_factory) -> Callable[[str], tuple[Path, Path]]:
    """A folder of speculators, and the dataset that it was converted to."""
    made = {}

    def make(name: str) -> tuple[Path, Path]:
        if name not in made:
            root = tmp_path_factory.mktemp("folders")
            shutil.copytree(data_dir / "speculators" / name, root / "source", copy_function=shutil.copyfile)
            run_hsfmt("convert", root / "source", root / "dataset", "--from", "speculators", "--layer-ids", "2,4,5,8")
            made[name] = root / "source", root / "dataset"
        return made[name]

    return make


def run_hsfmt(*words: object) -> None:
    """Call the command line in this process."""
    hsfmt([*map(str, words), "--quiet"], standalone_mode=False)


def train(folder: Path, model: Path, place: Path, *more: str, release: str = "0.9.0") -> dict[str, list[str]]:
    """Train two steps; return the printed numbers by their names."""
    python = python_of(VENV)
    place.mkdir()
    places = ["--verifier-name-or-path", model, "--data-path", folder, "--save-path", place / "out"]
    beside = [] if release == "0.9.0" else [python.parents[1] / f"speculators-{release}"]
    env = environment(*beside, OMP_NUM_THREADS="1")  # two busy cores gain nothing by more
    text = run([python, SCRIPT, "file", *places, *OPTIONS.split(), *more], place / "log", env)
    numbers: dict[str, list[str]] = {}
    for name, value in PRINTED.findall(text):
        numbers.setdefault(name, []).append(value)
    assert len(numbers["train/loss"]) == 2
    assert len(numbers["val/loss_epoch"]) == 1
    return numbers


@pytest.mark.parametrize("release", ["0.9.0", "0.8.1"])
def test_bfloat16(datasets, data_dir, tmp_path, release):
    source, dataset = datasets("0.9.0")
    run_hsfmt("export", dataset, tmp_path / "exported", "--to", "speculators")
    found = train(tmp_path / "exported", data_dir / "tiny-llama", tmp_path / "found", release=release)
    assert found == train(source, data_dir / "tiny-llama", tmp_path / "expected", release=release)


def test_float8(datasets, data_dir, tmp_path):
    source, dataset = datasets("0.9.0_fp8")
    run_hsfmt("export", dataset, tmp_path / "exported", "--to", "speculators-fp8")
    backend = ("--hidden-states-backend", "fp8")
    found = train(tmp_path / "exported", data_dir / "tiny-llama", tmp_path / "found", *backend)
    assert found == train(source, data_dir / "tiny-llama", tmp_path / "expected", *backend)


def test_datasets_opens_many_arrow_files(datasets, tmp_path, monkeypatch):
    """The real `load_from_disk` finds the rows, types and format of the original in one shard for each few rows."""
    source, dataset = datasets("0.9.0")
    monkeypatch.setattr(speculators_rows, "_SHARD_NBYTES", 1 << 20)
    run_hsfmt("export", dataset, tmp_path / "exported", "--to", "speculators")
    assert len(list((tmp_path / "exported").glob("data-*-of-*.arrow"))) > 4
    code = (
        "import sys, datasets\n"
        "found, real = (datasets.load_from_disk(path) for path in sys.argv[1:])\n"
        "assert found.features == real.features and found.format == real.format, found\n"
        "for a, b in zip(found, real, strict=True):\n"
        "    assert all(a[k].equal(b[k]) and a[k].dtype == b[k].dtype for k in b)\n"
        "print(len(found), found._fingerprint != real._fingerprint)\n"
    )
    command = [python_of(VENV), "-c", code, tmp_path / "exported", source]
    assert run(command, tmp_path / "log", environment()).splitlines()[-1] == "24 True"
