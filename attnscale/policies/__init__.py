"""Temperature policies: the temperature β as a function of the number of visible keys."""

from attnscale.policies.base import FormulaPolicy, LengthPolicy, Policy, UniformPolicy
from attnscale.policies.build import POLICIES, STATELESS, PolicySpec, build_policy, build_policy_for, register_policy

__all__ = [
    "POLICIES",
    "STATELESS",
    "FormulaPolicy",
    "LengthPolicy",
    "Policy",
    "PolicySpec",
    "UniformPolicy",
    "build_policy",
    "build_policy_for",
    "register_policy",
]
