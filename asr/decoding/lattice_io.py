"""Lattices in the formats of other programs: Kaldi's compact lattices and k2's FSAs; `asr.decoding.slf` has HTK's.

Kaldi's text archives: one line per arc, `from to word graph_cost,acoustic_cost,transition_ids`; one line per final
state; an empty line after each utterance. Costs are negated scores. A word is written as its id in the vocabulary (0
for none, as in Kaldi's words.txt), and a transition id is the acoustic token plus 1; an arc has at most one. The
acoustic cost is unscaled. The graph cost is the sum of the scaled scores of graph and language model and the word
insertion penalty; its parts are not stored. Kaldi's tools find the same paths with `--acoustic-scale` set to
`am_scale`.

Shapes: S states, A arcs.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TextIO

import torch

from asr import old_paths
from asr.decoding.k2 import FINAL_LABEL, import_k2
from asr.decoding.lattice import Lattice
from asr.decoding.lattice_links import NO_ARC, NO_TOKEN, Link, lattice_from_links, links_of
from asr.decoding.settings import DecodingOptions
from asr.errors import AsrError
from asr.serialization import open_atomic
from asr.text.documents import LARGEST_NUMBER, read_text
from asr.text.symbols import EPSILON_ID
from asr.torch_archive import load_tensors, ragged_parts


def write_kaldi_lattice(file: TextIO, utterance: str, lattice: Lattice, options: DecodingOptions) -> None:
    """Appends the lattice of one utterance to an archive; the utterance's name must not contain white space."""
    links = links_of(lattice)
    lines = [utterance + " "]
    by_state: dict[int, list[str]] = {}
    for link in links.links:
        score = options.graph_scale * link.graph_score + options.lm_scale * link.lm_score
        score += options.word_insertion_penalty * (link.word_id != EPSILON_ID)
        transition = "" if link.token_id == NO_TOKEN else str(link.token_id + 1)
        weight = f"{-score:.9g},{-link.am_score:.9g},{transition}"
        by_state.setdefault(link.src_state, []).append(f"{link.src_state}\t{link.dst_state}\t{link.word_id}\t{weight}")
    for state, (graph_score, lm_score) in links.final.items():
        score = options.graph_scale * graph_score + options.lm_scale * lm_score
        by_state.setdefault(state, []).append(f"{state}\t{-score:.9g},0,")
    # In Kaldi, the state in the first line is the start state.
    lines += [line for state in sorted(by_state) for line in by_state[state]]
    file.write("\n".join(lines) + "\n\n")


def read_kaldi_lattices(path: str | Path, num_words: int) -> Iterator[tuple[str, Lattice]]:
    """Reads the utterances of an archive and their lattices. Missing values are 0, or -1 for graph arcs.

    Args:
        path: a text archive of compact lattices, of `write_kaldi_lattice` or Kaldi, plain, .gz or .xz.
        num_words: size of the vocabulary of the word ids.

    Raises:
        AsrError: the file cannot be read, or a line is not part of a lattice; the message names the line.
    """
    path = Path(path)
    lines = read_text(path, "lattices").splitlines()
    utterance: str | None = None
    first, rows = 0, list[tuple[int, list[str]]]()
    for number, line in enumerate([*lines, ""], start=1):
        fields = line.split()
        if fields and utterance is None:
            if len(fields) > 1:
                raise AsrError(f"{path}:{number}: expected the name of an utterance, not {line.strip()!r}.")
            utterance, first, rows = fields[0], number, []
        elif fields:
            rows.append((number, fields))
        elif utterance is not None:
            yield utterance, _parsed(rows, f"{path}:{first}", path, num_words)
            utterance = None


def _parsed(rows: Sequence[tuple[int, list[str]]], name: str, path: Path, num_words: int) -> Lattice:
    if not rows:
        raise AsrError(f"{name}: the lattice is empty.")
    links: list[Link] = []
    final: dict[int, tuple[float, float]] = {}
    state_of: dict[str, int] = {}

    def numbered(field: str) -> int:
        if not field.isdigit():
            raise ValueError(field)
        return state_of.setdefault(field, len(state_of))

    extra: list[tuple[int, int, list[int], int]] = []
    for number, fields in rows:
        try:
            state = numbered(fields[0])
            if len(fields) <= 2:
                graph_cost, am_cost, tokens = _weight(fields[1] if len(fields) == 2 else "0,0,")
                final[state] = (-graph_cost - am_cost, 0.0)
                if tokens:
                    raise AsrError(
                        f"{path}:{number}: a final state has frames; run lattice-align-words or a similar tool."
                    )
                continue
            if len(fields) not in (3, 4):
                raise ValueError(fields)
            dst_state, word_id = numbered(fields[1]), int(fields[2])
            graph_cost, am_cost, tokens = _weight(fields[3] if len(fields) == 4 else "0,0,")
        except (ValueError, IndexError) as error:
            raise AsrError(
                f"{path}:{number}: {' '.join(fields)!r} is neither an arc 'from to word graph,acoustic,transitions' "
                "nor a final state of a compact lattice."
            ) from error
        if not 0 <= word_id < num_words:
            raise AsrError(f"{path}:{number}: there is no word {word_id} in a vocabulary of {num_words}.")
        scores = (-am_cost, -graph_cost)
        token = tokens[0] if tokens else NO_TOKEN
        links.append(Link(state, dst_state, word_id, token, *scores))
        if len(tokens) > 1:
            extra.append((len(links) - 1, dst_state, tokens[1:], number))
    num_states = len(state_of)
    # An arc of several frames becomes several arcs, with all scores on the first.
    for position, dst_state, tokens, _ in extra:
        link = links[position]
        links[position] = Link(link.src_state, num_states, link.word_id, link.token_id, link.am_score, link.graph_score)
        for offset, token in enumerate(tokens, start=1):
            is_last = offset == len(tokens)
            links.append(Link(num_states, dst_state if is_last else num_states + 1, EPSILON_ID, token))
            num_states += 1
    return lattice_from_links(num_states, 0, links, final, name)


def _weight(text: str) -> tuple[float, float, list[int]]:
    graph_cost, am_cost, transitions = text.split(",")
    tokens = [int(transition) - 1 for transition in transitions.split("_") if transition]
    if not abs(float(graph_cost)) + abs(float(am_cost)) <= LARGEST_NUMBER or not min(tokens, default=0) >= 0:
        raise ValueError(text)
    if max(tokens, default=0) >= 1 << 31:
        raise ValueError(text)
    return float(graph_cost), float(am_cost), tokens


_SCORES = ("am_score", "graph_score", "lm_score")


def lattice_to_k2(lattice: Lattice, options: DecodingOptions) -> Any:
    """Converts a lattice of one utterance to a `k2.Fsa`, with states ordered by frame.

    Labels are acoustic tokens, `scores` are the scaled totals. Attributes of arcs are `am_score`, `graph_score`,
    `lm_score`, unscaled; `graph_arc`, -1 on final arcs; `aux_labels`, ragged, the words.

    Raises:
        AsrError: k2 cannot be imported.
    """
    k2 = import_k2()
    ends = (lattice.final_graph_score > -torch.inf).nonzero().squeeze(1)
    src_state = torch.cat([lattice.src_state(), ends])
    # k2 requires the arcs of a state to be adjacent, with its final arc last.
    order = torch.sort(src_state, stable=True).indices
    num_ends = len(ends)
    final_state = torch.full((num_ends,), lattice.num_states)
    final_label = torch.full((num_ends,), FINAL_LABEL)
    total = torch.cat([lattice.arc_total(options), lattice.final_total(options)[ends]]).float()
    columns = [
        src_state,
        torch.cat([lattice.dst_state, final_state]),
        torch.cat([lattice.token_id.long(), final_label]),
        total.view(torch.int32).long(),
    ]
    fsa = k2.Fsa(torch.stack(columns, dim=1)[order].to(torch.int32).contiguous())
    zeros = torch.zeros(num_ends, dtype=torch.float32)
    fsa.am_score = torch.cat([lattice.am_score, zeros])[order]
    fsa.graph_score = torch.cat([lattice.graph_score, lattice.final_graph_score[ends]])[order]
    fsa.lm_score = torch.cat([lattice.lm_score, lattice.final_lm_score[ends]])[order]
    fsa.graph_arc = torch.cat([lattice.graph_arc, torch.full((num_ends,), -1)])[order].to(torch.int32)
    words = [*torch.split(lattice.word_id, lattice.num_words().tolist()), *[lattice.word_id[:0]] * num_ends]
    fsa.aux_labels = k2.RaggedTensor([words[position].tolist() for position in order.tolist()], dtype=torch.int32)
    return fsa


def _lattice_of_arcs(
    arcs: torch.Tensor, attributes: Mapping[str, torch.Tensor], words: Sequence[Sequence[int]], name: str
) -> Lattice:
    """k2's arcs (A, 4), attributes (A,) each, and the words of each arc -> a lattice of one utterance."""
    values = arcs[:, :3].long()
    is_final = values[:, 2] == FINAL_LABEL
    inner, ends = (~is_final).nonzero().squeeze(1), is_final.nonzero().squeeze(1)
    num_states = int(values[:, :2].max()) if len(values) else 0
    src_state, dst_state, label = values.unbind(1)
    # States are ordered by frame, and the final one comes last.
    is_sound = len(ends) > 0 and bool((src_state >= 0).all() and (src_state[1:] >= src_state[:-1]).all())
    is_sound = is_sound and bool((dst_state > src_state).all() and (dst_state[ends] == num_states).all())
    is_sound = is_sound and bool((dst_state[inner] < num_states).all() and (label[inner] >= 0).all())
    is_sound = is_sound and num_states <= len(values) and bool((attributes["graph_arc"] >= NO_ARC).all())
    is_sound = is_sound and all(bool(attributes[score].isfinite().all()) for score in _SCORES)
    is_sound = is_sound and all(word >= 0 for row in words for word in row)
    if not is_sound:
        raise AsrError(f"{name}: the arcs are not those of a lattice; use one that `lattice_to_k2` created.")
    counts = torch.bincount(values[inner, 0], minlength=num_states)
    frame = torch.zeros(num_states, dtype=torch.int64)
    for src, dst in values[inner, :2].tolist():
        frame[dst] = frame[src] + 1
    chosen = [words[position] for position in inner.tolist()]
    num_words = torch.tensor([len(row) for row in chosen], dtype=torch.int64)
    no_end = torch.full((num_states,), -torch.inf, dtype=torch.float32)
    return Lattice(
        frame=frame,
        utt_idx=torch.zeros(num_states, dtype=torch.int64),
        start_state=torch.zeros(1, dtype=torch.int64),
        arc_begin=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
        dst_state=values[inner, 1],
        graph_arc=attributes["graph_arc"][inner].long(),
        token_id=values[inner, 2].to(torch.int32),
        am_score=attributes["am_score"][inner],
        graph_score=attributes["graph_score"][inner],
        lm_score=attributes["lm_score"][inner],
        word_begin=torch.cat([num_words.new_zeros(1), num_words.cumsum(0)]),
        word_id=torch.tensor([word for row in chosen for word in row], dtype=torch.int64),
        final_graph_score=no_end.index_copy(0, values[ends, 0], attributes["graph_score"][ends]),
        final_lm_score=torch.zeros(num_states, dtype=torch.float32).index_copy(
            0, values[ends, 0], attributes["lm_score"][ends]
        ),
    )


def save_k2_lattice(path: str | Path, lattice: Lattice, options: DecodingOptions) -> None:
    """Writes a file for `k2.Fsa.from_dict(torch.load(path))`.

    Raises:
        AsrError: the file cannot be written; an existing file is left unchanged.
    """
    file = io.BytesIO()  # torch's file writer may end the process if the disk is full
    torch.save(lattice_to_k2(lattice, options).as_dict(), file)
    with open_atomic(Path(path)) as whole:
        whole.write(file.getbuffer())


def load_k2_lattice(path: str | Path) -> Lattice:
    """Reads what `save_k2_lattice` wrote, without k2, and without running code from the file.

    Raises:
        AsrError: the file cannot be read, is damaged, or is not such a lattice.
    """
    try:
        content = load_tensors(path, states_of=["_k2.ragged RaggedTensor"])
    except (OSError, UnpicklingError) as error:
        raise AsrError(f"{path}: this is not a k2 lattice, or it is damaged ({error}).") from error
    names = ("arcs", *_SCORES, "graph_arc", "aux_labels")
    missing = [name for name in names if not isinstance(content, dict) or name not in content]
    if missing:
        raise AsrError(f"{path}: this is not a k2 lattice: it lacks the attribute {missing[0]!r}.")
    arcs, attributes = content["arcs"], {name: content[name] for name in names[1:-1]}
    dtypes = {**dict.fromkeys(_SCORES, torch.float32), "graph_arc": torch.int32}
    if not _is_tensor(arcs, torch.int32, 2) or arcs.shape[1] != 4 or not len(arcs):
        raise AsrError(f"{path}: this is not a k2 lattice: its arcs are not four integers each.")
    for name, value in attributes.items():
        if not _is_tensor(value, dtypes[name], 1) or len(value) != len(arcs):
            raise AsrError(f"{path}: the attribute {name!r} must have one {dtypes[name]} for each arc.")
    words = ragged_parts(content["aux_labels"], len(arcs))
    if words is None:
        raise AsrError(f"{path}: the words ('aux_labels') must be one list for each arc.")
    begin, values = (part.tolist() for part in words)
    rows = [values[first:end] for first, end in itertools.pairwise(begin)]
    return _lattice_of_arcs(arcs, attributes, rows, str(path))


def _is_tensor(value: Any, dtype: torch.dtype, num_dimensions: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == dtype and value.dim() == num_dimensions


old_paths.offer(__name__)
