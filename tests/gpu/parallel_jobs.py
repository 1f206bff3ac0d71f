"""What the two processes of test_gpu_parallel.py run, a GPU each, with nccl; `mesh` is a name of `mesh_of`.
Called through tests/processes.py; calls thunder_moe.parallel, and fp64 loops as the judge.
"""

import copy
import functools

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from oracle import relative_error, round_to_recipe, trained_linear, trained_mlp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from thunder_moe import (
    GroupedMLP,
    GroupedSwiGLU,
    Llama4MoE,
    Llama4MoEConfig,
    ScaledSReLU,
    ScaledSwiGLU,
    dequantize_,
    quantize_,
)
from thunder_moe.nn.packed import PackedModule
from thunder_moe.parallel import ExpertParallel, TensorParallel, expert_load

H, FEATURES, E, A = 256, 256, 8, 3
# Tokens of the two ranks that have tokens of their own.
TOKENS = {"few": (5, 3), "many": (300, 211), "one rank alone": (0, 40), "none": (0, 0)}
ROOM = 300
EXCHANGES = {
    "exact": dict(),
    "capacity": dict(capacity=ROOM),
    "gather": dict(exchange="all_gather"),
    "gather, capacity": dict(exchange="all_gather", capacity=ROOM),
    "symmetric": dict(exchange="symmetric_memory", capacity=ROOM),
    "chunks": dict(exchange="all_gather", capacity=ROOM, chunks=2),
}
GPT_OSS = dict(alpha=1.702, limit=7.0, up_shift=1.0)
DEVICE = "cuda"


@functools.cache
def mesh_of(name):
    """ "ep" and "tp" have one dimension; "2x1" and "1x2" spread experts over the first, features over the second."""
    if name in ("ep", "tp"):
        return init_device_mesh(DEVICE, (2,))
    return init_device_mesh(DEVICE, tuple(map(int, name.split("x"))), mesh_dim_names=("ep", "tp"))


def experts_mesh(name):
    mesh = mesh_of(name)
    return mesh if mesh.ndim == 1 else mesh["ep"]


def place(mesh):
    """The rank among those that have tokens of their own, and their number."""
    return (0, 1) if mesh == "tp" else (experts_mesh(mesh).get_local_rank(), experts_mesh(mesh).size())


def style(mesh, exchange="exact"):
    return TensorParallel() if mesh == "tp" else ExpertParallel(**EXCHANGES[exchange])


def packed(module, format):
    return module if format == "bf16" else quantize_(torch.nn.Sequential(module), format=format)[0]


def layer(format):
    torch.manual_seed(1)
    config = Llama4MoEConfig(H, FEATURES, E, num_shared_experts=1, top_k=A)
    return packed(Llama4MoE(config, dtype=torch.bfloat16, device=DEVICE), format)


def exact_of(module, device=DEVICE):
    """The module with the weights that its numbers stand for, in fp64."""
    exact = torch.nn.Sequential(copy.deepcopy(module).float())
    if any(isinstance(part, PackedModule) for part in exact.modules()):
        dequantize_(exact)
    return exact[0].double().to(device)


def run_exact(moe, x):
    """fp64 loop over the experts of a `Llama4MoE`: (T, H) -> (T, H)."""
    values, ids = F.linear(x, moe.router.weight).topk(A)
    experts, shared, out = moe.routed_experts, moe.shared_expert, torch.zeros_like(x)
    for expert in range(E):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        rows = x[token] * torch.sigmoid(values[token, slot])[:, None]
        gate, up, down = (getattr(experts, f"{name}_proj").weight[expert] for name in ("gate", "up", "down"))
        out = out.index_add(0, token, F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), down))
    gate, up, down = (getattr(shared, f"{name}_proj").weight for name in ("gate", "up", "down"))
    return out + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def tokens_of(moe, count):
    """(count, H) in bf16, of which no rounding changes the experts."""
    x = torch.randn(8 * count + 8, H, generator=torch.Generator().manual_seed(2)).bfloat16()
    logits = F.linear(x.double(), moe.router.weight.double().cpu()).sort(descending=True).values
    clear = logits[:, A - 1] - logits[:, A] > 0.05
    assert clear.sum() >= count
    return x[clear][:count]


def grads_of(module):
    """The gradients of 16-bit parameters that have one, by name."""
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def judged(got, one, exact):
    """{name: (error, one process's error)} of tensors by name."""
    errors = {}
    for name, tensor in exact.items():
        own, whole, wanted = (t.detach().double().cpu() for t in (got[name], one[name], tensor))
        nothing = not wanted.norm()
        errors[name] = (float(own.norm()), 0.0) if nothing else tuple(relative_error(t, wanted) for t in (own, whole))
    return errors


def run_layer(mesh, exchange, format, tokens, train):
    """A layer's output and gradients -> their errors, and those of one process, beside fp64."""
    rank, spread = place(mesh)
    counts = TOKENS[tokens][-spread:]
    whole = layer(format)
    exact = exact_of(whole)
    x = tokens_of(whole, sum(counts)).to(DEVICE)
    mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    factors = torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    moe = parallelize_module(copy.deepcopy(whole), mesh_of(mesh), style(mesh, exchange))
    results = []
    with torch.set_grad_enabled(train):
        for module, forward, part in ((exact, functools.partial(run_exact, exact), x.double()),
                                      (whole, whole, x[None]), (moe, moe, x[mine][None])):  # fmt: skip
            own = part.clone().requires_grad_(train)
            out = forward(own)
            own_factors = factors[mine] if module is moe else factors
            if train:
                (out * own_factors.reshape(out.shape).to(out)).sum().backward()
            found = {"out": out.detach(), **({"x": own.grad} if train else {}), **grads_of(module)}
            results.append({name: t.reshape(-1, H) if name in ("out", "x") else t for name, t in found.items()})
    wanted, one, got = results
    for name in ("out", "x"):
        if name in wanted:
            wanted[name], one[name] = wanted[name][mine], one[name][mine]
    wanted = {name: tensor for name, tensor in wanted.items() if name in one}
    assert got.keys() == one.keys()
    for name, tensor in got.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if "routed" not in name and name not in ("out", "x") and spread == 2:  # those of the rank's own tokens
            dist.all_reduce(local, group=experts_mesh(mesh).get_group())
        if isinstance(tensor, DTensor):
            got[name] = DTensor.from_local(local, tensor.device_mesh, tensor.placements).full_tensor()
    if mesh != "tp":
        (load,) = expert_load(moe, all_ranks=True).values()
        ids = F.linear(x.double(), exact.router.weight).topk(A).indices
        steps = moe.chunks  # of a call
        assert torch.equal(load.tokens[-steps:].sum(0), torch.bincount(ids.flatten(), minlength=E))
        assert load.dropped == 0
    return judged(got, one, wanted)


FORMS = {
    "swiglu": lambda o: GroupedSwiGLU(E, H, FEATURES, **o),
    "mlp": lambda o: GroupedMLP(E, H, FEATURES, **o),
    "mlp, bias, clamped": lambda o: GroupedMLP(E, H, FEATURES, bias=True, activation=ScaledSwiGLU(**GPT_OSS), **o),
    "mlp, clamped": lambda o: GroupedMLP(E, H, FEATURES, activation=ScaledSwiGLU(**GPT_OSS), **o),
    "mlp, interleaved": lambda o: GroupedMLP(E, H, FEATURES, activation=ScaledSwiGLU(glu_interleave_size=32), **o),
    "mlp, srelu": lambda o: GroupedMLP(E, H, FEATURES, activation=ScaledSReLU(), **o),
}
SPLITS = {"ragged": [0, 5, 0, 80, 1, 0, 0, 130], "few": [1] * 8, "none": [0] * 8}


def experts(kind, format):
    torch.manual_seed(1)
    module = FORMS[kind](dict(dtype=torch.bfloat16, device=DEVICE))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.mul_(3 if name.endswith("weight") else 10)  # so that clamps and biases matter
    return packed(module, format)


def run_exact_experts(module, x, offsets, scales=None):
    if isinstance(module, GroupedSwiGLU):
        gate_up = torch.cat([module.gate_proj.weight, module.up_proj.weight], 1)
        return trained_mlp(x, offsets, gate_up, module.down_proj.weight)
    gate_up, down = module.gate_up_proj, module.down_proj
    weights = gate_up.weight, down.weight, gate_up.bias, down.bias
    form = module.activation.form
    if form.kind != "swiglu":
        rows = F.relu(trained_linear(x, weights[0], offsets)).square()
        return trained_linear(rows, weights[1], offsets) * scales[:, None]
    options = dict(interleave=form.interleave, alpha=form.alpha, limit=form.limit, up_shift=form.up_shift)
    return trained_mlp(x, offsets, *weights, scales=scales, **options)


def run_experts(mesh, exchange, kind, format, splits):
    """Output and gradients of experts that are called with rows -> as `run_layer`."""
    rank, spread = place(mesh)
    whole = experts(kind, format)
    exact = exact_of(whole, "cpu")
    module = parallelize_module(copy.deepcopy(whole), mesh_of(mesh), style(mesh, exchange))
    cases = []
    for other in range(spread):
        generator = torch.Generator().manual_seed(other)
        sizes = torch.tensor(SPLITS[splits]).roll(other)
        rows = torch.randn(int(sizes.sum()) + 2, H, generator=generator).bfloat16()
        scales = torch.rand(rows.shape[0], generator=generator) if kind.startswith("mlp") else None
        cases.append((rows, sizes.cumsum(0).int(), scales, torch.randn(rows.shape, generator=generator)))

    def step(forward, case, device, dtype, scales_dtype):
        rows, offsets, scales, factors = (None if t is None else t.to(device) for t in case)
        live = int(offsets[-1])
        rows = rows.to(dtype).clone().requires_grad_()
        scales = None if scales is None else scales.to(scales_dtype).clone().requires_grad_()
        out = forward(rows, offsets, *([] if scales is None else [scales]))
        (out[:live] * factors[:live].to(out)).sum().backward()
        found = {"out": out[:live].detach(), "x": rows.grad[:live]}
        return found if scales is None else {**found, "scales": scales.grad[:live]}

    of_module = DEVICE, torch.bfloat16, torch.float32
    forwards = (functools.partial(run_exact_experts, exact), "cpu", torch.float64, torch.float64), (whole, *of_module)
    wanted, one = ([step(f, case, *kind) for case in cases][rank] for f, *kind in forwards)
    got = step(module, cases[rank], *of_module)
    one |= grads_of(whole)
    wanted |= {name: grad for name, grad in grads_of(exact).items() if name in one}
    for name, grad in grads_of(module).items():
        if isinstance(grad, DTensor):
            grad = grad.full_tensor()
        elif grad.shape != one[name].shape:  # stacked gate and up: a plain tensor of this rank's parts
            whole_mesh = mesh_of(mesh)
            tp = whole_mesh if mesh == "tp" else whole_mesh["tp"]
            for results in (one, wanted):
                part = results[name].unflatten(1, (2, tp.size(), -1))[:, :, tp.get_local_rank()].flatten(1, 2)
                results[name] = part.chunk(spread)[rank]
        got[name] = grad
    assert got.keys() == one.keys() == wanted.keys()
    return judged(got, one, wanted)


def quiet(mesh, exchange, format, train):
    """A warm step in which nothing waits for the device, and a CUDA graph of it with other tokens -> errors beside
    plain calls."""
    moe = parallelize_module(layer(format), mesh_of(mesh), style(mesh, exchange))
    generator = torch.Generator().manual_seed(5 + place(mesh)[0])
    inputs = [torch.randn(1, 40, H, generator=generator).bfloat16().to(DEVICE) for _ in range(4)]
    x = inputs[0].clone().requires_grad_(train)

    def step():
        out = moe(x)
        return [out, *(torch.autograd.grad(out.float().square().sum(), [x, moe.router.weight]) if train else [])]

    stream = torch.cuda.Stream()
    with torch.set_grad_enabled(train), torch.cuda.stream(stream):
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            results = step()
        errors = []
        for other in inputs:
            x.detach().copy_(other)
            graph.replay()
            torch.cuda.synchronize()
            got = [t.detach().clone() for t in results]
            errors += [relative_error(a.cpu(), b.detach().cpu()) for a, b in zip(got, step(), strict=True)]
            torch.cuda.synchronize()
    return errors


def compiled_layer(mesh, exchange, format, train, backend):
    """Errors of a compiled layer beside the plain one, with other numbers of tokens."""
    moe = parallelize_module(layer(format), mesh_of(mesh), style(mesh, exchange))
    run, errors = torch.compile(moe, fullgraph=True, backend=backend), []
    for count in (40, 7):
        x = (
            torch.randn(1, count, H, generator=torch.Generator().manual_seed(count + place(mesh)[0]))
            .bfloat16()
            .to(DEVICE)
        )
        results = []
        with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.set_grad_enabled(train):
            for forward in (moe, run):
                own = x.clone().requires_grad_(train)
                out = forward(own)
                grads = torch.autograd.grad(out.square().sum(), [own, moe.router.weight]) if train else []
                results.append([out.detach(), *grads])
        errors += [relative_error(b.cpu(), a.cpu()) for a, b in zip(*results, strict=True)]
    return errors


def saved(mesh, other, format, path):
    """A layer goes through torch.distributed.checkpoint to another mesh, and into one process, bit for bit."""
    whole = layer(format)
    moe = parallelize_module(copy.deepcopy(whole), mesh_of(mesh), style(mesh))
    dcp.save(moe.state_dict(), checkpoint_id=path)
    again = copy.deepcopy(whole)
    for tensor in (*again.parameters(), *again.buffers()):
        bits = tensor.data.view(torch.uint8)
        bits.fill_(8)
    single = copy.deepcopy(again)
    parallelize_module(again, mesh_of(other), style(other))
    target = again.state_dict()
    dcp.load(target, checkpoint_id=path)
    again.load_state_dict(target)
    fresh = single.state_dict()
    dcp.load(fresh, checkpoint_id=path, no_dist=True)
    single.load_state_dict(fresh)
    for name, tensor in single.state_dict().items():
        assert torch.equal(_bits(tensor), _bits(whole.state_dict()[name])), name
    fresh = parallelize_module(copy.deepcopy(whole), mesh_of(other), style(other))
    for (name, a), b in zip(_tensors(again), (t for _, t in _tensors(fresh)), strict=True):
        assert torch.equal(_bits(a), _bits(b)), name
    return True


def _tensors(module):
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if "load" not in name and "dropped" not in name:
            yield name, tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8)


def within(function, *args):
    """function(*args), independent of the calls before it."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    return function(*args)


def rows_in_8_bits(recipe, capacity):
    """Outputs and gradients of experts in bfloat16 whose rows travel in 8 bits: errors beside one process whose rows
    and gradients of results are rounded before it sees them."""
    torch.manual_seed(1)
    whole = GroupedMLP(E, H, FEATURES, recipe=recipe, dtype=torch.bfloat16, device=DEVICE)
    module = copy.deepcopy(whole)
    parallelize_module(module, mesh_of("ep"), ExpertParallel(exchange="all_to_all_8bit", capacity=capacity))
    rank, count = place("ep")[0], 200
    offsets = torch.tensor([9, 9, 90, 90, 90, 177, 200, 200], dtype=torch.int32, device=DEVICE)
    rows, scales, factors = (torch.randn(count, *size, device=DEVICE).bfloat16() for size in ((H,), (), (H,)))

    def step(experts, rows, factors, offsets, scales):
        rows = rows.clone().requires_grad_()
        out = experts(rows, offsets, scales)
        (out * factors).float().sum().backward()
        return out, rows.grad

    rounded = [round_to_recipe(values, recipe).bfloat16() for values in (rows, factors)]
    wanted = step(whole, *rounded, offsets, scales)
    mine = slice(0, 0 if rank else count)  # all rows of an expert are of one rank
    got = step(module, rows[mine], factors[mine], offsets * (rank == 0), scales[mine])
    pairs = [(a, b[mine]) for a, b in zip(got, wanted, strict=True) if a.numel()]
    pairs += [
        (own.grad.full_tensor(), reference.grad)
        for own, reference in zip(module.parameters(), whole.parameters(), strict=True)
    ]
    return [relative_error(a.double().cpu(), b.double().cpu()) for a, b in pairs]
