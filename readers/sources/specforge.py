"""Sources `specforge-eagle3`, `specforge-dflash`, `specforge-dspark`: what SpecForge's prepare_hidden_states.py writes.

`rows_{a}-{b}/data_{i}.ckpt`, or `.ckpt.gz`, each a dict of a sample: input_ids and loss_mask [T], states [1, T, width].

* eagle3: aux_hidden_state, the captured layers side by side, and hidden_state, the last one after the final norm. Until
  July 2026 aux_hidden_state could be None; 0.1 left it out unless asked for it.
* dflash, and domino: hidden_states, the captured layers side by side, and no last state.
* dspark: as dflash, and target_last_hidden_states, the last state after the final norm.

Rows of a batch are stored with its padding, and under data parallelism the number of a file is not the row of the data
set: samples are joined by their token ids.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from hsfmt.readers.sources.base import Claim
from hsfmt.readers.sources.options import KeyMap
from hsfmt.readers.sources.torch_dicts import TorchDictSource

if TYPE_CHECKING:
    from hsfmt.readers.sources.torch_record import Record

_CAPTURED = (
    "SpecForge records no layer ids: they are the captured layers of its command line or draft config, each + 1 (it "
    "counts outputs of layers from 0)"
)
_POST = "SpecForge stores the input of the logits processor, which is after the final norm"
_NAME = re.compile(r"(?:.*/)?rows_[0-9]+-[0-9]+/data_[0-9]+\.ckpt(?:\.gz)?")


class SpecForgeEagle3Source(TorchDictSource):
    """Offline data of SpecForge for EAGLE-3."""

    name: ClassVar[str] = "specforge-eagle3"
    summary: ClassVar[str] = "SpecForge eagle3: .ckpt or .ckpt.gz with aux_hidden_state and hidden_state [1, T, ...]"
    program: ClassVar[str] = "SpecForge eagle3"
    roles: ClassVar[tuple[KeyMap, ...]] = (
        KeyMap(aux="aux_hidden_state", last="hidden_state"),
        KeyMap(last="hidden_state"),
    )
    layers_from: ClassVar[str] = f"{_CAPTURED}, then n; its default is 2,n//2,n-3,n for a model of n layers"
    default_layers: ClassVar[str] = "2,n//2,n-3,n"
    final_norm: ClassVar[str] = "post"
    final_norm_from: ClassVar[str] = _POST
    has_batches: ClassVar[bool] = True
    numbered: ClassVar[bool] = True

    @classmethod
    def claim_record(cls, record: Record) -> Claim | None:
        """Claim by keys and batch axis, which EAGLE's own files lack, and those of others in SpecForge's layout too."""
        from hsfmt.readers.sources.key_sets import describe

        roles = cls.roles_of(record)
        if roles is None:
            return None
        batched = all(getattr(record.entries[key], "ndim", 0) == 3 for key in (roles.aux, roles.last) if key)
        if roles.aux is None and not batched and "aux_hidden_state" not in record.none_keys:
            return None
        evidence = f"{record.where} with {describe(record)}"
        if not batched:
            evidence += "; SpecForge's own states have a batch axis, those that others write in its layout any norm"
        options = f"--layer-ids {cls.default_layers if roles.aux else 'n'}"
        return Claim(evidence, certain=batched, options=options)


class SpecForgeDFlashSource(TorchDictSource):
    """Offline data of SpecForge for DFlash and Domino."""

    name: ClassVar[str] = "specforge-dflash"
    summary: ClassVar[str] = (
        "SpecForge dflash and domino: .ckpt or .ckpt.gz with hidden_states [1, T, ...], no last state"
    )
    program: ClassVar[str] = "SpecForge dflash/domino"
    roles: ClassVar[tuple[KeyMap, ...]] = (KeyMap(hidden_states="hidden_states"),)
    layers_from: ClassVar[str] = _CAPTURED
    default_layers: ClassVar[str] = "IDS"
    final_norm: ClassVar[str] = "unknown"
    final_norm_from: ClassVar[str] = "files of this kind hold captured layers alone, and no state after the final norm"
    has_batches: ClassVar[bool] = True
    numbered: ClassVar[bool] = True

    @classmethod
    def claim_record(cls, record: Record) -> Claim | None:
        """Claim rows of states with a batch axis that the ids lack; certain in the folders that SpecForge makes."""
        from hsfmt.readers.sources.key_sets import describe, is_rows

        if cls.roles_of(record) is None or not is_rows(record, "hidden_states"):
            return None
        ids, states = record.entries.get("input_ids"), record.entries["hidden_states"]
        if getattr(ids, "ndim", 0) != 1 or states.ndim != 3 or "attention_mask" in record.entries:
            return None
        options = f"--layer-ids {cls.default_layers} --hidden-size N"
        certain = _NAME.fullmatch(record.where) is not None
        return Claim(f"{record.where} with {describe(record)}", certain=certain, options=options)


class SpecForgeDSparkSource(TorchDictSource):
    """Offline data of SpecForge for DSpark."""

    name: ClassVar[str] = "specforge-dspark"
    summary: ClassVar[str] = "SpecForge dspark: .ckpt or .ckpt.gz with hidden_states and target_last_hidden_states"
    program: ClassVar[str] = "SpecForge dspark"
    roles: ClassVar[tuple[KeyMap, ...]] = (KeyMap(aux="hidden_states", last="target_last_hidden_states"),)
    layers_from: ClassVar[str] = f"{_CAPTURED}, then n"
    default_layers: ClassVar[str] = "IDS,n"
    final_norm: ClassVar[str] = "post"
    final_norm_from: ClassVar[str] = _POST
    has_batches: ClassVar[bool] = True
    numbered: ClassVar[bool] = True

    @classmethod
    def claim_record(cls, record: Record) -> Claim | None:
        """Claim by the keys."""
        return cls.claim_keys(record)
