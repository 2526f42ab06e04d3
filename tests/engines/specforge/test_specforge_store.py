"""The feature store without SpecForge: stand-ins for its records and for the registration of an algorithm."""

import logging
import sys
import types
from collections import Counter
from dataclasses import dataclass, field
from importlib import metadata

import numpy as np
import pytest
import torch

from hsfmt import DatasetWriter, seal
from hsfmt.errors import CorruptionError, UsageError
from hsfmt.readers.specforge import DatasetFeatureStore
from hsfmt.readers.specforge_layers import Target
from hsfmt.readers.specforge_training import train

SUPERVISED = [[0, 1, 1, 0, 0], [0, 1, 0, 1, 0, 1], [1, 1, 0, 0, 0, 0, 0]]


@dataclass(frozen=True)
class Record:
    """Stands for SampleRef and FeatureSpec: whatever it is made of, it has."""

    values: dict = field(default_factory=dict)

    def __getattr__(self, name):
        if name == "values" or name.startswith("__"):
            raise AttributeError(name)
        return self.values[name]


@pytest.fixture(autouse=True)
def contracts(monkeypatch):
    module = types.ModuleType("specforge.runtime.contracts")
    module.SCHEMA_VERSION = 1
    module.SampleRef = module.FeatureSpec = lambda **values: Record(values)
    module.FeatureHandle = lambda *values: values
    for name in ("specforge", "specforge.runtime"):
        package = types.ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)


class Layout:
    aux_feature, last_hidden_feature = "aux", "last"
    passthrough = (("input_ids", "input_ids"), ("loss_mask", "loss_mask"))

    def materialize(self, sources):
        named = {"input_ids": "input_ids", "loss_mask": "loss_mask", "aux": "aux_hidden_states"}
        return {name: sources[source] for name, source in {**named, "last": "last_hidden_states"}.items()}


class Provider:
    capture_layout = Layout()

    def build_reader(self, *_, **__):
        names = ("input_ids", "loss_mask", "last", "aux")
        return types.SimpleNamespace(strategy="eagle3", target_repr="hidden_state", feature_keys=names)


class Algorithm:
    """A registration whose trainer takes samples with `n_in_a_row` supervised tokens."""

    def __init__(self, n_in_a_row=0):
        accepts = (lambda mask: "1" * n_in_a_row in "".join(str(int(bit)) for bit in mask)) if n_in_a_row else None
        self.providers = types.SimpleNamespace(
            offline_for=lambda _: Provider(), model=types.SimpleNamespace(loss_mask_filter=accepts)
        )


@pytest.fixture
def url(tmp_path):
    with DatasetWriter(tmp_path / "dataset", layers=[2, 4, 5, 8], hidden_size=4, final_norm="post") as writer:
        for number, mask in enumerate(SUPERVISED):
            states = torch.arange(len(mask) * 16).view(len(mask), 4, 4) + 1000 * number
            ids = np.arange(len(mask)) * (number + 1)
            writer.write(f"s{number}", ids, states.to(torch.bfloat16), np.array(mask))
    seal(tmp_path / "dataset")
    return tmp_path / "dataset"


def store_of(url, algorithm=None, **options):
    target = Target(n_layers=8, hidden_size=4)
    return DatasetFeatureStore(url, algorithm or Algorithm(), layers=[5, 2], target=target, **options)


def test_a_record_has_the_wanted_layers_in_the_wanted_order(url):
    store = store_of(url)
    ref = store.refs(run_id="run")[1]
    tensors = store.dataset.read(1)
    record, handle = store.get(ref)
    assert list(record) == ["input_ids", "loss_mask", "last", "aux"]
    assert record["aux"].shape == (1, 6, 8)
    assert torch.equal(record["aux"][0], tensors["hidden_states"][:, [0, 2]].flatten(1))
    assert torch.equal(record["last"][0], tensors["hidden_states"][:, 3])
    assert record["loss_mask"].dtype == torch.int64
    assert record["loss_mask"].tolist() == SUPERVISED[1]
    assert store.release(handle) is None
    assert list(store.get(ref, names=["aux"])[0]) == ["aux"]
    with pytest.raises(UsageError, match="sample s1"):
        store.get(ref, names=["logits"])


def test_references_say_sizes_without_reading_a_state(url, monkeypatch):
    for shard in (url / "parts").glob("*/hidden_states/c/**/*"):
        if shard.is_file():
            shard.unlink()
    plain = store_of(url).refs(run_id="run")
    assert [(ref.sample_id, ref.num_tokens) for ref in plain] == [(f"run:{n:08d}", n + 5) for n in range(3)]
    assert plain[0].estimated_bytes == 5 * (3 * 4 * 2 + 16)
    assert plain[0].feature_specs == {}
    monkeypatch.setenv("SPECFORGE_VALIDATE_OFFLINE_FEATURES", "1")
    cut = store_of(url, max_length=6).refs(run_id="run")
    assert [ref.num_tokens for ref in cut] == [5, 6, 6]
    shapes = {name: spec.shape for name, spec in cut[2].feature_specs.items()}
    assert shapes == {"input_ids": (6,), "loss_mask": (6,), "aux": (1, 6, 8), "last": (1, 6, 4)}


def test_a_damaged_sample_is_named_and_no_other_one_given(url):
    for shard in (url / "parts").glob("*/hidden_states/c/**/*"):
        if shard.is_file():
            data = bytearray(shard.read_bytes())
            data[3] ^= 1
            shard.write_bytes(data)
    store = store_of(url)
    with pytest.raises(CorruptionError, match="s0"):
        store.get(store.refs(run_id="run")[0])


def test_references_of_another_snapshot_are_refused(url):
    refs = store_of(url).refs(run_id="run")
    with DatasetWriter(url, layers=[2, 4, 5, 8], hidden_size=4, final_norm="post") as writer:
        writer.write("more", np.arange(3), torch.zeros(3, 4, 4, dtype=torch.bfloat16))
    seal(url)
    with pytest.raises(UsageError, match="run:00000002"):
        store_of(url).get(refs[2])
    assert store_of(url, snapshot=refs[2].feature_store_uri[len("hsfmt:") : -len("/2")]).get(refs[2])


def test_samples_that_the_trainer_fails_on_are_left_out_and_said(url, caplog):
    with caplog.at_level(logging.WARNING):
        refs = store_of(url, Algorithm(2)).refs(run_id="run")
    assert [ref.metadata["file_index"] for ref in refs] == [0, 2]
    assert "1 of 3 samples are left out" in caplog.text
    assert "s1" in caplog.text
    with pytest.raises(UsageError, match="none of 3"):
        store_of(url, Algorithm(3)).refs(run_id="run")


def test_the_mask_counts_as_far_as_samples_are_cut(url):
    assert len(store_of(url, Algorithm(2), max_length=2).refs(run_id="run")) == 1


def test_tokens_are_counted_in_the_order_in_which_specforge_meets_them(url):
    store = store_of(url)
    assert list(store.token_counts().items()) == [(1, 1), (2, 2), (6, 1), (10, 1), (0, 1), (3, 1)]
    assert store_of(url, max_length=2).token_counts() == Counter({0: 1, 1: 1, 2: 1, 3: 1})
    with pytest.raises(UsageError, match="token 10"):
        store.token_counts(10)


def test_nothing_is_written(url):
    store = store_of(url)
    with pytest.raises(UsageError, match="DatasetWriter"):
        store.put({}, sample_id="s9", metadata={})
    store.abort("s0", reason="unwanted")
    assert len(store.refs(run_id="run")) == 3
    assert store.health()["resident_samples"] == 0


@pytest.mark.parametrize("found", ["0.1.0", "0.3.0", None])
def test_another_release_is_refused(monkeypatch, found):
    def version(_):
        if found is None:
            raise metadata.PackageNotFoundError
        return found

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(UsageError, match=r"expected 0\.2\.0, got " + (found or "none")):
        train("run.yaml")


def test_the_command_says_what_is_missing(capsys, tmp_path):
    from hsfmt.cli.main import main

    (tmp_path / "run.yaml").write_text("run_id: a\n")
    with pytest.raises(SystemExit) as ended:
        main(["specforge-train", "--config", str(tmp_path / "run.yaml"), "training.seed=1"])
    assert ended.value.code == 2
    assert "pip install specforge==0.2.0" in capsys.readouterr().err
