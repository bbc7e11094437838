"""Frozen dataclasses as options of a command and as keys of a YAML file: one list of names, types and defaults."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import re
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from attnscale._util.optional import need
from attnscale.cli.parser import Parser
from attnscale.errors import ArgumentError, reject

NAMES = "names with commas between them (a,b), or a list"
NUMBERS = "whole numbers (128,2048), a range that doubles (512:32768; in quotes in a YAML file), or a list"

T = TypeVar("T")


def read_names(value: Any, argument: str = "names") -> tuple[Any, ...]:
    """The names in a text, or the items of a list, whose types are for the caller to check.

    >>> read_names("constant, log")
    ('constant', 'log')
    >>> read_names(["constant", "log"])
    ('constant', 'log')
    """
    if isinstance(value, (list, tuple)):
        return tuple(value)
    if not isinstance(value, str):
        reject(argument, value, NAMES)
    names = tuple(name.strip() for name in value.split(","))
    if not all(names):
        reject(argument, value, NAMES)
    return names


def read_lengths(value: Any, argument: str = "lengths") -> tuple[Any, ...]:
    """The numbers in a text, where `a:b` doubles from a to b, or the items of a list.

    >>> read_lengths("512:4096")
    (512, 1024, 2048, 4096)
    >>> read_lengths("128,1024:2048")
    (128, 1024, 2048)
    >>> read_lengths("512:3000")
    Traceback (most recent call last):
    ...
    attnscale.errors.ArgumentError: lengths='512:3000' is not accepted: expected 2048 or 4096 as the end of 512:3000
    """
    if isinstance(value, (list, tuple)):
        return tuple(value)
    # A number is not taken for a list of one: YAML reads 16:32 without quotes as 992 (minutes and seconds).
    if not isinstance(value, str):
        reject(argument, value, NUMBERS)
    return tuple(number for part in value.split(",") for number in _numbers(part.strip(), value, argument))


def _numbers(part: str, value: str, argument: str) -> Iterator[int]:
    """One number, or those of a range."""
    ends = part.split(":")
    if len(ends) > 2 or not all(end.isdecimal() for end in ends):
        reject(argument, value, NUMBERS)
    number, last = int(ends[0]), int(ends[-1])
    if len(ends) == 2 and not 1 <= number <= last:
        reject(argument, value, f"a range from 1 or more upwards, not {part}")
    yield number
    while number < last:
        if 2 * number > last:
            reject(argument, value, f"{number} or {2 * number} as the end of {part}")
        number *= 2
        yield number


def add_options(parser: Parser, kind: type[Any], skip: Collection[str], defaults: Mapping[str, str]) -> None:
    """Add an option for each field of a dataclass; what is given ends up in the namespace, as text for `build`.

    `defaults` tells what the command fills in for fields that have no default of their own.
    """
    hints, documents = get_type_hints(kind), field_documents(kind)
    for field in _fields(kind):
        if field.name in skip:
            continue
        hint, default = hints[field.name], _default(field) or defaults.get(field.name)
        text = documents.get(field.name, "") + (f" (default: {default})" if default else "")
        settings: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text.strip()}
        if hint is bool:
            settings["action"] = argparse.BooleanOptionalAction
        else:
            settings["metavar"] = _metavar(field.name, hint)
        parser.add_argument(f"--{field.name.replace('_', '-')}", **settings)


def field_documents(kind: type[Any]) -> dict[str, str]:
    """What `Args:` in the docstring of a dataclass says of each field, as argparse takes it."""
    _, _, entries = (inspect.getdoc(kind) or "").partition("\nArgs:\n")
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", entries, re.MULTILINE)
    return {name: " ".join(text.split()).replace("%", "%%") for name, text in found}


def build(kind: type[T], values: Mapping[str, Any]) -> T:
    """The dataclass with these fields, from texts or values of YAML; other keys and types are errors of one line."""
    fields, hints = {field.name: field for field in _fields(kind)}, get_type_hints(kind)
    for key, value in values.items():
        if key not in fields:
            nearest = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            raise ArgumentError(f"key {key!r} (of value {value!r}) is not accepted: {hint}expected {', '.join(fields)}")
        if value is None and type(None) not in get_args(hints[key]):  # the library takes null for any type
            reject(key, value, _accepted(hints[key]))
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING is field.default_factory:
            raise ArgumentError(f"key {name!r} is missing: expected {_accepted(hints[name])}")
    library = need("jsonargparse", "this command", "cli")
    parser = library.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind)
    try:
        read = parser.parse_object({key: _listed(key, value, hints[key]) for key, value in values.items()})
    except argparse.ArgumentError as error:
        place = re.search(r'key "(\w+)', str(error))
        if place is None or place[1] not in values:
            raise ArgumentError(" ".join(str(error).split())) from error
        reject(place[1], values[place[1]], _accepted(hints[place[1]]))
    return kind(**{key: value for key, value in read.as_dict().items() if key in values})


def _fields(kind: type[Any]) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(kind) if field.init]


def _listed(key: str, value: Any, hint: Any) -> Any:
    """Texts for fields that are lists, as what they list."""
    if get_origin(hint) is not tuple or (isinstance(value, str) and value.startswith("[")):  # YAML, for the library
        return value
    return read_lengths(value, key) if get_args(hint)[0] is int else read_names(value, key)


def _accepted(hint: Any) -> str:
    """What a type accepts, in the words of an error."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_accepted(part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        return NUMBERS if get_args(hint)[0] is int else NAMES
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def _metavar(name: str, hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "{" + ",".join(map(str, get_args(hint))) + "}"
    if get_origin(hint) is tuple:
        return "N,N|N:N" if get_args(hint)[0] is int else "A,B"
    numbers = {int: "N", float: "X"}
    return next((numbers[part] for part in (hint, *get_args(hint)) if part in numbers), name.rsplit("_")[-1].upper())


def _default(field: dataclasses.Field[Any]) -> str:
    """A default as an option would give it; nothing where there is none."""
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if value is dataclasses.MISSING or value is None:
        return ""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
