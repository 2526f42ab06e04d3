"""`hsfmt card`: what a card says, and that nothing in a header can say anything else."""

import json
import re

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from hsfmt import DatasetWriter, seal
from hsfmt.cli.card_escapes import markdown, public_text, yaml_string
from hsfmt.cli.main import main
from hsfmt.readers.verification import verify

HOSTILE = [
    'x"\n---\nlicense: mit\nconfigs:\n- data_files: "http://evil/x"\n',
    "<script>alert(1)</script>",
    "[click](javascript:alert(1)) ![i](http://evil/p.png)",
    "a | b |\n\n# heading\n\n```python\nimport os\n```\n",
    "`code` **bold** www.evil.example http://evil.example",
    "\u2028\u2029\x85\x00\x1b[31m\ud7ff",
    "--- \n...\n% !!python/object/apply:os.system ['x']",
    "&lt;b&gt; &#x3c;img src=x&#x3e;",
    "${jinja} {{ x }} <!-- comment -->",
]


def run(*argv, code=0):
    result = CliRunner().invoke(main, [str(word) for word in argv])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def write(url, **settings):
    settings = {"layers": [0, 3, 7], "hidden_size": 8, "final_norm": "pre", "dtype": "float32"} | settings
    with DatasetWriter(url, **settings) as writer:
        for name in ("a", "b"):
            writer.write(name, np.arange(5), np.ones((5, 3, 8), np.float32))
        writer.hole("c", "the engine at /mnt/ann/engine on gpu-node-3 gave nothing")


def front_matter(card):
    """The settings, by another parser, and the text."""
    assert card.startswith("---\n")
    head, text = card[4:].split("\n---\n", 1)
    return yaml.safe_load(head), text


@pytest.fixture
def dataset(tmp_path):
    write(tmp_path / "d", model={"name": "Qwen/Qwen3-8B", "revision": "0a1b2c"})
    return tmp_path / "d"


def test_what_a_card_says(dataset):
    settings, text = front_matter(run("card", dataset))
    assert settings["pretty_name"] == "Hidden states of Qwen/Qwen3-8B"
    assert settings["size_categories"] == ["n<1K"]
    assert settings["viewer"] is False
    fingerprint = seal(dataset).snapshot.fingerprint
    for words in (
        "# Hidden states of Qwen\\/Qwen3\\-8B",
        "| 0 | embeddings | 0 |",
        "| 3 | output of decoder layer 2 | 1 |",
        "| 7 | output of decoder layer 6 | 2 |",
        "**before** the model's final norm",
        "float32",
        "| Samples | 2 |",
        "| Tokens | 10, of which ",
        "| Codec | ",
        "960 bytes raw",
        "1 sample could not be extracted",
        fingerprint,
        "HiddenStateDataset(",
        "hsfmt verify",
    ):
        assert words in text


def test_a_card_tells_nothing_of_who_made_it(tmp_path):
    write(tmp_path / "d", model="/mnt/ann/secret-project/checkpoints/step-400", tokenizer="http://ann:pw@host/tok")
    card = run("card", tmp_path / "d")
    for word in ("ann", "secret-project", "host", "gpu-node", str(tmp_path), "/mnt", "command", "pw@"):
        assert word not in card, word
    assert "step\\-400" in card


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_nothing_in_a_header_becomes_markup(tmp_path, text):
    plain = {"name": "m", "revision": "r"}
    write(tmp_path / "plain", model=plain, tokenizer=plain)
    write(tmp_path / "d", model={"name": text, "revision": text}, tokenizer={"name": text, "digest": text})
    card, other = run("card", tmp_path / "d"), run("card", tmp_path / "plain")
    settings, body = front_matter(card)
    assert settings.keys() == front_matter(other)[0].keys()
    assert {**settings, "pretty_name": 0} == {**front_matter(other)[0], "pretty_name": 0}
    assert len(card.splitlines()) == len(other.splitlines())
    assert not re.search(r"<(script|img|b|!--)|\]\(javascript|https?://evil|www\.evil", body)
    for line, wanted in zip(body.split("\n"), front_matter(other)[1].split("\n"), strict=True):
        assert len(re.findall(r"(?<!\\)\|", line)) == len(re.findall(r"(?<!\\)\|", wanted))
        assert len(re.findall(r"(?<!\\)`", line)) == len(re.findall(r"(?<!\\)`", wanted))


@pytest.mark.parametrize("text", [*HOSTILE, "", "\U0001f600 naïve", "\ud800", "\\", '"', "'", "a: b # c", "- x"])
def test_yaml_strings_are_read_back(text):
    encoded = yaml_string(text)
    assert "\n" not in encoded
    if not re.search("[\ud800-\udfff]", text):  # which no text of a header holds
        assert yaml.safe_load(f"k: {encoded}\nl: 1") == {"k": text, "l": 1}


def test_markdown_escapes_all_punctuation():
    for code in range(33, 127):
        if not chr(code).isalnum():
            assert markdown(chr(code)) in {f"\\{chr(code)}", "&amp;", "&lt;", "&gt;"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("gpt2", "gpt2"),
        ("llama3:8b", "llama3:8b"),
        ("sha256:" + "0" * 64, "sha256:" + "0" * 64),
        ("/cache/huggingface/hub/models--org--name/snapshots/abc", "org/name"),
        ("C:\\Users\\ann\\models\\big-model", "big-model"),
        ("~/models/x/y/z", "z"),
        ("models/ann/work/final", "final"),
    ],
)
def test_names_that_can_be_shown(text, shown):
    assert public_text(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "/mnt/ann", "~ann/model", "./ann/model", "\\\\server\\share", "https://host/x", "s3://bucket/key", "ann@host",
        "gpu-7:8080/model", "10.0.0.5/model", "AKIAIOSFODNN7EXAMPLE", "sk-abcdefghijklmnopqrstuv", "a/b/c",
    ],
)  # fmt: skip
def test_names_that_are_not_shown(text):
    shown = public_text(text)
    assert "not shown" in shown
    assert text not in shown


def test_tokens_are_hidden():
    assert "hf_" + "A" * 30 not in public_text("model-hf_" + "A" * 30 + " hf_" + "A" * 30)


def test_output_and_options(dataset, tmp_path):
    card = run("card", dataset)
    assert "bytes" in run("card", dataset, "--output", dataset / "README.md")
    assert (dataset / "README.md").read_text() == card
    assert verify(str(dataset), level="full").ok, "a card is no stray file"
    (dataset / "README.md").write_text("mine")
    run("card", dataset, "--output", dataset / "README.md", code=2)
    assert (dataset / "README.md").read_text() == "mine"
    run("card", dataset, "--output", dataset / "README.md", "--force")
    assert (dataset / "README.md").read_text() == card
    document = json.loads(run("card", dataset, "--json"))
    assert document["card"] == card
    first = document["fingerprint"]
    seal(dataset, retract=["a"])
    assert run("card", dataset, "--snapshot", first) == card
    assert "1 sample, not served" in run("card", dataset)
    run("card", dataset, "--snapshot", "live", code=2)
    run("card", tmp_path / "none", code=3)


def test_a_dataset_that_was_never_sealed_has_no_card(tmp_path):
    write(tmp_path / "d", seal=False)
    run("card", tmp_path / "d", code=3)
