"""A self-contained HTML report on one or more evaluations of a test set, which needs no network, fonts or libraries.

The page is complete without its script, which only sorts and filters. Text from transcripts, names and options is
escaped, and the page's content security policy allows only its own script.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import NamedTuple

from asr.errors import AsrError
from asr.metrics import GAP, ErrorCounts, alignment_errors
from asr.reports.clips import ClipReader, Clips, collect_clips
from asr.reports.evaluation import Evaluation, Utterance
from asr.reports.pictures import picture
from asr.reports.sections import cache_section, calibration_section, curve_section, systems_section, time_section

_MOST_CONFUSIONS = 20
_LOW_CONFIDENCE = 0.5
_LONGEST_PICTURE = 15.0  # seconds
# Sections that are shown side by side if there is room.
_HALF = dict.fromkeys(("curves", "time", "confidence", "cache"), ' class="half"')


@dataclass(frozen=True)
class PageOptions:
    """The contents of a page.

    Args:
        title: heading of the page.
        num_embedded: number of utterances with embedded audio, those with the most errors first.
        max_bytes: maximum size of embedded audio.
        clip_folder: folder next to the page for the audio of all other utterances; None to leave it out.
        num_compared: number of systems whose transcripts are shown; tables and curves have all systems.
        num_pictures: number of utterances that are drawn.
    """

    title: str = "Evaluation"
    num_embedded: int = 50
    max_bytes: int = 40_000_000
    clip_folder: Path | None = None
    num_compared: int = 3
    num_pictures: int = 3


class Page(NamedTuple):
    """A page, and the audio that it plays."""

    html: str
    clips: Clips


class _Row(NamedTuple):
    """The results of all systems for an utterance, with alignments."""

    position: int
    heard: list[Utterance]
    pairs: list[list[tuple[str, str]]]

    @property
    def counts(self) -> list[ErrorCounts]:
        return [alignment_errors(pairs) for pairs in self.pairs]


def make_page(evaluations: Sequence[Evaluation], options: PageOptions) -> Page:
    """Creates a page about evaluations of one test set; details are shown for the first one.

    Raises:
        AsrError: there are no evaluations, their utterances or references differ, or audio cannot be written.
    """
    if not evaluations:
        raise AsrError(
            "there is no evaluation to report on; give a file that 'asr evaluate --details NAME.json' wrote."
        )
    for other in evaluations[1:]:
        _require_same_references(evaluations[0], other)
    compared = list(evaluations[: options.num_compared])
    rows = _rows(compared)
    by_errors = sorted(rows, key=lambda row: -row.counts[0].num_errors)
    clips = collect_clips(
        [row.heard[0] for row in by_errors], options.num_embedded, options.max_bytes, options.clip_folder
    )
    shown, pair_numbers = _confusions_section(rows)
    sections = {
        "systems": ("Systems", systems_section(evaluations)),
        "curves": ("Errors against time", curve_section(evaluations)),
        "time": ("Where the time goes", time_section(evaluations)),
        "confidence": ("Confidences", calibration_section(compared)),
        "cache": ("Caches", cache_section(compared)),
        "confusions": ("Confusions", shown),
        "pictures": ("Examples", _pictures_section(compared, rows, options.num_pictures)),
        "utterances": ("Utterances", _utterances_section(compared, by_errors, clips, pair_numbers)),
    }
    return Page(_document(options.title, _summary(evaluations[0], clips), sections), clips)


def _require_same_references(one: Evaluation, other: Evaluation) -> None:
    references = {utterance.id: utterance.reference for utterance in one.utterances}
    others = {utterance.id: utterance.reference for utterance in other.utterances}
    differing = [name for name in {**references, **others} if references.get(name) != others.get(name)]
    if differing:
        raise AsrError(
            f"{other.name}: {len(differing)} utterances are not those of {one.name} or have another reference, first "
            f"{differing[0]!r}; a report compares systems on one test set."
        )


def _rows(evaluations: Sequence[Evaluation]) -> list[_Row]:
    others = [{utterance.id: utterance for utterance in evaluation.utterances} for evaluation in evaluations]
    rows = []
    for position, utterance in enumerate(evaluations[0].utterances):
        heard = [each[utterance.id] for each in others]
        pairs = [evaluation.pairs(one) for evaluation, one in zip(evaluations, heard, strict=True)]
        rows.append(_Row(position, heard, pairs))
    return rows


def _summary(evaluation: Evaluation, clips: Clips) -> str:
    num_words = sum(len(one.reference) for one in evaluation.utterances)
    seconds = sum(one.duration or 0.0 for one in evaluation.utterances)
    parts = [f"{len(evaluation.utterances):,} utterances", f"{num_words:,} words"]
    if seconds:
        parts.append(f"{seconds / 60:,.1f} minutes")
    if clips.embedded:
        parts.append(f"audio of {len(clips.embedded):,} within this page ({clips.num_bytes / 1e6:.1f} MB)")
    if clips.linked:
        parts.append(f"audio of {len(clips.linked):,} in separate files")
    return ", ".join(parts)


def _confusions_section(rows: Sequence[_Row]) -> tuple[str, dict[tuple[str, str], int]]:
    """Three tables of the first system's errors, and the number of each pair in them."""
    counts = Counter(pair for row in rows for pair in row.pairs[0] if pair[0] != pair[1])
    kinds = {
        "Substituted": [pair for pair in counts if GAP not in pair],
        "Deleted": [pair for pair in counts if pair[1] == GAP],
        "Inserted": [pair for pair in counts if pair[0] == GAP],
    }
    numbers: dict[tuple[str, str], int] = {}
    tables = []
    for kind, pairs in kinds.items():
        pairs.sort(key=lambda pair: (-counts[pair], pair))
        lines = []
        for pair in pairs[:_MOST_CONFUSIONS]:
            numbers[pair] = len(numbers)
            text = " → ".join(filter(None, map(escape, pair)))
            lines.append(
                f'<tr><td><button data-pair="{numbers[pair]}">{text}</button></td><td>{counts[pair]:,}</td></tr>'
            )
        if lines:
            tables.append(
                f'<div class="scroll"><table><thead><tr><th>{kind}</th><th>times</th></tr></thead>'
                f"<tbody>{''.join(lines)}</tbody></table></div>"
            )
    if not tables:
        return "", numbers
    note = "<p class='soft'>Errors of the first system. Select a pair to show the utterances that contain it.</p>"
    return f'{note}<div class="grid">{"".join(tables)}</div>', numbers


def _pictures_section(compared: Sequence[Evaluation], rows: Sequence[_Row], most: int) -> str:
    """Draws short utterances with the most errors, only those with lattices if there are any."""
    source = next((number for number, one in enumerate(compared) if one.lattices), 0)
    graphs = compared[source].lattices
    drawable = [row for row in rows if 0.0 < (row.heard[source].duration or 0.0) <= _LONGEST_PICTURE]
    if graphs:
        drawable = [row for row in drawable if row.heard[source].id in graphs]
    else:
        drawable = [row for row in drawable if any(word.end is not None for word in row.heard[source].words)]
    drawable.sort(key=lambda row: -row.counts[source].num_errors)
    reader, parts = ClipReader(), []
    for row in drawable[:most]:
        one = row.heard[source]
        try:
            samples = reader.read(one.audio) if one.audio is not None else None
        except AsrError:
            samples = None
        wrong = [said != word for said, word in row.pairs[source] if word != GAP]
        drawing = picture(samples, one.duration or 0.0, one.words, wrong, graphs.get(one.id))
        parts.append(
            f"<h3>{escape(one.id)}</h3><p>said: {escape(' '.join(one.reference))}</p>"
            f'<div class="scroll" tabindex="0" role="group" aria-label="drawing of {escape(one.id)}">{drawing}</div>'
        )
    if not parts:
        return ""
    lattice = (
        " Below are the words of the lattice, more probable ones higher and more opaque; "
        "lines lead to the words that may follow."
        if graphs
        else ""
    )
    note = f"Mel spectrogram, with the words that {escape(compared[source].name)} recognized below, errors in red."
    return f'<p class="soft">{note}{lattice}</p>' + "".join(parts)


def _utterances_section(
    compared: Sequence[Evaluation],
    rows: Sequence[_Row],
    clips: Clips,
    pair_numbers: Mapping[tuple[str, str], int],
) -> str:
    orders = {"e -1": "most errors", "r -1": "highest error rate", "n 1": "order of the test set", "d -1": "longest"}
    if any(word.confidence is not None for row in rows for word in row.heard[0].words):
        orders["c 1"] = "lowest confidence"
    if any(row.heard[0].seconds for row in rows):
        orders["f -1"] = "slowest"
    if len(compared) > 1:
        orders["x -1"] = "first system worse than the second"
        orders["x 1"] = "first system better than the second"
    choices = "".join(f'<option value="{key}">{text}</option>' for key, text in orders.items())
    tools = (
        '<div class="tools" role="group" aria-label="sort and filter">'
        '<label>Find <input type="search" id="find"></label>'
        f'<label>Sort by <select id="sort">{choices}</select></label>'
        '<label><input type="checkbox" id="wrong"> with errors</label>'
        '<label><input type="checkbox" id="heard"> with audio</label>'
        '<button type="button" id="all">Show all</button>'
        f'<span id="count" class="soft" role="status">{len(rows):,} utterances</span></div>'
    )
    note = (
        '<p class="soft al"><del>said</del><ins>recognized</ins> instead; <del>missed</del>; <ins>inserted</ins>; '
        '<span class="low">less than 50 % sure</span>. With audio, a word plays from its time, and the arrow keys '
        "go from word to word.</p>"
    )
    lines = "".join(_utterance(compared, row, clips, pair_numbers) for row in rows)
    return f'{note}{tools}<div id="list">{lines}</div>'


def _utterance(
    compared: Sequence[Evaluation], row: _Row, clips: Clips, pair_numbers: Mapping[tuple[str, str], int]
) -> str:
    first, counts = row.heard[0], row.counts
    confidences = [word.confidence for word in first.words if word.confidence is not None]
    seconds, duration = sum(first.seconds.values()), first.duration or 0.0
    rate = counts[0].rate if counts[0].num_ref else float(counts[0].num_errors > 0)
    mean = sum(confidences) / len(confidences) if confidences else None
    found = sorted({pair_numbers[pair] for pair in row.pairs[0] if pair in pair_numbers})
    address = _address(first.id, clips)
    data = {
        "n": row.position,
        "e": counts[0].num_errors,
        "r": f"{rate:.3f}",
        "d": f"{duration:.2f}",
        "c": f"{1.0 if mean is None else mean:.3f}",
        "f": f"{seconds / duration if duration else 0.0:.4f}",
        "x": counts[0].num_errors - counts[1].num_errors if len(counts) > 1 else 0,
        "a": int(bool(address)),
        "p": f" {' '.join(map(str, found))} ",
    }
    facts = [escape(first.id)]
    facts += [f"{duration:.1f} s"] if duration else []
    facts += [f"real-time factor {seconds / duration:.3f}"] if seconds and duration else []
    facts += [f"mean confidence {mean:.0%}"] if mean is not None else []
    head = (
        f'<summary><b title="errors of words">{counts[0].num_errors} of {counts[0].num_ref}</b>'
        f'<span class="line">{escape(" ".join(first.hypothesis)) or "(nothing)"}</span>'
        f"<small>{', '.join(facts)}</small></summary>"
    )
    parts = [f"<p>{escape(first.error)}</p>"] if first.error else []
    if address:
        parts.append(
            f'<audio controls preload="none" src="{escape(address)}" aria-label="audio of {escape(first.id)}"></audio>'
        )
    for evaluation, one, pairs, count in zip(compared, row.heard, row.pairs, counts, strict=True):
        if len(compared) > 1:
            parts.append(f"<h3>{escape(evaluation.name)}: {count.num_errors} of {count.num_ref}</h3>")
        focus = f' tabindex="0" role="group" aria-label="words of {escape(evaluation.name)}"' if address else ""
        parts.append(f'<p class="al"{focus}>{" ".join(_aligned(one, pairs, bool(address)))}</p>')
    attributes = "".join(f' data-{key}="{value}"' for key, value in data.items())
    return f'<details class="u"{attributes}>{head}<div class="in">{"".join(parts)}</div></details>\n'


def _aligned(one: Utterance, pairs: Sequence[tuple[str, str]], has_audio: bool) -> Iterator[str]:
    words = iter(one.words)
    for said, heard in pairs:
        lost = f"<del>{escape(said)}</del>" if said not in (GAP, heard) else ""
        if heard == GAP:
            yield lost
            continue
        word = next(words)
        data = f' data-t="{word.start:.2f}"' if has_audio and word.start is not None else ""
        is_low = word.confidence is not None and word.confidence < _LOW_CONFIDENCE
        mark = f' class="low" title="confidence {word.confidence:.0%}"' if is_low else ""
        tag = "span" if said == heard else "ins"
        text = escape(heard)
        yield lost + (f"<{tag}{data}{mark}>{text}</{tag}>" if data or mark or tag == "ins" else text)


def _address(utterance: str, clips: Clips) -> str:
    if utterance in clips.embedded:
        mime, content = clips.embedded[utterance]
        return f"data:{mime};base64,{base64.b64encode(content).decode()}"
    return clips.linked.get(utterance, "")


def _document(title: str, summary: str, sections: Mapping[str, tuple[str, str]]) -> str:
    style, script = (Path(__file__).with_name(name).read_text("utf-8") for name in ("page.css", "page.js"))
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
        "media-src data: file: 'self'"
    )
    filled = {key: section for key, section in sections.items() if section[1]}
    links = "".join(f'<li><a href="#{key}">{name}</a></li>' for key, (name, _) in filled.items())
    body = "\n".join(
        f'<section id="{key}"{_HALF.get(key, "")}><h2>{name}</h2>{text}</section>'
        for key, (name, text) in filled.items()
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="onepass-asr">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{escape(title)}</h1><p class="soft">{escape(summary)}</p>
<nav aria-label="sections"><ul>{links}</ul></nav></header>
<main>
{body}
</main>
<script>{script}</script>
</body>
</html>
"""


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
