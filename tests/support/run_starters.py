"""Processes of the tests of run folders."""

import os
import time
from pathlib import Path
from typing import Any

from thrifty.core.errors import UsageError
from thrifty.training.run_folder import RunFolder


def start(path: Path, barrier: Any, results: Any) -> None:
    barrier.wait(60)
    try:
        run = RunFolder.create(path)
        run.write_text("recipe.toml", f"seed = {os.getpid()}\n")
        results.put("won")
        time.sleep(0.3)
        run.close()
    except UsageError as error:
        results.put(str(error))


def go_on(path: Path, barrier: Any, results: Any) -> None:
    barrier.wait(60)
    try:
        results.put(RunFolder.open(path).lock().notice)
        time.sleep(0.5)
    except UsageError as error:
        results.put(str(error))
    os._exit(9)  # without giving the lock back


def append_forever(path: Path) -> None:
    run = RunFolder(path)
    for step in range(1, 1_000_000):
        run.append({"kind": "step", "step": step, "text": "x" * 500})
