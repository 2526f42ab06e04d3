"""The backend without speculators: rows and samples, options, and what is refused."""

import argparse
import pickle
import sys
import types

import numpy as np
import pytest
import torch

from hsfmt import DatasetWriter
from hsfmt.errors import CorruptionError, UsageError
from hsfmt.readers import speculators
from hsfmt.readers.dataset import HiddenStateDataset
from hsfmt.readers.row_join import join_rows

LAYERS = [2, 4, 5, 8]


def ids_of(number: int) -> np.ndarray:
    return np.arange(5 + number, dtype=np.int64) * (number + 1)


@pytest.fixture
def dataset(tmp_path) -> HiddenStateDataset:
    """Samples 0 to 5 in two parts, out of order; sample 4 has the tokens of sample 1."""
    for part in ([5, 0, 3], [1, 2, 4]):
        with DatasetWriter(tmp_path / "dataset", layers=LAYERS, hidden_size=8, final_norm="pre") as writer:
            for number in part:
                ids = ids_of(1 if number == 4 else number)
                states = torch.full((len(ids), 4, 8), float(number), dtype=torch.bfloat16)
                writer.write(f"s{number}", ids, states, source_index=number)
    return HiddenStateDataset(tmp_path / "dataset")


def test_rows_are_joined_by_their_tokens(dataset):
    rows = [ids_of(3), ids_of(1), ids_of(0)[:-1], ids_of(5), np.append(ids_of(2), 7)]
    assert join_rows(dataset.reader, rows).tolist() == [3, 1, -1, 5, -1]


def test_a_row_gives_its_states_or_none(dataset):
    transfer = speculators.Transfer(dataset, np.array([3, -1, 0]), layers=[2, 5, 8])
    for copy in (transfer, pickle.loads(pickle.dumps(transfer))):
        found = copy.get_cached(0)
        assert found["hidden_states"].shape == (8, 3, 8)
        assert found["hidden_states"].unique().tolist() == [3.0]
        assert found["token_ids"].dtype == torch.int64
        assert found["token_ids"].tolist() == ids_of(3).tolist()
        assert copy.get_cached(1) is None
        with pytest.raises(UsageError, match="a row of 3"):
            copy.get_cached(3)


def test_a_damaged_sample_is_no_missing_one(dataset, tmp_path):
    for shard in (tmp_path / "dataset" / "parts").glob("*/hidden_states/c/**/*"):
        if shard.is_file():
            data = bytearray(shard.read_bytes())
            data[3] ^= 1
            shard.write_bytes(data)
    with pytest.raises(CorruptionError, match="s0"):
        speculators.Transfer(dataset, np.array([0])).get_cached(0)


def test_a_server_that_keeps_no_files_is_named(dataset):
    transfer = speculators.Transfer(dataset, np.array([0]))
    with pytest.raises(UsageError, match="shared_storage_path"):
        transfer.get_generated({"hsfmt": {"id": "a", "state": "pending"}})


def test_generated_states_are_not_cached(dataset):
    args = argparse.Namespace(hsfmt_path="x", on_generate="cache", on_missing="generate")
    with pytest.raises(UsageError, match="on-generate"):
        speculators.Backend.from_train_args(args, "data")
    with pytest.raises(UsageError, match="on-generate"):
        speculators.Transfer(dataset, np.array([0])).cache("file", 0)


def test_no_path_is_refused():
    args = argparse.Namespace(hsfmt_path=None, hidden_states_path=None, on_missing="raise")
    with pytest.raises(UsageError, match="--hsfmt-path"):
        speculators.Backend.from_train_args(args, "data")


def arguments(**changed: object) -> argparse.Namespace:
    plain = {"on_missing": "raise", "speculator_type": "eagle3", "target_layer_ids": [2, 4, 5], "from_pretrained": None}
    return argparse.Namespace(**plain, **changed)


@pytest.fixture
def transformers(monkeypatch):
    """What the backend asks of transformers, for the model of the test data."""
    config = types.SimpleNamespace(num_hidden_layers=8, hidden_size=128)
    module = types.ModuleType("transformers")
    module.AutoConfig = types.SimpleNamespace(from_pretrained=lambda *_, **__: config)
    monkeypatch.setitem(sys.modules, "transformers", module)
    return config


@pytest.fixture
def converted(data_dir, tmp_path):
    from hsfmt.cli.main import main

    source = data_dir / "speculators" / "0.9.0"
    main(["convert", str(source), str(tmp_path / "converted"), "--layer-ids", "2,4,5,8"], standalone_mode=False)
    return tmp_path / "converted"


def test_a_folder_of_speculators_is_joined_row_by_row(transformers, converted, data_dir):
    args = arguments(hsfmt_path=str(converted), verifier_name_or_path="model")
    transfer = speculators.Backend.from_train_args(args, data_dir / "speculators" / "0.9.0")
    assert transfer.samples.tolist() == list(range(24))
    assert transfer.layers == (2, 4, 5, 8)


def test_a_drafter_that_is_trained_on_says_its_layers(transformers, converted, data_dir):
    drafts = {"eagle": {"eagle_aux_hidden_state_layer_ids": [4, 2]}, "dflash": {"aux_hidden_state_layer_ids": [5]}}
    sys.modules["transformers"].PretrainedConfig = types.SimpleNamespace(
        get_config_dict=lambda name: (drafts.get(name, {}), {})
    )
    found = {}
    for name in ("eagle", "dflash", "another"):
        args = arguments(hsfmt_path=str(converted), verifier_name_or_path="model")
        args.from_pretrained = name
        found[name] = speculators.Backend.from_train_args(args, data_dir / "speculators" / "0.9.0").layers
    assert found == {"eagle": (2, 4, 8), "dflash": (5, 8), "another": (2, 4, 5, 8)}


def test_another_preparation_of_the_data_is_refused(transformers, dataset, converted, data_dir):
    transformers.hidden_size = 8
    url = dataset.reader.store.url
    args = arguments(hsfmt_path=url, verifier_name_or_path="model")
    with pytest.raises(UsageError, match="samples with the token ids of"):
        speculators.Backend.from_train_args(args, data_dir / "speculators" / "0.9.0")
    args.on_missing = "generate"
    transfer = speculators.Backend.from_train_args(args, data_dir / "speculators" / "0.9.0")
    assert set(transfer.samples.tolist()) == {-1}


def test_the_own_dataset_gives_what_the_collator_takes(dataset):
    url = dataset.reader.store.url
    train = speculators.SpeculatorsDataset(url, max_len=16, train_ratio=0.7, layers=[4, 8])
    val = speculators.SpeculatorsDataset(url, max_len=16, split="val", train_ratio=0.7)
    assert (len(train), len(val)) == (4, 2)
    assert train.approx_lengths == [5, 6, 7, 8]
    assert val.approx_lengths == [6, 10]
    assert train.hidden_states_dtype == torch.bfloat16
    assert train.max_len == 16
    first, last = pickle.loads(pickle.dumps(train)).__getitems__([0, 3])
    assert first["hidden_states"].shape == (5, 8)
    assert last["verifier_last_hidden_states"].unique().tolist() == [3.0]
    assert val[0]["hidden_states"].unique().tolist() == [4.0]
    with pytest.raises(UsageError, match="at least one sample"):
        speculators.SpeculatorsDataset(url, max_len=16, split="val")


@pytest.fixture
def hs_connectors(monkeypatch):
    """Stand-ins for the package and for the copy that speculators 0.7 carries, with registries of their own."""
    made = {}
    for name in ("hs_connectors", "speculators._vendor.hs_connectors"):
        module = types.ModuleType(name)
        module.HiddenStatesBackend = types.SimpleNamespace(registry={"file": object})
        made[name] = module
    for name in ("speculators", "speculators._vendor"):
        package = types.ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


def test_registering_twice_is_registering_once(hs_connectors):
    for _ in range(2):
        speculators.register()
        for module in hs_connectors.values():
            registry = module.HiddenStatesBackend.registry
            assert set(registry) == {"file", "hsfmt"}
            assert registry["hsfmt"] is speculators.Backend


def test_without_the_copy_the_package_is_enough(hs_connectors, monkeypatch):
    monkeypatch.delitem(sys.modules, "speculators._vendor.hs_connectors")
    speculators.register()
    assert "hsfmt" in hs_connectors["hs_connectors"].HiddenStatesBackend.registry


def test_registering_too_late_is_refused(hs_connectors, monkeypatch):
    late = types.ModuleType("speculators.train.config.resolution")
    late._BACKEND_DESTS = frozenset({"hidden_states_path"})
    monkeypatch.setitem(sys.modules, late.__name__, late)
    with pytest.raises(UsageError, match="not to be imported yet"):
        speculators.register()


def test_no_speculators_is_said(monkeypatch):
    for name in ("hs_connectors", "speculators"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match="pip install speculators"):
        speculators.register()


def test_options_that_others_have_added_stay_theirs():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden-states-path", default="theirs")
    speculators.Backend.add_launch_args(parser)
    speculators.Backend.add_launch_args(parser)
    parser.parse_args(["--hsfmt-path", "d"])
    config = speculators.Backend.build_kv_transfer_config(parser.parse_args(["--hsfmt-path", "d"]))
    assert config["kv_connector_module_path"] == "hsfmt.writers.vllm"
    assert config["kv_connector_extra_config"] == {"shared_storage_path": "theirs", "hsfmt_path": "d"}
    plain = speculators.Backend.build_kv_transfer_config(parser.parse_args([]))
    assert plain["kv_connector"] == "ExampleHiddenStatesConnector"


def test_the_command_says_what_is_missing(monkeypatch, capsys):
    from hsfmt.cli.main import main

    for name in ("hs_connectors", "speculators"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit) as ended:
        main(["speculators-train", "--config", "run.yaml"])
    assert ended.value.code == 2
    assert "pip install speculators" in capsys.readouterr().err
