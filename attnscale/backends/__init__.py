"""The ways to compute attention, and the choice between them."""
