"""`asr evaluate`: error rates of transcripts, or of recordings that it recognizes first."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from torch import Tensor

from asr.audio.io import PartReader
from asr.cli.compile import compiling_notice
from asr.cli.evaluation_details import Details, details_of_file, evaluation_of
from asr.cli.external import (
    add_external_arguments,
    any_recognizer_from,
    check_external_options,
    describe_any,
    described_system,
    external_kind,
    inputs_of_any,
    maker_of_any,
)
from asr.cli.options import (
    add_comparison_options,
    add_recognizer_arguments,
    add_speaker_options,
    refuse_without,
    speaker_flag,
)
from asr.cli.output import ResultsFile, existing
from asr.cli.printing import print_record
from asr.cli.transcribe import LEARNED, Outcome, learn_speaker, transcribe
from asr.decoding.build import old_first_pass
from asr.errors import AsrError
from asr.metrics import (
    Align,
    ErrorCounts,
    ErrorReport,
    Transcripts,
    align,
    alignment_errors,
    bootstrap_interval,
    confusions,
    count_errors,
    format_alignment,
    format_confusions,
    is_partial,
    probability_of_improvement,
    read_transcripts,
    score_transcripts,
    stream_begins_again,
    stream_goes_on,
    utterance_id,
)
from asr.nist import (
    MARKS,
    TimedWord,
    format_trn,
    is_nist,
    match_segments,
    read_ctm,
    read_stm,
    read_words,
    resolve,
)
from asr.nist import align as align_like_sclite
from asr.options import flag_of
from asr.recognizer import Recognizer
from asr.reports.evaluation import Clip
from asr.results import StageTimes, format_cache, later_cache
from asr.serialization import output_path, require_writable, write_whole_text
from asr.text.documents import parse_json, read_text
from asr.text.normalize import without_punctuation

HELP = """Scores transcripts against a reference, or recognizes the recordings of a manifest and scores them.

Transcripts are lines 'id words ...' as in Kaldi, or JSON Lines with 'id' (or 'audio') and 'text', the output of
'asr transcribe'. A manifest is the output of 'asr prepare' (lhotse cuts, .jsonl or .jsonl.gz); it may also be the
reference. The word error rate has a 95 % bootstrap interval over utterances. CTM, STM and TRN files are recognized by
their suffixes, read like NIST's sclite and scored by its rules: case is ignored, references may have alternatives, and
the words of a CTM are assigned to the segments of an STM by their times. If a recording cannot be used, it is reported,
all its words count as deleted, and the exit code is 1.

examples:
  asr evaluate words.jsonl --reference reference.txt
  asr evaluate words.ctm --reference reference.stm
  asr evaluate new.jsonl --reference reference.txt --compare old.jsonl
  asr evaluate --cuts data/an4/test.jsonl.gz --bundle an4 --mode ngram
  asr evaluate --cuts test.jsonl.gz --transducer onnx:zipformer/ --ignore-case --ignore-punctuation
  asr evaluate --recipe librispeech --output results        several sets and systems, and a table of them
  asr evaluate --cuts data/an4/test.jsonl.gz --bundle an4 --details an4.json --confidences; asr report an4.json"""


COMMON = (
    *("reference", "cuts", "recipe", "compare", "missing_is_empty", "ignore_case", "ignore_punctuation", "details"),
    *("output", "confidences", "json", "bundle", "mode", "acoustic_model", "transducer", "attention_model", "ngram"),
    *("rnn_lm", "hot_words", "device"),
)
"""The options that `--help` shows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("hypotheses", nargs="?", help="transcripts to score; not with --cuts")
    parser.add_argument("--reference", metavar="FILE", help="the correct transcripts, or a manifest with them")
    parser.add_argument("--cuts", metavar="FILE", help="a manifest whose recordings to recognize and score")
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        help="recognize several test sets with several systems: a YAML file, or the folder in recipes/ that has it; "
        "--output is then a folder, and finished results there are kept",
    )
    parser.add_argument(
        "--compare",
        metavar="FILE",
        help="transcripts of another system; prints the probability that the first one is better",
    )
    parser.add_argument(
        "--missing-is-empty", action="store_true", help="count utterances without a transcript as deleted"
    )
    add_comparison_options(parser)
    parser.add_argument(
        "--scoring",
        choices=("auto", "sclite"),
        default="auto",
        help="sclite: count errors like sclite; auto: do so if a file is CTM, STM or TRN (default: auto)",
    )
    add_speaker_options(parser, "with --cuts, the recordings of each speaker together")
    parser.add_argument(
        "--export",
        type=output_path,
        metavar="DIR",
        help="write ref.trn and hyp.trn there, for sclite and other programs",
    )
    parser.add_argument(
        "--details",
        type=output_path,
        metavar="FILE",
        help="write confusions and the alignment of each utterance to this text file, or to a file *.json everything "
        "that 'asr report' shows",
    )
    parser.add_argument(
        "--confidences",
        action="store_true",
        help="with --cuts, compute word confidences and keep some lattices for 'asr report', which takes time",
    )
    parser.add_argument(
        "--output",
        type=output_path,
        metavar="FILE",
        help="with --cuts, write the recognition results to this file as JSON Lines",
    )
    parser.add_argument(
        "--resume", action="store_true", help="with --output, keep the results in the file, and recognize the others"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object instead of text, or with --recipe a list of them; a rate is null if the reference "
        "has no words, and the real-time factor if nothing was recognized",
    )
    add_recognizer_arguments(parser)
    add_external_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.recipe:
        from asr.cli.evaluate_recipe import run_recipe

        return run_recipe(args, add_arguments, check_recognizer_options, run)
    if not args.cuts:
        refuse_without("--cuts", add_recognizer_arguments, args)
        refuse_without("--cuts", add_external_arguments, args)
    check_recognizer_options(args)
    # Files that cannot be read or written are reported before anything is recognized.
    read = (args.hypotheses, args.reference, args.cuts, args.compare)
    require_writable(*_outputs(args), inputs=[*read, *inputs_of_any(args)])
    if args.confidences and not args.cuts:
        raise AsrError("--confidences needs --cuts; for transcripts, use 'asr transcribe --lattices'.")
    if args.speaker and not args.cuts:
        raise AsrError(f"{speaker_flag(args)} needs --cuts, the recordings to recognize; give it.")
    if (args.output or args.resume) and not args.cuts:
        raise AsrError("--output and --resume are for the results of --cuts; give it, or redirect stdout.")
    is_sclite = args.scoring == "sclite" or any(is_nist(path) for path in read[:3] if path)
    other = _read_other(args) if args.compare else None
    extra: dict[str, Any] = {}
    details = Details()
    if args.cuts:
        if args.hypotheses or args.reference:
            raise AsrError("--cuts has its own reference; leave out the hypotheses and --reference, or --cuts.")
        references, hypotheses, extra = _recognize(args, other, details)
    elif args.hypotheses and args.reference:
        references, hypotheses = read_pair(args.reference, args.hypotheses)
        details = details_of_file(args.hypotheses)
        failed = [name for name, record in details.records.items() if "error" in record and name in references]
        if failed:
            extra["failed"] = len(failed)
            print(
                f"asr: {args.hypotheses}: {len(failed)} recordings failed, such as {failed[0]!r}; all their words "
                "count as deleted.",
                file=sys.stderr,
            )
    else:
        raise AsrError("there is nothing to score; give hypotheses and --reference, or --cuts.")
    if args.export:
        _export(Path(args.export), references, hypotheses)
    ignored = args.ignore_case, args.ignore_punctuation
    references, hypotheses = _as_compared(references, *ignored, is_sclite), _as_compared(hypotheses, *ignored)
    if args.ignore_punctuation:
        details.split_words()
    marked = references
    if is_sclite:
        references, hypotheses = resolve(references, hypotheses)
    count = _sclite_errors if is_sclite else count_errors
    report = score_transcripts(references, hypotheses, args.missing_is_empty, count)
    if other is not None:
        other = _as_compared(other, *ignored)
        fitting, other = resolve(marked, other) if is_sclite else (references, other)
        other_report = score_transcripts(fitting, other, args.missing_is_empty, count)
        extra["other_wer"] = other_report.total_words.rate
        extra["probability_of_improvement"] = probability_of_improvement(
            report.words.values(), other_report.words.values()
        )
    if hint := _hint(references, hypotheses, report, args.missing_is_empty):
        print(f"asr: {hint}", file=sys.stderr)
    if args.details:
        if Path(args.details).suffix == ".json":
            name, summary = Path(args.details).stem, _as_dict(report, extra)
            evaluation_of(name, references, hypotheses, summary, details, is_sclite).save(args.details)
        else:
            align_words = align_like_sclite if is_sclite else align
            _write_details(Path(args.details), references, hypotheses, report, align_words)
    if args.json:
        print_record(_as_dict(report, extra), sys.stdout)
    else:
        print("\n".join(_as_text(report, extra)))
    return 1 if extra.get("failed") else 0


def check_recognizer_options(args: argparse.Namespace) -> None:
    """Refuses options of recognition that have no effect with the others.

    Raises:
        AsrError: there is such an option.
    """
    check_external_options(args, {speaker_flag(args): args.speaker})
    kind = external_kind(args)
    if kind is not None and args.confidences:
        raise AsrError(f"--confidences has no effect with {flag_of(kind)}, whose words have them anyway; leave it out.")


def _outputs(args: argparse.Namespace) -> list[Path]:
    exported = existing(args.export, ("ref.trn", "hyp.trn")) if args.export else []
    return [*(Path(path) for path in (args.details, args.output) if path), *exported]


def _sclite_errors(reference: Sequence[str], hypothesis: Sequence[str]) -> ErrorCounts:
    return alignment_errors(align_like_sclite(reference, hypothesis))


def read_pair(reference: str, hypotheses: str) -> tuple[Transcripts, Transcripts]:
    """Reads the reference and the hypotheses, from files of any format.

    Words with times, from a CTM or from our own JSON Lines, are assigned to the segments of an STM.

    Raises:
        AsrError: a file cannot be read, or the files do not match.
    """
    if Path(reference).suffix.lower() != ".stm" or Path(hypotheses).suffix.lower() in (".stm", ".trn"):
        return _read(reference), _read(hypotheses)
    segments = read_stm(reference)
    if Path(hypotheses).suffix.lower() == ".ctm":
        return match_segments(segments, read_ctm(hypotheses))
    channels = {segment.recording: segment.channel for segment in segments}
    return match_segments(segments, _timed_words(hypotheses, channels))


def _read(path: str) -> Transcripts:
    return read_words(path) if is_nist(path) else read_transcripts(path)


def _read_other(args: argparse.Namespace) -> Transcripts:
    """The transcripts of the other system, by the same names as those of the first."""
    return read_pair(args.reference, args.compare)[1] if args.reference else _read(args.compare)


def _timed_words(path: str, channels: Mapping[str, str]) -> dict[tuple[str, str], list[TimedWord]]:
    """The words of JSON Lines of `asr transcribe`, by recording and its channel in the reference."""
    found: dict[tuple[str, str], list[TimedWord]] = {}
    complete = set[str]()
    begins: dict[str, float] = {}
    for number, line in enumerate(read_text(path, "transcript file").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record: dict[str, Any] = parse_json(line)
            if "error" in record:
                continue
            name = utterance_id(record, f"{path}:{number}")
            words = [
                TimedWord(str(word["word"]), float(word["start"]), float(word["end"]) - float(word["start"]))
                for word in ([] if is_partial(record) else record["words"])
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise AsrError(
                f"{path}:{number}: an STM reference needs words with times; give a CTM, or JSON Lines of "
                "'asr transcribe'."
            ) from error
        recording = name, channels.get(name, "1")
        if name in complete:
            raise AsrError(f"{path}:{number}: the recording {name!r} occurs twice; keep one of the two lines.")
        if stream_begins_again(record, name, begins):
            found[recording] = []
        found[recording] = sorted([*found.get(recording, ()), *words], key=lambda word: word.begin)
        if not stream_goes_on(record):
            complete.add(name)
    return found


def _export(folder: Path, references: Transcripts, hypotheses: Transcripts) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AsrError(f"{folder}: the transcripts cannot be written there ({error.strerror}).") from error
    write_whole_text(folder / "ref.trn", format_trn(references))
    write_whole_text(folder / "hyp.trn", format_trn(hypotheses))


def _hint(
    references: Mapping[str, Sequence[str]],
    hypotheses: Mapping[str, Sequence[str]],
    report: ErrorReport,
    missing_is_empty: bool,
) -> str:
    """What to do if half of the errors or more are due to case and punctuation."""
    if report.total_words.rate < 0.5:
        return ""
    references, hypotheses = (_as_compared(each, True, True) for each in (references, hypotheses))
    plain = score_transcripts(references, hypotheses, missing_is_empty).total_words.rate
    if plain > report.total_words.rate / 2:
        return ""
    return (
        f"without case and punctuation the word error rate would be {plain:.2%}; use --ignore-case and "
        "--ignore-punctuation."
    )


def _as_compared(
    transcripts: Mapping[str, Sequence[str]],
    ignore_case: bool,
    ignore_punctuation: bool,
    has_alternatives: bool = False,
) -> Transcripts:
    """Transcripts without what the options ignore."""
    found = {name: tuple(words) for name, words in transcripts.items()}
    if ignore_punctuation:
        found = {name: _without_punctuation(words, has_alternatives) for name, words in found.items()}
    if ignore_case:
        found = {name: tuple(word.upper() for word in words) for name, words in found.items()}
    return found


def _without_punctuation(words: Sequence[str], has_alternatives: bool) -> tuple[str, ...]:
    if not has_alternatives or "{" not in words:
        return tuple(without_punctuation(" ".join(words)).split())
    found, depth = list[str](), 0
    for is_mark, group in itertools.groupby(words, MARKS.__contains__):
        kept = [*group]
        if not is_mark:
            kept = without_punctuation(" ".join(kept)).split()
        depth += kept.count("{") - kept.count("}")
        found += kept or ["@"] * (depth > 0)  # an alternative that was punctuation alone
    return tuple(found)


def _recognize(
    args: argparse.Namespace, other: Mapping[str, Sequence[str]] | None, details: Details
) -> tuple[Transcripts, Transcripts, dict[str, Any]]:
    from asr.datasets.cuts import cut_source, cut_text, read_cuts

    cuts = {cut.id: cut for cut in read_cuts([args.cuts])}
    require_writable(*_outputs(args), inputs=[source[0] for cut in cuts.values() if (source := cut_source(cut))])
    references = {name: tuple(cut_text(cut).split()) for name, cut in cuts.items()}
    if other is not None:
        # Rejects other utterances before recognition, which takes long.
        score_transcripts(references, other, args.missing_is_empty)
    if args.resume and not args.output:
        raise AsrError("--resume needs --output, the file to continue; give it.")
    with ResultsFile(Path(args.output), "id") if args.output else contextlib.nullcontext() as output:
        if output is not None and output.done and not args.resume:
            raise AsrError(
                f"{args.output}: there are results in it; continue with --resume, choose another --output, or delete "
                "the file."
            )
        return references, *_recognize_cuts(args, cuts, output, details)


def _recognize_cuts(
    args: argparse.Namespace, cuts: Mapping[str, Any], output: ResultsFile | None, details: Details
) -> tuple[Transcripts, dict[str, Any]]:
    from asr.datasets.cuts import cut_session, cut_source, cut_speaker, cut_text, cut_waveform

    if output is not None:
        details.records.update((name, output.record(name)) for name in output.done if name in cuts)
    hypotheses = {name: tuple(str(record["text"]).split()) for name, record in details.records.items()}
    sources = ((name, cut_source(cut)) for name, cut in cuts.items())
    details.clips.update((name, Clip(*source)) for name, source in sources if source is not None)
    todo = [name for name in cuts if name not in hypotheses]
    details.is_resumed = bool(hypotheses)
    if hypotheses:
        print(f"{len(hypotheses)} of {len(cuts)} recordings are already in {args.output}.", file=sys.stderr)
    recognizer = any_recognizer_from(args)
    if isinstance(recognizer, Recognizer):
        recognizer.keep_lattices = args.confidences
        details.describe(recognizer)
    else:
        details.system = described_system(args, recognizer)
    if recognizer.carries_history and hypotheses:
        raise AsrError("--resume and --carry-history exclude each other: the words before would be missing.")
    with compiling_notice():
        recognizer.prepare()
    if output is not None:
        output.require_maker(maker_of_any(args, recognizer, LEARNED[args.speaker]))

    parts = PartReader()

    def read(name: str, rate: int) -> Tensor:
        return cut_waveform(cuts[name], rate, parts)

    speakers: dict[str, list[str]] = {}
    in_order = sorted(cuts, key=lambda name: cut_session(cuts[name])) if recognizer.carries_history else [*cuts]
    for name in in_order:
        speakers.setdefault(cut_speaker(cuts[name]) if args.speaker else "", []).append(name)

    def of_speaker(own: Sequence[str]) -> Iterator[Outcome]:
        left = [name for name in own if name not in hypotheses]
        return transcribe(
            recognizer,
            left,
            read,
            speaker=learn_speaker(recognizer, args.speaker, own, read)
            if left and isinstance(recognizer, Recognizer)
            else None,
            session_of=(lambda name: cut_session(cuts[name])[0]) if recognizer.carries_history else None,
        )

    outcomes = itertools.chain.from_iterable(of_speaker(own) for own in speakers.values())
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
            pair = {"reference": cut_text(cuts[outcome.name]).split(), "hypothesis": hypotheses[outcome.name]}
            compared = _as_compared(pair, args.ignore_case, args.ignore_punctuation)
            details.add(outcome.name, outcome.result, count_errors(**compared).num_errors)
        details.records[outcome.name] = record
        if output is not None:
            output.add(record)
    print(f"{describe_any(args, recognizer)}: {times.format()}", file=sys.stderr)
    extra: dict[str, Any] = {kind: getattr(args, kind) for kind in filter(None, [external_kind(args)])}
    if isinstance(recognizer, Recognizer):
        details.draw_lattices(recognizer)
        extra = {
            "mode": recognizer.mode,
            "first_pass": old_first_pass(recognizer.decoder_name, recognizer.lm_fusion),
            "decoder": recognizer.decoder_name,
            "lm_fusion": recognizer.lm_fusion,
        }
    extra |= {
        "failed": num_failed,
        **times.as_dict(),
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
    """None for an infinite rate (a reference without words), which JSON cannot represent."""
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
    align_words: Align,
) -> None:
    lines = ["most frequent errors", *format_confusions(confusions(references, hypotheses, align_words)), ""]
    for utt_id, counts in sorted(report.words.items(), key=lambda item: -item[1].num_errors):
        lines += [
            f"{utt_id}  {_counts(counts)} of {counts.num_ref} words",
            format_alignment(references[utt_id], hypotheses.get(utt_id, ()), align_words),
            "",
        ]
    write_whole_text(path, "\n".join(lines))
