"""A damaged file in a folder of every source, and every hostile folder: `doctor` and `convert` name it, none trips."""

import json
import shutil
from pathlib import Path

import pytest
from foreign_folders import FOLDERS

from hsfmt.readers.sample_reader import SampleReader

DAMAGES = {
    "cut": lambda data: data[: len(data) // 2],
    "web_page": lambda data: b"<!DOCTYPE html><html><title>404 Not Found</title></html>"[: len(data)],
    "empty": lambda data: b"",
    "last_byte": lambda data: data[:-1],
    "zeros": lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
    "bit": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
}
QUICK = ("cut", "web_page")
# Their bytes have no checksum: what damage leaves of the right size and shape can't be told from data.
UNCHECKED = {"vllm", "speculators", "deepspec", "automodel", "saelens", "memmap", "safetensors"}


def by_source(values=(None,)):
    """Every folder with each of the values, but for damage that its format can't show."""
    return [
        pytest.param(
            *(name, value) if value else (name,),
            id=f"{name}-{value}".replace(" ", "-").removesuffix("-None"),
            marks=[pytest.mark.torch] * folder.torch + [pytest.mark.slow] * (value is not None and value not in QUICK),
        )
        for name, folder in FOLDERS.items()
        for value in values
        if not (folder.source in UNCHECKED and value in ("zeros", "bit"))
    ]


@pytest.fixture(scope="module")
def good(hsfmt, data_dir, tmp_path_factory):
    """A folder, the report of its conversion and the samples."""
    made = {}

    def convert(name):
        if name not in made:
            place = tmp_path_factory.mktemp("good")
            path = FOLDERS[name].place(data_dir, place)
            report = hsfmt.json("convert", path, place / "dataset", *FOLDERS[name].flags)
            made[name] = path, report, content(place / "dataset")
        return made[name]

    return convert


def content(url: Path):
    reader = SampleReader(str(url))
    return {
        sample.sample_id: (sample.input_ids.tobytes(), sample.loss_mask.tobytes(), sample.hidden_states.tobytes())
        for sample in reader.read_many(range(len(reader)))
    }


@pytest.mark.parametrize("name", by_source())
def test_doctor_finds_what_convert_finds(hsfmt, good, name):
    path, report, _ = good(name)
    facts = hsfmt.json("doctor", path, *FOLDERS[name].flags)
    assert facts["source"]["format"] == report["source"]["format"] == FOLDERS[name].source
    assert facts["items"] == report["counts"]["sample"]
    assert facts["lengths"]["total"] == report["written"]["tokens"]
    for fact in ("layers", "final_norm", "dtype", "hidden_size"):
        assert facts[fact] == report["header"][fact]
    assert facts["problems"] == facts["missing"] == []


@pytest.mark.parametrize(("name", "damage"), by_source(DAMAGES))
def test_a_damaged_file_is_named(hsfmt, good, tmp_path, name, damage):
    original, report, samples = good(name)
    path, flags = (
        Path(shutil.copytree(original, tmp_path / "source", copy_function=shutil.copyfile)),
        FOLDERS[name].flags,
    )
    victim = max((path / key for key, fate in report["fates"].items() if fate in ("sample", "container")), key=size)
    victim.write_bytes(DAMAGES[damage](victim.read_bytes()))
    for command in (("doctor", path), ("convert", path, tmp_path / "raise"), ("convert", path, tmp_path / "hole")):
        words = ("--on-bad", "hole") if command[-1] == tmp_path / "hole" else ()
        result = hsfmt(*command, *flags, *words, "--json", code=None)
        document = json.loads(result.stdout)
        if result.exit_code or not words:
            assert result.exit_code in (1, 2, 3)
            assert victim.name in result.stdout
        else:
            left = content(tmp_path / "hole")
            assert left == {sample_id: samples[sample_id] for sample_id in left}
            assert len(left) < len(samples)
            assert victim.name in json.dumps(document["holes"])


@pytest.mark.parametrize("damage", QUICK)
def test_an_arrow_dataset_without_its_columns_is_named(hsfmt, data_dir, tmp_path, damage):
    """Which program wrote it is not known then."""
    path = Path(
        shutil.copytree(data_dir / "saelens" / "post_float32", tmp_path / "source", copy_function=shutil.copyfile)
    )
    (path / "dataset_info.json").write_bytes(DAMAGES[damage]((path / "dataset_info.json").read_bytes()))
    for command in (("doctor", path), ("convert", path, tmp_path / "d")):
        assert "dataset_info.json: expected a JSON document" in hsfmt(*command, code=1).stderr


def size(path: Path) -> int:
    return path.stat().st_size


@pytest.mark.torch
def test_doctor_and_convert_agree_on_every_hostile_folder(hsfmt, data_dir, tmp_path):
    expected = json.loads((data_dir / "adversarial" / "EXPECT.json").read_text())
    assert len(expected) == len([path for path in (data_dir / "adversarial").iterdir() if path.is_dir()])
    for name in expected:
        folder = data_dir / "adversarial" / name
        layers = ("--layer-ids", "8" if name == "none_value" else "2,4,5,8")
        codes = [
            hsfmt(*command, *layers, "--json", code=None).exit_code
            for command in (("doctor", folder), ("convert", folder, tmp_path / name))
        ]
        assert codes[0] == codes[1] in (0, 1), name
