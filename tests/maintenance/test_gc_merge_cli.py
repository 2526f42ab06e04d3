"""The two commands: what they say, their one JSON document, their exit codes."""

import json

import pytest
from click.testing import CliRunner
from gc_merge_kills import supersede, write

from hsfmt import seal
from hsfmt.cli.main import main
from hsfmt.readers.verification import verify


def run(*argv, code=0):
    result = CliRunner().invoke(main, [str(word) for word in argv])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


@pytest.fixture
def replaced(tmp_path):
    url = tmp_path / "d"
    write(url, ["a", "b"], "p-one")
    supersede(url, "p-one", "p-two")
    seal(url)
    return url


def test_gc_lists_then_removes(replaced):
    words = ("gc", replaced, "--older-than", "0s", "--force", "--keep-snapshots", "1")
    listed = run(*words, "--dry-run")
    assert "to remove: part that p-two replaces" in listed
    assert "would be removed" in listed
    document = json.loads(run(*words, "--dry-run", "--json"))
    assert document["dry_run"]
    assert len(document["removed"]) == 2
    assert (replaced / "hsfmt/manifests/p-one.json").exists()
    assert "removed: part that p-two replaces" in run(*words)
    assert not (replaced / "hsfmt/manifests/p-one.json").exists()
    assert json.loads(run(*words, "--json"))["removed"] == []
    assert verify(str(replaced), level="full").ok


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--older-than", "1h"], 2),
        (["--older-than", "soon"], 2),
        ([], 2),
        (["--older-than", "7d", "--keep-snapshots", "0"], 2),
    ],
)
def test_gc_refuses(replaced, words, code):
    run("gc", replaced, *words, code=code)
    assert (replaced / "hsfmt/manifests/p-one.json").exists()


def test_gc_of_nothing(tmp_path):
    run("gc", tmp_path / "none", "--older-than", "7d", code=3)
    assert not (tmp_path / "none").exists()


def test_merge_says_what_it_did(tmp_path):
    write(tmp_path / "a", ["x", "y"], "p-a")
    write(tmp_path / "b", ["y", "z"], "p-b")
    text = run("merge", tmp_path / "d", tmp_path / "a", tmp_path / "b")
    assert "2 added, 0 there already" in text
    assert "1 with the same content" in text
    document = json.loads(run("merge", tmp_path / "d", tmp_path / "b", tmp_path / "a", "--json"))
    assert document["present"] == ["p-a", "p-b"]
    assert document["fingerprint"] in text
    text = run("merge", tmp_path / "d", tmp_path / "a", "--move")
    assert f"emptied     {tmp_path / 'a'}" in text
    write(tmp_path / "c", ["z"], "p-c", value=2)
    run("merge", tmp_path / "d", tmp_path / "c", code=2)
    assert "z: of part p-b, not of part p-c" in run("merge", tmp_path / "d", tmp_path / "c", "--on-duplicate", "first")
    run("merge", tmp_path / "d", tmp_path / "none", code=3)
    run("merge", tmp_path / "d", code=2)


def test_what_a_server_copied_is_not_called_linked(s3_server, bucket, no_credentials, monkeypatch, tmp_path):
    for name, value in (("ACCESS_KEY_ID", "test-key"), ("SECRET_ACCESS_KEY", "test-secret-key")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    write(tmp_path / "a", ["x"], "p-a")
    s3_server.upload(tmp_path / "a", f"s3://{bucket}/a")
    result = CliRunner().invoke(main, ["merge", f"s3://{bucket}/b", f"s3://{bucket}/a"])
    assert result.exit_code == 0, result.output
    assert "copied by the server itself, 0 bytes copied" in result.output
