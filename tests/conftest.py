from __future__ import annotations

import contextlib
import signal
import subprocess

import pytest
import torch

# a shell that starts the tests in the background has them ignore Ctrl-C, and so would all that they start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def seeded():
    """Each test draws the same numbers, whichever ran before it; tiny operations gain nothing from threads."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def spawn():
    """``subprocess.Popen`` with text pipes; what still runs when the test ends, ends with it, also when it fails."""
    with contextlib.ExitStack() as stack:

        def start(command, **options):
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            process = stack.enter_context(subprocess.Popen([*map(str, command)], **pipes, **options))
            stack.callback(process.kill)
            return process

        yield start
