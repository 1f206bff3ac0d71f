"""Training blocks on a GPU: results and gradients in every mode, no synchronisation, CUDA graphs with other routings.
Called by `pytest -m gpu`; judged by the fp64 loops of tests/oracle.py.
"""

import copy

import oracle
import pytest
import thunder
import torch
from oracle import relative_error

from thunder_moe import (
    GroupedLinear,
    GroupedMLP,
    ScaledSwiGLU,
    moe_executor,
    offsets_from_splits,
    quantize_,
    round_weights_once,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::thunder_moe.compilers.report.RewriteWarning"),
]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}
SPLITS = [(5, 0, 11, 0), (0, 0, 0, 0), (16, 0, 0, 0), (0, 0, 0, 16), (4, 4, 4, 4)]
GPT_OSS = dict(alpha=1.702, limit=7.0, up_shift=1.0)


def compiled(module, mode):
    if mode == "eager":
        return module
    if mode == "thunder":
        return thunder.jit(module, executors=[moe_executor])
    return torch.compile(module, backend="thunder_moe", fullgraph=True)


def make(dtype, hidden=64, width=96, **options):
    return GroupedMLP(
        4, hidden, width, bias=True, activation=ScaledSwiGLU(**GPT_OSS), dtype=dtype, device="cuda", **options
    )


CASES = [("eager", dtype, *sizes) for dtype in TOLERANCE for sizes in ((64, 96), (36, 25))]
for _mode in ("dynamo", "thunder"):
    CASES += [(_mode, torch.bfloat16, 64, 96), (_mode, torch.float32, 36, 25)]


@pytest.mark.parametrize(("mode", "dtype", "hidden", "width"), CASES)
def test_results_and_gradients(mode, dtype, hidden, width):
    torch.backends.cuda.matmul.allow_tf32 = False
    mlp = make(dtype, hidden, width)
    run = compiled(mlp, mode)
    for splits in SPLITS:
        ends, live = offsets_from_splits(splits, device="cuda"), sum(splits)
        x = torch.randn(19, hidden, device="cuda").to(dtype)
        scales, grad = torch.rand(19, device="cuda"), torch.randn(19, hidden, device="cuda").to(dtype)
        x[live:] = scales[live:] = grad[live:] = float("nan")
        mlp.zero_grad()
        x.requires_grad_(), scales.requires_grad_()
        out = run(x, ends, scales)
        out.backward(grad)
        weights = [mlp.gate_up_proj.weight, mlp.down_proj.weight, mlp.gate_up_proj.bias, mlp.down_proj.bias]
        twins = [t.detach().cpu().double().nan_to_num().requires_grad_() for t in (x, scales, *weights)]
        exact = oracle.trained_mlp(twins[0], ends.cpu(), *twins[2:], scales=twins[1], **GPT_OSS)
        exact.backward(grad.cpu().double().nan_to_num())
        pairs = zip([out, *(t.grad for t in (x, scales, *weights))], [exact, *(t.grad for t in twins)], strict=True)
        for got, wanted in pairs:
            assert got.isfinite().all()
            assert relative_error(got.cpu(), wanted) < TOLERANCE[dtype] or (wanted.eq(0).all() and got.eq(0).all())
        for got in (out, x.grad, scales.grad):
            assert got[live:].eq(0).all()


@pytest.mark.parametrize("recipe", [None, "mxfp8", "fp8"])
def test_a_cuda_graph_of_a_training_step_takes_other_routings_without_synchronising(recipe):
    mlp = make(torch.bfloat16, accumulate_into_main_grad=True, recipe=recipe)
    for parameter in mlp.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, device="cuda")
    plain = make(torch.bfloat16, recipe=recipe)
    plain.load_state_dict(mlp.state_dict())
    x = torch.randn(19, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    scales = torch.rand(19, device="cuda", requires_grad=True)
    ends, grad = offsets_from_splits((4, 4, 4, 4), device="cuda"), torch.randn(19, 64, device="cuda").bfloat16()
    biases = [mlp.gate_up_proj.bias, mlp.down_proj.bias]

    def step():
        for tensor in (x, scales, *biases):
            tensor.grad = None
        for weight in (mlp.gate_up_proj.weight, mlp.down_proj.weight):
            weight.main_grad.zero_()
        out = mlp(x, ends, scales)
        out.backward(grad)
        return out, x.grad, scales.grad, *(bias.grad for bias in biases)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for splits in SPLITS:
        ends.copy_(offsets_from_splits(splits))
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        twin, factors = (t.detach().clone().requires_grad_() for t in (x, scales))
        plain.zero_grad()
        out = plain(twin, ends, factors)
        out.backward(grad)
        wanted = out, twin.grad, factors.grad, plain.gate_up_proj.bias.grad, plain.down_proj.bias.grad
        for got, exact in zip(results, wanted, strict=True):
            assert relative_error(got, exact) < 1e-5 or exact.eq(0).all()
        for name in ("gate_up_proj", "down_proj"):
            main_grad, exact = getattr(mlp, name).weight.main_grad, getattr(plain, name).weight.grad
            assert relative_error(main_grad, exact) < 1e-2 or exact.eq(0).all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("hidden", "width"), [(64, 96), (36, 25)])
def test_no_dtype_synchronises(dtype, hidden, width):
    mlp, linear = make(dtype, hidden, width), GroupedLinear(4, hidden, width, dtype=dtype, device="cuda")
    x = torch.randn(19, hidden, device="cuda").to(dtype).requires_grad_()
    ends, scales = offsets_from_splits((5, 0, 11, 0), device="cuda"), torch.rand(19, device="cuda", requires_grad=True)
    (mlp(x, ends, scales).sum() + linear(x, ends).sum()).backward()  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        (mlp(x, ends, scales).sum() + linear(x, ends).sum()).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bias_gradients_are_the_same_in_every_run():
    linear = GroupedLinear(8, 256, 192, bias=True, dtype=torch.bfloat16, device="cuda")
    ends = offsets_from_splits([100, 0, 300, 1, 50, 0, 400, 10], device="cuda")
    x, grad = (torch.randn(861, n, device="cuda").bfloat16() for n in (256, 192))
    grads = []
    for _ in range(100):
        linear.zero_grad()
        linear(x, ends).backward(grad)
        grads.append(linear.bias.grad)
    assert all(torch.equal(grad, grads[0]) for grad in grads)


def test_main_grad_and_delay():
    mlp = make(torch.bfloat16, accumulate_into_main_grad=True, delay_wgrad=True)
    plain = make(torch.bfloat16)
    plain.load_state_dict(mlp.state_dict())
    for weight in (mlp.gate_up_proj.weight, mlp.down_proj.weight):
        weight.main_grad = torch.zeros(weight.shape, device="cuda")
    for splits in SPLITS:
        x, ends = torch.randn(19, 64, device="cuda").bfloat16(), offsets_from_splits(splits, device="cuda")
        out, grad_input = torch.empty(19, 64, device="cuda").bfloat16(), torch.empty(19, 64, device="cuda").bfloat16()
        x.requires_grad_()
        mlp(x, ends, out=out, grad_input=grad_input)[: sum(splits)].float().sum().backward()
        plain(x.detach(), ends)[: sum(splits)].float().sum().backward()
        mlp.backward_dw()
    for name in ("gate_up_proj", "down_proj"):
        main_grad, exact = getattr(mlp, name).weight.main_grad, getattr(plain, name).weight.grad
        assert relative_error(main_grad, exact) < 1e-2


@pytest.mark.parametrize("mode", ["eager", "dynamo", "thunder"])
def test_gradients_through_4_bit_blocks(mode):
    mlp = make(torch.bfloat16, 64, 128)
    frozen = copy.deepcopy(mlp)
    if mode == "eager":
        root = torch.nn.ModuleDict(dict(mlp=frozen))
        quantize_(root)
        frozen = root["mlp"]
    else:
        frozen.gate_up_proj.weight.requires_grad_(False)
        frozen.down_proj.weight.requires_grad_(False)
    run = compiled(frozen, mode)
    for splits in SPLITS:
        ends, live = offsets_from_splits(splits, device="cuda"), sum(splits)
        x, scales = torch.randn(19, 64, device="cuda").bfloat16(), torch.rand(19, device="cuda")
        x[live:] = scales[live:] = float("nan")
        twin, factors = (t.clone().requires_grad_() for t in (x, scales))
        x.requires_grad_(), scales.requires_grad_()
        frozen.zero_grad(), mlp.zero_grad()
        run(x, ends, scales).float().pow(2).sum().backward()
        mlp(twin, ends, factors).float().pow(2).sum().backward()
        pairs = [(x.grad, twin.grad), (scales.grad, factors.grad)]
        pairs += [(getattr(frozen, n).bias.grad, getattr(mlp, n).bias.grad) for n in ("gate_up_proj", "down_proj")]
        for got, exact in pairs:
            assert got.isfinite().all()
            assert relative_error(got, exact) < 0.3 or exact.eq(0).all()  # NVFP4 of small weights
        assert x.grad[live:].eq(0).all()
        assert scales.grad[live:].eq(0).all()


@pytest.mark.filterwarnings("ignore:.*round_weights_once")
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8"])
def test_weights_that_are_rounded_once(recipe):
    """In eager calls, on another stream, and in a CUDA graph of the whole block, which rounds again in each replay."""
    mlp = make(torch.bfloat16, recipe=recipe)
    x = torch.randn(19, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    scales = torch.rand(19, device="cuda", requires_grad=True)
    routings = [offsets_from_splits(splits, device="cuda") for splits in SPLITS[:3]]

    def step():
        for tensor in (x, scales, *mlp.parameters()):
            tensor.grad = None
        for ends in routings:
            out = mlp(x, ends, scales)
            out.backward(torch.ones_like(out))
        # A graph of autograd that is alive keeps its stream, which a capture must not wait for.
        return [out.detach(), x.grad, scales.grad, *(parameter.grad for parameter in mlp.parameters())]

    def same_bits(results, wanted):
        return all(torch.equal(got, expected) for got, expected in zip(results, wanted, strict=True))

    wanted, stream = step(), torch.cuda.Stream()
    with round_weights_once(mlp):
        assert same_bits(step(), wanted)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            on_another_stream = step()
    torch.cuda.synchronize()
    assert same_bits(on_another_stream, wanted)
    graph, alone = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), round_weights_once(mlp):
        results = step()
    with round_weights_once(mlp), torch.cuda.graph(alone):
        of_each = step()
    for _ in range(2):
        with torch.no_grad():
            for parameter in mlp.parameters():
                parameter.mul_(1.5)
        graph.replay()
        alone.replay()
        wanted = step()
        assert same_bits(results, wanted)
        assert same_bits(of_each, wanted)
