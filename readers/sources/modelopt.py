"""Sources `modelopt-hf`, `modelopt-vllm`, `modelopt-trtllm`: what Model-Optimizer's collect_hidden_states writes.

`{conversation_id}.pt`, a dict of input_ids [T], aux_hidden_states [T, A*H] (layers side by side, or [0] for none),
hidden_states [T, H], the last one, conversation_id, and loss_mask [T], which TRT-LLM's lack and all those of older
versions. The keys are the same and the meaning is not:

* hf and trtllm take the last state after the final norm, vllm before it. No file of theirs says so; a file that does,
  under `hidden_states_prenorm`, which ModelOpt's reader heeds, is taken at its word.
* vllm leaves both states as strided views of one storage [T, L, H], which the others never do. Files without that may
  be anyone's, older ones of vllm too, so that the user has to say whose they are; a folder is of one kind only.
* trtllm's raw files `dp_{r}_{n}.pt` are a list of one dict with hidden_state and id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hsfmt.errors import SourceError
from hsfmt.readers.sources.base import Claim
from hsfmt.readers.sources.options import KeyMap
from hsfmt.readers.sources.torch_dicts import TorchDictSource

if TYPE_CHECKING:
    from hsfmt.readers.sources.torch_record import Record

_ROLES = KeyMap(aux="aux_hidden_states", last="hidden_states")
_LAST_ROLES = KeyMap(last="hidden_states")
_RAW_ROLES = KeyMap(aux="aux_hidden_states", last="hidden_state")
_PRENORM = "hidden_states_prenorm"
_AS_YOU_SAY = "if you know better --from pt --map aux=aux_hidden_states,last=hidden_states --final-norm post"
_OUTPUTS = (
    "ModelOpt records no layer ids: they are its --aux-layers, each + 1 (it counts outputs of layers from 0), then n; "
    "its default is 2,n//2,n-3,n for a model of n layers"
)


class ModelOptHfSource(TorchDictSource):
    """Hidden states that ModelOpt collected with transformers."""

    name: ClassVar[str] = "modelopt-hf"
    summary: ClassVar[str] = "ModelOpt (HF): {conversation}.pt with aux_hidden_states and hidden_states, post-norm"
    program: ClassVar[str] = "ModelOpt (HF)"
    roles: ClassVar[tuple[KeyMap, ...]] = (_ROLES, _LAST_ROLES)
    layers_from: ClassVar[str] = _OUTPUTS
    default_layers: ClassVar[str] = "2,n//2,n-3,n"
    final_norm: ClassVar[str] = "post"
    final_norm_from: ClassVar[str] = "transformers' last hidden state is after the final norm"

    @classmethod
    def claim_record(cls, record: Record) -> Claim | None:
        """Claim files whose states are apart; never for certain, as vLLM's may be so as well."""
        if not _has_keys(record) or _shares_storage(record) or _prenorm(record):
            return None
        how = "hidden_states after the final norm if transformers made them"
        return cls.claim_keys(record, certain=_prenorm(record) is False, how=how)

    def _check_state(self, record: Record) -> None:
        _check_said(record, prenorm=False, remedy="read them with --from modelopt-vllm, from a folder of their own")
        if _shares_storage(record):
            raise SourceError.at(
                record.where,
                expected=f"states with storages of their own, as {self.program} writes them",
                got="views of one storage, as ModelOpt's vLLM script writes them, whose last state is before the norm",
                remedy=f"read them with --from modelopt-vllm, from a folder of their own, or {_AS_YOU_SAY}",
            )

    def _state_of(self, record: Record) -> None:
        self._check_state(record)


class ModelOptVllmSource(TorchDictSource):
    """Hidden states that ModelOpt collected with vLLM."""

    name: ClassVar[str] = "modelopt-vllm"
    summary: ClassVar[str] = "ModelOpt (vLLM): {conversation}.pt with aux_hidden_states and hidden_states, pre-norm"
    program: ClassVar[str] = "ModelOpt (vLLM)"
    roles: ClassVar[tuple[KeyMap, ...]] = (_ROLES, _LAST_ROLES)
    layers_from: ClassVar[str] = (
        "ModelOpt records no layer ids: its vLLM script hands --aux-layers to vLLM as they are, which counts the "
        "layers passed as --layer-ids does, and then n; its default is 1,n//2-1,n-4,n"
    )
    default_layers: ClassVar[str] = "1,n//2-1,n-4,n"
    final_norm: ClassVar[str] = "pre"
    final_norm_from: ClassVar[str] = "ModelOpt's vLLM script stores the last state before the final norm"

    @classmethod
    def claim_record(cls, record: Record) -> Claim | None:
        """Claim views of one storage for certain, others as one of several."""
        if not _has_keys(record) or _prenorm(record) is False:
            return None
        if _prenorm(record):
            return cls.claim_keys(record, how=f"{_PRENORM} true")
        if _shares_storage(record):
            return cls.claim_keys(record, how="both views of one storage")
        return cls.claim_keys(record, certain=False, how="hidden_states before the final norm if vLLM made them")

    def _state_of(self, record: Record) -> bool:
        _check_said(record, prenorm=True, remedy="read them with --from modelopt-hf, from a folder of their own")
        return _shares_storage(record)

    def _check_state(self, record: Record) -> None:
        _check_said(record, prenorm=True, remedy="read them with --from modelopt-hf, from a folder of their own")
        if self._state_of(record) != self._state:
            words = ("states with storages of their own", "views of one storage")
            raise SourceError.at(
                record.where,
                expected=f"{words[self._state]}, as in the source's first readable file",
                got=f"{words[not self._state]}: only vLLM's files have such, whose last state is before the norm",
                remedy="files of two kinds differ in meaning: convert each kind from a folder of its own",
            )


class ModelOptTrtllmSource(ModelOptHfSource):
    """Hidden states that ModelOpt collected with TensorRT-LLM, raw or post-processed."""

    name: ClassVar[str] = "modelopt-trtllm"
    summary: ClassVar[str] = "ModelOpt (TRT-LLM): {conversation}.pt without loss_mask, or raw dp_{r}_{n}.pt lists"
    program: ClassVar[str] = "ModelOpt (TRT-LLM)"
    roles: ClassVar[tuple[KeyMap, ...]] = (_ROLES, _LAST_ROLES, _RAW_ROLES)
    final_norm_from: ClassVar[str] = "ModelOpt's TRT-LLM script stores the last state after the final norm"

    @classmethod
    def claim_record(cls, record: Record) -> Claim | None:
        """Claim raw files by their keys, others without a mask as one of several."""
        if cls.roles_of(record) == _RAW_ROLES:
            return cls.claim_keys(record, how="a list of one dict" if record.listed else "")
        if not _has_keys(record) or _shares_storage(record) or _prenorm(record) or "loss_mask" in record.entries:
            return None
        return cls.claim_keys(record, certain=False, how="no loss_mask, hidden_states after the final norm")


def _has_keys(record: Record) -> bool:
    """Whether the record has both keys, auxiliary states that are empty included: others write hidden_states alone."""
    return _ROLES.aux in record.entries and ModelOptHfSource.roles_of(record) is not None


def _prenorm(record: Record) -> bool | None:
    """What the file says of its last state; None where it says nothing that can be understood."""
    from hsfmt.readers.sources.torch_states import is_tensor

    said = record.entries.get(_PRENORM)
    value = said.item() if is_tensor(said) and said.numel() == 1 else said
    return value if isinstance(value, bool) else None


def _check_said(record: Record, *, prenorm: bool, remedy: str) -> None:
    said = _prenorm(record)
    if said is None and _PRENORM in record.entries:
        got = repr(record.entries[_PRENORM])[:60]
        raise SourceError.at(record.at(_PRENORM), expected="true or false", got=got)
    if said is not None and said != prenorm:
        words = ("after", "before")
        raise SourceError.at(
            record.at(_PRENORM),
            expected=f"a last state {words[prenorm]} the final norm, as this source reads it",
            got=f"{str(said).lower()}: it was taken {words[said]} the norm",
            remedy=remedy,
        )


def _shares_storage(record: Record) -> bool:
    """Whether the last and the auxiliary states are views of one storage, of which neither has all."""
    from hsfmt.readers.sources.torch_states import same_storage

    pair = [record.entries.get(key) for key in (_ROLES.aux, _ROLES.last) if key]
    return same_storage(*pair)
