"""What the four processes of the tests of parallelism run, through `within`: every function gets the process's meshes
first. Called by the fixture `run`; calls thunder_moe.parallel, and one process without parallelism as the judge.
"""

import copy
import functools
import time
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import torch.distributed.checkpoint as dcp
from oracle import round_to_recipe
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

from thunder_moe import (
    GroupedMLP,
    GroupedSwiGLU,
    Llama4MoE,
    Llama4MoEConfig,
    ScaledSReLU,
    ScaledSwiGLU,
    add_lora_,
    prepare_qat_,
    quantize_,
)
from thunder_moe.parallel import Exchange, ExpertParallel, Sent, TensorParallel, exchange, expert_load, rows_in_8_bits
from thunder_moe.parallel.exchange import AllGather, SymmetricMemory

H, FEATURES, E, A = 64, 128, 8, 3
# Tokens of each of four ranks; two ranks have the first two.
TOKENS = {
    "even": (5, 5, 5, 5),
    "ragged": (1, 7, 0, 3),
    "one rank alone": (0, 6, 0, 0),
    "fewer than ranks": (1, 0, 0, 0),
    "none": (0, 0, 0, 0),
}
STYLES = {
    "exact": dict(exchange="all_to_all"),
    "capacity": dict(exchange="all_to_all", capacity=7),
    "gather": dict(exchange="all_gather"),
    "gather, capacity": dict(exchange="all_gather", capacity=7),
    "chunks": dict(exchange="all_to_all", chunks=2),
    "gather, chunks": dict(exchange="all_gather", capacity=7, chunks=3),
}
ROOMY = dict(exchange="all_to_all", capacity=18)  # for the rows of SPLITS in test_parallel


@dataclass(frozen=True)
class Meshes:
    """The meshes of a process: all four, its half, both dimensions of two halves, and its rank among all."""

    four: DeviceMesh
    two: DeviceMesh
    grid: DeviceMesh
    rank: int

    def of(self, ranks: int) -> DeviceMesh:
        return {2: self.two, 4: self.four}[ranks]


@functools.cache
def meshes() -> Meshes:
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "of"))
    return Meshes(init_device_mesh("cpu", (4,)), halves["of"], halves, dist.get_rank())


def within(ranks, function, *args):
    """function(meshes, *args) in the first ranks, independent of the calls before it."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    return function(meshes(), *args) if meshes().rank < ranks else None


def error(actual, wanted):
    return ((actual.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30)).item()


def layer(quantized=False, shared=1, dtype=torch.float32, layout="auto"):
    torch.manual_seed(1)
    moe = Llama4MoE(Llama4MoEConfig(H, FEATURES, E, num_shared_experts=shared, top_k=A), dtype=dtype)
    return quantize_(moe, layout=layout, format=format_of(quantized)) if quantized else moe


def format_of(quantized):
    """The number format of a test's weights: "nvfp4" of True."""
    return quantized if isinstance(quantized, str) else "nvfp4"


def experts(kind, quantized=False):
    torch.manual_seed(1)
    module = {
        "swiglu": lambda: GroupedSwiGLU(E, H, FEATURES),
        "mlp": lambda: GroupedMLP(E, H, FEATURES),
        "mlp, bias": lambda: GroupedMLP(E, H, FEATURES, bias=True),
        "mlp, interleaved": lambda: GroupedMLP(E, H, FEATURES, activation=ScaledSwiGLU(glu_interleave_size=16)),
        "mlp, fp8": lambda: GroupedMLP(E, H, FEATURES, recipe="fp8"),
        "mlp, mxfp8": lambda: GroupedMLP(E, H, FEATURES, recipe="mxfp8"),
        "mlp, srelu": lambda: GroupedMLP(E, H, FEATURES, activation=ScaledSReLU()),
    }[kind]()
    return packed(module, format=format_of(quantized)) if quantized else module


def packed(module, layout="auto", format="nvfp4"):
    return quantize_(torch.nn.Sequential(module), layout=layout, format=format)[0]


def skew(moe):
    """Has the router send all tokens to the experts of the last rank."""
    with torch.no_grad():
        moe.router.weight[:] = 0
        moe.router.weight[-A:, 0] = torch.arange(1.0, A + 1)
    return moe


def run_layer(meshes, ranks, style, tokens, quantized, to_last):
    """Output and gradients of a layer -> the largest error beside one process."""
    mesh, counts = meshes.of(ranks), TOKENS[tokens][:ranks]
    whole = layer(quantized)
    whole = skew(whole) if to_last else whole
    moe = copy.deepcopy(whole)
    parallel = ExpertParallel(**STYLES[style])
    assert parallelize_module(moe, mesh, parallel) is moe
    x = torch.randn(sum(counts), H)
    x[:, 0] = x[:, 0].abs() + 1
    mine = slice(sum(counts[: mesh.get_local_rank()]), sum(counts[: mesh.get_local_rank() + 1]))
    factors = torch.randn_like(x)
    wanted_x = x.clone().requires_grad_()
    wanted = whole(wanted_x[None])[0]
    (wanted * factors).sum().backward()
    own_x = x[mine].clone().requires_grad_()
    out = moe(own_x[None])[0]
    assert out.shape == own_x.shape
    (out * factors[mine]).sum().backward()
    errors = [error(out, wanted[mine]), error(own_x.grad, wanted_x.grad[mine])]
    for parameter, reference in zip(moe.parameters(), whole.parameters(), strict=True):
        if isinstance(parameter, DTensor):
            assert parameter.placements == (Shard(0),)
            assert parameter.to_local().shape[0] == E // ranks
            got = parameter.grad.full_tensor()
        else:
            got = parameter.grad.clone()
            dist.all_reduce(got, group=mesh.get_group())
        errors.append(error(got, reference.grad))
    with torch.no_grad():
        errors.append(error(moe(x[mine][None])[0], wanted[mine]))
    check_load(moe, mesh, whole, x)
    return max(errors)


def check_load(moe, mesh, whole, x):
    """Two steps were made; all ranks' rows are those of a router's choice."""
    (load,) = expert_load(moe).values()
    (everybody,) = expert_load(moe, all_ranks=True).values()
    ids = whole.router(x).topk(A).indices
    wanted = torch.bincount(ids.flatten(), minlength=E)
    first, count = load.first_expert, E // mesh.size()
    assert first == mesh.get_local_rank() * count
    steps = moe.chunks  # of a call
    assert (load.tokens[: -2 * steps] == -1).all()
    of_calls = load.tokens[-2 * steps :].unflatten(0, (2, steps)).sum(1)
    assert torch.equal(of_calls, wanted[first : first + count].expand(2, -1))
    assert torch.equal(everybody.tokens[-steps:].sum(0), wanted)
    assert everybody.first_expert == 0
    assert load.dropped == everybody.dropped == 0


def run_experts(meshes, ranks, style, kind, quantized, splits):
    """Output and gradients of experts that are called with rows -> the largest error beside one process."""
    mesh = meshes.of(ranks)
    tensor = style == "tensor"
    whole = experts(kind, quantized)
    module = copy.deepcopy(whole)
    parallelize_module(
        module, mesh, TensorParallel() if tensor else ExpertParallel(**{**STYLES, "roomy": ROOMY}[style])
    )
    rank = 0 if tensor else mesh.get_local_rank()
    sizes = [torch.tensor(splits).roll(other) for other in range(ranks)]
    past = 2  # rows behind the last expert's
    inputs = []
    for other, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(other)
        rows = torch.randn(int(size.sum()) + past, H, generator=generator)
        scales = torch.rand(rows.shape[0], generator=generator) if kind.startswith("mlp") else None
        inputs.append((rows, size.cumsum(0).int(), scales, torch.randn(rows.shape, generator=generator)))
    errors = []

    def step(experts, rows, offsets, scales, factors):
        rows = rows.clone().requires_grad_()
        scales = None if scales is None else scales.clone().requires_grad_()
        out = experts(rows, offsets) if scales is None else experts(rows, offsets, scales)
        live = int(offsets[-1])
        (out[:live] * factors[:live]).sum().backward()
        return out[:live], rows.grad[:live], *([] if scales is None else [scales.grad[:live]])

    results = [step(whole, *case) for case in (inputs[:1] if tensor else inputs)]
    got = step(module, *inputs[rank])
    errors += [error(a, b) for a, b in zip(got, results[rank], strict=True)]
    for parameter, reference in zip(module.parameters(), whole.parameters(), strict=True):
        if isinstance(parameter, DTensor):
            errors.append(error(parameter.grad.full_tensor(), reference.grad))
        else:
            half = reference.grad.unflatten(1, (2, ranks, -1))[:, :, mesh.get_local_rank()].flatten(1, 2)
            errors.append(error(parameter.grad, half))
    return max(errors)


def run_rows_in_8_bits(meshes, recipe, capacity, compile_=lambda experts: experts):
    """The largest error beside one process whose rows, and gradients of results, are rounded before it sees them."""
    mesh, style = meshes.two, ExpertParallel(exchange="all_to_all_8bit", capacity=capacity)
    whole = experts(f"mlp, {recipe}" if recipe else "mlp")
    module = parallelize_module(copy.deepcopy(whole), mesh, style)
    offsets = torch.tensor([9, 9, 9, 9, 17, 17, 17, 17], dtype=torch.int32)  # all rows of an expert are of one rank
    rows, scales, factors = torch.randn(17, H), torch.rand(17), torch.randn(17, H)
    rounded_rows, rounded_factors = (
        round_to_recipe(values, recipe).float() if recipe else values for values in (rows, factors)
    )

    def step(experts, rows, factors, offsets, scales):
        rows, scales = rows.clone().requires_grad_(), scales.clone().requires_grad_()
        out = experts(rows, offsets, scales)
        (out * factors).sum().backward()
        return out, rows.grad, scales.grad

    wanted = step(whole, rounded_rows, rounded_factors, offsets, scales)
    mine = slice(0, 17) if mesh.get_local_rank() == 0 else slice(0, 0)
    own = (rows[mine], factors[mine], offsets if mesh.get_local_rank() == 0 else torch.zeros_like(offsets))
    got = step(compile_(module), *own, scales[mine])
    errors = [error(a, b[mine]) for a, b in zip(got, wanted, strict=True)]
    for parameter, reference in zip(module.parameters(), whole.parameters(), strict=True):
        errors.append(error(parameter.grad.full_tensor(), reference.grad))
    return max(errors)


def opcheck_of_rows_in_8_bits(meshes, recipe, checks):
    mesh = meshes.two
    sending, coming = [1, 2], [1 + mesh.get_local_rank()] * 2
    route = (coming, sending, mesh.get_group().group_name)
    rows = torch.randn(3, H, requires_grad=True)
    codes, scales = rows_in_8_bits.encode(torch.randn(sum(coming), H), recipe)
    for operator, args in {
        "received_rows": (rows, codes, scales),
        "returned_sums": (rows, recipe),
        "gradients_of_rows": (rows.detach(), recipe),
    }.items():
        torch.library.opcheck(getattr(torch.ops.thunder_moe, operator).default, (*args, *route), test_utils=checks)
    for features in (H, 40):
        rows = torch.randn(3, features)
        torch.library.opcheck(torch.ops.thunder_moe.coded_rows.default, (rows, recipe), test_utils=checks)


def bytes_in_8_bits(meshes, recipe):
    """The bytes of a row in each all-to-all of a layer's forward and backward in bfloat16."""
    moe = layer(shared=0, dtype=torch.bfloat16)
    for part in moe.routed_experts.children():
        part.recipe = recipe
    moe = parallelize_module(moe, meshes.two, ExpertParallel(exchange="all_to_all_8bit", capacity=8))
    sent = []

    all_to_all = exchange.all_to_all

    def counted(x, *args):
        sent.append(x.nbytes // x.shape[0])
        return all_to_all(x, *args)

    x = torch.randn(1, 8, H).bfloat16().requires_grad_()
    with mock.patch.object(exchange, "all_to_all", counted):
        moe(x).float().square().sum().backward()
    return sent


def run_tensor_layer(meshes, ranks, quantized, shared, compile_=lambda moe: moe):
    mesh, whole = meshes.of(ranks), layer(quantized, shared)
    if whole.shared_expert is not None:
        whole.shared_expert.up_proj = torch.nn.Linear(H, whole.shared_expert.up_proj.out_features)  # with a bias
    moe = parallelize_module(copy.deepcopy(whole), mesh, TensorParallel())
    x = torch.randn(2, 5, H)
    factors = torch.randn_like(x)
    inputs, outputs = [], []
    compiled = compile_(moe)
    for module in (whole, compiled):
        inputs.append(x.clone().requires_grad_())
        outputs.append(module(inputs[-1]))
        (outputs[-1] * factors).sum().backward()
    errors = [error(outputs[1], outputs[0]), error(inputs[1].grad, inputs[0].grad)]
    for parameter, reference in zip(moe.parameters(), whole.parameters(), strict=True):
        grad = parameter.grad
        errors.append(error(grad.full_tensor() if isinstance(grad, DTensor) else grad, reference.grad))
    if compiled is moe:  # compiled, the programs of frozen layers show it
        with torch.no_grad():
            errors.append(error(moe(x), outputs[0]))
    return max(errors)


def run_both_layer(meshes, style, tokens, quantized):
    """`run_layer` with experts over one dimension of a mesh and their features over the other."""
    experts = meshes.grid[meshes.grid.mesh_dim_names[0]]
    rank, counts = experts.get_local_rank(), TOKENS[tokens][:2]
    whole = layer(quantized)
    moe = parallelize_module(copy.deepcopy(whole), meshes.grid, ExpertParallel(**STYLES[style]))
    x = torch.randn(sum(counts), H)
    mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    factors = torch.randn_like(x)
    wanted_x, own_x = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
    wanted, out = whole(wanted_x[None])[0], moe(own_x[None])[0]
    (wanted * factors).sum().backward()
    (out * factors[mine]).sum().backward()
    errors = [error(out, wanted[mine]), error(own_x.grad, wanted_x.grad[mine])]
    for (name, parameter), reference in zip(moe.named_parameters(), whole.parameters(), strict=True):
        if isinstance(parameter, DTensor) and "routed" in name:
            assert parameter.to_local().numel() == reference.numel() // 4
            got = parameter.grad.full_tensor()
        else:  # of router and shared expert a rank has those of its own tokens
            got = parameter.grad.to_local() if isinstance(parameter, DTensor) else parameter.grad.clone()
            dist.all_reduce(got, group=experts.get_group())
            if isinstance(parameter, DTensor):
                got = DTensor.from_local(got, meshes.grid, parameter.placements).full_tensor()
        errors.append(error(got, reference.grad))
    with torch.no_grad():
        errors.append(error(moe(x[mine][None])[0], wanted[mine]))
    (load,) = expert_load(moe, all_ranks=True).values()
    chosen = torch.bincount(whole.router(x).topk(A).indices.flatten(), minlength=E)
    assert torch.equal(load.tokens[-1], chosen)
    return max(errors)


def run_both_experts(meshes, kind, quantized):
    """The same of experts that are called with rows."""
    rank = meshes.grid.get_local_rank(0)
    whole = experts(kind, quantized)
    module = parallelize_module(copy.deepcopy(whole), meshes.grid, ExpertParallel())
    sizes = torch.tensor([0, 5, 0, 2, 1, 0, 0, 3]).roll(rank)
    results = []
    rows = torch.randn(11, H, generator=torch.Generator().manual_seed(rank))
    scales = torch.rand(11, generator=torch.Generator().manual_seed(rank))
    for run in (whole, module):
        own = [rows.clone().requires_grad_(), *([scales.clone().requires_grad_()] if kind != "swiglu" else [])]
        out = run(own[0], sizes.cumsum(0).int(), *own[1:])
        results.append([out, *torch.autograd.grad(out.square().sum(), own)])
    return max(error(b, a) for a, b in zip(*results, strict=True))


def saved_from_both(meshes, quantized, path):
    """Saves a layer that is cut both ways; it is the whole one's, bit for bit, and loads into such a layer again."""
    whole = layer(quantized)
    state = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    moe = parallelize_module(copy.deepcopy(whole), meshes.grid, ExpertParallel())
    dcp.save(moe.state_dict(), checkpoint_id=path)
    plain = layer(quantized)
    spoil(plain)
    fresh = plain.state_dict()
    dcp.load(fresh, checkpoint_id=path, no_dist=True)
    plain.load_state_dict(fresh)
    same(plain.state_dict(), state)
    from_whole = parallelize_module(layer(quantized), meshes.grid, ExpertParallel())
    spoil(from_whole)
    from_whole.load_state_dict(state)
    again = parallelize_module(layer(quantized), meshes.grid, ExpertParallel())
    spoil(again)
    target = again.state_dict()
    dcp.load(target, checkpoint_id=path)
    again.load_state_dict(target)
    for other in (from_whole, again):
        for key, tensor in other.state_dict().items():
            equal_local(tensor, moe.state_dict()[key])
    return True


def sums_while_they_travel(meshes, ranks, tokens, chunks):
    """A layer whose exchange adds up rows as "symmetric_memory" does between GPUs, by a collective of gloo."""

    class Exchange(AllGather):
        sums_rows = True
        send_rows_back = SymmetricMemory.send_rows_back

    def produce_and_exchange(producer, output, group_name):
        calls.append(group_name)
        parts = torch.full_like(output, float("nan"))
        for rank, part in enumerate(parts.chunk(ranks)):
            producer(rank, part)
        dist.all_to_all_single(output, parts, group=mesh.get_group())

    mesh, counts, calls = meshes.of(ranks), TOKENS[tokens][:ranks], []
    whole = layer(True)
    style = ExpertParallel(exchange="all_gather", capacity=7, chunks=chunks)
    moe = parallelize_module(copy.deepcopy(whole), mesh, style)
    moe.exchange = Exchange(mesh, moe.exchange.experts, 7)
    x = torch.randn(1, sum(counts), H)
    rank = mesh.get_local_rank()
    own = x[:, sum(counts[:rank]) : sum(counts[: rank + 1])]
    with torch.no_grad(), mock.patch.object(symmetric_memory, "_pipelined_produce_and_all2all", produce_and_exchange):
        out = moe(own)
        assert calls == ([mesh.get_group().group_name] if chunks == 1 else [])
        return error(out, whole(x)[:, sum(counts[:rank]) : sum(counts[: rank + 1])])


class OwnExchange(Exchange):
    """A user's: all tokens to all ranks as Python objects."""

    def start(self, x, ids, weights=None, early=None):
        group, everybody = self.mesh.get_group(), [None] * self.ranks
        dist.all_gather_object(everybody, (x, torch.cat([ids.float(), weights], 1)), group=group)
        rows, routing = (torch.cat(tensors) for tensors in zip(*everybody, strict=True))
        counts = [tokens.shape[0] for tokens, _ in everybody]
        return Sent(rows, routing, ids.shape[1], True, x.shape[0], self.first, None, (counts,))

    def send_back(self, sums, sent):
        dist.all_reduce(sums, group=self.mesh.get_group())
        return sums

    def finish(self, returned, sent):
        return returned.split(sent.back[0])[self.rank]


def own_exchange(meshes, ranks, tokens):
    mesh, counts = meshes.of(ranks), TOKENS[tokens][:ranks]
    whole = layer(True)
    moe = parallelize_module(copy.deepcopy(whole), mesh, ExpertParallel(exchange=OwnExchange))
    x, rank = torch.randn(1, sum(counts), H), mesh.get_local_rank()
    mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    with torch.no_grad():
        return error(moe(x[:, mine]), whole(x)[:, mine])


def overflow(meshes, capacity):
    """All tokens want the last rank, which has room for `capacity` of each rank: which tokens miss it -> dropped."""
    mesh = meshes.four
    whole = skew(layer(shared=0))
    moe = parallelize_module(copy.deepcopy(whole), mesh, ExpertParallel(capacity=capacity))
    x = torch.randn(1, 5, H)
    x[..., 0] = x[..., 0].abs() + 1
    with torch.no_grad():
        out, wanted = moe(x), whole(x)
    # Two experts are on the last rank; the third, the weakest, on the one before.
    assert error(out[:, :capacity], wanted[:, :capacity]) < 1e-5
    assert capacity == 5 or (out[:, capacity:] == 0).all()
    (load,) = expert_load(moe).values()
    (everybody,) = expert_load(moe, all_ranks=True).values()
    assert everybody.dropped == 4 * load.dropped
    return int(load.dropped)


def recomputed(meshes):
    """Gradients of a layer under torch.utils.checkpoint -> its steps, and the tokens that it dropped, beside a plain
    layer's."""
    found = []
    for run in (lambda moe, x: moe(x), lambda moe, x: checkpoint(moe, x, use_reentrant=False)):
        moe = parallelize_module(layer(), meshes.two, ExpertParallel(capacity=1))
        x = torch.randn(1, 5, H, generator=torch.Generator().manual_seed(meshes.rank), requires_grad=True)
        run(moe, x).sum().backward()
        (load,) = expert_load(moe).values()
        found.append(((load.tokens[:, 0] >= 0).sum().item(), load.dropped.item()))
    return found


def trained(meshes, style):
    """Steps of AdamW with clipped gradients as docs/distributed.md has them -> the largest error of norms and
    parameters beside one process. Under EP, DistributedDataParallel averages what all ranks have whole."""
    mesh, expert = meshes.two, style == "expert"
    whole = torch.nn.Sequential(torch.nn.Linear(H, H), layer())
    model = copy.deepcopy(whole)
    parallelize_module(model[1], mesh, ExpertParallel() if expert else TensorParallel())
    run = model
    if expert:
        own = [name for name, _ in model.named_parameters() if "routed_experts" in name]
        own += [name for name, _ in model.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
        run = DistributedDataParallel(model, process_group=mesh.get_group())
    parts = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    wholes = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    optimizers = [
        torch.optim.AdamW([{"params": parts}, {"params": wholes}], lr=1e-2, foreach=True),
        torch.optim.AdamW(whole.parameters(), lr=1e-2),
    ]
    x = torch.randn(1, 10, H)
    mine = x.tensor_split(2, 1)[mesh.get_local_rank()] if expert else x
    errors = []
    for _ in range(2):
        (run(mine).square().mean()).backward()
        whole(x).square().mean().backward()
        if expert:  # a sum over the ranks, whose losses are means of half the tokens each
            for parameter in parts:
                parameter.grad /= mesh.size()
        norms = get_total_norm([p.grad for p in parts]).full_tensor(), get_total_norm([p.grad for p in wholes])
        norm = torch.linalg.vector_norm(torch.stack(norms))
        for parameters in (parts, wholes):
            clip_grads_with_norm_(parameters, 1e-3, norm)
        errors.append(error(norm, torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e-3)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for parameter, reference in zip(model.parameters(), whole.parameters(), strict=True):
        errors.append(error(parameter.full_tensor() if isinstance(parameter, DTensor) else parameter, reference))
    return max(errors)


def sharded_otherwise(meshes, quantized):
    """Experts over one dimension of a mesh, all parameters over the other by `fully_shard` -> the largest error of the
    output and of the experts' gradients, which are means over that dimension."""
    whole = layer(quantized)
    moe = parallelize_module(copy.deepcopy(whole), meshes.grid["of"], ExpertParallel())
    fully_shard(moe, mesh=meshes.grid["half"])
    x = torch.randn(4, 5, H)
    results = []
    for run, own in ((whole, x), (moe, x[meshes.rank : meshes.rank + 1])):
        out = run(own)
        out.square().sum().backward()
        results.append(out)
    errors = [error(results[1], results[0][meshes.rank : meshes.rank + 1])]
    for (name, parameter), reference in zip(moe.named_parameters(), whole.parameters(), strict=True):
        if "routed" in name:
            errors.append(error(parameter.grad.full_tensor() * 2, reference.grad))
    assert len(errors) == 1 + 3 * (not quantized)
    return max(errors)


def steps_with_gradients(meshes, steps, seconds):
    """Run a layer of 3 chunks forward and backward, at most so often and so long -> how often it ran."""
    moe = parallelize_module(layer(), meshes.two, ExpertParallel(**STYLES["gather, chunks"]))
    x, done, start = torch.randn(1, 5, H, requires_grad=True), 0, time.monotonic()
    going = torch.ones(1)
    while done < steps and going:
        moe(x).sum().backward()
        done += 1
        if done % 10 == 0:  # the ranks stop together
            going[0] = time.monotonic() - start < seconds
            dist.broadcast(going, group=meshes.two.get_group(), group_src=0)
    return done


def checked_collective(meshes, collective):
    """torch.library.opcheck of a collective of the processes of a half, and its values."""
    group, operator = meshes.two.get_group(), getattr(torch.ops.thunder_moe, collective)
    x = torch.full((4, 3), meshes.two.get_local_rank() + 1.0, requires_grad=True)
    torch.library.opcheck(operator.default, (x, 2, group.group_name))
    out = operator(x, 2, group.group_name)
    factors = torch.arange(out.numel()).view(out.shape) * (meshes.two.get_local_rank() + 1.0)
    (grad,) = torch.autograd.grad((out * factors).sum(), x)
    if collective == "cpu_all_gather":  # the sum of both ranks' factors of these rows
        wanted = torch.tensor([1.0, 2.0]).repeat_interleave(4)[:, None].expand(8, 3)
        wanted_grad = 3 * torch.arange(24.0).view(2, 4, 3)[meshes.two.get_local_rank()]
    else:
        wanted = torch.full((2, 3), 3.0)
        wanted_grad = torch.cat([torch.arange(6.0).view(2, 3) * (rank + 1) for rank in range(2)])
    return torch.equal(out, wanted) and torch.equal(grad, wanted_grad)


def collectives_of_a_step(meshes, style):
    """The names of the operators that a step with gradients calls."""
    moe = parallelize_module(layer(), meshes.two, ExpertParallel(**STYLES[style]))
    with torch.profiler.profile() as profile:
        moe(torch.randn(1, 5, H, requires_grad=True)).sum().backward()
    return sorted({event.name for event in profile.events()})


def compiled(meshes, style, quantized, train):
    """A compiled layer -> the largest error beside the eager one, of its output and, to train, of gradients."""
    moe = parallelize_module(layer(quantized), meshes.two, ExpertParallel(**STYLES[style]))
    x = torch.randn(1, 5, H)
    results = []
    exact = STYLES[style].get("capacity") is None
    with torch._dynamo.config.patch(capture_scalar_outputs=exact), torch.set_grad_enabled(train):
        for run in (moe, torch.compile(moe, fullgraph=True, backend="aot_eager")):
            own = x.clone().requires_grad_(train)
            out = run(own)
            grads = torch.autograd.grad(out.square().sum(), [own, moe.router.weight]) if train else []
            results.append([out.detach(), *grads])
    return max(error(b, a) for a, b in zip(*results, strict=True))


def compiled_tensor(meshes, quantized):
    moe = parallelize_module(layer(quantized), meshes.two, TensorParallel())
    run = torch.compile(moe, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 5, H)
    with torch.no_grad():
        return error(run(x), moe(x))


def refused(meshes, ranks, build, style):
    """What parallelize_module raises -> its message; a collective before it would hang, as only some ranks call it."""
    if meshes.rank % 2:
        return None
    module = build()
    try:
        parallelize_module(module, meshes.of(ranks), style)
    except (TypeError, ValueError) as reason:
        return f"{type(reason).__name__}: {reason}"
    return "nothing was raised"


def uneven():
    return GroupedSwiGLU(6, H, FEATURES)


def uneven_quantized():
    return packed(uneven())


def adapted():
    return add_lora_(packed(GroupedSwiGLU(E, H, FEATURES)), 2, 2.0)


def trained_in_4_bits():
    return prepare_qat_(torch.nn.Sequential(GroupedSwiGLU(E, H, FEATURES)))[0]


def own_linear():
    moe = layer()
    moe.shared_expert.up_proj = OwnLinear(H, FEATURES, bias=False)
    return moe


class OwnLinear(torch.nn.Linear):
    """With a forward that a cut would lose."""

    def forward(self, x):
        return 2 * super().forward(x)


def narrow():
    return GroupedSwiGLU(E, H, 30)


def narrow_quantized():
    return packed(GroupedSwiGLU(E, H, 32))


def narrow_blocks():
    return packed(GroupedSwiGLU(2, H, 64), "linear", "mxfp8")


def narrow_tiles():
    return packed(GroupedSwiGLU(2, H, FEATURES), "tiled_64x64")


def parallel_already():
    return parallelize_module(GroupedSwiGLU(E, H, FEATURES), meshes().two, ExpertParallel(), src_data_rank=None)


def own_forward():
    module = GroupedSwiGLU(E, H, FEATURES)
    module.forward = lambda x, offsets: x
    return module


def biased():
    return GroupedMLP(E, H, FEATURES, bias=True)


def main_grad():
    return GroupedMLP(E, H, FEATURES, accumulate_into_main_grad=True)


def pairs():
    return GroupedMLP(E, H, 96, activation=ScaledSwiGLU(glu_interleave_size=32))


def linear():
    return torch.nn.Linear(4, 4)


def other_dimensions(meshes, style):
    """Meshes of three dimensions and of two without names -> what each raises."""
    reasons = []
    for mesh in (init_device_mesh("cpu", (2, 2, 1)), init_device_mesh("cpu", (2, 2))):
        try:
            parallelize_module(GroupedSwiGLU(E, H, FEATURES), mesh, style)
        except ValueError as reason:
            reasons.append(str(reason))
    return reasons


def no_gpu(meshes):
    moe = parallelize_module(layer(), meshes.two, ExpertParallel(exchange="symmetric_memory"))
    try:
        moe(torch.randn(1, 4, H))
    except ValueError as reason:
        return str(reason)
    return "nothing was raised"


def shallow_copies(meshes):
    moe = parallelize_module(layer(), meshes.two, TensorParallel())
    x, outcomes = torch.randn(1, 4, H), []
    moe(x)
    for module in (moe, moe.shared_expert.gate_proj):
        try:
            copy.copy(module)(x)
            outcomes.append("nothing was raised")
        except ValueError as reason:
            outcomes.append(str(reason))
    return outcomes


def too_many(meshes):
    moe = parallelize_module(layer(), meshes.two, ExpertParallel(exchange="all_gather", capacity=3))
    try:
        moe(torch.randn(1, 4, H))
    except ValueError as reason:
        return str(reason)
    return "nothing was raised"


def saved(meshes, ranks, style, quantized, layout, path):
    """Saves a sharded layer; loads it on other numbers of ranks, in one process and in another style -> all is equal,
    bit for bit."""
    styles = {"expert": ExpertParallel, "tensor": TensorParallel}
    whole = layer(quantized, layout=layout)
    state = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    moe = parallelize_module(copy.deepcopy(whole), meshes.of(ranks), styles[style]())
    if ranks == 4 or meshes.rank < 2:
        group = meshes.four.get_group() if ranks == 4 else meshes.two.get_group()
        dcp.save(moe.state_dict(), checkpoint_id=path, process_group=group)
    dist.barrier()
    plain = layer(quantized, layout=layout)
    spoil(plain)
    fresh = plain.state_dict()
    dcp.load(fresh, checkpoint_id=path, no_dist=True)
    plain.load_state_dict(fresh)
    same(plain.state_dict(), state)
    others = [(2, "expert"), (4, "expert"), (2, "tensor"), (4, "tensor")]
    for count, name in others[:3] if layout == "tiled_64x64" else others:
        other = layer(quantized, layout=layout)
        spoil(other)
        parallelize_module(other, meshes.of(count), styles[name]())
        target = other.state_dict()
        dcp.load(target, checkpoint_id=path, no_dist=True)
        other.load_state_dict(target)
        with torch.no_grad():
            x = torch.randn(1, 4, H)
            assert error(other(x), whole(x)) < 1e-5
        again = layer(quantized, layout=layout)
        parallelize_module(again, meshes.of(count), styles[name]())
        spoil(again)
        again.load_state_dict(state)  # a whole one, of which each rank takes its part
        for key, tensor in again.state_dict().items():
            equal_local(tensor, target[key])
    return True


def spoil(module):
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.itemsize == 1:  # a scale of zero would have the codes cleared
                local.view(torch.uint8).fill_(8)
            else:
                local.zero_()


def equal_local(a, b):
    parts = []
    for tensor in (a, b):
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        parts.append(local.local_shards() if hasattr(local, "local_shards") else [local])
    for one, other in zip(*parts, strict=True):
        assert torch.equal(bits(one), bits(other))


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def same(state, wanted):
    assert state.keys() == wanted.keys()
    for name, tensor in state.items():
        assert torch.equal(bits(tensor), bits(wanted[name])), name


def source_of_weights(meshes):
    """Rank 0's weights are everybody's, as parallelize_module has it."""
    torch.manual_seed(meshes.rank)
    for quantized in (False, True):
        torch.manual_seed(meshes.rank)
        block = GroupedSwiGLU(E, H, FEATURES)
        block = packed(block) if quantized else block
        torch.manual_seed(0)
        wanted = GroupedSwiGLU(E, H, FEATURES)
        wanted = (packed(wanted) if quantized else wanted).state_dict()
        parallelize_module(block, meshes.four, ExpertParallel())
        for name, tensor in block.state_dict().items():
            if tensor.dtype == torch.float8_e4m3fn:
                continue
            assert torch.equal(tensor.full_tensor(), wanted[name]), name
    return True


def dies(meshes, style):
    """The last rank ends; the others call the layer -> the error they get."""
    moe = parallelize_module(layer(), meshes.four, ExpertParallel(**STYLES[style]))
    dist.barrier()
    if meshes.rank == 3:
        import os

        os._exit(1)
    try:
        for _ in range(3):
            moe(torch.randn(1, 5, H)).sum().item()
    except RuntimeError as failure:
        return str(failure)
    return "nothing was raised"


def loaded_from_meta(meshes, style, quantized, path):
    """A layer that no rank ever held whole: made on the meta device, cut, loaded by torch.distributed.checkpoint."""
    whole = layer(quantized)
    if meshes.rank == 0:
        dcp.save(whole.state_dict(), checkpoint_id=path, no_dist=True)
    dist.barrier()
    moe = layer(quantized).to("meta")
    parallelize_module(moe, meshes.four, {"expert": ExpertParallel, "tensor": TensorParallel}[style]())
    assert all(tensor.is_meta for tensor in moe.parameters())
    moe.to_empty(device="cpu")
    state = moe.state_dict()
    dcp.load(state, checkpoint_id=path)
    moe.load_state_dict(state)
    x = torch.randn(1, 4, H)
    with torch.no_grad():
        return error(moe(x), whole(x))
