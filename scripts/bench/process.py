"""A contender in a process of its own, timed by this one.

The process is told by its first line what to build and then answers a line for each line: ``time N``, ``memory``. It
starts fresh, so that neither its memory nor its allocator knows anything of the contenders before it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from metasam.scripts.bench.contest import Here, LeftOut, Settings

MODULE = "metasam.scripts.bench.process"


class Process:
    """A `metasam.scripts.bench.contest.Racer` elsewhere.

    Args:
        work: name of the work.
        title: of the contest.
        contender: its name there.
        settings: how to measure.
        keep: whether the process keeps freed memory.
    """

    def __init__(self, work: str, title: str, contender: str, settings: Settings, keep: bool) -> None:
        told = {"work": work, "title": title, "contender": contender, "keep": keep, **dataclasses.asdict(settings)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._send(json.dumps(told))

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and the missing answer says so
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def _ask(self, line: str) -> Any:
        assert self._process.stdout is not None
        self._send(line)
        answer = self._process.stdout.readline()
        if not answer:
            status = self._process.wait()
            killed = "; a process that needs too much memory is killed" if status == -9 else ""
            raise LeftOut(f"its process ended with status {status}{killed}")
        found = json.loads(answer)
        if isinstance(found, dict) and "left_out" in found:
            raise LeftOut(found["left_out"])
        return found

    def time(self, calls: int) -> float:
        return float(self._ask(f"time {calls}"))

    def memory(self) -> dict[str, float] | None:
        found: dict[str, float] | None = self._ask("memory")
        return found

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def resident() -> dict[str, float] | None:
    """MiB that this process has ``now`` and had at the ``peak``; None where the system does not tell.

    Not ``ru_maxrss``: on Linux a process starts with that of its parent.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    known = dict(line.split(":", 1) for line in lines if ":" in line)
    try:
        now, peak = (int(known[key].split()[0]) / 1024 for key in ("VmRSS", "VmHWM"))
    except (KeyError, ValueError, IndexError):
        return None
    return {"now": now, "peak": peak}


def serve() -> None:
    """Be the contender that the first line of standard input describes."""
    from metasam.scripts.bench.works import WORKS
    from metasam.scripts.memory import keep_freed_memory

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a package prints is no answer

    def answer(value: Any) -> None:
        answers.write(f"{json.dumps(value)}\n")
        answers.flush()

    told = json.loads(sys.stdin.readline())
    work, title, contender = told.pop("work"), told.pop("title"), told.pop("contender")
    if told.pop("keep"):
        keep_freed_memory()
    settings = Settings(**told)
    torch.set_num_threads(settings.threads)
    torch.manual_seed(0)
    contest = next(c for c in WORKS[work](settings) if c.title == title)
    here: Here | None = None
    before: dict[str, float] | None = None
    for line in sys.stdin:
        try:
            if here is None:
                here = Here(contest.contenders[contender], settings)
                before = resident()
            if line.startswith("time "):
                answer(here.time(int(line.split()[1])))
            else:
                found = resident()
                answer(None if found is None or before is None else {**found, "before": before["peak"]})
        except LeftOut as why:
            answer({"left_out": str(why)})


if __name__ == "__main__":
    serve()
