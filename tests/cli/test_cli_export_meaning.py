"""hsfmt export: what the states mean to the program that reads the files. Norms and casts are exact, or refused."""

import json
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from export_sources import HIDDEN, make_dataset, values
from safetensors.torch import load_file, save_file

from hsfmt import DatasetWriter, HiddenStateDataset
from hsfmt.cli.exporting.meaning import settle
from hsfmt.cli.exporting.norm import FinalNorm
from hsfmt.cli.exporting.plan import Request
from hsfmt.errors import SampleError, UsageError
from hsfmt.header import make_header
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.views import as_array, as_tensor
from hsfmt.writers.targets.base import Target
from hsfmt.writers.targets.npz_files import NpzTarget

NORM_KEY = "model.norm.weight"


class PostTarget(NpzTarget):
    name = "post-only"
    final_norm = "post"
    needs_final_state = True
    dtypes = ("bfloat16", "float32")


class PreTarget(NpzTarget):
    name = "pre-only"
    final_norm = "pre"
    needs_final_state = True


@pytest.fixture(scope="module")
def computed(data_dir) -> dict[str, torch.Tensor]:
    """What transformers computed: tests/data/final_norm."""
    return load_file(data_dir / "final_norm" / "final_norm.safetensors")


@pytest.fixture(scope="module")
def tiny(data_dir) -> Path:
    return data_dir / "tiny-llama"


@pytest.fixture(scope="module")
def weight_file(tmp_path_factory) -> Path:
    """A norm for the small datasets of these tests."""
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    weight = (1 + torch.randn(HIDDEN, generator=torch.Generator().manual_seed(0)) / 4).to(torch.bfloat16)
    odd = {
        "zero": torch.zeros(HIDDEN),
        "nan": torch.full((HIDDEN,), torch.nan),
        "ids": torch.ones(HIDDEN, dtype=torch.int64),
    }
    save_file({NORM_KEY: weight, "short": weight[:8].clone(), "layers.0.norm.weight": weight.clone(), **odd}, path)
    return path


def bits(tensor):
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])


def llama_rms_norm(states, weight, eps):
    """LlamaRMSNorm of transformers, line by line."""
    input_dtype = states.dtype
    hidden_states = states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + eps)
    return weight * hidden_states.to(input_dtype)


def apply(pre, weight, eps, style):
    name = str(pre.dtype).removeprefix("torch.")
    norm = FinalNorm(as_array(weight, name), name, eps, style, "FILE:KEY")
    native = as_array(pre, name).view(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    made = norm.apply(native, "s")
    return as_tensor(made.view(as_array(pre, name).dtype), name)


def test_the_norm_is_bit_equal_to_what_transformers_computed(computed, tiny):
    weight = load_file(tiny / "model.safetensors")[NORM_KEY]
    eps = json.loads((tiny / "config.json").read_text())["rms_norm_eps"]
    assert torch.equal(bits(apply(computed["llama.pre"], weight, eps, "rms")), bits(computed["llama.post"]))
    # Otherwise the equality would show nothing.
    assert not torch.equal(bits(apply(computed["llama.pre"], weight, 10 * eps, "rms")), bits(computed["llama.post"]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gemma_is_bit_equal_to_what_transformers_computed(computed, dtype):
    pre, post, weight = (computed[f"gemma.{dtype}.{name}"] for name in ("pre", "post", "weight"))
    assert torch.equal(bits(apply(pre, weight, 1e-6, "gemma")), bits(post))


def test_the_styles_differ(computed):
    pre, post, weight = (computed[f"gemma.bfloat16.{name}"] for name in ("pre", "post", "weight"))
    assert not torch.equal(bits(apply(pre, 1 + weight, 1e-6, "rms")), bits(post))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("n_tokens", [1, 7, 1024, 2500])
def test_blocks_do_not_change_a_bit(dtype, n_tokens):
    generator = torch.Generator().manual_seed(n_tokens)
    states = (torch.randn(n_tokens, 96, generator=generator) * 5).to(dtype)
    weight = (torch.randn(96, generator=generator) / 3 + 1).to(dtype)
    assert torch.equal(bits(apply(states, weight, 1e-5, "rms")), bits(llama_rms_norm(states, weight, 1e-5)))


def test_exported_states_are_those_of_the_model(hsfmt, computed, tiny, tmp_path):
    """Layer 8 of the model before its norm in, after its norm out; the other layer is as it was."""
    pre = computed["llama.pre"]
    states = torch.stack([pre.flip(0), pre], 1)
    with DatasetWriter(tmp_path / "d", layers=[4, 8], hidden_size=128, final_norm="pre") as writer:
        writer.write("s", computed["llama.input_ids"], states)
    given = ["--norm-weight", f"{tiny / 'model.safetensors'}:{NORM_KEY}", "--norm-eps", "1e-5"]
    report = hsfmt.json(
        "export", tmp_path / "d", tmp_path / "out", "--to", "safetensors", *given, "--model-config", tiny
    )
    assert report["header"]["final_norm"] == "post"
    config = str(tiny / "config.json")
    said = {"eps": 1e-5, "layer": 8, "style": "rms", "weight": given[1], "checked_against": config}
    assert report["norm"] == said
    assert report["warnings"] == [
        "1 sample came without a loss mask: every token of such a sample counts as supervised"
    ]
    assert not any("taken to be the model's last" in warning for warning in report["warnings"])
    found = load_file(tmp_path / "out" / "s.safetensors")["hidden_states"]
    assert torch.equal(bits(found[:, 1]), bits(computed["llama.post"]))
    assert torch.equal(bits(found[:, 0]), bits(pre.flip(0)))


def test_states_that_are_normed_already_are_found_out(hsfmt, computed, tiny, tmp_path):
    """The dataset says pre, and is wrong."""
    with DatasetWriter(tmp_path / "d", layers=[8], hidden_size=128, final_norm="pre") as writer:
        writer.write("wrong", computed["llama.input_ids"], computed["llama.post"][:, None])
    given = ["--norm-weight", f"{tiny / 'model.safetensors'}:{NORM_KEY}", "--norm-eps", "1e-5"]
    document = hsfmt.json("export", tmp_path / "d", tmp_path / "out", "--to", "npz", *given, code=2)
    (problem,) = document["error"]
    assert problem["where"] == "last state of sample 'wrong'"
    assert "they are after it" in problem["got"]
    assert list((tmp_path / "out").iterdir()) == []


def test_states_of_a_real_program_that_are_after_the_norm(data_dir, tiny):
    """`target` of speculators 0.2 is after the norm."""
    weight = load_file(tiny / "model.safetensors")[NORM_KEY]
    file = data_dir / "speculators" / "0.2.0_ckpt" / "0" / "data_0.ckpt"
    post = torch.load(file, weights_only=True)["target"]
    with pytest.raises(SampleError, match="they are after it"):
        apply(post, weight, 1e-5, "rms")


def test_an_epsilon_that_is_not_the_models(hsfmt, weight_file, tmp_path):
    make_dataset(tmp_path / "d", 3)
    given = ["--norm-weight", f"{weight_file}:{NORM_KEY}", "--norm-eps", "0.999"]
    with DatasetWriter(tmp_path / "small", layers=[1], hidden_size=HIDDEN, final_norm="pre") as writer:
        writer.write("s", np.arange(9), (values(0, 9, "float32")[:, :1] / 100).astype(ml_dtypes.bfloat16))
    result = hsfmt("export", tmp_path / "small", tmp_path / "out", "--to", "npz", *given, code=2)
    assert "expected a root mean square of about 1 after the norm" in result.stderr
    assert "compare --norm-weight, --norm-eps (0.999) and --norm-style (rms) with the model's" in result.stderr


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("model.nor.weight", "expected a tensor 'model.nor.weight', got none of that name — tensors of 16 values"),
        ("short", "expected 16 floats, the states' width, got bfloat16 [8]"),
        ("nan", "expected finite weights, got 16 NaN or Inf values"),
        ("zero", "expected the weight of a norm, got zeros throughout"),
        ("ids", "expected 16 floats, the states' width, got int64 [16]"),
    ],
)
def test_weights_that_are_none(hsfmt, weight_file, tmp_path, key, says):
    make_dataset(tmp_path / "d", 3)
    given = ["--norm-weight", f"{weight_file}:{key}", "--norm-eps", "1e-5"]
    result = hsfmt("export", tmp_path / "d", tmp_path / "out", "--to", "npz", *given, code=2)
    assert says in result.stderr
    # The final norm is named before those of layers.
    if "got none of that name" in says:
        assert result.stderr.index(NORM_KEY) < result.stderr.index("layers.0.norm.weight")


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        (["--norm-weight", "FILE"], 2, "--norm-eps: expected a number from 0 to 1, got None — give the model's"),
        (["--norm-weight", "FILE", "--norm-eps", "-1"], 2, "--norm-eps: expected a number from 0 to 1, got -1.0"),
        (["--norm-weight", "FILE", "--norm-eps", "nan"], 2, "--norm-eps: expected a number from 0 to 1, got nan"),
        (["--norm-weight", "model.safetensors", "--norm-eps", "1e-5"], 2, "expected FILE.safetensors:KEY"),
        (["--norm-weight", "/none/m.safetensors:k", "--norm-eps", "1e-5"], 3, "expected a safetensors file, got No"),
        (["--norm-eps", "1e-5"], 2, "expected the weight that --norm-eps and --norm-style go with, got none"),
        (["--norm-style", "gemma"], 2, "expected the weight that --norm-eps and --norm-style go with, got none"),
    ],
)  # fmt: skip
def test_half_of_a_norm(hsfmt, weight_file, tmp_path, given, code, says):
    make_dataset(tmp_path / "d", 3)
    words = [f"{weight_file}:{NORM_KEY}" if word == "FILE" else word for word in given]
    assert says in hsfmt("export", tmp_path / "d", tmp_path / "out", "--to", "npz", *words, code=code).stderr
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def refusal(stored: str, kind: type[Target], weight_file: Path | None = None, **wishes) -> str:
    header = make_header(layers=[1, 2, 5], hidden_size=HIDDEN, final_norm=stored)
    layers = wishes.pop("layers", header.layers)
    norm = {"norm_weight": f"{weight_file}:{NORM_KEY}", "norm_eps": 1e-5} if weight_file else {}
    with pytest.raises(UsageError) as caught:
        settle(header, layers, kind, Request(url="d", dst="o", to=kind.name, **norm, **wishes))
    return str(caught.value)


def test_pre_to_a_post_reader_needs_the_norm(weight_file):
    assert refusal("pre", PostTarget) == (
        "--to post-only: expected a final state after the final norm, got one before it (final_norm pre) — give the "
        "model's norm: --norm-weight model.safetensors:model.norm.weight --norm-eps X (rms_norm_eps of the model's "
        "config.json)"
    )
    header = make_header(layers=[1, 2, 5], hidden_size=HIDDEN, final_norm="pre")
    norm = {"norm_weight": f"{weight_file}:{NORM_KEY}", "norm_eps": 1e-5}
    meaning = settle(header, header.layers, PostTarget, Request(url="d", dst="o", to="post-only", **norm))
    assert meaning.header.final_norm == "post"
    assert "layer 5 is taken to be the model's last" in meaning.notes[0]


def test_post_to_a_pre_reader_is_refused_whatever_is_said(weight_file):
    lost = (
        "the norm can't be undone, since the scale of each state is lost: capture the data anew before the norm, or "
        "choose a format whose readers take states after it"
    )
    assert refusal("post", PreTarget) == (
        f"--to pre-only: expected a final state before the final norm, got one after it (final_norm post) — {lost}"
    )
    assert refusal("post", PreTarget, weight_file) == (
        "--norm-weight: expected states before the final norm, got a dataset whose final state is after it — " + lost
    )


@pytest.mark.parametrize("kind", [PreTarget, PostTarget])
def test_unknown_is_refused_where_it_matters(kind, weight_file):
    for given in (None, weight_file):
        assert refusal("unknown", kind, given) == (
            f"--to {kind.name}: expected a final state known to be before or after the final norm, got final_norm "
            "unknown — convert or capture the data anew with --final-norm pre or post, whichever is true"
        )
    header = make_header(layers=[1, 2], hidden_size=HIDDEN, final_norm="unknown")
    meaning = settle(header, header.layers, NpzTarget, Request(url="d", dst="o", to="npz"))
    assert (meaning.header, meaning.notes) == (header, [])


def test_a_norm_that_nobody_needs(weight_file):
    assert "leave --norm-weight out" in refusal("post", PostTarget, weight_file)
    assert "which its readers apply themselves, got --norm-weight" in refusal("pre", PreTarget, weight_file)


def test_the_final_state_has_to_be_among_the_layers(weight_file):
    text = refusal("post", PostTarget, layers=(1, 2))
    assert "--layers: expected layer 5 among the layers, as the final state that --to post-only needs, got 1,2" in text
    text = refusal("pre", NpzTarget, weight_file, layers=(1, 2))
    assert "as the final state that --norm-weight needs" in text


def test_the_config_says_which_layer_is_the_last(tmp_path, weight_file):
    def config(n_layers, hidden_size=HIDDEN):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"num_hidden_layers": n_layers, "hidden_size": hidden_size}))
        return str(path)

    text = refusal("post", PostTarget, model_config=config(8))
    assert "expected layer 8 as the last one, the final state of this model, got layer 5" in text
    text = refusal("pre", NpzTarget, weight_file, model_config=config(8))
    assert "expected layer 8 as the last one" in text
    text = refusal("pre", NpzTarget, model_config=config(4))
    assert "expected layers up to 4, got layer 5 — the config is another model's" in text
    assert "expected hidden_size 16, got 32" in refusal("pre", NpzTarget, model_config=config(5, 32))
    header = make_header(layers=[1, 2, 5], hidden_size=HIDDEN, final_norm="post")
    for kind, n_layers in ((PostTarget, 5), (NpzTarget, 8)):
        request = Request(url="d", dst="o", to=kind.name, model_config=config(n_layers))
        assert settle(header, header.layers, kind, request).notes == []


def test_all_that_is_wrong_is_said_at_once():
    text = refusal("pre", PostTarget, layers=(1, 2), cast="float16")
    assert text.count("\n") == 2
    assert "--layers" in text
    assert "expected states of bfloat16, float32, got float16 — add --cast bfloat16 or float32" in text


@pytest.mark.parametrize("to", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
def test_casts_are_those_of_torch(hsfmt, tmp_path, stored, to):
    make_dataset(tmp_path / "d", 6, dtype=stored)
    report = hsfmt.json("export", tmp_path / "d", tmp_path / "out", "--to", "safetensors", "--cast", to)
    assert report["cast"] == (None if stored == to else {"from": stored, "to": to})
    assert report["header"]["dtype"] == to
    reader = SampleReader(str(tmp_path / "d"))
    for i in range(6):
        found = load_file(tmp_path / "out" / f"sample-{i:03}.safetensors")["hidden_states"]
        want = as_tensor(reader.read(i).hidden_states, stored).to(getattr(torch, to))
        assert torch.equal(bits(found), bits(want))


@pytest.mark.parametrize("to", ["bfloat16", "float16", "float32"])
def test_float8_is_dequantised_as_the_reader_does(hsfmt, tmp_path, to):
    make_dataset(tmp_path / "d", 6, dtype="float8_e4m3fn")
    report = hsfmt.json("export", tmp_path / "d", tmp_path / "out", "--to", "safetensors", "--cast", to)
    assert report["dequantized"] is True
    assert report["header"]["scaling"] is None
    for i, item in enumerate(HiddenStateDataset(str(tmp_path / "d"), dequantize=True)):
        found = load_file(tmp_path / "out" / f"sample-{i:03}.safetensors")
        assert "hidden_states_scale" not in found
        assert torch.equal(bits(found["hidden_states"]), bits(item["hidden_states"].to(getattr(torch, to))))


def test_float8_and_a_norm(hsfmt, weight_file, tmp_path):
    make_dataset(tmp_path / "d", 6, dtype="float8_e4m3fn")
    given = ["--norm-weight", f"{weight_file}:{NORM_KEY}", "--norm-eps", "1e-5"]
    result = hsfmt("export", tmp_path / "d", tmp_path / "out", "--to", "safetensors", *given, code=2)
    assert "got float8_e4m3fn states — add --cast bfloat16, which dequantises them" in result.stderr
    hsfmt("export", tmp_path / "d", tmp_path / "out", "--to", "safetensors", *given, "--cast", "bfloat16")
    weight = load_file(weight_file)[NORM_KEY]
    for i, item in enumerate(HiddenStateDataset(str(tmp_path / "d"), dequantize=True)):
        found = load_file(tmp_path / "out" / f"sample-{i:03}.safetensors")["hidden_states"]
        assert torch.equal(bits(found[:, -1]), bits(llama_rms_norm(item["hidden_states"][:, -1], weight, 1e-5)))
        assert torch.equal(bits(found[:, :-1]), bits(item["hidden_states"][:, :-1]))


def test_float8_to_a_format_without(hsfmt):
    header = make_header(
        layers=[1], hidden_size=8, final_norm="post", dtype="float8_e4m3fn",
        scaling={"column": "hidden_states_scale", "rule": "bfloat16_product"},
    )  # fmt: skip
    with pytest.raises(UsageError) as caught:
        settle(header, header.layers, PostTarget, Request(url="d", dst="o", to="post-only"))
    assert str(caught.value) == (
        "--to post-only: expected states of bfloat16, float32, got float8_e4m3fn — add --cast bfloat16 or float32, "
        "which dequantises them"
    )


@pytest.mark.parametrize("value", [70000.0, -1e30])
def test_a_value_beyond_float16_names_the_sample(hsfmt, tmp_path, value):
    with DatasetWriter(tmp_path / "d", layers=[1], hidden_size=8, final_norm="pre") as writer:
        writer.write("fine", np.arange(3), np.full((3, 1, 8), 60000, ml_dtypes.bfloat16))
        states = np.ones((5, 1, 8), ml_dtypes.bfloat16)
        states[3, 0, 2] = value
        writer.write("large/one", np.arange(5), states)
    document = hsfmt.json("export", tmp_path / "d", tmp_path / "out", "--to", "npz", "--cast", "float16", code=2)
    (problem,) = document["error"]
    assert problem["where"] == "hidden_states of sample 'large/one'"
    assert problem["samples"] == ["large/one"]
    assert problem["expected"] == "values that float16 can hold, up to 65504"
    assert problem["got"].startswith("1 beyond that in tokens 0 to 4")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["fine.npz"]
    assert document["counts"] == {"already_there": 0, "asked": 2, "not_reached": 1, "written": 1}
    hsfmt("export", tmp_path / "d", tmp_path / "wide", "--to", "npz", "--cast", "float32")


def test_nan_and_inf_that_were_kept_survive_a_cast(hsfmt, tmp_path):
    states = np.array([np.nan, np.inf, -np.inf, 1], np.float32).reshape(1, 1, 4)
    options = {"layers": [1], "hidden_size": 4, "final_norm": "pre", "nonfinite": "keep", "dtype": "float32"}
    with DatasetWriter(tmp_path / "d", **options) as writer:
        writer.write("s", [1], states)
    hsfmt("export", tmp_path / "d", tmp_path / "out", "--to", "npz", "--cast", "float16")
    with np.load(tmp_path / "out" / "s.npz") as file:
        assert np.array_equal(file["hidden_states"], states.astype(np.float16), equal_nan=True)


def test_another_weight_is_another_job(hsfmt, weight_file, tmp_path):
    make_dataset(tmp_path / "d", 3)
    command = ["export", tmp_path / "d", tmp_path / "out", "--to", "npz", "--norm-weight"]
    hsfmt(*command, f"{weight_file}:{NORM_KEY}", "--norm-eps", "1e-5")
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(weight_file.read_bytes())
    again = hsfmt.json(*command, f"{copy}:{NORM_KEY}", "--norm-eps", "1e-5")
    assert again["counts"]["already_there"] == 3
    result = hsfmt(*command, f"{weight_file}:{NORM_KEY}", "--norm-eps", "1e-6", code=2)
    assert "out: norm: expected {'eps': '1e-05'" in result.stderr


def test_header_of_a_job_is_what_is_written():
    header = make_header(layers=[1, 2, 5], hidden_size=HIDDEN, final_norm="post", model="m")
    request = Request(url="d", dst="o", to="npz", cast="float32")
    assert settle(header, (1, 5), NpzTarget, request).header == replace(header, layers=(1, 5), dtype="float32")
