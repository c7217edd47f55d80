"""From sharded training weights to whole HF tensors: plan (pure), sources, transport, push."""
