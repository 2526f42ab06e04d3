"""What must be true of datasets after any fault, whatever was being done to them."""

import shutil
from collections import Counter
from pathlib import Path

from jobs import CommandError

from hsfmt.catalog import committed_parts, load_index, load_manifest, read_header
from hsfmt.cli.exporting.journal import SUFFIX
from hsfmt.errors import HsfmtError
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store
from hsfmt.writers.targets import atomic

# What a run that was stopped may leave for verification to say; all of it ends with the next run.
PROMISED = {"never_sealed", "no_pointer", "incomplete_snapshot", "newer_parts", "old_snapshot", "quarantined"}
EXPECTED: dict[str, bytes] = {}  # content digest by id of the whole job, made undisturbed


def digests(url, *, damaged=False):
    """Return content digest by id of all that is committed; {} without a dataset."""
    store = open_store(url)
    if store.size("zarr.json") is None:
        assert not committed_parts(store), "parts without a root document"
        return {}
    found, header = {}, read_header(store)
    for name in committed_parts(store):
        try:
            manifest = load_manifest(store, name, header)
            index = load_index(store, manifest) if manifest.counts.samples else None
        except HsfmtError:
            if not damaged:
                raise
            continue
        if index is not None:
            found |= {index.sample_id(row): index.content_digest[row].tobytes() for row in range(index.n_samples)}
    return found


def committed_bytes(url, *, without=()):
    """Return the bytes of every object that a manifest names or is, and of the snapshots; those `without` left out."""
    store, found = open_store(url), {}
    if not Path(url).exists():
        return found
    for name in committed_parts(store):
        try:
            manifest = load_manifest(store, name, read_header(store))
        except HsfmtError:
            continue  # damaged before
        paths = [f"hsfmt/manifests/{name}.json", *(entry.path for entry in manifest.files)]
        found |= {path: (Path(url) / path).read_bytes() for path in paths if (Path(url) / path).exists()}
    for path in (Path(url) / "hsfmt" / "snapshots").rglob("*"):
        if path.is_file() and not path.name.endswith(".tmp"):
            found[str(path.relative_to(url))] = path.read_bytes()
    return {path: data for path, data in found.items() if not any(word in path for word in without)}


class Promises:
    """What a prepared state holds, and must go on to hold.

    Parameters
    ----------
    scenario
        What is about to be done.
    folder
        The prepared state.
    """

    def __init__(self, scenario, folder):
        self.scenario = scenario
        self.kept = {str(path): data for path, data in scenario.kept(folder).items()}
        self.owed = {path.stem for path in (folder / "source").glob("*.safetensors")} | set(self.found(folder))
        self.warnings = Counter()
        # A repair that was stopped may have set a damaged document aside: then it is missing there.
        self.damaged = {place for _, place in self.errors(folder)} if scenario.damaged else set()

    def found(self, folder):
        """Return content digest by id of what is committed in any of the datasets."""
        found = {}
        for name in self.scenario.datasets:
            if (folder / name).exists():
                found |= digests(folder / name, damaged=self.scenario.damaged)
        return found

    def errors(self, folder):
        """Verify the datasets; return (code, place) of each error, and count the warnings."""
        errors = set()
        for name in self.scenario.datasets:
            if (folder / name / "zarr.json").exists():
                report = verify(str(folder / name), level="full", workers=1)
                errors |= {(finding.code, f"{name}: {finding.where}") for finding in report.errors}
                self.warnings.update(finding.code for finding in report.of("warning"))
        return errors

    def check(self, folder, acknowledged):
        """Hold the datasets to all of it; return content digest by id."""
        for path, data in self.kept.items():
            assert (folder / path).read_bytes() == data, f"{path} was changed"
        found = self.found(folder)
        assert acknowledged <= set(found), f"lost: {acknowledged - set(found)}"
        left = {path.stem for path in (folder / "source").glob("*.safetensors")}
        assert left | set(found) >= self.owed, "neither source nor sample is left"
        for sample_id, digest in found.items():
            assert digest == EXPECTED[sample_id], sample_id
        if found:
            new = {error for error in self.errors(folder) if error[1] not in self.damaged}
            assert not new, f"verify: {sorted(new)}"
            if not self.damaged:
                assert set(self.warnings) <= PROMISED, f"verify warns: {self.warnings}"
        return found


def exported(folder):
    """Return the bytes of what was exported, by path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for out in folder.glob("out-*")
        if out.is_dir()
        for path in out.rglob("*")
        if path.is_file() and not path.name.endswith(SUFFIX)
    }


def temporaries(folder):
    """Return how many temporary files lie about."""
    return sum(1 for path in folder.rglob("*.tmp"))


def typed(error):
    """Say what is wrong with an error that a fault ended in, None if nothing is."""
    if isinstance(error, CommandError):
        if error.code not in (1, 2, 3):
            return f"exit code {error.code}: {error.text}"
        return None if "error" in error.text else f"no error named: {error.text}"
    if not isinstance(error, HsfmtError):
        return f"{type(error).__name__}: {error}"
    return None if error.problems and all(problem.where for problem in error.problems) else f"no place: {error}"


def as_new_process():
    """Forget what a process knows of folders: in these runs, another one follows in the same interpreter."""
    atomic._durable.clear()


def copied(template, folder):
    """Return a fresh copy of a prepared state."""
    as_new_process()
    if folder.exists():
        shutil.rmtree(folder)
    shutil.copytree(template, folder)
    return folder


def failure_text(error):
    """Return what went wrong as one line, its end: that is where a command says it."""
    notes = " ".join(getattr(error, "__notes__", []))
    return f"{type(error).__name__}: {str(error)[-400:]} | {notes[-700:]}"
