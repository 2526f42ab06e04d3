"""`hsfmt retract`: out of the snapshot, present for producers, and never by a typing error."""

import json

import pytest
from click.testing import CliRunner
from repair_cases import build, contents, open_writer, tree, without_fsync

from hsfmt.cli.main import main
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.verification import verify


@pytest.fixture
def dataset(tmp_path):
    with without_fsync():
        yield build(tmp_path / "dataset")


def run(*argv, text=None):
    return CliRunner().invoke(main, ["retract", *map(str, argv)], input=text)


def test_retracted_samples_are_not_served_and_count_as_present(dataset):
    before = contents(dataset)
    result = run(dataset, "s0-1", "s1-0", "s0-1")
    assert (result.exit_code, "retracted 2 samples" in result.output) == (0, True)
    assert contents(dataset) == {key: value for key, value in before.items() if key not in ("s0-1", "s1-0")}
    with open_writer(dataset, "again") as writer:
        assert "s0-1" in writer.committed_ids()
    assert SampleReader(dataset).snapshot.counts["retracted"] == 2
    assert verify(dataset, level="full").ok


@pytest.mark.parametrize("form", ["lines", "json", "stdin"])
def test_ids_from_a_file(dataset, tmp_path, form):
    text = '["s0-0", "s1-2"]' if form == "json" else "s0-0\ns1-2\n"
    (tmp_path / "ids").write_text(text)
    result = run(dataset, "--ids", "-" if form == "stdin" else tmp_path / "ids", "--json", text=text)
    document = json.loads(result.stdout)
    assert (document["ids"], document["retracted_now"]) == (["s0-0", "s1-2"], 2)
    assert len(SampleReader(dataset)) == 4


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_an_unknown_id_changes_nothing(dataset, dry):
    before = tree(dataset)
    result = run(dataset, "s0-0", "typo", *dry)
    assert result.exit_code == 3
    assert "typo" in result.output
    assert tree(dataset) == before


def test_a_dry_run_changes_nothing(dataset):
    before = tree(dataset)
    result = run(dataset, "s0-0", "--dry-run")
    assert (result.exit_code, "would retract 1 sample" in result.output) == (0, True)
    assert tree(dataset) == before


def test_no_id_at_all_is_refused(dataset):
    assert run(dataset).exit_code == 2
    assert run(dataset, "--ids", "-", text="").exit_code == 2
