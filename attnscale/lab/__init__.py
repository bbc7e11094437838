"""Experiments: frozen dataclasses that say what is run, and the functions that run them.

The command line (`attnscale.cli`) makes options and keys of YAML files of their fields.
"""
