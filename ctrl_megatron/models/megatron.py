"""The strategy ``megatron``: a decoder split over tensor, pipeline, context and expert ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from ctrl_megatron.models.adapters import merged_parameter
from ctrl_megatron.models.build import build_chunks, output_weight
from ctrl_megatron.models.layer_spec import fuse_weight_gradients
from ctrl_megatron.models.micro_batch import MicroBatch
from ctrl_megatron.models.optimizer import ModelOptimizer, OptimizerOptions
from ctrl_megatron.models.shape import ModelShape
from ctrl_megatron.models.shards import ShardParam
from ctrl_megatron.models.strategy import ForwardStep, ModelOptions
from ctrl_megatron.parallel.divergence import OutputLayer
from ctrl_megatron.parallel.groups import ProcessGroups


class MegatronStrategy:
    """A ``models.strategy.Strategy``."""

    packs_rows = True

    def __init__(self, shape: ModelShape, groups: ProcessGroups, options: ModelOptions) -> None:
        self._shape, self._groups, self._options = shape, groups, options
        self.models = build_chunks(shape, groups, options.build)
        self.config = self.models[0].config
        self.chunks: list[Any] = list(self.models)
        """The models, in what sums their gradients if they learn."""

    def choose_row_packing(self) -> None:
        """As in ``Strategy``: there is one way."""

    def rank_part(self, chunk: int, param: ShardParam) -> torch.Tensor:
        model = self.models[chunk]
        named = dict(model.named_buffers() if param.buffer else model.named_parameters())
        return named[param.name]

    def engine_part(self, chunk: int, param: str) -> torch.Tensor:
        return merged_parameter(self.models[chunk], param)

    def weights(self) -> Iterator[torch.Tensor]:
        for model in self.models:
            yield from model.parameters()

    def gradient_buffers(self) -> Iterator[torch.Tensor]:
        for chunk in self.chunks if self._options.optimizer else ():
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data

    def make_trainable_or_frozen(self, places: Iterable[tuple[ShardParam, torch.Tensor]]) -> None:
        options = self._options.optimizer
        for param, weight in places:
            learns = param.trained and not param.buffer and options is not None
            weight.requires_grad_(learns)
            # Megatron sums the gradients of unmarked weights over the data-parallel ranks.
            weight.allreduce = param.mesh == "dense"  # type: ignore[attr-defined]
            for cut in param.cuts:
                # Megatron marks split weights when it initialises them, which is skipped here;
                # unmarked, they would count as copies and be missing in the gradient norm.
                weight.tensor_model_parallel = True  # type: ignore[attr-defined]
                weight.partition_dim = cut.dim  # type: ignore[attr-defined]
                weight.partition_stride = 1  # type: ignore[attr-defined]
            if param.mesh == "expert" and not param.cuts:
                # Of the ranks that have a copy the first one counts: among an expert's tensor
                # ranks, not among those of other layers.
                first = self._groups.place.indices_on("etp") == (("etp", 0),)
                weight.tensor_model_parallel = first  # type: ignore[attr-defined]
        if options is None:
            for model in self.models:
                model.eval()
        else:
            self._learn(options)

    def _learn(self, optimizer: OptimizerOptions) -> None:
        """Wrap the models so that gradients exist and are summed over the data-parallel ranks."""
        if self._options.build.overrides.get("gradient_accumulation_fusion", True):
            fuse_weight_gradients(self.models)
        # A bucket's sum overlaps the backward pass of the last micro-batch.
        overlaps = self._groups.layout.replicas("dense") > 1
        self.chunks = [
            DistributedDataParallel(
                self.config,
                DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True,
                    use_distributed_optimizer=optimizer.distributed,
                    overlap_grad_reduce=overlaps,
                    # The optimizer looks at the norm of all gradients and names the key.
                    check_for_nan_in_grad=False,
                ),
                model,
                disable_bucketing=index > 0,
                pg_collection=self._groups.megatron,
            )
            for index, model in enumerate(self.models)
        ]
        if overlaps:
            wait: Any = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = wait if len(wait) > 1 else wait[0]
        self.config.finalize_model_grads_func = _finalise_without_division

    def start_optimizer(self) -> ModelOptimizer:
        options = self._options
        assert options.optimizer is not None
        return ModelOptimizer(self.chunks, options.optimizer, options.build, self._groups)

    def padded_micro_batch_count(self, own: int) -> int:
        """As in ``Strategy``. Data ranks that compute a layer's experts together take part in each
        other's micro-batches, so that all of them take the most of any; other ranks take ``own``.
        The interleaved schedule needs a multiple of the stages."""
        layout = self._groups.layout
        most = self._groups.max_over_data(own) if layout.experts_join_data_ranks else own
        multiple = layout.pipeline if layout.virtual_pipeline > 1 else 1
        return -(-most // multiple) * multiple

    def zero_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()

    def run_passes(
        self, step: ForwardStep, micro_batches: Sequence[MicroBatch], *, backward: bool
    ) -> list[Any]:
        """As in ``Strategy``, by Megatron's schedule for the layout."""
        layout = self._groups.layout
        virtual = layout.virtual_pipeline if layout.virtual_pipeline > 1 else None
        schedule = get_forward_backward_func(pp_size=layout.pipeline, vp_size=virtual)
        return schedule(
            forward_step_func=step,
            data_iterator=[iter(micro_batches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(micro_batches),
            # With variable_seq_lengths Megatron only divides these two; shapes are sent with the
            # tensors.
            seq_length=layout.token_multiple,
            micro_batch_size=1,
            forward_only=not backward,
            p2p_communicator=P2PCommunicator(
                pp_group=self._groups.pipeline_group, config=self.config
            ),
            pg_collection=self._groups.megatron,
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.config.params_dtype

    def output_layer(
        self, module: GPTModel, micro: MicroBatch, output: torch.Tensor
    ) -> OutputLayer:
        # (1, T, H) -> (T, 1, H); under sequence parallelism a rank has T / tensor size of them.
        # In the backward pass both regions sum the gradients of the tensor ranks' vocabularies.
        hidden, tensor = output.transpose(0, 1), self._groups.tensor_group
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=tensor
            )
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=tensor)
        return OutputLayer(
            hidden=hidden.squeeze(1)[micro.predictors],
            weight=output_weight(module),
            vocab_size=self._shape.vocab_size,
            chunk=self._options.logprob_chunk,
            tensor_rank=self._groups.place.tp,
            tensor_size=self._groups.layout.tensor,
            group=tensor,
            is_embedding=module.pre_process and module.share_embeddings_and_output_weights,
        )

    def output_weight(self) -> torch.Tensor | None:
        last = self.models[-1]
        return output_weight(last).detach().clone() if last.post_process else None

    def values(self, module: GPTModel, micro: MicroBatch, output: torch.Tensor) -> torch.Tensor:
        values = output.transpose(0, 1)
        if self.config.sequence_parallel:
            # Every tensor rank computes the same loss from the gathered values, so its gradient
            # is split, not summed.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self._groups.tensor_group
            )
        return values.flatten()[micro.predictors]


def _finalise_without_division(
    model: list[Any], num_tokens: torch.Tensor | None = None, **kwargs: Any
) -> None:
    """Megatron's gradient synchronisation, without its division by a token count."""
    finalize_model_grads(model, None, **kwargs)
