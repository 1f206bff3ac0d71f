"""The gated activations: their formula, their gradient against autograd, their names in messages. Called by pytest."""

import pytest
import torch

from thunder_moe.activations import SWIGLU, SwiGLUConfig, swiglu

FORMS = [SWIGLU, SwiGLUConfig(1.702, 7.0, 1.0), SwiGLUConfig(limit=0.5), SwiGLUConfig(alpha=1.3, up_shift=-0.5)]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gradient_is_that_of_autograd(form):
    gate_up = torch.randn(9, 14, dtype=torch.float64).mul(2).requires_grad_()
    grad = torch.randn(9, 7, dtype=torch.float64)
    form(*gate_up.chunk(2, -1)).backward(grad)
    torch.testing.assert_close(form.gradient(grad, gate_up.detach()), gate_up.grad)


def test_swiglu_is_silu_of_gate_times_up():
    gate, up = torch.randn(2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(SWIGLU(gate, up), torch.nn.functional.silu(gate) * up)


def test_scale_and_bias_come_before_the_activation():
    rows, scale, bias = torch.randn(4, 6), torch.rand(4), torch.randn(3, 6)
    offsets = torch.tensor([1, 1, 4], dtype=torch.int32)
    y = rows * scale[:, None] + bias[[0, 2, 2, 2]]
    torch.testing.assert_close(swiglu(rows, offsets, FORMS[1], scale, bias), FORMS[1](*y.chunk(2, -1)))


def test_names():
    assert str(SwiGLUConfig()) == "SwiGLU"
    assert str(SwiGLUConfig(1.702, 7.0, 1.0)) == "SwiGLU(alpha=1.702, limit=7.0, up_shift=1.0)"
