"""Source `vllm`: locks, requests without states, prompts that must match."""

import fcntl
import json

import ml_dtypes
import numpy as np
import pytest

from hsfmt.errors import NotFoundError, SourceError
from hsfmt.readers.sources import AbsentSampleError, SourceOptions, find_source, hole_reason, settle_layers

STATES = np.ones((3, 2, 4), dtype=ml_dtypes.bfloat16)
IDS = np.array([5, 6, 7])


@pytest.fixture
def folder(tmp_path, save_safetensors):
    """A folder of three requests."""
    for i in range(3):
        save_safetensors(tmp_path / f"req-{i}.safetensors", {"hidden_states": STATES, "token_ids": IDS + i})
    return tmp_path


def test_requests_without_states_are_holes_with_reasons(data_dir, refused, accounted_for):
    source = find_source(data_dir / "vllm" / "vllm032_inprocess_missing_last_batch")
    accounted_for(source)
    reasons = {}
    for item in source.items:
        if item.problem is None:
            source.load(item)
        else:
            error = refused(source, item.key)
            assert not isinstance(error, AbsentSampleError)
            reasons[item.sample_id] = hole_reason(error)
    assert list(reasons) == ["4-8fbe1c60", "5-8281943a", "6-adfd1b2b", "7-87893125"]
    assert set(reasons.values()) == {
        "expected the states of this request, got only its .lock: the request was aborted or the write never happened"
    }


def test_request_ids_and_companions(data_dir):
    source = find_source(data_dir / "vllm" / "vllm032_bf16_prompt")
    assert [source.load(item).metadata for item in source.items] == [{"request_id": str(i)} for i in range(8)]
    assert source.items[0].paths == ("0-8d971ed6.safetensors", "0-8d971ed6.safetensors.lock")
    assert source.items[0].sample_id == "0-8d971ed6"


def test_the_user_must_say_the_layers(folder):
    source = find_source(folder)
    meaning = source.meaning()
    with pytest.raises(ValueError, match="eagle_aux_hidden_state_layer_ids of the vLLM command line"):
        settle_layers(meaning, None)
    assert settle_layers(meaning, [2, 8]) == (2, 8)


def test_the_users_word_is_held_to_the_files(folder, tmp_path):
    config = tmp_path / ".config.json"
    config.write_text('{"num_hidden_layers": 8, "hidden_size": 4}')
    meaning = find_source(folder, options=SourceOptions(hidden_size=4, model_config=str(config))).meaning()
    assert settle_layers(meaning, [2, 8]) == (2, 8)
    with pytest.raises(ValueError, match=r"ids up to 8, .*got 2,9"):
        settle_layers(meaning, [2, 9])
    with pytest.raises(ValueError, match=r"--hidden-size: expected 4, .*got 8"):
        find_source(folder, options=SourceOptions(hidden_size=8)).meaning()
    config.write_text('{"num_hidden_layers": 8, "hidden_size": 8}')
    with pytest.raises(ValueError, match=r"\[hidden_size\]: expected 4, .*got 8"):
        find_source(folder, options=SourceOptions(model_config=str(config))).meaning()
    with pytest.raises(NotFoundError, match="--model-config nowhere"):
        find_source(folder, options=SourceOptions(model_config="nowhere")).meaning()


def test_a_request_named_by_the_outputs_alone(folder):
    entries = [
        {
            "request_id": "9",
            "prompt_token_ids": [1],
            "kv_transfer_params": {"hidden_states_path": "/x/req-9.safetensors"},
        }
    ]
    (folder / "outputs.json").write_text(json.dumps(entries))
    source = find_source(folder)
    assert [item.sample_id for item in source.items] == ["req-0", "req-1", "req-2", "req-9"]
    assert source.items[3].paths == ()
    with pytest.raises(SourceError, match="no file, though the request outputs name it"):
        source.load(source.items[3])


@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize(
    ("prompt", "good"),
    [([5, 6, 7], True), ([5, 6], True), ([5, 7], False), ([5, 6, 7, 8], False), ([6, 6, 7], False)],
    ids=["equal", "prompt of a longer file", "other", "longer", "first differs"],
)
def test_prompts_must_match(folder, prompt, good, lines):
    entry = {
        "request_id": "a",
        "prompt_token_ids": prompt,
        "kv_transfer_params": {"hidden_states_path": "/x/req-0.safetensors"},
    }
    if lines:
        (folder / "outputs.jsonl").write_text(json.dumps(entry) + "\n")
    else:
        (folder / "outputs.json").write_text(json.dumps([entry]))
    source = find_source(folder)
    assert [file.role for file in source.support] == ["request outputs"]
    if good:
        assert source.load(source.items[0]).metadata == {"request_id": "a"}
    else:
        with pytest.raises(SourceError, match="prompt tokens of request 'a'"):
            source.load(source.items[0])


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "[{}]", '[{"kv_transfer_params": {"hidden_states_path": 1}}]', '{"a": 1}', "[" * 99999]
)
def test_other_json_is_a_stray(folder, text):
    (folder / "notes.json").write_text(text)
    source = find_source(folder)
    assert [stray.path for stray in source.strays] == ["notes.json"]
    assert len(source.items) == 3


def test_a_file_that_vllm_still_writes(folder):
    lock = folder / "req-1.safetensors.lock"
    lock.touch()
    source = find_source(folder)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(SourceError, match="still holds locked"):
            source.load(source.items[1])
    source.load(source.items[1])


def test_subfolders_and_natural_order(folder, save_safetensors, accounted_for):
    (folder / "b").mkdir()
    for name in ("b/req-10", "b/req-9"):
        save_safetensors(folder / f"{name}.safetensors", {"hidden_states": STATES, "token_ids": IDS})
    (folder / "b" / ".req-1.safetensors").touch()
    source = find_source(folder)
    accounted_for(source)
    assert [item.sample_id for item in source.items] == ["b/req-9", "b/req-10", "req-0", "req-1", "req-2"]
    assert [stray.path for stray in source.strays] == ["b/.req-1.safetensors"]


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"hidden_states": STATES, "token_ids": IDS[:2]}, "states of 3 tokens"),
        ({"hidden_states": STATES, "token_ids": IDS[:2]}, r"this looks like \[layer, token, hidden\]"),
        ({"hidden_states": STATES, "token_ids": IDS[:1]}, "prefix caching"),
        ({"hidden_states": STATES, "token_ids": IDS.astype(np.float32)}, "integer token ids"),
        ({"hidden_states": STATES, "token_ids": IDS[None]}, r"shape \[1, 3\]"),
        ({"hidden_states": STATES[0], "token_ids": IDS}, r"shape \[2, 4\]"),
        ({"hidden_states": STATES.astype(np.float64), "token_ids": IDS}, "float64"),
        ({"hidden_states": STATES.astype(np.float16), "token_ids": IDS}, "bfloat16 states as in"),
        ({"hidden_states": STATES[:, :1], "token_ids": IDS}, "got 1 layers"),
        ({"hidden_states": STATES[:, :, :2], "token_ids": IDS}, "got hidden size 2"),
        ({"hidden_states": STATES[:0], "token_ids": IDS[:0]}, "at least one token"),
        ({"hidden_states": STATES}, "got hidden_states"),
        ({"hidden_states": STATES, "token_ids": IDS, "x": IDS}, "got hidden_states, token_ids, x"),
        ({"hidden_states": STATES, "token_ids": IDS, "hidden_states_scales": IDS}, "float8_e4m3fn beside its scales"),
    ],
)
def test_files_that_are_not_like_the_others(folder, save_safetensors, refused, tensors, words):
    save_safetensors(folder / "req-1.safetensors", tensors)
    source = find_source(folder)
    assert source.meaning().n_layers == 2
    with pytest.raises(SourceError, match=words):
        source.load(source.items[1])
    refused(source, "req-1.safetensors")
    for i in (0, 2):
        assert source.load(source.items[i]).input_ids.tolist() == [5 + i, 6 + i, 7 + i]


def test_several_differences_at_once(folder, save_safetensors, refused):
    save_safetensors(
        folder / "req-1.safetensors", {"hidden_states": STATES[:, :1, :2].astype(np.float32), "token_ids": IDS}
    )
    error = refused(find_source(folder), "req-1.safetensors")
    assert [problem.got for problem in error.problems] == ["1 layers", "hidden size 2", "float32 states"]


def test_an_empty_file_names_itself(folder, refused):
    (folder / "req-0.safetensors").write_bytes(b"")
    source = find_source(folder)
    assert "empty file" in str(refused(source, "req-0.safetensors"))
    assert source.meaning().hidden_size == 4


def test_all_files_damaged(folder):
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SourceError) as info:
        find_source(folder)
    assert len(info.value.problems) == 3
    source = find_source(folder, "vllm")
    with pytest.raises(SourceError) as info:
        source.meaning()
    assert [problem.where for problem in info.value.problems] == [f"req-{i}.safetensors" for i in range(3)]


def test_a_named_source_without_its_files(tmp_path):
    (tmp_path / "x.txt").touch()
    with pytest.raises(NotFoundError, match="the source 'vllm' reads"):
        find_source(tmp_path, "vllm")
