"""Weights that change between calls of a compiled module, in every way: seen, or declared by `refresh_`.
Called by pytest; docs/weights.md has the same table. Judged by the eager module with dequantized weights.
"""

import copy

import pytest
import thunder
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import relative_error
from torch import nn

from thunder_moe import moe_executor, refresh_
from thunder_moe.formats.nvfp4 import dequantize, quantize

# A graph that trains rewrites nothing, and says so.
pytestmark = pytest.mark.filterwarnings("ignore::thunder_moe.compilers.report.RewriteWarning")

BF16 = torch.bfloat16
COMPILERS = {
    "torch.compile": lambda module: torch.compile(
        module, backend="thunder_moe", fullgraph=True, options={"thunder_moe.inner": "eager"}
    ),
    "inductor": lambda module: torch.compile(module, backend="thunder_moe", fullgraph=True),
    "thunder": lambda module: thunder.jit(module, executors=[moe_executor]),
}


class Experts(nn.Module):
    """gate, up -> SwiGLU -> down: (M, 32) -> (M, 32), 3 experts."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(3, 16, 32, dtype=BF16) / 6)
        self.up = nn.Parameter(torch.randn(3, 16, 32, dtype=BF16) / 6)
        self.down = nn.Parameter(torch.randn(3, 32, 16, dtype=BF16) / 4)

    def forward(self, rows, offsets):
        gate = torch._grouped_mm(rows, self.gate.mT, offs=offsets)
        hidden = F.silu(gate) * torch._grouped_mm(rows, self.up.mT, offs=offsets)
        return torch._grouped_mm(hidden, self.down.mT, offs=offsets)


@pytest.fixture(
    params=[
        pytest.param(compile_, id=name, marks=[pytest.mark.exhaustive] * (name == "inductor"))
        for name, compile_ in COMPILERS.items()
    ]
)
def compiled(request):
    return request.param(Experts())


def original(compiled):
    return getattr(compiled, "_orig_mod", None) or compiled._model


ROWS = torch.randn(9, 32, generator=torch.Generator().manual_seed(1)).to(BF16)
OFFSETS = torch.tensor([2, 5, 9], dtype=torch.int32)


def check(compiled, mode=torch.no_grad):
    """The compiled module in NVFP4 against the eager one with dequantized weights."""
    with mode():
        actual = compiled(ROWS, OFFSETS)
    expected = copy.deepcopy(original(compiled)).requires_grad_(False)
    for parameter in expected.parameters():
        parameter.copy_(dequantize(quantize(parameter), BF16))
    assert relative_error(actual, expected(ROWS, OFFSETS)) < 0.01  # 16-bit weights would make it 0.1


def train(compiled):
    """A forward and backward; the gradients are such that a step changes every weight much, but not out of range."""
    compiled(ROWS, OFFSETS).float().square().sum().backward()
    for parameter in compiled.parameters():
        parameter.grad.sign_()


def fused(kind):
    def change(compiled):
        train(compiled)
        getattr(torch.optim, kind)(compiled.parameters(), lr=0.5, fused=True).step()

    return change


def plain(kind, **options):
    def change(compiled):
        train(compiled)
        getattr(torch.optim, kind)(compiled.parameters(), lr=0.5, **options).step()

    return change


def data_after_training(compiled):
    """What fused and flat-buffer optimizers of other libraries do."""
    train(compiled)
    for parameter in compiled.parameters():
        parameter.data.sub_(0.5 * parameter.grad)


def fused_after_eager_training(compiled):
    train(original(compiled))
    torch.optim.Adam(original(compiled).parameters(), lr=0.5, fused=True).step()


@torch.no_grad()
def in_place(compiled):
    for parameter in compiled.parameters():
        parameter.mul_(-3)


@torch.no_grad()
def views(compiled):
    for parameter in compiled.parameters():
        parameter[1].mul_(-3)
        parameter.detach().view(-1)[::2].zero_()


@torch.no_grad()
def foreach(compiled):
    torch._foreach_mul_(list(compiled.parameters()), -3)


def new_data(compiled):
    for parameter in compiled.parameters():
        new = parameter.data * -3
        parameter.data = torch.empty(0)  # the allocator often gives the same address again
        parameter.data = new.clone()


def other_view(compiled):
    for parameter in compiled.parameters():
        parameter.data = parameter.data.flip(0)


def load(compiled):
    state = {name: -3 * tensor for name, tensor in original(compiled).state_dict().items()}
    original(compiled).load_state_dict(state)


def load_by_swap(compiled):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        load(compiled)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


SEEN = {
    "fused Adam": fused("Adam"),
    "fused AdamW": fused("AdamW"),
    "fused Adagrad": fused("Adagrad"),
    "SGD": plain("SGD"),
    "Adam, foreach": plain("Adam", foreach=True),
    "data after training": data_after_training,
    "fused Adam after eager training": fused_after_eager_training,
    "in place": in_place,
    "views in place": views,
    "foreach": foreach,
    "new data": new_data,
    "another view": other_view,
    "load_state_dict": load,
    "load_state_dict by swap": load_by_swap,
}


@pytest.mark.parametrize("change", SEEN.values(), ids=SEEN.keys())
@pytest.mark.covering(1)
def test_changes_that_are_seen(compiled, change):
    for _ in range(3):
        check(compiled)
        change(compiled)
    check(compiled)


def data_in_place(compiled):
    for parameter in compiled.parameters():
        parameter.data.mul_(-3)


def data_copied(compiled):
    for parameter in compiled.parameters():
        parameter.data.copy_(-3 * parameter.data)


def numpy(compiled):
    for parameter in compiled.parameters():
        bits = parameter.data.view(torch.int16).numpy()
        bits[...] = bits[::-1].copy()


def collective(compiled):
    for parameter in compiled.parameters():
        parameter.data.mul_(-3)
        dist.broadcast(parameter.data, 0)


def version_kept(compiled):
    parameters = tuple(compiled.parameters())
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(parameters):  # FSDP2 gathers so
        torch._foreach_mul_(parameters, -3)


def storage_copied(compiled):
    for parameter in compiled.parameters():
        parameter.untyped_storage().copy_((-3 * parameter.data).untyped_storage())


UNSEEN = {
    "data in place": data_in_place,
    "data copied": data_copied,
    "NumPy": numpy,
    "collective": collective,
    "version kept": version_kept,
    "storage copied": storage_copied,
}


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("change", UNSEEN.values(), ids=UNSEEN.keys())
@pytest.mark.covering(1)
@pytest.mark.usefixtures("one_process")
def test_changes_that_refresh_declares(compiled, change):
    original(compiled).requires_grad_(False)
    for _ in range(3):
        check(compiled)
        change(compiled)
        assert refresh_(compiled) is compiled
    check(compiled)


def test_inference_mode_and_a_change_outside(compiled):
    original(compiled).requires_grad_(False)
    check(compiled, torch.inference_mode)
    in_place(compiled)
    check(compiled, torch.inference_mode)
    check(compiled)
    rows = ROWS.clone().requires_grad_()
    compiled(rows, OFFSETS).float().sum().backward()
    assert rows.grad.norm() > 0


def test_conversions_by_swap(compiled):
    """A module that was compiled can be converted where torch swaps its parameters' tensors."""
    check(compiled)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        original(compiled).to(torch.float16).to(BF16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    in_place(compiled)
    check(compiled)
