"""What the user may say about a source."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsfmt.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

ROLES = ("input_ids", "hidden_states", "aux", "last", "loss_mask", "ignore")
_CONFIG_NBYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class KeyMap:
    """Which keys of a dict hold what (`--map`); None for the source's own names.

    `hidden_states` holds all layers; or `aux` all but the last, and `last` the last one. `ignore` are keys to drop.
    """

    input_ids: str | None = None
    hidden_states: str | None = None
    aux: str | None = None
    last: str | None = None
    loss_mask: str | None = None
    ignore: tuple[str, ...] = ()

    @property
    def states(self) -> bool:
        """Whether the map says where the states are."""
        return not (self.hidden_states is None and self.aux is None and self.last is None)

    def __bool__(self) -> bool:
        return self != KeyMap()


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What the user said.

    Attributes
    ----------
    key_map
        `--map`.
    hidden_size
        `--hidden-size`: width of one state. States that lie side by side in one row are split by it.
    layer_ids
        `--layer-ids`, for `settle_layers`. Their number is no evidence of a width: a wrong one would fit as well.
    model_config
        `--model-config`: the model's config.json or its folder. It gives the width too, and checks layers and width.
    loss_weights
        `--loss-weights`: loss masks may hold weights, which become a column `loss_weight` beside the mask.
    """

    key_map: KeyMap = field(default_factory=KeyMap)
    hidden_size: int | None = None
    layer_ids: tuple[int, ...] | None = None
    model_config: str | None = None
    loss_weights: bool = False

    def state_width(self) -> int | None:
        """Width of one state, as far as the user said it.

        Raises
        ------
        NotFoundError, UsageError
            The config is not there, or does not say.
        """
        model = self.model()
        return self.hidden_size or (model.hidden_size if model else None)

    def model(self) -> ModelShape | None:
        """Layers and width of the model, from its config; None when no config was given.

        Raises
        ------
        NotFoundError, UsageError
            The config is not there, or does not say.
        """
        if self.model_config is None:
            return None
        path = Path(self.model_config)
        path = path / "config.json" if path.is_dir() else path
        where = f"--model-config {path}"
        config = read_config(path, where)
        return ModelShape(where, _number(config, "num_hidden_layers", where), _number(config, "hidden_size", where))

    def model_layers(self) -> int | None:
        """Number of decoder layers of the model, as `model` has it."""
        model = self.model()
        return None if model is None else model.n_layers


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model's config says: decoder layers, and width of one state; `where` it does, for messages."""

    where: str
    n_layers: int
    hidden_size: int


def _number(config: Mapping[str, Any], name: str, where: str) -> int:
    text = config.get("text_config")
    # In a model of several parts, the states are those of the language model.
    for part in (text if isinstance(text, dict) else {}, config):
        number = part.get(name)
        if isinstance(number, int) and not isinstance(number, bool) and 0 < number < 10_000_000:
            return number
    raise UsageError.at(
        where, expected=f"{name}, a number", got="none", remedy="give the config.json of the model that made the states"
    )


def read_config(path: Path, where: str) -> Mapping[str, Any]:
    """Return a model's config.json.

    Raises
    ------
    NotFoundError, UsageError
        It is not there, or no JSON object.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_CONFIG_NBYTES)
    except OSError as error:
        raise NotFoundError.at(
            where, expected="a model's config.json, or its folder", got=error.strerror or str(error)
        ) from error
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError.at(where, expected="a JSON document", got=str(error)) from error
    if not isinstance(config, dict):
        raise UsageError.at(where, expected="a JSON object", got=type(config).__name__)
    return config


def parse_key_map(text: str) -> KeyMap:
    """Parse `hidden_states=KEY,input_ids=KEY,…`; `ignore` may come several times.

    Raises
    ------
    UsageError
        An unknown role, a role given twice, or all layers (`hidden_states`) beside `aux` or `last`.
    """
    named: dict[str, str] = {}
    ignore: list[str] = []
    for pair in filter(None, (part.strip() for part in text.split(","))):
        role, equals, key = (word.strip() for word in pair.partition("="))
        if not equals or role not in ROLES or not key:
            raise UsageError.at("--map", expected=f"ROLE=KEY pairs with the roles {', '.join(ROLES)}", got=repr(pair))
        if role == "ignore":
            ignore.append(key)
        elif named.setdefault(role, key) != key:
            raise UsageError.at("--map", expected=f"one key for {role}", got=f"{named[role]!r} and {key!r}")
    if "hidden_states" in named and ("aux" in named or "last" in named):
        raise UsageError.at(
            "--map",
            expected="hidden_states=KEY alone (one entry holds all layers), or aux=KEY and last=KEY",
            got=text,
            remedy="map the final state as last=KEY and the other layers as aux=KEY",
        )
    return KeyMap(ignore=tuple(ignore), **named)
