"""Source `pt`: any folder of `.pt`, `.ckpt` or `.pth` files with one sample each, as server-side patches dump them.

A file is a dict (or a list of one dict) with token ids and states: all layers in one entry as a list of [T, H], as
[T, L, H], [L, T, H] or [T, L*H], or the last one apart; a batch axis of 1 is dropped. `--map` names other keys.
Which of three axes counts the layers is one thing for the folder, and known from a sample with L != T.
Such files say neither which layers they hold nor what happened to the last one: the user does.

Sample id: the file's path below the folder without its extension. Two files of one id are both refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from hsfmt.errors import Problem, SourceError, UsageError
from hsfmt.readers.sources.base import Claim, Source, SourceItem, SourceSample, Stray, SupportFile
from hsfmt.readers.sources.folder import file_items
from hsfmt.readers.sources.meaning import SourceMeaning
from hsfmt.readers.sources.sample_names import SIDE_FILES, TORCH_SUFFIXES, is_torch_name, stray_reason
from hsfmt.readers.sources.twins import load_with_twin, twin_notes

if TYPE_CHECKING:
    from hsfmt.readers.sources.folder import Folder
    from hsfmt.readers.sources.look import Look
    from hsfmt.readers.sources.options import KeyMap
    from hsfmt.readers.sources.torch_record import Record

LAYERS_FROM = (
    "they are in the program or patch that wrote the files; count like HF hidden_states: 0 is the embeddings, "
    "k the state after k layers, n after the last (a program's 'output of layer i' is i + 1)"
)
FINAL_NORM_FROM = (
    "pre if the last state was taken before the model's final norm (vLLM), post if after it (SGLang, transformers); "
    "unknown if you can't find out"
)


class GenericPtSource(Source):
    """A folder of torch.save dumps, one sample a file."""

    name: ClassVar[str] = "pt"
    summary: ClassVar[str] = "any folder of .pt/.ckpt dicts with input_ids and hidden_states (see --map)"

    @classmethod
    def claim(cls, look: Look) -> Claim | None:
        """Claim dicts with states in one entry whose rank shows the layers; of any other the user has to say it."""
        for record in look.samples[:1]:
            from hsfmt.readers.sources.key_sets import describe, says_all_layers

            if says_all_layers(record):
                options = "--layer-ids IDS --final-norm NORM"
                return Claim(f"{record.where} with {describe(record)}", certain=True, options=options)
        return None

    def _list(self, folder: Folder) -> None:
        self._roles: KeyMap | None = None
        self._orientation: str | None = None
        self._ambiguous: Problem | None = None
        self.items = file_items(folder.select(lambda file: is_torch_name(file.name)))
        self.notes.extend(twin_notes(self.items))
        samples = {path for item in self.items for path in item.paths}
        for file in folder.files:
            if file.path in samples:
                continue
            if file.name in SIDE_FILES:
                self.support.append(SupportFile(file.path, SIDE_FILES[file.name]))
            else:
                otherwise = f"not a {', '.join(TORCH_SUFFIXES)} file"
                self.strays.append(Stray(file.path, stray_reason(file.path, otherwise, samples)))

    def _first_meaning(self) -> SourceMeaning:
        try:
            return super()._first_meaning()
        except SourceError as error:
            if self._ambiguous is None:
                raise
            raise UsageError.at(
                str(self.root),
                expected="a sample with more or fewer tokens than layers, which shows the order of the axes",
                got=f"none among the readable ones: {self._ambiguous.where} has {self._ambiguous.got}",
                remedy="save the states as a list of [token, hidden], one a layer, or add a sample of another length",
            ) from error

    def _look(self, item: SourceItem) -> SourceMeaning:
        from hsfmt.readers.sources import orientation, torch_record
        from hsfmt.readers.sources.torch_columns import weight_column

        record = self._record(item)
        roles = torch_record.resolve_roles(record, self.options.key_map)
        n_tokens = len(torch_record.token_ids(record, roles))
        width = torch_record.check_width(record, roles, n_tokens, self.options.state_width())
        try:
            found = orientation.find_orientation(record, roles, n_tokens)
        except orientation.AmbiguousOrientationError as error:
            self._ambiguous = self._ambiguous or error.problems[0]
            raise
        layer_first = found == orientation.LAYERS_FIRST
        blocks = torch_record.state_blocks(record, roles, n_tokens, hidden_size=width, layer_first=layer_first)
        self._roles, self._orientation = roles, found
        keys = [roles.hidden_states] if roles.hidden_states else [roles.aux, roles.last]
        producer: dict[str, Any] = {"source_format": self.name, "source_keys": [key for key in keys if key]}
        return SourceMeaning(
            hidden_size=blocks[0].shape[2],
            n_layers=sum(block.shape[1] for block in blocks),
            dtype=str(blocks[0].dtype).removeprefix("torch."),
            layers=None,
            layers_from=LAYERS_FROM,
            final_norm=None,
            final_norm_from=FINAL_NORM_FROM,
            producer=producer | ({"layout": "layer-first"} if layer_first else {}),
            extras=weight_column(roles, weights=self.options.loss_weights),
        )

    def _load(self, item: SourceItem) -> SourceSample:
        return load_with_twin(item, lambda path: self._read(replace(item, key=path)))

    def _read(self, item: SourceItem) -> SourceSample:
        from hsfmt.readers.sources.orientation import LAYERS_FIRST
        from hsfmt.readers.sources.torch_columns import FurtherColumns
        from hsfmt.readers.sources.torch_record import read_sample

        hidden_size = self.meaning().hidden_size
        assert self._roles is not None
        record = self._record(item)
        self._check_orientation(record)
        layer_first = self._orientation == LAYERS_FIRST
        further = FurtherColumns(weights=self.options.loss_weights)
        return read_sample(record, self._roles, item.sample_id, hidden_size, layer_first=layer_first, further=further)

    def _record(self, item: SourceItem) -> Record:
        from hsfmt.readers.sources.torch_record import load_record

        return load_record(self.root / item.key, item.key)

    def _check_orientation(self, record: Record) -> None:
        """Refuse the whole source if this sample has its axes in another order: then those of L == T are in doubt."""
        from hsfmt.readers.sources import orientation, torch_record

        meaning, roles = self.meaning(), self._roles
        assert roles is not None
        n_tokens = len(torch_record.token_ids(record, roles))
        try:
            found = orientation.find_orientation(record, roles, n_tokens)
        except orientation.AmbiguousOrientationError:
            if self._orientation is None:
                raise
            return
        usual = self._orientation or orientation.TOKENS_FIRST
        if found in (None, usual):
            return
        layer_first = found == orientation.LAYERS_FIRST
        try:
            blocks = torch_record.state_blocks(
                record, roles, n_tokens, hidden_size=meaning.hidden_size, layer_first=layer_first
            )
        except SourceError:
            return  # one bad file, as loading it says
        if sum(block.shape[1] for block in blocks) == meaning.n_layers:
            raise UsageError.at(
                record.where,
                expected=f"states {usual} as in the source's first readable file",
                got=str(found),
                remedy="convert each kind from a folder of its own",
            )
