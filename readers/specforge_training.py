"""The trainer of SpecForge on a dataset: its own models, loaders and steps, with our store in the place of files.

SpecForge 0.2 chooses the store of a local offline run by itself, and takes one from its caller only in the builder of
runs whose features come from elsewhere. That builder is what is called here, with all else as `specforge train` has it.
Some of what that takes is private to SpecForge, so that no release but those that were tried is run.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from hsfmt.errors import HsfmtError, StorageError, UsageError
from hsfmt.readers.specforge import DatasetFeatureStore
from hsfmt.readers.specforge_layers import Target, hf_layers

_log = logging.getLogger("hsfmt")
RELEASES = ("0.2.0",)
_MODULE = "hsfmt.cli.specforge_train"


@dataclass(frozen=True, slots=True)
class Source:
    """What of the dataset is trained on.

    Attributes
    ----------
    snapshot
        Of both the training and the evaluation dataset: a fingerprint or "live"; None: the sealed one.
    layers
        HF ids of the drafter's layers; None: those of its configuration, on targets where that says which they are.
    """

    snapshot: str | None = None
    layers: tuple[int, ...] | None = None

    def options(self) -> list[str]:
        """Return the command line's options for it."""
        options = ["--hsfmt-snapshot", self.snapshot] if self.snapshot else []
        return options + (["--hsfmt-layers", ",".join(map(str, self.layers))] if self.layers else [])


def train(
    config: str,
    overrides: Sequence[str] = (),
    *,
    source: Source = Source(),
    node_rank: int | None = None,
    plan_only: bool = False,
) -> int:
    """Train as `specforge train` does, on the dataset that `data.hidden_states_path` names; return the exit code.

    Starts processes for several GPUs as SpecForge does, or is one of those that torchrun started.

    Parameters
    ----------
    config
        SpecForge's YAML or JSON file.
    overrides
        `section.field=value` each.
    source
        What of the dataset.
    node_rank
        Of this node, where there are several.
    plan_only
        Print what would be started, and start nothing.

    Raises
    ------
    UsageError
        SpecForge is missing or another release; a configuration that it does not take; a run that is not a local
        offline one; a dataset that the drafter can't be trained on.
    NotFoundError
        No dataset or snapshot.
    StorageError
        The configuration, or a file that it names, can't be read.
    """
    _check_release()
    with _configuring(config, overrides):
        cfg = _specforge("config", "load_config")(config, list(overrides))
        _check_run(cfg)
        resolved = _specforge("application", "resolve_run")(cfg)
        plan = _specforge("launch_plan", "build_launch_plan")(
            cfg,
            algorithm=resolved.algorithm,
            config_path=config,
            overrides=list(overrides),
            node_rank=node_rank,
            worker_prefix=("--module", _MODULE, *source.options()),
            torchrun_prefix=(sys.executable, "-m", "torch.distributed.run"),
        )
    if plan_only:
        print(plan.render())  # noqa: T201  the answer
        return 0
    if plan.kind != "worker":
        return int(_specforge("launch_plan", "run_commands")(plan))
    try:
        with _specforge("cli", "_worker_signal_unwind")():
            _work(cfg, resolved.algorithm, source)
    except _specforge("cli", "_WorkerTermination") as received:
        return 128 + int(received.signum)
    return 0


def _work(cfg: Any, algorithm: Any, source: Source) -> None:
    """Be one of the training processes, with SpecForge's own lifecycle."""
    os.environ["FSDP_SHARDING"] = cfg.training.fsdp_sharding
    import_module("accelerate.utils").set_seed(cfg.training.seed)
    _specforge("cli", "_bootstrap_single_process_env")()
    cfg.validate_world_size(int(os.environ["WORLD_SIZE"]))
    _specforge("distributed", "init_distributed")(
        timeout=cfg.training.dist_timeout,
        tp_size=cfg.training.tp_size,
        sp_ulysses_size=cfg.training.sp_ulysses_size,
        sp_ring_size=cfg.training.sp_ring_size,
    )
    try:
        build_run(cfg, algorithm, source).run()
    finally:
        _specforge("distributed", "destroy_distributed")()


def build_run(cfg: Any, algorithm: Any, source: Source) -> Any:
    """Assemble SpecForge's TrainingRun of a configuration on a dataset; torch.distributed is initialised.

    Raises
    ------
    UsageError, NotFoundError
        As `train`.
    """
    bundle = _specforge("training.assembly", "build_model_bundle")(cfg, algorithm=algorithm)
    store = _open(cfg.data.hidden_states_path, cfg, algorithm, bundle, source)
    evaluated = cfg.data.eval_hidden_states_path
    eval_store = _open(evaluated, cfg, algorithm, bundle, source) if evaluated else None
    _agree([each.dataset.fingerprint for each in (store, eval_store) if each])
    _map_vocabulary(cfg, algorithm, bundle, store)
    logger = _specforge("training.assembly", "_configured_logger")(cfg)
    try:
        common = _specforge("training.assembly", "_common_launch_kwargs")(cfg, bundle, algorithm, logger=logger)
        trainer = _specforge("launch", "build_disagg_offline_runtime")(
            feature_store=store,
            refs=store.refs(run_id=cfg.run_id, ttt_length=cfg.training.ttt_length),
            draft_model=bundle.model,
            target_head=bundle.target_head,
            ttt_length=cfg.training.ttt_length,
            max_len=cfg.data.max_length,
            num_epochs=cfg.training.num_epochs,
            eval_data_factory=_evaluation(cfg, algorithm, eval_store, common) if eval_store else None,
            use_usp_preprocess=cfg.training.attention_backend == "usp",
            seed=cfg.training.seed,
            resume_from=cfg.training.resume_from,
            **common,
        )
    except BaseException:
        _specforge("training.assembly", "_close_configured_logger")(logger)
        raise
    return _specforge("training.assembly", "TrainingRun")(trainer=trainer)


def _open(url: str, cfg: Any, algorithm: Any, bundle: Any, source: Source) -> DatasetFeatureStore:
    config = _specforge("modeling.target.target_utils", "load_target_config")(
        cfg.model.target_model_path, cache_dir=cfg.model.cache_dir, trust_remote_code=cfg.model.trust_remote_code
    )
    outputs = bundle.capture_layers
    if outputs is None:
        outputs = algorithm.providers.model.resolve_capture_layers(cfg, bundle.draft_config, config)
    text_config = getattr(config, "text_config", config)
    layers = source.layers or hf_layers(outputs, text_config.model_type)
    if len(set(layers)) != len(outputs):
        raise UsageError.at("--hsfmt-layers", expected=f"an id for each of {list(outputs)}", got=f"{list(layers)}")
    store = DatasetFeatureStore(
        url,
        algorithm,
        layers=layers,
        target=Target(int(text_config.num_hidden_layers), bundle.target_hidden_size),
        max_length=cfg.data.max_length,
        snapshot=source.snapshot,
        modality=cfg.model.input_modality,
    )
    n_samples, layers = len(store.dataset), list(store.layers)
    _log.info("%s: %d samples, layers %s (%s)", url, n_samples, layers, store.dataset.fingerprint)
    return store


def _agree(fingerprints: list[str]) -> None:
    """Refuse ranks that see different snapshots: one would wait for the others at the end of its samples."""
    import torch.distributed as dist

    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, fingerprints)
    if any(each != fingerprints for each in seen):
        got = f"{sorted({', '.join(each) for each in seen})}"
        remedy = "name the snapshot: --hsfmt-snapshot FINGERPRINT"
        raise UsageError.at("snapshot", expected="the same one on all ranks", got=got, remedy=remedy)


def _map_vocabulary(cfg: Any, algorithm: Any, bundle: Any, store: DatasetFeatureStore) -> None:
    """Derive the drafter's vocabulary from the token ids and loss masks, where SpecForge derives it from its files."""
    mode = _specforge("algorithms.contracts", "FeatureMode").OFFLINE
    known = cfg.model.vocab_mapping_path or bundle.draft_vocab_size == bundle.target_vocab_size
    if known or mode not in algorithm.providers.vocab_mapping_modes:
        return
    _specforge("training.assembly", "_install_dataset_vocab_mapping")(
        cfg,
        bundle,
        counts=store.token_counts(bundle.target_vocab_size),
        dataset_identity=f"hsfmt:{store.dataset.content_digest}:{store.dataset.fingerprint}:{cfg.data.max_length}",
    )


def _evaluation(cfg: Any, algorithm: Any, store: DatasetFeatureStore, common: dict[str, Any]) -> Callable[[], Any]:
    """Return what makes a loader over the evaluation dataset, as SpecForge makes those over its files."""
    usp = cfg.training.attention_backend == "usp"
    collate, transform = _specforge("launch", "_offline_io")(
        algorithm,
        cfg.model.input_modality,
        cfg.data.max_length,
        ttt_length=cfg.training.ttt_length,
        use_usp_preprocess=usp,
    )
    refs = store.refs(run_id=f"{cfg.run_id}-eval", ttt_length=cfg.training.ttt_length)
    shard = _specforge("launch", "_shard_offline_refs")(refs, use_usp_preprocess=usp, shuffle=False)
    loader = _specforge("runtime.data_plane", "FeatureDataLoader")
    return lambda: loader(
        store,
        refs=shard,
        batch_size=cfg.training.batch_size,
        collate_fn=collate,
        per_sample_transform=transform,
        drop_last=False,
        strategy=algorithm.name,
        num_workers=common["dataloader_num_workers"],
    )


def _check_release() -> None:
    try:
        found = metadata.version("specforge")
    except metadata.PackageNotFoundError:
        found = "none"
    if found not in RELEASES:
        remedy = f"pip install specforge=={RELEASES[-1]} where this runs, or a newer hsfmt"
        raise UsageError.at("specforge", expected=" or ".join(RELEASES), got=found, remedy=remedy)


@contextmanager
def _configuring(config: str, overrides: Sequence[str]) -> Iterator[None]:
    """Turn what SpecForge raises about a configuration into one error that names what was given."""
    try:
        yield
    except (HsfmtError, ImportError):
        raise
    except OSError as error:
        where, got = str(error.filename or config), error.strerror or str(error)
        raise StorageError.at(where, expected="a readable file", got=got) from error
    except Exception as error:
        where = " ".join(["--config", config, *overrides])
        raise UsageError.at(where, expected="a configuration that SpecForge takes", got=_reason(error)) from error


def _reason(error: Exception) -> str:
    """Return what an error says; of pydantic's, which field and why, without its links."""
    if hasattr(error, "errors"):
        return "; ".join(": ".join(filter(None, (".".join(map(str, e["loc"])), e["msg"]))) for e in error.errors())
    return " ".join(str(error).split()) or type(error).__name__


def _check_run(cfg: Any) -> None:
    if cfg.mode != "offline":
        expected = "the dataset, and neither train_data_path nor prompts_path"
        raise UsageError.at("data.hidden_states_path", expected=expected, got="an online run")
    if cfg.deployment.mode != "local_colocated":
        expected = "local_colocated: the dataset is what trainers on several machines share already"
        raise UsageError.at("deployment.mode", expected=expected, got=cfg.deployment.mode)


def _specforge(module: str, name: str) -> Any:
    """Import a name of SpecForge's; what calls itself a known release may be another state of its sources."""
    found = import_module(f"specforge.{module}")
    if not hasattr(found, name):
        remedy = f"pip install specforge=={RELEASES[-1]}: this is no release, or a changed one"
        raise UsageError.at(f"specforge.{module}", expected=name, got="no such name", remedy=remedy)
    return getattr(found, name)
