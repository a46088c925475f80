"""A process that does not outlive the one that started it, however that ends: killed, too."""

import os
import threading
import time
from multiprocessing import connection, parent_process

LOOK_S = 0.5


def end_with_parent(pid: int | None = None) -> None:
    """Ends this process at once when its parent has ended; watched by a thread from now on.

    Args:
        pid: the parent's, where ``multiprocessing`` did not start this process.
    """
    watch = _wait_for_end if pid is None else _wait_for_other
    threading.Thread(target=watch, args=() if pid is None else (pid,), daemon=True).start()


def _wait_for_end() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _wait_for_other(pid: int) -> None:
    while os.getppid() == pid:
        time.sleep(LOOK_S)
    os._exit(1)
