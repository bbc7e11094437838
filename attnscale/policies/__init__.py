"""Temperature policies: the temperature β as a function of the number of visible keys."""

from attnscale.policies.base import FormulaPolicy, LengthPolicy, Policy, QueryPolicy, UniformPolicy
from attnscale.policies.build import POLICIES, STATELESS, PolicySpec, build_policy, build_policy_for, register_policy
from attnscale.policies.schedule import set_window

__all__ = [
    "POLICIES",
    "STATELESS",
    "FormulaPolicy",
    "LengthPolicy",
    "Policy",
    "PolicySpec",
    "QueryPolicy",
    "UniformPolicy",
    "build_policy",
    "build_policy_for",
    "register_policy",
    "set_window",
]
