"""Which part of the step a kernel belongs to, where the trace tells.

A kernel's launch is the runtime or driver call with the same correlation. Its thread and time decide, in this order:

1. the innermost annotation (`record_function`) around the launch on its own thread whose name tells a phase;
2. the phase that all other threads' annotations around that moment agree on (the autograd engine runs backward in a
   thread of its own, below an annotation of the thread that called it), unless 3 says that this is backward and the
   annotation does not;
3. autograd: below an operator of the autograd engine it is backward, or recompute where a forward operator (one with a
   sequence number) is around the launch as well; below a forward operator alone it is forward;
4. the innermost range that Kineto projected on the kernel's own stream, around the kernel's start.

What none of these tells is unknown. Words are those of `bench.kineto.classes.PHASE_WORDS`.
"""

import numpy as np
from numpy.typing import NDArray

from bench.kineto.classes import PHASES, SPLIT_WORD, KernelTable
from bench.kineto.intervals import inside
from bench.kineto.reader import BACKWARD_OP, FORWARD_OP, Columns, Ints, RankTrace

Codes = NDArray[np.int8]
_CODE: dict[str, int] = {phase: code for code, phase in enumerate(PHASES)}
_NONE = -1
_BACKWARD = [_CODE["recompute"], _CODE["backward"], _CODE["input_gradient"], _CODE["weight_gradient"]]


def phases_of_work(trace: RankTrace, table: KernelTable) -> Codes:
    """Index into `PHASES` for every entry of `trace.work`."""
    words = _codes_of_names(trace, table)
    thread, at = _launches(trace)
    own, others = _by_annotation(trace.annotations, words, thread, at)
    autograd = _by_autograd(trace.operators, thread, at)
    contradicted = np.isin(autograd, _BACKWARD) & ~np.isin(others, _BACKWARD)
    others[contradicted] = _NONE
    projected, _ = _by_annotation(trace.gpu_annotations, words, trace.work.lane, trace.work.start_ns)
    result = np.full(len(at), _CODE["unknown"], dtype=np.int8)
    for evidence in (projected, autograd, others, own):
        result = np.where(evidence == _NONE, result, evidence)
    return result


def _codes_of_names(trace: RankTrace, table: KernelTable) -> Codes:
    """Phase that each name tells as an annotation, -1 for none."""
    used = np.unique(np.concatenate((trace.annotations.name, trace.gpu_annotations.name)))
    words = {int(i): table.phase_word(trace.names[i]) for i in used}
    split = "weight_gradient" in words.values()
    codes = np.full(len(trace.names), _NONE, dtype=np.int8)
    for i, word in words.items():
        if word == SPLIT_WORD:
            word = "input_gradient" if split else "backward"
        if word is not None:
            codes[i] = _CODE[word]
    return codes


def _launches(trace: RankTrace) -> tuple[Ints, Ints]:
    """Thread and time of the launch of every entry of `trace.work`; thread -1 where there is none."""
    work, launches = trace.work, trace.launches
    thread = np.full(len(work), -1, dtype=np.int64)
    at = np.zeros(len(work), dtype=np.int64)
    if len(launches):
        order = np.argsort(launches.correlation, kind="stable")
        known = launches.correlation[order]
        place = np.minimum(np.searchsorted(known, work.correlation), len(known) - 1)
        found = (known[place] == work.correlation) & (work.correlation >= 0)
        thread[found] = launches.lane[order][place[found]]
        at[found] = launches.start_ns[order][place[found]]
    return thread, at


def _by_annotation(ranges: Columns, words: Codes, lane: Ints, at: Ints) -> tuple[Codes, Codes]:
    """Phases told by the ranges of a point's own lane, and by those of all other lanes where these agree."""
    own = np.full(len(at), _NONE, dtype=np.int8)
    others = np.full(len(at), _NONE, dtype=np.int8)
    disagree = np.zeros(len(at), dtype=bool)
    telling = np.flatnonzero(words[ranges.name] != _NONE) if len(ranges) else np.empty(0, dtype=np.int64)
    for number in np.unique(ranges.lane[telling]):
        some = telling[ranges.lane[telling] == number]
        times, values = _innermost(ranges.start_ns[some], ranges.end_ns[some], words[ranges.name[some]])
        told = values[np.searchsorted(times, at, side="right")]
        mine = lane == number
        own[mine] = told[mine]
        told = np.where(mine | (lane < 0), _NONE, told)
        disagree |= (told != _NONE) & (others != _NONE) & (told != others)
        others = np.where(told == _NONE, others, told)
    others[disagree] = _NONE
    return own, others


def _innermost(start: Ints, end: Ints, code: Codes) -> tuple[Ints, Codes]:
    """A step function: before `times[0]` `values[0]`, from `times[i]` on `values[i + 1]`.

    Its value is the code of the open range that began last; of those that began together, the one that ends first.
    """
    order = np.lexsort((-end, start))
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    # At one time ends come before starts: ranges are half-open.
    times = np.concatenate((end, start))
    opens = np.repeat([0, 1], len(start))
    which = np.concatenate((rank, rank))
    sequence = np.lexsort((which, opens, times))
    by_rank = code[order].tolist()
    stack: list[int] = []
    closed: set[int] = set()
    values = [_NONE]
    for is_open, number in zip(opens[sequence].tolist(), which[sequence].tolist(), strict=True):
        if is_open:
            if number not in closed:  # an empty range ends before it begins
                stack.append(number)
        else:
            closed.add(number)
        while stack and stack[-1] in closed:
            stack.pop()
        values.append(by_rank[stack[-1]] if stack else _NONE)
    times = times[sequence]
    last = np.append(times[1:] != times[:-1], True)
    return times[last], np.array(values, dtype=np.int8)[np.append(True, last)]


def _by_autograd(operators: Columns, thread: Ints, at: Ints) -> Codes:
    result = np.full(len(at), _NONE, dtype=np.int8)
    for number in np.unique(operators.lane):
        mine = np.flatnonzero(thread == number)
        here = operators.lane == number
        forward, backward = (
            inside(at[mine], operators.start_ns[some], operators.end_ns[some])
            for some in (here & (operators.role == FORWARD_OP), here & (operators.role == BACKWARD_OP))
        )
        result[mine[forward]] = _CODE["forward"]
        result[mine[backward]] = _CODE["backward"]
        result[mine[forward & backward]] = _CODE["recompute"]
    return result
