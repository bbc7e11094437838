"""The command `export`: a checkpoint with policies in the format of a serving engine."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from attnscale.cli.parser import Parser


def export(parser: Parser) -> None:
    """Options of `attnscale export`."""
    parser.set_defaults(run=_export)
    parser.show_examples("MODEL --to vllm", "MODEL --to gguf --output served --tokenizer base.gguf")
    parser.add_argument("model", metavar="MODEL", help="folder or Hub id of a model saved with a policy")
    about = (
        "vllm: for vLLM with attnscale, which vLLM without it refuses; mistral: a Ministral 3 checkpoint for vLLM, "
        "SGLang and transformers without attnscale; gguf: for llama.cpp; onnx: a graph with dynamic length, in fp32"
    )
    parser.add_argument("--to", required=True, metavar="FORMAT", help=about)
    parser.add_argument("--output", type=Path, metavar="DIR", help="a new folder (default: ./MODEL-FORMAT)")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="gguf: take the tokenizer from this GGUF file")


def _export(options: Namespace) -> int:
    from attnscale.serve.export import export_model

    export = export_model(options.model, options.to, options.output, tokenizer=options.tokenizer)
    lengths = " and ".join(map(str, export.lengths))
    print(f"largest difference from the source in log-probability: {export.difference:.2g}, at {lengths} tokens")
    print(f"wrote {export.path}")
    return 0
