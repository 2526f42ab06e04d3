"""The card of a dataset: the README.md that the Hub shows, made of the header and a snapshot alone.

Nothing of a part's producer is in it (hosts, commands, folders), and nothing of where the dataset lies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hsfmt.cli import units
from hsfmt.cli.card_escapes import markdown, public_text, yaml_string
from hsfmt.columns import CORE_COLUMNS, STATES
from hsfmt.dtypes import dtype
from hsfmt.header import Header, Identity
from hsfmt.manifest import PartManifest
from hsfmt.snapshot import Snapshot

_SIZES = (
    (10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"),
    (10**8, "10M<n<100M"), (10**9, "100M<n<1B"), (10**10, "1B<n<10B"), (10**11, "10B<n<100B"), (10**12, "100B<n<1T"),
)  # fmt: skip
_NORMS = {
    "pre": "A state after the last layer is taken **before** the model's final norm.",
    "post": "A state after the last layer is taken **after** the model's final norm.",
    "unknown": "It is **not known** whether a state after the last layer is taken before or after the final norm.",
}
_INTRODUCTION = (
    "Hidden states of a language model, layer by layer, for training drafters of speculative decoding and for "
    "interpretability, in the hsfmt format: a Zarr v3 hierarchy with digests of everything.\n"
)
_LOADING = """\
## Loading

```bash
pip install 'hsfmt[http]'
```

```python
from hsfmt import HiddenStateDataset

dataset = HiddenStateDataset("hf://datasets/OWNER/NAME")  # or a local folder; fill in this repository's name
sample = dataset[0]  # input_ids, loss_mask, and hidden_states [token, layer, hidden]
```

Every byte is compared with its digest on the way. One layer or a window of tokens costs only its own share of the
download. Without hsfmt, any Zarr v3 library reads the arrays below `parts/`.
"""
_VERIFYING = """\
## Verifying

```bash
hsfmt pull hf://datasets/OWNER/NAME ./copy   # digests are compared; run it again after an interruption
hsfmt verify ./copy --level full
hsfmt info ./copy
```

`info` must show the snapshot and content digests that stand above.
"""


@dataclass
class StoredSums:
    """What the parts of a snapshot take, and how they are stored.

    Attributes
    ----------
    nbytes, files
        Of everything.
    states_nbytes
        Of the states as they are stored.
    codecs
        Names of the codecs of the states.
    columns
        Further columns: name to what a row of it is.
    """

    nbytes: int = 0
    files: int = 0
    states_nbytes: int = 0
    codecs: set[str] = field(default_factory=set)
    columns: dict[str, str] = field(default_factory=dict)

    def add(self, manifest: PartManifest) -> None:
        """Take a part into account."""
        self.files += len(manifest.files) + 1
        self.nbytes += len(manifest.to_bytes()) + sum(entry.nbytes for entry in manifest.files)
        folder = f"parts/{manifest.part}/{STATES}/"
        self.states_nbytes += sum(entry.nbytes for entry in manifest.files if entry.path.startswith(folder))
        for name, column in manifest.columns.items():
            if name == STATES:
                self.codecs.add(column.codec)
            elif name not in CORE_COLUMNS:
                shape = " × ".join(map(str, column.shape[1:]))
                self.columns[name] = f"{column.dtype_name}{f' [{shape}]' if shape else ''} a {column.kind}"


def dataset_card(snapshot: Snapshot, stored: StoredSums) -> str:
    """Return the card as Markdown with YAML front matter."""
    header = snapshot.header
    title = f"Hidden states of {_name(header.model)}" if header.model else "Hidden states"
    sections = [
        _front_matter(title, snapshot),
        f"# {markdown(title)}\n",
        _INTRODUCTION,
        "## What the data means\n",
        _table(_meaning(header)),
        "### Layers\n",
        _layers(header),
        _NORMS[header.final_norm] + "\n",
        "## What is in it\n",
        _table(_amounts(snapshot, stored)),
        _LOADING,
        _VERIFYING,
    ]
    return "\n".join(sections)


def _front_matter(title: str, snapshot: Snapshot) -> str:
    size = next((name for limit, name in _SIZES if snapshot.n_samples < limit), "n>1T")
    lines = [
        "---",
        f"pretty_name: {yaml_string(title)}",
        "tags:",
        *(f"- {tag}" for tag in ("hidden-states", "speculative-decoding", "interpretability", "hsfmt", "zarr")),
        "size_categories:",
        f"- {size}",
        "viewer: false",
        "---",
        "",
    ]
    return "\n".join(lines)


def _meaning(header: Header) -> list[tuple[str, str]]:
    rows = [("Model", _identity(header.model)), ("Tokenizer", _identity(header.tokenizer))]
    rows += [
        ("Layers", f"{header.n_layers:,}"),
        ("Hidden size", f"{header.hidden_size:,}"),
        ("Element type", header.dtype),
        ("Final norm", header.final_norm),
    ]
    if header.scaling:
        rule = f"{header.scaling['rule']} with column {header.scaling['column']}"
        rows.append(("Dequantisation", markdown(rule)))
    return [*rows, ("Format version", f"{header.format}, readable from {header.readable_from}")]


def _amounts(snapshot: Snapshot, stored: StoredSums) -> list[tuple[str, str]]:
    counts, header = snapshot.counts, snapshot.header
    raw = counts["tokens"] * header.n_layers * header.hidden_size * dtype(header.dtype).itemsize
    rows = [
        ("Samples", f"{snapshot.n_samples:,}"),
        ("Tokens", f"{counts['tokens']:,}, of which {counts['supervised_tokens']:,} are supervised"),
        ("States", f"{units.nbytes(raw)} raw, {units.nbytes(stored.states_nbytes)} stored"),
        ("Codec", ", ".join(sorted(stored.codecs)) or "none"),
        ("Everything", f"{units.nbytes(stored.nbytes)} in {units.counted(stored.files, 'file')}"),
    ]
    rows += [(f"Column {name}", markdown(text)) for name, text in sorted(stored.columns.items())]
    if snapshot.attachments:
        rows.append(("Attachments", markdown(", ".join(str(entry["name"]) for entry in snapshot.attachments))))
    if counts["holes"]:
        rows.append(("Holes", f"{units.counted(counts['holes'], 'sample')} could not be extracted"))
    if counts["retracted"]:
        rows.append(("Retracted", f"{units.counted(counts['retracted'], 'sample')}, not served"))
    return [*rows, ("Snapshot", snapshot.fingerprint), ("Content", snapshot.content_digest)]


def _layers(header: Header) -> str:
    rows = [
        (str(k), f"output of decoder layer {k - 1}" if k else "embeddings", str(position))
        for position, k in enumerate(header.layers)
    ]
    names = ("HF `hidden_states` index (SGLang, vLLM)", "State", "Position in the arrays")
    body = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    note = "\nTrainers that count by a layer's own output (SpecForge, ModelOpt) call index k layer k - 1.\n"
    return f"| {' | '.join(names)} |\n|---|---|---|\n{body}{note}"


def _table(rows: Iterable[tuple[str, str]]) -> str:
    return "| | |\n|---|---|\n" + "".join(f"| {markdown(name)} | {value} |\n" for name, value in rows)


def _identity(value: Identity | None) -> str:
    if value is None:
        return "not said"
    rest = [f"{key.replace('_', ' ')} {public_text(text)}" for key, text in value.items() if key != "name"]
    return markdown(", ".join([*([_name(value)] if "name" in value else []), *rest]))


def _name(value: Identity) -> str:
    return public_text(value["name"]) if "name" in value else "a model without a name"
