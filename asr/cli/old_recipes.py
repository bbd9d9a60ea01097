"""Class paths and keys of recipes of earlier versions; they work for one release, with a hint."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

import yaml
from jsonargparse import Namespace, get_loader, set_loader

from asr.cli.options import hint
from asr.errors import AsrError

OLD_CLASS_PATHS = {
    "asr.am.lit_acoustic_model.LitAcousticModel": "asr.models.training.LitAcousticModel",
    "asr.am.conformer.Conformer": "asr.models.conformer.Conformer",
    "asr.am.spliced_dnn.SplicedDnn": "asr.models.feedforward.FeedForwardNetwork",
    "asr.am.torch_ctc.TorchCtc": "asr.models.losses.TorchCtc",
    "asr.am.k2_ctc.K2Ctc": "asr.models.losses.K2Ctc",
    "asr.am.ctc_crf.CtcCrf": "asr.models.losses.CtcCrf",
    "asr.data.datamodule.AcousticDataModule": "asr.datasets.datamodule.AcousticDataModule",
    "asr.data.fbank.Fbank": "asr.audio.fbank.Fbank",
    "asr.data.spec_augment.SpecAugment": "asr.datasets.augment.SpecAugment",
    "asr.data.noise.NoiseMixer": "asr.datasets.augment.NoiseMixer",
    "asr.lm.rnn.lit_rnn_lm.LitRnnLm": "asr.lm.rnn.training.LitRNNLM",
    "asr.lm.rnn.lit_text_data.TextDataModule": "asr.lm.rnn.datamodule.TextDataModule",
}
"""Class paths before the packages were reorganized -> those of now."""


def _in(group: str, names: str) -> dict[str, str]:
    return {name: f"{group}.{name}" for name in names.split()}


OLD_KEYS: dict[str, dict[str, str]] = {
    "asr.models.chain_training.LitChainModel": {
        **_in("optimization", "peak_lr final_lr warmup_fraction max_gradient_norm average_decay total_steps"),
        **_in("regularization", "weight_decay dropout xent_weight score_l2"),
        **_in("objective", "leak tolerance smbr_weight silence_accuracy"),
    },
    "asr.models.chain_training.ChainDataModule": {
        **_in("selection", "held_out train_on_held_out min_score"),
        **_in("batches", "lengths frames_per_batch"),
        **_in("augmentation", "max_warp max_smoothing spec_augment speaker_share"),
    },
}
"""Class -> its keys before they were put in groups -> those of now."""


@contextlib.contextmanager
def old_class_paths() -> Iterator[None]:
    """Replaces old class paths wherever jsonargparse reads YAML within the block, with one hint for each."""
    load, hinted = get_loader("yaml"), set[str]()

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: renamed(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [renamed(entry) for entry in value]
        if not isinstance(value, str) or value not in OLD_CLASS_PATHS:
            return value
        new = OLD_CLASS_PATHS[value]
        if value not in hinted:
            hinted.add(value)
            hint(f"the class {value} is now {new}")
        return new

    set_loader("yaml", lambda text: renamed(load(text)), (yaml.YAMLError,))
    try:
        yield
    finally:
        set_loader("yaml", load, (yaml.YAMLError,))


class OldKeys:
    """The old keys of a class.

    Args:
        owner: the class; the keys of its base classes count, too.
        own: its keys of now, which are left alone.
    """

    replaced: ClassVar[dict[str, dict[str, str]]] = {}
    """Of all classes since the last hint: the name of a class -> old keys that were given -> new keys."""

    def __init__(self, owner: type, own: Collection[str]) -> None:
        self._owner = owner.__name__
        paths = [f"{base.__module__}.{base.__qualname__}" for base in reversed(owner.__mro__)]
        known = {old: new for path in paths for old, new in OLD_KEYS.get(path, {}).items()}
        self._new = {old: new for old, new in known.items() if old not in own}

    def in_groups(self, arguments: Any) -> Any:
        """The arguments of the class, a mapping, with new keys for old ones.

        Raises:
            AsrError: an option has both keys.
        """
        given = vars(arguments) if isinstance(arguments, Namespace) else arguments
        # A list may be appended to, by a key with a plus sign.
        used = {old + end: new + end for old, new in self._new.items() for end in ("", "+") if old + end in given}
        if not used:
            return arguments
        result = {key: value for key, value in given.items() if key not in used}
        for old, new in used.items():
            group, _, name = new.partition(".")
            others = result.get(group) or {}
            result[group] = dict(vars(others) if isinstance(others, Namespace) else others)
            if name in result[group]:
                raise AsrError(f"{self._owner}: {old} and {new} are the same option; leave out {old}.")
            result[group][name] = given[old]
        self._note(used)
        return result

    def option_in_group(self, option: str) -> str:
        """An option of a command line, such as `--peak_lr=0.001`, with the new key for an old one."""
        name = option.removeprefix("--")
        old = re.split(r"\W", name, maxsplit=1)[0]
        if old not in self._new:
            return option
        self._note({old: self._new[old]})
        return f"--{self._new[old]}{name.removeprefix(old)}"

    def _note(self, used: Mapping[str, str]) -> None:
        self.replaced.setdefault(self._owner, {}).update(used)


@contextlib.contextmanager
def hint_of_old_keys() -> Iterator[None]:
    """At the end of the block, tells in one hint which old keys were replaced in it."""
    OldKeys.replaced.clear()
    try:
        yield
    finally:
        changes = [
            f"of {owner}, {', '.join(f'{old} is now {new}' for old, new in keys.items())}"
            for owner, keys in OldKeys.replaced.items()
        ]
        if changes:
            hint(f"keys of recipes are in groups, as --print_config shows: {'; '.join(changes)}")
