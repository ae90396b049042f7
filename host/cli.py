"""The command `pocketdit`: subcommands in pipeline order. Results are printed, diagnostics logged; `--json` ends with one
JSON object.

Each command imports what it needs: `train` must not carry the workstation's libraries in its memory.
"""

import argparse
import dataclasses
import json
import logging
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from host.config import Config, read_tables, resolve
from runtime import __version__
from runtime.errors import BudgetExceededError, NonFiniteLossError, PocketDiTError, StorageFullError
from runtime.manifest import TrainingSpec, read_manifest
from runtime.schema import encode

MIB = 1024 * 1024
EXIT_REFUSED, EXIT_STOPPED = 2, 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0 done, 1 stopped on the way, 2 refused."""
    options = _parser().parse_args(_joined(sys.argv[1:] if arguments is None else arguments))
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    _quiet_libraries()
    try:
        result = options.run(options)
    except (BudgetExceededError, NonFiniteLossError, StorageFullError) as error:
        print(f"pocketdit {options.command}: {error}", file=sys.stderr)
        return EXIT_STOPPED
    except (
        PocketDiTError,
        ValueError,
        FileNotFoundError,
        PermissionError,
        NotADirectoryError,
        FileExistsError,
    ) as error:
        print(f"pocketdit {options.command}: {error}", file=sys.stderr)
        return EXIT_REFUSED
    if options.json:
        print(json.dumps(result, ensure_ascii=False))
    return int(result.get("exit_status", EXIT_STOPPED if result.get("status") == "stopped" else 0))


def _joined(arguments: Sequence[str]) -> list[str]:
    """`--cut -1,3` as `--cut=-1,3`: argparse would take such a value for a flag and say that none was given."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1].startswith("--") and re.match(r"-\d", argument):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pocketdit", description="Teach a diffusion transformer a subject on a phone."
    )
    parser.add_argument("--version", action="version", version=f"pocketdit {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], dict[str, Any]], text: str, example: str) -> Any:
        sub = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=f"example: {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=run, quiet=False)
        sub.add_argument("--json", action="store_true", help="end with one line of JSON")
        return sub

    def settings(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--config", type=Path, metavar="FILE", help="TOML file with [export], [train], [generate]")
        sub.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override any setting")

    sub = command(
        "doctor", _doctor, "Says of each photo whether it is usable, and why not.", "pocketdit doctor photos/dog"
    )
    sub.add_argument("photos", type=Path, help="folder of photos")
    sub.add_argument("--prompt", help="instance prompt for photos without a caption")
    sub.add_argument(
        "--min-side", type=_positive, default=512, help="shorter side below which a photo is scaled up (512)"
    )

    sub = command(
        "profile",
        _profile,
        "Finds the blocks a model can do without: masks the prompt in them and compares the pictures.",
        "pocketdit profile --photos photos/dog --photos photos/cat --skip 0.5",
    )
    sub.add_argument(
        "--photos", action="append", type=Path, default=[], metavar="DIR", help="a subject; several are better"
    )
    sub.add_argument("--model", help="folder in diffusers' layout, hub id, or tiny-base (default)")
    sub.add_argument("--skip", type=float, default=0.5, metavar="SHARE", help="share of the blocks to skip (0.5)")
    sub.add_argument(
        "--prompt", action="append", help="what to draw, {} for the folder's name; the photos' captions if not given"
    )
    sub.add_argument("--quick", action="store_true", help="mask the base instead of fine-tuning it on each subject")
    sub.add_argument(
        "--features", default="lite2", metavar="NAME", help="image features: lite2 (default), or a ViT's hub id"
    )
    sub.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to write (<model>.profile.json)")
    sub.add_argument("--dry-run", action="store_true", help="check everything, count the pictures, draw nothing")
    settings(sub)

    sub = command(
        "export",
        _export,
        "Makes a bundle from photos, model, prompt and cut.",
        'pocketdit export photos/dog -o bundles/dog --prompt "a photo of sks dog" --cut 4,3',
    )
    sub.add_argument("photos", type=Path, help="folder of photos")
    sub.add_argument("-o", "--output", type=Path, required=True, metavar="BUNDLE", help="folder to write")
    sub.add_argument("--model", help="folder in diffusers' layout, hub id, or tiny-base (default)")
    sub.add_argument("--prompt", help="instance prompt for photos without a caption")
    sub.add_argument(
        "--cut", type=_cut, metavar="N,M", help="blocks skipped at the head and at the tail, auto, or auto:PROFILE"
    )
    sub.add_argument("--skip", type=float, metavar="SHARE", help="share of the blocks to skip instead of numbers")
    sub.add_argument(
        "--weights", metavar="TYPE", help="how weights are stored: fp32 (default), fp16, bf16, int8 or int4"
    )
    sub.add_argument(
        "--budget", type=_mib, metavar="SIZE", help="private memory training may take: chooses what is left open"
    )
    sub.add_argument("--dry-run", action="store_true", help="check everything, print sizes, write nothing")
    settings(sub)

    sub = command(
        "plan",
        _plan,
        "Says what training a model takes, from its configuration alone, and which settings fit a budget.",
        "pocketdit plan --model black-forest-labs/FLUX.1-dev --skip 0.5 --weights int8",
    )
    sub.add_argument("--model", help="folder, hub id, tiny-base, or a transformer's config.json")
    sub.add_argument(
        "--cut", type=_cut, metavar="N,M", help="blocks skipped at the head and at the tail, auto, or auto:PROFILE"
    )
    sub.add_argument("--skip", type=float, metavar="SHARE", help="share of the blocks to skip instead (0.5)")
    sub.add_argument(
        "--weights", action="append", metavar="TYPE", help="fp32, fp16, bf16, int8 or int4; all if not given"
    )
    sub.add_argument("--patch", type=int, metavar="PX", help="side of the patches trained on")
    sub.add_argument(
        "--budget", type=_mib, metavar="SIZE", help="list the settings whose private memory fits, best first"
    )
    settings(sub)

    sub = command(
        "train", _train, "Trains from a bundle; the same command resumes.", "pocketdit train bundles/dog --run runs/dog"
    )
    sub.add_argument("bundle", type=Path, help="bundle folder")
    sub.add_argument("--run", dest="run_dir", type=Path, help="run folder (runs/<bundle name>)")
    sub.add_argument("--steps", type=int, help="optimizer steps")
    sub.add_argument("--budget", type=_mib, metavar="SIZE", help="most private memory beyond the idle process, in MiB")
    sub.add_argument(
        "--threads", type=_positive, help="threads of the block programs (all cores, or one where blocks are small)"
    )
    sub.add_argument("--dry-run", action="store_true", help="check the bundle, print the plan, write nothing")
    settings(sub)

    sub = command(
        "emulate",
        _emulate,
        "Trains under a phone's limits: says whether the bundle keeps within them.",
        "pocketdit emulate bundles/dog --device pixel-8 --budget 512MiB",
    )
    sub.add_argument("bundle", type=Path, help="bundle folder")
    sub.add_argument("--device", required=True, metavar="NAME", help="a known device, or a profile of your own (.toml)")
    sub.add_argument(
        "--budget", type=_size, metavar="SIZE", help="most private memory beyond the idle process (the profile's)"
    )
    sub.add_argument(
        "--budget-total", type=_size, metavar="SIZE", help="instead: of everything, interpreter and page cache included"
    )
    sub.add_argument("--page-cache", type=_size, metavar="SIZE", help="page cache beside the budget (the profile's)")
    sub.add_argument("--steps", type=_positive, help="optimizer steps (20)")
    sub.add_argument("--run", dest="run_dir", type=Path, help="run folder (runs/<bundle>-<device>)")
    sub.add_argument(
        "--faults", metavar="KIND,KIND", help="kill, low-memory, disk-full, slow-read, failing-read, thermal, battery"
    )
    sub.add_argument("--require-enforcement", action="store_true", help="refuse limits that are only sampled")

    sub = command(
        "generate",
        _generate,
        "Draws pictures with the base and with the adapter from the same noise.",
        'pocketdit generate runs/dog --prompt "sks dog on the beach" --seeds 0,1',
    )
    sub.add_argument("run_dir", type=Path, metavar="run", help="run folder")
    sub.add_argument("--prompt", action="append", help="what to draw; may be given several times")
    sub.add_argument("--seeds", type=_integers, metavar="S,S", help="seeds per prompt (0,1)")
    sub.add_argument("--dry-run", action="store_true", help="check the run, print what would be drawn, draw nothing")
    settings(sub)

    sub = command(
        "evaluate",
        _evaluate,
        "Scores runs: likeness to the subject, to the prompt, and drift, with confidence intervals and pictures.",
        "pocketdit evaluate runs/dog runs/cat --dataset dreambooth/dataset --features facebook/dino-vits16",
    )
    sub.add_argument("run_dirs", type=Path, nargs="+", metavar="run", help="run folders, each one subject")
    sub.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="folder to write (evaluation beside or in the run)"
    )
    sub.add_argument("--dataset", type=Path, metavar="DIR", help="DreamBooth or CustomConcept101 as published")
    sub.add_argument("--prompts", type=Path, metavar="FILE", help="one prompt a line, {} where the subject is named")
    sub.add_argument("--seeds", type=_integers, metavar="S,S", help="seeds per prompt (0,1)")
    sub.add_argument(
        "--features", action="append", metavar="NAME", help="feature model: lite2 (default), a folder or a hub id"
    )
    sub.add_argument("--drift-prompts", type=Path, metavar="FILE", help="prompts that do not name the subject")
    sub.add_argument("--dry-run", action="store_true", help="check everything, print what would be drawn, draw nothing")
    settings(sub)

    sub = command("report", _report, "Writes a self-contained report.html of a run.", "pocketdit report runs/dog")
    sub.add_argument("run_dir", type=Path, metavar="run", help="run folder")
    sub.add_argument("-o", "--output", type=Path, help="file to write (report.html in the run folder)")

    sub = command(
        "convert",
        _convert,
        "Converts an adapter to the format of kohya and ComfyUI, or back to PEFT's.",
        "pocketdit convert runs/dog/adapter.safetensors -o dog.safetensors --to kohya",
    )
    sub.add_argument("adapter", type=Path, help="adapter file, only read")
    sub.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="file to write")
    sub.add_argument("--to", choices=("kohya", "peft"), required=True, help="format of the new file")
    sub.add_argument("--model", help="the adapter's base; PocketDiT's adapters name their own")

    sub = command(
        "demo",
        _demo,
        "The whole path on the embedded model and its sample subject.",
        "pocketdit demo --output runs/demo",
    )
    sub.add_argument("-o", "--output", type=Path, default=Path("runs/demo"), help="folder to write (runs/demo)")
    sub.add_argument("--steps", type=int, help="optimizer steps")
    sub.add_argument("--dry-run", action="store_true", help="print the commands, run nothing")
    return parser


def _config(options: argparse.Namespace, **flags: Any) -> Config:
    """File, then --set, then the command's own flags; flags are given as section__key and None means not given."""
    tables = read_tables(options.config, options.set)
    for name, value in flags.items():
        section, _, key = name.partition("__")
        if value is not None:
            tables.setdefault(section, {})[key] = value
    return resolve(tables, str(options.config or "settings"))


def _doctor(options: argparse.Namespace) -> dict[str, Any]:
    from host.photos import doctor_table, ignored_names, inspect_photos

    rows = inspect_photos(options.photos, min_side=options.min_side, instance_prompt=options.prompt)
    if not options.json:
        print(doctor_table(rows, num_ignored=len(ignored_names(options.photos))))
    return {"photos": [encode(row) for row in rows], "accepted": sum(row.accepted for row in rows)}


def _profile(options: argparse.Namespace) -> dict[str, Any]:
    config = _config(options, export__model=options.model, generate__prompts=options.prompt)
    from host import block_profile
    from host.block_profile_page import write_page
    from host.block_selection import Request, Selection

    say = _printer(options)
    request = Request(
        config=config,
        photos_dirs=tuple(options.photos),
        quick=options.quick,
        features=options.features,
        share=options.skip,
    )
    output = options.output or Path(Path(config.export.model).resolve().name + block_profile.SUFFIX)
    if output.suffix != ".json":
        raise ValueError(f"output: got {output}, expected a file that ends in .json; the page goes beside it as .html.")
    selection = Selection(request)
    say(
        f"{selection.model.name}: {selection.num_blocks} blocks, subjects: {', '.join(selection.described())}; "
        f"{selection.num_pictures()} pictures of {selection.image_side} px in {config.generate.steps} steps; "
        + ("the base is masked" if options.quick else f"fine-tuned on each in {config.train.steps} steps")
    )
    if options.dry_run:
        return {"status": "dry-run", "pictures": selection.num_pictures(), "subjects": encode(selection.described())}
    made, examples = selection.run(say)
    block_profile.write_profile(made, output)
    page = write_page(made, output.with_suffix(".html"), options.skip, examples)
    decision = made.decide(options.skip)
    say(block_profile.table(made, (*block_profile.SHARES, options.skip)))
    if made.agreement is not None:
        say(block_profile.agreement_text(made.agreement))
    say(f"{output}, {page}. Next: pocketdit export PHOTOS -o BUNDLE --cut auto:{output} --skip {options.skip:g}")
    return {
        "status": "complete",
        "profile": str(output),
        "page": str(page),
        "decision": encode(decision),
        "agreement": encode(made.agreement),
        "cost": encode(made.cost),
    }


def _export(options: argparse.Namespace) -> dict[str, Any]:
    _require_one_cut(options)
    config = _config(
        options,
        export__model=options.model,
        export__prompt=options.prompt,
        export__cut=options.cut,
        export__skip=options.skip,
        export__weights=options.weights,
        export__budget=options.budget,
    )
    from host.budget import within_budget
    from host.exporter import Exporter
    from host.residuals import processes
    from runtime.memory import MemoryWatch

    if not processes().is_main_process:
        options.json, options.quiet = False, True
    say = _printer(options)
    exporter = Exporter(config, options.photos, options.output)
    if config.export.budget is not None:
        config, budget = within_budget(exporter)
        exporter = Exporter(config, options.photos, options.output, budget)
        say(f"budget: {budget.reasons[0]}" + "".join(f"\n  {reason}" for reason in budget.reasons[1:]))
    plan = exporter.plan()
    say(
        f"{plan.model} ({plan.family}), {plan.num_blocks} blocks, cut {plan.cut[0]},{plan.cut[1]}; {len(plan.photos)} photos"
    )
    if exporter.cut_origin is not None:
        say(f"cut {plan.cut[0]},{plan.cut[1]} by {exporter.cut_origin}")
    say(
        f"patches {plan.patch_side} px of {plan.image_side} px, {plan.samples} samples: {plan.sample_bytes / MIB:.1f} MiB"
    )
    say(
        f"weights ({config.export.weights}) {plan.weight_bytes / MIB:.1f} MiB, samples {plan.sample_bytes / MIB:.1f} MiB "
        "on flash; samples are "
        f"{plan.sample_tflops:.3g} TFLOP, about {max(1.0, plan.sample_seconds):.0f} s here unless cached"
    )
    if options.dry_run:
        return {"status": "dry-run", "plan": encode(plan)}

    def on_stage(name: str, cached: bool, seconds: float) -> None:
        say(f"{name:<9} {'from the cache' if cached else f'{seconds:.1f} s'}")

    with MemoryWatch() as watch:
        made = exporter.run(on_stage)
    if made is None:
        return {"status": "complete"}
    manifest, errors, parity = made
    if config.export.sample_dtype != "fp32":
        worst = sorted(errors.items(), key=lambda item: -item[1])[:3]
        say(
            f"stored as {config.export.sample_dtype}, largest of {len(errors)} relative errors: "
            + ", ".join(f"{n} {e:.1e}" for n, e in worst)
        )
    say(f"parity: loss {parity.program_loss:.6f} through the programs, {parity.base_loss:.6f} in the base model")
    size = sum(file.bytes for file in manifest.files.values())
    say(f"held at most {watch.peak_private_bytes / MIB:.0f} MiB of private memory beyond the libraries")
    say(f"bundle {options.output}: {size / MIB:.1f} MiB. Next: pocketdit train {options.output}")
    return {
        "status": "complete",
        "bundle": str(options.output),
        "bytes": size,
        "plan": encode(plan),
        "stored_error": errors,
        "parity": dataclasses.asdict(parity),
        "peak_private_bytes": watch.peak_private_bytes,
    }


def _require_one_cut(options: argparse.Namespace) -> None:
    if isinstance(options.cut, tuple) and options.skip is not None:
        raise ValueError("skip: got a share beside a cut in numbers; give one of them.")


def _plan(options: argparse.Namespace) -> dict[str, Any]:
    _require_one_cut(options)
    config = _config(
        options,
        export__model=options.model,
        export__cut=options.cut,
        export__skip=options.skip,
        export__patch_side=options.patch,
    )
    from host import plan
    from host.block_profile import architecture_of
    from host.cut import DEFAULT_SHARE, resolve_cut
    from host.models.folder import read_configs, skeleton_of

    export = config.export
    transformer, vae = read_configs(export.model, export.revision)
    arguments = plan.settings_for(transformer, vae, export) | {"accumulation": config.train.accumulation}
    weights = tuple(options.weights or plan.WEIGHTS)
    say = _printer(options)
    if options.budget is not None:
        patch_side = arguments.pop("patch_side")
        patch_sides = [patch_side] if export.patch_side else None
        found = plan.fitting(transformer, options.budget * MIB, patch_sides=patch_sides, weights=weights, **arguments)
        say(plan.table([setting.row for setting in found]) if found else f"Nothing fits {options.budget} MiB.")
        return {"fitting": [encode(setting) for setting in found]}
    num_blocks = plan.num_blocks(transformer)
    cut, origin = resolve_cut(
        export.cut,
        DEFAULT_SHARE if export.skip is None else export.skip,
        model=export.model,
        architecture=architecture_of(skeleton_of(transformer)),
        transformer_sha256=None,  # only the configuration is at hand
        num_blocks=num_blocks,
    )
    if origin is not None:
        say(f"cut {cut[0]},{cut[1]} by {origin}")
    rows = plan.plan(transformer, cut=cut, weights=weights, **arguments)
    counts = plan.parameter_counts(transformer)
    say(f"{export.model}: {num_blocks} blocks; {', '.join(f'{n} {count / 1e6:.1f} M' for n, count in counts.items())}")
    say(plan.table(rows))
    for row in rows:
        say(f"{row.method} {row.weights}: {row.notes}")
    return {"rows": [encode(row) for row in rows]}


def _train(options: argparse.Namespace) -> dict[str, Any]:
    tables = read_tables(options.config, options.set)
    given = tables.get("train", {}) | ({"steps": options.steps} if options.steps is not None else {})
    # The bundle's own settings are the defaults of this command.
    bundle_settings = encode(read_manifest(options.bundle).training)
    settings: TrainingSpec = resolve(
        tables | {"train": bundle_settings | given}, str(options.config or "settings")
    ).train
    from runtime import trainer
    from runtime.bundle import Bundle

    say = _printer(options)
    run_dir = options.run_dir or Path("runs") / options.bundle.resolve().name
    if options.dry_run:
        bundle = Bundle(options.bundle)
        planned = trainer.planned_private_bytes(bundle)
        try:
            trainer.budget_of(bundle, options.budget)
        except BudgetExceededError as error:
            raise ValueError(str(error)) from None
        say(f"{options.bundle} is whole: {len(bundle.manifest.blocks)} blocks, {bundle.manifest.samples.count} samples")
        say(
            f"{settings.steps} steps of {settings.accumulation} samples; planned private memory {planned / MIB:.1f} MiB"
        )
        return {"status": "dry-run", "planned_private_bytes": planned, "settings": encode(settings)}
    stop, line = _stop_on_signal(), _StepLine(settings.steps, show=not options.json)
    try:
        run = trainer.train(
            options.bundle,
            run_dir,
            settings,
            budget_mib=options.budget,
            threads=options.threads,
            on_start=lambda run: say(_chosen(run)),
            on_step=line,
            should_stop=stop,
        )
    except BudgetExceededError as error:
        if line.started:
            raise
        raise ValueError(str(error)) from None  # the plan alone was above the budget
    if run["status"] == "complete":
        say(f"adapter {run_dir / trainer.ADAPTER}. Next: pocketdit generate {run_dir}")
    else:
        say(f"stopped at step {run['summary']['steps']}; the same command goes on from there.")
    return run | {"run": str(run_dir)}


def _emulate(options: argparse.Namespace) -> dict[str, Any]:
    from host.emulator.device import load_device
    from host.emulator.emulate import FILE_NAME, Request, emulate
    from host.emulator.faults import parse_kinds
    from host.emulator.report import write_report
    from host.emulator.summary import summary_text

    say = _printer(options)
    device = load_device(options.device)
    run_dir = options.run_dir or Path("runs") / f"{options.bundle.resolve().name}-{device.name}"
    request = Request(
        bundle=options.bundle,
        device=device,
        run_dir=run_dir,
        budget_bytes=options.budget,
        total_bytes=options.budget_total,
        page_cache_bytes=options.page_cache,
        steps=options.steps or 20,
        faults=parse_kinds(options.faults or ""),
        require_enforcement=options.require_enforcement,
        command=tuple(sys.argv),
    )
    _interrupt_on_signal()  # the process and its groups go too
    try:
        made = emulate(request, _Now(show=not options.json))
    except KeyboardInterrupt:
        print("pocketdit emulate: stopped; the process was ended and its limits removed.", file=sys.stderr)
        return {"exit_status": EXIT_STOPPED, "run": str(run_dir)}
    report = write_report(made, run_dir / "emulation.html")
    say(summary_text(made))
    say(f"{run_dir / FILE_NAME}, {report}")
    return {name: value for name, value in made.items() if name != "samples"} | {"run": str(run_dir)}


def _generate(options: argparse.Namespace) -> dict[str, Any]:
    config = _config(
        options,
        generate__prompts=options.prompt,
        generate__seeds=options.seeds,
    )
    from host.generate import compared, generate

    say = _printer(options)
    if options.dry_run:
        asked, seeds = compared(options.run_dir, config.generate), config.generate.seeds
        count = len(asked.prompts) * len(seeds)
        say(f"pictures of {asked.image_side} px, {count} by base and {count} by adapter: {', '.join(asked.prompts)}")
        return {"status": "dry-run", "settings": encode(config.generate), "image_side": asked.image_side}
    result = generate(options.run_dir, config.generate)
    similarity = result["similarity"]
    say(
        f"pictures in {options.run_dir / 'pictures'}: subject similarity {similarity['base']:.3f} of the base, ", end=""
    )
    say(f"{similarity['adapter']:.3f} of the adapter. Next: pocketdit report {options.run_dir}")
    return result


def _evaluate(options: argparse.Namespace) -> dict[str, Any]:
    config = _config(options, generate__seeds=options.seeds)
    from host.evaluation.compare import FILE_NAME, Evaluation, EvaluationRequest
    from host.evaluation.page import score_table, write_page
    from host.evaluation.prompts import read_prompts

    say = _printer(options)
    first = options.run_dirs[0]
    beside = first if len(options.run_dirs) == 1 else first.resolve().parent
    evaluation = Evaluation(
        EvaluationRequest(
            run_dirs=tuple(options.run_dirs),
            output_dir=options.output or beside / "evaluation",
            config=config.generate,
            dataset_dir=options.dataset,
            prompts=read_prompts(options.prompts) if options.prompts else None,
            drift_prompts=read_prompts(options.drift_prompts) if options.drift_prompts else None,
            **({"features": tuple(options.features)} if options.features else {}),
        )
    )
    output_dir = evaluation.request.output_dir
    for run in evaluation.runs:
        say(f"{run.name}: {run.subject}, {len(run.prompts)} prompts, {len(run.photos)} photos of the {run.photos_from}")
    if options.dry_run:
        missing, seeds = evaluation.store.missing(evaluation.orders), config.generate.seeds
        say(f"{len(missing)} pictures to draw with seeds {', '.join(map(str, seeds))}, into {output_dir}")
        names = {run.name: [prompt.drawn for prompt in run.prompts] for run in evaluation.runs}
        return {"status": "dry-run", "pictures": len(missing), "prompts": names, "output": str(output_dir)}
    _interrupt_on_signal()
    try:
        made = evaluation.run(say)
    except KeyboardInterrupt:
        print("pocketdit evaluate: stopped; the pictures drawn are kept, the same command goes on.", file=sys.stderr)
        return {"status": "stopped", "output": str(output_dir)}
    page = write_page(made, output_dir)
    say(score_table(made))
    say(f"{output_dir / FILE_NAME}, {page}")
    return {name: made[name] for name in ("metrics", "summary", "by_subject")} | {"output": str(output_dir)}


def _report(options: argparse.Namespace) -> dict[str, Any]:
    from host.report import summary_table, write_report

    run_path = options.run_dir / "run.json"
    if not run_path.is_file():
        raise ValueError(
            f"{options.run_dir} is not a run folder: it has no run.json. Train first with `pocketdit train`."
        )
    bundle_dir = Path(json.loads(run_path.read_text(encoding="utf-8"))["bundle"])
    path = write_report(options.run_dir, bundle_dir, options.output)
    say = _printer(options)
    say(summary_table(options.run_dir))
    say(f"report {path}")
    return {"report": str(path)}


def _convert(options: argparse.Namespace) -> dict[str, Any]:
    from export.weights import lora_candidates
    from host.lora_formats import convert_file
    from host.models import ModelFolder
    from runtime.tensor_file import TensorFile

    if not options.adapter.is_file():
        raise ValueError(f"{options.adapter} is not a file. Give an adapter as .safetensors.")
    named = options.model or TensorFile(options.adapter).metadata.get("pocketdit.base")
    if named is None:
        raise ValueError(f"{options.adapter} does not say what it was trained on. Give its base with --model.")
    model = ModelFolder(named)
    convert_file(
        options.adapter,
        options.output,
        options.to,
        family=model.adapter.family,
        module_names=lora_candidates(model.skeleton()),
    )
    _printer(options)(f"{options.output}: {options.to} format, for {named} ({model.adapter.family})")
    return {"adapter": str(options.output), "format": options.to, "family": model.adapter.family}


def _demo(options: argparse.Namespace) -> dict[str, Any]:
    from host.demo import run_demo

    return run_demo(options.output, steps=options.steps, dry_run=options.dry_run, show=not options.json)


def _quiet_libraries() -> None:
    """Libraries announce what they lack, deprecate and load; none of it concerns the user. Errors stay."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)


def _printer(options: argparse.Namespace) -> Callable[..., None]:
    return (lambda *args, **kwargs: None) if options.json or options.quiet else print


def _chosen(run: dict[str, Any]) -> str:
    """What a run picked by itself, and why."""
    planned, budget = run["planned_private_bytes"] / MIB, run["budget_mib"]
    why = "no budget" if budget is None else f"budget {budget} MiB"
    behind = "; blocks leave the page cache after use: not all fit" if run["drops_behind"] else ""
    return (
        f"{run['weights']} weights, {run['threads']} threads, {run['micro_batch']} samples share a pass over the weights; "
        f"planned private memory {planned:.1f} MiB ({why}){behind}"
    )


class _Now:
    """Prints what is under way, at most every two seconds."""

    def __init__(self, *, show: bool) -> None:
        self._show, self._printed = show, 0.0

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if self._show and (now - self._printed >= 2 or not text.startswith("step ")):
            self._printed = now
            print(text, flush=True)


class _StepLine:
    """Prints a line for the first steps, then about one every two seconds."""

    def __init__(self, steps: int, *, show: bool) -> None:
        self._steps, self._show = steps, show
        self._printed, self._started, self._first = 0.0, time.monotonic(), 0

    @property
    def started(self) -> bool:
        """Whether a step was taken."""
        return self._first > 0

    def __call__(self, row: dict[str, Any]) -> None:
        step = row["step"]
        self._first = self._first or step
        now = time.monotonic()
        eta_min = (now - self._started) / (step - self._first + 1) * (self._steps - step) / 60
        if self._show and (now - self._printed >= 2 or step in (self._first, self._steps)):
            self._printed = now
            width = len(str(self._steps))
            print(
                f"step {step:0{width}d}/{self._steps} | loss {row['loss']:.4f} | {row['step_ms']:.0f} ms | "
                f"peak {row['peak_private_bytes'] / MIB:.0f} MiB | eta {eta_min:.1f} min",
                flush=True,
            )


def _interrupt_on_signal() -> None:
    """SIGTERM ends a command as Ctrl-C does; so does SIGINT where a shell started it in the background, ignoring that."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def _stop_on_signal() -> Callable[[], bool]:
    """The first Ctrl-C or SIGTERM stops at the next step boundary with everything saved; a second one kills."""
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    return lambda: bool(received)


def _cut(text: str) -> tuple[int, int] | str:
    if text.partition(":")[0] == "auto":
        return text
    values = _integers(text)
    if len(values) != 2:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected two numbers such as 4,3")
    return values[0], values[1]


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least 1")
    return value


def _mib(text: str) -> int:
    """Whole MiB of a size, at least one."""
    return _positive(str(_size(text) // MIB))


def _size(text: str) -> int:
    """Bytes of `512MiB`, `1.5GiB` or `512`, which is MiB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(MiB|GiB|)", text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a size such as 512MiB or 1.5GiB")
    return round(float(found[1]) * (1024 * MIB if found[2] == "GiB" else MIB))


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected whole numbers separated by commas") from None


if __name__ == "__main__":
    sys.exit(main())
