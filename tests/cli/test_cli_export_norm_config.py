"""hsfmt export: the norm that the user chose is held to the model's config, and to what the weight is called."""

import json

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hsfmt import DatasetWriter

HIDDEN, KEY = 64, "model.norm.weight"


@pytest.fixture
def model(tmp_path):
    """A dataset before the norm, and a folder with a weight for it."""
    rng = np.random.default_rng(0)
    with DatasetWriter(tmp_path / "d", layers=[2, 4, 6, 8], hidden_size=HIDDEN, final_norm="pre") as writer:
        for i in range(2):
            states = (rng.standard_normal((20, 4, HIDDEN)) * 3).astype(ml_dtypes.bfloat16)
            writer.write(f"s{i}", np.arange(20), states, np.ones(20, np.uint8))
    folder = tmp_path / "model"
    folder.mkdir()
    inner = {f"model.layers.0.{name}.weight": torch.ones(HIDDEN) for name in ("input_layernorm", "norm")}
    weights = {KEY: torch.full((HIDDEN,), 0.1), "mtp.norm.weight": torch.ones(HIDDEN), "scale": torch.ones(HIDDEN)}
    save_file({**weights, **inner}, folder / "model.safetensors")
    save_file(inner, folder / "model-00001.safetensors")
    return folder


def config(folder, model_type, **values):
    known = {"num_hidden_layers": 8, "hidden_size": HIDDEN, "model_type": model_type}
    (folder / "config.json").write_text(json.dumps(known | values))


def export(hsfmt, model, *words, key=KEY, file="model.safetensors", to="specforge-eagle3"):
    out = model.parent / "out"
    norm = ["--norm-weight", f"{model / file}:{key}", *words]
    return hsfmt("export", model.parent / "d", out, "--to", to, *norm, "--json").stdout


def stderr(hsfmt, model, *words, key=KEY, file="model.safetensors"):
    norm = ["--norm-weight", f"{model / file}:{key}", *words]
    return hsfmt("export", model.parent / "d", model.parent / "out", "--to", "safetensors", *norm, code=2).stderr


GEMMA = ["gemma", "gemma2", "gemma3_text", "recurrent_gemma", "vaultgemma", "qwen3_next", "qwen3_5_moe_text"]


@pytest.mark.parametrize("given", [True, False], ids=["given", "beside"])
@pytest.mark.parametrize("model_type", GEMMA)
def test_models_that_multiply_by_one_plus_the_weight(hsfmt, model, model_type, given):
    config(model, model_type, rms_norm_eps=1e-6)
    words = ["--norm-eps", "1e-6", *(["--model-config", model] if given else [])]
    for wrong in ([], ["--norm-style", "rms"]):
        text = stderr(hsfmt, model, *words, *wrong)
        assert f"--norm-style: expected gemma: model_type '{model_type}' in {model / 'config.json'}" in text
        assert not (model.parent / "out").exists()
    report = json.loads(export(hsfmt, model, *words, "--norm-style", "gemma", to="safetensors"))
    assert report["norm"]["checked_against"] == str(model / "config.json")
    assert report["warnings"] == []
    sizes = load_file(model.parent / "out" / "s0.safetensors")["hidden_states"][:, -1].float().pow(2).mean(-1).sqrt()
    assert torch.allclose(sizes, torch.full((20,), 1.1), atol=0.01)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3n_text", "gemma4_text", "mistral"])
def test_models_that_multiply_by_the_weight(hsfmt, model, model_type):
    config(model, model_type, rms_norm_eps=1e-6)
    text = stderr(hsfmt, model, "--norm-eps", "1e-6", "--norm-style", "gemma")
    assert f"--norm-style: expected rms: model_type '{model_type}'" in text
    report = json.loads(export(hsfmt, model, "--norm-eps", "1e-6", to="safetensors"))
    rounding = [w for w in report["warnings"] if "differ from the model's by a rounding" in w]
    assert len(rounding) == len(report["warnings"]) == ("gemma" in model_type)


def test_a_gemma_that_is_not_known_yet(hsfmt, model):
    config(model, "gemma9", rms_norm_eps=1e-6)
    assert "expected rms or gemma: whether model_type 'gemma9'" in stderr(hsfmt, model, "--norm-eps", "1e-6")
    report = json.loads(export(hsfmt, model, "--norm-eps", "1e-6", "--norm-style", "rms", to="safetensors"))
    assert report["norm"]["checked_against"] is None


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("llama", {"rms_norm_eps": 1e-5}),
        ("llama", {"rms_norm_eps": 1}),
        ("mamba", {"layer_norm_epsilon": 1e-5}),
        ("lfm2", {"norm_eps": 1e-5}),
        ("mistral3", {"text_config": {"model_type": "mistral", "rms_norm_eps": 1e-5}, "rms_norm_eps": 1e-6}),
    ],
)
def test_an_epsilon_that_the_config_has_otherwise(hsfmt, model, model_type, values):
    config(model, model_type, **values)
    text = stderr(hsfmt, model, "--norm-eps", "1e-6", "--model-config", model)
    name = next(name for name in ("rms_norm_eps", "layer_norm_epsilon", "norm_eps") if name in json.dumps(values))
    eps = 1.0 if values.get(name) == 1 else 1e-5
    assert f"--norm-eps: expected {eps!r}, {name} in {model / 'config.json'}, got 1e-06" in text
    if eps < 1:
        export(hsfmt, model, "--norm-eps", "0.00001", "--model-config", model)


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("gpt2", {"layer_norm_epsilon": 1e-5, "num_hidden_layers": None, "n_layer": 8}),
        ("gpt_neox", {"layer_norm_eps": 1e-5}),
        ("opt", {}),
        ("bloom", {"layer_norm_epsilon": 1e-5}),
        ("falcon", {"layer_norm_epsilon": 1e-5}),
        ("phi", {"layer_norm_eps": 1e-5}),
        ("phimoe", {"rms_norm_eps": 1e-5}),
        ("of-our-own", {"layer_norm_eps": 1e-5}),
    ],
)
def test_models_without_such_a_norm(hsfmt, model, model_type, values):
    config(model, model_type, **values)
    for words in ([], ["--model-config", model]):
        text = stderr(hsfmt, model, "--norm-eps", "1e-5", *words)
        assert f"got model_type '{model_type}', whose final norm is a LayerNorm" in text


def test_a_config_beside_the_weight_is_held_to_layers_too(hsfmt, model):
    config(model, "llama", rms_norm_eps=1e-6, num_hidden_layers=9)
    text = stderr(hsfmt, model, "--norm-eps", "1e-6")
    assert f"{model / 'config.json'}: expected layer 9 as the last one, the final state of this model" in text


def test_a_config_beside_the_weight_of_another_kind(hsfmt, model):
    (model / "config.json").write_text('{"rms_norm_eps": 1e-6}')
    warnings = json.loads(export(hsfmt, model, "--norm-eps", "1e-6"))["warnings"]
    assert "layer 8 is taken to be the model's last" in warnings[0]
    assert f"nothing checked that the model does so: {model / 'config.json'} does not say them both" in warnings[1]


@pytest.mark.parametrize(("model_type", "style"), [("llama", ""), ("gemma2", " --norm-style gemma")])
def test_the_epsilon_of_the_config_is_the_one_that_is_offered(hsfmt, model, model_type, style):
    config(model, model_type, rms_norm_eps=1e-5)
    assert "--norm-eps 1e-05, which is rms_norm_eps of " in stderr(hsfmt, model, "--norm-style", style[-5:] or "rms")
    words = ["--to", "specforge-eagle3", "--model-config", model]
    refused = hsfmt("export", model.parent / "d", model.parent / "out", *words, code=2).stderr
    assert f"model.norm.weight --norm-eps 1e-05{style} (rms_norm_eps of {model / 'config.json'})" in refused


def test_what_nothing_checked_is_said(hsfmt, model):
    report = json.loads(export(hsfmt, model, "--norm-eps", "1e-6"))
    assert report["norm"]["checked_against"] is None
    assert report["warnings"][1] == (
        "the final norm is computed with --norm-style rms, which multiplies by the weight, and --norm-eps 1e-06, and "
        "nothing checked that the model does so: no config.json lies beside the weight; --model-config PATH checks it"
    )
    words = ["--norm-weight", f"{model / 'model.safetensors'}:{KEY}", "--norm-eps", "1e-6"]
    text = hsfmt("export", model.parent / "d", model.parent / "o2", "--to", "npz", *words).stdout
    assert "post: rms, eps 1e-06, applied to layer 8; nothing checked style and eps" in text
    config(model, "llama", rms_norm_eps=1e-6)
    text = hsfmt("export", model.parent / "d", model.parent / "o3", "--to", "npz", *words).stdout
    assert f"applied to layer 8; style and eps as in {model / 'config.json'}" in text


@pytest.mark.parametrize(
    ("key", "file", "remedy"),
    [
        ("model.layers.0.input_layernorm.weight", "model.safetensors", f"in this file: {KEY}"),
        ("model.layers.0.norm.weight", "model.safetensors", f"in this file: {KEY}"),
        ("mtp.norm.weight", "model.safetensors", f"in this file: {KEY}"),
        ("model.layers.0.input_layernorm.weight", "model-00001.safetensors", "it is in another file of the model"),
    ],
)
def test_a_norm_inside_the_model_is_refused(hsfmt, model, key, file, remedy):
    text = stderr(hsfmt, model, "--norm-eps", "1e-6", key=key, file=file)
    assert f"expected the final norm, as model.norm.weight, got {key}, a norm inside the model — {remedy}" in text


@pytest.mark.parametrize(
    ("key", "file"), [("scale", "model.safetensors"), ("model.layers.0.norm.weight", "model-00001.safetensors")]
)
def test_a_weight_of_another_name_is_pointed_out(hsfmt, model, key, file):
    config(model, "llama", rms_norm_eps=1e-6)
    (warning,) = json.loads(export(hsfmt, model, "--norm-eps", "1e-6", key=key, file=file))["warnings"]
    assert warning == f"{key} is not named as a final norm is (model.norm.weight): make sure that it is the model's"
