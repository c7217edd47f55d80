"""HF import and export, saving and resuming."""
