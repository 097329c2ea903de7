"""A child's side of `pannier.cli.supervisor`: it does not outlive the process that started it."""

import os
import signal
import threading
import time

STDIN = 0
GRACE_S = 10.0


def follow_supervisor() -> None:
    """End this process once stdin, a pipe that the supervisor holds open, reaches its end."""
    threading.Thread(target=_follow, name="follow supervisor", daemon=True).start()


def _follow() -> None:
    while os.read(STDIN, 64):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)  # the same as a supervisor would give; a thread that hangs can't be asked twice
    os._exit(1)
