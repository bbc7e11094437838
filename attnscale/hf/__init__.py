"""HuggingFace: attnscale in transformers' models and its Trainer. Needs transformers: pip install 'attnscale[hf]'."""

from attnscale.errors import MissingDependencyError

try:
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise MissingDependencyError("attnscale.hf needs transformers: pip install 'attnscale[hf]'") from error

from attnscale.diagnostics.discovery import add_finder, add_opener
from attnscale.hf.attach import attach, find_sites
from attnscale.hf.callback import AttnScaleCallback
from attnscale.hf.checkpoint import load
from attnscale.hf.handle import Handle
from attnscale.hf.inspection import Inspection, inspect
from attnscale.hf.interface import register
from attnscale.hf.listening import mark_cross_attention, open_stock_attention
from attnscale.hf.patch import apply
from attnscale.hf.plan import Plan, read_plan
from attnscale.hf.policy_files import load_policy

register()
add_finder(find_sites)
add_finder(mark_cross_attention)
add_opener(open_stock_attention)

__all__ = [
    "AttnScaleCallback",
    "Handle",
    "Inspection",
    "Plan",
    "apply",
    "attach",
    "inspect",
    "load",
    "load_policy",
    "read_plan",
]
