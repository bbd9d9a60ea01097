"""Bundles: a trained recognizer as a folder with `bundle.json`, safetensors files and a card.

For each part, `bundle.json` has its file and, for networks, a class name of the registry and constructor arguments; for
each file, it has size and SHA-256. Weights may be stored in half precision; they are loaded as float32.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph
from asr.graph.denominator_graph import DenominatorGraph
from asr.hub import CARD, KNOWN_BUNDLES, MANIFEST, Progress, cached_bundles, fetch, source_of
from asr.kernels.interrupts import interrupts_between_loops
from asr.kernels.jit import torch_on_one_thread
from asr.kernels.memory import no_autograd, paused_collector, release
from asr.lm.combine import num_oov_words
from asr.lm.ngram.io import load_ngram_lm, read_ngram_lm, save_ngram_lm
from asr.lm.ngram.model import NgramLM
from asr.lm.rnn.export import read_network
from asr.lm.transformers import is_transformer, without_kind
from asr.lm.transformers import load as load_transformer
from asr.options import require_type
from asr.serialization import (
    ACOUSTIC_MODEL_CLASSES,
    FEATURE_CLASSES,
    LANGUAGE_MODEL_CLASSES,
    ModelSpec,
    OwnFormat,
    atomic_folder,
    build_network,
    checksums,
    copied_to_processes,
    fingerprint_of,
    fingerprint_of_description,
    load_weights,
    open_atomic,
    read_description,
    require_intact,
    save_weights,
    sealed,
)
from asr.text.lexicon import Lexicon
from asr.text.symbols import Vocabulary

FORMAT = "asr bundle"
VERSION = 1
FILE_NAME = MANIFEST

MODES_WITH = {"large_ngram": frozenset({"large_ngram", "interpolated"}), "rnn_lm": frozenset({"rnn", "interpolated"})}
"""Language model of a bundle that users can replace -> the modes that use it."""


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes `bundle.json`, adding size and checksum of each file that it names."""
    content = {"format": FORMAT, "version": VERSION, **manifest, "files": checksums(folder, _files_of(manifest))}
    with open_atomic(folder / FILE_NAME) as file:
        file.write((json.dumps(sealed(content), indent=2, ensure_ascii=False) + "\n").encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads `bundle.json` and checks all files that it names.

    Raises:
        AsrError: the manifest is missing or has another format or version, or a file is missing or damaged.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise AsrError(f"{folder}: there is no bundle here ({FILE_NAME} is missing); name a folder of checkpoints/.")
    manifest = read_description(path, "bundle")
    if manifest.get("format") != FORMAT:
        raise AsrError(f"{path}: this is not a bundle of this program; its 'format' must be {FORMAT!r}.")
    if manifest.get("version") != VERSION:
        raise AsrError(
            f"{path}: the bundle has version {manifest.get('version')} and this program reads {VERSION}; "
            "update the program or fetch another bundle."
        )
    for key, kind in _KINDS.items():
        if not isinstance(manifest.get(key, kind() if key in _OPTIONAL else None), kind):
            raise AsrError(f"{path}: the field {key!r} is missing or of the wrong kind; fetch the bundle again.")
    for key, fields in _FIELDS.items():
        for field_name, kind in fields.items() if key in manifest else ():
            if not isinstance(manifest[key].get(field_name), kind):
                raise AsrError(f"{path}: {key!r} lacks a valid {field_name!r}; fetch the bundle again.")
    _require_printable(manifest["name"], str(path))
    names = _files_of(manifest)
    for name in names:
        if Path(name).name != name or name in ("", ".."):
            raise AsrError(f"{path}: it names the file {name!r}, which is not in the bundle's folder.")
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: require_intact(folder / name, manifest["files"].get(name), "bundle"), names))
    return manifest


def _require_printable(name: str, where: str) -> None:
    if not name or not name.isprintable():
        raise AsrError(f"{where}: the bundle's name {name!r} is empty or cannot be printed; choose another.")


_FIELDS: dict[str, dict[str, type]] = {
    "features": {"class": str, "arguments": dict},
    "acoustic_model": {"class": str, "arguments": dict},
    "graph": {"file": str},
    "small_ngram": {"file": str},
    "large_ngram": {"file": str},
    "rnn_lm": {"class": str, "arguments": dict, "file": str, "words": str},
    "lexicon": {"file": str},
    "denominator": {"file": str},
}
_KINDS: dict[str, type] = dict.fromkeys(("files", "decoding", "confidence", *_FIELDS), dict)
_KINDS |= {"name": str, "default_mode": str}
_OPTIONAL = ("small_ngram", "large_ngram", "rnn_lm", "lexicon", "denominator", "default_mode", "confidence")


def _files_of(manifest: dict[str, Any]) -> list[str]:
    entries = [entry for entry in manifest.values() if isinstance(entry, dict)]
    return sorted(str(entry[key]) for entry in entries for key in ("file", "words") if key in entry)


def read_card(folder: Path) -> str:
    """The bundle's card, or "" if it has none; a link could be any file of the account, and is not followed."""
    path = folder / CARD
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() and not path.is_symlink() else ""


_GRAPH_FILE = "graph.safetensors"
_AM_FILE = "acoustic_model"
_NO_TRANSFORMERS = "a bundle cannot hold a language model of transformers; give it with --rnn-lm when you recognize."
_RNN_FILE = "rnn_lm.safetensors"
_WORDS_FILE = "rnn_lm_words.txt"
_LEXICON_FILE = "lexicon.txt.xz"
_DENOMINATOR_FILE = "denominator.safetensors"
_NGRAM_FILES = {"small_ngram": "small_ngram.bin", "large_ngram": "large_ngram.bin"}


@copied_to_processes
@dataclass
class Bundle:
    """All parts of a trained recognizer.

    Args:
        name: shown to users.
        features: computes features of waveforms.
        acoustic_model: maps features to token log-probabilities.
        graph: the decoding graph, compiled from lexicon and small n-gram.
        small_ngram: the model that the graph was built from; its scores are subtracted where a larger model decides.
        large_ngram: a larger n-gram model for the same words, or None.
        rnn_lm: the recurrent language model, or None.
        lexicon: the pronunciations that the graph was built from, for exact word times, or None.
        denominator: the denominator graph of training by lattice-free MMI, for adaptation to speakers, or None.
        decoding: mode (`ngram`, `rnn`, ...) -> its tuned decoding options.
        default_mode: the mode for users who choose none; None for the best that the parts allow.
        confidence: mode -> the calibration of its confidences, as `asr.decoding.words.Calibration` reads it.
        fingerprint: checksum of the files that the bundle was loaded from; empty if it was assembled in memory.
        card: training data and accuracy, in Markdown.
    """

    name: str
    features: ModelSpec
    acoustic_model: ModelSpec
    graph: DecodingGraph
    small_ngram: NgramLM | None = None
    large_ngram: NgramLM | None = None
    rnn_lm: ModelSpec | None = None
    lexicon: Lexicon | None = None
    denominator: DenominatorGraph | None = field(default=None, repr=False)
    decoding: dict[str, dict[str, Any]] = field(default_factory=dict)
    default_mode: str | None = None
    confidence: dict[str, dict[str, Any]] = field(default_factory=dict)
    card: str = field(default="", repr=False)
    fingerprint: str = ""

    @property
    def sampling_rate(self) -> int:
        """The sampling rate that the features expect, in Hz."""
        return int(self.features.network.sampling_rate)  # type: ignore[arg-type]

    @property
    def frame_seconds(self) -> float:
        """The time from one output of the acoustic model to the next, in seconds."""
        features: Any = self.features.network
        network: Any = self.acoustic_model.network
        return float(features.frame_shift * network.subsampling_factor / self.sampling_rate)

    def check(self, given: Mapping[str, str | Path | None] | None = None) -> None:
        """Checks that the parts match each other.

        Args:
            given: language model (`large_ngram`, `rnn_lm`) -> its file. If one of these lacks words of the graph, a
                warning is logged.

        Raises:
            AsrError: the acoustic model's outputs do not match the graph's tokens or the denominator graph, its inputs
                do not match the features, or a language model has none of the graph's words.
        """
        rnn_lm: Any = None if self.rnn_lm is None else self.rnn_lm.network
        models = {"small_ngram": self.small_ngram, "large_ngram": self.large_ngram, "rnn_lm": rnn_lm}
        for name, model in models.items():
            if model is None:
                continue
            file = (given or {}).get(name)
            # Only a warning needs the number of words; otherwise one that both have is enough.
            if file or not any(word in model.vocabulary for word in self.graph.vocabulary.ordinary):
                num_oov_words(model.vocabulary, self.graph.vocabulary, f"The language model {file}" if file else "")
        num_tokens = int(self.acoustic_model.network.num_tokens)  # type: ignore[arg-type]
        if num_tokens != len(self.graph.tokens):
            raise AsrError(
                f"bundle {self.name}: the acoustic model has {num_tokens} outputs and the decoding graph reads "
                f"{len(self.graph.tokens)} tokens; use the graph that was built for this model."
            )
        if self.denominator is not None and self.denominator.num_columns > num_tokens:
            raise AsrError(
                f"bundle {self.name}: the denominator graph reads {self.denominator.num_columns} outputs and the "
                f"acoustic model has {num_tokens}; use the denominator graph of its training."
            )
        feature_dim = int(self.features.network.feature_dim)  # type: ignore[arg-type]
        num_features = self.acoustic_model.arguments.get("num_features", feature_dim)
        if num_features != feature_dim:
            raise AsrError(
                f"bundle {self.name}: the acoustic model reads {num_features} features per frame, but there are "
                f"{feature_dim}; use the feature settings that it was trained with."
            )

    def with_language_models(self, large_ngram: str | Path | None = None, rnn_lm: str | Path | None = None) -> Bundle:
        """A copy of the bundle with other language models.

        The default mode stays if it uses all of them; otherwise it becomes the best that the parts allow, which does.

        Args:
            large_ngram: file of an n-gram model, binary or ARPA, that replaces the bundle's large one.
            rnn_lm: recurrent model or causal Transformer that replaces the bundle's; see `read_rnn_lm`.

        Raises:
            AsrError: a file cannot be read, a model has none of the graph's words, or the bundle lacks the n-gram model
                of its graph, whose scores must be subtracted.
        """
        if large_ngram is None and rnn_lm is None:
            return self
        if self.small_ngram is None:
            raise AsrError(
                f"bundle {self.name}: it does not have the n-gram model of its graph, which another language model "
                "would replace; make the bundle again with 'asr bundle --small-ngram'."
            )
        given = {"large_ngram": large_ngram, "rnn_lm": rnn_lm}
        for name, path in given.items():
            require_type(path, str | os.PathLike | None, name, "the path of a file")
        is_used = all(self.default_mode in MODES_WITH[name] for name, path in given.items() if path is not None)
        replaced = [_fingerprint_of(path) if path is not None else "" for path in (large_ngram, rnn_lm)]
        bundle = replace(
            self,
            fingerprint=" ".join((self.fingerprint, *replaced)),
            default_mode=self.default_mode if is_used else None,
            large_ngram=self.large_ngram if large_ngram is None else read_ngram_lm(large_ngram),
            rnn_lm=self.rnn_lm if rnn_lm is None else read_rnn_lm(rnn_lm, self.graph.vocabulary),
        )
        bundle.check(given)
        return bundle

    def save(
        self,
        folder: str | Path,
        half_precision: bool = True,
        graph_file: Path | None = None,
        byte_matrices: bool = False,
        compress_ngrams: bool = False,
    ) -> None:
        """Writes the bundle to a temporary folder, which is renamed when it is complete.

        Args:
            folder: created if it does not exist; an existing bundle is replaced.
            half_precision: store the weights of networks as float16; scores of n-grams and graph are not changed.
            graph_file: file to copy as the graph. A graph without its topology, as `asr graph` writes it, is several
                times smaller than the composed graph that is written otherwise.
            byte_matrices: store the acoustic model's matrices and the language model's word vectors as int8, with a
                step for each row.
            compress_ngrams: compress the n-gram models to about 40 %; loading decompresses them into memory instead of
                mapping their files.

        Raises:
            AsrError: the parts do not match, `byte_matrices` has no effect, or the folder cannot be written. An
                existing bundle is then kept.
        """
        _require_printable(self.name, str(folder))
        if self.rnn_lm is not None and self.rnn_lm.class_name not in LANGUAGE_MODEL_CLASSES:
            raise AsrError(f"bundle {self.name}: {_NO_TRANSFORMERS}")
        self.check()
        if byte_matrices and isinstance(self.acoustic_model.network, OwnFormat) and self.rnn_lm is None:
            raise AsrError(
                f"bundle {self.name}: byte_matrices (--byte-matrices) has no effect on an external acoustic model, "
                "which keeps its own format; leave it out."
            )
        with atomic_folder(Path(folder)) as partial:
            self._write(partial, half_precision, graph_file, byte_matrices, compress_ngrams)

    def _write(
        self, folder: Path, half_precision: bool, graph_file: Path | None, byte_matrices: bool, compress_ngrams: bool
    ) -> None:
        manifest: dict[str, Any] = {
            "name": self.name,
            "features": {"class": self.features.class_name, "arguments": self.features.arguments},
            "acoustic_model": _description(
                self.acoustic_model, **_save_acoustic_model(self, folder, half_precision, byte_matrices)
            ),
            "graph": {"file": _GRAPH_FILE},
            "decoding": self.decoding,
            **({"default_mode": self.default_mode} if self.default_mode else {}),
            **({"confidence": self.confidence} if self.confidence else {}),
        }
        if graph_file is None:
            self.graph.save(folder / _GRAPH_FILE)
        else:
            shutil.copyfile(graph_file, folder / _GRAPH_FILE)
        for part, file_name in _NGRAM_FILES.items():
            model: NgramLM | None = getattr(self, part)
            if model is not None:
                save_ngram_lm(model, folder / file_name, compress_ngrams)
                manifest[part] = {"file": file_name}
        if self.rnn_lm is not None:
            manifest["rnn_lm"] = _description(self.rnn_lm, file=_RNN_FILE, words=_WORDS_FILE)
            save_weights(self.rnn_lm.network, folder / _RNN_FILE, half_precision, byte_matrices)
            self.rnn_lm.network.vocabulary.save(folder / _WORDS_FILE)  # type: ignore[operator, union-attr]
        if self.lexicon is not None:
            # Only words that the graph can output.
            self.lexicon.restricted_to(self.graph.vocabulary.words)[0].save(folder / _LEXICON_FILE)
            manifest["lexicon"] = {"file": _LEXICON_FILE}
        if self.denominator is not None:
            self.denominator.save(folder / _DENOMINATOR_FILE)
            manifest["denominator"] = {"file": _DENOMINATOR_FILE}
        (folder / CARD).write_text(self.card, encoding="utf-8")
        write_manifest(folder, manifest)

    @classmethod
    @interrupts_between_loops()
    @no_autograd()
    @paused_collector()
    @torch_on_one_thread()
    def load(cls, folder: str | Path) -> Bundle:
        """Reads and checks a bundle.

        Args:
            folder: its folder, or the name of one in `checkpoints/`.

        Raises:
            AsrError: a file is missing, damaged, or of another format or version, or the parts do not match.
        """
        _require_name(folder)
        folder = local_bundle_folder(Path(folder)) or Path(folder)
        manifest = read_manifest(folder)
        with ThreadPoolExecutor(1) as pool:
            # The graph takes as long as all other parts. No verification: `read_manifest` has compared the checksums.
            graph = pool.submit(DecodingGraph.load, folder / manifest["graph"]["file"], verify=False)
            bundle = cls._with_graph(folder, manifest, graph.result)
        bundle.check()
        release()
        return bundle

    @classmethod
    def _with_graph(cls, folder: Path, manifest: dict[str, Any], graph: Callable[[], DecodingGraph]) -> Bundle:
        """Loads all other parts; then `graph` waits for the graph."""
        rnn_lm = None
        if "rnn_lm" in manifest:
            vocabulary = Vocabulary.from_file(folder / manifest["rnn_lm"]["words"])
            rnn_lm = _load_network(folder, manifest["rnn_lm"], LANGUAGE_MODEL_CLASSES, vocabulary)
        lexicon, denominator = manifest.get("lexicon"), manifest.get("denominator")
        ngrams: dict[str, NgramLM] = {}
        for part in filter(manifest.__contains__, _NGRAM_FILES):
            known = next((model.vocabulary for model in ngrams.values()), None)
            ngrams[part] = load_ngram_lm(folder / manifest[part]["file"], verify=False, known=known)
        return cls(
            name=manifest["name"],
            features=_load_network(folder, manifest["features"], FEATURE_CLASSES),
            acoustic_model=_load_acoustic_model(folder, manifest["acoustic_model"]),
            rnn_lm=rnn_lm,
            # Words and phones are those of the graph already.
            lexicon=None if lexicon is None else Lexicon.from_file(folder / lexicon["file"], True, upper_case=False),
            denominator=None if denominator is None else DenominatorGraph.load(folder / denominator["file"]),
            decoding=manifest["decoding"],
            default_mode=manifest.get("default_mode"),
            confidence=manifest.get("confidence", {}),
            fingerprint=fingerprint_of_description(manifest),
            card=read_card(folder),
            **ngrams,
            graph=_with_shared_words(graph(), ngrams.values()),  # the last to be ready
        )


def _with_shared_words(graph: DecodingGraph, models: Iterable[NgramLM]) -> DecodingGraph:
    """The graph with the vocabulary of a model that has the same words, which saves memory and comparisons."""
    same = (model.vocabulary for model in models if model.vocabulary == graph.vocabulary)
    return replace(graph, vocabulary=next(same, graph.vocabulary))


def _fingerprint_of(path: str | Path) -> str:
    """The checksum of a language model's files, or its name if they are elsewhere."""
    fingerprint = fingerprint_of(Path(without_kind(path)))
    return fingerprint or str(path) if is_transformer(path) else fingerprint


def read_rnn_lm(path: str | Path, vocabulary: Vocabulary | None = None) -> ModelSpec:
    """Reads a neural language model of words.

    Args:
        path: an exported folder, a checkpoint of 'asr fit', or a bundle; or `transformers:NAME`, a causal Transformer.
        vocabulary: the words that a Transformer spells; other models have their own.

    Raises:
        AsrError: there is no such model, it is damaged, or it is a Transformer and there is no vocabulary.
    """
    if is_transformer(path):
        if vocabulary is None:
            raise AsrError(f"{path}: {_NO_TRANSFORMERS}")
        return ModelSpec("TransformerNetwork", {"name": str(path)}, load_transformer(str(path), vocabulary))
    if (Path(path) / FILE_NAME).is_file():
        rnn_lm = Bundle.load(path).rnn_lm
        if rnn_lm is None:
            raise AsrError(f"{path}: the bundle has no recurrent language model; name another one.")
        return rnn_lm
    if (Path(path) / "config.json").is_file() and not (Path(path) / "network.json").exists():
        raise AsrError(f"{path}: this is a folder of transformers; name it transformers:{path}.")
    network = read_network(path)
    return ModelSpec("RnnLm", asdict(network.config), network)


def _description(registered: ModelSpec, **files: str) -> dict[str, Any]:
    return {"class": registered.class_name, "arguments": registered.arguments, **files}


def _load_network(
    folder: Path, entry: dict[str, Any], classes: Mapping[str, tuple[str, ...]], vocabulary: Vocabulary | None = None
) -> ModelSpec:
    path = folder / entry["file"] if "file" in entry else None
    registered = build_network(entry["class"], entry["arguments"], classes, str(folder / FILE_NAME), vocabulary, path)
    if path is not None:
        load_weights(registered.network, path)
    return registered


def _save_acoustic_model(bundle: Bundle, folder: Path, half_precision: bool, byte_matrices: bool) -> dict[str, str]:
    """Writes the acoustic model's file -> the `file` entry of its description; empty for networks without a file."""
    network = bundle.acoustic_model.network
    if not isinstance(network, OwnFormat):
        save_weights(network, folder / f"{_AM_FILE}.safetensors", half_precision, byte_matrices)
        return {"file": f"{_AM_FILE}.safetensors"}
    if network.file_suffix is None:
        network.save_file(None)
        return {}
    network.save_file(folder / f"{_AM_FILE}{network.file_suffix}")
    return {"file": f"{_AM_FILE}{network.file_suffix}"}


def _load_acoustic_model(folder: Path, entry: dict[str, Any]) -> ModelSpec:
    where, path = str(folder / FILE_NAME), folder / entry["file"] if "file" in entry else None
    # A network that has no file has no weights.
    spec = build_network(entry["class"], entry["arguments"], ACOUSTIC_MODEL_CLASSES, where, weights=path or folder)
    network = spec.network
    has_file = not isinstance(network, OwnFormat) or network.file_suffix is not None
    if has_file != (path is not None):
        raise AsrError(f"{folder / FILE_NAME}: 'acoustic_model' lacks a valid 'file'; fetch the bundle again.")
    if isinstance(network, OwnFormat):
        network.load_file(path)
    elif path is not None:
        load_weights(network, path)
    return spec


# In a checkout, this folder is beside the package.
_CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"
_PREFERRED = "librispeech"


def all_bundle_folders(checkpoints: Path = _CHECKPOINTS) -> list[Path]:
    """The folders of the checkout's own bundles, sorted by name, without hidden ones, which may be unfinished."""
    return sorted(path.parent for path in checkpoints.glob(f"[!.]*/{FILE_NAME}"))


def local_bundle_folder(name: str | Path | None, checkpoints: Path = _CHECKPOINTS) -> Path | None:
    """Like `bundle_folder`, but without fetched bundles; None if there is no such folder."""
    own = all_bundle_folders(checkpoints)
    asked = str(name or os.environ.get("ASR_BUNDLE") or "")
    if not asked and own:
        return next((path for path in own if path.name == _PREFERRED), own[0])
    folders = (Path(asked), checkpoints / asked) if asked else ()
    return next((folder for folder in folders if (folder / FILE_NAME).is_file()), None)


def bundle_folder(
    name: str | Path | None, checkpoints: Path = _CHECKPOINTS, on_progress: Progress | None = None
) -> Path:
    """The folder of a bundle, which is fetched if this machine does not have it.

    Args:
        name: a folder; the name of a folder in `checkpoints`; or what `asr.hub.source_of` takes: `https://...`,
            `hf:owner/name`, or the name of a published bundle. None takes the environment variable ASR_BUNDLE, or if
            that is not set, the preferred bundle.
        checkpoints: the folder of the checkout's own bundles.
        on_progress: as in `asr.hub.fetch`.

    Raises:
        AsrError: there is no such bundle, or it cannot be fetched.
    """
    folder = _found_folder(name, checkpoints, on_progress)
    if folder is None:
        asked = name or os.environ.get("ASR_BUNDLE")
        raise AsrError(f"{asked}: there is no bundle here ({FILE_NAME} is missing); {_bundles_here(checkpoints)}.")
    return folder


def path_or_bundle(name: str | Path, on_progress: Progress | None = None) -> Path:
    """A file or folder that may also be a bundle, given by any of the names that `bundle_folder` takes.

    Args:
        name: a file or folder, which comes first, or a bundle.
        on_progress: as in `asr.hub.fetch`.

    Raises:
        AsrError: there is no such file, folder or bundle, or it cannot be fetched.
    """
    path = local_path_or_bundle(name)
    if path.exists():
        return path
    folder = _found_folder(name, _CHECKPOINTS, on_progress)
    if folder is None:
        raise AsrError(f"{name}: there is no file, folder or bundle of this name; {_bundles_here(_CHECKPOINTS)}.")
    return folder


def local_path_or_bundle(name: str | Path) -> Path:
    """Like `path_or_bundle`, but without fetched bundles; other names stay as they are."""
    path = Path(name)
    return path if path.exists() else local_bundle_folder(name) or path


def _found_folder(name: str | Path | None, checkpoints: Path, on_progress: Progress | None) -> Path | None:
    """The folder of a bundle, fetched if it has to be; None if nothing has this name."""
    if name is not None:
        _require_name(name)
    if (local := local_bundle_folder(name, checkpoints)) is not None:
        return local
    asked = str(name or os.environ.get("ASR_BUNDLE") or _PREFERRED)
    source = source_of(asked)
    if source is not None:
        return fetch(source, on_progress=on_progress)
    for known, folder in cached_bundles():
        if known == asked:
            return folder
    if asked in KNOWN_BUNDLES:
        raise AsrError(
            f"{asked}: this bundle is not on this machine; give its folder, https://... or hf:owner/name, or set "
            "ASR_BUNDLES to the https address of the folder with the project's bundles."
        )
    return None


def _require_name(name: Any) -> None:
    """Refuses what cannot name a bundle, such as a `Bundle`."""
    wanted = "its name or folder; asr.Recognizer(bundle) takes one that is loaded"
    require_type(name, str | os.PathLike, "the bundle", wanted)


def _bundles_here(checkpoints: Path) -> str:
    own = all_bundle_folders(checkpoints)
    if not own:
        return "'asr bundle list' shows those that are"
    return f"checkpoints/ has: {', '.join(path.name for path in own)}"
