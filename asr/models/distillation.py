"""The posteriors of a trained acoustic model, from which another network learns (Hinton et al. 2015).

The teacher hears each utterance of a prepared corpus once at every speed, whole and undisturbed, whatever noise, room,
masks or warps the network hears (Li et al. 2017). A forward-backward pass over the denominator graph turns its scores
into posteriors of the columns, of which only the larger ones are kept: a few for each frame.

Shapes: N utterances of a batch, T' output frames, C columns, E kept entries, L output frames of a piece.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from rich.progress import track
from torch import Tensor, nn

from asr.bundle import Bundle
from asr.datasets.augment import Condition
from asr.distributed import current_share
from asr.errors import AsrError, in_one_line
from asr.graph.context import TIED_STATES, TiedStates
from asr.graph.fst import offsets
from asr.kernels.precision import rounded_products
from asr.models.chain_corpus import LIST_FILE, PreparedCorpus
from asr.models.checkpoint import require_same_features
from asr.models.chunks import Chunk
from asr.models.lfmmi import LfMmi
from asr.serialization import atomic_path, checksum_of_tensors, load_arrays

_LEAST_POSTERIOR = 0.01
_FRAMES_PER_BATCH = 3000


class SparsePosteriors(NamedTuple):
    """Posteriors of all utterances in one condition.

    Attributes:
        first_frame: (U + 1,) int64; utterance u has the frames `first_frame[u] : first_frame[u + 1]`.
        begin: (sum of T' + 1,) int64; a frame has the entries `begin[frame] : begin[frame + 1]`.
        column: (E,) uint16.
        probability: (E,) float16; those of a frame sum to 1.
    """

    first_frame: npt.NDArray[np.int64]
    begin: npt.NDArray[np.int64]
    column: npt.NDArray[np.uint16]
    probability: npt.NDArray[np.float16]


class TeacherPosteriors:
    """What a bundle's acoustic model hears in a prepared corpus.

    The posteriors are computed when the object is made, and kept in the corpus folder, one file for each condition;
    a run that was stopped goes on with the next condition. Processes that need them at the same time share the work.

    Args:
        corpus: prepared with the filterbanks of the bundle.
        folder: of the bundle.
        states: those of the network to train; the bundle's must be the same.
        objective: with the denominator graph.
        subsampling_factor: of the network to train; the bundle's must be the same.
        kept: the `key` of an earlier run, whose files are used if the bundle is no longer there.

    Attributes:
        key: what the files depend on besides the corpus.

    Raises:
        AsrError: the bundle's states, features or frame rate are others, or a kept file is damaged.
    """

    def __init__(
        self,
        corpus: PreparedCorpus,
        folder: str | Path,
        states: TiedStates,
        objective: LfMmi,
        subsampling_factor: int,
        kept: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder = folder
        self._corpus = corpus
        self._objective = objective
        self._num_columns = states.num_columns
        self._network: Any = None
        if kept is not None and not Path(folder).exists():
            self.key = dict(kept)
        else:
            self._network = self._loaded(states)
            graph = {f"denominator.{name}": torch.from_numpy(part) for name, part in objective.graph._asdict().items()}
            header = json.dumps([states.to_json(), objective.leak])
            made_by = checksum_of_tensors(header, {**self._network.state_dict(), **graph})[:12]
            self.key = {"made_by": made_by, "subsampling_factor": self._network.subsampling_factor}
        if self.key["subsampling_factor"] != subsampling_factor:
            raise AsrError(
                f"{folder}: teacher: it has one output for {self.key['subsampling_factor']} frames of features, the "
                f"network to train one for {subsampling_factor}; give both the same subsampling."
            )
        # Several processes begin with different conditions.
        share = current_share()
        heard = [_undisturbed(corpus.conditions, condition) for condition in range(len(corpus.conditions))]
        to_make = sorted(set(heard))
        begin = share.rank * len(to_make) // share.num
        found: dict[int, SparsePosteriors] = {}
        for condition in to_make[begin:] + to_make[:begin]:
            path = corpus.folder / f"posteriors-{self.key['made_by']}-{corpus.condition_names[condition]}.npz"
            found[condition] = self._load_or_make(condition, path)
        self._of_condition = [found[condition] for condition in heard]

    def _loaded(self, states: TiedStates) -> Any:
        """The teacher's network."""
        bundle = Bundle.load(self._folder)
        network: Any = bundle.acoustic_model.network.eval()
        if bundle.graph.meta.get(TIED_STATES) != states.to_json():
            raise AsrError(
                f"{self._folder}: teacher: its tied states are not those of the data; set chain to this bundle."
            )
        if network.num_features != self._corpus.num_features:
            raise AsrError(
                f"{self._folder}: teacher: its network takes {network.num_features} features, the corpus has "
                f"{self._corpus.num_features}."
            )
        trained: Any = getattr(bundle.features.network, "arguments", {})
        require_same_features(trained, self._corpus.fbank_arguments, f"{self._folder}: teacher", "the corpus")
        return network

    def of(self, chunks: Sequence[Chunk], length: int) -> Tensor:
        """(N, L, C) posteriors of pieces, 0 for the columns that were not kept."""
        dense = np.zeros((len(chunks), length, self._num_columns), dtype=np.float32)
        for row, chunk in enumerate(chunks):
            kept = self._of_condition[chunk.condition]
            first = kept.first_frame[chunk.utterance] + chunk.first_output
            begin = kept.begin[first : first + length + 1]
            entries = slice(begin[0], begin[-1])
            frame = np.repeat(np.arange(length), np.diff(begin))
            dense[row, frame, kept.column[entries]] = kept.probability[entries]
        return torch.from_numpy(dense)

    def _load_or_make(self, condition: int, path: Path) -> SparsePosteriors:
        factor = self.key["subsampling_factor"]
        num_outputs = [-(-each.num_frames[condition] // factor) for each in self._corpus.utterances]
        with self._alone(condition):
            if not path.is_file():
                if self._network is None:
                    raise AsrError(
                        f"{self._folder}: teacher: there is no such bundle, and {path}, which an earlier run has made "
                        "from it, is missing; give the bundle."
                    )
                posteriors = self._make(condition, num_outputs, path.stem)
                with atomic_path(path) as partial:
                    np.savez(partial, **posteriors._asdict())
                return posteriors
        try:
            file = load_arrays(path)
            posteriors = SparsePosteriors(*(file[name] for name in SparsePosteriors._fields))
            first, begin = posteriors.first_frame, posteriors.begin
            fits = np.array_equal(np.diff(first), num_outputs) and len(begin) == first[-1] + 1
            whole = fits and len(posteriors.column) == len(posteriors.probability) == begin[-1]
        except Exception as error:  # readers of a damaged archive may raise anything
            raise AsrError(f"{path}: the posteriors are damaged ({in_one_line(error)}); delete the file.") from error
        if not whole:
            raise AsrError(f"{path}: the posteriors are of another corpus; delete the file.")
        return posteriors

    @contextmanager
    def _alone(self, condition: int) -> Iterator[None]:
        """Waits until no other process works on the condition: locks a byte of the corpus's list of utterances."""
        with ExitStack() as opened:
            with suppress(OSError):  # read-only, or a network file system without locks
                file = opened.enter_context((self._corpus.folder / LIST_FILE).open("r+b"))
                fcntl.lockf(file, fcntl.LOCK_EX, 1, condition)
            yield

    def _make(self, condition: int, num_outputs: Sequence[int], title: str) -> SparsePosteriors:
        """Runs the network and the forward-backward pass on all utterances of a condition."""
        by_length = sorted(filter(num_outputs.__getitem__, range(len(num_outputs))), key=num_outputs.__getitem__)
        kept = [_larger(np.zeros((0, self._num_columns), dtype=np.float32))] * len(num_outputs)
        for batch in track(_batches(by_length, num_outputs), title):
            features = [torch.from_numpy(self._corpus.features(index, condition).astype(np.float32)) for index in batch]
            scores = dict(zip(batch, self._score(features), strict=True))
            # Groups of equal numbers of outputs: the paths of all phones end with the utterance, not with padding.
            for num, equally_long in groupby(batch, num_outputs.__getitem__):
                group = list(equally_long)
                posterior = self._objective.denominator(torch.stack([scores[index][:num] for index in group]))[1]
                kept_of_group = map(_larger, posterior.numpy())
                for index, entries in zip(group, kept_of_group, strict=True):
                    kept[index] = entries
        counts = np.concatenate([each[0] for each in kept])
        return SparsePosteriors(
            offsets(num_outputs),
            offsets(counts),
            np.concatenate([each[1] for each in kept]).astype(np.uint16),
            np.concatenate([each[2] for each in kept]).astype(np.float16),
        )

    @torch.no_grad()
    def _score(self, features: list[Tensor]) -> Tensor:
        num_frames = torch.tensor([len(each) for each in features])
        with rounded_products():
            score: Tensor = self._network(nn.utils.rnn.pad_sequence(features, batch_first=True), num_frames)[0]
        return score.float()


def _undisturbed(conditions: Sequence[Condition], number: int) -> int:
    """The condition in which the teacher hears what the network hears in this one: at the same speed, but unchanged."""
    speed = conditions[number].speed
    same = (each for each, condition in enumerate(conditions) if condition.speed == speed and condition.change is None)
    return next(same, number)


def _batches(by_length: Sequence[int], num_outputs: Sequence[int]) -> list[Sequence[int]]:
    """Cuts utterances, the shortest first, into batches of a few thousand outputs, padding included."""
    batches, begin = [], 0
    for end in range(1, len(by_length) + 1):
        if end == len(by_length) or num_outputs[by_length[end]] * (end + 1 - begin) > _FRAMES_PER_BATCH:
            batches.append(by_length[begin:end])
            begin = end
    return batches


def _larger(posterior: npt.NDArray[np.float32]) -> tuple[npt.NDArray[Any], ...]:
    """The columns of (T', C) posteriors that are not small: numbers for each frame, columns, and probabilities."""
    least = np.minimum(_LEAST_POSTERIOR, posterior.max(1, keepdims=True))
    frame, column = np.nonzero(posterior >= least)
    counts = np.bincount(frame, minlength=len(posterior))
    total = np.bincount(frame, posterior[frame, column], minlength=len(posterior))
    return counts, column, posterior[frame, column] / total[frame]
