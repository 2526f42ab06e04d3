"""The real trainer of speculators prints the same losses from a dataset as from its own folder of files."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from program import environment, python_of, run

from hsfmt.cli.main import main as hsfmt

pytestmark = [pytest.mark.engine, pytest.mark.slow]
VENV = ".venv-speculators"
SCRIPT = Path(__file__).with_name("train_on_cpu.py")
OPTIONS = (
    "--speculator-type eagle3 --total-seq-len 256 --epochs 1 --max-steps 2 --seed 1 --draft-attn-impl eager"
    " --loss-implementation eager"
)
PRINTED = re.compile(r"\b(train/loss|val/loss_epoch|train/error_records)=([-+.\de]+)")


@pytest.fixture(scope="module")
def datasets(data_dir, tmp_path_factory) -> Callable[..., Path]:
    """Folders of speculators as datasets, converted once: all rows, or without some."""
    made = {}

    def make(name: str = "0.9.0", without: tuple[int, ...] = ()) -> Path:
        if (name, without) not in made:
            source = tmp_path_factory.mktemp("source") / name
            shutil.copytree(data_dir / "speculators" / name, source)
            for row in without:
                (source / "hidden_states" / f"hs_{row}.safetensors").unlink()
            made[name, without] = source.parent / "dataset"
            words = ["convert", str(source), str(made[name, without]), "--layer-ids", "2,4,5,8"]
            hsfmt(words, standalone_mode=False)
        return made[name, without]

    return make


@pytest.fixture(scope="module")
def losses(data_dir, tmp_path_factory) -> Callable[..., dict[str, list[str]]]:
    """Train once for each way that is asked for; return the printed numbers by their names."""
    done = {}
    python = python_of(VENV)

    def train(how: str, *more: object, data: str = "0.9.0", release: str = "0.9.0", exit_code: int = 0):
        words = tuple(map(str, more))
        key = (how, words, data, release)
        if key not in done:
            folder = tmp_path_factory.mktemp("run")
            paths = [data_dir / "tiny-llama", data_dir / "speculators" / data]
            places = ["--verifier-name-or-path", paths[0], "--data-path", paths[1], "--save-path", folder / "out"]
            beside = [] if release == "0.9.0" else [python.parents[1] / f"speculators-{release}"]
            command = [python, SCRIPT, how, *places, *OPTIONS.split(), "--target-layer-ids", "2", "4", "5", *words]
            env = environment(*beside, OMP_NUM_THREADS="1")  # two busy cores gain nothing by more
            text = run(command, folder / "log", env, exit_code=exit_code)
            numbers: dict[str, list[str]] = {"text": [text]}
            for name, value in PRINTED.findall(text):
                numbers.setdefault(name, []).append(value)
            done[key] = numbers
        return done[key]

    return train


def ours(dataset: Path, workers: int = 0, missing: str = "raise") -> tuple[object, ...]:
    return "--hidden-states-backend", "hsfmt", "--hsfmt-path", dataset, *loading(workers, missing)


def loading(workers: int = 0, missing: str = "raise") -> tuple[object, ...]:
    return "--num-workers", workers, "--on-missing", missing


def assert_same_losses(found: dict[str, list[str]], expected: dict[str, list[str]]) -> None:
    assert len(expected["train/loss"]) == 2
    assert len(expected["val/loss_epoch"]) == 1
    for name in ("train/loss", "val/loss_epoch", "train/error_records"):
        assert found[name] == expected[name], name


def test_the_backend(losses, datasets):
    assert_same_losses(losses("hsfmt", *ours(datasets())), losses("file", *loading()))


def test_the_backend_in_two_workers(losses, datasets):
    assert_same_losses(losses("hsfmt", *ours(datasets(), workers=2)), losses("file", *loading()))


def test_the_dataset_under_their_loaders_and_trainer(losses, datasets):
    assert_same_losses(losses("dataset", *ours(datasets())), losses("file", *loading()))


def test_float8_states_as_their_fp8_backend_reads_them(losses, datasets):
    their = losses("file", "--hidden-states-backend", "fp8", *loading(), data="0.9.0_fp8")
    assert_same_losses(losses("hsfmt", *ours(datasets("0.9.0_fp8")), data="0.9.0_fp8"), their)


def test_the_release_before(losses, datasets):
    expected = losses("file", *loading(), release="0.8.1")
    assert_same_losses(losses("hsfmt", *ours(datasets()), release="0.8.1"), expected)
    assert expected["train/loss"] != losses("file", *loading())["train/loss"]


def test_missing_rows_are_skipped_and_counted(losses, datasets):
    found = losses("hsfmt", *ours(datasets("0.9.0", (0, 3, 4, 7, 11)), missing="skip"))
    assert "19 of 24 rows" in found["text"][0]
    assert sum(map(float, found["train/error_records"])) > 0


def test_missing_rows_raise(losses, datasets):
    found = losses("hsfmt", *ours(datasets("0.9.0", tuple(range(20)))), exit_code=1)
    assert "Failed to load hidden states for sample" in found["text"][0]
