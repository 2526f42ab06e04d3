"""The tree is the same on every machine."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

# Where a checkout or an interpreter lay on the machine of whoever wrote the file. Spelled in pieces, so that this file
# passes its own test.
MACHINE_PATH = re.compile(
    "|".join([r"(?<![\w.])/wo" + r"rk/(?:main|shared|\.)", "/ro" + r"ot/\.", r"(?<![\w.])/ho" + r"me/\w"])
)
REGISTRY_HOST = re.compile(
    "|".join(
        re.escape(host + end)
        for host, end in [
            ("pypi.", "org"),
            ("pythonhosted.", "org"),
            ("download.pytorch.", "org"),
            ("registry.npmjs.", "org"),
            ("deb.debian.", "org"),
            ("index.crates.", "io"),
        ]
    )
)
# What other programs wrote, as they wrote it.
FOREIGN = ("tests/data/",)


@pytest.fixture(scope="module")
def tracked(repo_root) -> list[Path]:
    """Files of the repository: those that git has, and those it would take."""
    if shutil.which("git") is None or not (repo_root / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=repo_root,
        capture_output=True,
        text=True,
        check=True,
    )
    return [repo_root / name for name in listing.stdout.split("\0") if name and (repo_root / name).is_file()]


def text_files(tracked: list[Path], repo_root: Path) -> dict[str, str]:
    texts = {}
    for path in tracked:
        name = path.relative_to(repo_root).as_posix()
        data = path.read_bytes()
        if not name.startswith(FOREIGN) and b"\0" not in data[:8192]:
            texts[name] = data.decode("utf-8", errors="replace")
    return texts


@pytest.mark.parametrize("pattern", [MACHINE_PATH, REGISTRY_HOST], ids=["machine paths", "registry hosts"])
def test_no_text_file_names_a_machine(tracked, repo_root, pattern):
    found = [
        f"{name}:{number}: {match[0]}"
        for name, text in text_files(tracked, repo_root).items()
        for number, line in enumerate(text.splitlines(), 1)
        if (match := pattern.search(line))
    ]
    assert found == []


def test_test_data_is_complete(repo_root, data_dir, tracked):
    """No ignore rule swallows a file of the test data, the empty .lock files among them."""
    on_disk = {path for path in data_dir.rglob("*") if path.is_file()}
    assert on_disk <= set(tracked)
    assert len(list(data_dir.glob("vllm/*/*.lock"))) == 16


def test_only_scripts_are_executable(tracked, repo_root):
    executable = {path.relative_to(repo_root).as_posix() for path in tracked if path.stat().st_mode & 0o111}
    assert executable <= {".ci/run"}


def pins(path: Path) -> dict[str, str]:
    """Return {package: version} of a file of constraints, by pip's spelling of names."""
    found = re.findall(r"^([\w.-]+)==(\S+)", path.read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def test_the_constraints_of_the_bench_agree_with_all_others(repo_root: Path) -> None:
    """Both hold at once, and pip refuses what two files pin differently; but for what the Makefile leaves out."""
    here, bench = pins(repo_root / "constraints.txt"), pins(repo_root / "bench" / "constraints.txt")
    left_out = set(re.findall(r"sed '/\^(\w+)==/d' constraints.txt", (repo_root / "Makefile").read_text()))
    assert left_out == {"huggingface_hub"}
    shared = here.keys() & bench.keys() - {"huggingface-hub"}
    assert len(shared) > 5
    assert {name: bench[name] for name in shared} == {name: here[name] for name in shared}
