"""Prepares a corpus: decodes each file once, writes manifests of lhotse cuts, and reports what was skipped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from lhotse import CutSet, MonoCut, MultiCut, Recording, SupervisionSegment
from lhotse.audio import AudioSource

from asr.audio.io import inspect_audio
from asr.datasets.corpora.base import Corpus, SkippedItem, Utterance, checksum_of
from asr.errors import AsrError
from asr.serialization import atomic_path, require_writable, write_whole_text
from asr.text.documents import parse_json

Progress = Callable[[int, int], None]
"""Called with the number of files done, and the number of all files."""


@dataclass(frozen=True)
class PartReport:
    """The result of preparing a part of a corpus; it is written next to the cuts as JSON.

    `source` is a SHA-256 of the listing, with the size and time of each audio file.
    """

    corpus: str
    part: str
    corpus_dir: str
    cuts: str
    text: str
    num_utterances: int
    num_speakers: int
    hours: float
    skipped: list[SkippedItem]
    source: str = ""

    def to_json(self) -> str:
        """The report as a JSON object; `skipped` is a list of {item, reason}."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_file(cls, path: Path) -> PartReport | None:
        """The report of an earlier run, or None if there is no readable one."""
        try:
            fields = parse_json(path.read_text(encoding="utf-8"))
            fields["skipped"] = [SkippedItem(**item) for item in fields["skipped"]]
            return cls(**fields)
        except (OSError, ValueError, KeyError, TypeError):
            return None


def prepare_part(
    corpus: Corpus,
    corpus_dir: Path,
    part: str,
    output_dir: Path,
    num_jobs: int = 1,
    redo: bool = False,
    on_progress: Progress | None = None,
) -> PartReport:
    """Writes `<corpus>_<part>.jsonl.gz` (lhotse cuts), `.txt` (transcripts, one per line) and `.report.json`.

    A part that an earlier run finished is not prepared again unless its transcripts or audio files have changed. Each
    file is written completely or not at all, the report last.

    Args:
        corpus: the corpus.
        corpus_dir: its folder.
        part: the part to prepare.
        output_dir: created if it does not exist.
        num_jobs: number of threads that decode audio.
        redo: whether to prepare the part again even if it is finished.
        on_progress: called after each file.

    Raises:
        AsrError: no utterance is usable, the output folder cannot be written, or it has this part of another folder,
            and `redo` is false.
    """
    corpus_dir, stem = corpus_dir.resolve(), output_dir / f"{corpus.name}_{part}"
    cuts_path, text_path, report_path = (Path(f"{stem}{suffix}") for suffix in (".jsonl.gz", ".txt", ".report.json"))
    earlier = PartReport.from_file(report_path)
    if not redo and earlier and earlier.corpus_dir != str(corpus_dir):
        raise AsrError(
            f"{report_path}: {earlier.cuts} is of {earlier.corpus_dir}; choose another --output, or replace it with "
            "--redo."
        )
    listing = corpus.list_part(corpus_dir, part)
    source = checksum_of(listing.utterances, head=repr(listing.skipped))
    if not redo and earlier and earlier.source == source and cuts_path.is_file() and text_path.is_file():
        return earlier
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AsrError(
            f"{output_dir}: the output cannot be written ({error.strerror}); choose another --output."
        ) from error
    require_writable(cuts_path, text_path, report_path, inputs=[corpus_dir] if corpus_dir.is_file() else [])
    cuts: list[MonoCut | MultiCut] = []
    skipped = list(listing.skipped)
    files = _inspected({utterance.audio for utterance in listing.utterances}, num_jobs, on_progress)
    for utterance in listing.utterances:
        result = _cut_or_reason(utterance, files[utterance.audio])
        if isinstance(result, SkippedItem):
            skipped.append(result)
        else:
            cuts.append(result)
    if not cuts:
        raise AsrError(f"{corpus_dir}: none of the {len(files)} audio files of {part} is usable: {skipped[-1].reason}")
    report = PartReport(
        corpus=corpus.name,
        part=part,
        corpus_dir=str(corpus_dir),
        cuts=str(cuts_path),
        text=str(text_path),
        num_utterances=len(cuts),
        num_speakers=len({cut.supervisions[0].speaker for cut in cuts}),
        hours=round(sum(cut.duration for cut in cuts) / 3600, 4),
        skipped=skipped,
        source=source,
    )
    report_path.unlink(missing_ok=True)
    with atomic_path(cuts_path) as path:
        CutSet.from_cuts(cuts).to_file(path)
    write_whole_text(text_path, "".join(f"{cut.supervisions[0].text}\n" for cut in cuts))
    write_whole_text(report_path, report.to_json() + "\n")
    return report


def copy_lexicon(corpus: Corpus, corpus_dir: Path, output_dir: Path) -> Path | None:
    """Copies the lexicon of the corpus, if it has one, to the folder of the manifests.

    Raises:
        AsrError: it cannot be copied.
    """
    lexicon = corpus.lexicon(corpus_dir)
    if lexicon is None:
        return None
    target = output_dir / lexicon.name
    with atomic_path(target) as path:
        shutil.copyfile(lexicon, path)
    return target


def _inspected(
    paths: Iterable[Path], num_jobs: int, on_progress: Progress | None
) -> dict[Path, tuple[int, int, int] | AsrError]:
    """What `inspect_audio` returns for each file, or its error; a file with many utterances is decoded once."""
    paths = sorted(paths)
    found: dict[Path, tuple[int, int, int] | AsrError] = {}
    with ThreadPoolExecutor(max(1, num_jobs)) as pool:
        for path, result in zip(paths, pool.map(_content_or_error, paths), strict=True):
            found[path] = result
            if on_progress is not None:
                on_progress(len(found), len(paths))
    return found


def _content_or_error(path: Path) -> tuple[int, int, int] | AsrError:
    try:
        return inspect_audio(path)
    except AsrError as error:
        return error


def _cut_or_reason(utterance: Utterance, content: tuple[int, int, int] | AsrError) -> MonoCut | MultiCut | SkippedItem:
    """The cut of an utterance in a file with this content, see `_inspected`, or why there is none."""
    if isinstance(content, AsrError):
        return SkippedItem(utterance.utterance_id, str(content))
    num_samples, sampling_rate, num_channels = content
    whole = num_samples / sampling_rate
    end = whole if utterance.end is None else min(utterance.end, whole)
    duration = round(end - utterance.begin, 6)
    if duration <= 0:
        return SkippedItem(
            utterance.utterance_id, f"it begins at {utterance.begin:g} s, but {utterance.audio} has only {whole:g} s"
        )
    channels = list(range(num_channels))
    channel = channels if num_channels > 1 else 0
    recording = Recording(
        id=utterance.utterance_id,
        sources=[AudioSource(type="file", channels=channels, source=str(utterance.audio))],
        sampling_rate=sampling_rate,
        num_samples=num_samples,
        duration=whole,
        channel_ids=channels,
    )
    supervision = SupervisionSegment(
        id=utterance.utterance_id,
        recording_id=utterance.utterance_id,
        start=0.0,
        duration=duration,
        channel=channel,
        text=utterance.text,
        language=utterance.language,
        speaker=utterance.speaker,
    )
    return (MultiCut if num_channels > 1 else MonoCut)(
        id=utterance.utterance_id,
        start=utterance.begin,
        duration=duration,
        channel=channel,
        recording=recording,
        supervisions=[supervision],
    )
