"""The dataset that is swept: small, and with everything in it."""

import numpy as np
import pytest

from hsfmt import DatasetWriter, layout, seal


def build(root, seeds=(0, 1, 2, 3), **settings):
    """Two parts, one of each codec; extras of every kind, nulls, holes, a retraction, two snapshots, a vocabulary."""
    from sweep_paths import SETTINGS, write_sample

    for part, codec, rows in (("a", "none", seeds[:2]), ("b", "zstd", seeds[2:])):
        options = SETTINGS | settings
        with DatasetWriter(root, codec=codec, part_names=[part].pop, seal=part == "a", **options) as writer:
            for row, seed in enumerate(rows):
                write_sample(writer, f"{part}{row}", seed)
            writer.hole(f"{part}-lost", "no answer")
    (old,) = (root / layout.SNAPSHOTS).iterdir()
    seal(root, retract=["b1"], attachments={"d2t": np.arange(4)})
    return old.name


@pytest.fixture(scope="session")
def build_swept():
    """`build_swept(root, seeds, **settings)` writes the dataset, or one that differs in some way."""
    return build


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A sweep over the dataset in a folder and in the memory file system."""
    import fsspec
    from sweep_damage import Sweep, guarded
    from sweep_paths import OPTIONS, Place, everything

    from hsfmt.readers.sample_reader import SampleReader

    folder = tmp_path_factory.mktemp("sweep")
    root = folder / "d"
    old = build(root)
    url = f"memory://{folder.name}"
    memory = fsspec.filesystem("memory")
    for path in root.rglob("*"):
        if path.is_file():
            memory.pipe_file(f"/{folder.name}/{path.relative_to(root).as_posix()}", path.read_bytes())
    warm = SampleReader(root, options=OPTIONS)
    everything(warm)
    with guarded():
        yield Sweep(Place(root, url, f"xxh3_128:{old}", warm, folder))
    warm.close()
    memory.rm(f"/{folder.name}", recursive=True)
