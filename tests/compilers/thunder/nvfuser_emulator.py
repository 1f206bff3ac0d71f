"""nvFuser without a GPU: runs the Python text of a fusion definition on CPU tensors, and records such text where the
library is missing. Called by test_nvfuser; calls plain torch, and nothing of the package.

The kernels are emulated from their specification and strictly: what CUTLASS would misread or not check is an assertion.
"""

import ast
import enum
import types
from collections.abc import Sequence

import torch
from oracle import decode_e2m1

DataType = enum.Enum(
    "DataType",
    "Double Float Half BFloat16 Int Int32 UInt64 Bool Float8_e4m3fn Float8_e5m2 Float8_e8m0fnu Float4_e2m1fn "
    "Float4_e2m1fn_x2 ComplexFloat ComplexDouble Null",
)
TORCH_DTYPES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Int": torch.int64,
    "Int32": torch.int32,
    "Bool": torch.bool,
    "Float8_e4m3fn": torch.float8_e4m3fn,
}
E2M1 = torch.tensor([decode_e2m1(code) for code in range(16)])
FLOAT_MAX = 3.40282346638528859811704183484516925440e38


def statements(text: str) -> list[tuple[list[str], str, list[str], dict[str, str]]]:
    """Return (outputs, operation, arguments, keyword arguments) of each statement of a fusion definition's text."""
    found = []
    for node in ast.parse(text).body[0].body:
        call = node.value
        outputs = []
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            outputs = [name.id for name in (target.elts if isinstance(target, ast.Tuple) else [target])]
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        found.append((outputs, call.func.attr, [ast.unparse(arg) for arg in call.args], keywords))
    return found


def run(text: str, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Execute the text of a fusion definition."""
    fusion = Fusion(inputs)
    scope = {"DataType": DataType, "FusionDefinition": Fusion}
    exec(text, scope)
    scope["nvfuser_fusion"](fusion)
    return fusion.outputs


class Fusion:
    """The object that the text calls `fd`: it runs every operation at once."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self.inputs, self.outputs, self.ops = iter(inputs), [], Ops()

    def define_tensor(self, shape, contiguity, dtype, is_cpu=False, stride_order=None):
        tensor = next(self.inputs)
        assert not is_cpu
        if dtype in (DataType.Float4_e2m1fn, DataType.Float4_e2m1fn_x2):
            assert tensor.dtype == torch.float4_e2m1fn_x2
            packed = tensor.view(torch.uint8).transpose(1, 2)
            assert packed.is_contiguous()
            codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
            return E2M1[codes.long()].transpose(1, 2)
        assert tensor.dtype == TORCH_DTYPES[dtype.name], (tensor.dtype, dtype)
        assert list(tensor.shape) == list(shape)
        return tensor

    def define_scalar(self, value, dtype=None):
        return value

    def add_output(self, tensor):
        self.outputs.append(tensor)


class Swizzled:
    """Block scales of rows, every group swizzled 128x4 from a row that is a multiple of 128. Rows that nobody wrote are
    NaN."""

    def __init__(self, scale, in_offsets, out_offsets) -> None:
        assert in_offsets.dtype == out_offsets.dtype == torch.int32
        rows, columns = scale.shape
        self.columns = -(-columns // 4) * 4
        starts, places = in_offsets.tolist(), out_offsets.tolist()
        assert all(place % 128 == 0 for place in places)
        self.buffer = torch.full(((rows + 127 * len(places) + 128) * self.columns,), torch.nan)
        for row in range(rows):
            group = max(g for g, start in enumerate(starts) if start <= row)
            for column in range(columns):
                at = self._place(places[group], row - starts[group], column)
                assert self.buffer[at].isnan(), "two groups share a block scale"
                self.buffer[at] = scale[row, column].float()

    def _place(self, start: int, row: int, column: int) -> int:
        return start * self.columns + swizzled_place(row, column, self.columns)

    def read(self, start: int, rows: int, columns: int) -> torch.Tensor:
        places = [[self._place(start, row, column) for column in range(columns)] for row in range(rows)]
        return self.buffer[torch.tensor(places, dtype=torch.long).view(rows, columns)]


def swizzled_place(row: int, column: int, columns: int) -> int:
    """Return the place where the 128x4 swizzle keeps the scale of (row, column)."""
    tile = (row // 128) * (columns // 4) + column // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


def round_to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Return the nearest value, ties to the even code, by a search of all values."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # the even ones first, so that they win ties
    magnitudes = E2M1[order]
    nearest = (x.abs()[..., None] - magnitudes).abs().argmin(-1)
    return torch.copysign(magnitudes[nearest], x)


class Ops:
    """The object that the text calls `fd.ops`: nvFuser's arguments, torch's arithmetic."""

    def __getattr__(self, name):  # the operations that torch has under the same name
        def call(*args, dtype=None):
            return getattr(torch, name)(*(a if isinstance(a, torch.Tensor) else torch.tensor(a) for a in args))

        return call

    def cast(self, x, dtype):
        if dtype == DataType.Float4_e2m1fn:
            return round_to_e2m1(x)
        if dtype == DataType.Float8_e4m3fn:
            x = x.clamp(-448, 448)  # nvFuser's conversion saturates
        return x.to(TORCH_DTYPES[dtype.name])

    def add(self, a, b):
        return a + b

    def sub(self, a, b):
        return a - b

    def mul(self, a, b):
        return a * b

    def div(self, a, b):
        # torch multiplies the reciprocal of a tensor by a scalar, which rounds twice.
        a = torch.tensor(a, dtype=b.dtype) if isinstance(b, torch.Tensor) and not isinstance(a, torch.Tensor) else a
        return torch.div(a, b, rounding_mode=None if torch.result_type(a, b).is_floating_point else "trunc")

    def bitwise_and(self, a, b):
        return a & b

    def lt(self, a, b):
        return a < b

    def ne(self, a, b):
        return a != b

    def where(self, condition, a, b):
        return torch.where(condition, a, b)

    def silu(self, x):
        return x * torch.sigmoid(x)

    def clamp(self, x, min, max):
        return x.clamp(min, max)

    def max(self, x, dims):
        return x.amax(dims)

    def cumsum(self, x, dim):
        return x.cumsum(dim, dtype=x.dtype)

    def full(self, shape, fill_value, dtype):
        return torch.full(tuple(shape), fill_value, dtype=TORCH_DTYPES[dtype.name])

    def iota(self, length, start=0, step=1, dtype=DataType.Int):
        return torch.arange(length, dtype=TORCH_DTYPES[dtype.name]) * (1 if step is None else step) + (start or 0)

    def pad(self, x, pad_widths, value=0):
        return torch.nn.functional.pad(x, tuple(pad_widths), value=value)

    def slice(self, x, start_indices, end_indices, strides=None, manual_normalization=False):
        return x[tuple(slice(*bounds) for bounds in zip(start_indices, end_indices, strict=True))]

    def cat(self, tensors, dim, manual_padding=False):
        # With manual padding each part is as wide as the result, zero where another part is.
        return sum(tensors) if manual_padding else torch.cat(tensors, dim)

    def reshape(self, x, new_shape):
        return x.reshape(tuple(new_shape))

    def permute(self, x, dims):
        return x.permute(dims)

    def broadcast(self, x, is_broadcast_dim):
        return x[tuple(None if new else slice(None) for new in is_broadcast_dim)]

    def broadcast_in_dim(self, x, shape, broadcast_dims):
        kept = [size if dim in broadcast_dims else 1 for dim, size in enumerate(shape)]
        kept = [x.shape[list(broadcast_dims).index(d)] if d in broadcast_dims else 1 for d, _ in enumerate(kept)]
        return x.reshape(kept).expand(tuple(shape))

    def expand(self, x, shape):
        return x.expand(tuple(shape))

    def squeeze(self, x, dims, squeeze_expanded=False):
        return x.squeeze(tuple(dims))

    def topk(self, x, k, dim, largest=True, sorted=True):
        return torch.topk(x, k, dim, largest, sorted)

    def argsort(self, x, dim, descending=False, stable=False):
        return torch.argsort(x, dim=dim, descending=descending, stable=stable)

    def index_select(self, x, index, dim):
        return x.index_select(dim, index.flatten())

    def scatter(self, x, index, src, dim):
        return x.scatter(dim, index, src)

    def set(self, x):
        return x

    def nv_block_quantize(self, x, global_scale=None):
        block_amax = x.float().abs().unflatten(-1, (-1, 16)).amax(-1)
        encode = torch.ones(()) if global_scale is None else global_scale
        scale = self.cast(block_amax / torch.tensor(6.0) * encode, DataType.Float8_e4m3fn)
        factor = (1 / (scale.float() * (1 / encode))).clamp_max(FLOAT_MAX)
        return round_to_e2m1(x.float() * factor.repeat_interleave(16, -1)), scale

    def nv_grouped_block_quantize(self, x, input_offsets, output_offsets, global_scale=None, block_size=16, dtype=None):
        values, scale = self.nv_block_quantize(x, global_scale)
        return values, Swizzled(scale, input_offsets, output_offsets)

    def cutlass_nvfp4_grouped_mm(
        self, mat1, mat2, scale1, scale2, alpha, problem_sizes, offsets, sf_offsets, dtype=DataType.BFloat16
    ):
        (m, k), (experts, _, n) = mat1.shape, mat2.shape
        assert k % 64 == 0
        assert n % 128 == 0
        for tensor in (problem_sizes, offsets, sf_offsets):
            assert tensor.dtype == torch.int32
        assert scale2.is_contiguous()
        assert scale2.shape == (experts, n, k // 16)
        assert alpha.dtype == torch.float32
        assert alpha.shape == (experts,)
        out = torch.full((m, n), torch.nan)
        columns = k // 16
        places = torch.tensor([[swizzled_place(r, c, columns) for c in range(columns)] for r in range(n)])
        for e in range(experts):
            rows, n_, k_ = problem_sizes[e].tolist()
            assert (n_, k_) == (n, k)
            if rows == 0:
                continue
            start = int(offsets[e])
            scales = scale1.read(int(sf_offsets[e]), rows, columns)
            a = mat1[start : start + rows] * scales.repeat_interleave(16, -1)
            w = mat2[e].t() * scale2[e].flatten()[places].float().repeat_interleave(16, -1)
            out[start : start + rows] = alpha[e] * (a @ w.t())
        return out.to(TORCH_DTYPES[dtype.name])


# ---- the stand-in for the library


class Value:
    """A tensor or scalar of a recorded definition."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


class Recorder:
    """A FusionDefinition that only writes its text."""

    class _Ops:
        def __init__(self, definition) -> None:
            self._definition = definition

        def __getattr__(self, name):
            return lambda *args, **kwargs: self._definition.write(f"fd.ops.{name}", args, kwargs)

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.ops = self._Ops(self)

    def write(self, name: str, args, kwargs):
        count = 2 if name.endswith(("block_quantize", "topk")) else 1
        values = [Value(f"v{len(self.lines)}_{i}") for i in range(count)]
        call = ", ".join([*map(_text, args), *(f"{key}={_text(value)}" for key, value in kwargs.items())])
        self.lines.append(f"    {', '.join(map(repr, values))} = {name}({call})")
        return values[0] if count == 1 else tuple(values)

    def define_tensor(self, **kwargs):
        return self.write("fd.define_tensor", (), kwargs)

    def define_scalar(self, *args):
        return self.write("fd.define_scalar", args, {})

    def add_output(self, value) -> None:
        self.lines.append(f"    fd.add_output({value!r})")

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        pass

    def __repr__(self) -> str:
        return "\n".join(["def nvfuser_fusion(fd : FusionDefinition) -> None :", *self.lines])


def _text(value) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return str(value) if isinstance(value, enum.Enum) else repr(value)


def _tensor_descriptor(shape, stride):
    order = [0] * len(shape)
    for place, dim in enumerate(sorted(range(len(shape)), key=lambda dim: -stride[dim])):
        order[dim] = len(shape) - 1 - place
    return [True] * len(shape), order


def stand_in(version: str) -> types.ModuleType:
    """Return a module in the place of `nvfuser_direct`: Thunder's fusion pass builds definitions with it."""
    module = types.ModuleType("nvfuser_direct", "records fusion definitions")
    module.version = lambda: version
    module.DataType, module.FusionDefinition = DataType, Recorder
    module.multidevice = module.execute_with_dtensors = None
    module.ParallelType = types.SimpleNamespace(mesh_x=0)
    module.compute_tensor_descriptor = _tensor_descriptor
    return module
