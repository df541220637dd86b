"""Read machine code: NVIDIA's disassembly (SASS) and AMD's assembly, as instructions with the unit that executes each.

Units: ``float`` adds and multiplies; ``special`` has roots and conversions; ``product`` has AMD's 32-bit integer products;
``memory`` loads, stores and exchanges; ``control`` takes a slot to issue and no more, or is executed once for all lanes;
``integer`` is the rest, comparisons and selections of floats among it.
"""

from __future__ import annotations

import re
from pathlib import Path

from .paths import Instruction

__all__ = ["bytes_accessed", "read_amd", "read_sass"]

SASS_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?P<text>.*?)\s*;")
SASS_LABEL = re.compile(r"^(?P<name>[.$\w]+):$")
SASS_LINE = re.compile(r'//## File "(?P<file>[^"]+)", line (?P<line>\d+)')
SASS_UNITS = {
    "float": r"F(ADD|MUL|FMA)2?$",
    "special": r"MUFU|FRND|F2I|I2F$|F2F$|POPC|FLO|BREV",
    "memory": r"LD|ST|ATOM|RED$|SHFL",
    "control": r"U|BRA|EXIT|BSSY|BSYNC|NOP|BAR|WARPSYNC|CALL|RET|DEPBAR|JMP|R2UR|S2UR|PLOP",
}
AMD_LABEL = re.compile(r"^(?P<name>\.LBB\w+):")
AMD_UNITS = {
    "float": r"v_(pk_)?(add|sub|subrev|mul|fma|fmac|fmaak|fmamk)_f32|v_div_(fmas|fixup|scale)",
    "special": r"v_(sqrt|rsq|rcp|exp|log|sin|cos)_",
    "product": r"v_(mul_lo|mul_hi|mad_u64|mad_i64)",
    "memory": r"global_|buffer_|ds_|flat_|scratch_",
    "control": r"s_",
}


def read_sass(disassembly: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return the instructions of a kernel, and the place of each label; subroutines, which follow it, are left out."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    lines: list[tuple[str, int]] = []
    complete = True  # the lines belong to instructions that were read
    for raw in disassembly.splitlines():
        if match := SASS_LINE.search(raw):
            here = match["file"], int(match["line"])
            lines = [here] if complete else [*lines, here]
            complete = False
        elif match := SASS_INSTRUCTION.search(raw):
            instructions.append(_sass_instruction(match["text"], tuple(lines)))
            complete = True
        elif match := SASS_LABEL.match(raw.strip()):
            if match["name"].startswith("$"):
                break
            labels[match["name"]] = len(instructions)
    return instructions, labels


def _sass_instruction(text: str, lines: tuple[tuple[str, int], ...]) -> Instruction:
    bare = re.sub(r"^@!?U?P\w+\s+", "", text)
    opcode, _, operands = bare.partition(" ")
    name = opcode.partition(".")[0]
    # A branch may have its condition among the operands, as in BRA.DIV ~URZ or BRA !P0.
    conditional = bare != text or ".DIV" in opcode or re.match(r"\s*[!~]?U?[PR]\w", operands) is not None
    label = re.search(r"`\(([^)]+)\)", operands) if name in ("BRA", "JMP") else None
    return Instruction(
        bare, _unit(SASS_UNITS, name), label[1] if label else None, name not in ("BRA", "JMP", "EXIT", "RET") or conditional,
        name == "EXIT", name == "CALL" and "slowpath" in operands, lines,
    )  # fmt: skip


def read_amd(assembly: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return the instructions of a kernel in AMD's assembly, and the place of each label."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    files = {name: str(Path(folder) / name) for folder, name in re.findall(r'\.file\s+\d+ "(.*?)" "(.*?)"', assembly)}
    lines: tuple[tuple[str, int], ...] = ()
    for raw in assembly.splitlines():
        if raw.lstrip().startswith(".loc"):
            found = re.findall(r"([^\s:\[]+):(\d+):\d+", raw.partition(";")[2])
            lines = tuple((files.get(name, name), int(line)) for name, line in found)
        elif match := AMD_LABEL.match(raw):
            labels[match["name"]] = len(instructions)
        elif match := re.match(r"\t(?P<text>[a-z]\w+[^;]*)", raw):
            instructions.append(_amd_instruction(match["text"].strip(), lines))
            if raw.startswith("\ts_endpgm") and "\n.Lfunc_end" not in assembly:
                break
        elif raw.startswith(".Lfunc_end"):
            break
    return instructions, labels


def _amd_instruction(text: str, lines: tuple[tuple[str, int], ...]) -> Instruction:
    name, _, operands = text.partition(" ")
    jump = operands.strip() if name.startswith(("s_branch", "s_cbranch")) else None
    ends = name in ("s_branch", "s_endpgm", "s_setpc_b64")
    return Instruction(text, _unit(AMD_UNITS, name), jump, not ends, name == "s_endpgm", False, lines)


def _unit(units: dict[str, str], name: str) -> str:
    return next((unit for unit, pattern in units.items() if re.match(pattern, name)), "integer")


def bytes_accessed(instruction: Instruction) -> int:
    """Return the bytes of global memory that an instruction reads or writes for each lane."""
    name = instruction.text.split()[0]
    if re.match(r"(LDG|STG|RED|ATOMG)\b", name):
        widths = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
        found = re.search(r"\.[US]?(8|16|32|64|128)\b", name)
        return widths[found[1]] if found else 4
    if match := re.match(
        r"(global|buffer|flat)_(load|store|atomic)\w*?_(s?byte|ubyte|short|ushort|sshort|dword)(x\d)?", name
    ):
        size = 1 if "byte" in match[3] else 2 if "short" in match[3] else 4
        return size * int((match[4] or "x1")[1:])
    return 0
