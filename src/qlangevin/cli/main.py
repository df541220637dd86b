"""The command ``qlangevin``: parse the arguments, run the command they name, turn what goes wrong into a sentence.

Exit codes: 0 done, 1 something could not be done or saved, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from typing import Any

import tyro

from .._version import __version__
from ..distributed.ranks import MissingRankError
from . import display
from .commands import Command, Run

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        print(f"qlangevin {__version__}")
        return 0
    try:
        command = _parsed(arguments)
        if command is not None and not isinstance(command, Run) and display.rank() is not None:
            raise ValueError(f"qlangevin {arguments[0]} is for one process; torchrun is for qlangevin run")
        return 0 if command is None else command.execute()
    except (ValueError, FileNotFoundError, FileExistsError, NotADirectoryError, MissingRankError) as error:
        return display.fail(f"error: {display.sentence(error)}", 2)
    except (OSError, ArithmeticError, RuntimeError, MemoryError) as error:
        return display.fail(f"error: {display.sentence(error)}", 1)
    except KeyboardInterrupt:
        return display.fail("interrupted", 130)


def _parsed(arguments: Sequence[str]) -> Any:
    """The command that was given; None if it was for help, which is printed. What tyro has against it is a ValueError."""
    names = {argument.partition("=")[0] for argument in arguments}
    if arguments[:1] == ["sweep"] and names & {"--method", "--format", "--seed"}:
        raise ValueError("a sweep takes several: --methods, --formats, --seeds instead of --method, --format, --seed")
    with redirect_stderr(io.StringIO()) as said:
        try:
            return tyro.cli(
                Command,
                prog="qlangevin",
                description="Low-precision stochastic gradient Langevin dynamics. --version prints the version.",
                args=arguments,
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone, tyro.conf.OmitArgPrefixes),
            )
        except SystemExit as stop:
            if stop.code:
                raise ValueError(display.complaint(said.getvalue())) from None
            return None
