"""Integrations with trainers, experiment trackers and notebooks.

Each has a file of its own, which its users import: `from keepbusy.integrations.transformers import TrainerRecording`.
This file holds what they share: logging a diagnosis to Weights & Biases, TensorBoard and MLflow, each through its own
library, and recording a training from within its process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from keepbusy.explain.diagnosis import Diagnosis
from keepbusy.program import ENDED
from keepbusy.report import verdict
from keepbusy.report.page import render as render_page
from keepbusy.timeline.files import BadInput, write_whole
from keepbusy.timeline.model import Timeline
from keepbusy.timeline.steps import without_first_steps

_PAGE = "keepbusy.html"


def log_to(diagnosis: Diagnosis, *trackers: Any, step: int | None = None) -> None:
    """Log a diagnosis: its figures as metrics in milliseconds, and its page.

    A tracker is a run of Weights & Biases, a `SummaryWriter` of TensorBoard or a run of MLflow. Without one, it is
    logged to the open runs of Weights & Biases and MLflow in this process.
    """
    for tracker in trackers or _open_runs():
        library = type(tracker).__module__.partition(".")[0]
        if library == "wandb":
            _log_to_wandb(diagnosis, tracker)
        elif library == "mlflow":
            log_to_mlflow(diagnosis, sys.modules["mlflow"].MlflowClient(), tracker.info.run_id, step)
        elif hasattr(tracker, "add_scalar"):
            _log_to_tensorboard(diagnosis, tracker, step)
        else:
            raise BadInput(f"{type(tracker).__name__} is no run of Weights & Biases or MLflow, and no SummaryWriter.")


def _open_runs() -> list[Any]:
    """Open runs of the libraries that this process has imported."""
    wandb, mlflow = sys.modules.get("wandb"), sys.modules.get("mlflow")
    return [run for run in (wandb and wandb.run, mlflow and mlflow.active_run()) if run]


def _log_to_wandb(diagnosis: Diagnosis, run: Any) -> None:
    """Without a step: Weights & Biases would drop a row with a step of the past."""
    run.log(figures(diagnosis))
    page = sys.modules["wandb"].Artifact(f"keepbusy-{run.id}", type="report")
    with page.new_file(_PAGE, encoding="utf-8") as file:
        file.write(_page_of(diagnosis))
    run.log_artifact(page)


def _log_to_tensorboard(diagnosis: Diagnosis, writer: Any, step: int | None) -> None:
    """TensorBoard shows no pages, so the page is written beside its events, and the report is logged as text."""
    for name, time in figures(diagnosis).items():
        writer.add_scalar(name, time, step)
    page = Path(writer.log_dir) / _PAGE
    write_whole(page, _page_of(diagnosis))
    report = verdict.render(diagnosis).replace("\n", "\n    ")
    writer.add_text("keepbusy", f"The page: {page}\n\n    {report}", step)
    writer.flush()


def log_to_mlflow(diagnosis: Diagnosis, client: Any, run: str, step: int | None) -> None:
    for name, time in figures(diagnosis).items():
        client.log_metric(run, name, time, step=step)
    client.log_text(run, _page_of(diagnosis), _PAGE)


def figures(diagnosis: Diagnosis) -> dict[str, float]:
    """Milliseconds per step: the ledger, and the predicted saving of each fix after the earlier ones of the plan."""
    times = {"step": diagnosis.plain_step, "waiting": diagnosis.waiting, "predicted_step": diagnosis.predicted.step}
    times |= {f"ledger/{place}": time for place, time in diagnosis.ledger.items()}
    for fix in diagnosis.plan:
        name = " at ".join([f"predicted_gain/{fix.fix}", *(Path(str(where)).name for where in fix.where[:1])])
        times[name] = times.get(name, 0) + fix.gain
    return {f"keepbusy/{name}": time / 1e6 for name, time in times.items()}


def _page_of(diagnosis: Diagnosis) -> str:
    return str(render_page(diagnosis.with_turns()))


class WatchedTraining:
    """A training between `begin` and `end`: recorded on a real GPU, taken from the clock of a virtual one.

    It never makes a training fail: an error is one sentence on standard error.
    """

    def __init__(self) -> None:
        self.diagnosis: Diagnosis | None = None
        self._session: Any = None
        self._is_on = False

    def begin(self) -> None:
        import torch

        import keepbusy

        if self._is_on:
            return
        if not torch.cuda.is_available():
            _say("there is no GPU here, so nothing is recorded; `keepbusy run` lends a virtual one")
        elif _machine() is not None:
            self._is_on = True
        elif not ENDED:  # otherwise `keepbusy run` records this process already, and will report
            self._is_on, self._session = True, keepbusy.record()
            self._session.__enter__()

    def end(self, folder: str | Path) -> Diagnosis | None:
        """The diagnosis, the first time; its page is written into the folder."""
        import keepbusy

        page = Path(folder) / _PAGE
        try:
            if (timeline := self.leave()) is None:
                return None
            self.diagnosis = keepbusy.explain(without_first_steps(timeline))
            page.parent.mkdir(parents=True, exist_ok=True)
            write_whole(page, _page_of(self.diagnosis))
        except Exception as error:
            is_expected = isinstance(error, BadInput | OSError)
            _say(str(error) if is_expected else f"a bug of keepbusy: {type(error).__name__}: {error}")
        else:
            _say(f"{page} shows for what the GPU waited")
        return self.diagnosis

    def leave(self) -> Timeline | None:
        """The timeline, the first time, for callers that merge several ranks."""
        if not self._is_on:
            return None
        self._is_on = False
        source = Path(sys.argv[0]).name or "this training"
        machine = _machine()
        if machine is None:
            self._session.__exit__(None, None, None)
            timeline: Timeline = self._session.whole.change_facts(source=source)
        else:
            timeline = machine.clock.timeline(**machine.facts(), source=source)
        return timeline


def _machine() -> Any:
    """The virtual machine of this process, if it has one."""
    module = sys.modules.get("keepbusy.virtual.machine")
    return module.MACHINE if module and hasattr(module.MACHINE, "clock") else None


def _say(sentence: str) -> None:
    sys.stderr.write(f"keepbusy: {sentence.rstrip('.')}.\n")
