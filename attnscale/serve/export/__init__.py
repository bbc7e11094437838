"""Exports of a checkpoint with policies to serving engines. Requires transformers; usage: README.md in this folder."""

from attnscale.serve.export.run import FORMATS, Export, export_model

__all__ = ["FORMATS", "Export", "export_model"]
