import math

import pytest
import torch

from runtime.optimizer import AdamW, clip_gradient, scheduled_rate


def test_adamw_equals_torchs_over_many_steps():
    torch.manual_seed(0)
    start = torch.randn(50)
    ours, theirs = start.clone(), torch.nn.Parameter(start.clone())
    optimizer = AdamW(50)
    reference = torch.optim.AdamW([theirs], lr=3e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.05)
    for _ in range(100):
        gradient = torch.randn(50)
        optimizer.step(ours, gradient, learning_rate=3e-3, beta1=0.9, beta2=0.99, epsilon=1e-8, weight_decay=0.05)
        theirs.grad = gradient
        reference.step()
    torch.testing.assert_close(ours, theirs.data, rtol=1e-5, atol=1e-6)


def test_clipping_equals_torchs_and_zero_turns_it_off():
    gradient = torch.tensor([3.0, 4.0])
    assert clip_gradient(gradient, 1.0) == pytest.approx(5.0)
    torch.testing.assert_close(gradient, torch.tensor([0.6, 0.8]))
    assert clip_gradient(gradient, 10.0) == pytest.approx(1.0)
    big = torch.tensor([30.0, 40.0])
    assert clip_gradient(big, 0.0) == pytest.approx(50.0)
    assert big.tolist() == [30.0, 40.0]


def test_the_rate_warms_up_then_stays_or_falls():
    rates = [scheduled_rate(s, steps=110, learning_rate=1.0, warmup_steps=10, schedule="cosine") for s in range(110)]
    assert rates[:10] == pytest.approx([(s + 1) / 10 for s in range(10)])
    assert rates[10] == 1.0
    assert rates[60] == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.5)))
    assert all(a > b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert scheduled_rate(99, steps=100, learning_rate=0.3, warmup_steps=0, schedule="constant") == 0.3
