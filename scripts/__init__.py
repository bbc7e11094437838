"""The workshop: what the repository itself runs, called by the Makefile from its root. None of it is in the wheel."""
