"""GPU memory that other processes map: the driver's virtual memory management, through cuda.bindings.

Who creates memory exports it as a file descriptor; who imports that maps it for a GPU of its own. The memory lives as
long as anybody has it mapped, also when the process that created it is gone.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from flexep.errors import Unavailable
from flexep.transport._memory import array_interface


def load_driver() -> Any:
    """cuda.bindings.driver, initialised: imported when it is first needed, because nothing else needs it.

    Raises Unavailable naming the package that is missing, or what is wrong with the driver.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise Unavailable(
            "GPU memory of other processes needs the package cuda-bindings, which comes with torch for CUDA 13: "
            f"{error}"
        ) from error
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:  # the package finds the driver's library only now
        raise Unavailable(f"no CUDA driver: {error}") from error
    if status != 0:
        raise Unavailable(f"no CUDA GPU: cuInit: {status.name}")
    return driver


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream: nothing may wait for the device then."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Gpu:
    """One GPU as the driver knows it. Methods raise Unavailable with the driver's name for what went wrong.

    Attributes: `ordinal` (torch's number of it in this process), `uuid` (the same in every process).
    """

    def __init__(self, ordinal: int) -> None:
        self.driver = load_driver()
        self.ordinal = ordinal
        self._device = self.call("cuDeviceGet", ordinal)
        self.uuid = bytes(self.call("cuDeviceGetUuid", self._device).bytes).hex()
        self._context = self.call("cuDevicePrimaryCtxRetain", self._device)  # torch's own
        release = self.driver.cuDevicePrimaryCtxRelease
        weakref.finalize(self, _unless_forked, os.getpid(), release, self._device).atexit = False

    def call(self, name: str, *arguments: Any) -> Any:
        """What the driver's function returns beside its status."""
        status, *values = getattr(self.driver, name)(*arguments)
        if status != 0:
            raise Unavailable(f"{name}: {status.name}")
        return values[0] if len(values) == 1 else tuple(values)

    def reaches(self) -> dict[str, bool]:
        """{uuid: whether this GPU can load and store its memory} of all GPUs that this process sees."""
        found = {}
        for ordinal in range(self.call("cuDeviceGetCount")):
            other = self.call("cuDeviceGet", ordinal)
            itself = ordinal == self.ordinal
            access = itself or bool(self.call("cuDeviceCanAccessPeer", self._device, other))
            found[bytes(self.call("cuDeviceGetUuid", other).bytes).hex()] = access
        return found

    @contextmanager
    def current(self) -> Iterator[None]:
        """The calling thread's context is this GPU's meanwhile."""
        self.call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self.driver.cuCtxPopCurrent()

    def free_bytes(self) -> int:
        with self.current():
            return int(self.call("cuMemGetInfo")[0])

    @property
    def descriptor(self) -> Any:
        """The kind of handle that processes of one host pass to each other."""
        return self.driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    @property
    def fabric(self) -> Any:
        """The kind of handle that also goes from host to host, where a service of the driver permits it."""
        return self.driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC

    def granularity(self) -> int:
        """Memory is a multiple of so many bytes."""
        which = self.driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return int(self.call("cuMemGetAllocationGranularity", self._properties(self.descriptor), which))

    def try_handle(self, kind: Any) -> None:
        """Raises Unavailable unless memory of this GPU can be exported and opened again as that kind of handle.

        A device attribute says what the hardware could do, but not whether it may.
        """
        with self.create(self.granularity(), kind).kept_unless_failed() as memory:
            handle = self.export(memory, kind)
            try:
                self.open(handle, memory.nbytes)
            finally:
                if isinstance(handle, int):
                    os.close(handle)

    def create(self, nbytes: int, kind: Any) -> GpuMapping:
        """Zeroed memory of this GPU that can be exported as `kind`, mapped for this GPU; `nbytes` is a multiple of the
        granularity."""
        release_waiting()
        with self.current():
            handle = self.call("cuMemCreate", nbytes, self._properties(kind), 0)
            with GpuMapping(self, handle, nbytes).kept_unless_failed() as mapping:
                self.call("cuMemsetD8", mapping.address, 0, nbytes)
                self.call("cuCtxSynchronize")
        return mapping

    def export(self, mapping: GpuMapping, kind: Any) -> int | bytes:
        """A handle of memory that was created here: a descriptor, which the caller closes, or a fabric handle."""
        exported = self.call("cuMemExportToShareableHandle", mapping.handle, kind, 0)
        return int(exported) if kind == self.descriptor else bytes(exported.data)

    def open(self, handle: int | bytes, nbytes: int) -> GpuMapping:
        """Memory behind a handle, mapped for this GPU. A descriptor may be closed afterwards."""
        kind = self.descriptor if isinstance(handle, int) else self.fabric
        with self.current():
            memory = self.call("cuMemImportFromShareableHandle", handle, kind)
            return GpuMapping(self, memory, nbytes)

    def _properties(self, handle_kind: Any) -> Any:
        made = self.driver.CUmemAllocationProp()
        made.type = self.driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        made.requestedHandleTypes = handle_kind
        made.location = self._location()
        return made

    def _location(self) -> Any:
        location = self.driver.CUmemLocation()
        location.type = self.driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = self.ordinal
        return location

    def access(self) -> Any:
        """Loads and stores by this GPU."""
        made = self.driver.CUmemAccessDesc()
        made.location = self._location()
        made.flags = self.driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return made


class GpuMapping:
    """Memory mapped for one GPU. Let go of when neither this object nor a view of it is left and the GPU has done all
    that it was told to do.

    What is let go of while a graph is captured waits for the next that is not, or for the next memory that is
    created. At interpreter exit the memory stays until the process is gone.
    """

    def __init__(self, gpu: Gpu, handle: Any, nbytes: int) -> None:
        """Takes over `handle`, also when it raises Unavailable."""
        self.gpu = gpu
        self.handle = handle
        self.nbytes = nbytes
        driver = gpu.driver
        with ExitStack() as undo:
            undo.callback(driver.cuMemRelease, handle)
            self.address = int(gpu.call("cuMemAddressReserve", nbytes, 0, 0, 0))
            undo.callback(driver.cuMemAddressFree, self.address, nbytes)
            gpu.call("cuMemMap", self.address, nbytes, 0, handle, 0)
            undo.callback(driver.cuMemUnmap, self.address, nbytes)
            gpu.call("cuMemSetAccess", self.address, nbytes, [gpu.access()], 1)
            self._release = weakref.finalize(self, _unless_forked, os.getpid(), _let_go, gpu, undo.pop_all())
            self._release.atexit = False

    @contextmanager
    def kept_unless_failed(self) -> Iterator[GpuMapping]:
        """Lets go at once where the block raises: the error's traceback refers to this object."""
        try:
            yield self
        except BaseException:
            self._release()
            raise

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] at `offset`, without a copy."""
        return torch.as_tensor(_GpuBytes(self, offset, nbytes), device=torch.device("cuda", self.gpu.ordinal))

    def read(self, offset: int, nbytes: int) -> bytes:
        """What is there now; waits for the GPU."""
        out = ctypes.create_string_buffer(nbytes)
        with self.gpu.current():
            self.gpu.call("cuMemcpyDtoH", ctypes.addressof(out), self.address + offset, nbytes)
        return out.raw

    def write(self, offset: int, data: bytes) -> None:
        """Returns when it is there."""
        source = ctypes.create_string_buffer(data, len(data))
        with self.gpu.current():
            self.gpu.call("cuMemcpyHtoD", self.address + offset, ctypes.addressof(source), len(data))
            self.gpu.call("cuCtxSynchronize")


class _GpuBytes:
    """What torch reads; the tensor refers to it, and it to the mapping."""

    def __init__(self, mapping: GpuMapping, offset: int, nbytes: int) -> None:
        self.mapping = mapping
        self.__cuda_array_interface__ = array_interface(mapping.address + offset, nbytes)


_waiting: list[tuple[Gpu, ExitStack]] = []


def _unless_forked(pid: int, act: Callable[..., object], *arguments: Any) -> None:
    """A forked child has no driver, and what it inherited is its parent's."""
    if os.getpid() == pid:
        act(*arguments)


def _let_go(gpu: Gpu, undo: ExitStack) -> None:
    _waiting.append((gpu, undo))
    if not is_capturing():
        release_waiting()


def release_waiting() -> None:
    """Unmaps and frees what was let go of, once its GPU has done with it. Nothing can be done about a refusal here."""
    while _waiting:
        gpu, undo = _waiting.pop()
        with suppress(Unavailable), gpu.current():
            gpu.driver.cuCtxSynchronize()
        undo.close()
