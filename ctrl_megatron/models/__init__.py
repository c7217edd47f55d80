"""HF family tables, Megatron layer specs, and the policy."""
