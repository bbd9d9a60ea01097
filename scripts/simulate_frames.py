"""Makes the LibriSpeech-scale simulation: frame log-probabilities for any text, out of segments of real speech.

    # all that scripts/bench_decode.py needs, from a corpus: segments of every second recording, 200 sentences of
    # speakers who are not among the recordings', and the pronunciations of their words
    python scripts/simulate_frames.py prepare --audio LibriSpeech/dev-clean-2 \
        --text dev-clean.text.xz dev-other.text.xz --lexicon lexicon.txt.xz --output data/simulation

    # segments alone, from speech with transcripts: an acoustic model's frames, aligned and cut into phones
    python scripts/simulate_frames.py pool --bundle checkpoints/librispeech --audio LibriSpeech/dev-clean-2 \
        --lexicon lexicon.txt.xz --output segments.npz.xz

    # frames for a text, as clear as makes the n-gram's word error rate 6 %
    python scripts/simulate_frames.py frames --bundle checkpoints/librispeech --text dev-clean.text.xz \
        --lexicon lexicon.txt.xz --num 500 --wer 6 --output clean.npz --references clean.txt

`--transcripts` (`id words` a line, id being a file's name without ending) names those of the audio where they are not
in `*.trans.txt` files beside it. `--text` is a file of such lines, plain or .xz, or a folder with `*.trans.txt` files.
A speaker is what stands before an id's first hyphen. Without `--pool` the segments are those of data/simulation. The
same input makes the same files. What is made is a simulation (scripts/benchmarks/simulation.py says of what) and is
to be called so wherever it is quoted.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from parts import ROOT
from parts.command import run

from asr.audio.io import find_audio_files, read_audio
from asr.bundle import Bundle
from asr.decoding.build import decoding_options
from asr.decoding.token_passing import TokenPassingDecoder
from asr.errors import AsrError
from asr.metrics import NO_ERRORS, count_errors, read_transcripts
from asr.recognizer import Recognizer
from asr.results import StageTimes
from asr.text.lexicon import Lexicon
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

DATA = ROOT / "data" / "simulation"
_LONGEST_SECONDS = 25.0
_SENTENCES_OF_A_TRIAL = 60
_TRIALS = 7
_WIDEST_CLARITY = (-4.0, 12.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser("prepare", help="the folder that scripts/bench_decode.py works on")
    prepare.add_argument("--text", type=Path, nargs="+", required=True, help="where sentences are chosen from")
    prepare.add_argument("--num", type=int, default=200, help="number of sentences (%(default)s)")
    pool = commands.add_parser("pool", help="aligned segments of real speech")
    for command, every in ((prepare, 2), (pool, 1)):
        command.add_argument("--audio", type=Path, required=True, help="folder with the recordings")
        command.add_argument("--transcripts", type=Path, help="default: all *.trans.txt below the audio")
        command.add_argument("--every", type=int, default=every, help="take every n-th recording (%(default)s)")
    frames = commands.add_parser("frames", help="frames for a text")
    frames.add_argument("--pool", type=Path, help="default: that of data/simulation")
    frames.add_argument("--text", type=Path, required=True, help="`id words` a line, plain or .xz")
    frames.add_argument("--num", type=int, help="take so many sentences, spread evenly")
    frames.add_argument("--clarity", type=float, default=0.0, help="nats, see scripts/benchmarks/simulation.py")
    frames.add_argument(
        "--wer", type=float, help="find the clarity at which the n-gram has this word error rate, in %%"
    )
    frames.add_argument("--seed", type=int, default=0)
    frames.add_argument("--references", type=Path, required=True, help="where `id words` of what was made are written")
    for command in (prepare, pool, frames):
        command.add_argument("--bundle", type=Path, default=ROOT / "checkpoints" / "librispeech")
        command.add_argument("--lexicon", type=Path, required=True)
        command.add_argument("--output", type=Path, required=command is not prepare, default=DATA)
    args = parser.parse_args()
    torch.set_num_threads(1)
    bundle = Bundle.load(args.bundle)
    lexicon = Lexicon.from_file(args.lexicon)
    make = {"prepare": make_folder, "pool": make_pool, "frames": make_frames}[args.command]
    with torch.no_grad():
        return make(args, bundle, lexicon)


def make_folder(args: argparse.Namespace, bundle: Bundle, lexicon: Lexicon) -> int:
    texts = [read_sentences(path) for path in args.text]
    speakers = {speaker_of(path.stem) for path in find_audio_files(args.audio)}
    pool = pool_of(args, bundle, lexicon)
    known = sayable(lexicon, pool.tokens, set(pool.token_id.tolist()))
    chosen = choose_sentences(texts, args.num, known, speakers)
    if not chosen:
        raise AsrError(
            f"{', '.join(map(str, args.text))}: no sentence of 5 to 25 words is of a speaker who is not below "
            f"{args.audio} and has all its words in {args.lexicon}; give other texts."
        )
    folder = SimulationFolder(args.output)
    folder.path.mkdir(parents=True, exist_ok=True)
    pool.save(folder.segments)
    write_sentences(folder.sentences, chosen)
    known.restricted_to(sorted({word for words in chosen.values() for word in words}))[0].save(folder.lexicon)
    print(f"{folder.sentences}: {len(chosen)} sentences, {sum(map(len, chosen.values()))} words")
    return 0


def make_pool(args: argparse.Namespace, bundle: Bundle, lexicon: Lexicon) -> int:
    pool_of(args, bundle, lexicon).save(args.output)
    return 0


def pool_of(args: argparse.Namespace, bundle: Bundle, lexicon: Lexicon) -> SegmentPool:
    """The segments of the recordings."""
    transcripts = read_transcripts(args.transcripts) if args.transcripts else transcripts_below(args.audio)
    recognizer = Recognizer(bundle, mode="ngram", decoder="token-passing")
    utterances, num_without = [], 0
    for path in find_audio_files(args.audio)[:: args.every]:
        words = transcripts.get(path.stem)
        if words is None or any(word not in lexicon for word in words):
            num_without += 1
            continue
        waveform = read_audio(path, recognizer.sampling_rate)
        if len(waveform) > _LONGEST_SECONDS * recognizer.sampling_rate:
            continue
        log_prob, num_frames = recognizer.log_prob([waveform], StageTimes())
        utterances.append((log_prob[0, : int(num_frames[0])].numpy(), [lexicon[word][0] for word in words]))
    pool = SegmentPool.from_utterances(bundle.graph.tokens, utterances)
    right = float((pool.log_prob.argmax(1) == pool.aligned).mean())
    print(
        f"{args.audio}: {pool.num_segments} segments, {len(pool.log_prob)} frames of {len(utterances)} recordings; "
        f"the aligned token is the most probable one in {right:.1%} of the frames. {num_without} recordings without "
        "transcript or with words that the lexicon lacks were left out."
    )
    return pool


def make_frames(args: argparse.Namespace, bundle: Bundle, lexicon: Lexicon) -> int:
    sentences = read_sentences(args.text)
    ids = [utt_id for utt_id, words in sentences.items() if words and all(word in lexicon for word in words)]
    if args.num is not None:
        ids = evenly(ids, args.num)
    if not ids:
        raise AsrError(f"{args.text}: no sentence has all its words in {args.lexicon}; give the lexicon of this text.")
    pool = SegmentPool.load(args.pool or SimulationFolder(DATA).require().segments)
    bundle.graph.require_tokens(pool.tokens)
    clarity = args.clarity
    if args.wer is not None:
        trial = [sentences[utt_id] for utt_id in evenly(ids, _SENTENCES_OF_A_TRIAL)]
        clarity = clarity_for(args.wer / 100.0, bundle, pool, trial, lexicon, args.seed)
    made = simulate(FrameSimulator(pool, clarity, args.seed), [sentences[utt_id] for utt_id in ids], lexicon)
    np.savez(args.output, **dict(zip(ids, made, strict=True)))
    write_sentences(args.references, {utt_id: sentences[utt_id] for utt_id in ids})
    print(f"{args.output}: simulation of {len(ids)} sentences, {sum(map(len, made))} frames, clarity {clarity:.3f}")
    return 0


def clarity_for(
    wanted: float, bundle: Bundle, pool: SegmentPool, sentences: list[tuple[str, ...]], lexicon: Lexicon, seed: int
) -> float:
    """The clarity at which the bundle's n-gram has the word error rate `wanted`, by bisection."""
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


if __name__ == "__main__":
    run(main)
