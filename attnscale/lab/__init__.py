"""Evaluation of trained models at increasing context lengths."""
