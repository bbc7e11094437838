"""Healthy and provoked training runs under a monitor: which events it raises. `python -m scripts.provoke`."""
