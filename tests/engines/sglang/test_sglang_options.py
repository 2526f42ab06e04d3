"""Options, and which servers are refused."""

import dataclasses
import functools
from types import SimpleNamespace

import pytest

from hsfmt.errors import UsageError
from hsfmt.writers import sglang
from hsfmt.writers.sglang.meaning import Meaning, resolved_layers
from hsfmt.writers.sglang.options import _RULES, CaptureOptions, read_options
from hsfmt.writers.sglang.self_check import check_applied, check_server, check_targets, check_version

GOOD = {"enable_return_aux_hidden_states": True, "speculative_algorithm": None, "pp_size": 1}


def test_every_option_has_a_rule_and_is_documented(repo_root):
    names = {option.name for option in dataclasses.fields(CaptureOptions)}
    assert set(_RULES) == names
    assert CaptureOptions.__doc__
    manual = (repo_root / "docs" / "sglang.md").read_text()
    for name in names:
        assert name in CaptureOptions.__doc__
        assert f"HSFMT_SGLANG_{name.upper()}`" in manual


def test_options_from_the_environment():
    options = read_options({
        "HSFMT_SGLANG_OUT": "s3://bucket/states", "HSFMT_SGLANG_QUEUE_NBYTES": "1.5GiB", "HSFMT_SGLANG_FINAL": "0",
        "HSFMT_SGLANG_BLOCK_SECONDS": "0", "HSFMT_SGLANG_STORAGE_OPTIONS": '{"anon": true}',
        "HSFMT_SGLANG_THREADS": "3", "OTHER": "x",
    })  # fmt: skip
    assert options == CaptureOptions(
        out="s3://bucket/states", queue_nbytes=3 << 29, final=False, block_seconds=0.0, storage_options={"anon": True},
        threads=3,
    )  # fmt: skip


def test_the_environment_beats_the_file(tmp_path):
    path = tmp_path / "capture.toml"
    lines = [
        'out = "a"',
        'queue_nbytes = "1MiB"',
        "final = false",
        "part_seconds = 5",
        "storage_options = {anon = true}",
    ]
    path.write_text("\n".join(lines))
    options = read_options({"HSFMT_SGLANG_CONFIG": str(path), "HSFMT_SGLANG_OUT": "b"})
    assert options == CaptureOptions(
        out="b", queue_nbytes=1 << 20, final=False, part_seconds=5, storage_options={"anon": True}
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("OUT", ""), ("CAPTURE", "some"), ("FINAL", "yes"), ("QUEUE_NBYTES", "8GB"), ("QUEUE_NBYTES", "0"),
     ("QUEUE_NBYTES", "-1"), ("BLOCK_SECONDS", "61"), ("BLOCK_SECONDS", "-1"), ("BLOCK_SECONDS", "nan"),
     ("FLUSH_SECONDS", "300"), ("FLUSH_SECONDS", "0"), ("PART_SECONDS", "inf"), ("CODEC", "lz4"), ("THREADS", "-1"),
     ("THREADS", "two"), ("STORAGE_OPTIONS", "[]"), ("STORAGE_OPTIONS", "{"), ("NO_SUCH", "1")],
)  # fmt: skip
def test_what_can_not_be_is_refused_by_name(name, value):
    with pytest.raises(UsageError, match=f"HSFMT_SGLANG_{name}"):
        read_options({"HSFMT_SGLANG_OUT": "x", f"HSFMT_SGLANG_{name}": value})


def test_all_problems_at_once():
    with pytest.raises(UsageError) as caught:
        read_options({"HSFMT_SGLANG_CODEC": "x", "HSFMT_SGLANG_FINAL": "x"})
    assert [problem.where for problem in caught.value.problems] == [
        "HSFMT_SGLANG_CODEC", "HSFMT_SGLANG_FINAL", "HSFMT_SGLANG_OUT"
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["out = ", None])
def test_a_file_that_can_not_be_read(tmp_path, text):
    path = tmp_path / "capture.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=r"capture\.toml: expected a TOML file"):
        read_options({"HSFMT_SGLANG_CONFIG": str(path)})


def test_nothing_happens_unless_it_is_switched_on(monkeypatch):
    for name in sglang.SWITCHES:
        monkeypatch.delenv(name, raising=False)
    assert sglang.register() is None


def test_a_plugin_that_can_not_work_ends_the_process(monkeypatch):
    """SGLang would log an exception and serve on."""
    monkeypatch.setenv("HSFMT_SGLANG_OUT", "x")
    monkeypatch.setenv("HSFMT_SGLANG_CODEC", "lz4")
    with pytest.raises(SystemExit, match="hidden states can't be captured: HSFMT_SGLANG_CODEC: expected zstd or none"):
        sglang.register()


@pytest.mark.parametrize("version", ["0.5.17", "0.4.9.post2", "0.5.22", "0.5.5.post3"])
def test_older_engines_are_refused(version):
    with pytest.raises(UsageError, match=r"expected 0\.5\.23 or newer, got"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.6.0", "1.0.0rc1", "0.0.0.dev0", "unknown"])
def test_newer_engines_and_builds_from_source_are_tried(version):
    check_version(version)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"enable_return_aux_hidden_states": False}, "--enable-return-aux-hidden-states"),
        ({"enable_return_aux_hidden_states": False, "speculative_algorithm": "EAGLE3"}, "no speculative decoding"),
        ({"pp_size": 2}, "pp_size"),
        ({"enable_two_batch_overlap": True}, "enable_two_batch_overlap"),
        ({"enable_pdmux": True}, "enable_pdmux"),
        ({"dllm_algorithm": "LowConfidence"}, "dllm_algorithm"),
        ({"enable_decoder_swa_bounded_replay": True}, "enable_decoder_swa_bounded_replay"),
        ({"enable_encoder_swa_bounded_replay": True}, "enable_encoder_swa_bounded_replay"),
        ({"disaggregation_mode": "decode"}, "disaggregation_mode"),
    ],
)
def test_servers_that_can_not_be_captured_from(changes, said):
    check_server(GOOD, is_generation=True)
    with pytest.raises(UsageError, match=said):
        check_server({**GOOD, **changes}, is_generation=True)


def test_an_embedding_model_is_refused():
    with pytest.raises(UsageError, match="embedding"):
        check_server(GOOD, is_generation=False)


def test_targets_that_are_gone_or_changed_are_named():
    check_targets({"hsfmt.writers.sglang.self_check.check_version": ("version",)})
    with pytest.raises(UsageError) as caught:
        check_targets({
            "hsfmt.writers.sglang.self_check.check_version": ("batch",), "hsfmt.no_such.thing": (),
            "hsfmt.writers.sglang.self_check.nothing": (),
        })  # fmt: skip
    assert len(caught.value.problems) == 3
    assert "none named batch" in str(caught.value)


def test_hooks_that_were_not_applied_are_named(monkeypatch):
    target = "hsfmt.writers.sglang.self_check.check_version"
    with pytest.raises(UsageError, match="expected a hook"):
        check_applied({target: ()})
    monkeypatch.setattr(target, functools.wraps(check_version)(lambda version: version))
    check_applied({target: ()})


def model(layers, place="model"):
    made = found = SimpleNamespace()
    for name in filter(None, place.split(".")):
        setattr(found, name, SimpleNamespace())
        found = getattr(found, name)
    found.layers_to_capture = layers
    return made


@pytest.mark.parametrize("place", ["model", "language_model.model", "language_model", ""])
def test_layers_are_read_where_the_model_keeps_them(place):
    assert resolved_layers(model([60, 4, 32], place), 61) == (4, 32, 60)
    assert resolved_layers(model({4, 0}, place), 61) == (0, 4)


@pytest.mark.parametrize("layers", [[], None, ["4"], [4, 4], [61], [-1], 4])
def test_layers_that_can_not_be_are_refused(layers):
    with pytest.raises(UsageError, match="layers_to_capture"):
        resolved_layers(model(layers), 61)


def test_the_final_state_is_the_last_layer():
    meaning = Meaning((3, 31, 59), 61, 7168, "bfloat16", final=True)
    assert (meaning.layers, meaning.final_norm) == ((3, 31, 59, 61), "post")
    assert meaning.row_nbytes == 57_344
    assert dataclasses.replace(meaning, final=False).row_nbytes == 43_008


@pytest.mark.parametrize(
    ("aux", "final", "dtype", "said"),
    [
        ((9, 12), (9, 4), "bfloat16", ""),
        ((12, 12), (12, 4), "bfloat16", ""),
        ((8, 12), (8, 4), "bfloat16", "auxiliary"),
        ((9, 8), (9, 4), "bfloat16", "auxiliary"),
        ((9,), (9, 4), "bfloat16", "auxiliary"),
        ((9, 12), None, "bfloat16", "no final"),
        ((9, 12), (9, 8), "bfloat16", "final"),
        ((9, 12), (9, 4), "float32", "expected bfloat16"),
    ],
)
def test_tensors_that_are_not_what_was_resolved(aux, final, dtype, said):
    problem = Meaning((1, 2, 3), 8, 4, "bfloat16", final=True).check_rows(aux, final, dtype, 9)
    assert bool(problem) == bool(said)
    assert said in problem
