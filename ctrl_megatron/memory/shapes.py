"""The shapes of a run's models, read from their config.json; no weights are needed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ctrl_megatron.config import Config, Purpose
from ctrl_megatron.errors import UserError, read_json
from ctrl_megatron.models.hf_config import parse_model_shape, parse_shape
from ctrl_megatron.models.lora import lora_of_config, shape_with_adapters
from ctrl_megatron.models.shape import AnyShape, ModelShape, value_model_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShapes:
    """The models of a run."""

    actor: AnyShape
    reference: AnyShape | None
    """None if the objective has no KL, or if the reference is the actor without its adapters."""
    value: AnyShape | None
    """None if nothing reads values."""
    reward_model: AnyShape | None = None
    """None if no model rewards texts."""
    further: tuple[ModelShapes, ...] = ()
    """Those of each further policy."""
    proxy: ModelShape | None = None
    """The model of the proxy's own engines; None if it has none, and for one that has no shape
    here, since these engines run any model."""
    proxy_is_unknown: str = ""
    """The reason why such a model has no shape here."""

    @property
    def trained_shapes(self) -> tuple[AnyShape, ...]:
        own = (one for one in (self.actor, self.value) if one is not None)
        return (*own, *(shape for policy in self.further for shape in policy.trained_shapes))


def model_shapes(
    config: Config,
    purpose: Purpose,
    single_file: Path | None = None,
    proxy_file: Path | None = None,
) -> ModelShapes:
    """The shapes of the configured directories, or of one file in place of all of them but a proxy
    on engines of its own, whose file is ``proxy_file``.

    Raises ValueError for a file that does not exist or describes a model that is not supported.
    """
    family = config.actor_rollout_ref
    own, strategy = family.model.path, family.actor.strategy

    def shape_of(directory: str | None) -> AnyShape:
        file = _file(directory or own, single_file, "--model-config")
        return parse_shape(read_json(file), str(file), strategy)

    reference = value = None
    if purpose == "rl" and config.needs_reference and not config.reference_is_base:
        reference = shape_of(family.ref.model.path)
    if purpose == "rl" and config.needs_value_model:
        value = value_model_shape(shape_of(config.critic.model.path))
        value = shape_with_adapters(value, lora_of_config(config, value=True))
    rewarding = None
    if purpose == "rl" and config.needs_reward_model:
        rewarding = value_model_shape(shape_of(config.reward_model.model.path), head_bias=False)
    actor = shape_with_adapters(shape_of(own), lora_of_config(config))
    others = config.agents[1:] if purpose == "rl" else ()
    proxy, unknown = None, ""
    if purpose == "rl" and config.has_proxy_engines:
        file = _file(family.proxy.model.path or own, proxy_file, "--proxy-config")
        try:
            proxy = parse_model_shape(read_json(file), str(file))
        except UserError as error:
            unknown = str(error)
    return ModelShapes(
        actor=actor,
        reference=reference,
        value=value,
        reward_model=rewarding,
        further=tuple(model_shapes(own, purpose, single_file) for own in others),
        proxy=proxy,
        proxy_is_unknown=unknown,
    )


def _file(directory: str, given: Path | None, flag: str) -> Path:
    file = given or Path(directory) / "config.json"
    if not file.is_file():
        raise UserError(
            f"{file} does not exist; a plan needs the model's shape, not its weights: give "
            f"{flag} FILE with a Hugging Face config.json (two are in examples/shapes/)"
        )
    return file
