"""Apply a temperature law to a HuggingFace model, measure the effect on a text, and save the result.

python scripts/examples/swap_into_a_model.py HuggingFaceTB/SmolLM2-135M --text README.md --reference-length 8192
python scripts/examples/swap_into_a_model.py    # without a model: a tiny random one, on random tokens

Prints the result of `attnscale.hf.inspect`, and the perplexity of the second half of each context with and without the
law. With a floor, nothing changes up to the reference length. To read further, a rotary embedding must be stretched too
(attnscale/hf/README.md).
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
import transformers

import attnscale.hf

TINY: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def load(path: str | None, text: Path | None, length: int) -> tuple[Any, torch.Tensor]:
    """Return a model and at most `length` tokens [1, T]."""
    if path is None:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, intermediate_size=64)).eval()
        return model, torch.randint(TINY["vocab_size"], (1, length))
    if text is None:
        raise SystemExit("--text is required with a model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokens = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :length]
    return transformers.AutoModelForCausalLM.from_pretrained(path).eval(), tokens


@torch.inference_mode()
def perplexity(model: Any, tokens: torch.Tensor) -> float:
    """Return the perplexity of the second half of the tokens, given the first half."""
    half = tokens.shape[1] // 2
    logits = model(tokens[:, :-1]).logits[0, half - 1 :].float()
    return math.exp(torch.nn.functional.cross_entropy(logits, tokens[0, half:]).item())


def main() -> None:
    """Inspect, measure, apply, measure again, save."""
    parser = argparse.ArgumentParser(description="Apply a temperature law to a HuggingFace model.")
    parser.add_argument("model", nargs="?", help="Hub id or folder (default: a tiny random Llama)")
    parser.add_argument("--text", type=Path, help="UTF-8 file to read")
    parser.add_argument("--policy", default="log", help="temperature law (default: %(default)s)")
    parser.add_argument("--reference-length", type=int, default=64, help="length with β = 1 (default: %(default)s)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[32, 64, 128, 256], help="context lengths in tokens")
    parser.add_argument("--output", type=Path, help="folder for the modified model")
    options = parser.parse_args()
    model, tokens = load(options.model, options.text, max(options.contexts))
    law = {"name": options.policy, "reference_length": options.reference_length, "floor": True}
    print(attnscale.hf.inspect(model, law), end="\n\n")
    contexts = [length for length in options.contexts if length <= tokens.shape[1]]
    before = [perplexity(model, tokens[:, :length]) for length in contexts]
    handle = attnscale.hf.apply(model, law)
    after = [perplexity(model, tokens[:, :length]) for length in contexts]
    print(f"{'context':>8s} {'β':>6s} {'stock':>9s} {options.policy:>9s}   (perplexity)")
    for length, stock, changed in zip(contexts, before, after, strict=True):
        print(f"{length:8d} {float(attnscale.build_policy(law)(length)):6.2f} {stock:9.2f} {changed:9.2f}")
    if options.output is not None:
        model.save_pretrained(options.output)
        print(f"saved in {options.output}; `attnscale.hf.load({str(options.output)!r})` restores it with its law")
    handle.remove()
    print(f"after remove() the model is stock again: {[perplexity(model, tokens[:, :n]) for n in contexts] == before}")


if __name__ == "__main__":
    main()
