"""What the data of a source means: what its format fixes, and what only the user can say."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hsfmt.errors import Problem, SourceError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hsfmt.readers.sources.base import SourceSample
    from hsfmt.readers.sources.options import SourceOptions

FP8_SCALING = {"column": "hidden_states_scale", "rule": "bfloat16_product"}


@dataclass(frozen=True, slots=True)
class SourceMeaning:
    """What a source fixes; None where the user must say.

    Attributes
    ----------
    hidden_size, n_layers
        Width of one state, and states a token.
    dtype
        `bfloat16`, `float16`, `float32` or `float8_e4m3fn`.
    layers
        HF `hidden_states` indices, ascending, or None.
    layers_from
        Where they were found, or where the user finds them.
    final_norm
        `pre`, `post`, `unknown`, or None.
    final_norm_from
        Where that is known from, or how the user finds out.
    scaling
        The header's dequantisation rule for fp8 states, else None.
    model
        Name of the model, where the source has it.
    producer
        JSON facts about who wrote the files.
    model_layers
        Decoder layers of the model, where its config was given: no layer id can be larger.
    extras
        Further columns of the samples by name, each an object of `kind`, `dtype` and `shape` as a writer declares them;
        without that of the scaling.
    """

    hidden_size: int
    n_layers: int
    dtype: str
    layers: tuple[int, ...] | None
    layers_from: str
    final_norm: str | None
    final_norm_from: str
    scaling: dict[str, str] | None = None
    model: str | None = None
    producer: dict[str, Any] = field(default_factory=dict)
    model_layers: int | None = None
    extras: dict[str, dict[str, Any]] = field(default_factory=dict)


def check_options(meaning: SourceMeaning, options: SourceOptions) -> SourceMeaning:
    """Hold what the user said of the states to the files; return the meaning with the model's number of layers.

    Raises
    ------
    NotFoundError
        The model's config is not there.
    UsageError
        `--hidden-size` or the config has another width, or the config fewer layers than the source says; all at once.
    """
    problems = []
    width = f"{meaning.hidden_size}, the width of the states in these files"
    if options.hidden_size not in (None, meaning.hidden_size):
        problems.append(Problem("--hidden-size", width, str(options.hidden_size)))
    model = options.model()
    if model is None:
        n_layers = None
    else:
        n_layers = model.n_layers
        other = "is it the config of the model that made the states?"
        if model.hidden_size != meaning.hidden_size:
            problems.append(Problem(f"{model.where} [hidden_size]", width, str(model.hidden_size), other))
        if meaning.layers is not None and meaning.layers[-1] > n_layers:
            expected = f"at least {meaning.layers[-1]} layers ({meaning.layers_from})"
            problems.append(Problem(f"{model.where} [num_hidden_layers]", expected, str(n_layers), other))
    if problems:
        raise UsageError(problems)
    return replace(meaning, model_layers=n_layers)


def check_against(meaning: SourceMeaning, sample: SourceSample, key: str, *, any_dtype: bool = False) -> None:
    """Refuse a sample of other widths, layer count, dtype (unless any will do) or scaling than the rest of the source.

    Raises
    ------
    SourceError
        All differences at once, naming the file.
    """
    n_layers, hidden_size = sample.hidden_states.shape[1:]
    pairs = (
        (f"{meaning.n_layers} layers", f"{n_layers} layers"),
        (f"hidden size {meaning.hidden_size}", f"hidden size {hidden_size}"),
        (f"{meaning.dtype} states", f"{meaning.dtype if any_dtype else sample.hidden_states.dtype.name} states"),
        (_scale_words(meaning.scaling), _scale_words("hidden_states_scale" in sample.extras)),
    )
    remedy = "convert files of another kind from a folder of their own into a dataset of their own"
    problems = [
        Problem(key, f"{wanted} as in the source's first readable file", found, remedy)
        for wanted, found in pairs
        if wanted != found
    ]
    if problems:
        raise SourceError(problems)


def _scale_words(scaled: object) -> str:
    return "a scale for each token" if scaled else "no scales"


def settle_layers(meaning: SourceMeaning, layer_ids: Sequence[int] | None) -> tuple[int, ...]:
    """Settle the layer ids from what the source fixes and what the user said (HF indices, as for `--layer-ids`).

    Raises
    ------
    UsageError
        Neither says it, they contradict each other, or their number or order does not fit the files or the model.
    """
    if layer_ids is None and meaning.layers is None:
        raise UsageError.at(
            "--layer-ids",
            expected=f"the {meaning.n_layers} HF hidden_states indices of the states in these files, in file order",
            got="nothing, and the files do not record them",
            remedy=meaning.layers_from,
        )
    given = meaning.layers if layer_ids is None else tuple(layer_ids)
    assert given is not None
    where = "--layer-ids" if layer_ids is not None else meaning.layers_from
    if len(given) != meaning.n_layers:
        raise UsageError.at(
            where,
            expected=f"{meaning.n_layers} ids, one for each state in the files",
            got=f"{len(given)}: {_ids(given)}",
            remedy="name every stored state, the last one too (n for a model of n layers)",
        )
    if any(b <= a for a, b in pairwise(given)) or given[0] < 0:
        raise UsageError.at(where, expected="strictly ascending ids from 0 on", got=_ids(given))
    if meaning.model_layers is not None and given[-1] > meaning.model_layers:
        raise UsageError.at(
            where,
            expected=f"ids up to {meaning.model_layers}, the model's number of layers (--model-config)",
            got=_ids(given),
            remedy="0 is the embeddings, k the state after k layers",
        )
    if meaning.layers is not None and given != meaning.layers:
        raise UsageError.at(
            where,
            expected=f"{_ids(meaning.layers)} ({meaning.layers_from})",
            got=_ids(given),
            remedy="leave --layer-ids out: the source fixes them",
        )
    return given


def settle_final_norm(meaning: SourceMeaning, final_norm: str | None) -> str:
    """Settle whether the final state is `pre` or `post` norm, or `unknown`.

    Raises
    ------
    UsageError
        Neither the source nor the user says it, or they contradict each other.
    """
    if final_norm is None and meaning.final_norm is None:
        raise UsageError.at(
            "--final-norm",
            expected="pre, post or unknown",
            got="nothing, and the files do not record it",
            remedy=meaning.final_norm_from,
        )
    if final_norm is None or meaning.final_norm is None:
        return final_norm or meaning.final_norm or "unknown"
    if final_norm != meaning.final_norm:
        raise UsageError.at(
            "--final-norm",
            expected=f"{meaning.final_norm} ({meaning.final_norm_from})",
            got=final_norm,
            remedy="leave --final-norm out: the source fixes it",
        )
    return final_norm


def _ids(layers: Sequence[int]) -> str:
    return ",".join(map(str, layers))
