"""The command line, `attnscale COMMAND …`.

`parser` lists the commands and imports only the file of the requested one: `evaluate` (also `demo` and `run`),
`calibrate`, `theory`, `parallel_cost` (`plan`), `bench`, `export`, `recommend`, `show` (`doctor`, `policies`,
`watch`, `report`). Heavy imports happen only when a command runs. Help, `--version`, `doctor`, `policies` and
`report` print plain text and require only torch, `export` and `recommend` also transformers; the other commands
require the extra `cli`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from attnscale._util.optional import need
from attnscale.cli.parser import parse
from attnscale.errors import AttnScaleError

PLAIN = ("doctor", "export", "policies", "recommend", "report")  # print plain text, without a rich console
RESUMABLE = ("calibrate", "demo", "evaluate", "run")  # continue from the cells of an interrupted run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        arguments: words of the command line; default `sys.argv[1:]`.

    Returns:
        0 for success, 1 for a kernel with wrong results or a calibration that did not help, 2 for a user error, 130 for
        an interrupt.

    Raises:
        SystemExit: for `--help`, `--version` and errors in the options.
    """
    command = None
    try:
        options = parse(arguments)
        command = options.command
        if command in PLAIN:
            return int(options.run(options))
        return int(options.run(need("rich.console", f"attnscale {command}", "cli").Console(), options))
    except AttnScaleError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted" + "; run the same command again to continue" * (command in RESUMABLE), file=sys.stderr)
        return 130
