"""What is read from machine code, on a few lines of it; tests/kernels/test_triton_compiles.py reads that of kernels."""

import importlib.util

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from benchmarks.attention.compiled import Code, Stretch, fewest_products, needed, repeats, stretches
from longstride.kernels.backends.triton.configurations import Configuration

PROGRAM = """
.text.kernel:
        /*0000*/                   STL [R1], R2 ;
        /*0010*/               @P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, R120, gdesc[UR4].tnspB, R24, gsb0 ;
.L_x_4:
        /*0040*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R5 ;
        /*0050*/              @!P1 BRA `(.L_x_4) ;
        /*0060*/                   MUFU.EX2 R2, R2 ;
        /*0070*/               @P2 BRA `(.L_x_1) ;
.L_x_2:
        /*0080*/               @P3 EXIT ;
.L_x_3:
        /*0090*/                   LDL R2, [R1] ;
        /*00a0*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*00b0*/              @!P4 BRA `(.L_x_3) ;
        /*00c0*/                   EXIT ;
.L_x_5:
        /*00d0*/                   BRA `(.L_x_5);
"""


def test_loops_are_found_and_visits_among_them() -> None:
    loops, outside = stretches(PROGRAM)
    visit, wait, narrow = loops
    assert visit.products == {"64x64x16": 2}
    assert (wait.instructions, wait.products) == (2, {})
    assert narrow.products == {"16x8x16": 1} and narrow.local == 1
    assert outside.local == 1 and outside.products == {}
    code = Code(128, 8, 40_960, 8, loops, outside)
    assert code.visits("forward") == (visit, narrow) and code.visits("closed") == (outside,)


@pytest.mark.parametrize(
    "registers, shared, warps, programs", [(128, 1024, 8, 2), (129, 1024, 8, 1), (32, 1024, 4, 16), (32, 57_000, 4, 4)]
)
def test_programs_share_registers_memory_and_threads(registers: int, shared: int, warps: int, programs: int) -> None:
    nothing = Stretch(0, {}, 0, 0)
    assert Code(registers, 0, shared, warps, (), nothing).programs("sm_90") == programs


def test_warps_that_compute_the_same_are_counted() -> None:
    wide, narrow = Configuration(64, 128, 8, 2), Configuration(64, 64, 8, 2)
    assert [fewest_products("dkdv", one, 128, 128) for one in (wide, narrow)] == [24, 24]
    assert needed("dkdv", wide, 128, 128) == 4 * 64 * 128 * 128
    by_rows = Stretch(434, {"64x128x16": 8, "64x64x16": 16}, 32, 0)
    twice = Stretch(471, {"64x32x16": 32, "64x64x16": 8}, 32, 0)
    assert repeats(by_rows, "dkdv", wide, 128, 128) == 1.0
    assert repeats(twice, "dkdv", narrow, 128, 128) == 1.5
