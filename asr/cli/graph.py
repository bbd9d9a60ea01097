"""`asr graph`: compiles a lexicon and a small n-gram model into a decoding graph."""

from __future__ import annotations

import argparse
import math
import resource
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from asr.bundle import FILE_NAME, Bundle
from asr.cli.options import fetched_path_or_bundle
from asr.cli.printing import print_record
from asr.errors import AsrError
from asr.graph.build import BuildReport, OptionalSilence, build_phone_graph
from asr.graph.context import BIPHONE_TOPOLOGY, TIED_STATES, TiedStates
from asr.graph.imported import import_graph
from asr.graph.topology import TOPOLOGIES
from asr.lm.ngram.model import NgramLM
from asr.options import flag_of
from asr.serialization import output_path, require_writable, write_whole_text
from asr.text.documents import parse_json, read_text
from asr.text.lexicon import Lexicon, in_upper_case
from asr.text.normalize import written_as
from asr.text.symbols import SPECIAL_WORDS, TokenTable

HELP = """\
Compiles a lexicon and a small n-gram model (ARPA) into a decoding graph.

The file contains the graph of phones with the backoffs of the model. It is composed with the topology (H) when it is
loaded, which takes some seconds for a million n-grams. Use a pruned model of 100,000 to 1,000,000 n-grams; larger
models are applied during decoding and need no graph. Words of the model that are not in the lexicon cannot be
recognized; their number is reported, and they are listed in a file next to the graph.

With --from, a graph of another recognizer is converted instead: HLG.pt of icefall (k2), or HLG.fst of sherpa-onnx,
whose input labels are the outputs of a CTC network. No code from these files is run. Use the result with that network:
'asr transcribe --acoustic-model KIND:NAME --graph graph.safetensors'. The input labels of Kaldi's HCLG.fst are
transition ids. With final.mdl as --tokens they are replaced with pdfs, and the graph is used with log-likelihoods of
that model's network (docs/decoding.md).

One JSON object with the graph's size goes to stdout, progress to stderr.

examples:
  asr graph --lexicon lexicon.txt --arpa 3gram.arpa --output graph.safetensors
  asr graph --lexicon names.txt cmudict.dict --arpa 3gram.arpa.gz --tokens tokens.txt --output graph.safetensors
  asr graph --lexicon my.dict cmudict.dict --arpa my.arpa --tokens checkpoints/librispeech --output my.safetensors
  asr graph --from HLG.pt --words words.txt --tokens tokens.txt --output graph.safetensors
  asr graph --from HCLG.fst --words words.txt --tokens final.mdl --output graph.safetensors
  asr graph --topology hmm-3 --silence SIL --lexicon lexicon.txt --arpa 3gram.arpa --tokens states.txt \\
      --output graph.safetensors
"""


_SCORE_BITS = 11
_MAX_BITS = 14


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FILE",
        help="a k2 graph (HLG.pt) or OpenFst graph (HLG.fst or HCLG.fst, of the type vector or const) to convert; "
        "needs --words, and as --tokens the tokens.txt that it was built with; for HCLG.fst final.mdl, or the output "
        "of Kaldi's show-transitions",
    )
    parser.add_argument("--words", type=Path, metavar="FILE", help="with --from, its words.txt")
    parser.add_argument(
        "--lexicon",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="pronunciations in the format of CMUdict or Kaldi, plain, .gz or .xz; the first file that has a word "
        "wins; the case of words does not matter, the graph has the words of the n-gram model",
    )
    parser.add_argument("--arpa", type=Path, metavar="FILE", help="n-gram model, plain, .gz or .xz")
    parser.add_argument(
        "--tokens",
        metavar="FILE",
        help="output symbols of the acoustic model, one per line, or a bundle with that model, named as for "
        "'asr transcribe --bundle', which also defines topology, tied states and silence (default: the lexicon's "
        "phones, sorted, as in training)",
    )
    parser.add_argument("--output", type=output_path, required=True, metavar="FILE", help="file for the graph")
    parser.add_argument(
        "--topology",
        choices=[*TOPOLOGIES, BIPHONE_TOPOLOGY],
        help="how phones map to frames (default: that of a bundle given as --tokens, else ctc); ctc-modified needs no "
        "blank between equal phones, hmm-N has N states per phone, with the tokens PHONE_1 to PHONE_N, chain-biphone "
        "has the tokens of --tied-states",
    )
    parser.add_argument(
        "--tied-states",
        type=Path,
        metavar="FILE",
        help="for chain-biphone: the tied states (states.json of 'asr chain'); also defines the tokens",
    )
    parser.add_argument(
        "--pronunciation-scores",
        type=Path,
        metavar="FILE",
        help="log probabilities of the pronunciations of each word (JSON file of 'asr chain')",
    )
    parser.add_argument("--silence", metavar="PHONE", help="optional phone between words; not needed with ctc")
    parser.add_argument(
        "--silence-probability",
        type=float,
        metavar="P",
        help="probability of silence between words (default: that of a bundle given as --tokens, else 0.5)",
    )
    parser.add_argument("--keep-stress", action="store_true", help="keep the stress marks of phones such as AH0")
    parser.add_argument(
        "--score-bits",
        type=int,
        metavar="N",
        help=f"round scores to multiples of 2^-N, N at most {_MAX_BITS} (default: {_SCORE_BITS}, an error of 0.00025)",
    )
    parser.add_argument(
        "--finished", action="store_true", help="write the graph composed with its topology: a large file, fast to load"
    )


def run(args: argparse.Namespace) -> int:
    """Builds the graph.

    Returns:
        0, even if words of the model have no pronunciation: they are listed, and the graph is valid.
    """
    if args.tokens is not None:
        args.tokens = fetched_path_or_bundle(args.tokens)
    if args.source is not None:
        return _convert(args)
    _check(args)
    score_bits = _SCORE_BITS if args.score_bits is None else args.score_bits
    begin, cpu_begin = time.perf_counter(), time.process_time()
    with Console(file=sys.stderr).status("reading") as status:
        model = NgramLM.from_arpa(args.arpa)
        lexicon = Lexicon.for_words(args.lexicon, model.vocabulary.words, args.keep_stress)
        outputs = _outputs(args, lexicon)
        phone_graph, report = build_phone_graph(
            lexicon,
            model,
            outputs.tokens,
            outputs.topology,
            outputs.silence,
            2.0**-score_bits,
            _pronunciation_scores(args.pronunciation_scores, lexicon),
            status.update,
        )
        status.update("finishing")
        graph = phone_graph.finish()
        report.sizes["decoding graph"] = (graph.num_states, graph.num_arcs)
        status.update("writing")
        (graph if args.finished else phone_graph).save(args.output)
    list_file = _write_unpronounced(args.output, report)
    summary = {
        "output": str(args.output),
        "bytes": args.output.stat().st_size,
        "topology": graph.meta["topology"],
        "words": report.num_words,
        "words_without_pronunciation": len(report.words_without_pronunciation),
        "words_without_pronunciation_list": str(list_file) if list_file is not None else None,
        "lexicon_words_outside_model": report.num_lexicon_words_outside_model,
        "sizes": {step: {"states": states, "arcs": arcs} for step, (states, arcs) in report.sizes.items()},
        "seconds": {**report.seconds, "all": round(time.perf_counter() - begin, 2)},
        "cpu_seconds": round(time.process_time() - cpu_begin, 2),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    print_record(summary, sys.stdout)
    return 0


def _convert(args: argparse.Namespace) -> int:
    """Converts a graph of another recognizer."""
    others = (
        *("arpa", "lexicon", "topology", "tied_states", "pronunciation_scores", "silence", "silence_probability"),
        *("keep_stress", "score_bits"),
    )
    given = [name for name in others if getattr(args, name) not in (None, False)]
    if given:
        raise AsrError(f"{flag_of(given[0])} has no effect with --from, whose graph exists; leave it out.")
    if args.words is None or args.tokens is None:
        raise AsrError("--from needs --words and --tokens, the files that define the graph's labels; give both.")
    require_writable(args.output, inputs=[args.source, args.words, args.tokens])
    begin = time.perf_counter()
    with Console(file=sys.stderr).status("converting"):
        graph = import_graph(args.source, args.words, args.tokens)
        graph.save(args.output)
    summary = {
        "output": str(args.output),
        "bytes": args.output.stat().st_size,
        "topology": graph.meta["topology"],
        "words": len(graph.vocabulary) - len(SPECIAL_WORDS),
        "sizes": {"decoding graph": {"states": graph.num_states, "arcs": graph.num_arcs}},
        "seconds": {"all": round(time.perf_counter() - begin, 2)},
    }
    print_record(summary, sys.stdout)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Checks the options before the long part begins."""
    if args.lexicon is None or args.arpa is None:
        raise AsrError("--lexicon and --arpa are missing; give both to compile a graph, or convert one with --from.")
    if args.words is not None:
        raise AsrError("--words needs --from; the words of a compiled graph are those of --arpa.")
    is_other_folder = args.tokens is not None and args.tokens.is_dir() and not (args.tokens / FILE_NAME).is_file()
    tokens = None if is_other_folder else args.tokens  # a list or a bundle; other folders are rejected later
    read = [*args.lexicon, args.arpa, tokens, args.tied_states, args.pronunciation_scores]
    require_writable(args.output, _list_file(args.output), inputs=read)
    from_bundle = args.tokens is not None and args.tokens.is_dir() and args.topology is None
    if (args.topology == BIPHONE_TOPOLOGY) != (args.tied_states is not None) and not from_bundle:
        raise AsrError(f"--topology {BIPHONE_TOPOLOGY} and --tied-states go together; give both or neither.")
    probability = args.silence_probability
    if probability is not None and (math.isnan(probability) or not 0 < probability < 1):
        raise AsrError(f"--silence-probability {probability}: give a number between 0 and 1.")
    if args.score_bits is not None and not 1 <= args.score_bits <= _MAX_BITS:
        raise AsrError(f"--score-bits {args.score_bits}: give a number from 1 to {_MAX_BITS}.")


class _Outputs(NamedTuple):
    """The acoustic model's outputs, and how phones map to them."""

    tokens: TokenTable
    topology: str | TiedStates
    silence: OptionalSilence | None


def _outputs(args: argparse.Namespace, lexicon: Lexicon) -> _Outputs:
    """From the options, or from the graph of a bundle if an option is missing."""
    known: dict[str, Any] = {}
    if args.tokens is None:
        tokens = TokenTable(lexicon.phones, name=lexicon.name)
    elif args.tokens.is_dir():
        graph = Bundle.load(args.tokens).graph
        tokens, known = graph.tokens, graph.meta
    else:
        tokens = TokenTable.from_file(args.tokens)
    topology: str | TiedStates = args.topology or known.get("topology") or "ctc"
    if args.tied_states is not None:
        topology = TiedStates.from_file(args.tied_states)
        tokens = TokenTable(topology.column_names())
    elif topology == BIPHONE_TOPOLOGY:
        topology = TiedStates.from_json(known[TIED_STATES])
    phone = args.silence or known.get("silence")
    if phone is None and args.silence_probability is not None:
        raise AsrError("--silence-probability has no effect without --silence; give both, or leave it out.")
    probability = args.silence_probability or known.get("silence_probability") or 0.5
    return _Outputs(tokens, topology, OptionalSilence(phone, probability) if phone else None)


def _pronunciation_scores(path: Path | None, lexicon: Lexicon) -> dict[str, list[float]] | None:
    """The scores of the words that are in the lexicon.

    Raises:
        AsrError: the file cannot be read, or a word has a different number of pronunciations there.
    """
    if path is None:
        return None
    try:
        scores = parse_json(read_text(path, "pronunciation scores"))
        # 'asr chain' has the words of the transcripts in their case, which may be another than the model's.
        in_any_case = {in_upper_case(word): word for word in scores}
        names = {
            word: written_as(word, scores) or in_any_case.get(in_upper_case(word)) for word in lexicon.pronunciations
        }
        own = {word: [float(score) for score in scores[name]] for word, name in names.items() if name is not None}
        if not all(math.isfinite(score) for values in own.values() for score in values):  # determinization never ends
            raise ValueError("a score is not a finite number")
    except (ValueError, TypeError, KeyError) as error:
        raise AsrError(f"{path}: the file has no valid pronunciation scores ({error}).") from error
    for word, values in own.items():
        if len(values) != len(lexicon[word]):
            raise AsrError(
                f"{path}: {word!r} has {len(values)} pronunciations in this file and {len(lexicon[word])} in the "
                "lexicon; give the lexicons in the same order as for 'asr chain'."
            )
    return own


def _list_file(output: Path) -> Path:
    return output.with_name(output.name + ".unpronounced.txt")


def _write_unpronounced(output: Path, report: BuildReport) -> Path | None:
    """Writes and reports the list of words missing from the graph, if there are any."""
    path = _list_file(output)
    path.unlink(missing_ok=True)
    words = report.words_without_pronunciation
    if not words:
        return None
    write_whole_text(path, "".join(f"{word}\n" for word in words))
    print(
        f"asr: {len(words)} words of the model are not in the lexicon and cannot be recognized ({', '.join(words[:5])}"
        f"{', ...' if len(words) > 5 else ''}); all of them are listed in {path}.",
        file=sys.stderr,
    )
    return path
