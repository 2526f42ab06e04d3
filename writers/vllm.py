"""vLLM's connector: subclass of its ExampleHiddenStatesConnector that writes into a dataset.

vLLM loads it by `kv_connector_module_path`; docs/vllm.md is the manual. What vLLM's own connector does stays as it is:
when states are taken out of the KV cache, which ones, and, where `shared_storage_path` says so, its file for each
request. Here each request's states go to a DatasetWriter besides. Nothing is raised into the engine once it serves.
"""

from __future__ import annotations

import json
import logging
import os
import time
import weakref
from concurrent.futures import wait
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as stock
from vllm.logger import init_logger

from hsfmt.dtypes import STATE_DTYPES, dtype
from hsfmt.errors import UsageError
from hsfmt.writers.capturing.assembler import Assembly
from hsfmt.writers.capturing.background import BackgroundWriter
from hsfmt.writers.capturing.counters import Counters
from hsfmt.writers.capturing.room import Room
from hsfmt.writers.dataset_writer import DatasetWriter
from hsfmt.writers.samples import patterns
from hsfmt.writers.vllm_request import Save, check_layers, plan_save, read_options

logger = init_logger("vllm.hsfmt")
_CLOSE_SECONDS = 20.0


class _Passed:
    """Stands for the event of a copy that is not made."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _Target(str):
    """A file name that carries the sample whose states are on their way to it."""

    __slots__ = ("sample",)
    sample: Assembly | None


class HsfmtConnector(stock.ExampleHiddenStatesConnector):  # type: ignore[misc]  # vLLM is Any where it is not installed
    """Writes the hidden states of each finished request into a dataset.

    Raises
    ------
    UsageError
        Options, layers or a vLLM that it can't work with.
    HsfmtError
        The dataset can't be written to, or means something else than this server's states.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        _check_stock()
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._options = read_options(extra)
        super().__init__(vllm_config, role, kv_cache_config)
        self._keeps_files = bool(extra.get("shared_storage_path"))
        if not self._keeps_files:
            self.use_lock = False
        draft = vllm_config.speculative_config.draft_model_config.hf_config
        self._requested = list(draft.eagle_aux_hidden_state_layer_ids)
        self._layers = check_layers(self._requested, vllm_config.model_config.hf_text_config.num_hidden_layers)
        self._background: BackgroundWriter | None = None
        self._counters = Counters()
        self._room = Room(int(self._options.queue_nbytes))
        self._deadline = 0.0
        self._reported = (time.monotonic(), 0, 0)

    # --- scheduler ---------------------------------------------------------------------------------------------------

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Plan what becomes of a finished request, and tell the client."""
        delay, params = super().request_finished(request, block_ids)
        pending = self._pending_saves.get(request.request_id)
        if pending is None:
            return delay, params
        try:
            save = plan_save(pending, request, self._options.capture)
        except Exception as error:
            logger.exception("hsfmt: a fault in planning what becomes of %s", request.request_id)
            save = Save(pending.req_id, pending.filename, pending.token_ids, pending.block_ids, pending.req_id)
            save.reason, save.detail = "error", repr(error)
        self._pending_saves[request.request_id] = save
        told = {"hsfmt": save.answer(self._options.path)}
        return delay, {**(params or {}), **told} if self._wants_file(save) else told

    def _wants_file(self, save: Save) -> bool:
        # Of a prompt that was not computed to its end vLLM's own connector writes a file that is short.
        return self._keeps_files and save.reason not in ("aborted", "gap") and not (save.flush and not save.sample_id)

    # --- worker ------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Open the dataset, now that it is known what the states are and which rank writes."""
        super().register_kv_caches(kv_caches)
        if not self._is_tp_rank_zero:
            return
        # By vLLM's own function, since the order of the cache's axes changed between releases.
        first_slot = self._kv_cache.new_zeros(1).long()
        _, n_layers, hidden_size = stock.extract_from_kv_cache(self._kv_cache, first_slot, 1).shape
        self._dtype = str(self._kv_cache.dtype).removeprefix("torch.")
        if n_layers != len(self._layers) or self._dtype not in STATE_DTYPES:
            got = f"{n_layers} of {self._dtype}"
            raise UsageError.at("hidden-state cache", expected=f"{len(self._layers)} layers", got=got)
        self._row_nbytes = n_layers * hidden_size * self._kv_cache.element_size()
        _show_our_log()
        self._hidden_size = hidden_size
        self._background = BackgroundWriter(self._open_writer, self._room, self._counters, self._options.retry_seconds)
        logger.info("hsfmt: layers %s of width %d go to %s", self._layers, hidden_size, self._options.path)

    def _open_writer(self) -> DatasetWriter:
        options, model = self._options, self._vllm_config.model_config
        return DatasetWriter(
            options.path,
            layers=self._layers,
            hidden_size=self._hidden_size,
            final_norm="pre",
            dtype=self._dtype,
            model=options.model or model.model,
            tokenizer=options.tokenizer or model.tokenizer,
            codec=options.codec,
            threads=options.threads,
            part_nbytes=options.part_nbytes,
            part_seconds=options.part_seconds,
            producer=self._producer(),
            seal=False,
            storage_options=options.storage_options,
        )

    def _producer(self) -> dict[str, Any]:
        config = self._vllm_config
        return {
            "engine": f"vllm {vllm.__version__}",
            "connector": f"{type(self).__module__}.{type(self).__name__}",
            "attention_backend": sorted(_attention_backends(config)),
            "requested_layers": self._requested,
            "layer_convention": "state after that many decoder layers",
            "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        }

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Take the states of finished requests out of the KV cache; waits for room at most `block_seconds`."""
        self._deadline = time.monotonic() + self._options.block_seconds
        found: tuple[set[str] | None, set[str] | None] = super().get_finished(finished_req_ids)
        self._report()
        return found

    def _submit_async_write(self, pending: Save) -> None:
        if not self._is_tp_rank_zero:
            return
        sample = self._take(pending)
        if sample is not None or self._wants_file(pending):
            pending.filename = target = _Target(pending.filename)
            target.sample = sample
            super()._submit_async_write(pending)
        else:
            self._req_copy_events[pending.req_id] = _Passed()
        if pending.flush and self._background is not None:
            self._executor.submit(self._flush, list(self._req_futures.values()))

    def _take(self, pending: Save) -> Assembly | None:
        """Return the sample, with room for it taken; None when it is not to be stored."""
        if self._background is None or not pending.sample_id:
            return None
        self._counters.add(asked=1)
        nbytes = len(pending.token_ids) * self._row_nbytes
        reason, detail = self._obstacle(self._background, pending, nbytes)
        if reason:
            self._counters.refuse(reason)
            logger.warning("hsfmt: sample %r is not stored (%s): %s", pending.sample_id, reason, detail)
            return None
        ids = pending.token_ids.numpy()
        return Assembly(weakref.ref(self), pending.sample_id, pending.ask, ids, nbytes, "accepted")

    def _obstacle(self, background: BackgroundWriter, pending: Save, nbytes: int) -> tuple[str, str]:
        """Return why a sample can't be taken, ("", "") when there is room for it now."""
        if pending.ask is None:
            return pending.reason, pending.detail
        if background.is_taken(pending.sample_id):
            return "duplicate", "a sample of this id is in the dataset or on its way there"
        if nbytes > self._room.limit:
            return "too_large", f"{nbytes} bytes of states, where queue_nbytes is {self._room.limit}"
        if not self._room.take(nbytes, self._deadline):
            return "queue_full", "the storage is slower than the engine"
        return "", ""

    def _write_tensors(  # static in vLLM, where it is called through the object all the same
        self, tensors: dict[str, Any], event: Any, filename: str, lock_fd: int | None
    ) -> None:
        sample = getattr(filename, "sample", None)
        try:
            event.synchronize()
        except BaseException:
            if lock_fd is not None:
                os.close(lock_fd)
            if sample is not None:
                self._room.give(sample.nbytes)
                self._counters.refuse("copy_failed")
                logger.exception("hsfmt: sample %r is not stored", sample.sample_id)
            raise
        try:
            if self._keeps_files:
                super()._write_tensors(tensors, event, str(filename), lock_fd)
        finally:
            if sample is not None and self._background is not None:
                where = f"sample {sample.sample_id!r}"
                sample.pieces = [[patterns(tensors["hidden_states"], dtype(self._dtype), where)]]
                self._counters.add(accepted=1)
                self._background.submit(sample)

    def _flush(self, earlier: list[Any]) -> None:
        """Make durable what came before; in a thread of the pool, where all of `earlier` have been started."""
        wait(earlier)
        assert self._background is not None
        report = self._background.flush(self._options.flush_seconds)
        say = logger.info if report.ok else logger.error
        say("hsfmt: flush %s; %d durable %s", "done" if report.ok else "FAILED", report.n_durable, report.problem)

    def _report(self) -> None:
        """Log a status line now and then, while there is something new."""
        now, (at, nbytes, asked) = time.monotonic(), self._reported
        counters = self._counters
        if counters.asked == asked or now - at < self._options.status_seconds:
            return
        speed = (counters.nbytes - nbytes) / (now - at) / 1e6
        self._reported = (now, counters.nbytes, counters.asked)
        used, most, limit = (n / 1e6 for n in (self._room.used, self._room.high_water, self._room.limit))
        counts = json.dumps(counters.to_json())
        logger.info("hsfmt: %s; %.1f MB/s; queue %.0f MB, at most %.0f of %.0f", counts, speed, used, most, limit)

    def shutdown(self) -> None:
        """Commit what was accepted; vLLM calls it when it ends in order."""
        super().shutdown()
        self._executor.shutdown(wait=True)
        if self._background is not None:
            report = self._background.close(_CLOSE_SECONDS)
            counts = json.dumps(self._counters.to_json())
            logger.info("hsfmt: closed, %d samples durable %s %s", report.n_durable, report.problem, counts)


def _check_stock() -> None:
    """Refuse a vLLM whose connector works in another way than the one that this class builds on.

    Raises
    ------
    UsageError
        It is older than 0.24, which wrote at each step, or has changed since.
    """
    names = ("_submit_async_write", "_write_tensors", "request_finished", "get_finished", "register_kv_caches")
    missing = [name for name in names if not hasattr(stock.ExampleHiddenStatesConnector, name)]
    if missing:
        expected = "a hidden-states connector that writes once a request, as vLLM 0.26 to 0.33 have it"
        got = f"vllm {vllm.__version__} without {', '.join(missing)}"
        raise UsageError.at("vllm", expected=expected, got=got, remedy="see the version table in docs/vllm.md")


def _attention_backends(config: Any) -> set[str]:
    """Return the names of the attention backends; they differ in how they round."""
    layers = config.compilation_config.static_forward_context.values()
    backends = (getattr(layer, "attn_backend", None) for layer in layers)
    return {backend.get_name() for backend in backends if backend is not None} - {"CACHE_ONLY_ATTN"}


def _show_our_log() -> None:
    """Let what the package logs come out where vLLM's own lines do."""
    ours = logging.getLogger("hsfmt")
    if not ours.handlers:
        for handler in logging.getLogger("vllm").handlers:
            ours.addHandler(handler)
        ours.setLevel(logging.INFO)
