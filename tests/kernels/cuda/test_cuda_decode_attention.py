"""The kernel of decode_attention, run by the emulator on a CPU and by a GPU, against float64.
Called by pytest; judged by decode_attention_cases.py.
"""

import pytest
import torch
from decode_attention_cases import CASES, make, oracle
from emulated_gemms import emulate_device
from fast_cases import others_slow
from oracle import relative_error
from pairwise import pairwise

from thunder_moe import batch_invariant
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.kernels.cuda import decode_attention as launches
from thunder_moe.kernels.cuda import operators

TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
SPLITS = (1, 2, 8, 16)
FAST = [("qwen3", 8, torch.float16), ("16 heads a key", 2, torch.bfloat16), ("first token", 1, torch.bfloat16)]
OTHERS = [
    ("mixtral", 2, torch.float16),
    ("llama 4, no embedding", 8, torch.bfloat16),
    ("16 heads a key", 16, torch.bfloat16),
    ("one head, no mask", 1, torch.float16),
    ("batch", 2, torch.bfloat16),
]


def check(operands):
    wanted, keys, values = oracle(*operands)
    actual = cuda.decode_attention(*operands)
    assert actual.shape == operands[0].shape
    assert actual.dtype == operands[0].dtype
    assert relative_error(actual, wanted) < TOLERANCE[actual.dtype]
    assert torch.equal(operands[4], values)
    assert relative_error(operands[3], keys) < 1e-4  # a norm's last bit
    changed = torch.arange(keys.shape[2], device=keys.device) != operands[5]
    assert torch.equal(operands[3][:, :, changed], keys[:, :, changed])


@pytest.mark.parametrize(
    ("case", "splits", "dtype"),
    [
        *FAST,
        *others_slow(OTHERS),
        *others_slow(pairwise(list(CASES), SPLITS, list(TOLERANCE)), exhaustive=True),
    ],
)
def test_equals_float64(device, monkeypatch, case, splits, dtype):
    monkeypatch.setattr(launches, "_splits", lambda *_: splits)
    *sizes, options = CASES[case]
    check(make(device, dtype, *sizes, **options))


def test_parts_of_one_projection(device):
    """Query, key and value of two texts are columns of one matrix, as a fused projection gives them."""
    operands = make(device, torch.bfloat16, 2, 8, 2, 64, 40)
    together = torch.cat([each.flatten(1) for each in operands[:3]], 1)
    parts = together.split([8 * 64, 2 * 64, 2 * 64], 1)
    operands[:3] = [part.unflatten(1, (-1, 64)) for part in parts]
    assert not operands[0].is_contiguous()
    check(operands)


def test_prefetch_gives_the_same_bits(device):
    results = []
    for prefetch in (False, True):
        *tensors, epsilon, scale = make(device, torch.bfloat16, 2, 8, 2, 64, 200)
        tensors[4][:, :, int(tensors[5])] = torch.nan  # read early, and not used
        options = dict(epsilon=epsilon, scale=scale, prefetch=prefetch)
        results.append((operators.run("decode_attention", *tensors, **options), *tensors[3:5]))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_batch_invariant(device, monkeypatch):
    """A text has the same bits alone. Outside of the mode 8 and 2 blocks would share the keys of a head."""
    if torch.device(device).type == "cpu":
        emulate_device(monkeypatch, 64)
    *tensors, epsilon, scale = make(device, torch.float16, 5, 32, 4, 128, 200)

    def attend(texts):
        some = [each if each is None or each.shape[0] != 5 else each[texts].clone() for each in tensors]
        return cuda.decode_attention(*some, epsilon, scale)

    with batch_invariant():
        alone = [attend(slice(text, text + 1)) for text in range(5)]
        assert torch.equal(torch.cat(alone), attend(slice(None)))


@pytest.mark.parametrize("position", [26, 39])  # the last row, which the rows behind it repeat
def test_stale_keys_and_values_make_no_difference(device, position):
    """The cache holds NaN where the new token goes."""
    operands = make(device, torch.bfloat16, 2, 8, 2, 64, 40, position=position)
    for cache in operands[3:5]:
        cache[:, :, int(operands[5])] = torch.nan
    check(operands)


def test_a_text_that_attends_to_nothing_gets_zeros(device):
    operands = make(device, torch.bfloat16, 2, 4, 2, 64, 40, mask="bool")
    operands[6][1] = False
    check(operands)
    assert not cuda.decode_attention(*operands)[1].any()


def test_nan_stays_nan(device):
    operands = make(device, torch.bfloat16, 1, 8, 2, 64, 40, mask="bool")
    operands[0][0, 3] = torch.nan
    assert torch.equal(cuda.decode_attention(*operands).isnan().all(-1), torch.arange(8, device=device)[None] == 3)


def test_masks_at_any_address(device):
    operands = make(device, torch.bfloat16, 2, 8, 2, 64, 40, mask="bool")
    operands[6] = torch.cat([operands[6][:, :3], operands[6]], 1)[:, 3:]
    check(operands)
    operands[6] = torch.zeros(2, 43, device=device).bfloat16()[:, 3:]
    with pytest.warns(UserWarning, match="plain torch.*an operand is not aligned to 16 bytes"):
        check(operands)


def test_what_no_kernel_serves_runs_in_plain_torch(device):
    operands = make(device, torch.bfloat16, 1, 4, 2, 96, 20)
    with pytest.warns(UserWarning, match="decode_attention runs in plain torch.*heads of 96 numbers"):
        check(operands)


@pytest.mark.parametrize(
    ("pairs", "length", "splits"), [(4, 768, 8), (4, 4096, 16), (32, 768, 2), (128, 768, 1), (4, 20, 2), (200, 64, 1)]
)
def test_splits_of_an_h200(pairs, length, splits):
    assert launches._splits(pairs, length, 132) == splits
