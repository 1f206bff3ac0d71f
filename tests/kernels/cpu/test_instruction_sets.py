"""The CPU kernels of other machines than this one: their sources by instruction set, and AMX tiles in an emulator.
Called by pytest where there is a C++ compiler; calls kernels/cpu/backend.py and tests/emulator/amx.h.
Judged as in test_cpu_backend.py, whose checks run on the emulated build.
"""

import ctypes
import platform
import subprocess
from pathlib import Path

import pytest
import test_cpu_backend as checks
import torch
from fast_cases import others_slow

from thunder_moe.kernels import host_code
from thunder_moe.kernels.cpu import backend as cpu
from thunder_moe.kernels.cpu.crossover import NEVER, Limits, limits_are

EMULATOR = Path(__file__).parents[2] / "emulator" / "amx.h"
SETS = ("x86-64-v2", "skylake-avx512", "sapphirerapids")
OTHER_SETS = ("haswell", "cooperlake")
pytestmark = [
    pytest.mark.skipif(cpu.unavailable_reason() is not None, reason=str(cpu.unavailable_reason())),
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the sets are those of x86"),
]


def compiler(*options):
    from torch.utils.cpp_extension import include_paths

    includes = [f"-I{path}" for path in include_paths()]
    return [*host_code.compiler(), "-std=c++20", *includes, *options]


@pytest.mark.slow
@pytest.mark.parametrize("instructions", [*SETS, *others_slow(OTHER_SETS, exhaustive=True)])
def test_the_sources_compile_for_every_instruction_set(instructions):
    first, second = cpu._SOURCES[:2]  # the others have no code of their own for any
    both = f'#include "{first}"\nnamespace second {{\n#include "{second}"\n}}\n'  # reads the headers of torch once
    command = compiler("-fsyntax-only", f"-march={instructions}", "-x", "c++", "-")
    run = subprocess.run(command, input=both, capture_output=True, text=True, check=False)
    if "bad value" in run.stderr:
        pytest.skip(f"the compiler does not know {instructions}")
    assert run.returncode == 0, run.stderr


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """Return the kernels with AMX in an emulator, which treats subnormals like the hardware."""
    if not {"avx512_fp16", "avx512_bf16"} <= cpu._cpu_flags():
        pytest.skip("tiles are decoded by AVX512-FP16, which this CPU lacks")
    library = tmp_path_factory.mktemp("emulated") / "tiles.so"
    sources = [str(source) for source in cpu._SOURCES]
    options = ["-O1", "-march=native", "-fPIC", "-shared", "-include", str(EMULATOR), "-o", str(library)]
    libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]  # of this process
    run = subprocess.run(compiler(*options, *sources, *libraries), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return cpu._declare(ctypes.CDLL(str(library)))


@pytest.fixture
def tiles(emulated, monkeypatch):
    monkeypatch.setattr(cpu, "_loaded", lambda: (emulated, None))
    assert emulated.thunder_moe_kernels() & cpu._TILES
    with limits_are(Limits(tiles=NEVER)):
        yield


HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_tiles(tiles, dtype):
    for i, rows in enumerate(checks.ROWS.values()):
        checks.check_grouped_mm(rows, checks.SHAPES[i % len(checks.SHAPES)], dtype, per_column=i % 2 == 0)
    checks.test_every_number_of_rows(dtype, "tiles")
    checks.test_nan_and_infinity_spread_as_in_ieee_arithmetic(dtype, "tiles")
    checks.test_row_ends_and_slots_out_of_range_touch_nothing(dtype, "tiles")
    for byte in (0x7F, 0xFF):
        checks.test_nan_scale_stays_in_its_column(byte, dtype, "tiles")
    for rows in ((2, 0, 3), (20, 0, 15)):
        checks.test_poison_outside_the_operands_is_not_read(rows, dtype, "tiles")
    for name in checks.RANGES:
        for factor in (1.0, 1e-4, 1e-30):
            checks.check_activations_of_every_size(name, dtype, factor, (13, 7, 30))


@pytest.mark.slow
def test_tiles_decode_and_multiply_exactly(tiles):
    checks.test_every_code_and_scale_multiplies_exactly(13, "tiles")
    checks.test_fp16_is_multiplied_exactly_before_the_sum("tiles")


@pytest.mark.slow
def test_tiles_beside_the_other_kernels(tiles):
    """Experts of one call by gemv, tiles, slices and panels: a thread's tiles are configured by two libraries."""
    for limits in (Limits(2, 40, fma=True, tiles=24), Limits(2, 13, tiles=12), Limits(tiles=12, fp32_slices=True)):
        with limits_are(limits):
            for dtype in HALVES:
                checks.check_grouped_mm((13, 1, 12, 70, 0, 2, 24, 41), (66, 272), dtype, per_column=False)
