"""Gap counts N(t) and a certified bracket of Λ."""
