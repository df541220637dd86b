"""The command ``qlangevin``: parse the arguments, execute the command they name, report an error in one sentence.

Exit codes: 0 done, 1 something could not be done or saved, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .._version import __version__
from ..distributed.ranks import MissingRankError
from .errors import describe_error, fail, rank

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Execute the command line and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        print(f"qlangevin {__version__}")
        return 0
    try:
        return _execute(arguments)
    except SystemExit as exit:  # tyro has printed the help, or its objection to the arguments
        return exit.code if isinstance(exit.code, int) else 2
    except (ValueError, FileNotFoundError, FileExistsError, NotADirectoryError, MissingRankError) as error:
        return fail(f"error: {describe_error(error)}", 2)
    except (OSError, ArithmeticError, RuntimeError, MemoryError) as error:
        return fail(f"error: {describe_error(error)}", 1)
    except KeyboardInterrupt:
        return fail("interrupted", 130)


def _execute(arguments: Sequence[str]) -> int:
    """Parse and execute a command; its modules are imported here, so that Ctrl-C meanwhile is handled and --version is quick."""
    import tyro

    from .commands import CommandLine, Llc, Run

    names = {argument.partition("=")[0] for argument in arguments}
    if arguments[:1] == ["sweep"] and names & {"--method", "--format", "--seed"}:
        raise ValueError("a sweep takes several: --methods, --formats, --seeds instead of --method, --format, --seed")
    line = tyro.cli(
        CommandLine,
        prog="qlangevin",
        description="Low-precision stochastic gradient Langevin dynamics. --version prints the version.",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone, tyro.conf.OmitArgPrefixes),
    )
    if not isinstance(line.command, (Llc, Run)) and rank() is not None:
        raise ValueError(f"qlangevin {arguments[0]} is for one process; torchrun is for qlangevin run and llc")
    return line.command.execute()
