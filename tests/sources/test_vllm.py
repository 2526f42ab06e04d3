"""Source `vllm`: locks, requests without states, prompts that must match."""

import fcntl
import json

import ml_dtypes
import numpy as np
import pytest

from hsfmt.errors import NotFoundError, SourceError
from hsfmt.readers.sources import (
    AbsentSampleError,
    SourceOptions,
    find_source,
    hole_reason,
    parse_key_map,
    settle_layers,
)

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


def output(path, request_id, prompt):
    return {
        "request_id": request_id,
        "prompt_token_ids": [int(token) for token in prompt],
        "kv_transfer_params": {"hidden_states_path": path},
    }


@pytest.fixture
def ranks(tmp_path, save_safetensors):
    """A folder of two ranks that both have a request 0, with other tokens."""
    for r in range(2):
        (tmp_path / f"rank{r}").mkdir()
        tensors = {"hidden_states": STATES * (r + 1), "token_ids": IDS + 100 * r}
        save_safetensors(tmp_path / f"rank{r}" / "req-0.safetensors", tensors)
    return tmp_path


def loaded(source):
    """Request id, first token and first state of each sample; None for one without a file."""
    found = {}
    for item in source.items:
        if item.paths:
            sample = source.load(item)
            values = int(sample.input_ids[0]), float(sample.hidden_states[0, 0, 0])
            found[item.sample_id] = (sample.metadata.get("request_id"), *values)
        else:
            assert item.problem is not None
            found[item.sample_id] = None
    return found


@pytest.mark.parametrize("paths", ["/dump/rank{}/req-0.safetensors", "/dump/req-0.safetensors", "req-0.safetensors"])
def test_ranks_with_documents_of_their_own(ranks, paths):
    """Equal names, and even equal paths, as two machines have them."""
    for r in range(2):
        entry = output(paths.format(r), f"id-{r}", IDS + 100 * r)
        (ranks / f"rank{r}" / "outputs.json").write_text(json.dumps([entry]))
    source = find_source(ranks)
    assert loaded(source) == {"rank0/req-0": ("id-0", 5, 1.0), "rank1/req-0": ("id-1", 105, 2.0)}
    assert source.notes == []


def test_ranks_with_equal_prompts_keep_their_request_ids(ranks):
    (ranks / "rank1" / "req-0.safetensors").write_bytes((ranks / "rank0" / "req-0.safetensors").read_bytes())
    for r in range(2):
        entry = output(f"/dump/rank{r}/req-0.safetensors", f"id-{r}", IDS)
        (ranks / f"rank{r}" / "outputs.json").write_text(json.dumps([entry]))
    assert loaded(find_source(ranks)) == {"rank0/req-0": ("id-0", 5, 1.0), "rank1/req-0": ("id-1", 5, 1.0)}


@pytest.mark.parametrize("document", ["outputs.json", "rank0/outputs.json", "meta/outputs.json"])
def test_one_document_of_both_ranks(ranks, document):
    entries = [output(f"/dump/rank{r}/req-{i}.safetensors", f"{r}-{i}", IDS + 100 * r) for r in (1, 0) for i in (0, 9)]
    (ranks / document).parent.mkdir(exist_ok=True)
    (ranks / document).write_text(json.dumps(entries))
    source = find_source(ranks)
    assert loaded(source) == {
        "rank0/req-0": ("0-0", 5, 1.0),
        "rank0/req-9": None,
        "rank1/req-0": ("1-0", 105, 2.0),
        "rank1/req-9": None,
    }
    assert source.notes == []


def test_a_request_of_another_rank_takes_no_file(ranks):
    """Rank 1's own file is lost; rank 0 has one of that name, which goes with rank 0's request."""
    (ranks / "rank1" / "req-0.safetensors").rename(ranks / "rank1" / "req-1.safetensors")
    for r in range(2):
        entries = [output(f"/dump/req-{i}.safetensors", f"{r}-{i}", IDS + 100 * r) for i in range(r + 1)]
        (ranks / f"rank{r}" / "outputs.json").write_text(json.dumps(entries))
    assert loaded(find_source(ranks)) == {
        "rank0/req-0": ("0-0", 5, 1.0),
        "rank1/req-0": None,
        "rank1/req-1": ("1-1", 105, 2.0),
    }


def test_requests_that_fit_several_files_are_not_used(ranks):
    (ranks / "outputs.json").write_text(json.dumps([output("/dump/req-0.safetensors", "a", [1, 2])]))
    source = find_source(ranks)
    assert loaded(source) == {"rank0/req-0": (None, 5, 1.0), "rank1/req-0": (None, 105, 2.0)}
    (note,) = source.notes
    assert note.startswith("1 request output fits several files")
    assert note.endswith("is not used: /dump/req-0.safetensors (outputs.json)")


def test_two_requests_of_one_file_are_not_used(folder):
    entries = [output("/x/req-0.safetensors", name, [5]) for name in ("a", "b")]
    (folder / "outputs.json").write_text(json.dumps(entries))
    source = find_source(folder)
    assert loaded(source) == {f"req-{i}": (None, 5 + i, 1.0) for i in range(3)}
    (note,) = source.notes
    assert note.startswith("2 request outputs fit several files, or a file that others fit as well, and are not used")


def test_a_request_told_twice(folder):
    for name in ("outputs.json", "all.json"):
        (folder / name).write_text(json.dumps([output("/x/req-0.safetensors", "a", [5])]))
    source = find_source(folder)
    assert loaded(source)["req-0"] == ("a", 5, 1.0)
    assert source.notes == []


def test_a_path_of_thousands_of_digits_is_a_name_like_others(folder):
    digits = "9" * 2000
    (folder / "o.json").write_text(json.dumps([output(f"/dump/{digits}.safetensors", "x", [1])]))
    assert loaded(find_source(folder)) == {digits: None} | {f"req-{i}": (None, 5 + i, 1.0) for i in range(3)}


@pytest.mark.parametrize(
    "entry",
    [
        output("/dump/" + "9" * 5000 + ".safetensors", "x", [1]),
        output("/dump/\ud800.safetensors", "x", [1]),
        output("/\ud800/req-0.safetensors", "x", [1]),
        output("/dump/req-0.safetensors", "\ud800", [1]),
        output("/dump/req-0.safetensors", ["\ud800"] * 2000, [1]),
    ],
    ids=["long path", "name", "folder", "request id", "long request id"],
)
def test_request_outputs_that_could_not_be_kept_are_ignored(folder, entry):
    entries = [entry, output("/dump/req-1.safetensors", "b", [6, 7])]
    (folder / "o.json").write_text(json.dumps(entries))
    source = find_source(folder)
    assert loaded(source) == {"req-0": (None, 5, 1.0), "req-1": ("b", 6, 1.0), "req-2": (None, 7, 1.0)}
    (note,) = source.notes
    assert note.startswith("o.json: 1 of 2 request outputs are ignored, which have paths or request ids that")


def test_a_document_of_nothing_but_such_outputs(folder, accounted_for):
    (folder / "o.json").write_text(json.dumps([output("/dump/\ud800.safetensors", "x", [1])]))
    source = find_source(folder)
    accounted_for(source)
    assert len(source.items) == 3
    assert len(source.notes) == 1


@pytest.mark.parametrize("path", ["/x/../../req-9.safetensors", "/x//req-9.safetensors", "/x/./req-9.safetensors"])
def test_paths_that_would_lead_elsewhere(folder, path):
    entries = [output("/x/req-0.safetensors", "a", [5]), output(path, "b", [5])]
    (folder / "outputs.json").write_text(json.dumps(entries))
    assert list(loaded(find_source(folder))) == ["req-0", "req-1", "req-2", "req-9"]


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


def test_strings_of_the_header_are_kept(tmp_path, save_safetensors):
    tensors = {"hidden_states": STATES, "token_ids": IDS}
    save_safetensors(tmp_path / "a.safetensors", tensors, entries={"__metadata__": {"prompt": "hello", "turn": "3"}})
    save_safetensors(tmp_path / "b.safetensors", tensors)
    source = find_source(tmp_path)
    assert source.name == "vllm"
    assert [source.load(item).metadata for item in source.items] == [{"prompt": "hello", "turn": "3"}, {}]
    options = SourceOptions(key_map=parse_key_map("ignore=turn"))
    source = find_source(tmp_path, "vllm", options=options)
    assert source.load(source.items[0]).metadata == {"prompt": "hello"}


@pytest.mark.parametrize(("said", "kept"), [("9", {}), ("8", {"__metadata__": {"request_id": "8"}})])
def test_strings_of_the_header_beside_the_outputs(tmp_path, save_safetensors, said, kept):
    path = tmp_path / "req.safetensors"
    strings = {"prompt": "hello", "request_id": said}
    tensors = {"hidden_states": STATES, "token_ids": IDS}
    save_safetensors(path, tensors, entries={"__metadata__": strings})
    outputs = [
        {
            "request_id": "9",
            "prompt_token_ids": IDS.tolist(),
            "kv_transfer_params": {"hidden_states_path": str(path)},
        }
    ]
    (tmp_path / "outputs.json").write_text(json.dumps(outputs))
    source = find_source(tmp_path)
    assert source.load(source.items[0]).metadata == {"prompt": "hello", "request_id": "9"} | kept
