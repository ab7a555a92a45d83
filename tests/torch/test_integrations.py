"""Trainers and trackers, each the real library: what is recorded within them, and where its figures and page go.

`pip install transformers accelerate lightning tensorboard wandb mlflow-skinny`; what is missing is skipped by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trainer_programs
from warm_python import WarmPython

import keepbusy
from keepbusy.integrations import WatchedTraining, figures, log_to
from keepbusy.timeline.files import BadInput

pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's libraries
RUN = Path(__file__).parents[1] / "gpu" / "truth" / "live" / "item_every_step.busy"
HELD = """
import json
from pathlib import Path
from keepbusy.integrations import figures
found = recording.tracker if hasattr(recording, "tracker") else recording.training.diagnosis
Path("figures.json").write_text(json.dumps(figures(found)))
"""


@pytest.fixture(scope="module")
def diagnosis() -> Any:
    return keepbusy.explain(keepbusy.load(RUN))


def test_the_figures_are_those_of_the_report(diagnosis: Any) -> None:
    told = figures(diagnosis)
    assert told["keepbusy/step"] == diagnosis.plain_step / 1e6
    ledger = sum(time for name, time in told.items() if name.startswith("keepbusy/ledger/"))
    assert ledger == pytest.approx(told["keepbusy/step"])
    gains = {name: time for name, time in told.items() if "/predicted_gain/" in name}
    assert sum(gains.values()) == pytest.approx(sum(one.gain for one in diagnosis.plan) / 1e6)
    assert any(name.endswith(f":{diagnosis.plan[0].where[0].line}") for name in gains)


def test_tensorboard_has_the_figures_the_report_and_the_page(diagnosis: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="there is no tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        log_to(diagnosis, writer, step=7)
    assert scalars(tmp_path) == {name: (7, pytest.approx(time)) for name, time in figures(diagnosis).items()}
    assert (tmp_path / "keepbusy.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_weights_and_biases_has_the_figures_and_the_page(
    diagnosis: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="there is no wandb")
    for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    with wandb.init(mode="offline", project="keepbusy", settings=wandb.Settings(silent=True)) as run:
        log_to(diagnosis)  # the run that is open
        summary = {name: run.summary[name] for name in figures(diagnosis)}
    assert summary == figures(diagnosis)
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.read_bytes().startswith(b"<!DOCTYPE html>") for path in kept)


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    library = pytest.importorskip("mlflow", reason="there is no mlflow")
    library.set_tracking_uri((tmp_path / "mlruns").as_uri())
    yield library
    library.set_tracking_uri("")


def test_mlflow_has_the_figures_and_the_page(diagnosis: Any, mlflow: Any) -> None:
    with mlflow.start_run() as run:
        log_to(diagnosis, step=7)
    found = mlflow.get_run(run.info.run_id)
    assert found.data.metrics == pytest.approx(figures(diagnosis))
    page = mlflow.artifacts.load_text(f"{found.info.artifact_uri}/keepbusy.html")
    assert page.startswith("<!DOCTYPE html>")


def test_what_is_no_tracker_is_one_sentence(diagnosis: Any) -> None:
    with pytest.raises(BadInput, match="list is no run of Weights & Biases or MLflow, and no SummaryWriter"):
        log_to(diagnosis, [])


def test_a_page_that_is_being_read_stays_whole_while_another_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, page = WatchedTraining(), tmp_path / "keepbusy.html"
    monkeypatch.setattr(training, "leave", lambda: keepbusy.load(RUN))
    page.write_text("the page of an earlier training", encoding="utf-8")
    with page.open(encoding="utf-8") as reader:
        assert training.end(tmp_path) is not None
        assert reader.read() == "the page of an earlier training"
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def scalars(folder: Path) -> dict[str, tuple[int, Any]]:
    """What TensorBoard itself reads there, of ours: the step and the value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    last = {name: events.Scalars(name)[-1] for name in events.Tags()["scalars"] if name.startswith("keepbusy/")}
    return {name: (one.step, one.value) for name, one in last.items()}


def trained(program: str, folder: Path, warm_python: WarmPython, **variables: str) -> dict[str, float]:
    """The figures that the program itself holds at its end, on the virtual GPU."""
    script = folder / "train.py"
    script.write_text(program + HELD, encoding="utf-8")
    command = ("run", "--clock", "modelled", "--values", "none", "--quiet", "train.py")
    done = warm_python.keepbusy(*command, cwd=folder, env={**os.environ, **variables})
    assert done.returncode == 0, done.stderr
    assert "keepbusy.html shows for what the GPU waited" in done.stderr
    found: dict[str, float] = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    assert found["keepbusy/step"] > 0
    return found


def test_a_training_of_transformers(mlflow: Any, tmp_path: Path, warm_python: WarmPython) -> None:
    for name in ("transformers", "accelerate", "tensorboard"):
        pytest.importorskip(name, reason=f"there is no {name}")
    runs = (tmp_path / "mlruns").as_uri()
    program = trainer_programs.TRANSFORMERS.replace("REPORT_TO", '["tensorboard", "mlflow"]')
    found = trained(program, tmp_path, warm_python, MLFLOW_TRACKING_URI=runs)
    (events,) = (tmp_path / "out" / "runs").iterdir()
    assert scalars(events) == {name: (12, pytest.approx(time)) for name, time in found.items()}
    (run,) = mlflow.MlflowClient(runs).search_runs(["0"])
    assert {name: run.data.metrics[name] for name in found} == pytest.approx(found)
    assert (tmp_path / "out" / "keepbusy.html").exists()


def test_a_training_of_lightning(tmp_path: Path, warm_python: WarmPython) -> None:
    for name in ("lightning", "tensorboard"):
        pytest.importorskip(name, reason=f"there is no {name}")
    found = trained(trainer_programs.LIGHTNING, tmp_path, warm_python)
    assert any(name.endswith("at train.py:16") for name in found)  # the line that reads the loss
    assert scalars(tmp_path / "logs" / "lightning_logs" / "version_0").keys() == found.keys()
    assert "keepbusy/step" in (tmp_path / "table" / "lightning_logs" / "version_0" / "metrics.csv").read_text()


def test_a_training_of_accelerate(tmp_path: Path, warm_python: WarmPython) -> None:
    pytest.importorskip("accelerate", reason="there is no accelerate")
    found = trained(trainer_programs.ACCELERATE, tmp_path, warm_python)
    assert any(name.endswith("at train.py:19") for name in found)
    assert (tmp_path / "out" / "keepbusy.html").exists()


def test_without_a_gpu_a_training_goes_on_and_is_told_so(tmp_path: Path, warm_python: WarmPython) -> None:
    pytest.importorskip("accelerate", reason="there is no accelerate")
    (tmp_path / "train.py").write_text(trainer_programs.ACCELERATE + "print(recording.tracker)\n", encoding="utf-8")
    done = warm_python.python("train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "None\n")
    assert (
        "keepbusy: there is no GPU here, so nothing is recorded; `keepbusy run` lends a virtual one.\n" in done.stderr
    )
