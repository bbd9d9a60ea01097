"""`asr evaluate`: error rates of transcripts, or of recordings that are recognized first."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asr.errors import AsrError
from asr.metrics import (
    ErrorCounts,
    ErrorReport,
    bootstrap_interval,
    confusions,
    format_alignment,
    format_confusions,
    probability_of_improvement,
    read_transcripts,
    score_transcripts,
)
from asr.results import StageTimes, format_cache
from asr.serialization import require_writable

NAME = "evaluate"


HELP = """Scores transcripts against a reference, or recognizes the recordings of a manifest and scores them.

Transcripts are lines 'id words ...' as in Kaldi, or JSON Lines with 'id' (or 'audio') and 'text', as 'asr transcribe'
writes them. A manifest is what 'asr prepare' writes (lhotse cuts, .jsonl or .jsonl.gz). The word error rate has a 95 %
bootstrap interval over utterances. A recording that cannot be used is reported and all its words count as deleted; the
exit code is then 1.

examples:
  asr evaluate words.jsonl --reference reference.txt
  asr evaluate new.jsonl --reference reference.txt --compare old.jsonl
  asr evaluate --cuts data/an4/test.jsonl.gz --bundle an4 --mode ngram"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from asr.cli.options import add_recognizer_arguments

    parser.add_argument("hypotheses", nargs="?", help="transcripts to score; not with --cuts")
    parser.add_argument("--reference", help="the correct transcripts")
    parser.add_argument("--cuts", help="a manifest whose recordings are recognized and scored")
    parser.add_argument(
        "--compare", help="transcripts of another system; prints how probable it is that the first one is better"
    )
    parser.add_argument(
        "--missing-is-empty", action="store_true", help="count utterances without a transcript as deleted"
    )
    parser.add_argument("--ignore-case", action="store_true", help="compare words in upper case")
    parser.add_argument("--details", help="write confusions and the alignment of each utterance to this text file")
    parser.add_argument(
        "--output", help="write what is recognized to this file, as JSON Lines; an existing file is replaced"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue where an interrupted run stopped (with --output)"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="one JSON object instead of text; a rate is null where the reference has no words",
    )
    add_recognizer_arguments(parser)


def run(args: argparse.Namespace) -> int:
    # Files that cannot be read or written are reported before anything is recognized.
    outputs = (Path(path) for path in (args.details, args.output) if path)
    read = (args.hypotheses, args.reference, args.cuts, args.compare, args.lexicon, args.large_ngram, args.rnn_lm)
    require_writable(*outputs, inputs=read)
    other = read_transcripts(args.compare) if args.compare else None
    extra: dict[str, Any] = {}
    if args.cuts:
        if args.hypotheses or args.reference:
            raise AsrError("--cuts has its own reference; leave out the hypotheses and --reference, or --cuts.")
        references, hypotheses, extra = _recognize(args, other)
    elif args.hypotheses and args.reference:
        references, hypotheses = read_transcripts(args.reference), read_transcripts(args.hypotheses)
    else:
        raise AsrError("there is nothing to score: give hypotheses and --reference, or --cuts.")
    if args.ignore_case:
        references, hypotheses = _upper(references), _upper(hypotheses)
    report = score_transcripts(references, hypotheses, args.missing_is_empty)
    if other is not None:
        other_report = score_transcripts(
            references, _upper(other) if args.ignore_case else other, args.missing_is_empty
        )
        extra["other_wer"] = other_report.total_words.rate
        extra["probability_of_improvement"] = probability_of_improvement(
            report.words.values(), other_report.words.values()
        )
    if hint := _hint(references, hypotheses, report, args.missing_is_empty):
        print(f"asr: {hint}", file=sys.stderr)
    if args.details:
        _write_details(Path(args.details), references, hypotheses, report)
    print(json.dumps(_as_dict(report, extra)) if args.json else "\n".join(_as_text(report, extra)))
    return 1 if extra.get("failed") else 0


def _hint(
    references: Mapping[str, Sequence[str]],
    hypotheses: Mapping[str, Sequence[str]],
    report: ErrorReport,
    missing_is_empty: bool,
) -> str:
    """What to do where half of the errors or more come from letter case and punctuation."""
    if report.total_words.rate < 0.5:
        return ""
    plain = score_transcripts(_plain(references), _plain(hypotheses), missing_is_empty).total_words.rate
    if plain > report.total_words.rate / 2:
        return ""
    return (
        f"without letter case and punctuation the word error rate would be {plain:.2%}; use --ignore-case, and take "
        "punctuation out of the reference."
    )


def _plain(transcripts: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    cleaned = {name: (re.sub(r"[^\w']", "", word.upper()) for word in words) for name, words in transcripts.items()}
    return {name: tuple(filter(None, words)) for name, words in cleaned.items()}


def _upper(transcripts: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    return {utt_id: tuple(word.upper() for word in words) for utt_id, words in transcripts.items()}


def _recognize(
    args: argparse.Namespace, other: Mapping[str, Sequence[str]] | None
) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]], dict[str, Any]]:
    from asr.cli.output import ResultsFile
    from asr.datasets.cuts import cut_text, read_cuts

    cuts = {cut.id: cut for cut in read_cuts([args.cuts])}
    references = {name: tuple(cut_text(cut).split()) for name, cut in cuts.items()}
    if other is not None:
        # Refuses other utterances before recognition, which takes long.
        score_transcripts(references, other, args.missing_is_empty)
    if args.resume and not args.output:
        raise AsrError("--resume continues the file of --output; name it.")
    results = ResultsFile(Path(args.output), "id", anew=not args.resume) if args.output else None
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(results) if results is not None else None
        return references, *_recognize_cuts(args, cuts, output)


def _recognize_cuts(
    args: argparse.Namespace, cuts: Mapping[str, Any], output: Any
) -> tuple[dict[str, tuple[str, ...]], dict[str, Any]]:
    from rich.console import Console
    from rich.progress import track

    from asr.cli.compile import compiling_notice
    from asr.cli.options import describe, recognizer_from
    from asr.cli.output import maker_of
    from asr.cli.transcribe import transcribe
    from asr.datasets.cuts import cut_waveform
    from asr.decoding.build import old_first_pass
    from asr.results import later_cache

    done = [name for name in output.done if name in cuts] if output is not None else []
    hypotheses = {name: tuple(str(output.record(name)["text"]).split()) for name in done}
    todo = [name for name in cuts if name not in hypotheses]
    if hypotheses:
        print(f"{len(hypotheses)} of {len(cuts)} recordings are in {args.output} already.", file=sys.stderr)
    recognizer = recognizer_from(args)
    with compiling_notice():
        recognizer.prepare()
    if output is not None:
        output.require_maker(maker_of(recognizer))
    outcomes = transcribe(recognizer, todo, lambda name, rate: cut_waveform(cuts[name], rate))
    times, cache, num_failed = StageTimes(), dict[str, int | float](), 0
    console = Console(stderr=True)
    shown = track(outcomes, "recognizing", total=len(todo), console=console, disable=not console.is_terminal)
    for outcome in shown:
        record: dict[str, Any] = {"id": outcome.name}
        if outcome.result is None:
            num_failed += 1
            print(f"asr: {outcome.error}", file=sys.stderr)
            hypotheses[outcome.name] = ()
            record["error"] = outcome.error
        else:
            hypotheses[outcome.name] = tuple(word.text for word in outcome.result.words)
            times.add(outcome.result.times)
            cache = later_cache(cache, outcome.result.cache)
            record.update(outcome.result.as_dict())
        if output is not None:
            output.add(record)
    print(f"{describe(recognizer)}: {times.format()}", file=sys.stderr)
    extra = {
        "mode": recognizer.mode,
        "first_pass": old_first_pass(recognizer.decoder_name, recognizer.lm_fusion),
        "decoder": recognizer.decoder_name,
        "lm_fusion": recognizer.lm_fusion,
        "failed": num_failed,
        "real_time_factor": round(times.real_time_factor, 4),
        "seconds": {stage: round(seconds, 3) for stage, seconds in times.stages.items()},
        "cache": cache,
    }
    return hypotheses, extra


def _as_dict(report: ErrorReport, extra: dict[str, Any]) -> dict[str, Any]:
    words, letters = report.total_words, report.total_characters
    low, high = bootstrap_interval(report.words.values())
    return {
        "wer": _rounded(words.rate),
        "wer_interval": [round(low, 6), round(high, 6)],
        "words": words.num_ref,
        "substitutions": words.num_substitutions,
        "insertions": words.num_insertions,
        "deletions": words.num_deletions,
        "cer": _rounded(letters.rate),
        "utterances": len(report.words),
        "wrong_utterances": report.num_wrong_utterances,
        **extra,
        **({"other_wer": _rounded(extra["other_wer"])} if "other_wer" in extra else {}),
    }


def _rounded(rate: float) -> float | None:
    """None for an infinite rate, which a reference without words has and JSON has not."""
    return round(rate, 6) if math.isfinite(rate) else None


def _as_text(report: ErrorReport, extra: dict[str, Any]) -> list[str]:
    words, letters = report.total_words, report.total_characters
    low, high = bootstrap_interval(report.words.values())
    lines = [
        f"WER {words.rate:7.2%}  (95 % interval {low:.2%} to {high:.2%})  {_counts(words)} of {words.num_ref} words",
        f"CER {letters.rate:7.2%}  {_counts(letters)} of {letters.num_ref} characters",
        f"{report.num_wrong_utterances} of {len(report.words)} utterances have errors",
    ]
    if "other_wer" in extra:
        lines.append(
            f"the other system: WER {extra['other_wer']:.2%}; "
            f"the first is better with a probability of {extra['probability_of_improvement']:.1%}"
        )
    lines += format_cache(extra.get("cache", {}))
    return lines


def _counts(counts: ErrorCounts) -> str:
    return (
        f"{counts.num_substitutions} substitutions, {counts.num_insertions} insertions, "
        f"{counts.num_deletions} deletions"
    )


def _write_details(
    path: Path,
    references: Mapping[str, Sequence[str]],
    hypotheses: Mapping[str, Sequence[str]],
    report: ErrorReport,
) -> None:
    lines = ["most frequent errors", *format_confusions(confusions(references, hypotheses)), ""]
    for utt_id, counts in sorted(report.words.items(), key=lambda item: -item[1].num_errors):
        lines += [
            f"{utt_id}  {_counts(counts)} of {counts.num_ref} words",
            format_alignment(references[utt_id], hypotheses.get(utt_id, ())),
            "",
        ]
    try:
        path.write_text("\n".join(lines), encoding="utf-8")
    except OSError as error:
        raise AsrError(f"{path}: the details cannot be written ({error.strerror}).") from error
