"""What was explained, in Weights & Biases, TensorBoard and MLflow: each through its own library, that the user has."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from keepbusy.explain.diagnosis import Diagnosis
from keepbusy.report import terminal
from keepbusy.report.page import page_file
from keepbusy.timeline.errors import BadInput

PAGE = "keepbusy.html"


def figures(diagnosis: Diagnosis) -> dict[str, float]:
    """Milliseconds a step: where they go, and what each fix of the plan is predicted to save after those before it."""
    times = {"step": diagnosis.plain_step, "waiting": diagnosis.waiting, "predicted_step": diagnosis.predicted.step}
    times |= {f"ledger/{place}": time for place, time in diagnosis.ledger.items()}
    for one in diagnosis.plan:
        name = " at ".join([f"predicted_gain/{one.fix}", *(Path(str(where)).name for where in one.where[:1])])
        times[name] = times.get(name, 0) + one.gain
    return {f"keepbusy/{name}": time / 1e6 for name, time in times.items()}


def page_of(diagnosis: Diagnosis) -> str:
    return str(page_file.render(diagnosis.with_turns()))


def log_to(diagnosis: Diagnosis, *trackers: Any, step: int | None = None) -> None:
    """Keep what was explained where the run's figures are kept: metrics in milliseconds, and the page.

    A tracker is a run of Weights & Biases, a `SummaryWriter` of TensorBoard or a run of MLflow. Without one: the runs
    of Weights & Biases and of MLflow that this process has open.
    """
    for tracker in trackers or _open_runs():
        home = type(tracker).__module__.partition(".")[0]
        if home == "wandb":
            _log_to_wandb(diagnosis, tracker)
        elif home == "mlflow":
            log_to_mlflow(diagnosis, sys.modules["mlflow"].MlflowClient(), tracker.info.run_id, step)
        elif hasattr(tracker, "add_scalar"):
            _log_to_tensorboard(diagnosis, tracker, step)
        else:
            raise BadInput(f"{type(tracker).__name__} is no run of Weights & Biases or MLflow, and no SummaryWriter.")


def _open_runs() -> list[Any]:
    """Of libraries that this process has imported."""
    wandb, mlflow = sys.modules.get("wandb"), sys.modules.get("mlflow")
    return [run for run in (wandb and wandb.run, mlflow and mlflow.active_run()) if run]


def _log_to_wandb(diagnosis: Diagnosis, run: Any) -> None:
    """Its steps are its own: a row that names one of the past would be dropped."""
    run.log(figures(diagnosis))
    page = sys.modules["wandb"].Artifact(f"keepbusy-{run.id}", type="report")
    with page.new_file(PAGE, encoding="utf-8") as file:
        file.write(page_of(diagnosis))
    run.log_artifact(page)


def _log_to_tensorboard(diagnosis: Diagnosis, writer: Any, step: int | None) -> None:
    """It shows no pages, so the page lies beside its events, and the report is its text."""
    for name, time in figures(diagnosis).items():
        writer.add_scalar(name, time, step)
    page = Path(writer.log_dir) / PAGE
    page.write_text(page_of(diagnosis), encoding="utf-8")
    report = terminal.render(diagnosis).replace("\n", "\n    ")
    writer.add_text("keepbusy", f"The page: {page}\n\n    {report}", step)
    writer.flush()


def log_to_mlflow(diagnosis: Diagnosis, client: Any, run: str, step: int | None) -> None:
    for name, time in figures(diagnosis).items():
        client.log_metric(run, name, time, step=step)
    client.log_text(run, page_of(diagnosis), PAGE)
