"""Frame log-probabilities for any text, made from segments of real speech: a simulation at LibriSpeech's scale.

    # what `scripts/bench decode` works on, made there by itself: segments of every second recording, 200 sentences by
    # speakers who are not among the recordings', and the pronunciations of their words
    scripts/bench simulate prepare --audio LibriSpeech/dev-clean-2 \\
        --text dev-clean.text.xz dev-other.text.xz --lexicon lexicon.txt.xz --output data/simulation

    # segments alone
    scripts/bench simulate pool --audio LibriSpeech/dev-clean-2 --lexicon lexicon.txt.xz --output segments.npz.xz

    # frames for a text, as clear as makes the n-gram's word error rate 6 %
    scripts/bench simulate frames --pool segments.npz.xz --text dev-clean.text.xz --lexicon lexicon.txt.xz \\
        --num 500 --wer 6 --output clean.npz --references clean.txt

`--transcripts` names a file of lines `id words`, an id being a file name without ending; without it, the `*.trans.txt`
files beside the audio are read. `--text` is such a file, plain or .xz, or a folder with `*.trans.txt` files. A speaker
is what stands before an id's first hyphen. The same input makes the same files. simulation.py says what is simulated
and what is not; call the result a simulation wherever you quote it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from asr.audio.io import find_audio_files, read_audio
from asr.bundle import Bundle, read_manifest
from asr.decoding.build import decoding_options
from asr.decoding.token_passing import TokenPassingDecoder
from asr.errors import AsrError
from asr.metrics import NO_ERRORS, count_errors, read_transcripts
from asr.recognizer import Recognizer
from asr.results import StageTimes
from asr.text.lexicon import Lexicon
from scripts.benchmarks.inputs import LIBRISPEECH_BUNDLE, argument_parser, cache_folder, required_corpora, with_progress
from scripts.benchmarks.simulation import (
    FrameSimulator,
    SegmentPool,
    SimulationFolder,
    choose_sentences,
    evenly,
    sayable,
    simulate,
    speaker_of,
)

_LONGEST_SECONDS = 25.0
_SENTENCES_OF_A_TRIAL = 60
_TRIALS = 7
_WIDEST_CLARITY = (-4.0, 12.0)


def main(argv: Sequence[str]) -> int:
    parser = argument_parser("simulate", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser("prepare", help="the folder that `scripts/bench decode --simulation` takes")
    prepare.add_argument("--text", type=Path, nargs="+", required=True, help="where sentences are chosen from")
    prepare.add_argument("--num", type=int, default=200, help="number of sentences (default: %(default)s)")
    pool = commands.add_parser("pool", help="aligned segments of real speech")
    for command, every in ((prepare, 2), (pool, 1)):
        command.add_argument("--audio", type=Path, required=True, help="folder with the recordings")
        command.add_argument("--transcripts", type=Path, help="default: all *.trans.txt below the audio")
        command.add_argument(
            "--every", type=int, default=every, help="take every N-th recording (default: %(default)s)"
        )
    frames = commands.add_parser("frames", help="frames for a text")
    frames.add_argument("--pool", type=Path, required=True, help="segments, as `pool` or `prepare` makes them")
    frames.add_argument("--text", type=Path, required=True, help="lines `id words`, plain or .xz")
    frames.add_argument("--num", type=int, help="take this many sentences, spread evenly (default: all)")
    frames.add_argument("--clarity", type=float, default=0.0, help="nats, see scripts/benchmarks/simulation.py")
    frames.add_argument("--wer", type=float, help="find the clarity that gives the n-gram this word error rate, %%")
    frames.add_argument("--seed", type=int, default=0)
    frames.add_argument("--references", type=Path, required=True, help="file to write the sentences to, `id words`")
    for command in (prepare, pool, frames):
        command.add_argument("--bundle", type=Path, default=LIBRISPEECH_BUNDLE)
        command.add_argument("--lexicon", type=Path, required=True)
        command.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    bundle, lexicon = Bundle.load(args.bundle), Lexicon.from_file(args.lexicon)
    with torch.no_grad():
        if args.command == "frames":
            make_frames(args, bundle, lexicon)
            return 0
        speech = Speech(args.audio, args.transcripts, args.every)
        if args.command == "pool":
            speech.pool(bundle, lexicon).save(args.output)
        else:
            make_folder(SimulationFolder(args.output), bundle, lexicon, speech, args.text, args.num)
    return 0


def require_folder(folder: Path | None, bundle: Path, corpora: Path | None) -> SimulationFolder:
    """A folder that `prepare` made; without one, that of the cache, which is made once for each acoustic model.

    Raises:
        AsrError: the folder lacks a file, or there are no corpora to make it from.
    """
    if folder is not None:
        return SimulationFolder(folder).require()
    model = read_manifest(bundle)["files"]["acoustic_model.safetensors"]
    key = sha256(json.dumps(model, sort_keys=True).encode()).hexdigest()[:8]
    cached = SimulationFolder(cache_folder() / f"simulation-{key}")
    if cached.is_complete:
        return cached
    corpora = required_corpora(corpora)
    print(f"Making the simulated speech in {cached.path}; this happens once and takes about a minute.", file=sys.stderr)
    text = corpora / "text"
    speech = Speech(corpora / "librispeech" / "LibriSpeech" / "dev-clean-2", None, every=2)
    texts = [text / "dev-clean.text.xz", text / "dev-other.text.xz"]
    with torch.no_grad():
        make_folder(cached, Bundle.load(bundle), Lexicon.from_file(text / "lexicon.txt.xz"), speech, texts)
    return cached


def make_folder(
    folder: SimulationFolder,
    bundle: Bundle,
    lexicon: Lexicon,
    speech: Speech,
    texts: Sequence[Path],
    num_sentences: int = 200,
) -> None:
    """Writes segments, sentences and lexicon; see `choose_sentences` for which sentences."""
    pool = speech.pool(bundle, lexicon)
    known = sayable(lexicon, pool.tokens, set(pool.token_id.tolist()))
    chosen = choose_sentences([read_sentences(path) for path in texts], num_sentences, known, speech.speakers)
    if not chosen:
        raise AsrError(
            f"{', '.join(map(str, texts))}: no sentence of 5 to 25 words is by a speaker who is not below "
            f"{speech.audio} and has all its words in {lexicon.name}; give other texts."
        )
    folder.path.mkdir(parents=True, exist_ok=True)
    write_sentences(folder.sentences, chosen)
    known.restricted_to(sorted({word for words in chosen.values() for word in words}))[0].save(folder.lexicon)
    pool.save(folder.segments)
    print(f"{folder.sentences}: {len(chosen)} sentences, {sum(map(len, chosen.values()))} words", file=sys.stderr)


@dataclass(frozen=True)
class Speech:
    """Recordings with transcripts.

    Args:
        audio: folder with the recordings.
        transcripts: lines `id words`; None for all `*.trans.txt` below the audio.
        every: take every N-th recording.
    """

    audio: Path
    transcripts: Path | None
    every: int

    @property
    def speakers(self) -> set[str]:
        return {speaker_of(path.stem) for path in find_audio_files(self.audio)}

    def pool(self, bundle: Bundle, lexicon: Lexicon) -> SegmentPool:
        """The segments of the recordings, as the bundle's acoustic model hears them."""
        transcripts = read_transcripts(self.transcripts) if self.transcripts else transcripts_below(self.audio)
        recognizer = Recognizer(bundle, mode="ngram", decoder="token-passing")
        utterances, num_left_out = [], 0
        for path in with_progress(find_audio_files(self.audio)[:: self.every], "acoustic model"):
            words = transcripts.get(path.stem)
            if words is None or any(word not in lexicon for word in words):
                num_left_out += 1
                continue
            waveform = read_audio(path, recognizer.sampling_rate)
            if len(waveform) > _LONGEST_SECONDS * recognizer.sampling_rate:
                continue
            log_prob, num_frames = recognizer.log_prob([waveform], StageTimes())
            utterances.append((log_prob[0, : int(num_frames[0])].numpy(), [lexicon[word][0] for word in words]))
        pool = SegmentPool.from_utterances(bundle.graph.tokens, utterances)
        correct = float((pool.log_prob.argmax(1) == pool.aligned).mean())
        print(
            f"{self.audio}: {pool.num_segments} segments, {len(pool.log_prob)} frames of {len(utterances)} recordings; "
            f"the aligned token is the most probable one in {correct:.1%} of the frames. {num_left_out} recordings "
            "without transcript or with words that the lexicon lacks were left out.",
            file=sys.stderr,
        )
        return pool


def make_frames(args: argparse.Namespace, bundle: Bundle, lexicon: Lexicon) -> None:
    sentences = read_sentences(args.text)
    ids = [utt_id for utt_id, words in sentences.items() if words and all(word in lexicon for word in words)]
    if args.num is not None:
        ids = evenly(ids, args.num)
    if not ids:
        raise AsrError(f"{args.text}: no sentence has all its words in {args.lexicon}; give the lexicon of this text.")
    pool = SegmentPool.load(args.pool)
    bundle.graph.require_tokens(pool.tokens)
    clarity = args.clarity
    if args.wer is not None:
        trial = [sentences[utt_id] for utt_id in evenly(ids, _SENTENCES_OF_A_TRIAL)]
        clarity = clarity_for(args.wer / 100.0, bundle, pool, trial, lexicon, args.seed)
    made = simulate(FrameSimulator(pool, clarity, args.seed), [sentences[utt_id] for utt_id in ids], lexicon)
    np.savez(args.output, **dict(zip(ids, made, strict=True)))
    write_sentences(args.references, {utt_id: sentences[utt_id] for utt_id in ids})
    print(f"{args.output}: simulation of {len(ids)} sentences, {sum(map(len, made))} frames, clarity {clarity:.3f}")


def clarity_for(
    wanted: float, bundle: Bundle, pool: SegmentPool, sentences: list[tuple[str, ...]], lexicon: Lexicon, seed: int
) -> float:
    """The clarity at which the bundle's n-gram has the word error rate `wanted`, found by bisection."""
    low, high = _WIDEST_CLARITY
    for _ in range(_TRIALS):
        middle = (low + high) / 2
        rate = ngram_error_rate(bundle, simulate(FrameSimulator(pool, middle, seed), sentences, lexicon), sentences)
        print(f"clarity {middle:.3f}: word error rate {rate:.2%} of the n-gram", flush=True)
        low, high = (middle, high) if rate > wanted else (low, middle)
    return (low + high) / 2


def ngram_error_rate(bundle: Bundle, frames: list[NDArray[np.float32]], references: list[tuple[str, ...]]) -> float:
    options, _ = decoding_options(bundle, "ngram", {})
    first_pass, errors = TokenPassingDecoder(bundle.graph, options), NO_ERRORS
    for log_prob, words in zip(frames, references, strict=True):
        best = first_pass.decode(torch.from_numpy(log_prob)[None], torch.tensor([len(log_prob)]))[0].best
        errors += count_errors(words, best.words if best is not None else ())
    return errors.rate


def transcripts_below(folder: Path) -> dict[str, tuple[str, ...]]:
    """All `*.trans.txt` of LibriSpeech's layout."""
    files = sorted(folder.rglob("*.trans.txt"))
    if not files:
        raise AsrError(f"{folder}: holds no *.trans.txt; name the transcripts with --transcripts.")
    return {utt_id: words for path in files for utt_id, words in read_transcripts(path).items()}


def read_sentences(path: Path) -> dict[str, tuple[str, ...]]:
    return transcripts_below(path) if path.is_dir() else read_transcripts(path)


def write_sentences(path: Path, sentences: dict[str, tuple[str, ...]]) -> None:
    path.write_text("".join(f"{utt_id} {' '.join(words)}\n" for utt_id, words in sentences.items()), "utf-8")
