"""The command line, `attnscale COMMAND …`.

`parser` knows the names of the commands and imports the file of the one that is asked for: `evaluate` (also `demo`
and `run`), `theory`, `parallel_cost` (`plan`), `bench`, `show` (`doctor`, `policies`, `watch`, `report`). Until a
command begins its work nothing heavy is imported here.
Help, `--version`, `doctor`, `policies` and `report` print plain text and need torch alone; the other commands need the
extra `cli`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from attnscale._util.optional import need
from attnscale.cli.parser import parse
from attnscale.errors import AttnScaleError

PLAIN = ("doctor", "policies", "report")  # they get no console
RESUMABLE = ("demo", "evaluate", "run")  # they go on from the cells that an interrupted run has written


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Exit codes: 0, 2 for a mistake of the user's, 1 for a kernel that gives a wrong result, 130."""
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
        print("interrupted" + "; run the same command again to go on" * (command in RESUMABLE), file=sys.stderr)
        return 130
