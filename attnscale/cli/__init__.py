"""The command line, `attnscale COMMAND …`.

`parser` knows the names of the commands and imports the file of the one that is asked for: `evaluate` (and `demo`),
`experiments` (`run`), `theory`, `bench`, `show` (`doctor`, `policies`, `watch`, `report`). `fields` makes options and
YAML keys of the dataclasses in `attnscale.lab`. Until a command begins its work nothing heavy is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from attnscale.errors import AttnScaleError

RESUMABLE = ("demo", "evaluate", "run")  # they go on from the cells that an interrupted run has written


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Exit codes: 0, 2 for a mistake of the user's, 1 for a kernel that gives a wrong result, 130."""
    try:
        import rich  # noqa: F401
    except ImportError:
        print("attnscale: the command line needs rich: pip install 'attnscale[cli]'", file=sys.stderr)
        return 2
    from attnscale.cli.parser import parse

    command = None
    try:
        options = parse(arguments)
        command = options.command
        from rich.console import Console

        return int(options.run(Console(), options))
    except AttnScaleError as error:
        from rich.console import Console
        from rich.markup import escape

        message = f"[red]{type(error).__name__}[/]: {escape(str(error))}"
        Console(stderr=True).print(message, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        print("interrupted" + "; run the same command again to go on" * (command in RESUMABLE), file=sys.stderr)
        return 130
