"""Trains the models of the README's tables: the embedded model, and one head that finds the largest of n items."""
