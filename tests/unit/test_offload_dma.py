"""The driver's batched copy, called through a stand-in that CUDA's own headers define the type of."""

from __future__ import annotations

import ctypes
import random
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

from kernel_shim import COMPILER, compile_library
from offload_worlds import KINDS, ended, random_world, round_trips

from lockstep_kv.offload import CpuCopyEngine, HostPool, RowFormat, dma_path
from lockstep_kv.offload.copy_paths import CopyStream
from lockstep_kv.offload.transfers import Pieces

if TYPE_CHECKING:
    from lockstep_kv.offload.transfers import Transfer


def header_folder() -> Path | None:
    """Where CUDA's headers were installed with its runtime."""
    try:
        files = metadata.files("nvidia-cuda-runtime") or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())).parent for file in files if file.name == "cudaTypedefs.h"), None)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    headers = header_folder()
    if COMPILER is None or headers is None:
        pytest.skip("there is no C++ compiler, or there are no CUDA headers")
    library = compile_library(tmp_path_factory.mktemp("driver"), "driver_shim.cpp", ["-isystem", str(headers)])
    library.batch_function.restype = ctypes.c_void_p
    library.batch_calls.restype = ctypes.c_size_t
    return library


class DmaOnCpu(CpuCopyEngine):
    """Copies by the path for a GPU's copy engines."""

    path: dma_path.DmaPath
    stream = 5

    def copy(self, transfer: Transfer) -> None:
        page_set = self.row_format.sets[transfer.set_id]
        pieces = Pieces.of(transfer, page_set, self.pool.memory.data_ptr())
        self.path.enqueue(transfer, pieces, CopyStream(None, SimpleNamespace(cuda_stream=self.stream)))  # type: ignore[arg-type]


@pytest.fixture
def path(driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> dma_path.DmaPath:
    monkeypatch.setattr(dma_path, "_batch_function", lambda: dma_path.batch_prototype()(driver.batch_function()))
    return dma_path.DmaPath()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_batches_copy_random_layouts(
    path: dma_path.DmaPath, kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dma_path, "_BATCH_PIECES", 1 + seed)
    world = random_world(kind, seed)
    engine = DmaOnCpu(world.row_format, world.pool)
    engine.path = path
    round_trips(world, engine, random.Random(seed))
    engine.shutdown()


def test_attributes_are_laid_out_as_the_driver_s(driver: ctypes.CDLL) -> None:
    driver.attributes_size.restype = ctypes.c_size_t
    assert ctypes.sizeof(dma_path.CopyAttributes) == driver.attributes_size()


def test_long_jobs_go_in_several_batches(path: dma_path.DmaPath, driver: ctypes.CDLL) -> None:
    pages = torch.arange(20_000, dtype=torch.int16).view(10_000, 2)
    row_format = RowFormat([[pages]], blocks_per_row=5000)
    pool = HostPool(row_format.row_bytes, row_format.row_bytes, pinned=False)
    engine = DmaOnCpu(row_format, pool)
    engine.path = path
    before = driver.batch_calls()
    engine.submit_store(0, 0, range(1, 9999, 2), [0] * 4999, range(4999))
    assert ended(engine, 0) == (True, 4999 * 4)
    assert driver.batch_calls() == before + 2
    stored = pool.memory.view(torch.int16)[: 2 * 4999].view(-1, 2)
    assert torch.equal(stored, pages[1:9999:2])
    engine.shutdown()


def test_what_the_driver_refuses_fails_the_job(path: dma_path.DmaPath, caplog: pytest.LogCaptureFixture) -> None:
    world = random_world("one layer", 0)
    engine = DmaOnCpu(world.row_format, world.pool)
    engine.path = path
    engine.stream = 0
    engine.submit_store(0, 0, [1], [0], [0])
    assert ended(engine, 0) == (False, 0)
    assert [record.getMessage() for record in caplog.records] == [
        "store of 1 blocks of set 0 failed: RuntimeError: cuMemcpyBatchAsync of 1 pieces failed with error 1"
    ]
    engine.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_without_batches_pieces_go_one_by_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = []

    def memcpy_async(to: int, source: int, size: int, kind: int, stream: int) -> None:
        kinds.append(kind)
        assert stream == DmaOnCpu.stream
        ctypes.memmove(to, source, size)

    runtime = SimpleNamespace(memcpyAsync=memcpy_async, memcpyHostToDevice=1, memcpyDeviceToHost=2)
    monkeypatch.setattr(dma_path, "_batch_function", lambda: None)
    monkeypatch.setattr(dma_path, "cupy_module", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    world = random_world(kind, 1)
    engine = DmaOnCpu(world.row_format, world.pool)
    engine.path = dma_path.DmaPath()
    engine.submit_store(0, 0, [1, 3], [0, 1], [0, 0])
    assert ended(engine, 0)[0]
    assert set(kinds) == {runtime.memcpyDeviceToHost}
    kinds.clear()
    engine.submit_load(0, 0, [1, 3], [0, 1], [0, 0])
    assert ended(engine, 0)[0]
    assert set(kinds) == {runtime.memcpyHostToDevice}
    round_trips(world, engine, random.Random(1))
    engine.shutdown()


def test_without_a_driver_there_are_no_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> ctypes.CDLL:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    assert dma_path._batch_function() is None
