"""Class paths and keys of recipes of earlier versions; they work for one release, with a hint."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator
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


GROUPS = {
    "asr.models.chain_training.LitChainModel": {
        "optimization": "peak_lr final_lr warmup_fraction total_steps max_gradient_norm average_decay",
        "objective": "leak tolerance smbr_weight silence_accuracy",
        "regularization": "weight_decay dropout xent_weight score_l2",
    },
    "asr.models.chain_training.ChainDataModule": {
        "selection": "held_out train_on_held_out min_score",
        "batches": "lengths frames_per_batch",
        "augmentation": "max_warp max_smoothing spec_augment speaker_share",
    },
    "asr.models.training.LitAcousticModel": {
        "optimization": "peak_lr warmup_fraction final_lr_fraction max_gradient_norm average_decay",
        "regularization": "weight_decay intermediate_weight seed",
    },
    "asr.datasets.datamodule.AcousticDataModule": {
        "selection": "train_cuts valid_cuts test_cuts valid_fraction min_duration max_duration",
        "tokenizer": "lexicon tokens keep_stress",
        "batches": "max_batch_duration max_batch_cuts num_buckets",
        "augmentation": "speed_factors noise max_vocal_tract_warp spec_augment random_pronunciation",
        "loading": "memory_gb feature_dir num_workers",
    },
    "asr.lm.rnn.training.LitRNNLM": {
        "optimization": "lr sparse_lr warmup_steps decay_start final_lr_factor max_grad_norm",
    },
    "asr.lm.rnn.datamodule.TextDataModule": {
        "texts": "train_texts train_transcripts transcript_repeats validation_texts validation_transcripts",
    },
}
"""Class -> its groups of keys -> the keys of each, which were keys of the class before."""


def _tell(change: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":  # Lightning starts further processes with the same recipe
        hint(change)


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
            _tell(f"the class {value} is now {new}")
        return new

    set_loader("yaml", lambda text: renamed(load(text)), (yaml.YAMLError,))
    try:
        yield
    finally:
        set_loader("yaml", load, (yaml.YAMLError,))


class OldKeys:
    """Keys of a class that are in groups now.

    Args:
        owner: the class; those of its base classes count, too.
        own: its keys and groups of now.
    """

    used: ClassVar[dict[str, dict[str, None]]] = {}
    """The name of a class -> the new spellings of the old keys that were given, since the last hint."""

    def __init__(self, owner: type, own: Collection[str]) -> None:
        self._owner = owner.__name__
        paths = [f"{base.__module__}.{base.__qualname__}" for base in reversed(owner.__mro__)]
        groups = (item for path in paths for item in GROUPS.get(path, {}).items())
        self._group = {key: group for group, keys in groups for key in keys.split() if key not in own and group in own}

    def in_groups(self, arguments: Any) -> Any:
        """The arguments of the class, a mapping, with those that have an old key in their groups.

        Raises:
            AsrError: an option has both keys, or its group is no mapping.
        """
        given = vars(arguments) if isinstance(arguments, Namespace) else arguments
        if not isinstance(given, dict):
            return arguments
        old = [name for name in given if name.removesuffix("+") in self._group]  # a plus sign appends to a list
        result = {name: value for name, value in given.items() if name not in old}
        for name in old:
            group = self._group[name.removesuffix("+")]
            others = result.get(group) or {}
            others = vars(others) if isinstance(others, Namespace) else others
            if not isinstance(others, dict):
                raise AsrError(f"{self._owner}: {group} is {others!r}; give its keys, among them {name}.")
            if name in others:
                raise AsrError(f"{self._owner}: {name} and {group}.{name} are the same option; leave out {name}.")
            result[group] = {**others, name: given[name]}
            self._note(name.removesuffix("+"))
        return result if old else arguments

    def option_in_group(self, option: str) -> str:
        """An option of a command line, such as `--peak_lr=0.001`, as `--optimization.peak_lr=0.001`."""
        key = re.split(r"\W", option.removeprefix("--"), maxsplit=1)[0]
        if key not in self._group:
            return option
        self._note(key)
        return f"--{self._group[key]}.{option.removeprefix('--')}"

    def _note(self, key: str) -> None:
        self.used.setdefault(self._owner, {})[f"{self._group[key]}.{key}"] = None


@contextlib.contextmanager
def hint_of_groups() -> Iterator[None]:
    """At the end of the block, tells in one hint how to write the old keys that were used in it."""
    OldKeys.used.clear()
    try:
        yield
    finally:
        spellings = "; ".join(f"{', '.join(keys)} ({owner})" for owner, keys in OldKeys.used.items())
        if spellings:
            _tell(f"keys of recipes are in groups now, as --print_config shows: write {spellings}")
