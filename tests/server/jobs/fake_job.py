"""A fake of a job's process: counts to `steps`, and follows the protocol of `lathe.core.train.run.job_process`.

python -m tests.server.jobs.fake_job FOLDER --dataset PATH [--parent FILE] [--threads K]"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lathe.core.exit_status import ExitStatus


class Task:
    """A job's folder, with the files that the server reads and writes there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipe: dict[str, Any] = json.loads((folder / "recipe.json").read_text())
        self.stop = False
        signal.signal(signal.SIGTERM, self.asked)

    def asked(self, *_: object) -> None:
        self.stop = self.recipe.get("do") != "ignore SIGTERM"

    def emit(self, **event: Any) -> None:
        with open(self.folder / "events.jsonl", "a") as file:
            file.write(json.dumps(event) + "\n")

    def resumed(self) -> int:
        found = (self.folder / "checkpoints").glob("*") if (self.folder / "checkpoints").exists() else ()
        step = max((int(path.name) for path in found), default=0)
        self.emit(kind="resumed" if step else "started", step=step)
        return step

    def checkpoint(self, step: int) -> None:
        (self.folder / "checkpoints" / str(step)).mkdir(parents=True, exist_ok=True)
        self.emit(kind="checkpoint", step=step)

    def finish(self) -> None:
        aside = self.folder / "result.new"
        aside.mkdir()
        (aside / "model.onnx").write_text(self.recipe.get("model", "the model"))
        record = {"metrics": {"accuracy": 0.9}, "data": "d" * 64, "steps": self.recipe["steps"]}
        (aside / "metrics.json").write_text(json.dumps(record))
        (aside / "report.html").write_text("<h1>report</h1>")
        aside.rename(self.folder / "result")
        self.emit(kind="done", step=self.recipe["steps"])

    def work(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.stop and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.01))

    def misbehave(self, step: int) -> None:
        match self.recipe.get("do"):
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "crash once" if not (self.folder / "crashed").exists():
                (self.folder / "crashed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            case "refuse":
                print(json.dumps({"error": f"{self.folder}/data.csv: row 3, column 'x': expected a number, got 'a'"}))
                sys.exit(2)
            case "exit":
                sys.exit(9)
            case "no result":
                sys.exit(0)
            case "eat memory":
                self.eaten = bytearray(os.urandom(1 << 20) * 400)
                time.sleep(60)
            case "fill the disk":
                (self.folder / "big").write_bytes(bytes(20 << 20))
                time.sleep(60)
            case "write large checkpoints":
                aside = self.folder / "checkpoints" / f"{step}.new"
                aside.mkdir(parents=True)
                (aside / "state").write_bytes(bytes(3 << 20))
                if step > 1:
                    time.sleep(60)
                aside.rename(self.folder / "checkpoints" / str(step))
            case "start a child" if step == 1:
                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", str(self.folder)])
            case "talk":
                print("x" * 1000, file=sys.stderr)

    def run(self) -> int:
        if (self.folder / "result").exists():
            return 0
        for step in range(self.resumed() + 1, self.recipe["steps"] + 1):
            if self.stop:
                self.checkpoint(step - 1)
                return ExitStatus.STOPPED
            self.work(self.recipe.get("seconds", 0.0))
            self.misbehave(step)
            self.emit(kind="step", step=step, loss=1 / step)
            if step % self.recipe.get("every", 5) == 0:
                self.checkpoint(step)
        self.finish()
        return 0


if __name__ == "__main__":
    sys.exit(Task(Path(sys.argv[1])).run())
