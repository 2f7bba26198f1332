"""The copy kernels without a GPU: compiled for GPUs, and compiled as C++ and run on random layouts."""

from __future__ import annotations

import ctypes
import mmap
import random
import re
from importlib import resources
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

from kernel_shim import COMPILER, KERNEL_FILE, KernelOnCpu, compile_kernels
from offload_worlds import KINDS, ended, random_world, round_trips

from lockstep_kv.offload import HostPool, RowFormat, host_pool
from lockstep_kv.offload.kernel_path import SLICE_BYTES, kernel_source

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    return compile_kernels(tmp_path_factory.mktemp("kernels"))


def compiled(architecture: str) -> str | int:
    """Compile the kernels for a real architecture (size of the binary) or a virtual one (PTX)."""
    nvrtc: ModuleType = pytest.importorskip("cuda.bindings.nvrtc", reason="the compiler NVRTC is not installed")

    def call(function: str, *arguments: object) -> tuple[object, ...]:
        code, *results = getattr(nvrtc, function)(*arguments)
        if code != nvrtc.nvrtcResult.NVRTC_SUCCESS and function != "nvrtcCompileProgram":
            pytest.fail(f"{function}: {code}")
        return code, *results

    _, program = call("nvrtcCreateProgram", kernel_source().encode(), b"copy_pages.cu", 0, [], [])
    options = [f"--gpu-architecture={architecture}".encode(), b"-std=c++17"]
    (code,) = call("nvrtcCompileProgram", program, len(options), options)
    _, size = call("nvrtcGetProgramLogSize", program)
    log = bytes(int(str(size)))
    call("nvrtcGetProgramLog", program, log)
    assert (code, log.strip(b"\0\n ")) == (nvrtc.nvrtcResult.NVRTC_SUCCESS, b""), log.decode()
    if architecture.startswith("sm_"):
        return int(str(call("nvrtcGetCUBINSize", program)[1]))
    _, size = call("nvrtcGetPTXSize", program)
    text = bytes(int(str(size)))
    call("nvrtcGetPTX", program, text)
    return text.decode()


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_the_kernels_compile_without_headers(architecture: str) -> None:
    size = compiled(architecture)
    assert isinstance(size, int)
    assert size > 1000


def test_aligned_pages_are_copied_16_bytes_at_a_time() -> None:
    code = str(compiled("compute_90"))
    for kernel in ("store_pages", "load_pages"):
        (body,) = re.findall(rf"\.entry {kernel}\(.*?^}}", code, re.DOTALL | re.MULTILINE)
        for access in ("ld", "st"):
            assert re.search(rf"\b{access}(\.global)?\.v(2\.u64|4\.u32)", body), (kernel, access)


def test_the_package_holds_the_kernels() -> None:
    assert kernel_source() == KERNEL_FILE.read_text(encoding="utf-8")
    assert resources.files("lockstep_kv.offload").joinpath(KERNEL_FILE.name).is_file()
    assert SLICE_BYTES % 16 == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(12))
def test_kernels_copy_random_layouts(kernels: ctypes.CDLL, kind: str, seed: int) -> None:
    world = random_world(kind, seed)
    rng = random.Random(seed)
    before = kernels.misaligned_accesses()
    engine = KernelOnCpu(world.row_format, world.pool, kernels, rng)
    round_trips(world, engine, rng)
    assert kernels.misaligned_accesses() == before, world.log
    engine.shutdown()


@pytest.mark.parametrize("shift", range(17))
def test_every_alignment_of_one_page(kernels: ctypes.CDLL, shift: int) -> None:
    """Pages of every length up to 40 bytes, `shift` bytes off on the device, in places of every alignment."""
    rng = random.Random(shift)
    misaligned = kernels.misaligned_accesses()
    for page in range(1, 41):
        memory = torch.randint(256, (shift + 4 * page,), dtype=torch.uint8)
        row_format = RowFormat([[memory[shift:].view(4, page)]], blocks_per_row=16)
        pool = HostPool(row_format.row_bytes, row_format.row_bytes, pinned=False)
        engine = KernelOnCpu(row_format, pool, kernels, rng)
        before = memory.clone()
        slot = rng.randrange(16)
        engine.submit_store(0, 0, [2], [0], [slot])
        assert ended(engine, 0) == (True, page)
        expected = torch.zeros_like(pool.memory)
        expected[slot * page : (slot + 1) * page] = memory[shift + 2 * page : shift + 3 * page]
        assert torch.equal(pool.memory, expected)
        engine.submit_load(1, 0, [1], [0], [slot])
        assert ended(engine, 1) == (True, page)
        before[shift + page : shift + 2 * page] = before[shift + 2 * page : shift + 3 * page]
        assert torch.equal(memory, before)
        engine.shutdown()
    assert kernels.misaligned_accesses() == misaligned


def test_misaligned_accesses_would_be_counted(kernels: ctypes.CDLL) -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    aligned = memory.data_ptr() + -memory.data_ptr() % 16
    before = kernels.misaligned_accesses()
    kernels.read_word8(ctypes.c_void_p(aligned + 8))
    assert kernels.misaligned_accesses() == before
    kernels.read_word8(ctypes.c_void_p(aligned + 4))
    assert kernels.misaligned_accesses() == before + 1


def test_offsets_beyond_32_bits(kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Memory and files that are never written to take no space, so this needs almost none.
    monkeypatch.setattr(host_pool, "host_bytes_left", lambda: None)
    size, page = 5 << 30, 64 << 10
    with (tmp_path / "sparse").open("w+b") as file:
        file.truncate(size)
        mapped = mmap.mmap(file.fileno(), size)
    pages = torch.frombuffer(mapped, dtype=torch.uint8).view(-1, page)
    last, half = len(pages) - 1, len(pages) // 2
    # Two layers, one after the other, as a cache has them: addresses and strides are far apart.
    row_format = RowFormat([[pages[:half], pages[half:]], [pages]], blocks_per_row=1)
    pool = HostPool(3 << 30, row_format.row_bytes, pinned=False)
    assert (last * page, (pool.num_rows - 1) * pool.row_stride) > (2**32, 2**31)
    engine = KernelOnCpu(row_format, pool, kernels, random.Random(0))
    row = pool.num_rows - 1
    content = torch.randint(256, (3, page), dtype=torch.uint8)
    pages[last], pages[half - 1], pages[7] = content
    engine.submit_store(0, 0, [half - 1], [row], [0])
    engine.submit_store(1, 1, [last, 7], [row - 1, 3], [0, 0])
    engine.wait([0, 1])
    assert [job.ok for job in engine.finished()] == [True, True]
    assert torch.equal(pool.row(row), torch.cat([content[1], content[0]]))
    assert torch.equal(pool.row(row - 1)[:page], content[0])
    assert torch.equal(pool.row(3)[:page], content[2])
    for block in (last, half - 1, 7):
        pages[block] = 0
    engine.submit_load(2, 1, [7, last - 1], [row - 1, 3], [0, 0])
    assert ended(engine, 2)[0]
    assert torch.equal(pages[7], content[0])
    assert torch.equal(pages[last - 1], content[2])
    assert pages[last].count_nonzero() == 0
    engine.shutdown()
