"""Pretrain a GPT: ``torchrun --nproc-per-node 4 train.py configs/x.yaml [--section.key=value ...]``.

Exit status of a rank: 0 finished or stopped as asked; 2 configuration; 3 data or checkpoint; 4 a save failed; 1 else.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Sequence

from megalite.config.cli import parse_command_line
from megalite.training.loop import train
from megalite.training.setup import training_run
from megalite.utils.errors import MegaliteError
from megalite.utils.logging import setup_logging

logger = logging.getLogger("megalite")


def main(arguments: Sequence[str]) -> int:
    """Run what the command line asks for and return the exit status of this rank."""
    setup_logging(int(os.environ.get("RANK", "0")))
    try:
        command = parse_command_line(arguments)
        if command.config is None:
            if os.environ.get("RANK", "0") == "0":
                sys.stdout.write(command.text)
            return 0
        with training_run(command.config) as ctx:
            reason = train(ctx)
            logger.info("stopped at iteration %d: %s", ctx.progress.iteration, reason.value)
        return 0
    except MegaliteError as error:
        logger.error("%s", error)
        return error.exit_status


if __name__ == "__main__":
    exit_status = main(sys.argv[1:])
    # An error leaves its frames in cycles, and they hold process groups. A thread of gloo that meets the end of the
    # interpreter aborts the process, whatever its status was to be.
    gc.collect()
    sys.exit(exit_status)
