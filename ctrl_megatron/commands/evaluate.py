"""Evaluate critics on the validation rows.

``ctrl-evaluate --config FILE "before SFT=DIR" "after SFT=DIR" [--set key=value]``

A critic is the directory of an HF model, or a file of critiques with one ``{"id", "critique"}`` per
line (``oracle=FILE.jsonl``). All critiques, revisions and verdicts are kept. The same command
continues a stopped evaluation; other critics or seeds are added to it. ``ctrl-report DIR`` rewrites
the report, ``ctrl-report DIR DIR`` compares several.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ctrl_megatron.commands.start import CommandParser, checked_config, command
from ctrl_megatron.config import Config
from ctrl_megatron.config.environment import read_launch
from ctrl_megatron.config.flags import count, given_file, new_path, temperature
from ctrl_megatron.errors import STOPPED, UserError

_CRITIC = "a name and an HF model, or a .jsonl file of critiques with the rows' ids"


@command("evaluate")
def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, check, run. Exit codes: 0 done, 2 wrong input, 13 a process failed, 14 the
    sandbox failed too often, 130 stopped.
    """
    parser = CommandParser(__doc__)
    parser.add_argument("--config", required=True, help="YAML file, e.g. examples/ctrl_7b.yaml")
    parser.add_argument("critics", nargs="+", metavar="STAGE=DIR", help=_CRITIC)
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", dest="overrides")
    parser.add_argument(
        "--out", type=new_path, help="directory; defaults to RUN_evaluation beside the run's"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the evaluation in --out")
    parser.add_argument("--samples", type=count(), default=1, help="critiques per first solution")
    parser.add_argument("--turns", type=count(), default=1, help="critiques and revisions in turn")
    parser.add_argument(
        "--temperature", type=temperature, default=0.0, help="sampling of critiques; 0 is greedy"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of the critiques")
    parser.add_argument(
        "--pairs", type=given_file, help="responses to compare, in JudgeBench's format"
    )
    options = parser.parse_args(arguments)
    critics = dict(text.split("=", 1) for text in options.critics if "=" in text)
    if len(critics) != len(options.critics) or not all(critics):
        raise UserError("every critic must be given as STAGE=DIR, each stage once")
    _check_draws(options)
    config = _in(options.out, checked_config(options.config, options.overrides, "rl"))
    from ctrl_megatron.eval.transcripts import ChainPlan
    from ctrl_megatron.pipeline.evaluation import EvaluationJob, evaluate

    plan = ChainPlan(samples=options.samples, turns=options.turns, temperature=options.temperature)
    job = EvaluationJob(
        critics=critics,
        plan=plan,
        seeds=tuple(options.seeds),
        pairs=options.pairs,
        overwrite=options.overwrite,
    )
    if not evaluate(config, job):
        return STOPPED
    if read_launch().rank == 0:
        _report(Path(config.trainer.run_dir), options.samples)
    return 0


def _check_draws(options: argparse.Namespace) -> None:
    if len(set(options.seeds)) < len(options.seeds):
        raise UserError(f"--seeds: {options.seeds} names a seed twice")
    if options.temperature == 0 and (options.samples > 1 or len(options.seeds) > 1):
        raise UserError(
            "--samples and --seeds ask for several draws, and greedy ones are all the same",
            remedy="give a --temperature, the paper's is 0.7",
        )


def _in(out: Path | None, config: Config) -> Config:
    """The configuration of a run whose directory is the evaluation's."""
    if out is None:
        out = config.trainer.run_dir.with_name(f"{config.trainer.run_dir.name}_evaluation")
    place = {"default_local_dir": str(out.parent), "experiment_name": out.name}
    return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, **place))


def _report(folder: Path, samples: int) -> None:
    from ctrl_megatron.eval.report import write_evaluation_report

    ks = sorted({1, samples})
    for result in write_evaluation_report(folder, ks=ks):
        told = {name: round(rate.value, 4) for name, rate in result.last.items()}
        print(result.critic, told)
    print(f"wrote {folder / 'report.html'}")


if __name__ == "__main__":
    raise SystemExit(main())
