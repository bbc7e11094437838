"""HuggingFace: attnscale in the Trainer. Needs transformers: pip install 'attnscale[hf]'."""

from attnscale.errors import MissingDependencyError

try:
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise MissingDependencyError("attnscale.hf needs transformers: pip install 'attnscale[hf]'") from error

from attnscale.hf.callback import AttnScaleCallback

__all__ = ["AttnScaleCallback"]
