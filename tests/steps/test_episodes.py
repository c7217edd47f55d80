"""Episodes of several turns: which tokens an engine is asked with, which are trained on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from byte_tokenizer import save_tokenizer

from ctrl_megatron.config import load_config
from ctrl_megatron.data.rows import Row
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.errors import UserError
from ctrl_megatron.rewards import RewardOutcome, Scores
from ctrl_megatron.steps.batch import make_batch, sample_sizes
from ctrl_megatron.steps.draws import LeftoverGroups
from ctrl_megatron.steps.episodes import (
    Episode,
    EpisodeLimits,
    Episodes,
    Observation,
    environment_pipeline,
    measure_episodes,
    play_episode,
)
from ctrl_megatron.steps.repair import CodeRepair, repair_pipeline
from ctrl_megatron.steps.sample import Sample
from ctrl_megatron.types import Completion, SamplingParams, Verdict, VersionSpan

ROW = Row(id="row/1", prompt=({"role": "user", "content": "guess"},))
PARAMS = SamplingParams(max_tokens=999, n=3, seed=5, stop_token_ids=(0,))
LIMITS = EpisodeLimits(turns=3, turn_tokens=20, prompt=100, response=200)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


class Guess:
    """Is done when the answer is right."""

    def __init__(self, right: str, reply: str = "no") -> None:
        self._right, self._reply, self.closed = right, reply, 0

    async def reset(self) -> Sequence[dict[str, str]]:
        return ROW.prompt

    async def step(self, action: str) -> Observation:
        done = action == self._right
        return Observation(text=self._reply, done=done, score=float(done), fields={"said": action})

    async def close(self) -> None:
        self.closed += 1


class Parrot:
    """An engine that says one text after the other, ended by the end token unless it is cut."""

    def __init__(self, codec: TextCodec, texts: Sequence[str]) -> None:
        self._codec, self._texts = codec, iter(texts)
        self.asked = list[tuple[list[int], SamplingParams]]()

    async def generate(self, prompts: list[list[int]], params: SamplingParams) -> Any:
        self.asked.append((prompts[0], params))
        ids = [*self._codec.encode(next(self._texts)), self._codec.eos_token_ids[0]]
        kept = tuple(ids[: params.max_tokens])
        completion = Completion(
            token_ids=kept,
            log_probs=tuple(-0.5 for _ in kept),
            finish_reason="stop" if len(kept) == len(ids) else "length",
            spans=(VersionSpan("actor@2", 0, len(kept)),),
        )
        return [[completion]]


def played(
    codec: TextCodec, texts: Sequence[str], limits: EpisodeLimits = LIMITS, reply: str = "no"
) -> tuple[Episode, Parrot]:
    engine: Any = Parrot(codec, texts)
    environment = Guess("yes", reply)
    episode = asyncio.run(play_episode(environment, engine, codec, limits, PARAMS, "row/1/0"))
    assert environment.closed == 1
    return episode, engine


def sample_of(episode: Episode) -> Sample:
    return Sample(
        uid="g",
        row_id="row/1",
        mini_batch=0,
        prompt=episode.prompt,
        completion=episode.response,
        drawn=episode.drawn,
        fields=episode.sample_fields,
    )


def test_every_turn_continues_the_tokens_of_the_turns_before(codec: TextCodec) -> None:
    episode, engine = played(codec, ["maybe", "yes"])
    whole = [*episode.prompt, *episode.response.token_ids]
    chat = [*ROW.prompt, {"role": "assistant", "content": "maybe"}]
    chat += [{"role": "user", "content": "no"}, {"role": "assistant", "content": "yes"}]
    # The template ends an answer with its end token and a line break, which nobody drew.
    assert codec.decode(whole, False) + "\n" == codec.decode(codec.encode_chat(chat, False), False)
    for number, (prompt, params) in enumerate(engine.asked):
        assert prompt == whole[: len(prompt)]
        assert (params.n, params.rows, params.seed) == (1, (f"row/1/0/{number}",), 5)
    drawn = [t for t, own in zip(episode.response.token_ids, episode.drawn, strict=True) if own]
    assert codec.decode(drawn, False) == "maybe<e>yes<e>"
    assert (episode.last_turn.done, episode.last_turn.score) == (True, 1.0)
    assert episode.response.spans == (VersionSpan("actor@2", 0, len(episode.drawn)),)


def test_an_episode_ends_after_its_turns_and_where_no_room_is_left(codec: TextCodec) -> None:
    episode, _ = played(codec, ["a", "b", "c"])
    assert (len(episode.answers), episode.last_turn.done, episode.last_turn.score) == (
        3,
        False,
        0.0,
    )
    assert episode.response.finish_reason == "stop" and episode.drawn[-1]
    cut, engine = played(codec, ["x" * 30, "yes"])
    # An answer of 20 tokens has no end token, so the template's own comes before the reply.
    assert "x" * 20 + "<e>\n<s>user" in codec.decode(engine.asked[1][0], False)
    assert cut.answers[0] == "x" * 20
    tight = EpisodeLimits(turns=3, turn_tokens=20, prompt=100, response=30)
    episode, engine = played(codec, ["maybe", "yes"], tight, reply="far too long to be read")
    assert len(engine.asked) == 1 and episode.response.finish_reason == "length"
    with pytest.raises(UserError, match=r"data\.max_prompt_length=5: the environment of row/1/0"):
        played(codec, ["a"], EpisodeLimits(turns=3, turn_tokens=20, prompt=5, response=30))


def test_the_batch_masks_what_the_model_only_read(codec: TextCodec) -> None:
    first, second = (played(codec, texts)[0] for texts in (["yes"], ["maybe", "yes"]))
    samples = [sample_of(first), sample_of(second)]
    batch = make_batch(samples, pad_token_id=0)
    for row, episode in enumerate((first, second)):
        count = len(episode.drawn)
        assert batch["response_mask"][row, :count].tolist() == list(episode.drawn)
        assert not batch["response_mask"][row, count:].any()
        on = batch["response_mask"][row]
        assert (batch["rollout_log_probs"][row] == torch.where(on, -0.5, 0.0)).all()
    # Balancing counts what is computed, metrics what is trained on.
    assert [s.response for s in sample_sizes(batch)] == [len(first.drawn), len(second.drawn)]
    assert [sample.size for sample in samples] == sample_sizes(batch)
    measured = measure_episodes(samples)
    assert measured["response/length"].tolist() == [4, 10]
    assert measured["episode/turns"].tolist() == [1, 2]
    assert measured["episode/gain"].tolist() == [0, 1]
    assert measured["episode/observed_tokens"][0] == 0 < measured["episode/observed_tokens"][1]
    kept = LeftoverGroups()
    kept.add_groups([samples])
    again = LeftoverGroups()
    again.load_state_dict(kept.state_dict())
    assert again.take_all() == [samples]


def all_episodes(codec: TextCodec, make: Callable[..., Any]) -> list[list[Episode]]:
    worker: Any = SimpleNamespace(
        config=load_config(None, [], "none"),
        engine=Parrot(codec, ["yes"] * 9),
        codec=codec,
        step=2,
        wait_for_draws=lambda: None,
        device_owner=SimpleNamespace(to_engine=lambda role, step: f"{role}@{step}"),
        role="actor",
        run_on_leader=lambda work, what: asyncio.run(work()),
    )
    rows = [ROW, Row(id="row/2", prompt=ROW.prompt)]
    return Episodes(make=make, turns=2).play_all(worker, rows, PARAMS, "test", 7)


def test_episodes_of_a_group_have_seeds_of_their_own(codec: TextCodec) -> None:
    def seeds() -> dict[tuple[str, int], int]:
        found = list[tuple[str, int]]()

        def make(worker: Any, row: Row, seed: int) -> Guess:
            found.append((row.id, seed))
            return Guess("yes")

        groups = all_episodes(codec, make)
        assert [len(group) for group in groups] == [3, 3]
        return {place: place[1] for place in found}

    first = seeds()
    assert len(first) == len(set(first.values())) == 6 and first == seeds()


def test_environments_with_different_fields_are_refused(codec: TextCodec) -> None:
    class Odd(Guess):
        async def step(self, action: str) -> Observation:
            return Observation(done=True, fields={self._right: 1.0})

    rights = iter("abababab")
    with pytest.raises(UserError, match=r"have the fields \(a\) or \(b\)"):
        all_episodes(codec, lambda *given: Odd(next(rights)))
    with pytest.raises(UserError, match=r"have the fields \(turns\); let"):
        all_episodes(codec, lambda *given: Odd("turns"))


def repaired(outcome: RewardOutcome, total: float | None) -> Observation:
    async def verdicts(items: Any) -> list[RewardOutcome]:
        return [outcome]

    async def score(items: Any) -> Scores:
        return Scores(parts={"code": [total]}, totals=[total], outcomes=[None])

    rewards = SimpleNamespace(first_judge_outcomes=verdicts)
    worker: Any = SimpleNamespace(rewards=rewards, score=score)
    return asyncio.run(CodeRepair(worker, ROW, 0).step("```python\nf()\n```"))


def test_code_repair_tells_what_failed_until_nothing_does() -> None:
    half = Verdict(passed=(True, False), total=2, detail=("", "expected 8 and got 9"))
    found = repaired(RewardOutcome(reward=0.5, verdict=half), 0.5)
    assert (found.done, found.score) == (False, 0.5)
    assert found.fields == {"reward/code": 0.5, "pass_rate": 0.5}
    assert "fails 1 of 2 tests.\n" in found.text
    right = Verdict(passed=(True, True), total=2)
    assert repaired(RewardOutcome(reward=1.0, verdict=right), 1.0).done
    # A failed sandbox leaves the episode out; an answer without a program is a wrong one.
    lost = repaired(RewardOutcome(reward=None, error="no sandbox"), None)
    assert (lost.done, lost.score) == (True, None)
    empty = repaired(RewardOutcome(reward=0.0), 0.0)
    assert not empty.done and "contains no program" in empty.text


@pytest.mark.parametrize(
    "detail",
    ["first line differs: '4', expected '8'", "exit status 1: KeyError: '3 5'", "", "8" * 9],
)
def test_what_a_test_or_a_program_says_is_not_in_the_reply(detail: str) -> None:
    def reply(detail: str) -> str:
        verdict = Verdict(passed=(False, True), total=2, detail=(detail, ""))
        return repaired(RewardOutcome(reward=0.5, verdict=verdict), 0.5).text

    assert reply(detail) == reply("another")
    late = Verdict(passed=(False,), total=1, detail=("TimeLimitExceeded",), timed_out=True)
    assert "out of time" in repaired(RewardOutcome(reward=0.0, verdict=late), 0.0).text


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["reward.reward_funcs=[code,soft_overlong_punishment]"], "rewards programs"),
        (["algorithm.filter_groups.enable=true"], "support neither dynamic sampling"),
        (["algorithm.adv_estimator=remax"], "nor remax"),
    ],
)
def test_settings_that_episodes_do_not_support_are_refused(
    overrides: list[str], named: str
) -> None:
    pipeline = "dag.custom_pipeline_fn=ctrl_megatron.pipeline:repair_pipeline"
    config = load_config(None, [pipeline, "reward.reward_funcs=[code]", *overrides], "none")
    with pytest.raises(UserError, match=named):
        repair_pipeline(config)


def test_a_graph_of_the_users_environment(tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(
        "from ctrl_megatron.pipeline import node\n"
        "@node(writes=('said',))\ndef make(worker, row, seed): ...\n"
    )
    config = load_config(None, [], "none")
    graph = environment_pipeline(config, environment=f"{tmp_path}/world.py:make", turns=2)
    first = graph.nodes["generate_episodes"]
    assert {"said", "turns", "score", "response_mask"} <= set(first.written_fields)
    with pytest.raises(UserError, match=r"dag\.options\.turns: is 0"):
        environment_pipeline(config, environment=f"{tmp_path}/world.py:make", turns=0)
