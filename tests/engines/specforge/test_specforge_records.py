"""What the store gives SpecForge is what its own reader and store give for the same samples in files."""

import json
from pathlib import Path

import pytest
from program import environment, python_of, run
from specforge_files import FOLDERS, VENV, write_dataset

pytestmark = [pytest.mark.engine, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("compare_records.py")


@pytest.mark.parametrize(
    ("algorithm", "n_samples", "failing"), [("eagle3", 6, []), ("dflash", 5, [3]), ("dspark", 5, [3])]
)
def test_records_and_batches_are_those_of_the_files(data_dir, tmp_path, algorithm, n_samples, failing):
    """The DFlash family fails on the conversation without an assistant's token: that one is left out, and named."""
    url = write_dataset(data_dir, algorithm, tmp_path / "dataset")
    command = [python_of(VENV), SCRIPT, algorithm, data_dir / "specforge" / FOLDERS[algorithm][0], url]
    text = run(command, tmp_path / "log", environment(OMP_NUM_THREADS="1"))
    assert json.loads(text.strip().splitlines()[-1]) == [n_samples, 4 * 3, failing]
    assert ("1 of 6 samples are left out" in text) == bool(failing)
    assert ("data_3" in text) == bool(failing)
