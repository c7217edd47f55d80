"""The pure parts of the rollout room, against independent oracles."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ctrl_megatron.rollout import wire
from ctrl_megatron.rollout.decoding import spans
from ctrl_megatron.rollout.digest import tensor_digest
from ctrl_megatron.rollout.engine import (
    Chunk,
    EngineBroken,
    EngineError,
    EngineSpec,
    Slot,
    available_engines,
    require_engine,
)
from ctrl_megatron.rollout.gate import Gate
from ctrl_megatron.rollout.launch import engine_environment
from ctrl_megatron.rollout.manifest import check_specs, read_manifest
from ctrl_megatron.rollout.requests import check_request, stream_seed
from ctrl_megatron.rollout.sampling import draw, temper, truncate
from ctrl_megatron.rollout.segment import open_chunk
from ctrl_megatron.rollout.update import WeightState
from ctrl_megatron.types import Completion, SamplingParams, TensorSpec, VersionSpan

names = st.text("abcdef.", min_size=1, max_size=6)
dtypes = st.sampled_from(["float32", "bfloat16", "float16"])
shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple)
specs = st.builds(TensorSpec, name=names, dtype=dtypes, shape=shapes)


def spec(name: str, shape: tuple[int, ...] = (2, 3), dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


# --- manifest ---------------------------------------------------------------------------------


def checkpoint(directory: Path, files: dict[str, dict[str, torch.Tensor]], *, tied: bool) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    for file, tensors in files.items():
        save_file(tensors, directory / file, metadata={"format": "pt"})
    if len(files) > 1:
        table = {name: file for file, tensors in files.items() for name in tensors}
        index = directory / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": table}))
    return directory


@pytest.mark.parametrize("tied", [True, False])
def test_the_manifest_covers_all_files_and_leaves_out_what_no_update_brings(
    tmp_path: Path, tied: bool
) -> None:
    path = checkpoint(
        tmp_path / "model",
        {
            "a.safetensors": {"lm_head.weight": torch.zeros(4, 2), "x": torch.zeros(3).bfloat16()},
            "b.safetensors": {"rope.inv_freq": torch.zeros(2), "y": torch.zeros(1, 5)},
        },
        tied=tied,
    )
    found = {s.name: s.shape for s in read_manifest(path, "bfloat16")}
    head = {} if tied else {"lm_head.weight": (4, 2)}
    assert found == {"x": (3,), "y": (1, 5), **head}
    assert {s.dtype for s in read_manifest(path, "bfloat16")} == {"bfloat16"}


def test_a_directory_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        read_manifest(tmp_path, "float32")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        read_manifest(tmp_path, "float32")


def test_every_kind_of_disagreement_is_listed_at_once() -> None:
    manifest = [spec("a"), spec("b"), spec("c"), spec("d")]
    given_specs = [spec("a"), spec("b", (3, 2)), spec("z"), spec("d", dtype="int8")]
    with pytest.raises(ValueError) as caught:
        check_specs(manifest, given_specs)
    text = str(caught.value)
    for part in (
        "1 unknown: z",
        "1 missing: c",
        "mis-shaped: b (3, 2) instead of (2, 3)",
        "d int8",
    ):
        assert part in text
    with pytest.raises(ValueError, match=r"2 repeated|repeated: a"):
        check_specs([spec("a")], [spec("a"), spec("a")])


@given(st.lists(specs, unique_by=lambda s: s.name, max_size=8), st.randoms())
def test_any_order_and_any_weight_dtype_is_accepted(
    found: list[TensorSpec], random: object
) -> None:
    shuffled = [spec(s.name, s.shape, "float16") for s in found]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    check_specs(found, shuffled)


# --- requests ---------------------------------------------------------------------------------


@given(st.integers(0, 2**40), st.integers(0, 50), st.integers(0, 50))
def test_streams_are_seeds_that_torch_takes(seed: int, row: int, sample: int) -> None:
    value = stream_seed(seed, row, sample)
    assert 0 <= value < 2**63
    text = f"{seed}:{row}:{sample}".encode()
    assert value == int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") // 2


def test_streams_differ() -> None:
    seeds = {stream_seed(s, i, j) for s in range(8) for i in range(16) for j in range(8)}
    assert len(seeds) == 8 * 16 * 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n must"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": -2}, "top_k"),
    ],
)
def test_bad_sampling_parameters_are_named(change: dict[str, float], message: str) -> None:
    params = SamplingParams(**{"max_tokens": 4, **change})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        check_request([[1]], params, max_model_len=8, vocab_size=10)


def test_a_prompt_may_fill_the_length_exactly() -> None:
    params = SamplingParams(max_tokens=4)
    check_request([[1, 2, 3, 9]], params, max_model_len=8, vocab_size=10)
    with pytest.raises(ValueError, match="row 1 has 5 tokens"):
        check_request([[1], [1] * 5], params, max_model_len=8, vocab_size=10)
    with pytest.raises(ValueError, match="row 0 has token ids outside"):
        check_request([[1, -1]], params, max_model_len=8, vocab_size=10)


# --- sampling ---------------------------------------------------------------------------------


def kept_by_definition(probabilities: np.ndarray, top_p: float, top_k: int) -> set[int]:
    """Top-k, then the shortest prefix, likeliest first, that holds top_p of what is left."""
    order = sorted(range(len(probabilities)), key=lambda v: -probabilities[v])
    order = order if top_k == -1 else order[:top_k]
    total, held, kept = sum(probabilities[v] for v in order), 0.0, set()
    for token in order:
        if held >= top_p * total:
            break
        kept.add(token)
        held += probabilities[token]
    return kept


@settings(deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(2, 12),
    st.sampled_from([1.0, 0.83, 0.51, 0.07]),
    st.sampled_from([-1, 1, 3, 50]),
)
def test_truncation_keeps_what_the_definition_keeps(
    seed: int, size: int, top_p: float, top_k: int
) -> None:
    logits = torch.randn(2, size, generator=torch.Generator().manual_seed(seed)) * 2
    log_probs = temper(logits, 1.0)
    cut = truncate(log_probs, top_p, top_k)
    for row in range(2):
        exact = log_probs[row].double().exp().numpy()
        kept = kept_by_definition(exact, top_p, top_k)
        assert set(cut[row].nonzero().flatten().tolist()) == kept
        for token in kept:
            assert cut[row, token] == pytest.approx(exact[token], rel=1e-5)


def test_tempering_is_the_softmax_of_scaled_logits() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0]])
    exact = np.exp(np.array([0.0, 1.0, 3.0]) / 0.5)
    np.testing.assert_allclose(temper(logits, 0.5).exp()[0], exact / exact.sum(), rtol=1e-6)
    np.testing.assert_array_equal(temper(logits, 0.0), temper(logits, 1.0))


def test_a_row_draws_the_same_alone_and_in_company() -> None:
    params = SamplingParams(max_tokens=1, top_p=0.9)
    log_probs = temper(torch.randn(5, 40), 1.0)

    def streams() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(i) for i in range(5)]

    together = draw(log_probs, params, streams()).tolist()
    alone = [draw(log_probs[i : i + 1], params, [s]).item() for i, s in enumerate(streams())]
    assert together == alone


def test_a_token_without_mass_is_never_drawn() -> None:
    log_probs = temper(torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf]]), 1.0)
    stream = torch.Generator().manual_seed(0)
    params = SamplingParams(max_tokens=1)
    drawn = [draw(log_probs, params, [stream]).item() for _ in range(200)]
    assert set(drawn) == {0, 2}


def test_spans_are_runs_of_a_version() -> None:
    assert spans([]) == ()
    assert spans(["a", "a", "b", "a"]) == (
        VersionSpan("a", 0, 2),
        VersionSpan("b", 2, 3),
        VersionSpan("a", 3, 4),
    )


# --- gate -------------------------------------------------------------------------------------


class Walker:
    """A thread that passes a gate until it is refused."""

    def __init__(self, gate: Gate) -> None:
        self.gate, self.ticket, self.steps = gate, gate.ticket(), 0
        self.thread = threading.Thread(target=self._walk, daemon=True)
        self.thread.start()

    def _walk(self) -> None:
        while self.gate.enter(self.ticket):
            self.steps += 1
            time.sleep(0.001)
            self.gate.leave()

    def wait_for_steps(self, count: int) -> None:
        deadline = time.monotonic() + 20
        while self.steps < count and time.monotonic() < deadline:
            time.sleep(0.001)
        assert self.steps >= count


def test_nobody_passes_a_closed_gate_and_all_go_on_when_it_opens() -> None:
    gate = Gate()
    walker = Walker(gate)
    walker.wait_for_steps(3)
    gate.close(abort=False)
    held = walker.steps
    time.sleep(0.05)
    assert walker.steps == held and not gate.is_open
    gate.open()
    walker.wait_for_steps(held + 3)
    gate.close(abort=True)
    walker.thread.join(20)
    assert not walker.thread.is_alive()


def test_an_abort_ends_what_had_begun_and_holds_what_comes_later() -> None:
    gate = Gate()
    gate.close(abort=False)
    early = Walker(gate)
    gate.close(abort=True)
    early.thread.join(20)
    late = Walker(gate)
    assert early.steps == 0 and not early.thread.is_alive() and late.thread.is_alive()
    gate.open()
    late.wait_for_steps(1)
    gate.revoke(late.ticket)
    late.thread.join(20)
    assert not late.thread.is_alive() and gate.is_open


# --- digests and shared memory ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_digest_is_that_of_the_contiguous_bytes(dtype: torch.dtype) -> None:
    tensor = torch.randn(6, 4).to(dtype)
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    assert tensor_digest(tensor) == hashlib.sha256(raw).hexdigest()[:32]
    assert tensor_digest(tensor.t()) == tensor_digest(tensor.t().contiguous())
    changed = tensor.clone()
    changed[5, 3] = changed[5, 3] * 1.01 + 0.01
    assert tensor_digest(changed) != tensor_digest(tensor)


def test_the_sign_of_zero_does_not_count() -> None:
    assert tensor_digest(torch.tensor([-0.0, 1.0])) == tensor_digest(torch.tensor([0.0, 1.0]))
    assert tensor_digest(torch.tensor(2.0)) == tensor_digest(torch.tensor([2.0]))


@pytest.fixture
def segment() -> Iterator[Path]:
    path = Path("/dev/shm") / f"ctrl-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield path
    path.unlink(missing_ok=True)


def test_a_chunk_is_read_where_its_slots_lie(segment: Path) -> None:
    first, second = torch.randn(3, 2), torch.randn(5).bfloat16()
    raw = second.view(torch.uint8).numpy().tobytes()
    segment.write_bytes(first.numpy().tobytes() + b"\0" * 8 + raw)
    slots = (
        Slot(spec("b", (5,), "bfloat16"), 32),
        Slot(spec("a", (3, 2)), 0),
    )
    found = dict(open_chunk(Chunk(segment.name, slots)))
    assert torch.equal(found["a"], first) and torch.equal(found["b"], second)


@pytest.mark.parametrize(("offset", "shape"), [(4, (2, 3)), (0, (7,)), (-4, (1,)), (2, (1,))])
def test_a_slot_outside_its_segment_is_refused(
    segment: Path, offset: int, shape: tuple[int, ...]
) -> None:
    segment.write_bytes(b"\0" * 24)
    with pytest.raises(ValueError, match="does not fit segment"):
        list(open_chunk(Chunk(segment.name, (Slot(spec("a", shape), offset),))))


@pytest.mark.parametrize("name", ["../etc/passwd", "", ".", "a/b"])
def test_a_segment_is_named_not_pointed_to(name: str) -> None:
    with pytest.raises(ValueError, match="no name of a shared-memory segment"):
        list(open_chunk(Chunk(name, ())))


def test_a_missing_segment_is_named() -> None:
    with pytest.raises(ValueError, match="ctrl-none-such does not exist"):
        list(open_chunk(Chunk("ctrl-none-such", ())))


# --- the course of an update ------------------------------------------------------------------


class Steps:
    """Engine steps that record what happened."""

    def __init__(self, fail_at: str = "") -> None:
        self.log: list[str] = []
        self.fail_at = fail_at

    def note(self, what: str) -> None:
        self.log.append(what)
        if what == self.fail_at:
            raise OSError("disk on fire")

    async def begin(self) -> None:
        self.note("begin")

    async def read(self, chunk: Chunk) -> None:
        self.note(f"read {chunk.segment}")

    async def commit(self, version: str) -> None:
        self.note(f"commit {version}")

    async def fail(self) -> None:
        self.note("fail")


MANIFEST = [spec("a"), spec("b")]


def run_update(state: WeightState, steps: Steps, chunks: list[Chunk | Exception]) -> None:
    async def produce() -> AsyncIterator[Chunk]:
        for number, chunk in enumerate(chunks):
            steps.note(f"pull {number}")
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    async def work() -> None:
        await state.replace(
            MANIFEST,
            produce(),
            "v1",
            begin=steps.begin,
            read=steps.read,
            commit=steps.commit,
            fail=steps.fail,
        )

    asyncio.run(work())


A, B = (Chunk(name, (Slot(spec(name), 0),)) for name in "ab")


def test_a_chunk_is_pulled_only_when_the_previous_one_was_read() -> None:
    steps, state = Steps(), WeightState(MANIFEST, "v0")
    run_update(state, steps, [A, B])
    assert steps.log == ["pull 0", "begin", "read a", "pull 1", "read b", "commit v1"]
    assert state.version == "v1"
    state.require_whole()


@pytest.mark.parametrize(
    "first", [ValueError("no weights"), B.__class__("a", (Slot(spec("q"), 0),))]
)
def test_a_failure_before_anything_was_read_leaves_the_engine_whole(
    first: Chunk | Exception,
) -> None:
    steps, state = Steps(), WeightState(MANIFEST, "v0")
    with pytest.raises(EngineError, match="did not start"):
        run_update(state, steps, [first])
    assert steps.log == ["pull 0"] and state.version == "v0"
    state.require_whole()


@pytest.mark.parametrize(
    ("fail_at", "chunks"),
    [
        ("begin", [A, B]),
        ("read a", [A, B]),
        ("read b", [A, B]),
        ("commit v1", [A, B]),
        ("", [A]),
        ("", [A, A]),
        ("", [A, RuntimeError("trainer fell over")]),
    ],
)
def test_a_failure_after_that_breaks_it(fail_at: str, chunks: list[Chunk | Exception]) -> None:
    steps, state = Steps(fail_at), WeightState(MANIFEST, "v0")
    with pytest.raises(EngineBroken, match=r"v1.*failed half-way"):
        run_update(state, steps, chunks)
    assert steps.log[-1] == "fail" and state.version == "v0"
    with pytest.raises(EngineBroken, match="launch the engine again"):
        state.require_whole()
    with pytest.raises(EngineBroken):
        run_update(state, Steps(), [A, B])


# --- wire -------------------------------------------------------------------------------------

completions = st.builds(
    Completion,
    token_ids=st.lists(st.integers(0, 10**6), max_size=5).map(tuple),
    log_probs=st.lists(st.floats(max_value=0.0, allow_nan=False), max_size=5).map(tuple),
    finish_reason=st.sampled_from(["stop", "length", "abort"]),
    spans=st.lists(
        st.builds(VersionSpan, names, st.integers(0, 9), st.integers(0, 9)), max_size=3
    ).map(tuple),
)
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 9),
    temperature=st.floats(0, 2),
    seed=st.none() | st.integers(0, 2**62),
    stop_token_ids=st.lists(st.integers(0, 9), max_size=3).map(tuple),
)
chunks_of = st.builds(
    Chunk,
    names,
    st.lists(st.builds(Slot, specs, st.integers(0, 2**40)), max_size=4).map(tuple),
)


@given(completions, params, chunks_of)
def test_records_survive_the_wire(made: Completion, asked: SamplingParams, chunk: Chunk) -> None:
    def travel(data: object) -> dict:
        return json.loads(json.dumps(data))

    assert wire.completion_from_json(travel(wire.completion_to_json(made))) == made
    assert wire.params_from_json(travel(wire.params_to_json(asked))) == asked
    assert wire.chunk_from_json(travel(wire.chunk_to_json(chunk))) == chunk


@pytest.mark.parametrize("error", [ValueError("x"), EngineBroken("y"), NotImplementedError("z")])
def test_errors_keep_their_type(error: Exception) -> None:
    arrived = wire.error_from_json(wire.error_to_json(error))
    assert type(arrived) is type(error) and str(arrived) == str(error)


def test_other_errors_arrive_as_engine_errors_with_their_name() -> None:
    arrived = wire.error_from_json(wire.error_to_json(KeyError("w")))
    assert type(arrived) is EngineError and str(arrived) == "KeyError: 'w'"


# --- launch -----------------------------------------------------------------------------------


def test_an_engine_does_not_take_itself_for_a_trainer_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SOMETHING_ELSE", "kept")
    made = engine_environment(EngineSpec(name="vllm", model_path="m", threads=3))
    assert not {"RANK", "MASTER_PORT"} & made.keys()
    assert made["SOMETHING_ELSE"] == "kept" and made["OMP_NUM_THREADS"] == "3"
    assert made["HF_HUB_OFFLINE"] == "1"
    other = engine_environment(EngineSpec(name="hf", model_path="m"))
    assert "OMP_NUM_THREADS" not in other
    assert not any(name.startswith("VLLM_USE") for name in other)


def test_engines_that_cannot_be_started_are_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match=r"'sglang' is not available yet; use 'vllm' or 'hf'"):
        require_engine("sglang")
    with pytest.raises(ValueError, match="unknown engine 'vlm'"):
        require_engine("vlm")
    assert "hf" in available_engines()
    monkeypatch.setitem(
        __import__("ctrl_megatron.rollout.engine", fromlist=["x"]).ENGINE_MODULES,
        "vllm",
        "no_such_module_anywhere",
    )
    assert available_engines() == ("hf",)
    with pytest.raises(ValueError, match="'vllm' is not installed here; install the extra"):
        require_engine("vllm")
