"""What the user may say: key maps and model configs."""

import json

import pytest

from hsfmt.errors import NotFoundError, UsageError
from hsfmt.readers.sources import KeyMap, SourceOptions, parse_key_map


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", KeyMap()),
        ("hidden_states=h", KeyMap(hidden_states="h")),
        (" aux = a , last=b ,", KeyMap(aux="a", last="b")),
        ("input_ids=i,loss_mask=m,ignore=x,ignore=y", KeyMap(input_ids="i", loss_mask="m", ignore=("x", "y"))),
        ("last=a,last=a", KeyMap(last="a")),
    ],
)
def test_key_maps(text, expected):
    assert parse_key_map(text) == expected
    assert bool(parse_key_map(text)) == (expected != KeyMap())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hidden_states", "ROLE=KEY"),
        ("=x", "ROLE=KEY"),
        ("aux=", "ROLE=KEY"),
        ("states=x", "roles input_ids, hidden_states"),
        ("last=a,last=b", "one key for last"),
        ("hidden_states=a,aux=b", "alone"),
        ("hidden_states=a,last=b", "map the final state as last=KEY"),
    ],
)
def test_key_maps_that_are_none(text, words):
    with pytest.raises(UsageError, match=words):
        parse_key_map(text)


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 61, "hidden_size": 8},
        {"text_config": {"num_hidden_layers": 61, "hidden_size": 8}},
        {"hidden_size": 99, "num_hidden_layers": 9, "text_config": {"num_hidden_layers": 61, "hidden_size": 8}},
        {"hidden_size": 8, "text_config": {"num_hidden_layers": 61}},
    ],
)
def test_model_layers(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        options = SourceOptions(model_config=str(path))
        assert (options.model_layers(), options.state_width()) == (61, 8)
        assert SourceOptions(model_config=str(path), hidden_size=4).state_width() == 4
    assert SourceOptions().state_width() is None
    assert SourceOptions().model_layers() is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"num_hidden_layers": 3}',
        '{"hidden_size": 3}',
        '{"num_hidden_layers": true}',
        '{"num_hidden_layers": -1}',
        '{"text_config": 3}',
        "[" * 99999,
    ],
)
def test_configs_that_do_not_say(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=r"config\.json"):
        SourceOptions(model_config=str(tmp_path)).model_layers()


def test_no_config(tmp_path):
    with pytest.raises(NotFoundError, match=r"--model-config .*config\.json: expected .* got No such file"):
        SourceOptions(model_config=str(tmp_path)).model_layers()
