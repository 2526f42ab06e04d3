"""All that `hsfmt info` says of a dataset, gathered part by part in flat memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hsfmt import canonical, digests
from hsfmt.attachments import check_entries
from hsfmt.catalog import committed_parts, load_listed, load_manifests
from hsfmt.cli.opening import Opened
from hsfmt.columns import CORE_COLUMNS, STATES
from hsfmt.index import PartIndex
from hsfmt.manifest import PartManifest
from hsfmt.snapshot import Snapshot
from hsfmt.storage.read_together import read_together

# What differs from run to run of one producer, and would keep equal ones apart.
_PER_RUN = ("started", "host", "command", "source_files", "source_folders", "source_nbytes")


@dataclass(slots=True)
class _Sums:
    """Figures over the parts of a snapshot."""

    files: int = 0
    raw: int = 0
    stored: int = 0
    states_raw: int = 0
    states_stored: int = 0
    token_nbytes: int = 0
    holes: dict[str, str] = field(default_factory=dict)
    retracted: list[str] = field(default_factory=list)
    replaced: set[str] = field(default_factory=set)
    masks_given: int = 0
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    producers: dict[bytes, dict[str, Any]] = field(default_factory=dict)

    def add_manifest(self, manifest: PartManifest, nbytes: int) -> None:
        self.files += len(manifest.files) + 1
        self.stored += nbytes + sum(entry.nbytes for entry in manifest.files)
        for name, column in manifest.columns.items():
            raw = column.n_rows * column.row_nbytes
            self.raw += raw
            if name == STATES:
                self.states_raw += raw
                self.token_nbytes = column.row_nbytes
                folder = f"parts/{manifest.part}/{name}/"
                self.states_stored += sum(entry.nbytes for entry in manifest.files if entry.path.startswith(folder))
            elif name not in CORE_COLUMNS:
                self.columns[name] = column.declaration()
        self.holes |= manifest.holes
        self.replaced |= manifest.replaces.keys()
        shared = {key: value for key, value in manifest.producer.items() if key not in _PER_RUN}
        entry = self.producers.setdefault(canonical.dumps(shared), {"parts": 0, "producer": shared, "runs": []})
        entry["parts"] += 1
        run = {key: manifest.producer[key] for key in _PER_RUN if key in manifest.producer}
        if run not in entry["runs"]:
            entry["runs"].append(run)


def _by_time(producers: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return producers and their runs in the order of their times, not of parts, whose names are random in a second."""

    def first(run: dict[str, Any]) -> tuple[str, bytes]:
        return str(run.get("started", "")), canonical.dumps(run)

    ordered = [entry | {"runs": sorted(entry["runs"], key=first)} for entry in producers]
    return sorted(ordered, key=lambda entry: first(entry["runs"][0]))


def overview(opened: Opened) -> dict[str, Any]:
    """Return the facts of a dataset as a JSON object.

    Raises
    ------
    CorruptionError, NotFoundError
        A manifest or an index is missing or not what the snapshot names.
    """
    snapshot, header = opened.snapshot, opened.snapshot.header
    sums = _sums(opened)
    counts = snapshot.counts
    lengths = snapshot.n_tokens
    same = int(snapshot.shadowed_same.sum())
    return {
        "attachments": [
            dict(entry) for entry in check_entries(snapshot.attachments, f"snapshot {snapshot.fingerprint}")
        ],
        "columns": sums.columns,
        "content_digest": snapshot.content_digest,
        "files": sums.files,
        "header": header.to_json(),
        "holes": _open_holes(opened, sums),
        "layers": [
            {"decoder_layer_output": k - 1 if k else None, "hf_hidden_states_index": k, "position": i}
            for i, k in enumerate(header.layers)
        ],
        "live": opened.is_live,
        "masks_given": sums.masks_given,
        "newer": _newer(opened, sums) if opened.store.can_list and not opened.is_live else None,
        "parts": counts["parts"],
        "producers": _by_time(sums.producers.values()),
        "raw_nbytes": sums.raw,
        "retracted": counts["retracted"],
        "samples": counts["samples"],
        "sealed": opened.pointer.sealed if opened.pointer else None,
        "shadowed": {"different": counts["shadowed"] - same, "same": same},
        "snapshot": snapshot.fingerprint,
        "states": {
            "ratio": round(sums.states_raw / sums.states_stored, 4) if sums.states_stored else None,
            "raw_nbytes": sums.states_raw,
            "stored_nbytes": sums.states_stored,
            "unserved_raw_nbytes": sums.states_raw - counts["tokens"] * sums.token_nbytes,
        },
        "stored_nbytes": sums.stored,
        "supervised_tokens": counts["supervised_tokens"],
        "tokens": counts["tokens"],
        "tokens_a_sample": _lengths(lengths),
        "url": opened.store.url,
        "without_supervised_tokens": int(np.count_nonzero(snapshot.n_supervised == 0)),
    }


def _lengths(lengths: Any) -> dict[str, int] | None:
    if not len(lengths):
        return None
    return {"max": int(lengths.max()), "median": int(np.median(lengths)), "min": int(lengths.min())}


def _sums(opened: Opened) -> _Sums:
    sums, snapshot = _Sums(), opened.snapshot
    served_first = np.argsort(snapshot.part, kind="stable")
    starts = np.searchsorted(snapshot.part[served_first], np.arange(len(snapshot.parts) + 1))
    files = read_together(opened.store, [document for ref in snapshot.parts for document in ref.documents])
    for number, ref in enumerate(snapshot.parts):
        loaded = load_listed(files, snapshot, number)
        sums.add_manifest(loaded.manifest, ref.manifest_nbytes)
        if loaded.index is not None:
            rows = snapshot.row[served_first[starts[number] : starts[number + 1]]]
            sums.masks_given += int(loaded.index.loss_mask_given[rows].sum())
            sums.retracted += _retracted(snapshot, number, loaded.index)
    return sums


def _retracted(snapshot: Snapshot, number: int, index: PartIndex) -> Iterable[str]:
    return [index.sample_id(int(row)) for row in snapshot.retracted_row[snapshot.retracted_part == number]]


def _open_holes(opened: Opened, sums: _Sums) -> list[dict[str, str]]:
    """Return the holes whose id did not become a sample since."""
    if not sums.holes:
        return []
    snapshot, present = opened.snapshot, set(sums.retracted)
    hashes = np.array([digests.id_hash(key.encode()) for key in sums.holes], np.uint64)
    hits = np.flatnonzero(np.isin(snapshot.id_hash, hashes))
    if len(hits):
        ids = opened.ids()
        present |= {ids[int(i)] for i in hits}
    return [{"id": key, "reason": reason} for key, reason in sorted(sums.holes.items()) if key not in present]


def _newer(opened: Opened, sums: _Sums) -> dict[str, Any]:
    """Return what is committed and in no part of the snapshot, parts that others replaced left out."""
    named = {ref.name for ref in opened.snapshot.parts}
    # What a part of the snapshot replaced lies there still, and is no news.
    news = [name for name in committed_parts(opened.store) if name not in named]
    header = opened.snapshot.header
    loaded = load_manifests(opened.store, news, header).values()
    replaced = sums.replaced | {name for manifest in loaded for name in manifest.replaces}
    manifests = [manifest for manifest in loaded if manifest.part not in replaced]
    return {
        "holes": sum(manifest.counts.holes for manifest in manifests),
        "parts": [manifest.part for manifest in manifests],
        "samples": sum(manifest.counts.samples for manifest in manifests),
    }
