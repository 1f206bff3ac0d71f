"""`ChainBuilder`: describes a chain of kernel launches on operands of one kind; `Chain` runs it, in src/chain.cpp.
Called by the other modules of kernels/cuda; calls nvrtc.py for kernels and the C++ compiler, once, for chain.cpp.

A chain holds what shapes, dtypes and a device decide. A call checks that its operands are of that kind, allocates
results and scratch memory, writes their addresses into the argument structs of the kernels and launches them.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import importlib.util
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from thunder_moe.kernels import host_code
from thunder_moe.kernels.cuda import launch, nvrtc
from thunder_moe.kernels.cuda.workspace import semaphore_pool
from thunder_moe.kernels.forks import ForkLock

_SOURCE = Path(__file__).with_name("src") / "chain.cpp"
_NAME = "thunder_moe_chain"
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden")
_OPERAND, _RESULT, _SCRATCH, _SEMAPHORES = range(4)  # `Source` of chain.cpp
_ALIGNED = 256  # bytes: of the parts of the scratch memory


class Chain(Protocol):
    """A chain of launches on a device. Any thread may call it, with any current device."""

    def __call__(self, *operands: Any, **options: Any) -> Any:
        """Launch on the current stream of the chain's device and return the result, or a tuple of several.

        Return None and launch nothing for operands or options of another kind than the chain's.
        """


class Address(NamedTuple):
    """A symbolic address in a later call: an operand, result, scratch memory or semaphores, plus an offset in bytes."""

    source: int
    number: int
    offset: int = 0

    def plus(self, offset: int) -> Address:
        """Return the address `offset` bytes behind this one."""
        return self._replace(offset=self.offset + offset)


class TensorMap(NamedTuple):
    """A value for a field of 128 bytes: the tensor map of a matrix (rows, k) in boxes of box_rows rows by 64."""

    matrix: Address
    rows: int
    k: int
    box_rows: int


Field = Address | TensorMap | int | float | None


class ChainBuilder:
    """Describes the operands of a chain, in their order, its results and its launches, in theirs.

    Args:
        device: the device of all tensors; it has an index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._index: Any = device.index
        self._operands: list[tuple[Any, ...]] = []
        self._options: list[tuple[str, Any, bool]] = []
        self._results: list[tuple[Any, ...]] = []
        self._launches: list[tuple[Any, ...]] = []
        self._semaphores: list[Callable[[], Tensor]] = []
        self._scratch = 0

    def operand(
        self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None, *, align: int = 16
    ) -> Address:
        """Take a tensor of a shape, strides (None: contiguous) and a dtype, whose address is a multiple of `align`."""
        self._operands.append((dtype, shape, _contiguous(shape) if strides is None else strides, align, None))
        return Address(_OPERAND, len(self._operands) - 1)

    def like(self, argument: Any, *, align: int = 16) -> Address | None:
        """Take an operand of the kind of this argument, a tensor or a value, None for the latter's address."""
        if not isinstance(argument, Tensor):
            self._operands.append((None, (), (), 1, argument))
            return None
        return self.operand(argument.shape, argument.dtype, argument.stride(), align=align)

    def options(self, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """Take these keyword arguments and no others; a call may leave out those that have their defaults."""
        self._options = [
            (sys.intern(name), value, name in defaults and defaults[name] == value) for name, value in options.items()
        ]

    def result(self, shape: Sequence[int], dtype: torch.dtype) -> Address:
        """Return a new contiguous tensor."""
        self._results.append((-1, dtype, shape, _contiguous(shape)))
        return Address(_RESULT, len(self._results) - 1)

    def result_in(self, operand: Address, shape: Sequence[int], dtype: torch.dtype) -> Address:
        """Return an operand that the kernels write."""
        self._results.append((operand.number, dtype, shape, _contiguous(shape)))
        return operand

    def scratch(self, size: int) -> Address:
        """Allocate bytes for the time of a call."""
        begin, self._scratch = self._scratch, self._scratch + -(-size // _ALIGNED) * _ALIGNED
        return Address(_SCRATCH, 0, begin)

    def semaphores(self, size: int, *, overlapping: bool = False) -> Address:
        """Take int32 zeros of the current stream, as `SemaphorePool.take`."""
        device = self.device
        self._semaphores.append(lambda: semaphore_pool(device).take(size, overlapping=overlapping))
        return Address(_SEMAPHORES, len(self._semaphores) - 1)

    def launch(
        self,
        sources: tuple[Path, ...],
        expression: str,
        threads: int,
        shared_bytes: int,
        blocks: int,
        argument: type[ctypes.Structure],
        fields: Sequence[Field],
        multiprocessors: int | None = None,
    ) -> None:
        """Launch a kernel, which is compiled on first use.

        Args:
            sources, expression, threads, shared_bytes, argument: as in `nvrtc.kernel`.
            blocks: the number of blocks of the grid.
            fields: the values of the argument's and its structs' fields, in order; None for a null pointer.
            multiprocessors: the number of multiprocessors of the device, for persistent kernels: at most as many blocks
                are launched as run at once.
        """
        places = list(_places(argument))
        assert len(places) == len(fields), (argument, len(places), len(fields))
        content = argument()
        patches, maps = [], []
        for (offset, kind), value in zip(places, fields, strict=True):
            if isinstance(value, TensorMap):
                maps.append((offset, tuple(value.matrix), (value.rows, value.k, value.box_rows)))
            elif isinstance(value, Address):
                assert kind is ctypes.c_void_p
                patches.append((offset, tuple(value)))
            elif value is not None:
                kind.from_address(ctypes.addressof(content) + offset).value = value
        kernel = nvrtc.kernel(sources, expression, threads, shared_bytes, self._index, argument)
        config = launch.config_of(kernel, blocks, multiprocessors)
        self._launches.append((int(kernel.function), config, bytes(content), patches, maps, kernel))

    def build(self) -> Chain:
        """Return the chain."""
        functions = launch.current_stream, nvrtc.bind_context, _tensor_map, nvrtc.raise_error, self._index
        return _extension().build(
            self._operands, self._options, self._results, self._launches, self._semaphores, self._scratch,
            self._index or 0, self.device.type == "cuda", functions, launch.launch_address(),
        )  # fmt: skip


def launched(chain: Chain | Any, *operands: Any, **options: Any) -> Any:
    """Return the result of a chain for operands and options that have to be of its kind.

    Raises:
        ValueError: they are not.
    """
    result = chain(*operands, **options)
    if result is None:
        kinds = [
            f"{each.dtype} {tuple(each.shape)} strides {each.stride()} on {each.device} at {each.data_ptr() % 16}"
            if isinstance(each, Tensor)
            else repr(each)
            for each in operands
        ]
        kinds += [f"{name}={value!r}" for name, value in options.items()]
        raise ValueError(f"operands: got {', '.join(kinds)}, which the kernels of this chain do not take")
    return result


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _places(argument: type[ctypes.Structure], base: int = 0) -> Iterator[tuple[int, Any]]:
    """Yield (offset, type) of each field of a struct and of structs in it; names of padding end in an underscore."""
    for name, kind, *_ in argument._fields_:
        offset = base + getattr(argument, name).offset
        if issubclass(kind, ctypes.Structure):
            yield from _places(kind, offset)
        elif not name.endswith("_"):
            yield offset, kind


def _tensor_map(address: int, numbers: tuple[int, int, int]) -> bytes:
    return launch.tensor_map(address, *numbers)


@functools.cache
def missing_reason() -> str | None:
    """Return None if chains can run, else a sentence that says what is missing; compile chain.cpp on first use."""
    try:
        _extension()
    except Exception as error:  # of the compiler, the file system or the loader
        return f"the launcher of CUDA kernels cannot run: {error}"
    return None


_LOCK = ForkLock()


def _extension() -> Any:
    """Return the compiled chain.cpp, by the first thread that asks."""
    with _LOCK:
        return _load_extension()


@functools.cache
def _load_extension() -> Any:
    root, include = Path(torch.__file__).parent, sysconfig.get_paths()["include"]
    options = [*_FLAGS, *(f"-isystem{path}" for path in (root / "include", include))]
    libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
    parts = [_SOURCE.read_text(), *options, torch.__version__, str(sysconfig.get_config_var("SOABI"))]
    what = "the launcher of CUDA kernels (about 10 s, once)"
    return host_code.load(what, parts, lambda: host_code.compile_library([_SOURCE], options, libraries), _open)


def _open(path: str) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(_NAME, path)
    specification = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
    assert specification is not None
    module = importlib.util.module_from_spec(specification)
    loader.exec_module(module)
    return module
