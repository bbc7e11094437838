"""Serving engines: the policies of a checkpoint in vLLM, and exports to the formats of other engines."""
