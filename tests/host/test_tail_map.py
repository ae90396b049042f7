"""The low-rank map that answers for the tail."""

import pytest
import torch

from host import tail_map


def planted(rank: int, noise: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Changes whose responses are two linear maps of the given rank, one below sigma 0.5 and one above."""
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(2, 12, rank, generator=generator) @ torch.randn(2, rank, 12, generator=generator)
    sigmas = torch.linspace(0.05, 0.95, 40)
    change = torch.randn(40, 6, 12, generator=generator)
    response = change @ maps[(sigmas > 0.5).long()]
    return change, response + noise * torch.randn(response.shape, generator=generator), sigmas, maps


def test_planted_maps_are_found():
    change, response, sigmas, maps = planted(rank=3)
    found = tail_map.fit(change, response, sigmas, rank=3, bands=2, ridge=1e-9)
    torch.testing.assert_close(found.down @ found.up, maps, atol=1e-4, rtol=1e-4)
    assert found.explained(change, response, sigmas) == pytest.approx(1.0, abs=1e-6)


def test_one_band_cannot_answer_for_two():
    change, response, sigmas, _ = planted(rank=3)
    assert tail_map.fit(change, response, sigmas, rank=12, bands=1).explained(change, response, sigmas) < 0.9


def test_a_lower_rank_explains_less_but_the_most_it_can():
    change, response, sigmas, _ = planted(rank=3)
    shares = [
        tail_map.fit(change, response, sigmas, rank=rank, bands=2).explained(change, response, sigmas)
        for rank in (1, 2, 3)
    ]
    assert 0 < shares[0] < shares[1] < shares[2]
    # The best rank-1 map beats any random one of that rank.
    best = tail_map.fit(change, response, sigmas, rank=1, bands=1)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        down = torch.randn(1, 12, 1, generator=generator)
        # For a random direction the best up is a regression on that one number.
        x = (change @ down[0]).flatten(0, 1)
        up = torch.linalg.lstsq(x, response.flatten(0, 1)).solution[None]
        other = tail_map.TailMap(best.edges, down, up)
        assert other.explained(change, response, sigmas) <= best.explained(change, response, sigmas) + 1e-4


def test_noise_is_not_explained_on_other_samples():
    change, response, sigmas, _ = planted(rank=3, noise=1.0)
    fitted, other = slice(0, None, 2), slice(1, None, 2)
    found = tail_map.fit(change[fitted], response[fitted], sigmas[fitted], rank=3, bands=2)
    assert 0.5 < found.explained(change[other], response[other], sigmas[other]) < 1


def test_a_constant_residual_explains_nothing():
    change, response, sigmas, _ = planted(rank=3)
    zero = tail_map.TailMap(torch.empty(0), torch.zeros(1, 12, 1), torch.zeros(1, 1, 12))
    assert zero.explained(change, response, sigmas) == 0
    assert not zero.answer(change, sigmas).any()


def test_changes_are_those_of_input_and_residual():
    base = (torch.zeros(2, 3, 4), torch.ones(2, 3, 4))
    moved = (torch.full((2, 3, 4), 0.5), torch.full((2, 3, 4), 2.0))
    change, response = tail_map.changes([moved, base], base)
    assert change.shape == response.shape == (4, 3, 4)
    assert torch.equal(change[:2], torch.full((2, 3, 4), 0.5))
    # The residual was 1, now it is 1.5.
    assert torch.equal(response[:2], torch.full((2, 3, 4), 0.5))
    assert not change[2:].any()
    assert not response[2:].any()


def test_a_map_is_the_same_when_read_again(tmp_path):
    change, response, sigmas, _ = planted(rank=3)
    found = tail_map.fit(change, response, sigmas, rank=2, bands=2)
    found.save(tmp_path / "map.safetensors")
    assert torch.equal(
        tail_map.TailMap.load(tmp_path / "map.safetensors").answer(change, sigmas), found.answer(change, sigmas)
    )


def test_unfit_sizes_are_refused():
    change, response, sigmas, _ = planted(rank=3)
    for rank, bands in ((0, 1), (13, 1), (1, 41)):
        with pytest.raises(ValueError, match=rf"rank {rank} and {bands} bands for 40 samples of width 12"):
            tail_map.fit(change, response, sigmas, rank=rank, bands=bands)
