"""Each release of speculators takes the backend's options in its own way: resolved by its real configuration."""

import json

import pytest
from program import environment, python_of, run

from hsfmt.cli.main import main as hsfmt

pytestmark = [pytest.mark.engine, pytest.mark.slow]
RESOLVE = """
import argparse, json, sys
from hsfmt.readers import speculators
speculators.register()
speculators.register()
from importlib.metadata import version
from speculators.train.config import TrainConfig
config = TrainConfig.resolve(sys.argv[2:])
speculators.register()
args = argparse.Namespace(**config.flatten())
module = speculators._registries()[0]
backend = module.HiddenStatesBackend.registry[args.hidden_states_backend]
transfer = backend.from_train_args(args, sys.argv[1])
found = transfer.get_cached(23)
print()
print(json.dumps([module.__name__, transfer.samples.tolist(), list(found["hidden_states"].shape)]))
"""


@pytest.mark.parametrize(
    ("release", "option", "registry"),
    [
        ("0.9.0", "--hsfmt-path", "hs_connectors"),
        ("0.8.1", "--hsfmt-path", "hs_connectors"),
        ("0.7.0", "--hidden-states-path", "speculators._vendor.hs_connectors"),
    ],
)
def test_the_backend_is_found_and_reads_every_row(data_dir, tmp_path, release, option, registry):
    source = data_dir / "speculators" / "0.9.0"
    hsfmt(["convert", str(source), str(tmp_path / "dataset"), "--layer-ids", "2,4,5,8"], standalone_mode=False)
    python = python_of(".venv-speculators")
    beside = [] if release == "0.9.0" else [python.parents[1] / f"speculators-{release}"]
    words = ["--verifier-name-or-path", data_dir / "tiny-llama", "--speculator-type", "eagle3", "--data-path", source]
    words += ["--hidden-states-backend", "hsfmt", option, tmp_path / "dataset", "--on-missing", "raise"]
    command = [python, "-c", RESOLVE, source, *words, "--target-layer-ids", "4", "2", "5"]
    text = run(command, tmp_path / "log", environment(*beside))
    name, samples, shape = json.loads(text.strip().splitlines()[-1])
    assert (name, samples, shape[1:]) == (registry, list(range(24)), [4, 128])


def test_the_launcher_passes_every_argument_on(tmp_path):
    """Run as torchrun runs it; the list of options is speculators' own, with ours in it."""
    command = [python_of(".venv-speculators"), "-m", "hsfmt.cli.speculators_train", "--", "--help"]
    text = run(command, tmp_path / "log", environment())
    assert "--hsfmt-path" in text
    assert "--hsfmt-snapshot" in text
    assert "--verifier-name-or-path" in text


def test_a_wrong_argument_ends_as_it_does_in_speculators(tmp_path):
    words = ["--hidden-states-backend", "hsfmt", "--no-such-option", "1"]
    command = [python_of(".venv-speculators"), "-m", "hsfmt.cli.speculators_train", *words]
    assert "unrecognized arguments: --no-such-option 1" in run(command, tmp_path / "log", environment(), exit_code=2)
