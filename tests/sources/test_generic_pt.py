"""Source `pt`: dumps of any program, their keys and shapes resolved, never guessed."""

import json
import pickle

import pytest
import torch

from hsfmt.errors import NotFoundError, SourceError, UsageError
from hsfmt.readers.sources import SourceOptions, find_source, parse_key_map, settle_final_norm, settle_layers

T, L, H = 5, 3, 8
STATES = torch.arange(T * L * H, dtype=torch.bfloat16).reshape(T, L, H)
IDS = torch.arange(T)
FLAT = STATES.reshape(T, L * H)


@pytest.fixture
def dump(tmp_path):
    """Save records as sample_0.pt, sample_1.pt, … and open them."""

    def save(*records, name="pt", **options):
        if "key_map" in options:
            options["key_map"] = parse_key_map(options["key_map"])
        for i, record in enumerate(records):
            torch.save(record, tmp_path / f"sample_{i}.pt")
        return find_source(tmp_path, name, options=SourceOptions(**options))

    return save


def check(source, states=STATES):
    meaning = source.meaning()
    assert (meaning.hidden_size, meaning.n_layers, meaning.dtype) == (H, states.shape[1], "bfloat16")
    sample = source.load(source.items[0])
    assert sample.input_ids.tolist() == IDS.tolist()
    assert sample.hidden_states.tobytes() == states.contiguous().view(torch.int16).numpy().tobytes()
    return sample


@pytest.mark.parametrize(
    ("entries", "options"),
    [
        ({"hidden_states": STATES}, {}),
        ({"hidden_states": STATES[None]}, {}),
        ({"hidden_states": list(STATES.unbind(1))}, {}),
        ({"hidden_states": tuple(STATES.unbind(1))}, {}),
        ({"hidden_states": [state[None] for state in STATES.unbind(1)]}, {}),
        ({"hidden_states": FLAT}, {"hidden_size": H}),
        ({"hidden_states": FLAT[None]}, {"hidden_size": H}),
        ({"hidden_states": STATES.transpose(0, 1)}, {}),
        ({"hidden_states": STATES.transpose(0, 1)[None]}, {}),
        ({"hidden_states": STATES.transpose(0, 1)[:, None]}, {}),
        ({"hidden_states": STATES[:, 2], "aux_hidden_states": STATES[:, :2].transpose(0, 1)}, {}),
        ({"aux_hidden_states": STATES}, {}),
        ({"hidden_states": STATES[:, 2], "aux_hidden_states": FLAT[:, : 2 * H]}, {}),
        ({"hidden_states": STATES[:, 2][None], "aux_hidden_states": FLAT[:, : 2 * H][None]}, {}),
        ({"hidden_states": STATES[:, 2:], "aux_hidden_states": STATES[:, :2]}, {}),
        ({"hidden_states": STATES[:, 2], "aux_hidden_states": list(STATES[:, :2].unbind(1))}, {}),
        ({"h": FLAT[:, : 2 * H], "t": STATES[:, 2]}, {"key_map": "aux=h,last=t"}),
        ({"h": FLAT}, {"key_map": "aux=h", "hidden_size": H}),
        ({"h": STATES, "hidden_states": IDS}, {"key_map": "hidden_states=h,ignore=hidden_states"}),
    ],
)
def test_shapes_of_states(dump, entries, options):
    check(dump({"input_ids": IDS} | entries, **options))


@pytest.mark.parametrize(
    "ids",
    [IDS, IDS[None], IDS.to(torch.int32), IDS.tolist(), IDS.to(torch.uint8)],
    ids=["1d", "2d", "i32", "list", "u8"],
)
def test_kinds_of_token_ids(dump, ids):
    check(dump({"input_ids": ids, "hidden_states": STATES}))
    check(dump({"token_ids": ids, "hidden_states": STATES}))


@pytest.mark.parametrize(
    "mask",
    [torch.tensor([0, 1, 1, 0, 1], dtype=dtype) for dtype in (torch.bool, torch.uint8, torch.int64, torch.float32)]
    + [torch.tensor([[0, 1, 1, 0, 1]]), torch.tensor([0, 1, 1, 0, 1], dtype=torch.bfloat16), [0, 1, 1, 0, 1]],
)
def test_kinds_of_masks(dump, mask):
    sample = check(dump({"input_ids": IDS, "hidden_states": STATES, "loss_mask": mask}))
    assert sample.loss_mask.tolist() == [0, 1, 1, 0, 1]


@pytest.mark.parametrize("n_layers", [1, 3])
@pytest.mark.parametrize("batched", [False, True])
def test_one_token(dump, n_layers, batched):
    """[1, 1, W] may be [token, layer, hidden] or [batch, token, W]; once W is split both are the same."""
    states = STATES[:1, :n_layers].reshape(1, n_layers * H)
    states = states[None] if batched else states.reshape(1, n_layers, H)
    source = dump({"input_ids": IDS[:1], "hidden_states": states}, hidden_size=H)
    sample = source.load(source.items[0])
    assert sample.hidden_states.tobytes() == states.view(torch.int16).numpy().tobytes()
    assert sample.hidden_states.shape == (1, n_layers, H)


def test_wide_rows_need_a_width(dump):
    # 2 and 4 divide the width too: the number of ids is no evidence, however well it fits.
    for layer_ids in (None, (2, 8), (2, 4, 8), (2, 4, 5, 8), (2, 4, 5, 6, 8)):
        with pytest.raises(UsageError, match=r"rows of width 24 in all — give --hidden-size .*--model-config"):
            dump({"input_ids": IDS, "hidden_states": FLAT}, layer_ids=layer_ids).meaning()
    with pytest.raises(UsageError, match=r"states of width 7,.*rows of width 24 in all"):
        dump({"input_ids": IDS, "hidden_states": FLAT}, hidden_size=7).meaning()
    with pytest.raises(SourceError, match="width 16"):
        dump({"input_ids": IDS, "hidden_states": STATES[:, 2, :7], "aux_hidden_states": FLAT[:, : 2 * H]}).meaning()


@pytest.fixture
def model(tmp_path):
    """Write a model's config.json and return its folder."""

    def write(n_layers=8, hidden_size=H):
        folder = tmp_path / ".model"
        folder.mkdir(exist_ok=True)
        config = {"hidden_size": hidden_size, "num_hidden_layers": n_layers}
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    return write


def test_the_width_from_the_models_config(dump, model):
    source = dump({"input_ids": IDS, "hidden_states": FLAT}, model_config=model(), layer_ids=(2, 4, 5, 8))
    check(source)
    with pytest.raises(UsageError, match="3 ids, one for each state in the files, got 4"):
        settle_layers(source.meaning(), (2, 4, 5, 8))


WIDE = {"hidden_states": FLAT}, {"hidden_states": STATES[:, 2], "aux_hidden_states": FLAT[:, : 2 * H]}
SHAPED = {"hidden_states": STATES}, {"hidden_states": list(STATES.unbind(1))}


@pytest.mark.parametrize("states", [*WIDE, *SHAPED], ids=["rows", "last", "3d", "list"])
@pytest.mark.parametrize("hidden_size", [H // 2, 2 * H, 7])
@pytest.mark.parametrize("by_config", [False, True])
def test_a_width_that_contradicts_the_files(dump, model, states, hidden_size, by_config):
    options = {"model_config": model(hidden_size=hidden_size)} if by_config else {"hidden_size": hidden_size}
    source = dump({"input_ids": IDS} | states, **options)
    if states is WIDE[0] and hidden_size == H // 2:
        # The user's word is all there is, and it fits; the number of ids must fit as well.
        assert source.meaning().n_layers == 2 * L
        return
    with pytest.raises(UsageError, match=str(hidden_size)):
        source.meaning()


def test_the_models_config_is_a_check(dump, model):
    record = {"input_ids": IDS, "hidden_states": STATES}
    assert settle_layers(dump(record, model_config=model()).meaning(), (2, 5, 8)) == (2, 5, 8)
    with pytest.raises(UsageError, match=r"ids up to 7, the model's number of layers .*got 2,5,8"):
        settle_layers(dump(record, model_config=model(n_layers=7)).meaning(), (2, 5, 8))
    with pytest.raises(UsageError, match=r"config\.json \[hidden_size\]: expected 8, the width .*got 16"):
        dump(record, model_config=model(hidden_size=16)).meaning()
    with pytest.raises(UsageError, match=r"--hidden-size: expected 8, .*got 4"):
        dump(record, hidden_size=4, model_config=model()).meaning()
    with pytest.raises(NotFoundError, match=r"--model-config .*nowhere"):
        dump(record, model_config="nowhere").meaning()


def sample(n_tokens, *, layers_first, n_layers=L):
    """A record whose every value says its token and layer."""
    states = torch.arange(n_tokens * n_layers, dtype=torch.float32).reshape(n_tokens, n_layers, 1).repeat(1, 1, H)
    states = states.transpose(0, 1).contiguous() if layers_first else states
    return {"input_ids": torch.arange(n_tokens), "hidden_states": states}


def right(source, n):
    states = source.load(source.items[n]).hidden_states
    n_tokens = len(states)
    assert states.shape == (n_tokens, L, H)
    assert states[:, :, 0].reshape(-1).tolist() == list(range(n_tokens * L))


@pytest.mark.parametrize("layers_first", [False, True])
@pytest.mark.parametrize("lengths", [(L, L, 5), (5, L, 1), (1, L, 2), (L, 1), (L, 7, L)])
def test_as_many_tokens_as_layers(dump, layers_first, lengths):
    """[3, 3, H] reads both ways; another sample shows which is right."""
    source = dump(*[sample(n, layers_first=layers_first) for n in lengths])
    assert source.meaning().n_layers == L
    assert source.meaning().producer.get("layout") == ("layer-first" if layers_first else None)
    for n in range(len(lengths)):
        right(source, n)
        right(pickle.loads(pickle.dumps(source)), n)


def test_as_many_tokens_as_layers_in_every_sample(dump):
    with pytest.raises(UsageError, match=r"more or fewer tokens than layers.*as a list of"):
        dump(*[sample(L, layers_first=True)] * 3).meaning()


@pytest.mark.parametrize("layers_first", [False, True])
def test_both_orders_in_one_folder(dump, layers_first):
    """What is ambiguous can't be trusted then: no single bad file, the source as a whole is refused."""
    records = [sample(n, layers_first=layers_first) for n in (5, L)] + [sample(4, layers_first=not layers_first)]
    source = dump(*records)
    right(source, 0)
    with pytest.raises(UsageError, match=r"sample_2\.pt: expected states .* from a folder of its own"):
        source.load(source.items[2])


def test_one_bad_file_is_no_other_order(dump, refused):
    """Token ids that are cut to the number of layers look like another order of the axes, but of other layers."""
    bad = sample(7, layers_first=False) | {"input_ids": torch.arange(L)}
    assert "layers and tokens are on other axes" in str(
        refused(dump(sample(5, layers_first=False), bad), "sample_1.pt")
    )


def test_an_ambiguous_tensor_beside_lists(dump, refused):
    listed = {"input_ids": IDS, "hidden_states": list(STATES.float().unbind(1))}
    source = dump(listed, sample(L, layers_first=False), sample(4, layers_first=False))
    assert "as many layers as tokens" in str(refused(source, "sample_1.pt"))
    right(source, 2)


def test_a_list_with_an_entry_a_token(dump):
    with pytest.raises(SourceError, match="one entry a token"):
        dump({"input_ids": IDS, "hidden_states": list(STATES)}).meaning()


def test_layers_and_norm_are_demanded(dump):
    meaning = dump({"input_ids": IDS, "hidden_states": STATES}).meaning()
    assert (meaning.layers, meaning.final_norm) == (None, None)
    with pytest.raises(UsageError, match="'output of layer i' is i \\+ 1"):
        settle_layers(meaning, None)
    with pytest.raises(UsageError, match="pre if the last state was taken before"):
        settle_final_norm(meaning, None)
    with pytest.raises(UsageError, match="3 ids, one for each state in the files, got 2: 3,8"):
        settle_layers(meaning, [3, 8])
    for wrong in ([8, 5, 3], [3, 3, 8], [-1, 3, 8]):
        with pytest.raises(UsageError, match="strictly ascending"):
            settle_layers(meaning, wrong)
    assert settle_layers(meaning, [3, 5, 8]) == (3, 5, 8)
    assert settle_final_norm(meaning, "unknown") == "unknown"


GOOD = {"input_ids": IDS, "hidden_states": STATES, "loss_mask": torch.ones(T)}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"input_ids": IDS[:4]}, "a state for each of the 4 token ids.*got 5 tokens"),
        ({"input_ids": IDS.float()}, "integer token ids"),
        ({"input_ids": IDS.bool()}, "integer token ids"),
        ({"input_ids": IDS.reshape(5, 1)}, r"shape \[5, 1\]"),
        ({"input_ids": [0, 1, "2"]}, "a list of numbers"),
        ({"input_ids": [2**63]}, "2\\*\\*63"),
        ({"input_ids": "text"}, "got str"),
        ({"input_ids": None}, "'input_ids' as in the first readable file, got None"),
        ({"hidden_states": None}, "got None"),
        ({"hidden_states": STATES.double()}, "float64"),
        ({"hidden_states": STATES.to(torch.float8_e4m3fn)}, "float8_e4m3fn"),
        ({"hidden_states": STATES.float()}, "got float32 states"),
        ({"hidden_states": STATES[:, :2]}, "got 2 layers"),
        ({"hidden_states": STATES[:, :, :4]}, "got hidden size 4"),
        ({"hidden_states": []}, "at least one layer"),
        ({"hidden_states": [STATES[:, 0], STATES[:, 1].float(), STATES[:, 2]]}, "layers of one dtype"),
        ({"hidden_states": STATES[:, :, :0]}, "shape"),
        ({"hidden_states": STATES[0, 0]}, "shape"),
        ({"hidden_states": {"a": 1}}, "got dict"),
        ({"loss_mask": None}, "'loss_mask' as in the first readable file, got None"),
        ({"loss_mask": torch.full((T,), 0.5)}, "got 0.5 at token 0"),
        ({"loss_mask": torch.full((T,), float("nan"))}, "a mask of 0 and 1"),
        ({"loss_mask": torch.ones(T + 1)}, "a mask of 5 tokens, got 6"),
        ({"position_ids": IDS}, "--map ignore=position_ids"),
        ({"conversation": [torch.ones(1)]}, "--map ignore=conversation"),
        ({"score": float("nan")}, "small JSON"),
        ({"attention_mask": torch.tensor([1, 1, 1, 0, 0])}, "2 of 5 tokens that are padding"),
        ({"attention_mask": torch.tensor([1, 1, 2, 0, 0])}, "a mask of 0 and 1"),
    ],
)
def test_files_that_are_not_like_the_others(dump, refused, bad, words):
    source = dump(GOOD, GOOD | bad)
    assert source.meaning().n_layers == L
    with pytest.raises(SourceError, match=words):
        source.load(source.items[1])
    refused(source, "sample_1.pt")


def test_what_else_a_file_says_is_kept(dump):
    extra = {"id": "a", "turn": 3, "score": 0.5, "tags": ["x"], "n": torch.tensor(4), "gone": None}
    sample = check(dump(GOOD | extra | {"attention_mask": torch.ones(1, T)}))
    assert sample.metadata == {"id": "a", "turn": 3, "score": 0.5, "tags": ["x"], "n": 4}


def test_ignored_keys(dump):
    record = GOOD | {"position_ids": IDS, "attention_mask": torch.zeros(T), "loss_mask": torch.full((T,), 0.5)}
    sample = check(dump(record, key_map="ignore=position_ids,ignore=attention_mask,ignore=loss_mask"))
    assert (sample.loss_mask, sample.metadata) == (None, {})


def test_a_map_alone_means_this_source(dump):
    assert dump({"ids": IDS, "h": STATES}, name=None, key_map="input_ids=ids,hidden_states=h").name == "pt"


def test_a_mask_of_another_name(dump):
    sample = check(dump({"input_ids": IDS, "hidden_states": STATES, "m": torch.ones(T)}, key_map="loss_mask=m"))
    assert sample.loss_mask.tolist() == [1] * T


def test_several_samples_in_one_file(dump):
    with pytest.raises(SourceError, match=r"a list of 2 \(dict\)"):
        dump([GOOD, GOOD]).meaning()


def test_a_last_state_of_several_layers(dump):
    with pytest.raises(SourceError, match="one state a token"):
        dump({"input_ids": IDS, "hidden_states": STATES, "aux_hidden_states": STATES}).meaning()


def test_extensions_and_ids(dump, tmp_path, accounted_for, refused):
    source = dump(*[GOOD] * 11)
    assert [item.sample_id for item in source.items] == [f"sample_{i}" for i in range(11)]
    (tmp_path / "deep").mkdir()
    torch.save(GOOD, tmp_path / "deep" / "a.b.ckpt")
    torch.save(GOOD, tmp_path / "sample_3.pth")
    for name in ("notes.txt", ".hidden.pt", "optimizer.pt", "rng_state_0.pth", "token_freq.pt", "x.pt.tmp", "y.pt.xz"):
        (tmp_path / name).touch()
    source = dump()
    accounted_for(source)
    assert source.items[0].sample_id == "deep/a.b"
    assert {stray.path for stray in source.strays} == {
        "notes.txt",
        ".hidden.pt",
        "optimizer.pt",
        "rng_state_0.pth",
        "x.pt.tmp",
        "y.pt.xz",
    }
    refused(source, "sample_3.pt")
    refused(source, "sample_3.pth")
