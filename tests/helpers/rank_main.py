"""A rank of an end-to-end test: ``train.py`` as the main program, with its process number and exit status in files.

torchrun starts this file instead of ``train.py``. It changes nothing but the named fault that a test asks for, on the
one rank that it names.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER, FAULT = "MEGALITE_TEST_FOLDER", "MEGALITE_TEST_FAULT"
FILE_SIZE_LIMIT = 64 * 1024


def _limit_file_size() -> None:
    """Let every write beyond the limit fail, as on a full disk; logs and status files stay below it."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE_LIMIT, FILE_SIZE_LIMIT))


def _signal_in_setup() -> None:
    """Receive SIGTERM when the ranks have joined and the model is about to be built."""
    from megalite.training import setup

    build_state = setup.build_state

    def signalled(*args: object) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return build_state(*args)

    setup.build_state = signalled


def _never_start() -> None:
    """Stay where a rank is that still imports its modules; the others wait for it to join."""
    while True:
        time.sleep(60)


_FAULTS: dict[str, Callable[[], None]] = {
    "limit_file_size": _limit_file_size,
    "signal_in_setup": _signal_in_setup,
    "never_start": _never_start,
}


def _note(name: str, value: int) -> None:
    rank = os.environ.get("RANK", "0")
    path = Path(os.environ[FOLDER]) / f"{name}.{rank}"
    temporary = path.with_suffix(f".{rank}.tmp")
    temporary.write_text(str(value))
    temporary.replace(path)


def _num_gloo_threads() -> int:
    """Threads of process groups that nobody has taken down; the end of the interpreter may abort in one."""
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").glob("*")]
    return sum("gloo" in name for name in names)


def main() -> None:
    # What "python train.py" would have in the first place.
    sys.path[0] = str(REPOSITORY)
    _note("pid", os.getpid())
    fault, _, rank = os.environ.get(FAULT, "").partition("@")
    if fault and rank == os.environ.get("RANK", "0"):
        _FAULTS[fault]()
    status = 1
    try:
        runpy.run_path(str(REPOSITORY / "train.py"), run_name="__main__")
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    finally:
        _note("threads", _num_gloo_threads())
        _note("status", status)


if __name__ == "__main__":
    main()
