"""Every method that we are compared with: it learns, on a tiny SANA and a tiny FLUX, and touches what it should, no more."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from host.baselines.base import Task, Trained, span_residuals, velocity_losses
from host.baselines.block_skipping import BlockSkipping
from host.baselines.dreambooth import DreamBooth
from host.baselines.hollowed_net import HollowedNet
from host.baselines.lisa import Lisa
from host.baselines.lora import Lora
from host.baselines.lora_fa import LoraFA
from host.baselines.ours import Ours
from host.baselines.placeholder import TOKEN, Placeholder
from host.baselines.textual_inversion import TextualInversion
from host.baselines.zoodip import Zoodip, int8_transformer, subspace
from host.config import GenerateConfig
from host.generate import draw
from host.models import ModelFolder
from runtime.manifest import TrainingSpec
from tests.tiny_models import SANA_15, export_config, save_flux, save_sana_with_gemma, save_sd3, whole_prediction

GUIDANCE = 2.5
METHODS = {
    "lora": (Lora(), 1e-2),
    "lora-patches": (Lora(policy="low-to-high"), 1e-2),
    "dreambooth": (DreamBooth(title="DreamBooth", prior=False), 1e-3),
    "dreambooth-prior": (DreamBooth(title="DreamBooth, prior", prior=True), 1e-3),
    "textual-inversion": (TextualInversion(), 1e-1),
    "lora-fa": (LoraFA(), 1e-2),
    "lisa": (Lisa(period=4), 1e-3),
    "hollowed-net": (HollowedNet(), 1e-2),
    "zoodip": (Zoodip(distance=1e-2, directions=5, history=16), 1e-1),
    "skipping-without-residuals": (BlockSkipping(title="x", cut=(1, 2), residuals=False), 1e-2),
    "skipping": (BlockSkipping(title="x", cut=(1, 2), residuals=True), 1e-2),
    "tail-runs": (BlockSkipping(title="x", cut=(1, 2), tail_runs=True), 1e-2),
    "first-half-skipped": (BlockSkipping(title="x", cut=(2, 0), residuals=True), 1e-2),
    "last-half-skipped": (BlockSkipping(title="x", cut=(0, 2), residuals=True), 1e-2),
    "ours": (Ours(title="ours", cut=(1, 2)), 1e-2),
}


@pytest.fixture(
    scope="module", params=["sana", *(pytest.param(name, marks=pytest.mark.long) for name in ("flux", "sd3"))]
)
def task(request, photos_dir, tmp_path_factory) -> Task:
    """Four samples, all of them in every step: then the loss falls from step to step if anything is learnt."""
    save = {"sana": lambda folder: save_sana_with_gemma(folder, SANA_15), "flux": save_flux, "sd3": _deeper_sd3}
    model = save[request.param](tmp_path_factory.mktemp("baselines") / request.param)
    config = export_config(model, samples=4, image_side=128, patch_side=64, guidance=GUIDANCE)
    training = TrainingSpec(steps=8, accumulation=4, checkpoint_every=8, weight_decay=0.0)
    return Task(
        config=replace(config, train=training, generate=GenerateConfig(steps=1)),
        photos_dir=photos_dir,
        words="sks thing",
        class_words="thing",
        prior_prompts=("a photo of a thing",),
    )


@pytest.fixture(params=METHODS)
def method(request) -> str:
    return request.param


def _deeper_sd3(folder: Path) -> Path:
    return save_sd3(folder, num_layers=4)


def trained_by(task: Task, method: str, work_dir: Path) -> Trained:
    row, rate = METHODS[method]
    return row.train(replace(task, config=with_training(task, learning_rate=rate)), work_dir)


def with_training(task: Task, **changes):
    return replace(task.config, train=replace(task.config.train, **changes))


def changed(transformer, base) -> set[str]:
    """Names of the base's parameters that are not what they were."""
    now = {name.replace(".base_layer", ""): value for name, value in transformer.named_parameters()}
    return {name for name, value in base.named_parameters() if not torch.equal(now[name], value)}


def test_a_method_learns_and_touches_what_it_should(task, method, tmp_path):
    trained = trained_by(task, method, tmp_path)
    assert len(trained.losses) == task.training.steps
    # The token alone can do little for a random model; zeroth-order steps are noisy.
    assert min(trained.losses[-2:]) < trained.losses[0]
    base = ModelFolder(task.config.export.model).load("transformer")
    blocks = [ref.module for ref in trained.model.adapter.blocks(base)]
    touched = changed(trained.transformer, base)
    lora = {name: value for name, value in trained.tensors.items() if "lora_" in name}
    if method in ("dreambooth", "dreambooth-prior"):
        # FLUX's text stream ends before the output, so a few of its last weights see no gradient.
        assert len(touched) > 0.9 * len(list(base.named_parameters()))
        assert not lora
    elif method == "lisa":
        inside = {name for name in touched if name.startswith(tuple(f"{block}." for block in blocks))}
        active = {next(block for block in blocks if name.startswith(f"{block}.")) for name in inside}
        assert len(active) in (2, 3, 4)  # two draws of two blocks
        assert touched - inside, "embeddings and output layers always train"
    elif method == "zoodip":
        assert touched == changed(int8_transformer(task.pool("full")), base) != set()
        assert trained.tensors.keys() == {n for n in trained.model.components() if n.startswith("text_encoder")}
    elif method == "textual-inversion":
        assert not touched
        assert trained.tensors.keys() == {n for n in trained.model.components() if n.startswith("text_encoder")}
    else:
        assert not touched
        trained_blocks = {
            "lora": blocks,
            "lora-patches": blocks,
            "lora-fa": blocks,
            "hollowed-net": [blocks[i] for i in range(len(blocks)) if i not in hollow_of(len(blocks))],
            "skipping": blocks[1:-2],
            "skipping-without-residuals": blocks[1:-2],
            "tail-runs": blocks[1:-2],
            "ours": blocks[1:-2],
            "first-half-skipped": blocks[2:],
            "last-half-skipped": blocks[:-2],
        }[method]
        assert lora.keys() == trained.tensors.keys()
        names = [name.removeprefix("transformer.") for name in lora]
        found = {next(block for block in blocks if name.startswith(f"{block}.")) for name in names}
        assert found == set(trained_blocks)
        moved = {name for name, value in lora.items() if "lora_B" in name and value.any()}
        assert len(moved) > 0.8 * len(lora) / 2


def hollow_of(num_blocks: int) -> range:
    removed = max(1, round(0.3 * num_blocks))
    return range((num_blocks - removed) // 2, (num_blocks - removed) // 2 + removed)


def test_lora_fa_leaves_every_a_as_it_was_drawn(task, tmp_path):
    trained = trained_by(task, "lora-fa", tmp_path)
    start = Lora().train(replace(task, config=with_training(task, steps=1, learning_rate=1e-30)), tmp_path)
    for name, value in trained.tensors.items():
        assert torch.equal(value, start.tensors[name]) == ("lora_A" in name), name


def test_losses_are_those_of_diffusers_whole_model(task):
    pool = task.pool("full")
    transformer = pool.model.load("transformer")
    with torch.no_grad():
        losses = velocity_losses(pool.model, transformer, pool.patches, GUIDANCE)
        for row, loss in enumerate(losses):
            patch = pool.patches[[row]]
            sigma = float(patch.sigmas)
            noisy = (1 - sigma) * patch.latents + sigma * patch.noise
            predicted = whole_prediction(transformer, noisy, sigma, patch.prompts, GUIDANCE)
            expected = (predicted - (patch.noise - patch.latents)).pow(2).mean()
            torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)


def test_an_untrained_skip_with_residuals_is_the_base_itself(task, tmp_path):
    pool = task.pool("low-to-high", (1, 2))
    transformer = pool.model.load("transformer")
    with torch.no_grad():
        base = velocity_losses(pool.model, transformer, pool.patches, GUIDANCE).mean()
    once = replace(task, config=with_training(task, steps=1))
    with_residuals, without = (
        BlockSkipping(title="x", cut=(1, 2), residuals=kept).train(once, tmp_path).losses[0] for kept in (True, False)
    )
    assert with_residuals == pytest.approx(float(base), rel=1e-5)
    assert without != pytest.approx(float(base), rel=1e-3)
    longer = replace(task, config=with_training(task, steps=3, learning_rate=1e-2))
    stored, running = (
        BlockSkipping(title="x", cut=(1, 2), tail_runs=runs).train(longer, tmp_path).losses for runs in (False, True)
    )
    assert running[0] == pytest.approx(stored[0], rel=1e-5)
    assert running[-1] != pytest.approx(stored[-1], rel=1e-5), "the tail answers once the middle has moved"
    whole = range(len(pool.model.adapter.blocks(transformer)))
    first, second, both = span_residuals(pool, transformer, [whole[:2], whole[2:], whole])
    torch.testing.assert_close(first + second, both, rtol=1e-4, atol=1e-5)


def test_skipping_in_pytorch_takes_the_steps_of_the_runtime(task, tmp_path):
    ours, skipping = (trained_by(task, name, tmp_path / name) for name in ("ours", "skipping"))
    # The two draw other starts of A; with B zero the first loss does not see them.
    assert skipping.losses[0] == pytest.approx(ours.losses[0], rel=1e-4)
    assert skipping.losses[-1] == pytest.approx(ours.losses[-1], rel=0.05)


def test_micro_batches_give_the_same_steps(task, tmp_path):
    whole = trained_by(task, "lora", tmp_path)
    apart = trained_by(replace(task, micro_batch=1), "lora", tmp_path)
    assert apart.losses == pytest.approx(whole.losses, rel=1e-4)


def test_a_new_token_reads_as_the_class_until_it_is_trained(task):
    model = ModelFolder(task.config.export.model)
    # Of a class of one token the vector is that token's own, so nothing may change, pooled states included.
    placeholder = Placeholder(model, "t")
    expected, got = (placeholder.encode([text], None) for text in ("a photo of t", f"a photo of {TOKEN}"))
    plain = model.encode_prompts(["a photo of t"])
    torch.testing.assert_close(expected.states, plain.states)
    if got.pooled is None:
        torch.testing.assert_close(got.states, expected.states, atol=1e-5, rtol=1e-5)
    else:
        # This T5's tokens are single characters with a space before words, which an added token has not: CLIP it is.
        torch.testing.assert_close(got.pooled, expected.pooled, atol=1e-5, rtol=1e-5)
    placeholder.set(torch.cat([vector + 1 for vector in placeholder.vectors.values()]))
    assert not torch.allclose(placeholder.encode([f"a photo of {TOKEN}"], None).states, got.states)


def test_a_learnt_token_draws_through_the_family_s_pipeline(task, tmp_path):
    trained = trained_by(task, "textual-inversion", tmp_path)
    pictures = [
        draw(
            trained.model,
            [f"a photo of {word}"],
            [0],
            transformer=trained.transformer,
            steps=1,
            guidance=2.0,
            image_side=128,
            label="",
        )[0]
        for word in (trained.words, "thing")
    ]
    assert pictures[0].size == (128, 128)
    assert pictures[0].tobytes() != pictures[1].tobytes()


def test_words_that_no_photo_s_prompt_has_are_refused(task, tmp_path):
    for name in ("textual-inversion", "zoodip"):
        with pytest.raises(ValueError, match=r"'a blue cat' is in none of the photos' prompts"):
            METHODS[name][0].train(replace(task, words="a blue cat"), tmp_path)


def test_prior_preservation_without_prompts_of_the_class_is_refused(task, tmp_path):
    with pytest.raises(ValueError, match="prior preservation needs prompts"):
        METHODS["dreambooth-prior"][0].train(replace(task, prior_prompts=()), tmp_path)


def test_the_subspace_holds_the_directions_the_token_moved_in():
    generator = torch.Generator().manual_seed(0)
    directions, _ = torch.linalg.qr(torch.randn(20, 3, generator=generator))
    tokens = torch.randn(64, 3, generator=generator) @ directions.T + 1e-4 * torch.randn(64, 20, generator=generator)
    basis = subspace(tokens, 1e-3)
    assert basis.shape == (20, 3)
    torch.testing.assert_close(basis @ basis.T, directions @ directions.T, atol=1e-3, rtol=0)
