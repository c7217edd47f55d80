"""Large-scale critique training via reinforcement learning (CTRL) on Megatron-Core."""

__version__ = "0.2.0"
