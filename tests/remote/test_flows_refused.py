"""What a user does wrong, or a server refuses: exit code 3, one line with what to do, and no secret in anything said.

Each command, each way; some once more as a program with all its logs and tracebacks on.
"""

import json
import os
import re
import subprocess
import sys

import pytest
from flow_steps import COMMANDS, ROOT, converting, environment, in_a_process, source_folder, write_part
from servers.fault_proxy import Fault
from servers.nginx import AUTHORITY
from servers.seaweed import READER_KEY, READER_SECRET, SECRET

WRONG_SECRET = "not-this-secret-either"
LOGIN = "someone:her-own-password"
SIGNATURE = "X-Amz-Signature=0123456789abcdef0123"
SECRETS = (SECRET, READER_SECRET, WRONG_SECRET, "her-own-password", "0123456789abcdef0123")

WRITING = {
    "convert": ["SOURCE", "URL", "--from", "vllm", "--layer-ids", "1,3", "-q"],
    "push": ["DATASET", "URL", "-q"],
    "merge into": ["URL", "DATASET"],
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """What commands read that work up to the point where they are refused."""
    folder = tmp_path_factory.mktemp("inputs")
    source_folder(folder / "source", range(2))
    write_part(folder / "dataset", "p-one", range(2), seal=True)
    return {"SOURCE": folder / "source", "DATASET": folder / "dataset"}


@pytest.fixture
def run(hsfmt, as_user, inputs, tmp_path):
    """Run a command of the tables about a URL; return what it said on stderr."""

    def refused(name, url):
        places = {"URL": url, "OUT": tmp_path / "out", **inputs}
        argv = [name.split()[0], *(places.get(word, word) for word in (COMMANDS | WRITING)[name])]
        result = hsfmt(*argv, codes=(3,))
        assert not (tmp_path / "out").exists() or not any((tmp_path / "out").rglob("*.json"))
        assert_secret_free(result.output)
        if name in {"info", "push"}:
            document = hsfmt(*argv, "--json", codes=(3,))
            assert_secret_free(document.output)
            assert json.loads(document.stdout)["exit_code"] == 3
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: ")
        return line

    return refused


def assert_secret_free(text):
    assert not [secret for secret in SECRETS if secret in text]


@pytest.mark.parametrize("name", [*COMMANDS, *WRITING])
def test_a_bucket_that_is_not_there(run, name):
    assert re.search(r"expected a bucket 'no-such-bucket'.*check the bucket's name", run(name, "s3://no-such-bucket/d"))


@pytest.mark.parametrize("name", [*COMMANDS, *WRITING])
def test_no_credentials(run, as_user, bucket, name):
    as_user(AWS_ACCESS_KEY_ID=None, AWS_SECRET_ACCESS_KEY=None)
    line = run(name, f"s3://{bucket}/d")
    assert "expected credentials" in line
    assert "AWS_ACCESS_KEY_ID" in line


@pytest.mark.parametrize("name", [*COMMANDS, *WRITING])
def test_credentials_that_may_not(run, as_user, bucket, name):
    as_user(AWS_ACCESS_KEY_ID=READER_KEY, AWS_SECRET_ACCESS_KEY=READER_SECRET)
    line = run(name, f"s3://{bucket}/d")
    assert "expected to be let in" in line
    assert f"s3://{bucket}/d" in line


@pytest.mark.parametrize("name", ["info", "verify", "pull", "push"])
def test_a_wrong_secret(run, as_user, bucket, name):
    as_user(AWS_SECRET_ACCESS_KEY=WRONG_SECRET)
    assert "check the credentials" in run(name, f"s3://{bucket}/d")


@pytest.mark.parametrize("name", COMMANDS)
def test_no_dataset(run, bucket, name):
    line = run(name, f"s3://{bucket}/nothing/here")
    assert f"s3://{bucket}/nothing/here" in line


@pytest.mark.parametrize("name", ["info", "convert"])
def test_a_server_that_is_not_there(run, as_user, bucket, name):
    as_user(AWS_ENDPOINT_URL="http://127.0.0.1:1", HSFMT_RETRY_SECONDS="0")
    line = run(name, f"s3://{bucket}/d")
    assert "expected a server that can be reached" in line
    assert "AWS_ENDPOINT_URL" in line


@pytest.mark.parametrize("name", ["info", "ls", "cat", "card", "export", "pull"])
@pytest.mark.parametrize("path", ["nothing-here", "private/d", "forbidden/d"])
def test_web_servers(run, web_server, name, path):
    """Logins and signatures are part of such URLs."""
    url = f"{web_server.url.replace('//', f'//{LOGIN}@')}/{path}?{SIGNATURE}"
    line = run(name, url)
    assert f"{web_server.host}/{path}" in line


LOUD = """
import logging, sys
logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
from hsfmt.cli.main import main
main()
"""


def loudly(*argv, **env):
    """A program with all logs of all packages, and tracebacks; its own log alone is held to have no secrets."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FSSPEC_", "HF_"))}
    env = kept | {"PYTHONPATH": str(ROOT), "HSFMT_TRACEBACK": "1", "HSFMT_RETRY_SECONDS": "0"} | env
    argv = [sys.executable, "-c", LOUD, *map(str, argv)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300, env=env)


def test_logs_and_tracebacks_hold_no_secret(s3_server, bucket, web_server, tmp_path):
    env = environment(s3_server, secret=WRONG_SECRET)
    write_part(tmp_path / "dataset", "p-one", range(2), seal=True)
    login = web_server.url.replace("//", f"//{LOGIN}@")
    for argv in (
        ("info", f"s3://{bucket}/d"),
        ("push", tmp_path / "dataset", f"s3://{bucket}/d", "--json"),
        ("pull", f"{login}/private/d?{SIGNATURE}", tmp_path / "out", "--json"),
        ("info", f"{login}/in-circles/d?{SIGNATURE}"),
    ):
        done = loudly(*argv, **env)
        assert done.returncode == 3, done.stderr
        assert "Traceback" in done.stderr
        assert "DEBUG" in done.stderr
        assert_secret_free(done.stdout + done.stderr)


def test_reports_and_files_hold_no_secret(hsfmt, as_user, bucket, serve, web_server, tmp_path):
    """Of what works: JSON reports, cards, journals of exports, and every file of copies."""
    write_part(tmp_path / "dataset", "p-one", range(2), seal=True)
    url = f"{web_server.url.replace('//', f'//{LOGIN}@')}/{serve(tmp_path / 'dataset')}?{SIGNATURE}"
    bucket_url = f"s3://{bucket}/d"
    source_folder(tmp_path / "source", range(4, 6))
    said = [
        hsfmt(*argv).output
        for argv in (
            ("pull", url, tmp_path / "pulled", "--json"),
            ("push", url, bucket_url, "--json"),
            ("info", url, "--json"),
            ("ls", url, "--json"),
            ("card", url),
            ("export", url, tmp_path / "exported", "--to", "safetensors", "--json"),
            (*converting(tmp_path / "source", bucket_url), "--json"),
            ("info", bucket_url, "--json"),
            ("verify", bucket_url, "--json"),
            ("pull", bucket_url, tmp_path / "both", "--json"),
            ("gc", bucket_url, "--older-than", "7d", "--json"),
        )
    ]
    for text in said:
        assert text
        assert_secret_free(text)
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(found) > 40
    for path in found:
        assert_secret_free(path.read_bytes().decode("latin-1"))


@pytest.mark.parametrize("command", [["info"], ["pull"]])
def test_a_certificate_that_nobody_signed_is_refused(serve, web_by_https, tmp_path, command):
    write_part(tmp_path / "dataset", "p-one", range(2), seal=True)
    url = f"{web_by_https.url}/{serve(tmp_path / 'dataset')}"
    target = [tmp_path / "out", "-q"] if command == ["pull"] else []
    done = in_a_process(*command, url, *target)
    assert done.returncode == 3, done.stderr
    (line,) = done.stderr.splitlines()
    assert "expected a server with a trusted certificate" in line
    assert "SSL_CERT_FILE" in line
    done = in_a_process(*command, url, *target, SSL_CERT_FILE=str(AUTHORITY))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_a_bucket_by_https_too(s3_server, s3_by_https, bucket, tmp_path, client):
    """With the authority in the variable that the SDK knows; nothing but reading and writing tells a difference."""
    write_part(tmp_path / "dataset", "p-one", range(2), seal=True)
    env = environment(s3_server, endpoint=s3_by_https.url) | {"HSFMT_REMOTE": client}
    for argv in (("push", tmp_path / "dataset", f"s3://{bucket}/d", "-q"), ("cat", f"s3://{bucket}/d", "s1")):
        done = in_a_process(*argv, **env)
        assert done.returncode == 3, done.stderr
        (line,) = done.stderr.splitlines()
        assert "expected a server with a trusted certificate" in line
        trusting = {"AWS_CA_BUNDLE": str(AUTHORITY), "SSL_CERT_FILE": str(AUTHORITY)}
        done = in_a_process(*argv, **env, **trusting)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("level", ["quick", "full"])
@pytest.mark.parametrize(("workers", "status"), [(1, 403), (2, 401)])
def test_credentials_that_run_out_are_no_damage(hsfmt, as_user, bucket, s3_faults, level, workers, status):
    """After each request in turn, of all that a verification makes."""
    for number in (0, 1):
        write_part(f"s3://{bucket}/d", f"p-{number}", [2 * number, 2 * number + 1], seal=bool(number))
    as_user(AWS_ENDPOINT_URL=s3_faults.url)
    argv = ["verify", f"s3://{bucket}/d", "--level", level, "--workers", str(workers), "--json"]
    s3_faults.reset()
    assert json.loads(hsfmt(*argv).stdout)["ok"]
    n_requests = len(s3_faults.requests)
    assert n_requests > 5
    for n_let_in in range(0, n_requests, 1 if workers == 1 else n_requests // 4):
        s3_faults.reset()
        s3_faults.faults.append(Fault("status", status=status, count=None, skip=n_let_in, method=""))
        document = json.loads(hsfmt(*argv, codes=(3,)).stdout)
        assert document["exit_code"] == 3
        assert "findings" not in document
        assert document["error"][0]["expected"] == "to be let in"
