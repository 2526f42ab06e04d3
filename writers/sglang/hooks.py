"""The glue: what is hooked in SGLang, and how its objects become ours.

All private knowledge of SGLang is here and in auxiliary.py. Written for and tested with 0.5.23.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hsfmt.errors import UsageError
from hsfmt.writers.capturing.ask import KEY, Ask
from hsfmt.writers.capturing.assembler import Slice
from hsfmt.writers.sglang.auxiliary import DeviceStates
from hsfmt.writers.sglang.capture import Capture
from hsfmt.writers.sglang.meaning import Meaning, resolved_layers
from hsfmt.writers.sglang.options import CaptureOptions, read_options
from hsfmt.writers.sglang.self_check import check_applied, check_server, check_targets, check_version

_log = logging.getLogger("hsfmt")
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
_FORWARD = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"
_WEIGHTS = tuple(f"{_UPDATER}.update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc"))
_HEALTH_CHECK = "HEALTH_CHECK"


def install(environment: Mapping[str, str]) -> Plugin:
    """Check SGLang and register the hooks.

    Raises
    ------
    UsageError
        Options, or an SGLang, that can't be.
    """
    options = read_options(environment)
    check_version(_engine_version())
    plugin = Plugin(options)
    check_targets({target: parameters for target, (_, _, parameters) in plugin.hooks.items()})
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, (kind, hook, _) in plugin.hooks.items():
        HookRegistry.register(target, hook, HookType[kind])
    return plugin


class Plugin:
    """The hooks of one process. Only schedulers get as far as a capture; of those, one a tensor-parallel group."""

    def __init__(self, options: CaptureOptions) -> None:
        self.options = options
        self.capture: Capture | None = None
        self._meaning: Meaning | None = None
        self._seen_rows = False
        self._changed_model = False
        # Target -> (kind, hook, parameters that the hook relies on).
        self.hooks: dict[str, tuple[str, Callable[..., Any], tuple[str, ...]]] = {
            _FORWARD: ("AROUND", self._around_forward, ("batch",)),
            f"{_SCHEDULER}.__init__": ("AFTER", self._after_scheduler, ()),
            f"{_SCHEDULER}.run_event_loop": ("AROUND", self._around_event_loop, ()),
            f"{_SCHEDULER}.flush_cache": ("AFTER", self._after_flush_cache, ()),
            f"{_SCHEDULER}.on_idle": ("AFTER", self._after_idle, ()),
            f"{_SCHEDULER}.get_internal_state": ("AFTER", self._after_internal_state, ("recv_req",)),
            f"{_STREAMER}.is_request_level_customized_info_key": ("AROUND", _around_level, ("key",)),
            **dict.fromkeys(_WEIGHTS, ("AFTER", self._after_new_weights, ("recv_req",))),
        }

    # --- start and end ---

    def _after_scheduler(self, _result: object, scheduler: Any, *_: object, **__: object) -> None:
        """Check the server, and open the dataset where this rank is to write; what this raises ends the server."""
        from sglang.srt.runtime_context import get_context, get_parallel

        check_applied({target: parameters for target, (_, _, parameters) in self.hooks.items()})
        arguments = get_context().resolved_server_args_dict()
        check_server(arguments, is_generation=scheduler.is_generation)
        runner = scheduler.tp_worker.model_runner
        config = runner.model_config
        n_layers = int(config.num_hidden_layers) * int(getattr(config.hf_text_config, "num_loops", 1) or 1)
        meaning = Meaning(
            captured=resolved_layers(runner.model, n_layers),
            n_layers=n_layers,
            hidden_size=int(config.hidden_size),
            dtype=str(config.dtype).removeprefix("torch."),
            final=self.options.final,
        )
        parallel = get_parallel()
        if parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0:
            producer = _producer(arguments, runner, meaning)
            self.capture = Capture(self.options, meaning, _identity(self.options, arguments), producer)
            _log.info("hidden states are captured: %s", self.capture.status())
        self._meaning = meaning
        scheduler.hsfmt_flush = self._flush

    def _around_event_loop(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Commit what is whole when the loop ends, by a signal or an error."""
        try:
            return original(*args, **kwargs)
        finally:
            if self.capture is not None:
                self.capture.close()

    # --- while serving ---

    def _around_forward(
        self, original: Callable[..., Any], worker: Any, batch: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        result = original(worker, batch, *args, **kwargs)
        output = result.logits_output
        if self._meaning is None or batch is None or output is None or worker.is_draft_worker:
            return result
        if not batch.forward_mode.is_extend():
            return result
        if not self._seen_rows:
            self._check_first_rows(batch, output)
        try:
            self._attach(batch, result, output)
        except Exception:  # noqa: BLE001  never into the scheduler
            if self.capture is not None:
                self.capture.fault("a forward")
        # Nobody else needs them: no second copy to the host, no text of a million numbers.
        if not batch.return_hidden_states:
            output.hidden_states = None
        output.last_hidden_states = None
        return result

    def _check_first_rows(self, batch: Any, output: Any) -> None:
        """End the server at its first forward, usually its own warm-up, when the tensors are not what was resolved.

        Raises
        ------
        UsageError
            They are not.
        """
        problem = self._problem_of(batch, output)
        if problem:
            remedy = "this model's capture is not what hsfmt expects; it can't be used"
            raise UsageError.at("first forward", expected="the resolved layers", got=problem, remedy=remedy)
        self._seen_rows = True

    def _problem_of(self, batch: Any, output: Any) -> str:
        assert self._meaning is not None
        aux, final = output.hidden_states, output.last_hidden_states
        if aux is None:
            return "no auxiliary hidden states"
        if getattr(output, "hidden_states_token_indices", None) is not None:
            return "states of some of the rows alone"
        if self._meaning.final and final is not None and final.dtype != aux.dtype:
            return f"final states of {final.dtype} beside auxiliary states of {aux.dtype}"
        dtype = str(aux.dtype).removeprefix("torch.")
        return self._meaning.check_rows(
            aux.shape, None if final is None else final.shape, dtype, sum(batch.extend_lens)
        )

    def _attach(self, batch: Any, result: Any, output: Any) -> None:
        capture = self.capture
        if capture is None:
            return
        capture.tend(_is_finished)
        spans, assemblies = capture.launch(self._slices(batch))
        if not assemblies:
            return
        problem = self._problem_of(batch, output)
        if problem:
            for span in spans:
                capture.refuse(span.assembly, "error", problem)
            spans = []
        tensors = [output.hidden_states, output.last_hidden_states][: 1 + capture.meaning.final]
        try:
            states = DeviceStates(capture, tensors, spans, assemblies, clone=bool(result.can_run_cuda_graph))
        except Exception:  # no memory for the clones
            for span in spans:
                capture.refuse(span.assembly, "copy_failed")
            raise
        if result.delay_sample_func is None:
            _append(output, states)
        else:
            result.delay_sample_func = _then_append(result.delay_sample_func, states)

    def _slices(self, batch: Any) -> Iterator[Slice]:
        offset = 0
        for request, n_tokens, start in zip(batch.reqs, batch.extend_lens, batch.prefix_lens, strict=True):
            ask = self._ask_of(request)
            if ask is not None:
                obstacle = "changed_model" if self._changed_model else _obstacle(request)
                yield Slice(request, ask, request.origin_input_ids, int(start), int(n_tokens), offset, obstacle)
            offset += int(n_tokens)

    def _ask_of(self, request: Any) -> Any:
        if self.options.capture == "all":
            return None if request.rid.startswith(_HEALTH_CHECK) else Ask(request.rid)
        return (request.sampling_params.custom_params or {}).get(KEY)

    def _after_idle(self, *_: object, **__: object) -> None:
        if self.capture is not None:
            self.capture.tend(_is_finished)

    def _after_new_weights(self, *_: object, **__: object) -> None:
        if not self._changed_model:
            _log.error("hidden states: the weights were changed; nothing more is captured by this server")
        self._changed_model = True

    # --- control ---

    def _flush(self, **_: object) -> None:
        """RPC `hsfmt_flush`, called on every rank.

        Raises
        ------
        RuntimeError
            Something that was accepted is not durable.
        """
        if self.capture is not None and not (report := self.capture.flush()).ok:
            raise RuntimeError(f"hsfmt: {report.problem}")

    def _after_flush_cache(self, result: bool, *_: object, **__: object) -> bool:  # noqa: FBT001  SGLang passes it
        """Commit; the reply says no unless all accepted samples are durable."""
        return result if self.capture is None else self.capture.flush().ok and result

    def _after_internal_state(self, result: Any, *_: object, **__: object) -> None:
        if self.capture is not None:
            result.internal_state[KEY] = self.capture.status()


def _engine_version() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:  # run from its source tree
        from sglang.version import __version__

        return str(__version__)


def _around_level(original: Callable[..., bool], streamer: Any, key: str) -> bool:
    """Say that ours is one value a request, not one a token."""
    return key == KEY or original(streamer, key)


def _append(output: Any, states: DeviceStates) -> None:
    from sglang.srt.managers.auxiliary_output import append_auxiliary_output

    output.auxiliary_device_output = append_auxiliary_output(output.auxiliary_device_output, states)


def _then_append(sample: Callable[[], Any], states: DeviceStates) -> Callable[[], Any]:
    """Attach after a delayed sampling, which clears what was attached before."""

    def sample_and_append() -> Any:
        result = sample()
        _append(result.logits_output, states)
        return result

    return sample_and_append


def _is_finished(request: Any) -> bool:
    return bool(request.finished())


def _obstacle(request: Any) -> str:
    if request.finished() or request.to_finish is not None:
        return "aborted"
    if request.lora_id is not None:
        return "lora"
    if any(
        value is not None
        for value in (request.multimodal_inputs, request.input_embeds, request.positional_embed_overrides)
    ):
        return "not_tokens"
    return ""


def _identity(options: CaptureOptions, arguments: Mapping[str, Any]) -> dict[str, str]:
    name = options.model or str(arguments.get("served_model_name") or arguments["model_path"])
    revision = options.model_revision or str(arguments.get("revision") or "")
    return {"name": name, **({"revision": revision} if revision else {})}


def _producer(arguments: Mapping[str, Any], runner: Any, meaning: Meaning) -> dict[str, Any]:
    """Return what the parts say about this server. The attention backend is there since it changes the states."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    requested = arguments.get("return_aux_hidden_state_layer_ids")
    kept = (
        "model_path", "revision", "quantization", "kv_cache_dtype", "chunked_prefill_size", "disable_radix_cache",
        "enable_mixed_chunk", "disable_overlap_schedule", "tp_size", "dp_size", "device", "weight_version",
    )  # fmt: skip
    return {
        "engine": f"sglang {_engine_version()}",
        "torch": version("torch"),
        "model_class": type(runner.model).__name__,
        "attention_backend": str(runner.prefill_attention_backend_str),
        "layer_convention": str(arguments.get("aux_hidden_state_capture")),
        "requested_layers": "default" if requested is None else [int(layer) for layer in requested],
        "resolved_layers": list(meaning.captured),
        "final_norm": meaning.final_norm,
        "tp_rank": int(parallel.tp_rank),
        "dp_rank": int(parallel.dp_rank or parallel.attn_dp_rank),
        "server": {name: value for name in kept if isinstance(value := arguments.get(name), str | int)},
    }
