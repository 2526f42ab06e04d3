"""SGLang's auxiliary-output protocol: rows that stay on the device until the scheduler copies them, then come back.

The copy is SGLang's own: pinned, asynchronous, on its copy stream, overlapping the next forward. `consume` runs in the
scheduler, right before the responses of the batch go out, for chunks in the middle of a prompt too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt.writers.capturing.ask import KEY
from hsfmt.writers.capturing.assembler import Assembly, Span
from hsfmt.writers.sglang.capture import Capture

Copy = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent rows of a forward that are copied together: `spans` lie in them one after the other."""

    offset: int
    n_rows: int
    spans: tuple[Span, ...]


def runs(spans: Sequence[Span]) -> list[Run]:
    """Return what to copy. Rows of a prompt that goes on are copied by themselves: they stay in memory for longer."""
    groups: list[list[Span]] = []
    for span in spans:
        last = groups[-1][-1] if groups else None
        adjacent = last is not None and last.offset + last.n_tokens == span.offset
        if last is not None and adjacent and last.is_last and span.is_last:
            groups[-1].append(span)
        else:
            groups.append([span])
    return [Run(group[0].offset, sum(span.n_tokens for span in group), tuple(group)) for group in groups]


class DeviceStates:
    """The rows of one forward, on the device.

    Parameters
    ----------
    capture
        Where they go.
    tensors
        Torch tensors [token, …]: the auxiliary states, and the final ones where they are wanted.
    spans, assemblies
        What `Capture.launch` returned for the forward.
    clone
        Whether the tensors belong to a CUDA graph, whose next replay overwrites them before they are copied.
    """

    def __init__(
        self,
        capture: Capture,
        tensors: Sequence[Any],
        spans: Sequence[Span],
        assemblies: Sequence[Assembly],
        *,
        clone: bool,
    ) -> None:
        self._capture = capture
        self._assemblies = tuple(assemblies)
        # Rows of requests that did not ask for a capture stay where they are.
        self._rows = []
        for run in runs(spans):
            rows = [tensor[run.offset : run.offset + run.n_rows] for tensor in tensors]
            self._rows.append((run, [row.clone() for row in rows] if clone else rows))

    def copy_to_host(self, copy_tensor: Copy) -> HostStates:
        """Start the copies; called by SGLang on its copy stream."""
        copied = []
        for run, rows in self._rows:
            try:
                copied.append((run, [copy_tensor(row) for row in rows]))
            except Exception:  # noqa: BLE001  no memory for the copy must not end the server
                self._capture.fault("the copy to the host")
                copied.append((run, []))
        self._rows = []
        return HostStates(self._capture, copied, self._assemblies)


class HostStates:
    """The same rows on the host."""

    def __init__(self, capture: Capture, rows: list[tuple[Run, list[Any]]], assemblies: tuple[Assembly, ...]) -> None:
        self._capture = capture
        self._rows = rows
        self._assemblies = assemblies

    def consume(self, batch: object, commits: object) -> None:  # noqa: ARG002  the protocol's parameters
        """Hand the rows on, and say to each request whose sample is settled what became of it."""
        try:
            for run, tensors in self._rows:
                self._hand_on(run, [patterns(tensor) for tensor in tensors])
            for assembly in self._assemblies:
                _acknowledge(assembly)
        except Exception:  # noqa: BLE001  an exception here would end the server
            self._capture.fault("taking rows")
            for assembly in self._assemblies:
                self._capture.refuse(assembly, "error", "a fault in the plugin: see the server's log")
        finally:
            self._rows = []

    def _hand_on(self, run: Run, arrays: list[npt.NDArray[Any]]) -> None:
        for span in run.spans:
            start = span.offset - run.offset
            if arrays:
                self._capture.receive(span, [array[start : start + span.n_tokens] for array in arrays])
            else:
                self._capture.refuse(span.assembly, "copy_failed")


def patterns(tensor: Any) -> npt.NDArray[Any]:
    """Return a host tensor as a NumPy view; NumPy has no bfloat16, whose bit patterns come as uint16."""
    if str(tensor.dtype) == "torch.bfloat16":
        import torch

        return np.asarray(tensor.view(torch.int16).numpy()).view(np.uint16)
    return np.asarray(tensor.numpy())


def _acknowledge(assembly: Assembly) -> None:
    """Put what became of a sample into its request's response (`meta_info`)."""
    answer = assembly.acknowledgement()
    request = assembly.request()
    if answer is not None and request is not None:
        request.customized_info = {**(request.customized_info or {}), KEY: [answer]}
