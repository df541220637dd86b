"""Reading machine code: what counts as wrong, which path counts, and what that would cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu.exactness import find_problems
from benchmarks.gpu.machine_code import bytes_accessed, read_amd, read_sass
from benchmarks.gpu.paths import common_path, seldom_lines, take_loops_once
from benchmarks.gpu.recording import Launch, Recorded
from benchmarks.gpu.roofline import GPUS, Cost, estimate_seconds, fits_in_cache, limit_of
from benchmarks.gpu_code import Finding, moved_too_much

GOOD_PTX = """
// fma.rn.f32 in a comment
	.loc	1 6 44
$L__BB0_2:
	mul.rn.f32 	%r1, %r2, %r3;
	@%p1 add.rn.f32 	%r1, %r2, %r3;
	sqrt.rn.f32 	%r4, %r1;
	div.rn.f32 	%r4, %r1, %r2;
	mad.lo.s32 	%r4, %r1, 5, %r2;
	mul.wide.u32 	%rd4, %r1, 5;
	cvt.rzi.ftz.f32.f32 	%r4, %r1;
	max.f32 	%r4, %r1, %r2;
	abs.f32 	%r5, %r4;
	add.rn.f32 	%r6, %r5, 0f3EFFFFFF;
	cvt.rmi.ftz.f32.f32 	%r7, %r6;
	mov.b64 	%rd1, {%r5, %r5};
	mov.b64 	%rd2, {0f3EFFFFFF, 0f3EFFFFFF};
	add.rn.f32x2 	%rd3, %rd1, %rd2;
	mov.b64 	{%r10, %r11}, %rd3;
	cvt.rmi.ftz.f32.f32 	%r12, %r11;
"""
AMD_HEADER = """
	.amdhsa_float_round_mode_32 0
	.amdhsa_float_round_mode_16_64 0
	.amdhsa_float_denorm_mode_32 3
	.amdhsa_float_denorm_mode_16_64 3
"""


def test_what_is_rounded_to_nearest_one_operation_at_a_time_is_fine() -> None:
    assert find_problems(GOOD_PTX, "sm_90") == []


@pytest.mark.parametrize(
    ("instruction", "what"),
    [
        ("fma.rn.f32 %r1, %r2, %r3, %r4", "fused"),
        ("@%p3 fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4", "fused"),
        ("add.f32 %r1, %r2, %r3", "not rounded to nearest"),
        ("mul.rz.f32 %r1, %r2, %r3", "not rounded to nearest"),
        ("sqrt.approx.ftz.f32 %r1, %r2", "approximate"),
        ("div.full.f32 %r1, %r2, %r3", "approximate"),
        ("cvt.rmi.ftz.f32.f32 %r9, %r2", "denormals become zero"),
        ("add.rn.f32 %r8, %r5, 0fBEFFFFFF;\n\tcvt.rmi.ftz.f32.f32 %r9, %r8", "denormals become zero"),
        ("add.f32x2 %rd4, %rd1, %rd2", "not rounded to nearest"),
        ("mov.b64 %rd4, {%r5, %r4};\n\tmov.b64 {%r13, %r14}, %rd4;\n\tcvt.rmi.ftz.f32.f32 %r15, %r13", "denormals"),
        ("rem.u64 %rd1, %rd2, %rd3", "64-bit division"),
        ("div.s64 %rd1, %rd2, %rd3", "64-bit division"),
    ],
)
def test_what_would_change_bits_is_found_in_ptx(instruction: str, what: str) -> None:
    assert any(what in problem for problem in find_problems(f"{GOOD_PTX}\t{instruction};\n", "sm_90"))


ROOT = "\tv_sqrt_f32_e32 v9, v7\n" + "\tv_fma_f32 v11, -v10, v9, v7\n" * 2
DIVISION = "\tv_rcp_f32_e32 v1, v2\n" + "\tv_fma_f32 v3, v1, v2, v4\n" * 5 + "\tv_div_fixup_f32 v1, v3, v2, v4\n"


def test_amd_divisions_and_roots_account_for_fused_operations() -> None:
    assert find_problems(AMD_HEADER + ROOT + DIVISION, "gfx942") == []


def test_amd_arithmetic_of_integers_is_not_that_of_floats() -> None:
    to_64_bits = "\ts_mov_b32 s68, 0xcf800000\n\tv_fma_f32 v1, v2, s68, v3\n\tv_fmac_f32_e32 v1, 0xcf800000, v2\n"
    division = "\tv_rcp_f32_e32 v2, v2\n\tv_mul_f32_e32 v2, 0x4f7ffffe, v2\n"
    assert find_problems(AMD_HEADER + to_64_bits + division, "gfx942") == []


@pytest.mark.parametrize(
    ("assembly", "what"),
    [
        (AMD_HEADER + ROOT + "\tv_fmac_f32_e32 v1, v2, v3\n", "fused: 3, and 0 divisions and 1 roots account for 2"),
        (AMD_HEADER + "\tv_pk_fma_f32 v[1:2], v[3:4], v[5:6], v[7:8]\n", "fused"),
        (AMD_HEADER + "\tv_rcp_f32_e32 v1, v2\n", "reciprocal"),
        (AMD_HEADER + ROOT + "\tv_sqrt_f32_e32 v9, v7\n", "approximate, operations that correct are missing"),
        (AMD_HEADER + "\tv_log_f32_e32 v1, v2\n", "approximate"),
        (AMD_HEADER.replace("denorm_mode_32 3", "denorm_mode_32 0"), "denormals become zero"),
        (AMD_HEADER.replace("round_mode_32 0", "round_mode_32 3"), "not rounded to nearest"),
    ],
)
def test_what_would_change_bits_is_found_in_amd_assembly(assembly: str, what: str) -> None:
    assert any(what in problem for problem in find_problems(assembly, "gfx942"))


SASS = """
kernel:
.text.kernel:
	//## File "{file}", line 1
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/               @P0 EXIT ;
.L_x_0:
        /*0020*/                   LDG.E.U8 R2, desc[UR8][R12.64] ;
        /*0030*/               @P1 BRA `(.L_x_1) ;
	//## File "{file}", line 7 inlined at "{file}", line 4
	//## File "{file}", line 4
        /*0040*/                   FADD R3, R3, R4 ;
        /*0050*/                   FADD R3, R3, R4 ;
        /*0060*/                   FADD R3, R3, R4 ;
.L_x_1:
	//## File "{file}", line 5
        /*0070*/              @!P2 BRA `(.L_x_2) ;
        /*0080*/                   CALL.REL.NOINC `($__internal_0_$__cuda_sm20_sqrt_rn_f32_slowpath) ;
        /*0090*/                   BRA `(.L_x_3) ;
.L_x_2:
        /*00a0*/                   MUFU.RSQ R2, R3 ;
.L_x_3:
        /*00b0*/                   STG.E.128 desc[UR8][R2.64], R10 ;
        /*00c0*/               @P3 BRA `(.L_x_0) ;
        /*00d0*/                   EXIT ;
.L_x_4:
        /*00e0*/                   BRA `(.L_x_4);
$__internal_0_$__cuda_sm20_sqrt_rn_f32_slowpath:
        /*00f0*/                   FADD R3, R3, R4 ;
"""
SOURCE = """def kernel():
    common()
    if at_risk:  # seldom: a block in a hundred
        rare()
    common()
def rare():
    pass
"""


def test_the_common_path_leaves_out_what_the_source_marks_as_seldom_and_slow_paths(tmp_path: Path) -> None:
    source = tmp_path / "kernel.py"
    source.write_text(SOURCE)
    path = common_path(*read_sass(SASS.format(file=source)))
    assert [i.text.split()[0] for i in path.outside] == ["LDC", "EXIT", "EXIT"]
    assert [i.text.split()[0] for i in path.inside] == ["LDG.E.U8", "BRA", "BRA", "MUFU.RSQ", "STG.E.128", "BRA"]
    assert sum(map(bytes_accessed, path.instructions)) == 17


def test_the_dearer_branch_counts_if_nothing_is_marked() -> None:
    path = common_path(*read_sass(SASS.format(file="nowhere.py")))
    assert sum(i.unit == "float" for i in path.inside) == 3


def test_a_program_that_is_all_seldom_has_no_common_path(tmp_path: Path) -> None:
    source = tmp_path / "kernel.py"
    source.write_text("def kernel():  # seldom\n    pass\n")
    code = f'//## File "{source}", line 2\n/*0000*/ NOP ;\n/*0010*/ EXIT ;'
    with pytest.raises(ValueError, match="first block is marked as seldom"):
        common_path(*read_sass(code))
    with pytest.raises(ValueError, match="every path"):
        common_path(*read_sass(f"/*0000*/ NOP ;\n.L_x_0:\n{code}"))


def test_a_call_of_a_label_is_a_jump() -> None:
    loop = ".L_x_0:\n/*0000*/ STG R1 ;\n/*0010*/ @!P1 CALL.REL.NOINC `(.L_x_1) ;\n/*0020*/ BRA `(.L_x_0) ;\n"
    code = f"{loop}.L_x_1:\n/*0030*/ EXIT ;"
    path = common_path(*read_sass(code))
    assert [i.text.split()[0] for i in path.inside] == ["STG", "CALL.REL.NOINC", "BRA"]
    assert [i.text for i in path.outside] == ["EXIT"]


def test_the_condition_of_a_seldom_branch_and_its_else_are_not_seldom(tmp_path: Path) -> None:
    source = tmp_path / "kernel.py"
    source.write_text(SOURCE.replace("    common()\ndef", "    else:\n        common()\ndef"))
    assert seldom_lines(str(source)) == {4}
    assert seldom_lines("nowhere.py") == frozenset()


def test_loops_are_taken_once_whichever_end_has_the_test() -> None:
    at_the_top = {0: {1}, 1: {2, 3}, 2: {1}, 3: set[int]()}
    assert take_loops_once(at_the_top) == {1, 2}
    assert at_the_top == {0: {1}, 1: {2, 3}, 2: {3}, 3: set()}
    nested = {0: {1}, 1: {2, 5}, 2: {3, 4}, 3: {2}, 4: {1}, 5: set[int]()}
    assert take_loops_once(nested) == {1, 2, 3, 4}
    assert nested == {0: {1}, 1: {2, 5}, 2: {3, 4}, 3: {4}, 4: {5}, 5: set()}


AMD = """
	.file	1 "/src" "kernel.py"
kernel:
	s_load_dwordx2 s[0:1], s[2:3], 0x0
.LBB0_1:
	.loc	1 7 14                          ; kernel.py:7:14 @[ kernel.py:4:2 ]
	v_mul_lo_u32 v1, v2, v3
	s_cbranch_execz .LBB0_2
	v_sqrt_f32_e32 v1, v1
	global_load_dwordx4 v[1:4], v0, s[0:1]
.LBB0_2:
	v_add_f32_e32 v1, v1, v2
	global_store_byte v0, v1, s[0:1]
	s_cbranch_scc1 .LBB0_1
	s_endpgm
.Lfunc_end0:
	s_nop 0
"""


def test_amd_assembly_is_read() -> None:
    instructions, labels = read_amd(AMD)
    assert len(instructions) == 9
    assert labels == {".LBB0_1": 1, ".LBB0_2": 5}
    assert instructions[1].lines == (("/src/kernel.py", 7), ("/src/kernel.py", 4))
    path = common_path(instructions, labels)
    assert [i.unit for i in path.outside] == ["control", "control"]
    units = ["product", "control", "special", "memory", "float", "memory", "control"]
    assert [i.unit for i in path.inside] == units
    assert sum(map(bytes_accessed, path.inside)) == 17


def test_time_is_that_of_the_scarcer_resource() -> None:
    gpu = GPUS["H100"]
    moving = Cost({"float": 1.0}, 12.0, 12.0)
    assert estimate_seconds(moving, gpu, 1e9) == pytest.approx(12e9 / 3.35e12)
    assert limit_of(moving, gpu) == "memory"
    computing = Cost({"integer": 64.0, "float": 10.0}, 4.0, 4.0)
    assert estimate_seconds(computing, gpu, 1e9) == pytest.approx(1e9 / (132 * 1.98e9))
    assert limit_of(computing, gpu) == "instructions"
    products = Cost({"product": 16.0, "control": 100.0}, 0.0, 0.0)
    assert estimate_seconds(products, GPUS["MI300X"], 1e9) == pytest.approx(1e9 / (304 * 2.1e9))


def test_blocks_in_work_are_those_that_registers_and_warps_allow() -> None:
    gpu = GPUS["A100"]
    assert gpu.programs(registers=128, warps=1) == 108 * 16
    assert gpu.programs(registers=20, warps=4) == 108 * 16
    assert GPUS["MI300X"].programs(registers=128, warps=2) == 304 * 4 * 4 // 2
    assert fits_in_cache(gpu, 40e6 / (108 * 16), registers=128, warps=1)
    assert not fits_in_cache(gpu, 41e6 / (108 * 16), registers=128, warps=1)


@pytest.mark.parametrize(
    ("moved", "scratch", "row", "what"),
    [(10.9, 0, 2304, ""), (11.1, 0, 2304, "11.1 bytes"), (19, 8, 2304, ""), (10, 0, 9000, "cache of the A100")],
)
def test_operations_that_move_too_much_are_named(moved: float, scratch: float, row: int, what: str) -> None:
    launch = Launch("step", "module", "step", {}, {"R": 1, "C": 64}, [], num_warps=1, programs=1, row=row)
    found = {(launch.identity, "sm_80"): Finding("step", "sm_80", 128, 1.0, 1.0, [])}
    problems = list(moved_too_much([Recorded("a step", 10, scratch, moved, [launch])], found))
    assert len(problems) == bool(what)
    assert all(what in problem for problem in problems)
