"""The command `recommend`: what a model needs to read longer texts."""

from __future__ import annotations

import json
from argparse import Namespace

from attnscale.cli.parser import Parser


def recommend(parser: Parser) -> None:
    """Options of `attnscale recommend`."""
    parser.set_defaults(run=_recommend)
    parser.show_examples("MODEL --to 131072", "MODEL --to 131072 --trained-length 32768 --json")
    about = "folder with the config.json of a HuggingFace model, or embedded; weights are not needed"
    parser.add_argument("model", metavar="MODEL", help=about)
    parser.add_argument("--to", type=int, required=True, metavar="LENGTH", help="the length to read, in tokens")
    trained = "length at which the model was trained, if its config is wrong or does not say"
    parser.add_argument("--trained-length", type=int, metavar="N", help=trained)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _recommend(options: Namespace) -> int:
    from attnscale.hf import recommend
    from attnscale.lab.inputs import EMBEDDED, embedded_folder

    model = embedded_folder() if options.model == EMBEDDED else options.model
    found = recommend(model, options.to, trained_length=options.trained_length)
    print(json.dumps(found.to_dict(), indent=2, ensure_ascii=False) if options.json else found)
    return 0
