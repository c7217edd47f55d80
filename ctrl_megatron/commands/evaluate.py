"""Evaluate critics on the validation rows.

``ctrl-evaluate --config FILE "before SFT=DIR" "after SFT=DIR" [--set key=value]``

A critic is the directory of an HF model, or a file of critiques with one ``{"id", "critique"}`` per
line (``oracle=FILE.jsonl``). All critiques, revisions and verdicts are kept. The same command
continues a stopped evaluation; other critics or seeds are added to it. ``ctrl-report DIR`` rewrites
the report, ``ctrl-report DIR DIR`` compares several.

``--proxy NAME=WHERE NAME=WHERE`` evaluates the critics with each of these proxies, in directories
NAME of ``--out``, and compares them in one report. WHERE is ``shared``, the directory of any
language model (engines of its own), or ``MODEL@URL`` (a server of OpenAI's protocol).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from ctrl_megatron.commands.hub import hub_directory, is_hub_id
from ctrl_megatron.commands.start import CommandParser, command_entry_point, load_checked_config
from ctrl_megatron.config import Config
from ctrl_megatron.config.environment import read_launch
from ctrl_megatron.config.flags import count_flag, existing_file, output_path, temperature
from ctrl_megatron.config.secrets import hide_credentials_in_text
from ctrl_megatron.errors import STOPPED, UserError, raise_all

if TYPE_CHECKING:
    from ctrl_megatron.eval.results import CriticResult
    from ctrl_megatron.eval.scores import Confidence

_PROXY = "actor_rollout_ref.proxy"
_READ_BY = {"shared": {"model"}, "engine": {"model", "engine"}, "api": {"api"}}
"""Kind of a proxy -> the groups of its settings that are read."""
_CRITIC = (
    "a name and an HF model, a directory or an id on the Hub, or a .jsonl file of critiques with "
    "the rows' ids"
)


@command_entry_point("evaluate")
def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, check, run. Exit codes: 0 done, 2 wrong input, 13 a process failed, 14 the
    sandbox failed too often, 130 stopped.
    """
    parser = CommandParser(__doc__)
    parser.add_argument("--config", required=True, help="YAML file, e.g. examples/ctrl_7b.yaml")
    parser.add_argument("critics", nargs="+", metavar="STAGE=DIR", help=_CRITIC)
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", dest="overrides")
    parser.add_argument(
        "--out", type=output_path, help="directory; defaults to RUN_evaluation beside the run's"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the evaluation in --out")
    parser.add_argument(
        "--samples", type=count_flag(), default=1, help="critiques per first solution"
    )
    parser.add_argument(
        "--turns", type=count_flag(), default=1, help="critiques and revisions in turn"
    )
    parser.add_argument(
        "--temperature", type=temperature, default=0.0, help="sampling of critiques; 0 is greedy"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of the critiques")
    parser.add_argument(
        "--pairs", type=existing_file, help="responses to compare, in JudgeBench's format"
    )
    parser.add_argument(
        "--labelled",
        type=existing_file,
        help="answers to judge whose verdict is known, in CodeCriticBench's or RealCritic's format",
    )
    parser.add_argument(
        "--proxy",
        nargs="+",
        default=[],
        metavar="NAME=WHERE",
        help="evaluate with each of these proxies: shared, a model's directory, or MODEL@URL",
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        default=[],
        metavar="NAME=FILE",
        help="first solutions by the proxy of that name; the others revise those of data.val_files",
    )
    parser.add_argument(
        "--confidence",
        choices=("votes", "logprob"),
        default="votes",
        help="scores of first solutions, for auc, ece, brier and best of n: the share of critiques "
        "that say correct, or the probability of that word; transcripts have both",
    )
    options = parser.parse_args(arguments)
    critics = dict(text.split("=", 1) for text in options.critics if "=" in text)
    if len(critics) != len(options.critics) or not all(critics):
        raise UserError("every critic must be given as STAGE=DIR, each stage once")
    _check_draws(options)
    proxies = proxy_overrides(options.proxy, options.rows)
    config = _in(options.out, load_checked_config(options.config, options.overrides, "rl"))
    critics = {name: hub_directory(where, f"{name}={where}") for name, where in critics.items()}
    out = Path(config.trainer.run_dir)
    from ctrl_megatron.eval.transcripts import ChainPlan
    from ctrl_megatron.run.evaluation import EvaluationJob, evaluate

    plan = ChainPlan(samples=options.samples, turns=options.turns, temperature=options.temperature)
    job = EvaluationJob(
        critics=critics,
        plan=plan,
        seeds=tuple(options.seeds),
        pairs=options.pairs,
        labelled=options.labelled,
        overwrite=options.overwrite,
    )
    if not proxies:
        if not evaluate(config, job):
            return STOPPED
        if read_launch().rank == 0:
            _report(out, options.samples, options.confidence)
        return 0
    configs = _configs(options, out, proxies, critics)
    for name, config in configs.items():
        if read_launch().rank == 0:
            print(f"proxy {name}", flush=True)
        if not evaluate(config, job):
            return STOPPED
    if read_launch().rank == 0:
        _compare([out / name for name in configs], out, options.samples, options.confidence)
    return 0


def proxy_overrides(proxies: Sequence[str], rows: Sequence[str]) -> dict[str, list[str]]:
    """Name of every proxy -> the settings that choose it and its first solutions.

    ``proxies`` are ``NAME=WHERE``, ``rows`` are ``NAME=FILE``. Raises UserError with a line for
    each that cannot be read.
    """
    overrides: dict[str, list[str]] = {}
    problems = []
    for text in proxies:
        name, _, where = text.partition("=")
        if not re.fullmatch(r"\w[\w.-]*", name) or not where or name in overrides:
            problems.append(
                UserError(
                    f"{text!r} must be NAME=WHERE, each name once and fit for a directory",
                    key="--proxy",
                )
            )
            continue
        # The address may have a name and a password, with another @.
        model, at, address = where.partition("@http")
        if where == "shared":
            overrides[name] = [f"{_PROXY}.kind=shared"]
        elif at and model and address.startswith(("://", "s://")):
            overrides[name] = [
                f"{_PROXY}.kind=api",
                f"{_PROXY}.api.model={json.dumps(model)}",
                f"{_PROXY}.api.base_url={json.dumps([f'http{address}'])}",
            ]
        elif Path(where).is_dir() or is_hub_id(where):
            path = json.dumps(where)
            overrides[name] = [f"{_PROXY}.kind=engine", f"{_PROXY}.model.path={path}"]
        else:
            problems.append(
                UserError(
                    f"{hide_credentials_in_text(where)!r} is no directory",
                    key=f"--proxy {name}",
                    remedy="name a model's directory or its id on the Hub, MODEL@URL of a server, "
                    "or shared",
                )
            )
    for text in rows:
        name, _, file = text.partition("=")
        if name not in overrides or not file:
            problem = f"{text!r} must be NAME=FILE, with the name of a --proxy"
            problems.append(UserError(problem, key="--rows"))
        else:
            overrides[name].append(f"data.val_files={json.dumps([file])}")
    raise_all(problems)
    return overrides


def _configs(
    options: argparse.Namespace,
    out: Path,
    proxies: Mapping[str, Sequence[str]],
    critics: Mapping[str, str],
) -> dict[str, Config]:
    """Name of every proxy -> the configuration of its evaluation. Raises UserError that names each
    proxy which cannot be used, before any process starts.
    """
    from ctrl_megatron.eval.transcripts import is_evaluation
    from ctrl_megatron.run.evaluation import check_evaluation

    if is_evaluation(out):
        raise UserError(
            f"--out: {out} is an evaluation with one proxy",
            remedy="name another directory, which gets one of each proxy",
        )
    configs, problems = {}, []
    for name, chosen in proxies.items():
        try:
            given = _read_with(chosen, options.overrides)
            config = load_checked_config(options.config, [*given, *chosen], "rl")
            configs[name] = _in(out / name, config)
            check_evaluation(configs[name], critics)
        except UserError as error:
            lines = str(error).splitlines()
            problems += [UserError(line, key=f"--proxy {name}") for line in lines]
    raise_all(problems)
    return configs


def _read_with(chosen: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """``overrides`` without the settings of proxies of another kind than the ``chosen`` one."""
    kind = chosen[0].partition("=")[2]
    others = {"model", "engine", "api"} - _READ_BY[kind]
    beginnings = tuple(f"{_PROXY}.{group}." for group in others)
    return [text for text in overrides if not text.startswith(beginnings)]


def _check_draws(options: argparse.Namespace) -> None:
    if len(set(options.seeds)) < len(options.seeds):
        raise UserError(f"--seeds: {options.seeds} names a seed twice")
    if options.temperature == 0 and (options.samples > 1 or len(options.seeds) > 1):
        raise UserError(
            "--samples and --seeds ask for several draws, and greedy ones are all the same",
            remedy="give a --temperature, the paper's is 0.7",
        )


def _in(out: Path | None, config: Config) -> Config:
    """The configuration of a run whose directory is the evaluation's, and whose engines get the
    whole weights of each critic."""
    if out is None:
        out = config.trainer.run_dir.with_name(f"{config.trainer.run_dir.name}_evaluation")
    place = {"default_local_dir": str(out.parent), "experiment_name": out.name}
    family = config.actor_rollout_ref
    return config.replace_groups(
        trainer=replace(config.trainer, **place),
        actor_rollout_ref=replace(family, rollout=replace(family.rollout, adapter_push=False)),
    )


def _report(folder: Path, samples: int, confidence: Confidence) -> None:
    from ctrl_megatron.eval.report import write_evaluation_report

    _tell(write_evaluation_report(folder, ks=sorted({1, samples}), confidence=confidence))
    print(f"wrote {folder / 'report.html'}")


def _compare(folders: Sequence[Path], out: Path, samples: int, confidence: Confidence) -> None:
    """Report every evaluation and all of them together."""
    from ctrl_megatron.eval.report import write_evaluation_report, write_evaluations_report

    ks = sorted({1, samples})
    for folder in folders:
        write_evaluation_report(folder, ks=ks, confidence=confidence)
    target = out / "report.html"
    _tell(write_evaluations_report(folders, target, ks=ks, confidence=confidence))
    print(f"wrote {out / 'report.html'}")


def _tell(results: Sequence[CriticResult]) -> None:
    """A block of lines for every critic; the report has intervals and all critics side by side."""
    for result in results:
        told = {name: rate.value for name, rate in result.last_turn_rates.items()}
        before = result.curves[0].get("pass@1")
        first = {} if before is None else {"pass@1 before": before.value}
        words = [f"{name} {value:.4g}" for name, value in (first | told).items()]
        text = f"{result.critic}: {', '.join(words)}"
        print(fill(text, 100, subsequent_indent="  "))


if __name__ == "__main__":
    raise SystemExit(main())
