"""Sources `angelslim-eagle3` and `angelslim-dflash`: what Tencent's AngelSlim writes, all with a batch axis of 1.

* eagle3: `rank_{r}/rows_{a}-{b}/data_{i}.ckpt` (i counts on each rank, so the rank is part of the sample's id):
  hidden_states [1, T, 3H] are the auxiliary ones, target_hiddens [1, T, H] the last one after the final norm. Models
  that see have inputs_embeds [1, T, H] and position_ids [3, 1, T] or None too, which become columns.
* dflash: `[shard_{k}/]sample_{i}_rank{r}.ckpt` with hidden_states [1, T, A*H] and an attention mask, which becomes a
  column.
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
    "AngelSlim records no layer ids: they are the captured layers, each + 1 (it counts outputs of layers from 0)"
)
_DFLASH_NAME = re.compile(r"(?:.*/)?sample_[0-9]+_rank[0-9]+\.ckpt")


class AngelSlimEagle3Source(TorchDictSource):
    """Offline data of AngelSlim for EAGLE-3."""

    name: ClassVar[str] = "angelslim-eagle3"
    summary: ClassVar[str] = (
        "AngelSlim eagle3: rank_{r}/rows_{a}-{b}/data_{i}.ckpt with hidden_states and target_hiddens"
    )
    program: ClassVar[str] = "AngelSlim eagle3"
    roles: ClassVar[tuple[KeyMap, ...]] = (KeyMap(aux="hidden_states", last="target_hiddens"),)
    columns: ClassVar[tuple[str, ...]] = ("inputs_embeds", "position_ids", "attention_mask")
    layers_from: ClassVar[str] = f"{_CAPTURED}, then n; its default is 2,n//2,n-3,n for a model of n layers"
    default_layers: ClassVar[str] = "2,n//2,n-3,n"
    final_norm: ClassVar[str] = "post"
    final_norm_from: ClassVar[str] = "AngelSlim stores the last hidden state after the final norm"
    has_batches: ClassVar[bool] = True
    numbered: ClassVar[bool] = True

    @classmethod
    def claim_record(cls, record: Record) -> Claim | None:
        """Claim by the keys."""
        return cls.claim_keys(record)


class AngelSlimDFlashSource(TorchDictSource):
    """Offline data of AngelSlim for DFlash."""

    name: ClassVar[str] = "angelslim-dflash"
    summary: ClassVar[str] = (
        "AngelSlim dflash: sample_{i}_rank{r}.ckpt with hidden_states [1, T, ...] and attention_mask"
    )
    program: ClassVar[str] = "AngelSlim dflash"
    roles: ClassVar[tuple[KeyMap, ...]] = (KeyMap(hidden_states="hidden_states"),)
    columns: ClassVar[tuple[str, ...]] = ("attention_mask",)
    layers_from: ClassVar[str] = _CAPTURED
    default_layers: ClassVar[str] = "IDS"
    final_norm: ClassVar[str] = "unknown"
    final_norm_from: ClassVar[str] = "files of this kind hold captured layers alone, and no state after the final norm"
    has_batches: ClassVar[bool] = True

    @classmethod
    def claim_record(cls, record: Record) -> Claim | None:
        """Claim rows of states with an attention mask or a batch axis of the ids; certain by the files' names."""
        from hsfmt.readers.sources.key_sets import describe, is_rows

        if cls.roles_of(record) is None or not is_rows(record, "hidden_states"):
            return None
        ids, states = record.entries.get("input_ids"), record.entries["hidden_states"]
        named = _DFLASH_NAME.fullmatch(record.where) is not None
        if states.ndim != 3 or not (named or "attention_mask" in record.entries or getattr(ids, "ndim", 0) == 2):
            return None
        options = f"--layer-ids {cls.default_layers} --hidden-size N"
        return Claim(f"{record.where} with {describe(record)}", certain=named, options=options)
