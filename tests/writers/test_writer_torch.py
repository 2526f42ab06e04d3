"""What a writer takes from torch."""

import ml_dtypes
import numpy as np
import part_oracles as oracles
import pytest
import torch

from hsfmt.errors import NonFiniteError, SampleError

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


def raw(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def inputs(tensor):
    wide = torch.zeros(2 * tensor.shape[0], tensor.shape[1] + 1, tensor.shape[2], dtype=tensor.dtype)
    wide[::2, 1:] = tensor
    hidden_major = tensor.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    return {
        "dense": tensor,
        "a view of a larger batch": wide[::2, 1:],
        "permuted": hidden_major,
        "a list of layers": [tensor[:, i].clone() for i in range(tensor.shape[1])],
        "a tuple of views": tuple(tensor.unbind(1)),
        "a parameter": torch.nn.Parameter(tensor, requires_grad=tensor.dtype != torch.float8_e4m3fn),
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_dtype_and_layout(url, open_writer, dtype):
    tensor = torch.randn(11, 2, 8).to(DTYPES[dtype])
    scale = {"hidden_states_scale": torch.rand(11)} if dtype == "float8_e4m3fn" else {}
    with open_writer(dtype=DTYPES[dtype], chunk_tokens=4) as writer:
        for name, value in inputs(tensor).items():
            writer.write(name, torch.arange(11), value, torch.arange(11) % 2 == 0, **scale)
    for name, read in oracles.read_samples(url).items():
        assert read.states.tobytes() == raw(tensor), name
        assert read.input_ids.tolist() == list(range(11))
        assert read.loss_mask.tolist() == [1 - i % 2 for i in range(11)]
        if scale:
            assert read.extras["hidden_states_scale"].tobytes() == raw(scale["hidden_states_scale"])


def test_every_bfloat16_pattern_of_a_tensor(url, open_writer):
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    with open_writer(dtype="bfloat16", nonfinite="keep", hidden_size=64) as writer:
        writer.write("all", torch.arange(512), patterns.view(512, 2, 64))
    assert oracles.read_samples(url)["all"].states.tobytes() == np.arange(65536, dtype="<u2").tobytes()


def test_the_same_sample_from_torch_and_numpy_has_the_same_digest(url, open_writer):
    tensor = torch.randn(5, 2, 8).to(torch.bfloat16)
    array = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    with open_writer(dtype="bfloat16") as writer:
        writer.write("torch", torch.arange(5), tensor)
        writer.write("numpy", np.arange(5), array)
        writer.write("patterns", list(range(5)), array.view(np.uint16))
    (part,) = oracles.loaded_parts(url)
    assert len(set(map(bytes, part.index.content_digest))) == 1


@pytest.mark.parametrize(
    ("given", "got"), [(torch.float16, "float16"), (torch.float64, "float64"), (torch.int16, "int16")]
)
def test_no_dtype_is_cast(open_writer, given, got):
    with open_writer(dtype="bfloat16") as writer:
        with pytest.raises(SampleError, match=f"expected dtype bfloat16, got {got}") as caught:
            writer.write("a", torch.arange(3), torch.zeros(3, 2, 8, dtype=given))
        assert "never changes values" in caught.value.problems[0].remedy


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_anywhere_is_found(open_writer, dtype):
    scale = {"hidden_states_scale": torch.ones(3000)} if dtype == "float8_e4m3fn" else {}
    with open_writer(dtype=dtype, hidden_size=64) as writer:
        for at in (0, 1234, 2999):
            tensor = torch.ones(3000, 2, 64)
            tensor[at, 1, 63] = float("nan")
            with pytest.raises(NonFiniteError, match="1 NaN or Inf values in 3000 tokens"):
                writer.write("a", torch.arange(3000), tensor.to(DTYPES[dtype]), **scale)


def test_extras_from_tensors(url, open_writer):
    extras = {
        "logits": {"kind": "token", "dtype": "bfloat16", "shape": [3]},
        "flags": {"kind": "token", "dtype": "bool"},
        "image": {"kind": "ragged", "dtype": "float32", "shape": [2]},
    }
    logits, flags, image = torch.randn(4, 3).bfloat16(), torch.tensor([True, False, True, True]), torch.randn(7, 2)
    with open_writer(extras=extras) as writer:
        writer.write("a", torch.arange(4), torch.zeros(4, 2, 8), logits=logits, flags=flags, image=image.t().t())
    read = oracles.read_samples(url)["a"].extras
    assert read["logits"].tobytes() == raw(logits)
    assert read["flags"].tolist() == [1, 0, 1, 1]
    assert read["image"].tobytes() == raw(image)


def test_masks_and_ids_of_a_dtype_that_numpy_lacks(url, open_writer):
    with open_writer() as writer:
        writer.write("a", torch.arange(3), torch.zeros(3, 2, 8), torch.tensor([0, 1, 0], dtype=torch.bfloat16))
        with pytest.raises(SampleError, match="expected 0 or 1"):
            writer.write("b", torch.arange(3), torch.zeros(3, 2, 8), torch.full((3,), 0.5, dtype=torch.bfloat16))
        with pytest.raises(SampleError, match="expected integers"):
            writer.write("b", torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, 2, 8))
    assert oracles.read_samples(url)["a"].loss_mask.tolist() == [0, 1, 0]
