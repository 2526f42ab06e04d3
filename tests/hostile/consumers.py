"""Everything that takes a dataset, as functions of (root, scratch folder); each reads or does all it can."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from dataset_forge import HIDDEN, LAYERS, build
from forged_data import Held
from outcomes import RefusedError, command

from hsfmt.errors import HsfmtError
from hsfmt.readers.sample_reader import ReadOptions, SampleReader
from hsfmt.readers.verification import verify
from hsfmt.writers.dataset_writer import DatasetWriter
from hsfmt.writers.sample_files import FileTensor, write_sample_file

Consumer = Callable[[Path, Path], Any]


def _reader(root: Path, snapshot: str | None = None) -> SampleReader:
    return SampleReader(root, snapshot=snapshot, options=ReadOptions(n_threads=1))


def sampled(root: Path, scratch: Path) -> dict[str, Held]:
    reader = _reader(root)
    return {s.sample_id: _held(s) for s in reader.read_many(range(len(reader)))}


def sampled_one_by_one(root: Path, scratch: Path) -> dict[str, Held]:
    """By windows of their layers and tokens, put together again."""
    reader = _reader(root)
    found = {}
    for number, length in enumerate(reader.lengths.tolist()):
        at = length // 2
        windows = [reader.read(number, start, stop) for start, stop in ((0, at), (at, length)) if start < stop]
        pieces = [_held(window) for window in windows]
        found[windows[0].sample_id] = Held(
            *(b"".join(part) for part in list(zip(*pieces, strict=True))[:3]), pieces[0].meta
        )
    return found


def _held(sample: Any) -> Held:
    return Held(
        np.ascontiguousarray(sample.hidden_states).tobytes(),
        sample.input_ids.astype(np.int64).tobytes(),
        sample.loss_mask.tobytes(),
        bytes(sample.meta),
    )


def metadata(root: Path, scratch: Path) -> None:
    reader = _reader(root)
    for sample in reader.read_many(range(len(reader))):
        assert isinstance(sample.metadata, dict)


def named(root: Path, scratch: Path) -> None:
    reader = _reader(root)
    for number, sample_id in enumerate(list(reader.sample_ids)):
        # Of an id that a forger gave to two samples it is one of them; verification refuses that.
        assert reader.sample_ids[reader.index_of(sample_id)] == sample_id
        assert reader.read(number).sample_id == sample_id
        assert reader.sample_ids[number] == sample_id


def attached(root: Path, scratch: Path) -> None:
    assert all(isinstance(array, np.ndarray) for array in _reader(root).attachments().values())


def live(root: Path, scratch: Path) -> None:
    reader = _reader(root, "live")
    reader.read_many(range(len(reader)))
    list(reader.sample_ids)


def arrays(root: Path, scratch: Path) -> None:
    from hsfmt.readers.arrays import open_zarr

    for columns in open_zarr(root).parts.values():
        for array in columns.values():
            array[:]


def _verified(level: str) -> Consumer:
    def consume(root: Path, scratch: Path) -> None:
        report = verify(root, level=level)  # type: ignore[arg-type]
        if not report.ok:
            raise RefusedError.at("verify", expected="ok", got=str(len(report.errors)))

    return consume


def sealed(root: Path, scratch: Path) -> None:
    from hsfmt import seal

    seal(root)


def sealed_with_more(root: Path, scratch: Path) -> None:
    from hsfmt import seal

    seal(root, attachments={"more": np.arange(3)}, drop_attachments=["d2t"], retract=["s-5"])


def written(root: Path, scratch: Path) -> None:
    with DatasetWriter(
        root, layers=LAYERS, hidden_size=HIDDEN, final_norm="pre", on_duplicate="skip", threads=1, chunk_tokens=4
    ) as writer:
        assert len(list(writer.committed_ids())) == len(writer.committed_ids())
        states = np.ones((2, len(LAYERS), HIDDEN), np.uint16)
        writer.write("s-0", [1, 2], states)
        writer.write("new", [1, 2], states)


def _commanded(*arguments: object) -> Consumer:
    return lambda root, scratch: command(*arguments[:1], root, *arguments[1:])


def _exported(target: str, *options: object) -> Consumer:
    return lambda root, scratch: command("export", root, scratch / target, "--to", target, "-q", *options)


def catted(root: Path, scratch: Path) -> None:
    for number in range(6):
        command("cat", root, "--index", number, "-o", scratch / f"{number}.npz", "--force")
    command("cat", root, "s-0", "--json")


def converted(root: Path, scratch: Path) -> None:
    source = scratch / "source"
    source.mkdir()
    tensors = {
        "hidden_states": FileTensor("bfloat16", np.ones((3, len(LAYERS), HIDDEN), np.uint16)),
        "token_ids": FileTensor("int64", np.arange(3)),
    }
    write_sample_file(source / "one.safetensors", tensors, {})
    command("convert", source, root, "--layer-ids", "1,3", "--final-norm", "pre", "-q")


READING: dict[str, Consumer] = {
    "read": sampled,
    "read windows": sampled_one_by_one,
    "metadata": metadata,
    "ids": named,
    "attachments": attached,
    "live": live,
    "zarr": arrays,
    "verify quick": _verified("quick"),
    "verify complete": _verified("complete"),
    "verify full": _verified("full"),
    "hsfmt verify": _commanded("verify", "--level", "full", "-q"),
    "hsfmt verify --json": _commanded("verify", "--level", "full", "--json"),
    "info": _commanded("info"),
    "info --json": _commanded("info", "--json"),
    "info live": _commanded("info", "--snapshot", "live"),
    "ls": _commanded("ls", "-l"),
    "ls --json": _commanded("ls", "-l", "--json"),
    "ls --holes": _commanded("ls", "--holes"),
    "cat": catted,
    "export safetensors": _exported("safetensors"),
    "export zarr": _exported("zarr"),
    "export npz live": _exported("npz", "--snapshot", "live"),
}
WRITING: dict[str, Consumer] = {
    "seal": sealed,
    "seal with attachments": sealed_with_more,
    "hsfmt seal": _commanded("seal", "--expect", "6", "--json"),
    "writer": written,
    "convert": converted,
}


def opened(root: Path, scratch: Path) -> None:
    from hsfmt.readers.dataset import HiddenStateDataset

    dataset = HiddenStateDataset(root, n_threads=1)
    assert len(dataset.lengths) == len(dataset)


def _torch(read: Callable[[Any], Any], **settings: Any) -> Consumer:
    def consume(root: Path, scratch: Path) -> Any:
        from hsfmt.readers.dataset import HiddenStateDataset

        return read(HiddenStateDataset(root, n_threads=1, **settings))

    return consume


TORCH: dict[str, Consumer] = {
    "open": opened,
    "items": _torch(list),
    "batch": _torch(lambda dataset: dataset.__getitems__(list(range(len(dataset))))),
    "window": _torch(lambda dataset: [dataset.read(i, 1, 2, layers=[3]) for i in range(len(dataset))]),
    "extras": _torch(list, extras=["topk", "weight", "score"]),
    "speculators": _torch(list, view="speculators"),
}


def _keeping(change: Callable[[Path, Path], Path]) -> Consumer:
    """Read all before and after a change that must keep it all; what could not be read before is anyone's guess."""

    def consume(root: Path, scratch: Path) -> None:
        try:
            before = sampled(root, scratch)
        except HsfmtError:
            before = None
        after = change(root, scratch)
        if before is not None:
            # There may be more: what a snapshot left out, its parts still have.
            assert before.items() <= sampled(after, scratch).items()

    return consume


def _collected(root: Path, scratch: Path) -> Path:
    from hsfmt import collect_garbage

    collect_garbage(root, older_than=timedelta(0), force=True)
    return root


def _compacted(root: Path, scratch: Path) -> Path:
    from hsfmt import compact

    compact(root)
    return root


def _merged(how: str) -> Callable[[Path, Path], Path]:
    def change(root: Path, scratch: Path) -> Path:
        from hsfmt import merge

        merge(scratch / "merged", [root], how=how)  # type: ignore[arg-type]
        return scratch / "merged"

    return change


def _merged_into(root: Path, scratch: Path) -> Path:
    """Another dataset goes into the hostile one."""
    from hsfmt import merge

    merge(root, [build(scratch / "clean", prefix="clean-")], how="copy")
    return root


def resumed(root: Path, scratch: Path) -> None:
    """Convert, and convert again: what is there is compared with its source."""
    converted(root, scratch)
    command(
        "convert", scratch / "source", root, "--layer-ids", "1,3", "--final-norm", "pre", "--cast", "bfloat16", "-q"
    )


MAINTAINING: dict[str, Consumer] = {
    "repair": _commanded("repair", "-q"),
    "repair --dry-run": _commanded("repair", "--dry-run"),
    "gc": _keeping(_collected),
    "compact": _keeping(_compacted),
    "merge": _keeping(_merged("copy")),
    "merge by link": _keeping(_merged("link")),
    "merge by move": _keeping(_merged("move")),
    "merge into": _keeping(_merged_into),
    "retract": _commanded("retract", "s-1"),
    "convert resumed": resumed,
}
# Whose value is compared with what the documents say.
GIVING = ("read", "read windows")
