"""Training of the models in the README tables: the embedded model and max retrieval."""
