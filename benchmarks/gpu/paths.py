"""A path through the control-flow graph of a kernel: the instructions that a warp usually executes.

It is the longest path from the entry to an exit that takes every loop once and enters no seldom block. Longest, so that of two
branches the dearer one counts and nothing is gained by an early exit. What stands in loops is told apart from the rest, because
the loops of these kernels pass over the elements of a program, all of them equally often. Instructions whose predicate is
false are issued, and count.

Seldom are the slow paths of a division or a root (for denormals and infinities), and what the source marks: a statement or
function whose first line ends in a comment ``# seldom`` or ``# seldom: ...``. An instruction belongs to it if the line it comes
from does, or a line that this was inlined at. A block is seldom if nine tenths of its instructions are: compilers move some
into blocks that are not, where they are executed always, and count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path as File
from typing import NamedTuple

__all__ = ["Instruction", "Path", "common_path"]

SELDOM = re.compile(r"#\s*seldom\b")
TIMES = re.compile(r"#\s*times (\d+)\b")


class Instruction(NamedTuple):
    """One instruction, without its predicate, and the source lines it comes from, innermost first."""

    text: str
    unit: str  # what executes it; see `machine_code`
    jumps_to: str | None = None  # the label
    falls_through: bool = True  # the next instruction may follow
    leaves: bool = False  # the program may end here
    slow: bool = False  # a call of a slow path
    lines: tuple[tuple[str, int], ...] = ()

    @property
    def seldom(self) -> bool:
        known = all(line > 0 for _, line in self.lines)  # line 0 is of instructions that were merged from several
        return known and any(line in seldom_lines(file) for file, line in self.lines)

    @property
    def times(self) -> int:
        """The number of times that a loop which says so runs; 0 if none does."""
        return max((times_of_lines(file).get(line, 0) for file, line in self.lines), default=0)

    @property
    def ends_block(self) -> bool:
        return self.jumps_to is not None or not self.falls_through or self.leaves


class Path(NamedTuple):
    """The instructions of a path, those outside of all loops and those inside."""

    outside: list[Instruction]
    inside: list[Instruction]

    @property
    def instructions(self) -> list[Instruction]:
        return [*self.outside, *self.inside]

    def executed(self, passes: int) -> Iterator[Instruction]:
        """Yield each instruction as often as it is executed: loops that say ``# times 6`` that often, others ``passes``."""
        yield from self.outside
        for i in self.inside:
            yield from [i] * (i.times or passes)


@dataclass
class Block:
    """Instructions that are executed one after the other, and the blocks that may follow."""

    instructions: list[Instruction] = field(default_factory=list)
    follows: set[int] = field(default_factory=set)

    @property
    def seldom(self) -> bool:
        seldom = sum(i.seldom for i in self.instructions)
        return any(i.slow for i in self.instructions) or seldom >= 0.9 * len(self.instructions)


@lru_cache(maxsize=64)
def seldom_lines(file: str) -> frozenset[int]:
    """Return the lines of a source file that are marked as seldom."""
    if not File(file).is_file():
        return frozenset()
    source = File(file).read_text(encoding="utf-8")
    text = source.splitlines()
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)) if SELDOM.search(source) else ():
        if isinstance(node, ast.stmt) and SELDOM.search(text[node.lineno - 1]):
            # The condition of an `if` is not seldom, and neither is its `else`.
            inner = node.body if isinstance(node, ast.If | ast.While) else [node]
            found.update(range(inner[0].lineno, (inner[-1].end_lineno or inner[-1].lineno) + 1))
    return frozenset(found)


@lru_cache(maxsize=64)
def times_of_lines(file: str) -> dict[int, int]:
    """Return the lines of the loops of a source file that say how often they run, with that number."""
    if not File(file).is_file():
        return {}
    source = File(file).read_text(encoding="utf-8")
    text = source.splitlines()
    found: dict[int, int] = {}
    for node in ast.walk(ast.parse(source)) if TIMES.search(source) else ():
        if isinstance(node, ast.For | ast.While) and (mark := TIMES.search(text[node.lineno - 1])):
            found.update(dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), int(mark[1])))
    return found


def common_path(instructions: list[Instruction], labels: dict[str, int]) -> Path:
    """Return the path; labels are places in the list."""
    blocks = build_blocks(instructions, labels)
    follows = {i: {f for f in b.follows if not blocks[f].seldom} for i, b in enumerate(blocks) if not b.seldom}
    if 0 not in follows:
        raise ValueError("the kernel's first block is marked as seldom")
    looping = take_loops_once(follows)
    best: dict[int, tuple[int, list[int]]] = {}
    for block in _postorder(follows):
        here = blocks[block].instructions
        after = [best[f] for f in follows[block] if f in best]
        if after or any(i.leaves for i in here):  # else it leads into seldom blocks only
            length, path = max(after, default=(0, []))
            best[block] = (len(here) + length, [block, *path])
    if 0 not in best:
        raise ValueError("every path through the kernel enters a block that is marked as seldom")
    return Path(
        [i for block in best[0][1] if block not in looping for i in blocks[block].instructions],
        [i for block in best[0][1] if block in looping for i in blocks[block].instructions],
    )


def build_blocks(instructions: list[Instruction], labels: dict[str, int]) -> list[Block]:
    """Return the basic blocks in the order of their addresses."""
    starts = {0, *labels.values()} | {i + 1 for i, x in enumerate(instructions) if x.ends_block}
    first = sorted(start for start in starts if start < len(instructions))
    number = {start: i for i, start in enumerate(first)}
    blocks = []
    for start, end in zip(first, [*first[1:], len(instructions)], strict=True):
        last = instructions[end - 1]
        follows = {labels[last.jumps_to]} if last.jumps_to in labels else set()
        follows |= {end} if last.falls_through else set()
        blocks.append(Block(instructions[start:end], {number[f] for f in follows if f in number}))
    return blocks


def take_loops_once(follows: dict[int, set[int]]) -> set[int]:
    """Turn every jump to the beginning of a loop into jumps to where the loop may end; return the blocks that were in loops."""
    looping: set[int] = set()
    while back := _find_jump_back(follows):
        end, begin = back
        inside = _leading_to(follows, end, begin)
        follows[end] = (follows[end] - {begin}) | {f for block in inside for f in follows[block] if f not in inside}
        looping |= inside
    return looping


def _find_jump_back(follows: dict[int, set[int]]) -> tuple[int, int] | None:
    """Return (from, to) of a jump to a block that it was reached through."""
    place = {block: i for i, block in enumerate(_postorder(follows))}
    return next(((b, f) for b in place for f in sorted(follows[b]) if place[f] >= place[b]), None)


def _leading_to(follows: dict[int, set[int]], end: int, begin: int) -> set[int]:
    """Return the blocks of a loop: all that lead to its end without passing its beginning, and that."""
    inside, waiting = {begin, end}, [end]
    while waiting:
        block = waiting.pop()
        if block != begin:
            before = {b for b, f in follows.items() if block in f} - inside
            inside |= before
            waiting.extend(before)
    return inside


def _postorder(follows: dict[int, set[int]]) -> list[int]:
    """Return the blocks that can be reached from the first, each after all that follow it, beginnings of loops apart."""
    order: list[int] = []
    seen = {0}
    stack = [(0, iter(sorted(follows[0])))]
    while stack:
        new = next((f for f in stack[-1][1] if f not in seen), None)
        if new is None:
            order.append(stack.pop()[0])
        else:
            seen.add(new)
            stack.append((new, iter(sorted(follows[new]))))
    return order
