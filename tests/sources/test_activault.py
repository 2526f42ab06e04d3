"""Source `activault`: a batch of rows a file, hooks joined by group. The files imitate what its HookUploader saves."""

import json
import pickle

import pytest
import torch

from hsfmt.errors import SourceError, UsageError
from hsfmt.readers.sources import SourceOptions, find_source, parse_key_map, settle_final_norm, settle_layers
from hsfmt.readers.sources.activault import ActivaultSource
from hsfmt.readers.sources.listing import list_folder
from hsfmt.readers.sources.look import Look

B, S, D = 3, 5, 8
HOOKS = ("blocks.6.hook_resid_post", "blocks.12.hook_resid_post")
GROUPS = ("0b1e", "9c2f")


def ids_of(group):
    return torch.arange(B * S).reshape(B, S) + 100 * GROUPS.index(group)


def states_of(hook, group, dtype=torch.bfloat16):
    numbers = torch.arange(B * S * D).reshape(B, S, D) / 7
    return (numbers + 1000 * HOOKS.index(hook) + 100 * GROUPS.index(group)).to(dtype)


def record(hook, group, **changes):
    states, ids = states_of(hook, group), ids_of(group)
    return {"states": states, "input_ids": ids, "tensor_bytes": states.nbytes + ids.nbytes} | changes


@pytest.fixture
def store(tmp_path):
    """Write a run as activault does; `change` edits the records."""

    def write(change=lambda hook, group, value: value, *, run="run", options=""):
        for hook in HOOKS:
            folder = tmp_path / run / hook
            folder.mkdir(parents=True)
            for attempt, group in enumerate(GROUPS, 1):
                torch.save(change(hook, group, record(hook, group)), folder / f"{group}--{attempt}_0.saved.pt")
            document = {"batch_size": B, "sequence_length": S, "dtype": "torch.bfloat16", "d_in": D, "shape": [B, S, D]}
            (folder / "metadata.json").write_text(json.dumps(document))
            (folder / "statistics.json").write_text(json.dumps({"mean": [0.0] * D}))
        (tmp_path / run / "cfg.json").write_text("{}")
        return opened(tmp_path, options)

    return write


def opened(root, options=""):
    return find_source(root, "activault", options=SourceOptions(key_map=parse_key_map(options)))


def check(source, hooks=HOOKS):
    for item in source.items:
        group, row = item.sample_id.split("/")[-2:]
        sample = source.load(item)
        wanted = torch.stack([states_of(hook, group)[int(row)] for hook in hooks], dim=1)
        assert sample.hidden_states.shape == (S, len(hooks), D)
        assert sample.hidden_states.tobytes() == wanted.contiguous().view(torch.int16).numpy().tobytes()
        assert sample.input_ids.tolist() == ids_of(group)[int(row)].tolist()


def test_rows_become_samples_and_hooks_layers(store):
    source = store()
    assert [item.sample_id for item in source.items] == [f"run/{group}/{row}" for group in GROUPS for row in range(B)]
    assert source.meaning().layers == (7, 13)
    check(source)
    check(pickle.loads(pickle.dumps(source)))
    roles = {support.path: support.role for support in source.support}
    files = {path.relative_to(source.root).as_posix() for path in source.root.rglob("*") if path.is_file()}
    assert set(roles) == files
    assert {roles[path] for item in source.items for path in item.shared} == {"container"}
    assert sum(item.nbytes for item in source.items) == sum(
        (source.root / path).stat().st_size for path, role in roles.items() if role == "container"
    )


def test_the_final_norm_is_demanded(store):
    meaning = store().meaning()
    with pytest.raises(UsageError, match="cuts the model after its deepest hook"):
        settle_final_norm(meaning, None)
    assert settle_final_norm(meaning, "post") == "post"


def test_the_folder_of_one_hook(store, tmp_path):
    store()
    source = opened(tmp_path / "run" / HOOKS[1])
    assert source.meaning().layers == (13,)
    assert source.items[0].sample_id == "0b1e/0"
    check(source, HOOKS[1:])


def test_a_hook_is_left_out(store):
    source = store(options=f"ignore={HOOKS[1]}")
    check(source, HOOKS[:1])
    assert [stray.reason for stray in source.strays] == ["of a hook that is left out"] * 2
    with pytest.raises(UsageError, match="ignore=HOOK alone"):
        store(run="other", options="hidden_states=states")


def test_hooks_that_say_no_layer(store, tmp_path):
    store()
    # activault stores the output of the layer under this name too.
    (tmp_path / "run" / HOOKS[0]).rename(tmp_path / "run" / "blocks.6.hook_resid_pre")
    meaning = opened(tmp_path).meaning()
    with pytest.raises(UsageError, match=r"blocks\.6\.hook_resid_pre, blocks\.12\.hook_resid_post, in this order"):
        settle_layers(meaning, None)


def test_other_token_ids_in_a_group(store):
    def change(hook, group, value):
        return value | {"input_ids": value["input_ids"] + 1} if (hook, group) == (HOOKS[1], GROUPS[1]) else value

    source = store(change)
    source.load(source.items[0])
    with pytest.raises(SourceError, match=r"blocks\.12.*9c2f.*expected the token ids of .*got others"):
        source.load(source.items[B])


def test_files_that_are_missing_or_there_twice(store, tmp_path):
    store()
    folder = tmp_path / "run" / HOOKS[1]
    (folder / "9c2f--2_0.saved.pt").rename(folder / "0b1e--3_0.saved.pt")
    source = opened(tmp_path)
    assert len(source.items) == 2
    with pytest.raises(SourceError, match=r"one file of this group for blocks\.12.*0b1e--1_0\.saved\.pt too"):
        source.load(source.items[0])
    with pytest.raises(SourceError, match=r"a file of this group for blocks\.12\.hook_resid_post too, got none"):
        source.load(source.items[1])


def test_a_hook_whose_files_are_gone(store, tmp_path):
    """Its folder has its metadata: the other hook alone is not what the run stored."""
    store()
    for path in (tmp_path / "run" / HOOKS[0]).glob("*.pt"):
        path.unlink()
    with pytest.raises(SourceError, match=r"a file of this group for blocks\.6\.hook_resid_post too, got none"):
        opened(tmp_path).meaning()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (states_of(HOOKS[0], GROUPS[0]), "samples need token ids"),
        (record(HOOKS[0], GROUPS[0], logits=torch.zeros(3)), "the keys input_ids, logits, states"),
        ({"states": states_of(HOOKS[0], GROUPS[0])}, "the keys states"),
        (record(HOOKS[0], GROUPS[0], input_ids=ids_of(GROUPS[0])[:2]), r"states \[3, 5, 8\] and input_ids \[2, 5\]"),
        (record(HOOKS[0], GROUPS[0], input_ids=ids_of(GROUPS[0]).float()), "integer token ids"),
        (record(HOOKS[0], GROUPS[0], states=states_of(HOOKS[0], GROUPS[0])[0]), r"states \[5, 8\]"),
        (record(HOOKS[0], GROUPS[0], states=states_of(HOOKS[0], GROUPS[0]).double()), "bfloat16, float16 or float32"),
        (record(HOOKS[0], GROUPS[0], states="text"), "expected a tensor"),
        (record(HOOKS[0], GROUPS[0], states=torch.zeros(1, 1, 1).expand(1 << 20, 1 << 12, 1 << 8)), "an expanded view"),
        ([1, 2], "a list"),
    ],
)
def test_files_of_other_things(store, value, words):
    source = store(lambda *_: value)
    with pytest.raises(SourceError, match=words) as info:
        source.load(source.items[0])
    assert all(problem.where.startswith(f"run/{HOOKS[0]}/0b1e") for problem in info.value.problems[:1])


@pytest.mark.parametrize("data", [b"", b"<html></html>", b"PK\x03\x04 cut", bytes(100)])
def test_files_that_are_none(store, tmp_path, data):
    store()
    (tmp_path / "run" / HOOKS[0] / "9c2f--2_0.saved.pt").write_bytes(data)
    source = opened(tmp_path)
    source.load(source.items[0])
    with pytest.raises(SourceError, match=r"9c2f--2_0\.saved\.pt"):
        source.load(source.items[B])


def test_a_flipped_bit_in_any_row(store, tmp_path):
    store()
    path = tmp_path / "run" / HOOKS[0] / "0b1e--1_0.saved.pt"
    data = bytearray(path.read_bytes())
    data[data.index(states_of(HOOKS[0], GROUPS[0])[2].contiguous().view(torch.uint8).numpy().tobytes()) + 3] ^= 1
    path.write_bytes(data)
    source = opened(tmp_path)
    for item in source.items[:B]:
        with pytest.raises(SourceError, match="CRC-32"):
            source.load(item)


def test_a_file_that_changes_between_rows(store, tmp_path):
    """It was checked once; whatever is there now is checked anew."""
    source = store()
    source.load(source.items[0])
    path = tmp_path / "run" / HOOKS[0] / "0b1e--1_0.saved.pt"
    data = path.read_bytes()
    path.write_bytes(data[:-200])
    with pytest.raises(SourceError, match="truncated"):
        source.load(source.items[1])
    path.write_bytes(data)
    check(source)


def test_claims(store, tmp_path):
    store()
    assert ActivaultSource.claim(Look(list_folder(tmp_path))).certain


@pytest.mark.parametrize(
    ("value", "certain"),
    [
        (record(HOOKS[0], GROUPS[0], logits=1), False),
        ({"states": states_of(HOOKS[0], GROUPS[0]), "input_ids": ids_of(GROUPS[0])[:2]}, None),
        ({"hidden_states": states_of(HOOKS[0], GROUPS[0]), "input_ids": ids_of(GROUPS[0])}, None),
    ],
)
def test_other_dicts_are_not_claimed(tmp_path, value, certain):
    torch.save(value, tmp_path / "x.pt")
    claim = ActivaultSource.claim(Look(list_folder(tmp_path)))
    assert (claim and claim.certain) is certain


def with_rows(value, n_rows):
    ids = torch.cat([value["input_ids"]] * 2)[:n_rows]
    return value | {"states": torch.cat([value["states"]] * 2)[:n_rows], "input_ids": ids}


@pytest.mark.parametrize(("hook", "n_rows"), [(HOOKS[0], 2), (HOOKS[1], 2), (HOOKS[0], 5), (HOOKS[1], 5)])
def test_hooks_with_other_numbers_of_rows(store, hook, n_rows):
    """The rows of the group are all refused, none is dropped, whichever hook has more."""
    source = store(lambda h, g, value: with_rows(value, n_rows) if (h, g) == (hook, GROUPS[1]) else value)
    count = {GROUPS[0]: B, GROUPS[1]: max(B, n_rows)}
    assert [item.sample_id for item in source.items] == [f"run/{g}/{i}" for g in GROUPS for i in range(count[g])]
    for item in source.items[B:]:
        with pytest.raises(SourceError, match="as many rows in the file of each hook") as info:
            source.load(item)
        (problem,) = info.value.problems
        rows = {h: n_rows if h == hook else B for h in HOOKS}
        assert problem.got == ", ".join(f"{rows[h]} in run/{h}/{GROUPS[1]}--2_0.saved.pt" for h in HOOKS)
    assert source.load(source.items[0]).hidden_states.shape == (S, 2, D)


@pytest.mark.parametrize("n_rows", [2, 5])
@pytest.mark.parametrize("hook", HOOKS)
def test_another_number_of_rows_than_listed(store, tmp_path, hook, n_rows):
    source = store()
    source.load(source.items[0])
    path = tmp_path / "run" / hook / f"{GROUPS[0]}--1_0.saved.pt"
    torch.save(with_rows(record(hook, GROUPS[0]), n_rows), path)
    for item in source.items[:B]:
        with pytest.raises(SourceError, match=f"3 rows, as when the folder was listed, got {n_rows} rows"):
            source.load(item)


def test_what_a_message_says_to_type_is_of_this_source(store):
    meaning = store().meaning()
    assert "--from activault --map ignore=HOOK (and say unknown)" in meaning.final_norm_from
