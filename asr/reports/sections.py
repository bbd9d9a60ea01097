"""The sections of a report that compare systems: errors, time, confidences and caches, as tables and curves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from asr.metrics import (
    GAP,
    ConfidenceBin,
    ErrorCounts,
    alignment_errors,
    calibration,
    normalized_cross_entropy,
    probability_of_improvement,
)
from asr.reports.charts import (
    Axis,
    Line,
    Point,
    axis_around,
    calibration_chart,
    line_chart,
    stacked_bars,
)
from asr.reports.evaluation import Evaluation, Utterance, finite, finite_values

_UNKNOWN = "–"
_KIND = ("bundle", "mode", "decoder", "lm_fusion", "transducer", "ngram", "rnn_lm")
_MOST_CACHE_POINTS = 25


def table(head: Sequence[str], rows: Sequence[Sequence[str]], label: str) -> str:
    """An HTML table of cells that are already escaped; it scrolls if it is too wide."""
    titles = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(label)}"><table><thead><tr>{titles}</tr>'
        f"</thead><tbody>{lines}</tbody></table></div>"
    )


def systems_section(evaluations: Sequence[Evaluation]) -> str:
    """Error rates of all systems, and the options in which they differ."""
    head = ["system", "WER", "95 % interval", "sub", "ins", "del", "CER", "wrong utterances", "real-time factor"]
    counts = [_counts(one) for one in evaluations]
    if len(evaluations) > 1:
        head.append("better than the first")
    rows = []
    for evaluation, count in zip(evaluations, counts, strict=True):
        row = [escape(evaluation.name), *_figures(evaluation.summary)]
        if len(evaluations) > 1:
            is_first = evaluation is evaluations[0]
            row.append("" if is_first else f"{probability_of_improvement(count, counts[0]):.0%} probable")
        rows.append(row)
    return table(head, rows, "systems") + _options(evaluations)


def _counts(evaluation: Evaluation) -> list[ErrorCounts]:
    """The error counts of each utterance, in the same order for all systems."""
    ordered = sorted(evaluation.utterances, key=lambda one: one.id)
    return [alignment_errors(evaluation.pairs(one)) for one in ordered]


def _figures(summary: Mapping[str, Any]) -> Iterator[str]:
    def shown(name: str, form: str) -> str:
        value = finite(summary.get(name))
        return _UNKNOWN if value is None else format(value, form)

    yield f"<b>{shown('wer', '.2%')}</b>"
    interval = _interval(summary)
    yield _UNKNOWN if interval is None else f"{interval[0]:.2%} to {interval[1]:.2%}"
    for name in ("substitutions", "insertions", "deletions"):
        yield shown(name, ",.0f")
    yield shown("cer", ".2%")
    yield shown("wrong_utterances", ",.0f")
    yield shown("real_time_factor", ".4f")


def _interval(summary: Mapping[str, Any]) -> tuple[float, float] | None:
    ends = summary.get("wer_interval")
    if not isinstance(ends, list) or len(ends) != 2:
        return None
    low, high = map(finite, ends)
    return None if low is None or high is None else (low, high)


def _options(evaluations: Sequence[Evaluation]) -> str:
    """The options in which systems differ; for a single system, all of them."""
    known = [_settings(one) for one in evaluations]
    names = [name for name in dict.fromkeys(name for one in known for name in one) if name != "made_by"]
    if len(evaluations) > 1:
        names = [name for name in names if len({str(one.get(name)) for one in known}) > 1]
    if not names:
        return ""
    if len(evaluations) == 1:
        rows = [[escape(name), escape(str(known[0][name]))] for name in names]
        content, title = table(["option", "value"], rows, "options"), "Options"
    else:
        rows = [
            [escape(one.name), *(escape(str(each.get(name, _UNKNOWN))) for name in names)]
            for one, each in zip(evaluations, known, strict=True)
        ]
        content, title = table(["system", *map(escape, names)], rows, "options"), "Options that differ"
    return f"<details><summary>{title}</summary>{content}</details>"


def _settings(evaluation: Evaluation) -> dict[str, Any]:
    options = evaluation.system.get("options")
    own = {name: value for name, value in evaluation.system.items() if name != "options"}
    return own | (options if isinstance(options, dict) else {})


def curve_section(evaluations: Sequence[Evaluation]) -> str:
    """Word error rates against time; systems that differ only in beams and similar options form one line."""
    groups: dict[tuple[str, ...], list[Point]] = {}
    for one in evaluations:
        rate, time = finite(one.summary.get("wer")), one.real_time_factor
        if rate is None or time is None:
            continue
        settings = _settings(one)
        kind = tuple(str(settings.get(name, "")) for name in (*_KIND, "second_pass", "second_pass_mode"))
        low, high = _interval(one.summary) or (None, None)
        label = f"{one.name}: {rate:.2%} at {time:.4f}"
        groups.setdefault(kind if any(kind) else (one.name,), []).append(Point(time, rate, label, low, high))
    points = [point for each in groups.values() for point in each]
    if len(points) < 2:
        return ""
    times = [point.x for point in points]
    rates = [end for point in points for end in (point.y, point.low, point.high) if end is not None]
    chart = line_chart(
        "word error rate against the real-time factor",
        axis_around("seconds of computation per second of audio", times, is_log=max(times) > 2 * min(times)),
        axis_around("word error rate", rates, format_tick=lambda value: f"{100 * value:.3g} %"),
        [Line(name, sorted(each)) for name, each in zip(_group_names(list(groups)), groups.values(), strict=True)],
    )
    note = "Down and to the left is better. Bars are 95 % intervals; compare times only if one idle machine ran all."
    return f'{chart}<p class="soft">{note}</p>'


def _group_names(groups: Sequence[tuple[str, ...]]) -> list[str]:
    """A name for each group, of the options in which the groups differ."""
    longest = max(map(len, groups))
    differs = [position for position in range(longest) if len({group[position : position + 1] for group in groups}) > 1]
    names = []
    for group in groups:
        parts = [group[position] for position in differs if position < len(group) and group[position]]
        names.append(", ".join(parts) or next(filter(None, group)))
    return names


def time_section(evaluations: Sequence[Evaluation]) -> str:
    """A bar for each system, with the milliseconds of each stage per second of audio."""
    bars = {}
    for one in evaluations:
        factor, stages = one.real_time_factor, finite_values(one.summary.get("seconds"))
        total = sum(stages.values())
        if factor and total > 0:
            bars[one.name] = {stage: 1000 * factor * value / total for stage, value in stages.items()}
    return stacked_bars("time of each stage", bars, "ms per second of audio") if bars else ""


def calibration_section(evaluations: Sequence[Evaluation]) -> str:
    """How well confidences match shares of correct words, as a chart and a table."""
    lines, rows = [], []
    for one in evaluations:
        marked = [
            (said == word.text, word.confidence)
            for utterance in one.utterances
            for (said, word) in zip(_said(one, utterance), utterance.words, strict=True)
        ]
        if not marked or any(confidence is None for _, confidence in marked):
            continue
        sure = [(is_right, confidence or 0.0) for is_right, confidence in marked]
        bins = calibration(sure)
        lines.append(Line(one.name, [_calibration_point(each) for each in bins]))
        error = sum(abs(each.num_right - each.num_words * each.mean_confidence) for each in bins) / len(sure)
        entropy = normalized_cross_entropy(marked)
        mean = sum(value for _, value in sure) / len(sure)
        right = sum(is_right for is_right, _ in sure) / len(sure)
        rows.append(
            [
                escape(one.name),
                *(f"{mean:.1%}", f"{right:.1%}", f"{error:.3f}"),
                _UNKNOWN if entropy is None else f"{entropy:.3f}",
            ]
        )
    if not lines:
        return ""
    head = ["system", "mean confidence", "right words", "calibration error", "normalized cross-entropy"]
    note = (
        "Each point represents the words in a tenth of the range. On the dashed line, confidences are correct; below "
        "it, they are too high. The calibration error is the mean distance from the line (0 is best). The normalized "
        "cross-entropy is at most 1, and 0 if confidences say no more than the share of right words."
    )
    chart = calibration_chart(lines)
    return f'{chart}{table(head, rows, "confidences")}<p class="soft">{note}</p>'


def _said(evaluation: Evaluation, utterance: Utterance) -> list[str]:
    """The reference word aligned with each recognized word."""
    return [said for said, heard in evaluation.pairs(utterance) if heard != GAP]


def _calibration_point(one: ConfidenceBin) -> Point:
    share = one.num_right / one.num_words
    return Point(
        one.mean_confidence,
        share,
        f"{one.num_words} words, mean confidence {one.mean_confidence:.1%}, {share:.1%} right",
    )


def cache_section(evaluations: Sequence[Evaluation]) -> str:
    """The share of language model queries that its caches answered, over time."""
    lines, rows = [], []
    shown = [one for one in evaluations if one.cache]
    for one in shown:
        prefix = f"{one.name}: " if len(shown) > 1 else ""
        steps = _steps(one.cache)
        for name, count in (("score was stored", "num_edge_hits"), ("hidden state was stored", "num_hidden_rows")):
            points = []
            for before, after in steps:
                asked = after["num_queries"] - before["num_queries"]
                share = (after.get(count, 0.0) - before.get(count, 0.0)) / asked if asked > 0 else 0.0
                share = share if count == "num_edge_hits" else 1.0 - share
                points.append(Point(after["audio_seconds"] / 60, share, f"{share:.1%}"))
            lines.append(Line(prefix + name, points))
        last = one.cache[-1]
        rows.append(
            [
                escape(one.name),
                f"{last['num_queries']:,.0f}",
                f"{last.get('num_edge_hits', 0.0) / last['num_queries']:.1%}",
                f"{1.0 - last.get('num_hidden_rows', 0.0) / last['num_queries']:.1%}",
                f"{last.get('num_contexts', 0.0):,.0f}",
                f"{last.get('bytes_held', 0.0) / 1e6:,.1f} MB",
            ]
        )
    if not lines:
        return ""
    percent = Axis("share of queries", 0.0, 1.0, format_tick="{:.0%}".format)
    minutes = axis_around("minutes of audio", [0.0, *(point.x for line in lines for point in line.points)])
    head = ["system", "queries", "stored scores", "without hidden layer", "stored histories", "memory"]
    chart = line_chart("share of queries that the caches answered, over time", minutes, percent, lines)
    return chart + table(head, rows, "caches")


def _steps(cache: Sequence[Mapping[str, float]]) -> list[tuple[Mapping[str, float], Mapping[str, float]]]:
    """Pairs of consecutive counts, with about the same number of queries between the two of each pair."""
    least = cache[-1]["num_queries"] / _MOST_CACHE_POINTS
    kept: list[Mapping[str, float]] = [dict.fromkeys(cache[0], 0.0)]
    for counts in cache:
        if counts["num_queries"] - kept[-1]["num_queries"] >= least:
            kept.append(counts)
    return list(itertools.pairwise(kept))
