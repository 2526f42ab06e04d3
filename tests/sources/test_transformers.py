"""Source `transformers`: hidden_states as people save them, split into samples by the attention mask that is there."""

import gzip
import io
import json
import sys
import types

import numpy as np
import pytest
import torch

from hsfmt.errors import SourceError, UsageError
from hsfmt.readers.sources import SourceOptions, find_source, parse_key_map, settle_final_norm, settle_layers
from hsfmt.readers.sources.listing import list_folder
from hsfmt.readers.sources.look import Look
from hsfmt.readers.sources.transformers_dump import TransformersSource

B, T, L, H = 2, 5, 4, 8
ARRAY = (np.arange(L * B * T * H, dtype=np.float32) / 7).reshape(L, B, T, H)
STACK = torch.from_numpy(ARRAY)
IDS = torch.arange(B * T).reshape(B, T)
RIGHT = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
LEFT = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
BATCH = {"input_ids": IDS, "attention_mask": RIGHT}
WINDOWS = {"right": [(0, 3), (0, 5)], "left": [(3, 5), (0, 5)], "all": [(0, 5), (0, 5)]}


@pytest.fixture
def dump(tmp_path):
    """Save values as batch_0.pt, … and open them."""

    def save(*values, **options):
        if "key_map" in options:
            options["key_map"] = parse_key_map(options["key_map"])
        for i, value in enumerate(values):
            torch.save(value, tmp_path / f"batch_{i}.pt")
        return find_source(tmp_path, "transformers", options=SourceOptions(**options))

    return save


@pytest.fixture
def model(tmp_path):
    """Write a model's config.json, and return its path."""

    def write(n_layers=L - 1):
        path = tmp_path / ".config.json"
        path.write_text(json.dumps({"hidden_size": H, "num_hidden_layers": n_layers}))
        return str(path)

    return write


def check(source, windows, array=ARRAY):
    assert [item.sample_id for item in source.items] == [f"batch_0/{row}" for row in range(len(windows))]
    for row, (start, stop) in enumerate(windows):
        sample = source.load(source.items[row])
        wanted = np.ascontiguousarray(array[:, row, start:stop].transpose(1, 0, 2))
        assert sample.hidden_states.shape == wanted.shape
        assert sample.hidden_states.tobytes() == wanted.tobytes()
        assert sample.input_ids.tolist() == IDS[row, start:stop].tolist()


@pytest.mark.parametrize(
    "states",
    [
        {"hidden_states": tuple(STACK)},
        {"hidden_states": list(STACK)},
        {"hidden_states": STACK},
        {"hidden_states": {i: STACK[i] for i in range(L)}},
        {"hidden_states": {f"layer_{i}": STACK[i] for i in reversed(range(L))}},
        {i: STACK[i] for i in range(L)},
        {f"layer_{i}": STACK[i] for i in range(L)},
        {f"hidden_states.{i}": STACK[i] for i in range(L)},
        {f"hidden_states[{i}]": STACK[i] for i in range(L)},
    ],
)
@pytest.mark.parametrize(("mask", "side"), [(RIGHT, "right"), (LEFT, "left"), (torch.ones_like(RIGHT), "all")])
def test_shapes_and_padding(dump, accounted_for, states, mask, side):
    source = dump({"input_ids": IDS, "attention_mask": mask, **states})
    check(source, WINDOWS[side])
    assert {support.role for support in source.support} == {"container"}
    assert sum(item.nbytes for item in source.items) == (source.root / "batch_0.pt").stat().st_size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dump, dtype):
    states = STACK.to(dtype)
    source = dump(BATCH | {"hidden_states": tuple(states)})
    sample = source.load(source.items[1])
    assert (
        sample.hidden_states.tobytes() == states[:, 1].transpose(0, 1).contiguous().view(torch.int16).numpy().tobytes()
    )


@pytest.mark.parametrize("states", [tuple(STACK[:, :1]), STACK[:, :1], tuple(STACK[:, 0]), STACK[:, 0]])
@pytest.mark.parametrize("ids", [IDS[:1], IDS[0]])
def test_one_row_is_one_sample(dump, accounted_for, states, ids):
    source = dump({"input_ids": ids, "hidden_states": states})
    assert [item.sample_id for item in source.items] == ["batch_0"]
    accounted_for(source)
    sample = source.load(source.items[0])
    assert sample.hidden_states.tobytes() == ARRAY[:, 0].transpose(1, 0, 2).tobytes()


def test_a_single_row_is_trimmed_too(dump):
    source = dump({"input_ids": IDS[:1], "attention_mask": LEFT[:1], "hidden_states": tuple(STACK[:, :1])})
    assert source.load(source.items[0]).input_ids.tolist() == [3, 4]


def test_loss_masks_and_metadata(dump):
    entries = {"loss_mask": torch.ones_like(IDS), "prompt_set": "a", "step": torch.tensor(3)}
    source = dump(BATCH | entries | {"hidden_states": tuple(STACK)})
    sample = source.load(source.items[0])
    assert (sample.loss_mask.tolist(), sample.metadata) == ([1, 1, 1], {"prompt_set": "a", "step": 3})


def test_other_tensors_are_not_dropped_in_silence(dump, refused):
    value = BATCH | {"hidden_states": tuple(STACK), "logits": torch.zeros(B, T, 3)}
    source = dump(value)
    with pytest.raises(SourceError, match="--map ignore=logits"):
        source.load(source.items[0])
    check(dump(value, key_map="ignore=logits"), WINDOWS["right"])


def test_rows_without_a_mask_are_asked_about(dump):
    value = {"input_ids": IDS, "hidden_states": tuple(STACK)}
    with pytest.raises(UsageError, match="--map ignore=attention_mask"):
        dump(value).meaning()
    check(dump(value, key_map="ignore=attention_mask"), WINDOWS["all"])


@pytest.mark.parametrize(
    ("row", "words"),
    [([1, 0, 1, 1, 1], "padding on one side"), ([0, 1, 1, 1, 0], "one side"), ([0] * 5, "padding throughout")],
)
def test_masks_that_are_no_padding(dump, row, words):
    source = dump({"input_ids": IDS, "attention_mask": torch.tensor([[1] * 5, row]), "hidden_states": tuple(STACK)})
    with pytest.raises(SourceError, match=words):
        source.load(source.items[1])


def test_all_states_of_a_model(dump, model):
    value = BATCH | {"hidden_states": tuple(STACK)}
    assert dump(value, model_config=model()).meaning().layers == (0, 1, 2, 3)
    for options in ({}, {"model_config": model(n_layers=5)}):
        with pytest.raises(UsageError, match="0 is the embeddings"):
            settle_layers(dump(value, **options).meaning(), None)
    meaning = dump(value).meaning()
    assert settle_layers(meaning, (1, 2, 3, 4)) == (1, 2, 3, 4)
    with pytest.raises(UsageError, match="after the model's final norm"):
        settle_final_norm(meaning, None)
    assert settle_final_norm(meaning, "post") == "post"


def test_numbers_of_layers_are_no_ids(dump, model):
    value = BATCH | {f"layer_{i}": STACK[i] for i in range(3)}
    # As many as the model has layers: inputs or outputs of them.
    meaning = dump(value, model_config=model(n_layers=3)).meaning()
    assert meaning.layers is None
    with pytest.raises(UsageError, match=r"--layer-ids 0,1,2 if these are indices .*--layer-ids 1,2,3 if number i is"):
        settle_layers(meaning, None)
    source = dump(value, BATCH | {f"layer_{i}": STACK[i] for i in (0, 1, 3)})
    with pytest.raises(SourceError, match=r"batch_1\.pt: expected the layers 0, 1, 2 .*got 0, 1, 3"):
        source.load(source.items[2])


@pytest.mark.parametrize("value", [tuple(STACK), STACK, list(STACK)])
def test_states_alone(dump, value):
    with pytest.raises(SourceError, match=r"token ids beside the states.* alone — save \{'input_ids'"):
        dump(value).meaning()


def test_a_pickled_output_is_refused_by_name(dump, tmp_path, monkeypatch):
    module = types.ModuleType("transformers.modeling_outputs")

    class CausalLMOutputWithPast(dict):
        """As transformers' own, which is a dict too."""

    CausalLMOutputWithPast.__module__ = module.__name__
    CausalLMOutputWithPast.__qualname__ = "CausalLMOutputWithPast"
    module.CausalLMOutputWithPast = CausalLMOutputWithPast
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    torch.save(CausalLMOutputWithPast(hidden_states=tuple(STACK)), tmp_path / "batch_0.pt")
    monkeypatch.undo()
    with pytest.raises(SourceError, match=r"modeling_outputs\.CausalLMOutputWithPast.*not executed.* — save"):
        dump().meaning()
    assert TransformersSource.claim(Look(list_folder(tmp_path))).certain


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (BATCH | {"hidden_states": (STACK[0], STACK[1][:, :4])}, "one shape and dtype"),
        (BATCH | {"hidden_states": (STACK[0], STACK[1].half())}, "one shape and dtype"),
        (BATCH | {"hidden_states": tuple(STACK.double())}, "float32 states"),
        (BATCH | {"hidden_states": ()}, "at least one layer"),
        (BATCH | {"hidden_states": tuple(STACK[:, :, :4])}, "for token ids of shape"),
        (BATCH | {"hidden_states": STACK.permute(1, 0, 2, 3)}, r"which is \[batch, layer, token, hidden\]"),
        (BATCH | {"hidden_states": STACK.permute(1, 2, 0, 3)}, r"which is \[batch, token, layer, hidden\]"),
        (BATCH | {"hidden_states": STACK[:2]}, r"may be \[layer, batch, token, hidden\] or \[batch, layer"),
        (BATCH | {"hidden_states": {0: STACK[0], "layer_0": STACK[1]}}, "each layer once"),
        (BATCH | {"hidden_states": {"first": STACK[0]}}, "a tensor for each numbered layer"),
        (BATCH | {"hidden_states": {}}, "a tensor for each numbered layer"),
        (BATCH | {"hidden_states": (STACK[0], "text")}, "a tensor"),
        (BATCH | {"hidden_states": torch.zeros(1, 1, 1, 1).expand(L, B, T, 1 << 30)}, "an expanded view"),
        (BATCH, "states under 'hidden_states'"),
        ({"hidden_states": tuple(STACK)}, "token ids under input_ids"),
        ({0: STACK[0]}, "token ids under input_ids"),
        ({}, "of an empty dict"),
        ({"input_ids": torch.zeros(0, 5), "hidden_states": STACK}, r"shape \[batch, token\]"),
        (3, "token ids beside the states"),
    ],
)
def test_other_things(dump, value, words):
    with pytest.raises(SourceError, match=words) as info:
        dump(value).meaning()
    assert info.value.problems[0].where.startswith("batch_0.pt")


@pytest.mark.parametrize("data", [b"", b"<html></html>", b"PK\x03\x04 cut"])
def test_files_that_are_none(dump, data):
    source = dump(BATCH | {"hidden_states": tuple(STACK)})
    (source.root / "batch_1.pt").write_bytes(data)
    source = dump()
    assert len(source.items) == 3
    with pytest.raises(SourceError, match=r"batch_1\.pt"):
        source.load(source.items[2])


def test_aux_and_last_are_of_other_sources(dump):
    with pytest.raises(UsageError, match="--map hidden_states=KEY"):
        dump(BATCH, key_map="aux=a,last=b")


@pytest.mark.parametrize(
    ("value", "certain"),
    [
        (BATCH | {"hidden_states": tuple(STACK)}, True),
        (BATCH | {"hidden_states": STACK}, True),
        (BATCH | {i: STACK[i] for i in range(L)}, True),
        ({"input_ids": IDS[:1], "hidden_states": tuple(STACK[:, :1])}, None),
        (tuple(STACK), True),
        (STACK, False),
        (STACK[0], None),
        (BATCH | {"hidden_states": STACK[0]}, False),
        ({"weight": STACK}, None),
    ],
)
def test_claims(tmp_path, value, certain):
    torch.save(value, tmp_path / "x.pt")
    claim = TransformersSource.claim(Look(list_folder(tmp_path)))
    assert (claim and claim.certain) is certain


def test_what_transformers_gave(data_dir):
    """Real: a dict with the tuple of a Llama of 3 layers, two rows, the first of which is padded on the left."""
    folder = data_dir / "transformers"
    options = SourceOptions(model_config=str(folder / "model"))
    source = find_source(folder / "dict", options=options)
    assert (source.name, source.meaning().layers, source.meaning().dtype) == ("transformers", (0, 1, 2, 3), "bfloat16")
    saved = torch.load(folder / "dict/batch_0.pt", weights_only=True)
    for row, start in ((0, 3), (1, 0)):
        sample = source.load(source.items[row])
        wanted = torch.stack([state[row, start:] for state in saved["hidden_states"]], dim=1)
        assert sample.hidden_states.tobytes() == wanted.view(torch.int16).numpy().tobytes()
        assert sample.input_ids.tolist() == saved["input_ids"][row, start:].tolist()


def test_what_transformers_pickles(data_dir):
    with pytest.raises(SourceError, match=r"pickled transformers\.modeling_outputs\.CausalLMOutputWithPast.* — save"):
        find_source(data_dir / "transformers/output", "transformers").meaning()


@pytest.mark.parametrize("n_rows", [1, 3])
def test_another_number_of_rows_than_listed(dump, tmp_path, n_rows):
    source = dump(BATCH | {"hidden_states": STACK})
    source.load(source.items[0])
    rows = [0, 1, 0][:n_rows]
    more = {"input_ids": IDS[rows], "attention_mask": RIGHT[rows], "hidden_states": STACK[:, rows]}
    torch.save(more, tmp_path / "batch_0.pt")
    for item in source.items:
        with pytest.raises(SourceError, match=f"rows: 2, as when the folder was listed, got {n_rows}"):
            source.load(item)


@pytest.mark.parametrize(("n_rows", "n_twin"), [(2, 3), (2, 1), (1, 3)])
def test_a_twin_with_another_number_of_rows(dump, tmp_path, n_rows, n_twin):
    made = {}
    for n in (n_rows, n_twin):
        rows = [1, 0, 1][:n]
        made[n] = {"input_ids": IDS[rows], "attention_mask": RIGHT[rows], "hidden_states": STACK[:, rows]}
    out = io.BytesIO()
    torch.save(made[n_twin], out)
    (tmp_path / "batch_0.pt.gz").write_bytes(gzip.compress(out.getvalue()))
    source = dump(made[n_rows])
    assert len(source.items) == n_rows
    for item in source.items:
        with pytest.raises(SourceError, match=f"gz: expected rows: {n_rows}, as in batch_0.pt, its twin, got {n_twin}"):
            source.load(item)
