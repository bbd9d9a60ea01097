"""Parsers for untrusted JSON and YAML; every error is a `ValueError`."""

from __future__ import annotations

import json
from typing import Any

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
