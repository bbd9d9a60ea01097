"""User options, declared once.

An option is a dataclass field made by `option`. Command lines, `Recognizer(options=...)` and the decoding section of a
bundle are all derived from these fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from numbers import Integral, Real
from types import UnionType
from typing import Any

import torch
from torch import Tensor

from asr.errors import AsrError

_KEY = "option"


@dataclass(frozen=True)
class Option:
    """The description of an option.

    Args:
        name: of the field.
        kind: float, int, str or bool.
        default: the value if the option is not given.
        help: description for users.
        choices: the permitted values, empty for any; a mapping describes each value.
        needs: what a pass must have for the option to have an effect, a key of `asr.decoding.settings.NEEDS`.
        flag: its name on command lines.
        unit: `MB` if command lines take megabytes and the field has bytes.
        optional: whether None is permitted, for "no limit"; always true if None is the default.
    """

    name: str
    kind: type
    default: Any
    help: str
    choices: Mapping[str, str] | Sequence[str]
    needs: str
    flag: str
    unit: str
    optional: bool


def option(
    default: Any,
    help: str,
    *,
    kind: type | None = None,
    choices: Mapping[str, str] | Sequence[str] = (),
    needs: str = "",
    flag: str = "",
    unit: str = "",
    optional: bool = False,
) -> Any:
    """A dataclass field for an option; arguments as for `Option`. `kind` is required if the default is None."""
    kind = type(default) if kind is None else kind
    known = {"kind": kind, "help": help, "choices": choices, "needs": needs, "flag": flag, "unit": unit}
    known["optional"] = optional or default is None
    return field(default=default, metadata={_KEY: known})


def flag_of(name: str) -> str:
    """The command line's name of an option: `--num-jobs` for `num_jobs`."""
    return f"--{name.replace('_', '-')}"


def options_of(*classes: type) -> dict[str, Option]:
    """The options among the fields of dataclasses, by name, in the order of declaration."""
    found: dict[str, Option] = {}
    for owner in classes:
        for one in fields(owner):
            if _KEY not in one.metadata:
                continue
            known = dict(one.metadata[_KEY])
            assert one.default is not MISSING
            flag = known.pop("flag") or flag_of(one.name)
            found[one.name] = Option(name=one.name, default=one.default, flag=flag, **known)
    return found


def check_options(owner: Any, what: str) -> None:
    """Checks the type of each option of a dataclass instance, and that its value is one of the choices.

    Numbers become Python's own, of the option's type (20 becomes 20.0, and so does `numpy.float32(20)`), since kernels
    are compiled for the types of their arguments.

    Args:
        owner: the instance.
        what: its name in error messages.

    Raises:
        AsrError: a value has the wrong type or is not one of the choices; None passes if the option is optional.
    """
    for name, one in options_of(type(owner)).items():
        value = getattr(owner, name)
        if value is None and one.optional:
            continue
        if one.kind is str:
            if not isinstance(value, str) or (one.choices and value not in one.choices):
                wanted = f"one of {', '.join(one.choices)}" if one.choices else "a name"
                raise AsrError(f"{what}: {name} is {value!r}; it must be {wanted}.")
        elif one.kind is bool:
            if not isinstance(value, bool):
                raise AsrError(f"{what}: {name} is {value!r}; it must be true or false.")
        elif isinstance(value, bool) or not isinstance(value, Real):
            raise AsrError(f"{what}: {name} is {value!r}; it must be a number.")
        elif one.kind is int and not isinstance(value, Integral):
            raise AsrError(f"{what}: {name} is {value!r}; it must be a whole number.")
        elif isinstance(value, int) and abs(value) >= 2**63:  # what tensors and compiled loops count with
            raise AsrError(f"{what}: {name} is {value!r}; it must be below 2^63.")
        else:
            object.__setattr__(owner, name, one.kind(value))  # options are frozen


def require_type(value: Any, kind: type | UnionType, name: str, wanted: str) -> None:
    """Checks the type of an argument.

    Args:
        value: the argument.
        kind: the type that it must have, or a union of types.
        name: the argument's name.
        wanted: what to give, for the error message.

    Raises:
        AsrError: it has another type.
    """
    if not isinstance(value, kind):
        raise AsrError(f"{name} is of type {type(value).__name__}; give {wanted}.")


def require_dense(tensor: Tensor, name: str) -> None:
    """Checks that a tensor has a real number in memory for each of its elements.

    Raises:
        AsrError: it is a meta tensor, sparse, or complex.
    """
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_complex():
        kind = tensor.dtype if tensor.is_complex() else "meta" if tensor.is_meta else tensor.layout
        raise AsrError(f"{name}: the tensor is of the kind {kind}; give a dense one of real numbers.")


def device_named(name: str, option: str = "device") -> torch.device:
    """The torch device with this name; a GPU is used once, to see whether this torch can.

    Raises:
        AsrError: this machine has no such device, or torch cannot use it.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise AsrError(f"{option} {name}: there is no such device; give cpu, cuda or cuda:NUMBER.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise AsrError(f"{option} {name}: torch sees {torch.cuda.device_count()} GPUs here; 'asr doctor' says more.")
    if device.type == "cuda":
        try:
            torch.ones(1, device=device).cpu()
        except Exception as error:  # an old driver, a new GPU, another program that uses it alone: of various types
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            raise AsrError(
                f"{option} {name}: torch {torch.__version__} cannot use this GPU ({reason}); 'asr doctor' says more, "
                "or give cpu."
            ) from error
    return device
