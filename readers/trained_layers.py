"""Which layers of a dataset a drafter of speculators is trained on, and whether they are what it takes them for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hsfmt.errors import Problem, UsageError
from hsfmt.header import Header


@dataclass(frozen=True, slots=True)
class Verifier:
    """What counts about the model whose states are trained on.

    Attributes
    ----------
    n_layers
        Decoder layers.
    hidden_size
        Elements of a state.
    """

    n_layers: int
    hidden_size: int

    @property
    def default_targets(self) -> list[int]:
        """Layers that speculators 0.5 and later take when none are named, in HF numbers."""
        return [2, self.n_layers // 2, self.n_layers - 3]


def trained_layers(
    header: Header, verifier: Verifier, targets: Sequence[int] | None, *, final_alone: bool = False
) -> tuple[int, ...]:
    """Return the HF ids to read: the targets in ascending order, as the engine captures them, and the final layer.

    Parameters
    ----------
    header
        What the dataset holds.
    verifier
        The model.
    targets
        The drafter's target layers in HF numbers; None: speculators' default.
    final_alone
        The drafter takes nothing but the final state (MTP).

    Raises
    ------
    UsageError
        A layer is not stored, the width is another, or the final state is not before the final norm, which the trainer
        applies itself; all problems at once.
    """
    problems: list[Problem] = []
    if header.hidden_size != verifier.hidden_size:
        problems.append(Problem("hidden_size", f"{verifier.hidden_size}, the verifier's", str(header.hidden_size)))
    wanted = set() if final_alone else set(verifier.default_targets if targets is None else targets)
    layers = tuple(sorted(wanted | {verifier.n_layers}))
    if not set(layers) <= set(header.layers) or layers[-1] != header.layers[-1]:
        said = "speculators' default for this verifier" if targets is None else "its target layers"
        expected = f"layers {list(layers)} ({said}, and the final one)"
        remedy = "train on these: --target-layer-ids " + " ".join(map(str, header.layers[:-1]))
        if verifier.n_layers != header.layers[-1] or final_alone or len(header.layers) < 2:
            remedy = "capture those layers"
        problems.append(Problem("layers", expected, str(list(header.layers)), remedy))
    if header.final_norm != "pre":
        expected = "pre: speculators 0.4 and later apply the final norm themselves, and would do so twice"
        problems.append(Problem("final_norm", expected, header.final_norm))
    if problems:
        raise UsageError(problems)
    return layers
