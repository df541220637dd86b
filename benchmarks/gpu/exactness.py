"""Look in compiled kernels for instructions that would change the bits.

For NVIDIA the PTX is the place to look: `ptxas` may neither fuse nor approximate operations that say ``.rn``, and what it makes
of a correctly rounded division or root (fused multiply-adds around a first guess) is correctly rounded. AMD's compiler expands
these before there is anything to read; there as many operations must be fused as its divisions and roots account for: more are
fused elsewhere, and with fewer some root is only the first guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["find_problems"]

PTX = {
    r"^fma\.|^mad\.\S*f(16|32|64)": "a product and a sum are fused",
    r"^(add|sub|mul|div|sqrt)\.(?!rn\.)\S*f(16|32|64)(x2)?\b": "not rounded to nearest",
    r"\.approx\b|\.full\b": "approximate",
    r"\.ftz\b": "denormals become zero",
    r"^(div|rem)\.[su]64": "64-bit division, a subroutine of a hundred instructions",
}
# Rounded to an integer a denormal is zero anyhow, with its sign: towards zero, to nearest, and downwards if it is positive.
ALWAYS_HARMLESS = re.compile(r"cvt\.r[zn]i\.ftz\.f32\.f32 ")
MAGNITUDE = "2147483647"  # all bits but that of the sign
PASS_ON_SIGNS = re.compile(
    r"(add|mul)\.rn\.f32(x2)?|min\.f32|mov\.b(32|64)|selp\.f32"
)  # x2: a pair of numbers in one register
FLOOR = re.compile(r"cvt\.rmi\.ftz\.f32\.f32 %\w+, (%\w+)")

FUSED = r"v_(pk_)?(fma|fmac|fmaak|fmamk|mad|mac|madak|madmk)(_legacy)?_(f16|f32|f64)"
FUSED_IN_DIVISION, FUSED_IN_ROOT = 5, 2
HIGH_WORD = "0xcf800000"  # -2^32: in the conversion to a 64-bit integer, where the fused operation is exact
INTEGER_DIVISION = (
    "0x4f7ffffe"  # what a reciprocal is multiplied by in the division of integers, which is corrected afterwards
)
APPROXIMATE = r"v_(rsq|exp|log|sin|cos)_(f16|f32|f64)"
MODES = {  # of the floating-point unit, in a kernel's header
    "denorm_mode_32 3": "denormals become zero",
    "denorm_mode_16_64 3": "denormals become zero",
    "round_mode_32 0": "not rounded to nearest",
    "round_mode_16_64 0": "not rounded to nearest",
}


def find_problems(assembly: str, target: str) -> list[str]:
    """Return what is wrong with the assembly of a kernel, as phrases; none if it computes what its source says."""
    instructions = list(instructions_of(assembly))
    if target.startswith("gfx"):
        return [*_amd_problems(instructions), *_amd_modes(assembly)]
    made_by: dict[str, list[str]] = {}
    for text in instructions:
        for result in _results_of(text):
            made_by.setdefault(result, []).append(text)
    return [
        f"{what}: {text}"
        for text in instructions
        for pattern, what in PTX.items()
        if re.search(pattern, text) and not _is_harmless(text, made_by)
    ]


def _is_harmless(text: str, made_by: dict[str, list[str]]) -> bool:
    """Return True for an instruction that says .ftz and cannot meet a denormal for which it matters."""
    floor = FLOOR.match(text)
    return bool(ALWAYS_HARMLESS.match(text) or (floor and _is_not_negative(floor[1], made_by, frozenset())))


def _is_not_negative(operand: str, made_by: dict[str, list[str]], above: frozenset[str]) -> bool:
    """Return True if the instructions that make an operand show that it is not negative; ``above`` have been asked already."""
    if operand.startswith("0f"):
        return operand[2] in "01234567"

    def shows(text: str) -> bool:
        opcode = text.partition(" ")[0]
        values = re.findall(r"[%\w]+", text.partition(" ")[2])[len(_results_of(text)) :]
        signs = [_is_not_negative(v, made_by, above | {operand}) for v in values[:2]]
        if PASS_ON_SIGNS.fullmatch(opcode):
            return all(signs)
        return (
            opcode == "abs.f32" or (opcode == "max.f32" and any(signs)) or (opcode == "and.b32" and MAGNITUDE in values)
        )

    return operand in above or (operand in made_by and all(map(shows, made_by[operand])))


def _results_of(text: str) -> list[str]:
    """Return the registers that an instruction of PTX writes: several stand in braces."""
    written = re.match(r"\S+ (\{[^}]*\}|%\w+)", text)
    return re.findall(r"%\w+", written[1]) if written else []


def instructions_of(assembly: str) -> Iterator[str]:
    """Yield the instructions of PTX or of AMD's assembly, without predicates, labels, directives and comments."""
    for line in assembly.splitlines():
        text = re.sub(r"//.*|;.*", "", line).strip()
        text = re.sub(r"^@!?%\w+\s+", "", text)
        if re.match(r"[a-z]\w*[. ]?", text) and not text.endswith(":"):
            yield " ".join(text.split())


def _amd_problems(instructions: list[str]) -> Iterator[str]:
    def those(pattern: str) -> list[str]:
        return [text for text in instructions if re.match(pattern, text)]

    divisions, roots = len(those(r"v_div_fixup_f32\b")), len(those(r"v_sqrt_f32"))
    holders = [re.split(r"[ ,]+", text)[1] for text in those(rf"[sv]_mov_b32\w* \w+, {HIGH_WORD}")]
    converting = re.compile(rf"\b({'|'.join([HIGH_WORD, *holders])})\b")
    fused = len([text for text in those(FUSED) if not converting.search(text)])
    accounted = FUSED_IN_DIVISION * divisions + FUSED_IN_ROOT * roots
    if fused != accounted:
        what = (
            "products and sums are fused" if fused > accounted else "approximate, operations that correct are missing"
        )
        yield f"{what}: {fused}, and {divisions} divisions and {roots} roots account for {accounted}"
    if len(those(r"v_rcp_f32")) > divisions + len(those(rf"v_mul_f32\w* .*{INTEGER_DIVISION}")):
        yield "approximate: a reciprocal that belongs to no division"
    yield from (f"approximate: {text}" for text in those(APPROXIMATE))


def _amd_modes(assembly: str) -> Iterator[str]:
    for mode, what in MODES.items():
        if f".amdhsa_float_{mode}" not in assembly:
            yield f"{what}: the kernel's header lacks {mode}"
