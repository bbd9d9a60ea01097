"""Parsers for untrusted JSON and YAML, whose errors are all `ValueError`, and for numbers in text files."""

from __future__ import annotations

import json
from typing import Any

from asr.errors import AsrError

LARGEST_NUMBER = 1e30
"""The largest magnitude of a number in a text file: sums of such numbers stay within float32."""

_NESTED = "it is nested too deeply"


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply for Python's parser.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(_NESTED) from error


def parse_yaml(text: str) -> Any:
    """The value of a YAML text: mappings, lists, strings, numbers, dates.

    Raises:
        ValueError: the text is not YAML, names objects of other kinds, or is nested too deeply.
    """
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise ValueError(_NESTED) from error
    except (TypeError, AttributeError, KeyError, IndexError, OverflowError) as error:
        # PyYAML's constructors for numbers and dates raise these for texts that only look like one.
        raise ValueError(f"a value cannot be read: {error}") from error


def finite_number(text: str, where: str) -> float:
    """Converts text to a number, which is at most `LARGEST_NUMBER` in magnitude.

    Args:
        text: of the number.
        where: the file and the line or entry, for error messages.

    Raises:
        AsrError: it is not a number, not finite, or too large.
    """
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not abs(number) <= LARGEST_NUMBER:
        raise AsrError(f"{where}: {text!r} is not a finite number of at most {LARGEST_NUMBER:g}.")
    return number
