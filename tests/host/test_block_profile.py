"""Which blocks a model can do without: the maths, the masking in every family, the procedure on a planted model, the file."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import diffusers
import numpy as np
import peft
import pytest
import torch

from host import block_selection
from host.block_profile import (
    SHARES,
    BlockProfile,
    Cost,
    Curves,
    Decision,
    agreement,
    architecture_of,
    choose_cut,
    decide,
    rank_correlation,
    read_profile,
    write_profile,
)
from host.block_profile_page import page
from host.block_selection import Request, Selection, all_spans, curve_spans, fold_lora
from host.charts import Mark, Series, line_chart
from host.cli import main
from host.config import GenerateConfig
from host.cut import SHIPPED_DIR, find_profile, resolve_cut, shipped_profiles
from host.exporter import Exporter
from host.models import EMBEDDED, ModelFolder, PromptStates
from host.models.base import adapter_of
from host.models.folder import skeleton_of
from host.plan import PAPER_CUTS, skipped_of_share
from runtime.errors import SchemaError
from runtime.manifest import read_manifest
from tests.page_check import Page
from tests.tiny_models import FLUX, SANA, SD3, export_config, save_sana, small_vae

ROOT = Path(__file__).parents[2]


def picture(first, last, subject="dog", seed=0, **more) -> Curves:
    return Curves(subject=subject, prompt="x", seed=seed, first=tuple(first), last=tuple(last), **more)


# The choice.


def test_the_cheapest_of_all_ways_is_chosen_and_the_next_best_tells_the_margin():
    choice = choose_cut([0, 0.1, 0.2, 0.9], [0, 0.3, 0.35, 0.4], 3)
    # 0.9, 0.5, 0.45, 0.4 for n = 3 to 0.
    assert (choice.cut, choice.cost, choice.runner_up) == ((0, 3), 0.4, (1, 2))
    assert choice.margin == pytest.approx(1 - 0.4 / 0.45, abs=1e-6)
    assert choice.even_cost == 0.5


@pytest.mark.parametrize(("k", "cut"), [(4, (2, 2)), (3, (2, 1)), (1, (1, 0))])
def test_equal_costs_go_to_the_middle_then_to_the_larger_head(k, cut):
    choice = choose_cut([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], k)
    assert choice.cut == cut
    assert choice.margin == 0


def test_rounding_does_not_break_a_tie():
    choice = choose_cut([0, 0.1, 0.3], [0, 0.2, 0.3 + 1e-15], 2)
    assert choice.cut == (1, 1)


def test_nothing_skipped_is_the_only_way():
    choice = choose_cut([0, 1], [0, 1], 0)
    assert (choice.cut, choice.runner_up, choice.margin) == ((0, 0), None, None)


@pytest.mark.parametrize("k", [-1, 3])
def test_more_blocks_than_the_curves_know_are_refused(k):
    with pytest.raises(ValueError, match=f"k: got {k}, expected 0 to 2"):
        choose_cut([0, 1], [0, 1], k)


def test_stability_says_which_pictures_would_have_decided_otherwise():
    head, tail = ([0, 0.1, 0.2, 0.3], [0, 0.5, 0.9, 0.95]), ([0, 0.4, 1.2, 1.3], [0, 0.1, 0.2, 0.3])
    pictures = [picture(*head, "dog"), picture(*head, "cat"), picture(*head, "dog", 1), picture(*tail, "cup", 1)]
    made = decide(pictures, 2, 0.5)
    assert made.cut == (2, 0)
    assert made.stability.with_seed == {"0": (2, 0), "1": (1, 1)}
    assert made.stability.without_subject == {"dog": (1, 1), "cat": (2, 0), "cup": (2, 0)}
    assert 0.5 < made.stability.same_share < 1
    assert made.stability.same_share <= made.stability.near_share <= 1
    alone = decide(pictures[:1], 2, 0.5).stability
    assert alone.without_subject == {}
    assert alone.same_share == 1


def test_agreement_tells_what_the_quick_cut_costs_more():
    full = [picture([0, 0.1, 0.2, 0.3], [0, 0.2, 0.4, 0.6])]
    quick = [picture([0, 0.2, 0.4, 0.6], [0, 0.1, 0.2, 0.3])]
    found = agreement(full, quick, shares=(0.5,))
    assert (found.first, found.last) == (1, 1)
    (only,) = found.cuts
    assert (only.full, only.quick) == ((2, 0), (0, 2))
    assert only.excess == pytest.approx(1)


def test_rank_correlation_is_spearmans():
    assert rank_correlation([1, 2, 3, 4], [10, 30, 20, 40]) == pytest.approx(0.8)
    # Ties share their mean rank: ranks 1.5 1.5 3 against 1 2 3.
    assert rank_correlation([5, 5, 7], [1, 2, 3]) == pytest.approx(0.866, abs=1e-3)
    assert rank_correlation([1, 1], [1, 2]) is None


def test_the_curves_need_two_sets_of_pictures_a_block():
    assert len(curve_spans(14)) == 1 + 2 * 13
    # 12 single blocks and 10 windows are none of these.
    assert len(all_spans(14, 3)) == 1 + 2 * 13 + 12 + 10


# The masking.

GRID = (2, 3)
FAMILIES = {
    "sana": (diffusers.SanaTransformer2DModel, SANA | {"num_layers": 2}),
    "flux": (diffusers.FluxTransformer2DModel, FLUX | {"num_layers": 1, "num_single_layers": 1}),
    "sd3": (diffusers.SD3Transformer2DModel, SD3 | {"num_layers": 2}),
}


@pytest.fixture(params=[*FAMILIES, "sd3-lora", "flux-lora", "sana-lora"])
def transformer(request):
    family, _, lora = request.param.partition("-")
    kind, config = FAMILIES[family]
    torch.manual_seed(0)
    made = kind(**config).eval().requires_grad_(False)
    if lora:
        made.add_adapter(peft.LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_()
    return made


def states(transformer, seed=0):
    """The state before the first block and its conditioning for two prompts, and how many of its tokens are text."""
    generator = torch.Generator().manual_seed(seed)
    config, adapter = transformer.config, adapter_of(type(transformer).__name__, "x")
    width = config.get("caption_channels") or config.joint_attention_dim
    pooled = torch.randn(2, config.get("pooled_projection_dim") or 1, generator=torch.Generator().manual_seed(9))
    prompts = PromptStates(torch.randn(2, 5, width, generator=generator), torch.ones(2, 5, dtype=torch.int64), pooled)
    latents = torch.randn(2, 16, 2 * GRID[0], 2 * GRID[1], generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        hidden, conditioning = adapter.embed(transformer, latents, torch.tensor([700.0, 300.0]), prompts, 3.5)
    return adapter, hidden, conditioning, hidden.shape[1] - GRID[0] * GRID[1]


@torch.no_grad()
def block_outputs(transformer, masked, seed=0):
    """(text, image) behind each block; every block gets the same state, with the prompt of `seed` in it."""
    adapter, hidden, conditioning, num_text = states(transformer, seed)
    with adapter.mask_text(transformer, masked):
        made = [
            adapter.run_block(transformer, index, hidden, conditioning, GRID)
            for index in range(len(adapter.blocks(transformer)))
        ]
    return [(state[:, :num_text], state[:, num_text:]) for state in made]


def test_masked_blocks_see_no_prompt_and_the_others_do(transformer):
    one, other = (block_outputs(transformer, [1], seed) for seed in (0, 1))
    torch.testing.assert_close(one[1][1], other[1][1], rtol=1e-6, atol=1e-6)
    assert (one[0][1] - other[0][1]).abs().max() > 1e-3
    both = block_outputs(transformer, range(2))
    torch.testing.assert_close(both[1][1], one[1][1])
    assert (both[0][1] - one[0][1]).abs().max() > 1e-3


def test_prompt_tokens_attend_as_ever(transformer):
    for masked, whole in zip(block_outputs(transformer, range(2)), block_outputs(transformer, []), strict=True):
        torch.testing.assert_close(masked[0], whole[0], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_masked_block_equals_one_without_a_prompt(transformer):
    """Joint attention: the block run on image tokens alone. Cross attention: a block that adds nothing there."""
    adapter, hidden, conditioning, num_text = states(transformer)
    if num_text:
        rotary = {name: value[:, num_text:] for name, value in conditioning.items() if name.startswith("rotary")}
        conditioning, hidden = conditioning | rotary, hidden[:, num_text:]
    else:
        for block in transformer.transformer_blocks:
            block.attn2.forward = lambda x, **inputs: torch.zeros_like(x)
    expected = [adapter.run_block(transformer, index, hidden, conditioning, GRID) for index in range(2)]
    for block in getattr(transformer, "transformer_blocks", ()):
        vars(getattr(block, "attn2", None) or block).pop("forward", None)
    for (_, image), alone in zip(block_outputs(transformer, range(2)), expected, strict=True):
        torch.testing.assert_close(image, alone, rtol=1e-5, atol=1e-5)


def test_everything_is_as_before_when_the_context_ends_even_by_an_error(transformer):
    before = block_outputs(transformer, [])
    processors = {
        name: module.processor for name, module in transformer.named_modules() if hasattr(module, "processor")
    }
    adapter = adapter_of(type(transformer).__name__, "x")
    with pytest.raises(RuntimeError, match="stopped"), adapter.mask_text(transformer, range(2)):
        raise RuntimeError("stopped")
    assert not any(module._forward_pre_hooks for module in transformer.modules())
    assert all(transformer.get_submodule(name).processor is own for name, own in processors.items())
    for one, other in zip(before, block_outputs(transformer, []), strict=True):
        assert torch.equal(one[1], other[1])


@torch.no_grad()
def test_folded_lora_draws_what_pefts_does():
    torch.manual_seed(0)
    plain, adapted = (diffusers.SanaTransformer2DModel(**FAMILIES["sana"][1]) for _ in range(2))
    adapted.load_state_dict(plain.state_dict())
    adapted.add_adapter(peft.LoraConfig(r=2, lora_alpha=3, target_modules=["to_q", "to_out.0", "conv_inverted"]))
    tensors = {}
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            tensors[name.replace(".default", "")] = parameter.normal_(0, 0.1).clone()
    fold_lora(plain, tensors, 1.5)
    for one, other in zip(block_outputs(plain, []), block_outputs(adapted, []), strict=True):
        torch.testing.assert_close(one[1], other[1], rtol=1e-5, atol=1e-5)


# The procedure, on a model whose first two blocks and last one do without the prompt.

PLANTED_HEAD, PLANTED_TAIL, NUM_BLOCKS = 2, 1, 6


@pytest.fixture(scope="module")
def planted_dir(tmp_path_factory) -> Path:
    folder = save_sana(tmp_path_factory.mktemp("models") / "planted", small_vae(), num_layers=NUM_BLOCKS)
    transformer = diffusers.SanaTransformer2DModel.from_pretrained(folder / "transformer")
    for index, block in enumerate(transformer.transformer_blocks):
        relevant = PLANTED_HEAD <= index < NUM_BLOCKS - PLANTED_TAIL
        for parameter in block.attn2.to_out.parameters():
            parameter.data *= 5.0 * relevant
    transformer.save_pretrained(folder / "transformer")
    return folder


@pytest.fixture(scope="module")
def subject_dirs(photos_dir, tmp_path_factory) -> tuple[Path, ...]:
    """Two subjects: the photos, and their mirror images."""
    folder = tmp_path_factory.mktemp("subjects")
    for name in ("cup", "vase"):
        (folder / name).mkdir()
        for path in photos_dir.glob("*.png"):
            with block_selection.Image.open(path) as photo:
                made = photo if name == "cup" else photo.transpose(block_selection.Image.Transpose.FLIP_LEFT_RIGHT)
                made.save(folder / name / path.name)
    return folder / "cup", folder / "vase"


def request_of(model: Path, dirs: tuple[Path, ...], *, quick: bool) -> Request:
    config = export_config(model, prompt="a photo of a {}", samples=4, cut=None)
    config = replace(config, train=replace(config.train, steps=2, warmup_steps=0, learning_rate=1e-3))
    drawn = GenerateConfig(prompts=("a {} on the beach", "a red {}"), seeds=(0,), steps=2)
    return Request(config=replace(config, generate=drawn), photos_dirs=dirs, quick=quick)


@pytest.fixture(scope="module")
def full(planted_dir, subject_dirs):
    return Selection(request_of(planted_dir, subject_dirs, quick=False)).run()


def require_planted(made: BlockProfile) -> None:
    decision = made.decide(0.5)
    assert decision.cut == (PLANTED_HEAD, PLANTED_TAIL)
    assert decision.choice.margin > 0.8
    assert decision.stability.same_share == 1
    assert set(decision.stability.with_seed.values()) == {(PLANTED_HEAD, PLANTED_TAIL)}
    single = np.array([each.single for each in made.pictures]).mean(0)
    planted = [0, 1, 5]
    assert max(single[planted]) < 0.1 * min(single[[i for i in range(NUM_BLOCKS) if i not in planted]])


def test_masking_the_fine_tuned_model_finds_the_planted_cut(full):
    made, examples = full
    require_planted(made)
    assert (made.mode, made.cost.subjects, made.num_blocks) == ("full", 2, NUM_BLOCKS)
    assert [each.path.is_file() for each in examples] == [True] * len(examples)
    # 2 subjects, 2 prompts, 1 seed; 11 sets for the curves, 4 more single blocks, 2 more windows.
    assert made.cost.pictures == 4 * 17
    assert made.cost.quick_pictures == 4 * 11
    assert made.cost.total_s > 0
    assert {(p.subject, p.prompt) for p in made.pictures} == {
        (name, text.format(name)) for name in ("cup", "vase") for text in ("a {} on the beach", "a red {}")
    }
    found = made.agreement.cuts[-1]
    assert found.full == found.quick == (PLANTED_HEAD, PLANTED_TAIL)
    assert made.agreement.first > 0.8


def test_masking_the_base_finds_it_without_photos(planted_dir, full):
    request = request_of(planted_dir, (), quick=True)
    request = replace(request, config=replace(request.config, generate=GenerateConfig(prompts=("a cup",), steps=2)))
    made, _ = Selection(request).run()
    require_planted(made)
    assert (made.mode, made.cost.fine_tuning_s, made.pictures[0].subject) == ("quick", 0, "prompts")


def test_a_second_run_draws_nothing_and_gives_the_same_profile(planted_dir, subject_dirs, full, monkeypatch):
    for name in ("denoise", "encode_prompts", "decode"):
        monkeypatch.setattr(block_selection, name, lambda *_, **__: pytest.fail("not from the cache"))
    monkeypatch.setattr(block_selection.lora.Lora, "train", lambda *_: pytest.fail("not from the cache"))
    again, _ = Selection(request_of(planted_dir, subject_dirs, quick=False)).run()
    assert again == full[0]


def test_a_run_that_was_killed_goes_on(planted_dir, subject_dirs, tmp_path, monkeypatch):
    monkeypatch.setenv("POCKETDIT_CACHE", str(tmp_path))
    calls, draw = [], block_selection.denoise

    def counted(*arguments, **settings):
        if len(calls) == 4:
            raise KeyboardInterrupt
        calls.append(settings["label"])
        return draw(*arguments, **settings)

    request = request_of(planted_dir, subject_dirs[:1], quick=True)
    request = replace(request, config=replace(request.config, generate=GenerateConfig(seeds=(0,), steps=2)))
    monkeypatch.setattr(block_selection, "denoise", counted)
    with pytest.raises(KeyboardInterrupt):
        Selection(request).run()
    assert not list(tmp_path.rglob("*.partial"))
    monkeypatch.setattr(block_selection, "denoise", lambda *a, **s: (calls.append(s["label"]), draw(*a, **s))[1])
    made, _ = Selection(request).run()
    assert len(calls) == len(set(calls)) == 17
    assert made.decide(0.5).cut == (PLANTED_HEAD, PLANTED_TAIL)


# The file, and what reads it.


def profile_of(model: Path | str, **changes) -> BlockProfile:
    folder = ModelFolder(str(model))
    num_blocks = len(folder.adapter.blocks(folder.skeleton()))
    rising = tuple(0.1 * n for n in range(num_blocks))
    flat = tuple(0.01 * n for n in range(num_blocks))
    settings = {
        "created_by": "pocketdit test",
        "source": "measured",
        "mode": "full",
        "model": "planted",
        "architecture": architecture_of(folder.skeleton()),
        "transformer_sha256": folder.sha256("transformer"),
        "num_blocks": num_blocks,
        "cuts": (Decision(share=0.4, cut=(0, 2)),),
        "pictures": (picture(rising, flat),),
    }
    return BlockProfile(**settings | changes)


def synthetic_profile(num_blocks: int) -> BlockProfile:
    """Three subjects, as many blocks as asked, curves that rise at random."""
    rng, pictures = np.random.default_rng(0), []
    for subject in ("cup", "vase", "dog"):
        for seed in range(4):
            first, last = (np.r_[0, np.cumsum(rng.random(num_blocks - 1))].round(4).tolist() for _ in range(2))
            single, window = (tuple(rng.random(num_blocks - less).round(4).tolist()) for less in (0, 2))
            pictures.append(picture(first, last, subject, seed, single=single, window=window))
    return BlockProfile(
        created_by="pocketdit test",
        source="measured",
        mode="full",
        model="synthetic",
        architecture={},
        num_blocks=num_blocks,
        features="lite2",
        cuts=tuple(decide(pictures, skipped_of_share(num_blocks, share), share) for share in SHARES),
        agreement=agreement(pictures, pictures[::2]),
        cost=Cost(subjects=3, pictures=12 * 4 * num_blocks, fine_tuning_s=150.0, drawing_s=600.0, features_s=99.0),
        settings={"generate": {"steps": 12}},
        pictures=tuple(pictures),
    )


def test_a_profile_reads_back_as_it_was_written(full, tmp_path):
    write_profile(full[0], tmp_path / "a.profile.json")
    assert read_profile(tmp_path / "a.profile.json") == full[0]
    assert (tmp_path / "a.profile.json").stat().st_size < 20_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "pocketdit.profile/9"}, r"schema: got 'pocketdit.profile/9', expected 'pocketdit.profile/1'"),
        ({"surprise": 1}, "unknown key 'surprise'"),
        ({"num_blocks": 7}, r"first: got 5 values, expected 7"),
        ({"pictures": []}, "pictures: got none"),
        ({"cuts": [{"share": 0.5, "cut": [3, 2]}]}, r"cut: got \(3, 2\) of 5 blocks"),
        ({"source": "hearsay"}, "source: got 'hearsay'"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(sana_dir, tmp_path, change, message):
    path = tmp_path / "a.profile.json"
    write_profile(profile_of(sana_dir), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SchemaError, match=message):
        read_profile(path)


def test_a_profile_of_another_model_is_refused(sana_dir, planted_dir, tmp_path):
    path = tmp_path / "a.profile.json"
    write_profile(profile_of(sana_dir), path)
    other = ModelFolder(str(planted_dir))
    with pytest.raises(ValueError, match=r"profile of another model: .* num_layers 5.*num_layers 6.*pocketdit profile"):
        find_profile(f"auto:{path}", "x", architecture_of(other.skeleton()), lambda: other.sha256("transformer"))
    with pytest.raises(ValueError, match=r"made for planted \(other weights\)"):
        find_profile(f"auto:{path}", "x", architecture_of(ModelFolder(str(sana_dir)).skeleton()), lambda: "0" * 64)


def test_the_share_decides_from_the_curves_or_from_what_is_stated(sana_dir):
    made = profile_of(sana_dir)
    assert made.decide(0.6).cut == (0, 3)
    stated = replace(made, source="paper", pictures=())
    assert stated.decide(0.4).cut == (0, 2)
    with pytest.raises(
        ValueError, match=r"skip: got 0.6, 3 of 5 blocks, but the profile of planted \(paper\) has cuts for 0.4"
    ):
        stated.decide(0.6)
    with pytest.raises(ValueError, match="share: got 1, expected 0 or more and less than 1"):
        made.decide(1)


def test_an_export_takes_its_cut_from_a_profile_and_says_so(exporter, sana_dir, photos_dir, tmp_path):
    path, stages = tmp_path / "a.profile.json", {}
    write_profile(profile_of(sana_dir, pictures=(picture([0, 0, 1, 1, 1], [0, 0, 0, 1, 1]),)), path)
    made = Exporter(export_config(sana_dir, cut=f"auto:{path}", skip=0.6), photos_dir, tmp_path / "bundle")
    made.run(lambda name, cached, seconds: stages.update({name: cached}))
    manifest = read_manifest(tmp_path / "bundle")
    assert (manifest.cut.head, manifest.cut.tail) == exporter.cut == (1, 2)
    origin = manifest.export["cut_origin"]
    assert (origin["profile"], origin["share"], origin["mode"], origin["margin"]) == (str(path), 0.6, "full", 1)
    # By profile or by number, the same cut is the same stages; one by number has no origin.
    assert [name for name, cached in stages.items() if not cached] == ["bundle"]
    assert read_manifest(exporter.bundle_dir).export["cut_origin"] is None


def test_auto_takes_the_shipped_profile_of_the_model_with_a_budget_too(
    sana_dir, photos_dir, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("host.cut.shipped_profiles", lambda: {"tiny-sana": profile_of(sana_dir)})
    command = [
        "export",
        str(photos_dir),
        "-o",
        str(tmp_path / "b"),
        "--model",
        str(sana_dir),
        "--prompt",
        "x",
        "--dry-run",
    ]
    for more in ([], ["--budget", "64"]):
        assert main([*command, "--cut", "auto", *more]) == 0
        assert "cut 0,3 by profile tiny-sana (measured, full), 50% skipped" in capsys.readouterr().out
    assert main([*command, "--skip", "0.4"]) == 0
    assert "cut 1,1" in capsys.readouterr().out


def test_the_papers_cuts_of_flux_ship_marked_as_such():
    flux = shipped_profiles()["FLUX.1-dev"]
    assert (flux.source, flux.num_blocks, flux.transformer_sha256) == ("paper", 57, None)
    assert {sum(decision.cut): decision.cut for decision in flux.cuts} == PAPER_CUTS
    config = {"_class_name": "FluxTransformer2DModel", "guidance_embeds": True}  # all else is diffusers' default
    architecture = architecture_of(skeleton_of(config))
    known = {"model": "x", "architecture": architecture, "transformer_sha256": None, "num_blocks": 57}
    cut, origin = resolve_cut("auto", 0.3, **known)
    assert cut == (7, 10)
    assert str(origin) == "profile FLUX.1-dev (paper, full), 30% skipped"


def test_plan_counts_for_the_cut_of_the_profile(capsys):
    assert main(["plan", "--cut", "auto", "--skip", "0.5", "--weights", "fp32", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert tuple(rows[0]["cut"]) == shipped_profiles()[EMBEDDED].decide(0.5).cut


def test_the_embedded_models_profile_is_of_these_weights_and_decides_as_it_says():
    shipped, model = shipped_profiles()[EMBEDDED], ModelFolder(EMBEDDED)
    assert shipped.transformer_sha256 == model.sha256("transformer")
    assert shipped.architecture == architecture_of(model.skeleton())
    assert (shipped.source, shipped.mode) == ("measured", "full")
    assert len({each.subject for each in shipped.pictures}) >= 3
    for decision in shipped.cuts:
        assert shipped.decide(decision.share) == decision
    assert agreement(shipped.pictures, shipped.quick_pictures) == shipped.agreement


def test_the_shipped_profiles_are_packaged_and_the_readme_tells_their_cuts():
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["host"]
    held = {path for pattern in packaged for path in (ROOT / "host").glob(pattern)}
    assert held >= set(SHIPPED_DIR.iterdir())
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for decision in shipped_profiles()[EMBEDDED].cuts:
        choice = decision.choice
        assert (
            f"| {decision.share:.0%} | {decision.cut[0]},{decision.cut[1]} | {choice.cost:.3f} |".replace("%", " %")
            in readme
        )


# The command and its page.


def test_the_command_writes_profile_and_page(planted_dir, tmp_path, capsys):
    output = tmp_path / "planted.profile.json"
    command = ["profile", "--model", str(planted_dir), "--quick", "--prompt", "a cup", "--set", "generate.steps=2"]
    assert main([*command, "-o", str(output)]) == 0
    out = capsys.readouterr().out
    assert "34 pictures of 128 px in 2 steps; the base is masked" in out
    assert f"{PLANTED_HEAD},{PLANTED_TAIL}" in out
    assert f"--cut auto:{output} --skip 0.5" in out
    assert read_profile(output).mode == "quick"
    shown = Page(output.with_suffix(".html").read_text(encoding="utf-8"))
    assert f"skip the first {PLANTED_HEAD} and the last {PLANTED_TAIL}" in shown.text
    assert all(source.startswith("data:") for source in shown.values("img", "src"))
    assert main([*command, "-o", str(output), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["decision"]["cut"] == [PLANTED_HEAD, PLANTED_TAIL]


def test_names_are_escaped_and_subjects_have_rows_of_their_own(full):
    made = replace(full[0], model="<script>")
    shown = Page(page(made, 0.25))
    assert "<script>" in shown.text
    assert "script" not in [tag for tag, _ in shown.tags]
    for text in ("all subjects", "cup", "vase", "25%", "Would the base alone have said so?"):
        assert text in shown.text


def test_marks_at_one_place_are_labelled_one_below_the_other():
    series = [Series(label="a", points=[(0, 1.0), (7, 2.0)], style="line", color="c1")]
    marks = [Mark(x=0, label="30%: 0,4"), Mark(x=0, label="40%: 0,6"), Mark(x=0, label="50%: 0,7")]
    shown = Page(line_chart(series, title="t", x_label="x", y_label="y", marks=marks))
    heights = [attrs["y"] for tag, attrs in shown.tags if tag == "text" and attrs.get("class") == "mark"]
    assert len(set(heights)) == 3
    assert len(heights) == 6  # drawn wide and narrow


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "photos: got none, expected a folder a subject"),
        (["--quick"], "prompt: got none, expected whole prompts where there are no photos"),
        (["--quick", "--prompt", "a {}"], "prompt: got a {}, expected whole prompts"),
        (["--photos", "nowhere"], "nowhere"),
        (["--photos", "{cup}", "--photos", "{cup}"], "two folders named 'cup'"),
        (["--quick", "--prompt", "x", "--skip", "1.5"], "share: got 1.5, expected 0 or more and less than 1"),
        (["--quick", "--prompt", "x", "--features", "nothing"], "Feature model 'nothing' is neither"),
        (["--quick", "--prompt", "x", "--model", "nowhere"], "'nowhere' is neither a folder here nor a hub id"),
        (["--quick", "--prompt", "x", "-o", "out.html"], "expected a file that ends in .json"),
        (["--quick", "--prompt", "x", "--set", "generate.image_side=100"], "image_side: got 100, expected a multiple"),
        (["--quick", "--prompt", "x " * 400], "Shorten the prompt"),
    ],
)
def test_wrong_input_is_said_in_one_line_before_anything_starts(
    planted_dir, subject_dirs, tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    arguments = [text.replace("{cup}", str(subject_dirs[0])) for text in arguments]
    assert main(["profile", "--model", str(planted_dir), *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cut", "auto"], "comes with PocketDiT; there are: FLUX.1-dev (paper), tiny-base (measured)"),
        (["--cut", "auto:nowhere"], "nowhere cannot be read as a profile"),
        (["--cut", "1,2", "--skip", "0.5"], "skip: got a share beside a cut in numbers"),
        (["--cut", "auto", "--skip", "1"], "skip: got 1.0, expected 0 or more and less than 1"),
        (["--set", "export.cut=half"], "cut: got 'half', expected two numbers of blocks, auto, or auto:FILE"),
    ],
)
def test_a_cut_that_cannot_be_had_is_refused(planted_dir, subject_dirs, tmp_path, capsys, arguments, message):
    command = ["export", str(subject_dirs[0]), "-o", str(tmp_path / "b"), "--model", str(planted_dir), "--prompt", "x"]
    assert main([*command, *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert not (tmp_path / "b").exists()


def test_a_dry_run_counts_pictures_and_draws_none(planted_dir, subject_dirs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(block_selection, "denoise", lambda *_, **__: pytest.fail("drawn"))
    command = ["profile", "--model", str(planted_dir), "--set", "export.prompt=a {}", "--dry-run", "--json"]
    assert main([*command, "--photos", str(subject_dirs[0])]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["subjects"] == {"cup": ["a cup"]}
    assert result["pictures"] == 2 * (17 + 11)
    assert list(tmp_path.iterdir()) == []
