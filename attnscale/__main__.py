"""`python -m attnscale`."""

import sys

from attnscale.cli import main

sys.exit(main())
