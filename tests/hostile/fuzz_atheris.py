# ruff: noqa: E402, T201  paths come before imports; a script that says how far it is
"""Coverage-guided fuzzing of the same targets, by atheris: `make fuzz`. Ends at the first error that is none of ours.

The first argument is a target or `all`; the rest goes to libFuzzer. An input that was found lies in a `crash-` file.
"""

import resource
import sys
import tempfile
import time
from pathlib import Path

import atheris

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

with atheris.instrument_imports(include=["hsfmt"]):
    import hsfmt.attachments
    import hsfmt.canonical
    import hsfmt.codecs
    import hsfmt.index
    import hsfmt.manifest
    import hsfmt.pointer
    import hsfmt.readers.sample_reader
    import hsfmt.snapshot
    import hsfmt.tables  # noqa: F401  instrumented by being imported here
from fuzz_targets import Targets

HEADROOM_NBYTES = 1 << 30


def main() -> None:
    name, *arguments = sys.argv[1:]
    folder = Path(tempfile.mkdtemp())
    targets = Targets(folder)
    names = sorted(targets.table) if name == "all" else [name]
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, chosen in enumerate(names):
        for at, seed in enumerate(targets.table[chosen][1]):
            prefix = bytes([number]) if name == "all" else b""
            (corpus / f"{chosen}-{at}").write_bytes(prefix + seed)
    counts = {"run": 0, "taken": 0}
    start = time.monotonic()

    def once(data: bytes) -> None:
        if name == "all":
            if not data:
                return
            chosen, data = names[data[0] % len(names)], data[1:]
        else:
            chosen = name
        counts["run"] += 1
        counts["taken"] += targets.run(chosen, data)
        if counts["run"] % 20_000 == 0:
            print(
                f"{counts['run']} executions of {name}, {counts['taken']} taken, {time.monotonic() - start:.0f} s",
                flush=True,
            )

    with Path("/proc/self/statm").open("rb") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + HEADROOM_NBYTES, resource.RLIM_INFINITY))
    atheris.Setup([sys.argv[0], "-rss_limit_mb=0", *arguments, str(corpus)], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
