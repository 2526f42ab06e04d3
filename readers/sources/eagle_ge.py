"""Source `eagle-ge`: what the ge_data scripts of SafeAILab/EAGLE write for EAGLE-1 and 2.

`sharegpt_{a}_{b}_mufp16/{gpu}/data_{n}.ckpt`, a dict of input_ids and loss_mask [T] and of hidden_state [T, H], the
last one, after the final norm. A file's number is that of the files before it: after one was deleted, the next write
overwrites another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hsfmt.readers.sources.base import Claim
from hsfmt.readers.sources.options import KeyMap
from hsfmt.readers.sources.torch_dicts import TorchDictSource

if TYPE_CHECKING:
    from hsfmt.readers.sources.torch_record import Record


class EagleGeSource(TorchDictSource):
    """Training data of EAGLE-1 and 2."""

    name: ClassVar[str] = "eagle-ge"
    summary: ClassVar[str] = "SafeAILab/EAGLE ge_data: data_{n}.ckpt with hidden_state [T, H], the last state"
    program: ClassVar[str] = "SafeAILab/EAGLE ge_data"
    roles: ClassVar[tuple[KeyMap, ...]] = (KeyMap(last="hidden_state"),)
    layers_from: ClassVar[str] = "EAGLE stores the state after the last layer: n of a model of n layers"
    default_layers: ClassVar[str] = "n"
    final_norm: ClassVar[str] = "post"
    final_norm_from: ClassVar[str] = "EAGLE stores transformers' last hidden state, which is after the final norm"

    @classmethod
    def claim_record(cls, record: Record) -> Claim | None:
        """Claim by the one key and its two axes."""
        from hsfmt.readers.sources.key_sets import describe

        axes = getattr(record.entries.get("hidden_state"), "ndim", 0)
        if cls.roles_of(record) is None or axes != 2 or "aux_hidden_state" in record.none_keys:
            return None
        options = f"--layer-ids {cls.default_layers}"
        return Claim(f"{record.where} with {describe(record)}", certain=True, options=options)
