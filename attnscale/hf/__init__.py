"""Temperature policies for HuggingFace transformers models. Requires transformers (extra `hf`).

Usage, file layout and import order: README.md in this folder.
"""

from attnscale._util.optional import install_command
from attnscale._util.versions import TRANSFORMERS, release
from attnscale.errors import MissingDependencyError

try:
    import transformers as _transformers
except ImportError as error:
    raise MissingDependencyError(f"attnscale.hf needs transformers: {install_command('hf')}") from error
if release(_transformers.__version__) < release(TRANSFORMERS.oldest):
    raise MissingDependencyError(
        f"attnscale.hf needs transformers {TRANSFORMERS.oldest} or newer, and {_transformers.__version__} is "
        f"installed: {install_command('hf')}"
    )

from attnscale.diagnostics import add_finder
from attnscale.hf.attach import attach, register
from attnscale.hf.checkpoint import load, load_policy
from attnscale.hf.inspection import Inspection, inspect
from attnscale.hf.install import Handle, apply
from attnscale.hf.monitoring import AttnScaleCallback, find_sites, open_stock_attention
from attnscale.hf.persistence import keep_policies
from attnscale.hf.plan import Plan, read_plan
from attnscale.hf.recommendation import Recommendation, recommend

register()
keep_policies()
add_finder(find_sites, open_stock_attention)

__all__ = [
    "AttnScaleCallback",
    "Handle",
    "Inspection",
    "Plan",
    "Recommendation",
    "apply",
    "attach",
    "inspect",
    "load",
    "load_policy",
    "read_plan",
    "recommend",
]
