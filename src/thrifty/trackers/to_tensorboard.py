"""TensorBoard: event files in FOLDER/RUN."""

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from thrifty.trackers.tracker import TrackedRun


class _EventFiles:
    def __init__(self, folder: Path, run: TrackedRun):
        self.folder, self.id = folder / run.name.replace("/", "."), run.name
        self._writer = SummaryWriter(str(self.folder))
        self._last = run.step
        if not run.id:
            self._writer.add_text("recipe", "    " + run.recipe.replace("\n", "\n    "), 0)  # as code in Markdown

    def log(self, step: int, values: Mapping[str, float], moment: float) -> None:
        if step < self._last:  # a resumed run: remove the later steps
            self._writer.close()
            self._writer = SummaryWriter(str(self.folder), purge_step=step)
        self._last = step
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=moment)

    def note(self, step: int, text: str) -> None:
        self._writer.add_text("events", text, step)

    def finish(self, summary: Mapping[str, float]) -> None:
        self._writer.close()


open_run = _EventFiles
