"""`--storage-option`: datasets that can't be reached without it, on real servers; and no secrets, anywhere."""

import json
import shutil

import click
import fsspec
import pytest
from servers.seaweed import KEY, SECRET

from hsfmt.cli import main as cli
from hsfmt.cli.storage_options import NAME, open_places, open_sides, shown_command, storage_option
from hsfmt.errors import UsageError

# Those that take no dataset's URL: folders of other programs, the local cache, or arguments of another program.
WITHOUT = {"doctor", "estimate", "cache info", "cache clear", "speculators-train", "specforge-train"}
BETWEEN_TWO = {"push", "pull"}


def commands():
    for name in cli._COMMANDS:
        command = cli.main.get_command(click.Context(cli.main), name)
        if isinstance(command, click.Group):
            yield from ((f"{name} {inner}", each) for inner, each in command.commands.items())
        else:
            yield name, command


def test_every_command_that_takes_a_dataset_has_it():
    having = {name: {word for each in command.params for word in each.opts} for name, command in commands()}
    assert {name for name, options in having.items() if NAME not in options} == WITHOUT
    sides = {"--source-option", "--destination-option"}
    assert {name for name, options in having.items() if options & sides == sides} == BETWEEN_TWO


def options_of(*words):
    """What a command line's words become."""

    @click.command()
    @storage_option
    def command(*, storage_options):
        return storage_options

    return command.main([part for word in words for part in (NAME, word)], standalone_mode=False)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("x=true", True),
        ("x=False", False),
        ("x=null", None),
        ("x=12", 12),
        ("x=0.5", 0.5),
        ("x=", ""),
        ("x=007", "007"),
        ("x=NaN", "NaN"),
        ('x="12"', "12"),
        ("x=http://host:9000/a=b", "http://host:9000/a=b"),
        ("x=cdn.example.com,.example.org", "cdn.example.com,.example.org"),
        ('x=["a", "b"]', ["a", "b"]),
        ('x={"s3": {"addressing_style": "path"}}', {"s3": {"addressing_style": "path"}}),
    ],
)
def test_values(word, value):
    assert options_of(word) == {"x": value}
    assert type(options_of(word)["x"]) is type(value)


def test_many_options():
    assert options_of("anon=true", "endpoint_url=http://a", "endpoint_url=http://b") == {
        "anon": True,
        "endpoint_url": "http://b",
    }
    assert options_of() == {}


@pytest.mark.parametrize(
    "key", ["tokenizer", "signature_version", "profile", "use_ssl", "default_block_size", "passive"]
)
def test_keys_that_are_no_secrets(key):
    assert options_of(f"{key}=value-1") == {key: "value-1"}


@pytest.mark.parametrize(
    ("word", "value"), [("token=anon", "anon"), ("token=google_default", "google_default"), ("token=false", False)]
)
def test_words_for_tokens_are_no_secrets(word, value):
    assert options_of(word) == {"token": value}


@pytest.mark.parametrize(
    "word",
    [
        "key=hidden-1",
        "secret=hidden-1",
        "token=hidden-1",
        "password=hidden-1",
        "password=41414141",
        "sas_token=hidden-1",
        "account_key=hidden-1",
        "accountKey=hidden-1",
        "apikey=hidden-1",
        "accesskeyid=hidden-1",
        "clientSecret=hidden-1",
        "credentials=hidden-1",
        "aws_secret_access_key=hidden-1",
        "AWSSessionToken=hidden-1",
        "connection_string=hidden-1",
        'headers={"Authorization": "hidden-1"}',
        'token={"refresh": "hidden-1"}',
        'keys=["hidden-1"]',
        'client_kwargs={"a": [{"aws_session_token": "hidden-1"}]}',
        "endpoint_url=http://user:hidden-1@host",
        "endpoint_url=http://host?signature=hidden-1",
        'proxies=["http://user:hidden-1@host"]',
        "anything=hf_hidden1hidden1",
        'x={"broken": hidden-1',
        "hidden-1",
        "hidden 1=hidden-1",
    ],
)
def test_secrets_are_refused_and_not_shown(hsfmt, word):
    for more in ((), ("--json",)):
        result = hsfmt("info", "memory://nothing-there", NAME, word, *more, code=2)
        assert "hidden" not in result.stdout + result.stderr.replace(NAME, "")
        assert "41414141" not in result.output
        assert result.stderr.count("\n") == 1
        if "=" in word and "broken" not in word and " 1" not in word:
            assert "AWS_SECRET_ACCESS_KEY" in result.stderr
            assert "visible to everybody" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("info", "{0}"),
        ("verify", "{0}"),
        ("seal", "{0}"),
        ("gc", "{0}", "--older-than", "7d"),
        ("merge", "{0}", "{1}"),
        ("push", "{0}", "{1}"),
        ("convert", "{1}", "{0}", "--layer-ids", "2,4,5,8"),
        ("export", "{0}", "{1}", "--to", "npz"),
    ],
    ids=lambda words: words[0],
)
def test_a_local_path_takes_none(hsfmt, dataset, tmp_path, words):
    words = [word.format(dataset, tmp_path / "other") for word in words]
    result = hsfmt(*words, NAME, "anon=true", code=2)
    assert "expected none for a local path, got anon" in result.stderr
    assert not (tmp_path / "other").exists()


def test_of_several_places_those_that_are_remote_get_them(tmp_path):
    local, remote = open_places([str(tmp_path), "memory://x"], {"anon": True})
    assert (local.is_local, remote.is_local) == (True, False)
    assert remote._options == {"anon": True}
    origin, target = open_sides("memory://x", "memory://y", {"a": 1, "b": 1}, {"b": 2}, {"c": 3})
    assert (origin._options, target._options) == ({"a": 1, "b": 2}, {"a": 1, "b": 1, "c": 3})
    with pytest.raises(UsageError, match="--destination-option: expected none for a local path"):
        open_sides("memory://x", str(tmp_path), {}, {}, {"c": 3})


def test_what_is_recorded_of_a_command_line(hsfmt, vllm):
    words = [NAME, "a=b", "x", f"{NAME}=c=d", "--source-option", "e=f", "https://user:pw@host/y?sig=1", NAME]
    assert shown_command(words) == ("x", "https://…@host/y?…")
    url = "memory://recorded"
    hsfmt("convert", vllm, url, "--layer-ids", "2,4,5,8", NAME, "endpoint_url=http://gateway-7:9000")
    facts = hsfmt.json("info", url)
    (run,) = facts["producers"][0]["runs"]
    assert run["command"] == ["hsfmt", "convert", str(vllm), url, "--layer-ids", "2,4,5,8"]
    assert "gateway-7" not in json.dumps(facts)


# --- a web server without ranges, and one that leads elsewhere --------------------------------------------------------


def test_a_server_without_ranges(hsfmt, dataset, serve, web_server, tmp_path, monkeypatch):
    monkeypatch.setenv("HSFMT_CACHE_DIR", str(tmp_path / "cache"))
    url = f"{web_server.url}/without-ranges/{serve(dataset)}"
    (first, *_) = hsfmt.json("ls", dataset)["samples"]
    refused = hsfmt("cat", url, first["id"], "--snapshot", hsfmt.json("info", dataset)["snapshot"], code=3)
    assert f"{NAME} whole_objects=true" in refused.stderr
    whole = (NAME, "whole_objects=true")
    assert hsfmt.json("info", url, *whole)["samples"] == 8
    for words in (("ls", "--long"), ("card",), ("cat", "--index", "0")):
        command, *rest = words
        assert hsfmt(command, url, *rest, *whole).stdout == hsfmt(command, dataset, *rest).stdout
    assert hsfmt.json("cache", "warm", url, *whole)["samples"] == 8
    hsfmt("export", url, tmp_path / "out", "--to", "safetensors", *whole)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 8
    hsfmt("pull", url, tmp_path / "pulled", *whole)
    hsfmt("pull", url, tmp_path / "pulled again", "--source-option", "whole_objects=true")
    for copy in ("pulled", "pulled again"):
        report = hsfmt.json("verify", tmp_path / copy, "--level", "full")
        assert report["fingerprint"] == hsfmt.json("info", dataset)["snapshot"]
    assert "got whole_object\n" in hsfmt("info", url, NAME, "whole_object=true", code=2).stderr


def test_a_server_that_leads_elsewhere(hsfmt, dataset, serve, web_server):
    url = f"{web_server.url}/elsewhere/{serve(dataset)}"
    refused = hsfmt("info", url, code=3)
    assert f"{NAME} allow_redirects_to=localhost" in refused.stderr
    # The other one wants credentials, which are not sent to it.
    followed = hsfmt("info", url, NAME, "allow_redirects_to=localhost", code=3)
    assert "expected to be let in, got StatusError: HTTP 401" in followed.stderr


def test_what_the_environment_gives_a_driver_is_not_shown(dataset, serve, web_server, monkeypatch):
    monkeypatch.setitem(fsspec.config.conf, "http", {"headers": {"X-Api": "hidden-1 in a header"}})
    store = open_places([f"{web_server.url}/{serve(dataset)}"], {})[0]
    assert store.read("zarr.json", 1 << 20)
    assert store._place.redacted("got 'hidden-1 in a header' back") == "got '…' back"
    assert store.url.startswith(web_server.url)


# --- an S3 server that only the option names --------------------------------------------------------------------------


@pytest.fixture
def s3(s3_server, bucket, no_credentials, monkeypatch):
    """URL of an empty bucket, and the words that lead to its server."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    return f"s3://{bucket}", (NAME, f"endpoint_url={s3_server.endpoint}")


def test_a_dataset_in_s3_from_its_making_to_its_end(hsfmt, s3, vllm, tmp_path, monkeypatch):
    (root, there), url = s3, f"{s3[0]}/states"
    monkeypatch.setenv("HSFMT_CACHE_DIR", str(tmp_path / "cache"))
    made = hsfmt("convert", vllm, url, "--layer-ids", "2,4,5,8", "--no-seal", *there)
    assert "8 written" in made.stdout
    assert hsfmt.json("seal", url, "--expect", 8, *there)["url"] == url
    ids = [row["id"] for row in hsfmt.json("ls", url, *there)["samples"]]
    assert hsfmt.json("verify", url, "--level", "full", *there)["ok"]
    assert hsfmt.json("info", url, *there)["samples"] == 8
    assert hsfmt.json("cat", url, ids[3], *there)["id"] == ids[3]
    assert hsfmt.json("cache", "warm", url, *there)["samples"] == 8
    assert "datasets" in hsfmt("card", url, *there).stdout
    assert hsfmt.json("retract", url, ids[0], *there)["retracted_now"] == 1
    assert hsfmt.json("repair", url, *there)["changed"] is False
    assert "nothing to compact" in hsfmt("compact", url, *there).stdout
    assert hsfmt.json("gc", url, "--older-than", "1d", *there)["removed"] == []
    assert hsfmt.json("merge", f"{root}/merged", url, *there)["counts"]["samples"] == 7
    pushed = hsfmt.json("push", url, f"{root}/pushed", *there)
    assert pushed["server_copied_nbytes"] > 0
    hsfmt("pull", f"{root}/pushed", tmp_path / "pulled", *there)
    hsfmt("export", f"{root}/pushed", tmp_path / "out", "--to", "npz", *there)
    assert len(list((tmp_path / "out").glob("*.npz"))) == 7
    assert hsfmt.json("verify", tmp_path / "pulled")["ok"]
    documents = [hsfmt.json(*words, *there) for words in (("info", url), ("verify", url), ("seal", url))]
    assert there[1].partition("=")[2] not in json.dumps(documents)
    assert KEY not in json.dumps(documents)


@pytest.mark.slow
def test_processes_of_a_conversion_have_it(hsfmt, s3, vllm, tmp_path):
    root, there = s3
    for number in range(3):
        shutil.copytree(vllm, tmp_path / "dump" / str(number))
    report = hsfmt.json(
        "convert", tmp_path / "dump", f"{root}/states", "--from", "vllm", "--layer-ids", "2,4,5,8", "--workers", "2",
        *there,
    )  # fmt: skip
    assert (report["workers"], report["counts"]["sample"]) == (2, 24)
    assert hsfmt.json("verify", f"{root}/states", "--workers", "2", "--level", "full", *there)["ok"]


def test_a_server_that_the_option_does_not_name_rightly(hsfmt, s3):
    root, _ = s3
    result = hsfmt("info", f"{root}/states", NAME, "endpoint_url=http://127.0.0.1:9", code=3)
    assert "expected a server that can be reached" in result.stderr
    assert "endpoint_url" in result.stderr
    result = hsfmt("info", f"{root}/states", NAME, "whole_objects=true", code=2)
    assert "storage_options: expected options that the driver of s3:// knows" in result.stderr
    assert "'whole_objects'" in result.stderr
