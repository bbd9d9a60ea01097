"""`scripts/bench NAME`: finds the benchmark and runs it."""

from __future__ import annotations

import importlib
import logging
import sys

from asr.errors import AsrError
from scripts.benchmarks.report import provenance

# The first eleven have --quick: under a minute, and one JSON object on the last line.
COMMANDS = {
    "decode": "word error rate and time of the decoders, with and without the recurrent language model",
    "query": "the cached language model on recorded queries: exactness, hit ratio, speed, memory",
    "ngram": "n-gram look-up beside KenLM: exactness, speed, memory",
    "lm": "recurrent language models: training and scoring speed, normalization",
    "robust": "mutated input for every reader, killed runs, threads, memory",
    "ctc": "the CTC decoder for any network beside pyctcdecode and flashlight-text",
    "transducer": "the decoder of transducers with a small transducer, beside torchaudio's",
    "use": "the wheel, resuming, formats of transcripts, sclite's numbers",
    "accuracy": "word errors of a bundle: clean, at 8 kHz, in noise, as streams; confidences",
    "gpu": "GPU code: counted without a GPU (--quick), measured on one (scripts/gpu_check)",
    "onepass": "error rate against time: one pass, second pass, n-grams, at equal beams and as curves",
    "endurance": "a day of audio in one process: what every store holds over time",
    "install": "an installed wheel: torch.hub, bundles from a server, README's commands",
    "modes": "a bundle's modes on some recordings (scripts/demo)",
    "decode-scale": "decoding over the size of the graph, the beams and the batch",
    "ngram-decode": "decoding with n-gram models of growing size",
    "ngram-size": "building, converting and loading one n-gram model: time and peak memory",
    "lm-curves": "perplexity over training time, beside faster-rnnlm",
    "stream": "streaming: word errors, corrections and delay over the window",
    "hot-words": "rare words found, and false ones, with and without lists of hot words",
    "record-queries": "records the queries of a decoding run, for `query`",
    "mutants": "mutation testing of language models, n-best lists and rescoring",
    "transformer": "trains a small causal Transformer, for `--rnn-lm transformers:FOLDER`",
    "attention": "the decoder of attention models with a small one, and beside the beam search of transformers",
    "query-limit": "the hidden-layer work that no exact method can avoid",
}
USAGE = "usage: scripts/bench NAME [--quick] [OPTIONS]    (scripts/bench NAME --help lists them)\n\n"


def main(arguments: list[str]) -> int:
    """Runs the benchmark named first; returns 2 if the input is wrong, with one sentence on stderr."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE + "\n".join(f"  {name:<15} {text}" for name, text in COMMANDS.items()))
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"scripts/bench: there is no benchmark {name!r}; there are {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.ERROR)
    module = importlib.import_module(f"scripts.benchmarks.{name.replace('-', '_')}")
    if not {"-h", "--help"} & {*rest}:
        print(provenance(arguments), file=sys.stderr)
    try:
        return module.main(rest) or 0
    except AsrError as error:
        print(f"scripts/bench {name}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
