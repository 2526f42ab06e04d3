"""Whether the program that will read the files takes the states for what they are. Nothing is guessed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from hsfmt.cli.exporting.norm import OPTION, STYLES, FinalNorm, norm_notes, read_norm
from hsfmt.cli.exporting.norm_config import CONFIG, NormFacts, config_beside, norm_facts
from hsfmt.cli.exporting.states import CASTS, FLOAT8, FLOAT8_SCALING, StateChange
from hsfmt.errors import Problem, UsageError
from hsfmt.header import Header
from hsfmt.readers.sources import SourceOptions
from hsfmt.readers.sources.options import ModelShape
from hsfmt.writers.targets.base import Target


class Wishes(Protocol):
    """What the user said of the states."""

    @property
    def norm_weight(self) -> str | None:
        """--norm-weight."""

    @property
    def norm_eps(self) -> float | None:
        """--norm-eps."""

    @property
    def norm_style(self) -> str | None:
        """--norm-style."""

    @property
    def cast(self) -> str | None:
        """--cast."""

    @property
    def model_config(self) -> str | None:
        """--model-config."""


@dataclass(slots=True)
class Meaning:
    """What is written.

    Attributes
    ----------
    header
        What the states in the files mean.
    change
        How they come of those in the dataset.
    notes
        What the user should know.
    """

    header: Header
    change: StateChange
    notes: list[str] = field(default_factory=list)


def settle(stored: Header, layers: tuple[int, ...], target: type[Target], wishes: Wishes) -> Meaning:
    """Settle layers, final norm and dtype of an export.

    Parameters
    ----------
    stored
        What the dataset's states mean.
    layers
        Those wanted, HF ids.
    target
        The format.
    wishes
        What else the user said.

    Raises
    ------
    UsageError
        The format's readers would take the states for others than they are; all that is wrong at once.
    NotFoundError
        No file of the norm's weight, or no config.
    """
    facts = _norm_facts(wishes)
    problems = _dtype_problems(stored, target, wishes)
    if facts is not None:
        problems += facts.problems(wishes.norm_eps, wishes.norm_style)
    # Of a model without such a norm its config need not say what is looked for.
    model = _model(wishes) if facts is None or not facts.is_layer_norm else None
    problems = [*_final_state_problems(stored, layers, target, wishes, model), *problems]
    norm: FinalNorm | None = None
    wrong_norm = _norm_problem(stored, layers, target, wishes)
    if wrong_norm is not None:
        problems.append(wrong_norm)
    elif wishes.norm_weight is not None:
        norm = read_norm(wishes.norm_weight, wishes.norm_eps, wishes.norm_style or STYLES[0], stored, facts)
    if problems:
        raise UsageError(problems)
    dtype = wishes.cast or stored.dtype
    scaling = stored.scaling if dtype == stored.dtype else FLOAT8_SCALING if dtype == FLOAT8 else None
    header = replace(
        stored,
        layers=layers,
        # Without the last stored layer there is no final state, as far as the dataset knows.
        final_norm="post" if norm else stored.final_norm if layers[-1] == stored.layers[-1] else "unknown",
        dtype=dtype,
        scaling=scaling,
    )
    meaning = Meaning(header, StateChange(stored, norm, dtype))
    if (norm or target.needs_final_state) and model is None:
        meaning.notes.append(
            f"layer {layers[-1]} is taken to be the model's last, of which the dataset knows nothing: "
            "--model-config PATH checks it"
        )
    if norm is not None:
        meaning.notes += norm_notes(norm, facts)
    return meaning


def _norm_facts(wishes: Wishes) -> NormFacts | None:
    """Return what the model's config, given or beside the norm's weight, says of the norm."""
    if wishes.norm_weight is None:
        return None
    if wishes.model_config is not None:
        return _given_facts(wishes.model_config)
    beside = config_beside(wishes.norm_weight)
    return None if beside is None else norm_facts(beside, str(beside))


def _given_facts(model_config: str) -> NormFacts:
    path = Path(model_config)
    path = path / CONFIG if path.is_dir() else path
    return norm_facts(path, f"--model-config {path}")


def _norm_options(wishes: Wishes) -> str:
    """Return the options that go with the norm's weight, with their values as far as a config was given."""
    facts = _given_facts(wishes.model_config) if wishes.model_config is not None else None
    if facts is None or facts.eps is None or facts.is_layer_norm:
        return "--norm-eps X (rms_norm_eps of the model's config.json)"
    style = f" --norm-style {facts.style}" if facts.style == "gemma" else ""
    return f"--norm-eps {facts.eps!r}{style} ({facts.eps_name} of {facts.where})"


def _model(wishes: Wishes) -> ModelShape | None:
    """Return the model's layers and width, as far as its config is known: given, or beside the norm's weight."""
    beside = config_beside(wishes.norm_weight) if wishes.norm_weight is not None else None
    if wishes.model_config is not None or beside is None:
        return SourceOptions(model_config=wishes.model_config).model()
    try:
        model = SourceOptions(model_config=str(beside)).model()
    except UsageError:  # nobody said that it is a config of this kind
        return None
    return model and replace(model, where=str(beside))


def _final_state_problems(
    stored: Header, layers: tuple[int, ...], target: type[Target], wishes: Wishes, model: ModelShape | None
) -> list[Problem]:
    problems = []
    last, needed = layers[-1], target.needs_final_state or wishes.norm_weight is not None
    who = f"--to {target.name}" if target.needs_final_state else OPTION
    if needed and last != stored.layers[-1]:
        expected = f"layer {stored.layers[-1]} among the layers, as the final state that {who} needs"
        problems.append(Problem("--layers", expected, ",".join(map(str, layers)), "add it"))
    if model is None:
        return problems
    if model.hidden_size != stored.hidden_size:
        problems.append(Problem(model.where, f"hidden_size {stored.hidden_size}", str(model.hidden_size)))
    if last > model.n_layers or (needed and last < model.n_layers):
        expected = f"layer {model.n_layers} as the last one, the final state of this model"
        remedy = "the dataset lacks the model's final state, or the config is another model's"
        if not needed:
            expected, remedy = f"layers up to {model.n_layers}", "the config is another model's"
        problems.append(Problem(model.where, expected, f"layer {last}", remedy))
    return problems


def _dtype_problems(stored: Header, target: type[Target], wishes: Wishes) -> list[Problem]:
    dtype = wishes.cast or stored.dtype
    if wishes.norm_weight is not None and dtype == stored.dtype == FLOAT8:
        expected = "a dtype that the norm can be computed in"
        return [Problem("--cast", expected, f"{FLOAT8} states", "add --cast bfloat16, which dequantises them")]
    if dtype in target.dtypes:
        return []
    able = [name for name in CASTS if name in target.dtypes]
    how = "dequantises them" if stored.dtype == FLOAT8 and wishes.cast is None else "converts them"
    remedy = f"add --cast {' or '.join(able)}, which {how}" if able else "choose another --to"
    return [Problem(f"--to {target.name}", f"states of {', '.join(target.dtypes)}", dtype, remedy)]


def _norm_problem(stored: Header, layers: tuple[int, ...], target: type[Target], wishes: Wishes) -> Problem | None:
    """Say why the last state is not what the readers take it for, and no norm can make it that."""
    have, want = stored.final_norm, target.final_norm
    where, given = f"--to {target.name}", wishes.norm_weight is not None
    if not given and (wishes.norm_eps is not None or wishes.norm_style is not None):
        return Problem(OPTION, "the weight that --norm-eps and --norm-style go with", "none")
    # A format that has no place for the final state does not care, nor does one when the last layer is left out.
    cares = want is not None and (target.needs_final_state or layers[-1] == stored.layers[-1])
    if (given or cares) and have == "unknown":
        remedy = "convert or capture the data anew with --final-norm pre or post, whichever is true"
        return Problem(where, "a final state known to be before or after the final norm", "final_norm unknown", remedy)
    if given and have == "post":
        remedy = f"leave {OPTION} out" if want != "pre" else _LOST
        return Problem(OPTION, "states before the final norm", "a dataset whose final state is after it", remedy)
    if given and want == "pre":
        expected = "a final state before the final norm, which its readers apply themselves"
        return Problem(where, expected, f"{OPTION}, which applies it", f"leave {OPTION} out")
    if not cares or given or have == want:
        return None
    if want == "post":
        remedy = f"give the model's norm: {OPTION} model.safetensors:model.norm.weight {_norm_options(wishes)}"
        return Problem(where, "a final state after the final norm", "one before it (final_norm pre)", remedy)
    return Problem(where, "a final state before the final norm", "one after it (final_norm post)", _LOST)


_LOST = (
    "the norm can't be undone, since the scale of each state is lost: capture the data anew before the norm, or choose "
    "a format whose readers take states after it"
)
