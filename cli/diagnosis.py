"""What `hsfmt doctor` says of a folder, as facts and as text: what it is, what is wrong, what convert would do."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from hsfmt.cli import units
from hsfmt.cli.converting.dtype_survey import survey
from hsfmt.cli.estimate import Estimate, Known, assumed_ratios, estimate, n_tokens
from hsfmt.cli.examination import Examination
from hsfmt.cli.failures import one_line
from hsfmt.readers.sources import Source, SourceMeaning
from hsfmt.readers.sources.numbering import numbering_notes

CODEC = "zstd"
_SHOWN, _LONGEST = 10, 400
# Beyond this many files their heads would take too long.
_MAX_HEADS = 20_000


@dataclass(slots=True)
class Diagnosis:
    """A folder that was examined.

    Attributes
    ----------
    source, meaning
        What it is, and what its data means as far as that is known.
    evidence
        What shows that it is of that source; empty where the user said so.
    words
        Options of convert that the user gave, as they are typed.
    missing
        What convert would ask for: (option with a placeholder, where it is found).
    layers, final_norm
        What the dataset would say; None where it has to be said.
    seen
        What reading items showed.
    notes
        What the user should know of what belongs to the dataset as a whole.
    """

    source: Source
    meaning: SourceMeaning
    evidence: str
    words: Sequence[str]
    missing: Sequence[tuple[str, str]]
    layers: tuple[int, ...] | None
    final_norm: str | None
    seen: Examination
    notes: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """Return everything as a JSON object."""
        source, meaning, seen = self.source, self.meaning, self.seen
        size, items = self._size(), source.items
        problems: list[dict[str, Any]] = [
            {"file": items[n].key, "id": items[n].sample_id, "problems": [asdict(p) for p in found]}
            for n, found in sorted(seen.problems.items())
        ]
        problems += [{"file": p.where, "id": None, "problems": [asdict(p)]} for p in seen.attachment_problems]
        return {
            "command": self.command(),
            "convert": self._would(),
            "dtype": meaning.dtype,
            "duplicates": [[items[n].key for n in numbers] for numbers in seen.duplicates()],
            "estimate": {**asdict(size.size), "codec": CODEC, "exact_lengths": size.exact, "ratio": size.ratio},
            "evidence": self.evidence,
            "extras": {name: dict(column) for name, column in meaning.extras.items()},
            "final_norm": self.final_norm,
            "final_norm_from": meaning.final_norm_from,
            "hidden_size": meaning.hidden_size,
            "items": len(items),
            "items_read": len(seen.read),
            "attachments": seen.attachments,
            "absent": [items[n].key for n in seen.absent],
            "layers": list(self.layers) if self.layers is not None else None,
            "layers_from": meaning.layers_from,
            "lengths": self._lengths(),
            "masks": self._masks(),
            "missing": [{"option": option, "found": where} for option, where in self.missing],
            "mixture": survey(source) if problems else [],
            "model": meaning.model,
            "n_layers": meaning.n_layers,
            "nonfinite": [{"file": items[n].key, "values": bad} for n, bad in sorted(seen.nonfinite.items())],
            "notes": self._notes(),
            "padding": [
                {"by": by, "file": items[n].key, "tokens": tokens} for n, (tokens, by) in sorted(seen.padded.items())
            ],
            "problems": problems,
            "source": {"format": source.name, "path": str(source.root), "summary": source.summary},
            "strays": [asdict(stray) for stray in source.strays],
            "support": [asdict(support) for support in source.support],
        }

    def command(self) -> str:
        """Return the command to type."""
        words = ["hsfmt", "convert", str(self.source.root), "DST", "--from", self.source.name, *self.words]
        return " ".join([*map(shlex.quote, words), *(option for option, _ in self.missing)])

    def _would(self) -> str:
        """Say how that command would end."""
        seen = self.seen
        part = "" if len(seen.read) == len(self.source.items) else f", of {len(seen.read):,} that were read"
        bad = len(seen.problems | seen.nonfinite)
        if self.missing:
            return "nothing, until the options with placeholders are said"
        if seen.attachment_problems:
            return "stop at a file that belongs to the dataset as a whole"
        if bad:
            files = units.counted(bad, "file")
            return f"stop at the first of {files} that it can't take{part}; --on-bad hole records them and goes on"
        n = len(self.source.items) - len(seen.absent)
        absent = f", and record {units.counted(len(seen.absent), 'hole')}" if seen.absent else ""
        return f"convert {units.counted(n, 'sample')}{absent}; nothing is wrong with those that were read"

    def _size(self) -> Estimate:
        own = self.seen.own_nbytes / self.seen.own_tokens if self.seen.own_tokens else None
        known = Known(assumed_ratios(CODEC, self.meaning.dtype), own)
        numbers = [n for n in range(len(self.source.items)) if n not in self.seen.problems]
        return estimate(self.source, numbers, self.meaning, CODEC, None, known=known)

    def _lengths(self) -> dict[str, Any] | None:
        """Return the lengths of all samples where they are known, else of those that were read."""
        found = dict(self.seen.lengths)
        for number, item in enumerate(self.source.items[:_MAX_HEADS]):
            if number not in found and item.problem is None:
                n = n_tokens(self.source, item)
                if n is None:
                    break
                if n:
                    found[number] = n
        if not found:
            return None
        lengths = np.array(list(found.values()))
        return {
            "max": int(lengths.max()), "median": int(np.median(lengths)), "min": int(lengths.min()),
            "samples": len(lengths), "total": int(lengths.sum()),
        }  # fmt: skip

    def _masks(self) -> dict[str, Any]:
        seen = self.seen
        with_masks = sum(seen.lengths[n] for n in seen.supervised)
        return {
            "all_one": seen.all_one,
            "all_zero": seen.all_zero,
            "given": seen.masks,
            "samples": len(seen.lengths),
            "supervised_share": round(sum(seen.supervised.values()) / with_masks, 4) if with_masks else None,
        }

    def _notes(self) -> list[str]:
        paths = (item.key for item in self.source.items)
        numbering = numbering_notes(paths, self.source.root.resolve().name)
        return list(dict.fromkeys([*self.source.notes, *numbering, *self.notes]))


def text(facts: Mapping[str, Any]) -> str:
    """Return the facts for people."""
    sections = [f"{facts['source']['path']}: {facts['source']['format']}", units.aligned(_meaning(facts), "  ")]
    sections += ["", units.aligned(_samples(facts), "  ")]
    wrong = [(entry["file"], "; ".join(map(_problem, entry["problems"]))) for entry in facts["problems"]]
    wrong += [(entry["file"], f"{entry['values']:,} NaN or Inf values") for entry in facts["nonfinite"]]
    listed = (
        ("damaged", wrong),
        ("not there, which the format allows", [(key, "") for key in facts["absent"]]),
        ("the same content", [(keys[0], ", ".join(keys[1:])) for keys in facts["duplicates"]]),
        ("padded", [(entry["file"], f"{entry['tokens']:,} tokens, by {entry['by']}") for entry in facts["padding"]]),
        ("not read", [(stray["path"], stray["reason"]) for stray in facts["strays"]]),
    )
    for title, entries in listed:
        sections += _listed(title, entries)
    sections += [f"  note: {one_line(note)}" for note in (*facts["notes"], *facts["mixture"])]
    return "\n".join([*sections, "", *_conversion(facts)])


def shortened(text: str) -> str:
    """Return text on one line, and no longer than a few: what a file holds may be hundreds of keys."""
    line = one_line(text)
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"


def _meaning(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    n_layers, layers = facts["n_layers"], facts["layers"]
    known = f"{','.join(map(str, layers))}, by {facts['layers_from']}" if layers else "NOT RECORDED"
    rows = [
        ("format", facts["source"]["summary"]),
        ("found by", shortened(facts["evidence"]) or "--from"),
        ("layers", f"{units.counted(n_layers, 'state')} a token; HF layer ids {known}"),
        ("final norm", f"{facts['final_norm'] or 'NOT RECORDED'}: {facts['final_norm_from']}"),
        ("states", f"{facts['dtype']}, hidden size {facts['hidden_size']:,}"),
    ]
    if facts["model"]:
        rows.append(("model", one_line(facts["model"])))
    if facts["extras"]:
        rows.append(("columns", ", ".join(facts["extras"])))
    if facts["attachments"]:
        rows.append(("attachments", ", ".join(facts["attachments"])))
    return rows


def _samples(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    lengths, masks = facts["lengths"], facts["masks"]
    read = "all read" if facts["items_read"] == facts["items"] else f"{facts['items_read']:,} read; --full reads all"
    rows = [("samples", f"{facts['items']:,}, {read}")]
    if lengths:
        of = "" if lengths["samples"] == facts["items"] else f" in {units.counted(lengths['samples'], 'sample')}"
        spread = f"{lengths['min']:,} to {lengths['max']:,} a sample, median {lengths['median']:,}"
        rows.append(("tokens", f"{lengths['total']:,}{of}; {spread}"))
    given = f"given for {masks['given']:,} of {units.counted(masks['samples'], 'sample')}"
    if masks["given"]:
        given += f", {100 * masks['supervised_share']:.1f} % supervised"
    if masks["all_zero"] or masks["all_one"]:
        given += f"; {masks['all_zero']:,} are all 0, {masks['all_one']:,} all 1"
    rows.append(("loss masks", given if masks["samples"] else "unknown: nothing could be read"))
    tokens = sum(entry["tokens"] for entry in facts["padding"])
    if tokens:
        rows.append(("padding", f"{tokens:,} tokens look like it: --trim-padding leaves them out"))
    return rows


def _conversion(facts: Mapping[str, Any]) -> list[str]:
    size = facts["estimate"]
    exact = "" if size["exact_lengths"] else "about "
    rows = [
        ("convert would", facts["convert"]),
        ("raw size", f"{exact}{units.nbytes(size['raw_nbytes'])}"),
        (
            "stored size",
            f"about {units.nbytes(size['stored_nbytes'])} with {size['codec']}, at {size['ratio']} assumed",
        ),
    ]
    lines = [units.aligned(rows, "  "), "", f"  {facts['command']}"]
    return lines + [f"    {one_line(entry['option'])}: {one_line(entry['found'])}" for entry in facts["missing"]]


def _problem(problem: Mapping[str, Any]) -> str:
    return f"expected {problem['expected']}, got {problem['got']}"


def _listed(title: str, entries: Sequence[tuple[str, str]]) -> list[str]:
    if not entries:
        return []
    lines = [f"  {title} ({len(entries):,}):"]
    lines += [f"    {one_line(where)}{': ' if why else ''}{one_line(why)}" for where, why in entries[:_SHOWN]]
    if len(entries) > _SHOWN:
        lines.append(f"    and {len(entries) - _SHOWN:,} more; --json lists all")
    return lines
