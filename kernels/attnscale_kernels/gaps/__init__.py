"""Gap counting: N(t) and a bracket of Λ."""
