"""Finding the source of a folder: by file names, key sets and ranks together, or by the name the user gives."""

from __future__ import annotations

import json
import os
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from hsfmt.errors import HsfmtError, NotFoundError, Problem, StorageError, UsageError
from hsfmt.layout import ROOT_METADATA
from hsfmt.readers.sources import unclaimed
from hsfmt.readers.sources.listing import list_folder
from hsfmt.readers.sources.look import Look
from hsfmt.readers.sources.options import SourceOptions
from hsfmt.readers.sources.sample_names import is_torch_name

if TYPE_CHECKING:
    from hsfmt.readers.sources.base import Claim, Source
    from hsfmt.readers.sources.folder import Folder

_CLASSES = {
    "vllm": ("hsfmt.readers.sources.vllm", "VllmSource"),
    "speculators": ("hsfmt.readers.sources.speculators", "SpeculatorsSource"),
    "speculators-pt": ("hsfmt.readers.sources.speculators_pt", "SpeculatorsPtSource"),
    "specforge-eagle3": ("hsfmt.readers.sources.specforge", "SpecForgeEagle3Source"),
    "specforge-dflash": ("hsfmt.readers.sources.specforge", "SpecForgeDFlashSource"),
    "specforge-dspark": ("hsfmt.readers.sources.specforge", "SpecForgeDSparkSource"),
    "eagle-ge": ("hsfmt.readers.sources.eagle_ge", "EagleGeSource"),
    "modelopt-hf": ("hsfmt.readers.sources.modelopt", "ModelOptHfSource"),
    "modelopt-vllm": ("hsfmt.readers.sources.modelopt", "ModelOptVllmSource"),
    "modelopt-trtllm": ("hsfmt.readers.sources.modelopt", "ModelOptTrtllmSource"),
    "angelslim-eagle3": ("hsfmt.readers.sources.angelslim", "AngelSlimEagle3Source"),
    "angelslim-dflash": ("hsfmt.readers.sources.angelslim", "AngelSlimDFlashSource"),
    "deepspec": ("hsfmt.readers.sources.deepspec", "DeepSpecSource"),
    "verl-speco": ("hsfmt.readers.sources.verl_speco", "VerlSpecoSource"),
    "automodel": ("hsfmt.readers.sources.automodel", "AutomodelSource"),
    "transformers": ("hsfmt.readers.sources.transformers_dump", "TransformersSource"),
    "saelens": ("hsfmt.readers.sources.saelens", "SaeLensSource"),
    "activault": ("hsfmt.readers.sources.activault", "ActivaultSource"),
    "memmap": ("hsfmt.readers.sources.memmap_store", "MemmapSource"),
    "pt": ("hsfmt.readers.sources.generic_pt", "GenericPtSource"),
    "safetensors": ("hsfmt.readers.sources.generic_safetensors", "GenericSafetensorsSource"),
    "npz": ("hsfmt.readers.sources.generic_npz", "GenericNpzSource"),
}
SOURCE_NAMES = tuple(_CLASSES)
_OTHER_CONTAINERS = {"vllm", "speculators", "deepspec", "automodel", "saelens", "memmap", "safetensors", "npz"}
_TORCH = frozenset(_CLASSES) - _OTHER_CONTAINERS - {"pt"}
_SHARDED = frozenset({"verl-speco"})
# A generic source steps back before those that know the same files better.
_BETTER = {"pt": _TORCH, "safetensors": frozenset({"vllm", "speculators", "automodel"}), "npz": frozenset[str]()}
_ROOT_NBYTES = 64 << 20


def source_class(name: str) -> type[Source]:
    """The class of a source.

    Raises
    ------
    UsageError
        No such source.
    """
    if name not in _CLASSES:
        raise UsageError.at("--from", expected=f"one of {', '.join(_CLASSES)}", got=repr(name))
    module, attribute = _CLASSES[name]
    found: type[Source] = getattr(import_module(module), attribute)
    return found


def find_source(
    folder: str | os.PathLike[str], name: str | None = None, *, options: SourceOptions | None = None
) -> Source:
    """Open a folder of foreign files.

    Parameters
    ----------
    folder
        Where they are.
    name
        The source, or None to find it by looking. A key map without a name means `pt`, or `safetensors` or `npz` where
        there are such files and no torch files.
    options
        What the user said.

    Raises
    ------
    UsageError
        More than one source or program may have written this, or hsfmt did, or an option is wrong; says what to type.
    NotFoundError
        No folder, or nothing in it that a source reads.
    SourceError
        A file that the source as a whole depends on is damaged, or none of the first ones can be read.
    StorageError
        The folder can't be listed, or a file not read.
    """
    options = options or SourceOptions()
    if name is not None:
        source_class(name)
    listing = list_folder(folder)
    if name is None and options.key_map:
        name = _mapped_name(listing)
    _refuse_datasets(listing)
    try:
        source = source_class(name or _find_name(listing))(listing, options)
    except OSError as error:
        if isinstance(error, HsfmtError):
            raise
        where = str(error.filename or folder)
        raise StorageError.at(where, expected="a readable file", got=str(error)) from error
    if not source.items:
        raise NotFoundError.at(
            str(folder),
            expected=f"files that the source {source.name!r} reads ({source.summary})",
            got=f"{len(listing.files)} files, none of them",
        )
    return source


def _mapped_name(listing: Folder) -> str:
    """The source that a key map without a name is for."""
    names = [file.name for file in (*listing.files, *listing.broken)]
    found = [name for name in ("safetensors", "npz") if any(file.endswith(f".{name}") for file in names)]
    return found[0] if len(found) == 1 and not any(map(is_torch_name, names)) else "pt"


def folder_claims(folder: str | os.PathLike[str]) -> dict[str, Claim]:
    """Return what the sources claim of a folder: one that is certain, or all among which only the user can choose.

    Raises
    ------
    NotFoundError
        No folder.
    UsageError
        It is an hsfmt dataset.
    """
    listing = list_folder(folder)
    _refuse_datasets(listing)
    claims = _claims(Look(listing))
    certain = {name: claim for name, claim in claims.items() if claim.certain}
    return certain if len(certain) == 1 else claims


def _refuse_datasets(listing: Folder) -> None:
    """Refuse a folder that is, or holds, an hsfmt dataset: its own files would be taken for samples."""
    names = {file.path for file in listing.files}
    holders = {f"/{path}"[: match.start()] for path in names for match in re.finditer("(?=/hsfmt/)", f"/{path}")}
    for prefix in sorted(holders):
        path = f"{prefix}/{ROOT_METADATA}"[1:]
        if path not in names or not _is_dataset(listing.root / path):
            continue
        where = str(listing.root) + prefix
        remedy = f"hsfmt info {where} shows it" if not prefix else "move it out of the folder that is converted"
        raise UsageError.at(
            where, expected="files that another program wrote", got="an hsfmt dataset already", remedy=remedy
        )


def _is_dataset(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(_ROOT_NBYTES))
        return "hsfmt" in document["attributes"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _find_name(listing: Folder) -> str:
    look = Look(listing)
    claims = _claims(look)
    certain = [name for name, claim in claims.items() if claim.certain]
    if len(certain) == 1:
        return certain[0]
    if not claims:
        raise unclaimed.refusal(look, SOURCE_NAMES)
    raise _ambiguous(look, {name: claims[name] for name in certain or claims})


def _claims(look: Look) -> dict[str, Claim]:
    """What the sources claim of a folder; one that others know the files better than is asked after them, if at all."""
    claims: dict[str, Claim] = {}
    for name in sorted(_CLASSES, key=lambda name: (name in _BETTER, name not in _SHARDED)):
        better = _BETTER.get(name, _SHARDED if name in _TORCH else frozenset())
        if any(claim.certain for other, claim in claims.items() if other in better):
            continue
        claim = source_class(name).claim(look)
        if claim is not None:
            claims[name] = claim
    return claims


def _ambiguous(look: Look, claims: dict[str, Claim]) -> UsageError:
    """The error with a line for each source that may be meant: how to choose it, and what speaks for it."""
    where, names = str(look.folder.root), " and ".join(claims)
    if any(claim.certain for claim in claims.values()):
        remedy = " or ".join(f"--from {name}" for name in claims) + " takes one and lists the rest as strays"
        if set(claims) <= _TORCH:
            remedy = "convert each kind from a folder of its own"
        problems = [Problem(where, "files of one source", f"files of {names}", remedy)]
    else:
        got = f"files that may be of {' or '.join(claims)}" if len(claims) > 1 else f"files that may be of {names}"
        problems = [Problem(where, "files whose keys say what they hold", got, unclaimed.ADVICE)]
    for name, claim in claims.items():
        problems.append(unclaimed.choice(name, f"--from {name} {claim.options}".strip(), claim.evidence))
    if not any(claim.certain for claim in claims.values()):
        problems.extend(unclaimed.other_readings(look))
    return UsageError(problems)
