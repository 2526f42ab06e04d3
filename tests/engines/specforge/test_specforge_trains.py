"""The real trainer of SpecForge prints the same metrics from a dataset as from its own folder of files."""

import ast
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from program import environment, python_of, run
from specforge_files import FOLDERS, VENV, make_target, write_config, write_dataset

pytestmark = [pytest.mark.engine, pytest.mark.slow]
# Not by lines: the text of two ranks may stand in one.
STEP = re.compile(r"\bstep (\d+): (\{[^{}]*\})")
# Its losses are Triton kernels, which Triton itself runs here; compiling would take longer than all steps.
ON_THE_CPU = {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def sources(data_dir, tmp_path_factory) -> Callable[[str], tuple[Path, Path]]:
    """The folder and the dataset of an algorithm: the samples that it can be trained on, the same in both."""
    made = {}

    def make(algorithm: str) -> tuple[Path, Path]:
        if algorithm not in made:
            parent = tmp_path_factory.mktemp(algorithm)
            shutil.copytree(data_dir / "specforge" / FOLDERS[algorithm][0], parent / "files")
            if algorithm != "eagle3":
                (parent / "files" / "rows_0-2000" / "data_3.ckpt").unlink()
            made[algorithm] = parent / "files", write_dataset(data_dir, algorithm, parent / "dataset")
        return made[algorithm]

    return make


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    make_target(folder)
    return folder / "target"


@pytest.fixture(scope="module")
def trained(sources, target, tmp_path_factory) -> Callable[..., dict[int, list[dict[str, object]]]]:
    """Train once for each way that is asked for; return what was printed for each step, without what is about speed."""
    done = {}

    def train(how: str, algorithm: str, *overrides: str):
        key = how, algorithm, overrides
        if key not in done:
            folder = tmp_path_factory.mktemp("run")
            (folder / "target").symlink_to(target)
            config = write_config(folder, algorithm, sources(algorithm)[how == "ours"], save_interval=2)
            done[key] = metrics_of(run_trainer(how, config, *overrides))
            done[key][0] = [{"folder": folder}]
        return done[key]

    return train


def run_trainer(how: str, config: Path, *overrides: str, exit_code: int = 0) -> str:
    module = {"ours": ["hsfmt.cli.specforge_train"], "theirs": ["specforge.cli", "train"]}[how]
    words = ["--config", config, f"data.cache_dir={config.parent}/cache", *overrides]
    log = config.with_name(f"{len(list(config.parent.glob('*.log')))}.log")
    return run([python_of(VENV), "-m", *module, *words], log, environment(**ON_THE_CPU), exit_code=exit_code)


def metrics_of(text: str) -> dict[int, list[dict[str, object]]]:
    steps: dict[int, list[dict[str, object]]] = {}
    for number, printed in STEP.findall(text):
        metrics = ast.literal_eval(printed)
        plain = {name: value for name, value in metrics.items() if not name.startswith("perf/")}
        steps.setdefault(int(number), []).append(plain)
    return {number: sorted(printed, key=str) for number, printed in steps.items()}


def assert_same_steps(ours: dict[int, list[dict[str, object]]], theirs: dict[int, list[dict[str, object]]]) -> None:
    assert sorted(theirs) == [0, 1, 2, 3, 4]
    for step in range(1, 5):
        assert ours[step] == theirs[step], step
    losses = {metrics["loss"] for step in range(1, 5) for metrics in theirs[step] if "loss" in metrics}
    assert len(losses - {0.0}) >= 3, losses


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash", "dspark"])
def test_the_same_metrics_at_every_step(trained, algorithm):
    assert_same_steps(trained("ours", algorithm), trained("theirs", algorithm))


def test_in_two_threads_of_the_loader(trained):
    ours = trained("ours", "eagle3", "data.dataloader_num_workers=2")
    assert_same_steps(ours, trained("theirs", "eagle3"))


def test_two_ranks_with_evaluation(trained, sources):
    """Each launcher starts its own processes; which rank trains on what is the trainer's."""
    overrides = ["deployment.trainer.nproc_per_node=2", "training.eval_interval=2"]
    files, dataset = sources("eagle3")
    ours = trained("ours", "eagle3", *overrides, f"data.eval_hidden_states_path={dataset}")
    theirs = trained("theirs", "eagle3", *overrides, f"data.eval_hidden_states_path={files}")
    assert_same_steps(ours, theirs)
    assert any("eval/avg_loss" in metrics for metrics in theirs[2])
    assert theirs[1] != trained("theirs", "eagle3")[1]


def test_a_run_goes_on_in_the_middle_of_an_epoch(trained):
    """With the configuration of the whole run, since SpecForge compares the files that it was made of."""
    whole = trained("ours", "eagle3")
    folder = whole[0][0]["folder"]
    first, _ = sorted(path.parent for path in (folder / "out").glob("*-step*/training_state.pt"))
    more = [f"training.resume_from={first}", f"output_dir={folder}/resumed"]
    rest = metrics_of(run_trainer("ours", folder / "eagle3.json", *more))
    assert sorted(rest) == [3, 4]
    assert (rest[3], rest[4]) == (whole[3], whole[4])


def test_what_it_can_not_be_trained_on_is_refused(data_dir, target, tmp_path):
    (tmp_path / "target").symlink_to(target)
    write_dataset(data_dir, "eagle3", tmp_path / "dataset", final_norm="pre")
    config = write_config(tmp_path, "eagle3", tmp_path / "dataset")
    settings = json.loads(config.read_text())
    settings["model"]["aux_hidden_state_layer_ids"] = [1, 3, 6]
    config.write_text(json.dumps(settings))
    text = run_trainer("ours", config, exit_code=2)
    assert "layers [2, 4, 7, 8] (HF ids; SpecForge's [1, 3, 6], and the final one)" in text
    assert "stored are SpecForge's [1, 3, 4]" in text
    assert "train with speculators" in text


def test_the_plan_starts_our_module(data_dir, target, tmp_path):
    (tmp_path / "target").symlink_to(target)
    config = write_config(tmp_path, "eagle3", tmp_path / "dataset")
    options = ["--plan", "--hsfmt-snapshot", "live", "--hsfmt-layers", "2,4,5", "deployment.trainer.nproc_per_node=2"]
    command = [python_of(VENV), "-m", "hsfmt.cli.specforge_train", "-c", config, *options]
    text = run(command, tmp_path / "log", environment())
    plan = json.loads(text[text.index("{") :])
    argv = plan["commands"][0]["argv"]
    ours = ["hsfmt.cli.specforge_train", "--hsfmt-snapshot", "live", "--hsfmt-layers", "2,4,5"]
    assert argv[argv.index("--module") + 1 :][:6] == [*ours, "train"]


@pytest.mark.parametrize(
    ("text", "words", "code", "says"),
    [
        ("run_id: [", [], 2, "expected a configuration that SpecForge takes, got while parsing"),
        ("", [], 2, "expected a configuration that SpecForge takes, got "),
        ("run_id: a\nnothing: 1\n", [], 2, "nothing: "),
        (None, ["training.nothing=1"], 2, "override path 'training.nothing' does not exist"),
        (None, ["training.num_epochs=many"], 2, "training.num_epochs: "),
        (None, ["training.strategy=nothing"], 2, "nothing"),
    ],
)
def test_a_configuration_that_specforge_does_not_take(tmp_path, text, words, code, says):
    config = write_config(tmp_path, "eagle3", tmp_path / "dataset")
    if text is not None:
        config = tmp_path / "run.yaml"
        config.write_text(text)
    command = [python_of(VENV), "-m", "hsfmt.cli.specforge_train", "--plan", "-c", config, *words]
    printed = run(command, tmp_path / "log", environment(), exit_code=code)
    (line,) = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert line.startswith(" ".join(["error: --config", str(config), *words]))
    assert says in line
    assert "Traceback" not in printed


def test_the_run_of_the_documentation_is_taken(repo_root, tmp_path):
    text = (repo_root / "docs" / "specforge.md").read_text()
    (written,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "run.yaml").write_text(written)
    command = [python_of(VENV), "-m", "hsfmt.cli.specforge_train", "--plan", "-c", tmp_path / "run.yaml"]
    assert '"commands"' in run(command, tmp_path / "log", environment())
