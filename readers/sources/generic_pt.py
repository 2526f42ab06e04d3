"""Source `pt`: any folder of `.pt`, `.ckpt` or `.pth` files with one sample each, as server-side patches dump them.

A file is a dict (or a list of one dict) with token ids and states: all layers in one entry as a list of [T, H], as
[T, L, H] or as [T, L*H], or the last one apart; a batch axis of 1 is dropped. `--map` names other keys.
Such files say neither which layers they hold nor what happened to the last one: the user does.

Sample id: the file's path below the folder without its extension. Two files of one id are both refused.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from hsfmt.readers.sources.base import Source, SourceItem, SourceSample, Stray, SupportFile
from hsfmt.readers.sources.folder import file_items, stem
from hsfmt.readers.sources.meaning import SourceMeaning

if TYPE_CHECKING:
    from hsfmt.readers.sources.folder import Folder
    from hsfmt.readers.sources.options import KeyMap

SUFFIXES = (".pt", ".ckpt", ".pth")
SIDE_FILES = {"token_freq.pt": "token_freq", "vocab_mapping.pt": "vocab_mapping", "d2t.pt": "d2t", "t2d.pt": "t2d"}
_CHECKPOINT = re.compile(r"(optimizer|scheduler|trainer_state|training_state|rng_state.*|scaler)\.(pt|pth|ckpt)")
LAYERS_FROM = (
    "they are in the program or patch that wrote the files; count like HF hidden_states: 0 is the embeddings, "
    "k the state after k layers, n after the last (a program's 'output of layer i' is i + 1)"
)
FINAL_NORM_FROM = (
    "pre if the last state was taken before the model's final norm (vLLM), post if after it (SGLang, transformers); "
    "unknown if you can't find out"
)


def is_torch_name(name: str) -> bool:
    """Whether a file is read as a sample by its name."""
    return (
        name.endswith(SUFFIXES)
        and not name.startswith(".")
        and name not in SIDE_FILES
        and _CHECKPOINT.fullmatch(name) is None
    )


class GenericPtSource(Source):
    """A folder of torch.save dumps, one sample a file."""

    name: ClassVar[str] = "pt"
    summary: ClassVar[str] = "any folder of .pt/.ckpt dicts with input_ids and hidden_states (see --map)"

    def _list(self, folder: Folder) -> None:
        self._roles: KeyMap | None = None
        self.items = file_items(file for file in folder.files if is_torch_name(file.name))
        sample_ids = {item.sample_id for item in self.items}
        for file in folder.files:
            if is_torch_name(file.name):
                continue
            if file.name in SIDE_FILES:
                self.support.append(SupportFile(file.path, SIDE_FILES[file.name]))
            else:
                self.strays.append(Stray(file.path, _stray_reason(file.path, sample_ids)))

    def _look(self, item: SourceItem) -> SourceMeaning:
        from hsfmt.readers.sources.torch_record import load_record, resolve_roles, state_blocks, token_ids

        record = load_record(self.root / item.key, item.key)
        roles = resolve_roles(record, self.options.key_map)
        blocks = state_blocks(
            record,
            roles,
            len(token_ids(record, roles)),
            hidden_size=self.options.hidden_size,
            n_layers=len(self.options.layer_ids) if self.options.layer_ids else None,
        )
        self._roles = roles
        keys = [roles.hidden_states] if roles.hidden_states else [roles.aux, roles.last]
        return SourceMeaning(
            hidden_size=blocks[0].shape[2],
            n_layers=sum(block.shape[1] for block in blocks),
            dtype=str(blocks[0].dtype).removeprefix("torch."),
            layers=None,
            layers_from=LAYERS_FROM,
            final_norm=None,
            final_norm_from=FINAL_NORM_FROM,
            producer={"source_format": "pt", "source_keys": [key for key in keys if key]},
        )

    def _load(self, item: SourceItem) -> SourceSample:
        from hsfmt.readers.sources.torch_record import load_record, read_sample

        hidden_size = self.meaning().hidden_size
        assert self._roles is not None
        return read_sample(load_record(self.root / item.key, item.key), self._roles, item.sample_id, hidden_size)


def _stray_reason(path: str, sample_ids: set[str]) -> str:
    if path.endswith(".gz"):
        twin = stem(stem(path)) in sample_ids
        return "the compressed twin of a file that is there too" if twin else "compressed: unpack it first (gunzip)"
    if _CHECKPOINT.fullmatch(path.rpartition("/")[2]):
        return "the state of a training run"
    return f"not a {', '.join(SUFFIXES)} file"
