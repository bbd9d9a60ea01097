"""Makes instances of classes whose arguments are in groups from flat arguments, which are shorter in tests."""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from typing import Any


def grouped(owner: type[Any], *arguments: Any, **options: Any) -> Any:
    """An instance of `owner`; options that are not its own go to the group that has them."""
    defaults = {name: one.default for name, one in inspect.signature(owner).parameters.items()}
    groups: dict[str, dict[str, Any]] = {}
    own = {}
    for name, value in options.items():
        if name in defaults:
            own[name] = value
            continue
        (group,) = (
            group
            for group, default in defaults.items()
            if is_dataclass(default) and name in {field.name for field in fields(default)}
        )
        groups.setdefault(group, {})[name] = value
    return owner(*arguments, **own, **{group: type(defaults[group])(**values) for group, values in groups.items()})
